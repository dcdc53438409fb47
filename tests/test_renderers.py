"""Renderers: histories extend token for token, on a byte tokenizer and on one whose merges can straddle a boundary."""

import random
from collections.abc import Sequence
from pathlib import Path

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.tokenizer import ByteTokenizer, Tokenizer
from rl.messages import Message
from rl.renderers import SMOLLM2_SYSTEM, ChatML, Qwen3, Renderer, SmolLM2, TokenizerLike

REAL = Path(__file__).parents[1] / "runs/models/smollm2-135m-instruct"
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>", "<tool_response>", "</tool_response>")
MERGES = ("json", "jsonp", "renderer", "user", "assistant", "user\n", "\n\n", "\n\n\n", " the", "<|", "|>", "im_end")

# tokenizer.chat_template of SmolLM2-135M-Instruct
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Merging:
    """Longest match over bytes and a few merges: the same string has several splits, as with a trained BPE."""

    eos_ids = (256,)

    def __init__(self) -> None:
        merges = [text.encode() for text in MERGES]
        self.pieces = [bytes([i]) for i in range(256)] + [text.encode() for text in SPECIALS] + merges
        self.special = {token: 256 + i for i, token in enumerate(SPECIALS)}
        self.merges = sorted(((text, 256 + len(SPECIALS) + i) for i, text in enumerate(merges)), key=lambda m: -len(m[0]))

    def special_id(self, token: str) -> int:
        return self.special[token]

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        specials = [(token.encode(), i) for token, i in self.special.items()] if allow_special else []
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            single = (data[at : at + 1], data[at])
            piece, token = next((m for m in [*specials, *self.merges] if data.startswith(m[0], at)), single)
            ids.append(token)
            at += len(piece)
        return ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        return b"".join(self.pieces[i] for i in ids).decode(errors="replace")


BYTES, MERGING = ByteTokenizer(), Merging()


def renderers() -> list[Renderer]:
    """Every renderer, with each tokenizer that has its control tokens."""
    simple: list[TokenizerLike] = [BYTES, MERGING]
    found: list[Renderer] = []
    for tokenizer in simple:
        found += [ChatML(tokenizer), SmolLM2(tokenizer), SmolLM2(tokenizer, default_system=False)]
    return [*found, Qwen3(MERGING), Qwen3(MERGING, thinking=False)]


texts = st.lists(st.sampled_from([*SPECIALS, *MERGES, "a", " ", "\n", "é", "3+4=", "p"]), max_size=5).map("".join)
turns = st.builds(lambda role, content: Message(role=role, content=content), st.sampled_from(["user", "tool"]), texts)
histories = st.lists(turns, min_size=1, max_size=3)


@st.composite
def cases(draw: st.DrawFn) -> tuple[Renderer, list[Message], Message, list[Message]]:
    """A renderer, a history, the assistant's turn after it, and what comes next."""
    renderer = draw(st.sampled_from(renderers()))
    said: Message = {"role": "assistant", "content": draw(texts)}
    if isinstance(renderer, Qwen3) and renderer.thinking and draw(st.booleans()):
        said["thinking"] = draw(texts)
    return renderer, draw(histories), said, draw(st.lists(turns, max_size=2))


def sampled_ids(renderer: Renderer, history: list[Message], said: Message) -> list[int]:
    """What sampling `said` token for token would have given: the turn without the separator after it."""
    before, after = renderer.render(history), renderer.render([*history, said], add_generation_prompt=False)
    assert after[: len(before)] == before
    return after[len(before) : -1]  # a newline is one token in both tokenizers


@given(cases())
def test_history_extends(case: tuple[Renderer, list[Message], Message, list[Message]]) -> None:
    renderer, history, said, new = case
    before, ids = renderer.render(history), sampled_ids(renderer, history, said)
    whole = renderer.render([*history, said, *new])
    assert renderer.extends
    assert ids[-1] in renderer.stop_ids
    assert whole == before + ids + renderer.bridge(before + ids, new)
    # cut by length: the end token is added once, unsampled
    assert whole == before + ids[:-1] + renderer.bridge(before + ids[:-1], new)


@given(cases())
def test_parse_gives_the_message_back(case: tuple[Renderer, list[Message], Message, list[Message]]) -> None:
    renderer, history, said, _ = case
    ids = sampled_ids(renderer, history, said)
    assert renderer.parse(ids) == said
    assert renderer.parse([*ids, *ids]) == said


@given(histories)
def test_control_tokens_in_text_are_text(history: list[Message]) -> None:
    for renderer in renderers():
        plain = renderer.render([{"role": message["role"], "content": ""} for message in history])
        ids = renderer.render(history)
        assert [i for i in ids if 256 <= i < 256 + len(SPECIALS)] == [i for i in plain if 256 <= i < 256 + len(SPECIALS)]


plain_texts = st.text(st.sampled_from("ab \n+=é"), max_size=12)


@given(st.lists(st.tuples(st.sampled_from(["system", "user", "tool"]), plain_texts), min_size=1, max_size=4), st.booleans())
def test_smollm2_equals_its_own_template(turns: list[tuple[str, str]], generate: bool) -> None:
    messages: list[Message] = [{"role": role, "content": content} for role, content in turns]
    template = jinja2.Environment(keep_trailing_newline=True).from_string(SMOLLM2_TEMPLATE)
    text = template.render(messages=messages, add_generation_prompt=generate)
    for tokenizer in (BYTES, MERGING):
        assert SmolLM2(tokenizer).render(messages, add_generation_prompt=generate) == tokenizer.encode(text, allow_special=True)
    said: Message = {"role": "assistant", "content": "42"}
    text = template.render(messages=[*messages, said, *messages[1:]], add_generation_prompt=generate)
    assert SmolLM2(BYTES).render([*messages, said, *messages[1:]], add_generation_prompt=generate) == BYTES.encode(text, allow_special=True)


@pytest.mark.real
@pytest.mark.skipif(not REAL.exists(), reason="make model has not been run")
def test_smollm2_with_its_own_tokenizer() -> None:
    """Equal to the file's template, except where an answer's leading newlines would melt into the header (C4)."""
    tokenizer, rng = Tokenizer.load(REAL), random.Random(0)
    assert tokenizer.chat_template is not None
    template = jinja2.Environment(keep_trailing_newline=True).from_string(tokenizer.chat_template)
    pieces = ["Who accepts", "\n", "\n\n", " ", "  ", "é", "3+4=", "日本", "\t", "'s", "_x", "json", " the", "."]
    for _ in range(300):
        user, said = ("".join(rng.choices(pieces, k=rng.randint(0, 6))) for _ in range(2))
        messages: list[Message] = [{"role": "user", "content": user}, {"role": "assistant", "content": said.lstrip()}]
        text = template.render(messages=[*messages, messages[0]], add_generation_prompt=True)
        ids = SmolLM2(tokenizer).render([*messages, messages[0]])
        assert ids == tokenizer.encode(text, allow_special=True)


def test_default_system_message_is_an_option() -> None:
    messages: list[Message] = [{"role": "user", "content": "Hi"}]
    with_it, without = SmolLM2(BYTES).render(messages), SmolLM2(BYTES, default_system=False).render(messages)
    assert SMOLLM2_SYSTEM in BYTES.decode(with_it) and with_it[-len(without) :] == without
    assert without == ChatML(BYTES).render(messages) != with_it
    own = SmolLM2(BYTES).render([{"role": "system", "content": "S"}, *messages])
    assert BYTES.decode(own) == "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"


def test_sampled_ids_are_never_encoded_again() -> None:
    """C1: another split of the same string stays as sampled, and the next prompt begins with it."""
    renderer = ChatML(MERGING)
    prompt = renderer.render([{"role": "user", "content": "name a package"}])
    end = MERGING.special_id("<|im_end|>")
    sampled = [*MERGING.encode("json"), *MERGING.encode("p"), *MERGING.encode("renderer"), end]
    said = renderer.parse(sampled)
    assert said["content"] == "jsonprenderer" and MERGING.encode(said["content"]) != sampled[:-1]
    following = prompt + sampled + renderer.bridge(prompt + sampled, [{"role": "tool", "content": "ok"}])
    assert following[: len(prompt) + len(sampled)] == prompt + sampled


def test_the_turn_separator_comes_exactly_once() -> None:
    """C3: after the sampled end token comes one unsampled newline, then the next turn."""
    renderer = Qwen3(MERGING)
    prompt = renderer.render([{"role": "user", "content": "weather?"}])
    end, start = MERGING.special_id("<|im_end|>"), MERGING.special_id("<|im_start|>")
    sampled = [*MERGING.encode("let me look"), end]
    bridge = renderer.bridge(prompt + sampled, [{"role": "tool", "content": "sun"}, {"role": "tool", "content": "rain"}])
    assert bridge[:2] == [ord("\n"), start]
    assert MERGING.decode(bridge) == (
        "\n<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    cut = renderer.bridge(prompt + sampled[:-1], [{"role": "user", "content": "go on"}])
    assert cut[:3] == [end, ord("\n"), start]


def test_a_boundary_never_lies_inside_a_merge() -> None:
    """C4: an answer that starts with newlines does not change the header's ids."""
    renderer = ChatML(MERGING)
    history: list[Message] = [{"role": "user", "content": "Hi"}]
    whole = renderer.render([*history, {"role": "assistant", "content": "\n\nyes"}])
    assert whole[: len(renderer.render(history))] == renderer.render(history)


def test_qwen3_thinking() -> None:
    history: list[Message] = [{"role": "user", "content": "2+2?"}]
    asked = "<|im_start|>user\n2+2?<|im_end|>\n<|im_start|>assistant\n"
    assert MERGING.decode(Qwen3(MERGING).render(history)) == asked
    off = Qwen3(MERGING, thinking=False)
    assert MERGING.decode(off.render(history)) == asked + "<think>\n\n</think>\n\n"
    on = Qwen3(MERGING)
    sampled = MERGING.encode("<think>\nfour\n</think>\n\n4<|im_end|>", allow_special=True)
    assert on.parse(sampled) == {"role": "assistant", "content": "4", "thinking": "four"}
    assert on.parse(sampled[:4]) == {"role": "assistant", "content": "", "thinking": "fo"}
    again = on.render([*history, on.parse(sampled), {"role": "user", "content": "sure?"}])
    assert "<think>\nfour\n</think>" in MERGING.decode(again)
    with pytest.raises(ValueError, match=r"^thinking: "):
        off.render([{"role": "assistant", "content": "4", "thinking": "four"}])
    with pytest.raises(ValueError, match=r"^thinking: "):
        ChatML(BYTES).render([{"role": "assistant", "content": "4", "thinking": "four"}])


def test_mistakes_are_refused() -> None:
    renderer = ChatML(BYTES)
    with pytest.raises(ValueError, match=r"^messages: "):
        renderer.render([])
    with pytest.raises(ValueError, match=r"^messages: unknown role 'robot'"):
        renderer.render([{"role": "robot", "content": ""}])
    with pytest.raises(ValueError, match=r"^new_messages: "):
        renderer.bridge([1], [{"role": "assistant", "content": "x"}])


def test_worked_examples_are_a_shared_token_prefix() -> None:
    examples: list[Message] = [{"role": "user", "content": "Q1"}, {"role": "assistant", "content": "A1"}]
    for renderer in renderers():
        one = renderer.render([*examples, {"role": "user", "content": "first"}])
        two = renderer.render([*examples, {"role": "user", "content": "second"}])
        shared = renderer.render(examples, add_generation_prompt=False)
        assert one[: len(shared)] == two[: len(shared)] == shared
