"""OpenAI's Responses, as agent programs speak it. `WIRE` is the dialect (rl/wires.py); its writer is in wire_items.py.

The items of one assistant's turn (reasoning, message, function calls) that follow each other are one message, unless their ids
are of different records. Tools in a namespace are called NAMESPACE__TOOL; a body in which two tools would get one name is
refused, so that each name leads back to its namespace.
"""

from collections.abc import Mapping

from inference.errors import ApiError
from rl.identity import identity, kind_of_call
from rl.messages import Message, Tool, ToolCall
from rl.wire_body import (
    Field,
    arguments,
    assistant,
    check_form,
    function,
    hosted,
    kind_of,
    load,
    may_call,
    note,
    note_effort,
    note_unknown,
    parts,
    unique,
    with_names,
)
from rl.wire_items import ItemWriter, ResponsesTurn
from rl.wire_sampling import SAMPLING, sampling
from rl.wires import Json, Turn, record_of

BODY = SAMPLING | {
    *("model", "input", "instructions", "tools", "tool_choice", "parallel_tool_calls", "stream", "max_output_tokens", "text"),
    *("reasoning", "include", "previous_response_id", "conversation", "prompt", "background", "stop"),
    "top_logprobs",
    # change no token
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("client_metadata", "stream_options", "truncation", "max_tool_calls", "priority"),
}
ITEM = {
    *("type", "role", "content", "id", "status", "summary", "encrypted_content", "call_id", "name", "namespace", "arguments"),
    *("output", "phase", "internal_chat_message_metadata_passthrough"),
}
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}
"""kinds of parts that are read, and where their text is"""
ITEMS = ("message", "reasoning", "function_call", "function_call_output")
STORED = {
    "previous_response_id": "nothing is stored; send the whole history as input, and leave this out",
    "conversation": "nothing is stored; send the whole history as input, and leave this out",
    "prompt": "no prompts are stored; send its text as input, and leave this out",
}


class Responses:
    path = "/v1/responses"
    done = False

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> ResponsesTurn:
        body, notes = load(raw), []
        note_unknown(body, BODY, notes)
        _refuse(body)
        note_effort(body["reasoning"]["effort"] if body["reasoning"] else Field(None), notes)
        encrypted = "reasoning.encrypted_content" in [item.text() for item in body["include"].items()]
        messages = _messages(body, notes)
        tools, namespaces = _tools(body, notes)
        return ResponsesTurn(
            model=body["model"].text(),
            messages=messages,
            tools=tools,
            sampling=sampling(body, ("max_output_tokens",), "stop"),
            stream=body["stream"].flag(),
            kind=kind_of_call(headers, body.value, messages, tools),
            notes=tuple(notes),
            identity=identity(headers, body.value),
            namespaces=namespaces,
            encrypted=encrypted,
            # opencode asks for no summary, but of what is encrypted it sends back nothing else
            summaries=encrypted or (bool(body["reasoning"]) and body["reasoning"]["summary"].text("none") != "none"),
        )

    def writer(self, turn: Turn, name: str, created: int) -> ItemWriter:
        assert isinstance(turn, ResponsesTurn), "the turn is of another dialect"
        return ItemWriter(turn, name, created)

    def error(self, error: ApiError) -> Json:
        return error.body()


WIRE = Responses()


def _refuse(body: Field) -> None:
    """What would change the answer and cannot be had."""
    for name, why in STORED.items():
        if body[name]:
            raise body[name].error(why)
    if body["background"].flag():
        raise body["background"].error("answers are not kept for later; leave it out, and stream")
    if body["top_logprobs"] and body["top_logprobs"].integer():
        raise body["top_logprobs"].error("an agent's turn has none; they are in the record")
    check_form(body["text"]["format"] if body["text"] else Field(None))


def _tools(body: Field, notes: list[str]) -> tuple[tuple[Tool, ...], dict[str, tuple[str, str]]]:
    """Tools, and of those in a namespace: its name and the tool's in it."""
    tools: list[tuple[Field, Tool]] = []
    namespaces: dict[str, tuple[str, str]] = {}
    for item in body["tools"].items():
        kind = item["type"].text()
        if kind == "function":
            tools.append((item, function(item, "parameters", notes)))
        elif kind == "namespace":
            space = item["name"].text()
            for inner in item["tools"].items():
                tool = function(inner, "parameters", notes)
                joined = _joined(space, tool["name"])
                namespaces[joined] = (space, tool["name"])
                tools.append((inner, {**tool, "name": joined}))
        else:
            hosted(item, notes)
    found = unique(tools)
    return (found, namespaces) if may_call(body, notes) else ((), {})


def _joined(space: str, name: str) -> str:
    return f"{space}__{name}" if space else name


def _messages(body: Field, notes: list[str]) -> tuple[Message, ...]:
    history = _History()
    if body["instructions"]:
        history.other({"role": "system", "content": body["instructions"].text()})
    if isinstance(body["input"].value, str):
        history.other({"role": "user", "content": body["input"].text()})
    else:
        for item in body["input"].items():
            note_unknown(item, ITEM, notes)
            _add(history, item, notes)
    history.close()
    if not history.messages:
        raise body["input"].error("there must be at least one message")
    return with_names(history.messages)


class _History:
    """Items put together to messages."""

    def __init__(self) -> None:
        self.messages: list[Message] = []
        self._begin()

    def _begin(self) -> None:
        self._content, self._thinking = "", ""
        self._calls: list[ToolCall] = []
        self._ids: list[str] = []
        self._record: str | None = None
        self._open = False

    def other(self, message: Message) -> None:
        """A message that is no assistant's."""
        self.close()
        self.messages.append(message)

    def close(self) -> None:
        if self._open:
            self.messages.append(assistant(self._content, self._thinking, self._calls, self._ids))
            self._begin()

    def part(self, ids: list[str], content: str = "", thinking: str = "", call: ToolCall | None = None) -> None:
        """A part of an assistant's turn: of the one that is open, unless it is of another record."""
        record = next((found for identifier in ids if (found := record_of(identifier))), None)
        if record and self._record and record != self._record:
            self.close()
        self._open, self._record = True, self._record or record
        self._ids += ids
        self._content += content
        self._thinking += thinking
        self._calls += [call] if call else []


def _add(history: _History, item: Field, notes: list[str]) -> None:
    kind = item["type"].text("message")
    if kind == "item_reference":
        raise item["type"].error("nothing is stored that could be referred to; send the item itself")
    if kind == "custom_tool_call" or kind == "custom_tool_call_output":
        raise item["type"].error("tools of type 'custom' cannot be called; offer them as functions")
    kind_of(item, ITEMS, "it is no part of a conversation here", "message")
    own = item["id"].text("")
    if kind == "function_call_output":
        output = parts(item["output"], TEXTS)
        history.other({"role": "tool", "content": output, "tool_call_id": item["call_id"].text()})
    elif kind == "function_call":
        call_id = item["call_id"].text()
        name = _joined(item["namespace"].text(""), item["name"].text())
        history.part([own, call_id], call={"id": call_id, "name": name, "arguments": arguments(item["arguments"])})
    elif kind == "reasoning":
        history.part([own, item["encrypted_content"].text("")], thinking=_thinking(item, notes))
    else:
        role = item["role"].text()
        if role not in ROLES:
            raise item["role"].error(f"{role[:40]!r} is unknown; use one of {', '.join(ROLES)}")
        if ROLES[role] == "assistant":
            history.part([own], content=parts(item["content"], TEXTS, joint=""))
        else:
            history.other({"role": ROLES[role], "content": parts(item["content"], TEXTS)})


def _thinking(item: Field, notes: list[str]) -> str:
    """Of a reasoning item: all of it, else what a client has kept as its summary."""
    text = parts(item["content"], {"reasoning_text": "text", "text": "text"}, joint="")
    text = text or parts(item["summary"], {"summary_text": "text"})
    sealed = item["encrypted_content"].text("")
    if sealed and not text and record_of(sealed) is None:
        note(notes, f"{item.where}.encrypted_content: is of another model and is ignored")
    return text
