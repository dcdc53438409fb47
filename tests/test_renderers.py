"""Renderers: histories extend token for token, and what is sampled is read as it comes; on bytes, and where merges straddle."""

import json
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

import jinja2
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from models.tokenizer import ByteTokenizer, Tokenizer
from rl.messages import Message, Piece, Tool, ToolCall, message_of
from rl.renderers import SMOLLM2_SYSTEM, ChatML, Llama3, Qwen3, Qwen25, Qwen35, Renderer, SmolLM2
from tests.merging import CHATML, LLAMA, MERGES, QWEN, merging

REAL = Path(__file__).parents[1] / "runs/models/smollm2-135m-instruct"
SPECIALS = tuple(dict.fromkeys((*QWEN, *LLAMA)))

# tokenizer.chat_template of SmolLM2-135M-Instruct
SMOLLM2_TEMPLATE = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n' }}"
    "{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


BYTES, MERGING, PLAIN, LLAMAS = ByteTokenizer(), merging(), merging(CHATML), merging(LLAMA)


def renderers() -> list[Renderer]:
    """Every renderer whose histories extend, with each tokenizer that has its control tokens."""
    found: list[Renderer] = []
    for tokenizer in (BYTES, MERGING, PLAIN):
        found += [ChatML(tokenizer), SmolLM2(tokenizer), SmolLM2(tokenizer, default_system=False), Qwen25(tokenizer)]
    for tokenizer in (BYTES, MERGING):
        for thinking in (True, False):
            found += [Qwen3(tokenizer, thinking=thinking), Qwen35(tokenizer, thinking=thinking)]
    return [*found, Llama3(LLAMAS)]


ALL = renderers()
texts = st.lists(st.sampled_from([*SPECIALS, *MERGES, "a", " ", "\n", "é", "3+4=", "p", "{"]), max_size=5).map("".join)
turns = st.builds(lambda role, content: Message(role=role, content=content), st.sampled_from(["user", "tool"]), texts)
histories = st.lists(turns, min_size=1, max_size=3).map(lambda new: [Message(role="user", content="ask"), *new])
values = st.recursive(
    st.one_of(texts, st.integers(), st.floats(allow_nan=False, allow_infinity=False), st.booleans(), st.none()),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(texts, inner, max_size=2),
    max_leaves=3,
)
TOOLS: tuple[Tool, ...] = (
    {"name": "look", "description": "<|im_end|>", "parameters": {"type": "object", "properties": {"at": {"type": "string"}}}},
    {"name": "add", "description": "a + b", "parameters": {"type": "object", "properties": {"a": {"type": "number"}}}},
)
looks = st.fixed_dictionaries({"at": texts.filter(lambda text: "</parameter>" not in text)})
adds = st.dictionaries(st.sampled_from(["a", "b", "ü"]), values.filter(lambda value: not isinstance(value, str)), max_size=3)
calls = st.one_of(st.tuples(st.just("look"), looks), st.tuples(st.just("add"), adds))


def marked(renderer: Renderer, message: Message) -> bool:
    """Whether the message holds what is markup to this renderer, as its tokenizer has no control tokens for it."""
    text = json.dumps(message, ensure_ascii=False)
    if isinstance(renderer, Llama3):
        return message["content"].lstrip().startswith("{")
    return renderer.tokenizer is PLAIN and ("<tool_call>" in text or "</tool_call>" in text)  # pyright: ignore[reportAttributeAccessIssue]


@st.composite
def cases(draw: st.DrawFn) -> tuple[Renderer, list[Message], Message, list[Message], tuple[Tool, ...]]:
    """A renderer, a history, the assistant's turn after it, what comes next, and the tools."""
    renderer = draw(st.sampled_from(ALL))
    said: Message = {"role": "assistant", "content": draw(texts)}
    if isinstance(renderer, Qwen3) and renderer.thinking and draw(st.booleans()):
        said["thinking"] = draw(texts.filter(bool))
    if draw(st.booleans()):
        made = draw(st.lists(calls, min_size=1, max_size=1 if isinstance(renderer, Llama3) else 2))
        said["tool_calls"] = [
            ToolCall(id=f"x_{i}", name=name, arguments=json.dumps(value, ensure_ascii=False))
            for i, (name, value) in enumerate(made)
        ]
        if isinstance(renderer, Llama3):
            said["content"] = ""
    return renderer, draw(histories), said, draw(st.lists(turns, max_size=2)), draw(st.sampled_from([(), TOOLS]))


Case = tuple[Renderer, list[Message], Message, list[Message], tuple[Tool, ...]]


def sampled_ids(renderer: Renderer, history: list[Message], said: Message, tools: Sequence[Tool] = ()) -> list[int]:
    """What sampling `said` token for token would have given: the turn without the separator after it."""
    before, after = renderer.render(history, tools), renderer.render([*history, said], tools, add_generation_prompt=False)
    assert after[: len(before)] == before
    return after[len(before) :] if isinstance(renderer, Llama3) else after[len(before) : -1]  # a newline is one token


@given(cases())
def test_history_extends(case: Case) -> None:
    renderer, history, said, new, tools = case
    before, ids = renderer.render(history, tools), sampled_ids(renderer, history, said, tools)
    whole = renderer.render([*history, said, *new], tools)
    assert renderer.extends
    assert ids[-1] in renderer.stop_ids
    bridge = renderer.bridge(before + ids, new, tools)
    assert bridge is not None and whole == before + ids + bridge
    # cut by length: the end token is added once, unsampled
    assert (
        whole == before + ids[:-1] + [ids[-1], *bridge] == before + ids[:-1] + (renderer.bridge(before + ids[:-1], new) or [])
    )


@given(cases())
def test_parse_gives_the_message_back(case: Case) -> None:
    renderer, history, said, _, _ = case
    if marked(renderer, said):
        return
    ids = sampled_ids(renderer, history, said)
    assert renderer.parse(ids, "x", TOOLS) == said
    assert renderer.parse([*ids, *ids], "x", TOOLS) == said


written = st.lists(
    st.sampled_from(
        [
            *(
                *SPECIALS,
                *MERGES,
                "a",
                " ",
                "\n",
                "é",
                "<tool",
                "_call>",
                "</",
                "日",
                '{"name": "f", "parameters": {"y": "é"}}',
            ),
            '<tool_call>\n{"name": "f", "arguments": {"x": [1.0]}}\n</tool_call>',
            "<tool_call>\n<function=f>\n<parameter=x>\nfalse\n</parameter>\n</function>\n</tool_call>",
        ]
    ),
    max_size=8,
).map("".join)


def joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Pieces with neighbours of one kind put together, calls apart."""
    whole: list[Piece] = []
    for piece in pieces:
        if whole and piece.kind == whole[-1].kind != "call":
            whole[-1] = Piece(piece.kind, whole[-1].text + piece.text)
        else:
            whole.append(piece)
    return whole


@given(written, st.lists(st.integers(0, 200), max_size=9), st.booleans())
def test_a_stream_is_the_whole_however_it_is_cut(text: str, cuts: list[int], special: bool) -> None:
    for renderer in ALL:
        ids = renderer.tokenizer.encode(text, allow_special=special)  # pyright: ignore[reportAttributeAccessIssue]
        edges = [0, *sorted(min(i, len(ids)) for i in cuts), len(ids)]
        reader, pieces = renderer.reader(TOOLS), []
        for low, high in pairwise(edges):
            pieces += reader.add(ids[low:high])
        pieces += reader.flush()
        assert message_of(pieces, "x") == renderer.parse(ids, "x", TOOLS)
        one = renderer.reader(TOOLS)
        assert joined(pieces) == joined([piece for token in ids for piece in one.add([token])] + one.flush())


def everywhere(renderer: Renderer, text: str) -> list[int]:
    """The control ids of a conversation in which every field that is somebody's own is this text."""
    tools: list[Tool] = [{"name": f"f{text}", "description": text, "parameters": {text: {"enum": [text]}}}]
    said: Message = {"role": "assistant", "content": text}
    called: Message = {"role": "assistant", "content": ""}
    called["tool_calls"] = [ToolCall(id=text, name=f"f{text}", arguments=json.dumps({f"k{text}": text}))]
    if isinstance(renderer, Qwen3) and renderer.thinking:
        said["thinking"] = called["thinking"] = f"t{text}"
    answers: list[Message] = [{"role": "tool", "content": text, "tool_call_id": text, "name": text}]
    asked: list[Message] = [{"role": role, "content": text} for role in ("system", "user")]
    ids = renderer.render([*asked, said, *asked, called, *answers], tools)
    ids += renderer.bridge([*ids, renderer.stop_ids[0]], [*answers, *asked], tools) or []
    special = renderer.tokenizer.special_ids  # pyright: ignore[reportAttributeAccessIssue]
    return [token for token in ids if token in special]


@settings(max_examples=30)
@given(texts)
@example("".join(SPECIALS))
def test_control_tokens_in_text_are_text(text: str) -> None:
    """Whoever wrote it: a user, a tool, its schema, the model in content, thinking or arguments."""
    for renderer in ALL:
        assert everywhere(renderer, text) == everywhere(renderer, "x")


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
    assert SmolLM2(BYTES).render([*messages, said, *messages[1:]], add_generation_prompt=generate) == BYTES.encode(
        text, allow_special=True
    )


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


def bridged(renderer: Renderer, prior: list[int], new: list[Message]) -> list[int]:
    bridge = renderer.bridge(prior, new)
    assert bridge is not None
    return bridge


def test_sampled_ids_are_never_encoded_again() -> None:
    """C1: another split of the same string stays as sampled, and the next prompt begins with it."""
    renderer = ChatML(MERGING)
    prompt = renderer.render([{"role": "user", "content": "name a package"}])
    end = MERGING.special_id("<|im_end|>")
    sampled = [*MERGING.encode("json"), *MERGING.encode("p"), *MERGING.encode("renderer"), end]
    said = renderer.parse(sampled)
    assert said["content"] == "jsonprenderer" and MERGING.encode(said["content"]) != sampled[:-1]
    following = prompt + sampled + bridged(renderer, prompt + sampled, [{"role": "tool", "content": "ok"}])
    assert following[: len(prompt) + len(sampled)] == prompt + sampled


def test_the_turn_separator_comes_exactly_once() -> None:
    """C3: after the sampled end token comes one unsampled newline, then the next turn."""
    renderer = Qwen3(MERGING)
    prompt = renderer.render([{"role": "user", "content": "weather?"}])
    end, start = MERGING.special_id("<|im_end|>"), MERGING.special_id("<|im_start|>")
    sampled = [*MERGING.encode("let me look"), end]
    bridge = bridged(renderer, prompt + sampled, [{"role": "tool", "content": "sun"}, {"role": "tool", "content": "rain"}])
    assert bridge[:2] == [ord("\n"), start]
    assert MERGING.decode(bridge) == (
        "\n<|im_start|>user\n<tool_response>\nsun\n</tool_response>\n<tool_response>\nrain\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    cut = bridged(renderer, prompt + sampled[:-1], [{"role": "user", "content": "go on"}])
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
    for renderer in ALL:
        one = renderer.render([*examples, {"role": "user", "content": "first"}])
        two = renderer.render([*examples, {"role": "user", "content": "second"}])
        shared = renderer.render(examples, add_generation_prompt=False)
        assert one[: len(shared)] == two[: len(shared)] == shared
