"""Dialects: what goes out comes back the same, bodies of any kind are read or refused, and each client's ways are known."""

import json
import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.errors import ApiError
from inference.types import SamplingParams
from rl.identity import MAIN
from rl.messages import Message, Piece, chain, meaning, message_of, tools_digest
from rl.wire_messages import WIRE as MESSAGES
from rl.wires import Identity, PromptTooLong, Turn
from tests.wire_clients import FIRST, NAME, REWRITTEN, USAGE, WIRES, answer, next_body, put_together, read

WORDS = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
NUMBERS = st.integers(-(2**60), 2**60) | st.floats(allow_nan=False, allow_infinity=False)
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text(st.characters(), max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)
ARGUMENTS = st.builds(json.dumps, st.dictionaries(st.text(max_size=3), VALUES, max_size=3), indent=st.none() | st.just(1))
PIECES = st.lists(
    st.builds(Piece, st.sampled_from(["thinking", "text"]), WORDS)
    | st.builds(Piece, st.just("call"), ARGUMENTS, st.sampled_from(["look", "go__to"])),
    max_size=6,
)


@pytest.mark.parametrize("wire", WIRES)
@settings(max_examples=150)
@given(PIECES, st.booleans())
def test_what_goes_out_comes_back(wire: str, pieces: list[Piece], cut: bool) -> None:
    events, whole = answer(wire, pieces, cut)
    assert put_together(wire, events) == whole
    expected = message_of(pieces, NAME)
    if not any(piece.text for piece in pieces) and wire == "responses":
        return  # no item: there is nothing to send back
    for rewrite in REWRITTEN[wire]:
        turn = read(wire, next_body(wire, whole, rewrite))
        _, echoed, *rest = turn.messages
        assert meaning(echoed) == meaning(expected)
        calls = expected.get("tool_calls", [])
        results = [(message["name"], message["content"]) for message in rest[:-1]]
        assert results == [(call["name"], "ok") for call in calls]
        assert rest[-1] == {"role": "user", "content": "go on"}
        assert [message["tool_call_id"] for message in rest[:-1]] == [call["id"] for call in echoed.get("tool_calls", ())]
        known = (
            calls
            or (wire == "messages" and expected.get("thinking"))
            or (wire == "responses" and rewrite is REWRITTEN[wire][0])
        )
        assert echoed.get("id") == (NAME if known else echoed.get("id"))


@pytest.mark.parametrize("wire", WIRES)
def test_an_answer_of_nothing(wire: str) -> None:
    events, whole = answer(wire, [])
    assert put_together(wire, events) == whole
    if wire != "responses":  # there no item goes out, and none comes back
        assert meaning(read(wire, next_body(wire, whole)).messages[1]) == meaning(message_of([]))


CALL = Piece("call", '{"x": 1}', "look")


@pytest.mark.parametrize(
    ("pieces", "cut", "chat", "responses", "messages"),
    [
        ([Piece("text", "a")], False, "stop", "completed", "end_turn"),
        ([Piece("text", "a")], True, "length", "incomplete", "max_tokens"),
        ([Piece("text", "a"), CALL], False, "tool_calls", "completed", "tool_use"),
        ([CALL], True, "length", "incomplete", "max_tokens"),
    ],
)
def test_why_it_ends(pieces: list[Piece], cut: bool, chat: str, responses: str, messages: str) -> None:
    assert answer("chat", pieces, cut)[1]["choices"][0]["finish_reason"] == chat
    events, whole = answer("responses", pieces, cut)
    assert whole["status"] == responses and events[-1][0] == f"response.{responses}"
    assert whole["incomplete_details"] == ({"reason": "max_output_tokens"} if cut else None)
    assert answer("messages", pieces, cut)[1]["stop_reason"] == messages


def test_a_stop_string_of_the_client_is_named() -> None:
    writer = MESSAGES.writer(read("messages", FIRST["messages"]), NAME, created=1)
    writer.begin(USAGE)
    writer.end(False, USAGE, stop="END")
    assert (writer.whole()["stop_reason"], writer.whole()["stop_sequence"]) == ("stop_sequence", "END")


def test_counts_are_true() -> None:
    assert answer("chat", [])[1]["usage"] == {
        "prompt_tokens": 7,
        "completion_tokens": 5,
        "total_tokens": 12,
        "prompt_tokens_details": {"cached_tokens": 3},
    }
    usage = answer("responses", [])[1]["usage"]
    assert (usage["input_tokens"], usage["output_tokens"], usage["total_tokens"]) == (7, 5, 12)
    usage = answer("messages", [])[1]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["output_tokens"]) == (4, 3, 5)


# ---- the one form of tools and histories

SCHEMA = {"type": "object", "properties": {"x": {"type": "boolean"}}}
FORMS = {
    "chat": {"type": "function", "function": {"name": "look", "description": "d", "parameters": SCHEMA, "strict": False}},
    "responses": {"type": "function", "name": "look", "description": "d", "parameters": SCHEMA, "strict": False},
    "messages": {"name": "look", "description": "d", "input_schema": SCHEMA, "cache_control": {"type": "ephemeral"}},
}


def test_one_form_of_tools() -> None:
    turns = [read(wire, {**FIRST[wire], "tools": [form]}) for wire, form in FORMS.items()]
    turns.append(read("chat", {**FIRST["chat"], "tools": [FORMS["responses"]]}))
    assert [turn.tools for turn in turns] == 4 * [({"name": "look", "description": "d", "parameters": SCHEMA},)]
    none = {"chat": "none", "responses": "none", "messages": {"type": "none"}}
    for wire, form in FORMS.items():
        assert read(wire, {**FIRST[wire], "tools": [form], "tool_choice": none[wire]}).tools == ()


HISTORY: list[Message] = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": "a\nb"},
    {
        "role": "assistant",
        "content": "so",
        "thinking": "hm",
        "tool_calls": [
            {"id": "1", "name": "look", "arguments": '{"x": false}'},
            {"id": "2", "name": "look", "arguments": "{}"},
        ],
    },
    {"role": "tool", "content": "one", "tool_call_id": "1", "name": "look"},
    {"role": "tool", "content": "two", "tool_call_id": "2", "name": "look"},
    {"role": "user", "content": "go on"},
]


def called(arguments: Any, **more: str) -> Any:
    return {"type": "function", "function": {"name": "look", "arguments": arguments}, **more}


HISTORIES: dict[str, dict[str, Any]] = {
    "chat": {
        "messages": [
            {"role": "developer", "content": [{"type": "text", "text": "be kind"}]},
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": "so",
                "reasoning_content": "hm",
                "tool_calls": [called('{"x": false}', id="1"), called({}, id="2")],
            },
            {"role": "tool", "tool_call_id": "1", "content": "one"},
            {"role": "tool", "tool_call_id": "2", "content": [{"type": "text", "text": "two"}]},
            {"role": "user", "content": "go on"},
        ]
    },
    "responses": {
        "instructions": "be kind",
        "input": [
            {"role": "user", "content": [{"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]},
            {"type": "reasoning", "summary": [{"type": "summary_text", "text": "hm"}], "encrypted_content": "?"},
            {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "so"}], "status": "completed"},
            {"type": "function_call", "call_id": "1", "name": "look", "arguments": '{"x": false}'},
            {"type": "function_call", "call_id": "2", "name": "look", "arguments": ""},
            {"type": "function_call_output", "call_id": "1", "output": "one"},
            {"type": "function_call_output", "call_id": "2", "output": [{"type": "input_text", "text": "two"}]},
            {"role": "user", "content": "go on"},
        ],
    },
    "messages": {
        "system": [
            {"type": "text", "text": "x-anthropic-billing-header: cc_version=2.1.197.3fa; cc_entrypoint=sdk-cli;"},
            {"type": "text", "text": "be kind", "cache_control": {"type": "ephemeral"}},
        ],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
            {
                "role": "assistant",
                "content": [
                    {"type": "thinking", "thinking": "hm", "signature": "?"},
                    {"type": "redacted_thinking", "data": "?"},
                    {"type": "text", "text": "so"},
                    {"type": "tool_use", "id": "1", "name": "look", "input": {"x": False}},
                    {"type": "tool_use", "id": "2", "name": "look", "input": {}},
                ],
            },
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1", "content": "one", "is_error": True},
                    {"type": "tool_result", "tool_use_id": "2", "content": [{"type": "text", "text": "two"}]},
                    {"type": "text", "text": "go on", "cache_control": {"type": "ephemeral"}},
                ],
            },
        ],
    },
}


@pytest.mark.parametrize("wire", WIRES)
def test_one_form_of_histories(wire: str) -> None:
    assert list(read(wire, {**FIRST[wire], **HISTORIES[wire]}).messages) == HISTORY


def test_namespaces_lead_there_and_back() -> None:
    space = {"type": "namespace", "name": "agents", "tools": [{"type": "function", "name": "spawn", "parameters": SCHEMA}]}
    turn = read("responses", {**FIRST["responses"], "tools": [space, {"type": "web_search"}]})
    assert [tool["name"] for tool in turn.tools] == ["agents__spawn"]
    assert "tools.1: hosted tool 'web_search' is ignored" in turn.notes
    (item,) = answer("responses", [Piece("call", "{}", "agents__spawn")], turn=turn)[1]["output"]
    assert (item["namespace"], item["name"]) == ("agents", "spawn")
    (echoed,) = read("responses", {"model": "m", "input": [item]}).messages
    assert echoed["tool_calls"][0]["name"] == "agents__spawn" and echoed["id"] == NAME
    twice = [space, {"type": "function", "name": "agents__spawn"}]
    with pytest.raises(ApiError, match="tools.1: a tool before it is called 'agents__spawn' too"):
        read("responses", {**FIRST["responses"], "tools": twice})


def test_items_of_two_records_are_two_turns() -> None:
    other = NAME[:-1] + "f"
    texts = [
        {"type": "message", "role": "assistant", "id": f"msg_{name}_0", "content": text}
        for name, text in ((NAME, "a"), (NAME, "b"), (other, "c"))
    ]
    messages = read("responses", {"model": "m", "input": texts}).messages
    assert [(message["content"], message.get("id")) for message in messages] == [("ab", NAME), ("c", other)]


def test_arguments_that_claude_code_could_not_read() -> None:
    unread = {"__unparsedToolInput": {"raw": '{"x": 1', "len": 7}}
    block = {"type": "tool_use", "id": "1", "name": "look", "input": unread}
    messages = read("messages", {"model": "m", "messages": [{"role": "assistant", "content": [block]}]}).messages
    assert messages[0]["tool_calls"][0]["arguments"] == '{"x": 1'


def test_results_and_texts_keep_their_order() -> None:
    blocks = [{"type": "text", "text": "a"}, {"type": "tool_result", "tool_use_id": "1"}, {"type": "text", "text": "b"}]
    told = read(
        "messages", {"model": "m", "messages": [{"role": "user", "content": blocks}, {"role": "system", "content": "c"}]}
    )
    assert [(message["role"], message["content"]) for message in told.messages] == [
        ("user", "a"),
        ("tool", ""),
        ("user", "b"),
        ("system", "c"),
    ]


def test_deferred_tools_are_where_they_were_found() -> None:
    """The tools at the start stay the same when one is found, so that the history goes on."""
    late = {**FORMS["messages"], "name": "late", "defer_loading": True}
    found = [{"type": "tool_reference", "tool_name": name} for name in ("late", "gone")]
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "1", "content": found}]}
    turn = read("messages", {**FIRST["messages"], "messages": [result], "tools": [late, FORMS["messages"]]})
    assert [tool["name"] for tool in turn.tools] == ["look"]
    first, second = turn.messages[0]["content"].split("\n")
    assert (json.loads(first), second) == ({"name": "late", "description": "d", "parameters": SCHEMA}, "gone")


# ---- who asks, and what for


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, Identity()),
        ({"session-id": "r", "thread-id": "r"}, Identity(session="r")),
        (
            {"session-id": "r", "thread-id": "t", "x-codex-parent-thread-id": "r"},
            Identity(session="r", agent="t", parent=MAIN),
        ),
        ({"session-id": "r", "thread-id": "u", "x-codex-parent-thread-id": "t"}, Identity(session="r", agent="u", parent="t")),
        ({"session-id": "r", "thread-id": "t", "x-openai-subagent": "s"}, Identity(session="r", agent="t", parent=MAIN)),
        ({"x-session": "s9", "session-id": "r", "thread-id": "r"}, Identity(session="s9")),
        ({"x-claude-code-session-id": "c"}, Identity(session="c")),
        ({"x-claude-code-session-id": "c", "x-claude-code-agent-id": "a"}, Identity(session="c", agent="a", parent=MAIN)),
        (
            {"x-claude-code-session-id": "c", "x-claude-code-agent-id": "b", "x-claude-code-parent-agent-id": "a"},
            Identity(session="c", agent="b", parent="a"),
        ),
        ({"x-session-id": "o", "x-session-affinity": "o"}, Identity(session="o")),
        ({"x-session-id": "p", "x-parent-session-id": "o"}, Identity(session="o", agent="p", parent=MAIN)),
        ({"session_id": "pi"}, Identity(session="pi")),
        ({"x-litellm-session-id": "l"}, Identity(session="l")),
        ({"x-session": "s", "x-agent-id": "a"}, Identity(session="s", agent="a", parent=MAIN)),
        ({"x-session": "s", "x-agent-id": "b", "x-parent-agent-id": "a"}, Identity(session="s", agent="b", parent="a")),
    ],
)
def test_who_asks(headers: dict[str, str], expected: Identity) -> None:
    for wire in WIRES:
        assert WIRES[wire].parse(json.dumps(FIRST[wire]).encode(), headers).identity == expected


def test_who_asks_by_metadata() -> None:
    metadata = {"session_id": "r", "thread_id": "t", "parent_thread_id": "r", "request_kind": "compaction"}
    expected = Identity(session="r", agent="t", parent=MAIN)
    for told in (metadata, {"x-codex-turn-metadata": json.dumps(metadata)}):
        turn = read("responses", {**FIRST["responses"], "client_metadata": told})
        assert (turn.identity, turn.kind) == (expected, "compaction")
    turn = WIRES["responses"].parse(json.dumps(FIRST["responses"]).encode(), {"x-codex-turn-metadata": json.dumps(metadata)})
    assert (turn.identity, turn.kind) == (expected, "compaction")


@pytest.mark.parametrize("bad", ["a\nb", "a\x00", "x" * 201])
def test_ids_that_are_refused(bad: str) -> None:
    with pytest.raises(ApiError, match="session-id: an id has at most 200 characters, and none that cannot be printed"):
        WIRES["chat"].parse(json.dumps(FIRST["chat"]).encode(), {"session-id": bad})


@pytest.mark.parametrize(
    ("system", "user", "tools", "kind"),
    [
        ("You are an agent", "hello", True, "turn"),
        ("You are a context summarization assistant. Read", "<conversation>", False, "compaction"),
        ("You are a title generator. Only", "fix it", False, "title"),
        ("You are a title generator. Only", "fix it", True, "turn"),
        ("You are an agent", "CRITICAL: Respond with TEXT ONLY. Do NOT call any tools.\n\nSummarise", True, "compaction"),
        ("You are an agent", "You are performing a CONTEXT CHECKPOINT COMPACTION. Write", False, "compaction"),
    ],
)
def test_what_for(system: str, user: str, tools: bool, kind: str) -> None:
    for wire, form in FORMS.items():
        body = {**FIRST[wire], "tools": [form] if tools else []}
        told = {"role": "user", "content": user}
        if wire == "messages":
            body |= {"system": system, "messages": [told]}
        else:
            body["messages" if wire == "chat" else "input"] = [{"role": "system", "content": system}, told]
        assert read(wire, body).kind == kind
        if wire == "messages":
            body["messages"].append({"role": "system", "content": "a reminder"})
            assert read(wire, body).kind == kind


# ---- what is refused, and what is not


@pytest.mark.parametrize(
    ("wire", "change", "message"),
    [
        ("chat", {"n": 2}, "n: one turn has one answer"),
        ("chat", {"messages": []}, "messages: there must be at least one"),
        ("chat", {"tool_choice": "required"}, "tool_choice: 'required' is not supported, calls cannot be forced"),
        ("chat", {"tool_choice": {"type": "function", "function": {"name": "look"}}}, "tool_choice: 'function' is not"),
        ("chat", {"response_format": {"type": "json_schema"}}, "response_format: text is not constrained to a form"),
        ("chat", {"logprobs": True}, "logprobs: an agent's turn has none"),
        ("chat", {"modalities": ["text", "audio"]}, "modalities: only text can be had"),
        ("chat", {"model": 3}, "model: must be a string, got a number"),
        ("chat", {"model": None}, "model: is required, and is a string"),
        ("chat", {"max_tokens": 0}, r"max_tokens: must be a whole number in \[1, 2147483647\], got a number"),
        ("chat", {"temperature": "hot"}, "temperature: must be a number"),
        ("chat", {"stop": [""]}, "stop: takes at most 16 strings of 1 to 256 characters"),
        ("chat", {"stop_token_ids": [7]}, "stop_token_ids: the chat format's own tokens end a turn; use stop"),
        ("messages", {"stop_token_ids": [7]}, "stop_token_ids: the chat format's own tokens end a turn; use stop_sequences"),
        ("chat", {"logit_bias": {"a": 1}}, "logit_bias: its keys are token ids"),
        ("chat", {"messages": [{"role": "robot"}]}, "messages.0.role: 'robot' is unknown; use one of system"),
        (
            "chat",
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages.0.content.0.type: 'image_url' is not supported, only text can be read; it can be input_text",
        ),
        ("chat", {"messages": [{"role": "user", "content": "\ud83d"}]}, "messages.0.content: has half of a surrogate pair"),
        ("chat", {"tools": [FORMS["chat"]] * 2}, "tools.1: a tool before it is called 'look' too"),
        ("responses", {"previous_response_id": "resp_1"}, "previous_response_id: nothing is stored; send the whole history"),
        ("responses", {"background": True}, "background: answers are not kept for later"),
        ("responses", {"text": {"format": {"type": "json_schema"}}}, "text.format: text is not constrained"),
        ("responses", {"input": [{"type": "item_reference", "id": "x"}]}, "input.0.type: nothing is stored that could be"),
        ("responses", {"input": [{"type": "custom_tool_call"}]}, "input.0.type: tools of type 'custom' cannot be called"),
        ("responses", {"input": [{"type": "web_search_call"}]}, "input.0.type: 'web_search_call' is not supported"),
        ("messages", {"tool_choice": {"type": "any"}}, "tool_choice: 'any' is not supported, calls cannot be forced"),
        ("messages", {"output_format": {"type": "json_schema"}}, "output_format: text is not constrained"),
        ("messages", {"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages.0.content.0.type: 'image' is"),
    ],
)
def test_what_is_refused(wire: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ApiError, match=message) as caught:
        read(wire, {**FIRST[wire], **change})
    assert caught.value.status == 400 and caught.value.param == message.partition(":")[0]


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize(
    ("raw", "message"),
    [
        (b"", "body: is no JSON that can be read"),
        (b"[]", "body: must be an object, got a list"),
        (b"\xff", "body: is no JSON that can be read: 'utf-8' codec"),
        (b'{"a": NaN}', "NaN is no number"),
        (b'{"a": 1e999}', "1e999 is no number"),
        (b'{"a": 1, "a": 2}', "'a' is there twice in one object"),
        (b"[" * 10**5, "body: is nested too deep"),
        (b'{"a": ' + b"9" * 5000 + b"}", "body: is no JSON that can be read"),
    ],
)
def test_bodies_that_are_none(wire: str, raw: bytes, message: str) -> None:
    with pytest.raises(ApiError, match=message):
        WIRES[wire].parse(raw, {})


@pytest.mark.parametrize("wire", WIRES)
def test_deep_schemas_are_refused(wire: str) -> None:
    deep: Any = {}
    for _ in range(100):
        deep = {"properties": deep}
    form = json.loads(json.dumps(FORMS[wire]).replace(json.dumps(SCHEMA), json.dumps(deep)))
    with pytest.raises(ApiError, match="nested deeper than 64"):
        read(wire, {**FIRST[wire], "tools": [form]})


def test_what_is_ignored_is_noted() -> None:
    turn = read("chat", {**FIRST["chat"], "shiny": 1, "reasoning_effort": "high", "parallel_tool_calls": False, "user": "u"})
    assert turn.notes == (
        "body: field 'shiny' is not known and is ignored",
        "reasoning_effort: how much the model thinks is its own, and its renderer's; ignored",
    )
    tools = {"tools": [{"type": "web_search_20250305", "name": "web_search"}], "thinking": {"type": "adaptive"}}
    turn = read("messages", {**FIRST["messages"], **tools})
    assert not turn.tools and "tools.0: hosted tool 'web_search_20250305' is ignored" in turn.notes


def test_sampling_is_as_it_was_asked() -> None:
    asked = {"temperature": 0.5, "top_k": -1, "top_p": 1, "seed": 3, "stop": "end", "max_tokens": 5, "logit_bias": {"7": -1}}
    given_ = read("chat", {**FIRST["chat"], **asked}).sampling
    assert SamplingParams(**given_) == SamplingParams(
        max_tokens=5, temperature=0.5, seed=3, stop=("end",), logit_bias=((7, -1.0),)
    )
    assert read("chat", {**FIRST["chat"], "max_tokens": 5, "max_completion_tokens": 6}).sampling == {"max_tokens": 6}
    assert read("responses", {**FIRST["responses"], "max_output_tokens": 4}).sampling == {"max_tokens": 4}
    assert read("messages", {**FIRST["messages"], "stop_sequences": ["x"]}).sampling == {"max_tokens": 9, "stop": ("x",)}


# ---- errors


def test_errors_in_each_dialect() -> None:
    long = PromptTooLong(300, 256)
    assert WIRES["chat"].error(long)["error"]["code"] == WIRES["responses"].error(long)["error"]["code"] == long.code
    assert "maximum context length is 256 tokens" in WIRES["chat"].error(long)["error"]["message"]
    assert WIRES["messages"].error(long) == {
        "type": "error",
        "error": {"type": "invalid_request_error", "message": "prompt is too long: 300 tokens > 256 maximum"},
    }
    for status, kind in (
        (401, "authentication_error"),
        (429, "rate_limit_error"),
        (500, "api_error"),
        (503, "overloaded_error"),
    ):
        assert WIRES["messages"].error(ApiError("no", status=status))["error"]["type"] == kind


def test_errors_within_a_stream() -> None:
    broken = ApiError("gone", status=503)
    for wire in WIRES:
        writer = WIRES[wire].writer(read(wire, FIRST[wire]), NAME, created=1)
        writer.begin(USAGE)
        writer.add([Piece("text", "a")])
        ((name, data),) = writer.fail(broken)
        if wire == "responses":
            assert (name, data["type"], data["response"]["status"]) == ("response.failed", "response.failed", "failed")
            assert data["response"]["error"] == {"code": "server_error", "message": "gone"}
        else:
            assert data["error"]["message"] == "gone" and name == {"chat": "", "messages": "error"}[wire]


# ---- any bytes

JUNK: list[Any] = [None, True, 0, -1, 1.5, 2**70, "", "x", "\ud800", [], {}, [[]], [None], {"type": 1}, {"": ""}, ["text"]]


def mutated(body: Any, rng: random.Random) -> Any:
    """The same with one thing in it changed: taken out, made something else, doubled, put into itself."""
    places: list[tuple[Any, Any]] = []
    waiting = [body]
    while waiting:
        value = waiting.pop()
        inner = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if isinstance(value, list) else []
        places += [(value, key) for key, _ in inner]
        waiting += [item for _, item in inner]
    if not places:
        return rng.choice(JUNK)
    holder, key = rng.choice(places)
    what = rng.randrange(5)
    if what == 0:
        del holder[key]
    elif what == 1:
        holder[key] = [holder[key], holder[key]]
    elif what == 2:
        for _ in range(rng.choice([3, 70, 200])):
            holder[key] = {"x": holder[key]}
    elif what == 3 and isinstance(holder, list):
        holder.append(json.loads(json.dumps(rng.choice(places)[0])))
    else:
        holder[key] = json.loads(json.dumps(rng.choice(JUNK)))
    return body


def check(turn: Turn) -> None:
    """What a gateway does with it next does not fail."""
    text = json.dumps([turn.messages, turn.tools, turn.notes, turn.model], ensure_ascii=False)
    text.encode()
    before = tools_digest(turn.tools)
    for message in turn.messages:
        before = chain(before, message)
    try:
        SamplingParams(**{"max_tokens": 1, **turn.sampling})
    except ValueError as error:
        assert str(error).partition(":")[0] in SamplingParams.__dataclass_fields__


@pytest.mark.parametrize("wire", WIRES)
def test_any_body_is_read_or_refused(wire: str) -> None:
    rng = random.Random(0)
    more = {"temperature": 1, "tool_choice": "auto" if wire != "messages" else {"type": "auto"}, "stop": "x", "seed": 1}
    full = {**FIRST[wire], **HISTORIES[wire], "tools": [FORMS[wire]], "stream": True, **more}
    outcomes = {True: 0, False: 0}
    for _ in range(2000):
        body = json.loads(json.dumps(full))
        for _ in range(rng.randrange(1, 3)):
            body = mutated(body, rng)
        raw = json.dumps(body).encode()
        if rng.random() < 0.2:
            place = rng.randrange(len(raw))
            raw = raw[:place] + rng.randbytes(rng.randrange(3)) + raw[place + rng.randrange(3) :]
        try:
            check(WIRES[wire].parse(raw, {}))
            outcomes[True] += 1
        except ApiError as error:
            assert error.status == 400 and error.message
            outcomes[False] += 1
    assert min(outcomes.values()) > 150, outcomes
