"""Chat formats against the models' own templates; calls as they were written, and as text where they are none."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from inference.chat import ChatTemplate
from models.tokenizer import Tokenizer
from rl.graph import Graph
from rl.messages import Message, Tool, ToolCall
from rl.records import Call, Episode
from rl.renderers import RENDERERS, ChatML, Llama3, Qwen3, Qwen25, Qwen35, Renderer, SmolLM2, Template
from tests.chat_templates import QWEN3, QWEN25
from tests.merging import LLAMA, QWEN, merging

REAL = Path(__file__).parents[1] / "runs/models/smollm2-135m-instruct"

TOKENIZER = merging()
TOOL: Tool = {
    "name": "look",
    "description": "Looks > there",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}, "far": {"type": "boolean"}}, "required": ["at"]},
}


def user(content: str) -> Message:
    return {"role": "user", "content": content}


def answer(content: str) -> Message:
    return {"role": "tool", "content": content, "tool_call_id": "c_0", "name": "look"}


def said(content: str, *arguments: str, thinking: str = "") -> Message:
    message: Message = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if arguments:
        message["tool_calls"] = [ToolCall(id=f"c_{i}", name="look", arguments=text) for i, text in enumerate(arguments)]
    return message


def written(renderer: Any, ids: Sequence[int] | None) -> str:
    assert ids is not None
    return renderer.tokenizer.decode(ids)


def sampled(renderer: Any, text: str) -> list[int]:
    return renderer.tokenizer.encode(text, allow_special=True)


CONVERSATIONS: list[list[Message]] = [
    [user("hi")],
    [{"role": "system", "content": "be\nkind"}, user("hi"), said("ho"), user("so?")],
    [
        user("what is 'é'?"),
        said("I look.", '{"at":"é","far":false}', "{}"),
        answer("json"),
        answer("no"),
        said("It is"),
        user("?"),
    ],
    [user("look"), said("", '{"at": "x", "n": [1.0, null]}'), answer("nothing"), {"role": "system", "content": "go on"}],
]
THOUGHTFUL: list[list[Message]] = [
    [
        user("look"),
        said("", '{"at": "x"}', thinking="well"),
        answer("it"),
        said("a", '{"at": "y"}', thinking="so"),
        answer("is"),
    ],
    [user("2+2"), said("4", thinking="it is\n\nfour"), user("sure?"), said("yes", "{}", thinking="hm"), answer("4")],
]


@pytest.mark.parametrize("tools", [(), (TOOL, TOOL)])
@pytest.mark.parametrize("messages", CONVERSATIONS)
def test_qwen25_is_its_own_template(messages: list[Message], tools: tuple[Tool, ...]) -> None:
    own = Template(merging(QWEN, QWEN25))
    for generate in (True, False):
        assert Qwen25(TOKENIZER).render(messages, tools, generate) == own.render(messages, tools, generate)


@pytest.mark.parametrize("tools", [(), (TOOL, TOOL)])
@pytest.mark.parametrize("messages", [*CONVERSATIONS, *THOUGHTFUL])
def test_qwen3_is_its_own_template(messages: list[Message], tools: tuple[Tool, ...]) -> None:
    own, plain = Template(merging(QWEN, QWEN3)), Qwen3(TOKENIZER, keep_thinking=False)
    assert plain.render(messages, tools) == own.render(messages, tools)
    one_turn = [message for message in messages if message["role"] != "user"] != messages[1:]
    kept = Qwen3(TOKENIZER).render(messages, tools)
    assert one_turn or kept == own.render(messages, tools)
    if len(messages) == 1:
        off = Template(merging(QWEN, QWEN3), variables={"enable_thinking": False})
        assert Qwen3(TOKENIZER, thinking=False).render(messages, tools) == off.render(messages, tools)


def test_tools_are_the_same_ids_in_any_form() -> None:
    """C2: what a client's form has in other places and orders, the model reads in one."""
    chat = {"type": "function", "function": {"parameters": TOOL["parameters"], "description": "d", "name": "look"}}
    flat = {"name": "look", "strict": False, "type": "function", "description": "d", "parameters": TOOL["parameters"]}
    tools = [
        Tool(name=form["name"], description=form["description"], parameters=form["parameters"])
        for form in (chat["function"], flat)
    ]
    for renderer in (Qwen25(TOKENIZER), Qwen3(TOKENIZER), Qwen35(TOKENIZER), Llama3(merging(LLAMA))):
        one, two = (renderer.render([user("hi")], [tool]) for tool in tools)
        assert one == two
    text = written(Qwen3(TOKENIZER), Qwen3(TOKENIZER).render([user("hi")], [TOOL]))
    assert '<tools>\n{"type": "function", "function": {"name": "look", "description": "Looks > there", "parameters": {' in text


@pytest.mark.parametrize("arguments", ['{"x": false}', '{"b":1,  "a":1.0}', '{"x": "\\u00e9</tool_call"}', "{ }"])
def test_arguments_stay_as_they_were_written(arguments: str) -> None:
    """C2: `false` is never `False`, 1.0 never 1, and keys keep their order."""
    hermes = f'<tool_call>\n{{"arguments": {arguments}, "name": "look"}}\n</tool_call><|im_end|>'
    for renderer in (ChatML(TOKENIZER), Qwen25(TOKENIZER), Qwen3(TOKENIZER)):
        message = renderer.parse(sampled(renderer, hermes), "m")
        assert message == {**said("", arguments), "tool_calls": [{"id": "m_0", "name": "look", "arguments": arguments}]}
    llama = Llama3(merging(LLAMA))
    message = llama.parse(sampled(llama, f'{{"name": "look", "parameters": {arguments}}}<|eot_id|>'), "m")
    assert message == {**said("", arguments), "tool_calls": [{"id": "m_0", "name": "look", "arguments": arguments}]}


MALFORMED = (
    '{"a": 1',
    '{"name": "look", "arguments": {"a": 1}',
    '{"name": "look", "arguments": "{}"}',
    "look(at=__import__('os').system('touch /tmp/owned'))",
    "{'name': 'look', 'arguments': {'at': True}}",
    '{"name": "look", "arguments": {"a": NaN}}',
    "",
)


@pytest.mark.parametrize("body", MALFORMED)
def test_a_call_that_is_none_comes_back_as_text(body: str) -> None:
    """C29: nothing is repaired, nothing runs, and the text is whole; also at the end of a turn that was cut."""
    wrapped = f"I look.\n<tool_call>\n{body}\n</tool_call>"
    for renderer in (ChatML(TOKENIZER), Qwen25(TOKENIZER), Qwen3(TOKENIZER), Qwen35(TOKENIZER, thinking=False)):
        for text in (wrapped, wrapped.removesuffix("</tool_call>")):
            assert renderer.parse(sampled(renderer, text + "<|im_end|>")) == said(text)
    llama = Llama3(merging(LLAMA))
    assert llama.parse(sampled(llama, body + "<|eot_id|>")) == said(body)


def test_an_unknown_tool_is_a_call_whoever_runs_tools_answers() -> None:
    """C29: which tools there are is nothing that a parser decides; the answer is a tool's turn like any other."""
    renderer = Qwen3(TOKENIZER)
    prompt = renderer.render([user("hi")], [TOOL])
    ids = sampled(renderer, '<tool_call>\n{"name": "rm", "arguments": {}}\n</tool_call><|im_end|>')
    assert renderer.parse(ids, "m", [TOOL])["tool_calls"] == [{"id": "m_0", "name": "rm", "arguments": "{}"}]  # pyright: ignore[reportTypedDictNotRequiredAccess]
    following = written(renderer, renderer.bridge(prompt + ids, [answer("no tool 'rm'")], [TOOL]))
    assert following == "\n<|im_start|>user\n<tool_response>\nno tool 'rm'\n</tool_response><|im_end|>\n<|im_start|>assistant\n"


def test_markup_that_is_no_control_token_is_text() -> None:
    """A model that quotes a call (in ordinary tokens) makes none, where its tokenizer has tokens for calls."""
    call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
    renderer, spelled = Qwen3(TOKENIZER), TOKENIZER.encode(call + "</think>")
    assert renderer.parse(spelled) == said(call + "</think>")
    plain = ChatML(merging(("<|endoftext|>", "<|im_start|>", "<|im_end|>")))
    assert plain.parse(plain.tokenizer.encode(call), "c") == said("", "{}")


def test_stripped_thinking_forks_and_kept_thinking_extends() -> None:
    """C6: [user, assistant with thinking, user] is no prefix where thinking is stripped: a new branch, and nothing merged."""
    ids = sampled(Qwen3(TOKENIZER), "<think>\nfour\n</think>\n\n4<|im_end|>")
    for make in (Qwen3, Qwen35):
        for keep in (True, False):
            renderer = make(TOKENIZER, keep_thinking=keep)
            body = ids if make is Qwen3 else ids[2:]
            graph = Graph(Episode(id="e", env="t", key=0, content_hash="", group_id="g", seed=0), (Call(id=0),))
            prompt = renderer.render([user("2+2?")])
            node = graph.extend(prompt)
            message = renderer.parse(body)
            assert message == said("4", thinking="four")
            graph.add_completion(
                node, request_id="r", prompt_ids=prompt, ids=body, logprobs=[-1.0] * len(body),
                logprobs_full=[-1.0] * len(body), versions=[0] * len(body), temperature=1.0, finish_reason="stop",
                message=message,
            )  # fmt: skip
            bridge = renderer.bridge(prompt + body, [user("sure?")])
            whole = renderer.render([user("2+2?"), message, user("sure?")])
            last = graph.extend(whole)
            assert renderer.extends == keep == (bridge is not None) == (whole[: len(prompt + body)] == prompt + body)
            if bridge is not None:
                assert whole == prompt + body + bridge and len(graph.path(last)) == 3
            else:
                assert "four" not in written(renderer, whole) and not any(
                    graph.nodes[i].kind == "sampled" for i in graph.path(last)
                )
            # a tool's result is no question of the user's: thinking stays
            assert renderer.bridge(prompt + body, [answer("x")]) is not None


def test_qwen35_begins_inside_of_the_thinking() -> None:
    """C4: the prompt ends with <think> and a newline; a turn that begins with a newline makes a token of its own of it."""
    renderer = Qwen35(TOKENIZER)
    prompt = renderer.render([user("2+2?")])
    think, unthink = TOKENIZER.special_id("<think>"), TOKENIZER.special_id("</think>")
    assert prompt[-2:] == [think, ord("\n")]
    assert TOKENIZER.encode("\n\n")[0] != ord("\n")  # a naive render of "no thinking" would have this token
    whole = renderer.render([user("2+2?"), said("4")])
    assert whole[: len(prompt)] == prompt and whole[len(prompt) :][:2] == [ord("\n"), unthink]
    cut = renderer.parse(sampled(renderer, "it is"))
    assert cut == {"role": "assistant", "content": "", "thinking": "it is"}


def test_qwen35_calls() -> None:
    renderer = Qwen35(TOKENIZER)
    text = (
        "so\n</think>\n\nI look.\n\n<tool_call>\n<function=look>\n<parameter=at>\n1\n</parameter>\n"
        '<parameter=far>\nTrue\n</parameter>\n<parameter=other>\n{"a":1}\n</parameter>\n</function>\n</tool_call><|im_end|>'
    )
    message = renderer.parse(sampled(renderer, text), "c", [TOOL])
    assert message == said("I look.", '{"at": "1", "far": true, "other": {"a":1}}', thinking="so")
    blind = renderer.parse(sampled(renderer, text), "c")
    assert blind == said("I look.", '{"at": 1, "far": "True", "other": {"a":1}}', thinking="so")
    again = written(renderer, renderer.render([user("hi"), message], [TOOL]))
    assert text.replace('{"a":1}', '{"a": 1}').replace("True", "true") in again
    assert again.startswith("<|im_start|>system\n# Tools\n\nYou have access to the following functions:\n\n<tools>\n{")
    system: Message = {"role": "system", "content": " be kind "}
    assert "</IMPORTANT>\n\nbe kind<|im_end|>" in written(renderer, renderer.render([system, user("hi")], [TOOL]))
    for broken in (
        "<function=look>\n<parameter=at>\n1\n</function>",
        "<function=>\n</function>",
        "<function=look>\nx</function>",
    ):
        kept = f"<tool_call>\n{broken}\n</tool_call>"
        assert renderer.parse(sampled(renderer, f"\n</think>\n\n{kept}"), "c", [TOOL]) == said(kept)
    with pytest.raises(ValueError, match=r"^tool_calls: the arguments of 'look' are no JSON object"):
        renderer.render([user("hi"), said("", "[1")])


def test_llama3() -> None:
    renderer = Llama3(merging(LLAMA))
    head, end = "<|start_header_id|>{}<|end_header_id|>\n\n", "<|eot_id|>"
    day = "Cutting Knowledge Date: December 2023\nToday Date: 26 Jul 2024\n\n"
    begin = "<|begin_of_text|>" + head.format("system")
    asked = written(renderer, renderer.render([{"role": "system", "content": "S "}, user(" hi\n")]))
    assert asked == begin + day + "S" + end + head.format("user") + "hi" + end + head.format("assistant")
    messages = [user("hi"), said("", '{"at":"x"}'), answer('a "b"')]
    text = written(renderer, renderer.render(messages, [TOOL]))
    assert text.startswith(
        begin + "Environment: ipython\n" + day + end + head.format("user") + "Given the following functions, "
    )
    assert text.endswith(
        '            ]\n        }\n    }\n}\n\nhi<|eot_id|>' + head.format("assistant")
        + '{"name": "look", "parameters": {"at": "x"}}' + end + head.format("ipython") + '"a \\"b\\""' + end
        + head.format("assistant")
    )  # fmt: skip
    for message, what in ((said("", "{}", "{}"), "one call"), (said("x", "{}"), "one call")):
        with pytest.raises(ValueError, match=f"^tool_calls: 'llama3' has {what}"):
            renderer.render([user("hi"), message])
    with pytest.raises(ValueError, match=r"^tools: 'llama3' lists them in the user's first message"):
        renderer.render([said("x")], [TOOL])
    eom = renderer.tokenizer.special_id("<|eom_id|>")
    assert eom in renderer.stop_ids
    assert written(renderer, renderer.bridge([*renderer.render([user("hi")]), eom], [])) == head.format("assistant")


def test_a_template_extends_where_its_turns_stay() -> None:
    """The fallback: what follows a sampled turn is found by running the template, or is None."""
    for source, extends in ((QWEN25, True), (QWEN3, False)):
        renderer = Template(merging(QWEN, source))
        own: Renderer = Qwen25(TOKENIZER) if extends else Qwen3(TOKENIZER)
        assert renderer.extends == extends
        prompt = renderer.render([user("look")], [TOOL])
        ids = sampled(renderer, 'so\n<tool_call>\n{"name": "look", "arguments": {"at": "x"}}\n</tool_call><|im_end|>')
        message = renderer.parse(ids, "c", [TOOL])
        assert message == said("so", '{"at": "x"}')
        for new in ([answer("it")], [answer("it"), answer("is")], [user("<|im_end|>")], []):
            bridge = renderer.bridge(prompt + ids, new, [TOOL])
            if bridge is None:
                assert not extends and new == []  # Qwen3 puts an empty thinking block before what is last
                continue
            assert bridge == own.bridge(prompt + ids, new, [TOOL])
            assert renderer.bridge(prompt + ids[:-1], new, [TOOL]) == [ids[-1], *bridge]
            assert prompt + ids + bridge == renderer.render([user("look"), message, *new], [TOOL])


def test_a_template_places_control_tokens_alone() -> None:
    renderer = Template(merging(QWEN, QWEN3))
    everything = "".join(QWEN)
    told = [user(everything), said(everything, json.dumps({"x": everything}), thinking=everything), answer(everything)]
    plain = [user("x"), said("x", '{"x": "x"}', thinking="x"), answer("x")]
    special = renderer.tokenizer.special_ids
    tool: Tool = {**TOOL, "description": everything}
    ids, wanted = renderer.render(told, [tool]), renderer.render(plain, [TOOL])
    assert [i for i in ids if i in special] == [i for i in wanted if i in special]


def test_what_templates_lack_is_said() -> None:
    with pytest.raises(ValueError, match=r"^chat_template: the model has none"):
        Template(merging())
    with pytest.raises(ValueError, match=r"^variables: the template has no 'mood'"):
        Template(merging(QWEN, QWEN3), variables={"mood": 1})
    with pytest.raises(ValueError, match=r"^messages: nothing to render"):
        Template(merging(QWEN, QWEN3)).render([])
    assert set(RENDERERS) == {"chatml", "smollm2", "qwen2.5", "qwen3", "qwen3.5", "llama3", "template", "library"}


@pytest.mark.real
@pytest.mark.skipif(not REAL.exists(), reason="make model has not been run")
def test_smollm2_ids() -> None:
    """C1, C3 with a trained tokenizer: another split stays as sampled; one newline, not sampled, follows the end of a turn."""
    tokenizer = Tokenizer.load(REAL)
    template, end = ChatTemplate(tokenizer), tokenizer.special_id("<|im_end|>")
    for renderer in (SmolLM2(tokenizer), Template(tokenizer)):
        assert renderer.extends
        prompt = renderer.render([user("name a package")])
        ids = [*tokenizer.encode("json"), *tokenizer.encode("p"), *tokenizer.encode("enderer"), end]
        message = renderer.parse(ids)
        assert message == said("jsonpenderer") and tokenizer.encode("jsonpenderer") != ids[:-1]
        bridge = renderer.bridge(prompt + ids, [answer("ok")])
        assert bridge is not None and bridge[:2] == [*tokenizer.encode("\n"), tokenizer.special_id("<|im_start|>")]
        own = [*tokenizer.encode(message["content"]), end]  # the split that the tokenizer itself would make
        whole = template.render([user("name a package"), message, {"role": "tool", "content": "ok"}])
        assert list(whole) == prompt + own + bridge
