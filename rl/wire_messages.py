"""Anthropic's Messages, as agent programs speak it. `WIRE` is the dialect (rl/wires.py).

A user's message that has results of tools and text is several messages here, in the order of its blocks.
"""

import json
import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from inference.errors import ApiError
from rl.identity import identity, kind_of_call
from rl.messages import Message, Tool, ToolCall
from rl.wire_body import (
    SEVERAL,
    Field,
    assistant,
    choice,
    function,
    hosted,
    kind_of,
    load,
    note,
    note_effort,
    note_unknown,
    parts,
    unique,
    with_names,
)
from rl.wire_sampling import SAMPLING, sampling
from rl.wires import Block, BlockWriter, ContextOverflow, Event, Json, Turn, Usage

BODY = SAMPLING | {
    *("model", "messages", "system", "tools", "tool_choice", "max_tokens", "stop_sequences", "stream"),
    *("thinking", "output_config", "output_format", "context_management", "mcp_servers"),
    # change no token
    *("metadata", "service_tier", "cache_control", "inference_geo", "betas", "speed"),
}
MESSAGE = {"role", "content", "cache_control", "id", "type", "model", "stop_reason", "stop_sequence", "usage"}
BILLING = re.compile(r"\Ax-anthropic-billing-header:[^\n]*\n*")
"""changes with each conversation, and says nothing to the model"""
TEXT = {"text": "text"}
USER_BLOCKS = ("text", "tool_result")
ASSISTANT_BLOCKS = ("text", "thinking", "redacted_thinking", "tool_use")
ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


class Messages:
    path = "/v1/messages"
    done = False

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> Turn:
        body, notes = load(raw), []
        note_unknown(body, BODY, notes)
        _refuse(body, notes)
        messages = with_names(_messages(body, notes))
        tools = _tools(body, notes)
        return Turn(
            model=body["model"].text(),
            messages=messages,
            tools=tools,
            sampling=sampling(body, ("max_tokens",), "stop_sequences"),
            stream=body["stream"].flag(),
            kind=kind_of_call(headers, body.value, messages, tools),
            notes=tuple(notes),
            identity=identity(headers, body.value),
        )

    def parse_count(self, raw: bytes, headers: Mapping[str, str]) -> Turn:
        """Of a body for /v1/messages/count_tokens, whose answer is `{"input_tokens": n}`."""
        return replace(self.parse(raw, headers), kind="count", stream=False)

    def writer(self, turn: Turn, name: str, created: int) -> "MessageWriter":
        return MessageWriter(turn, name)

    def error(self, error: ApiError) -> Json:
        kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
        message = error.message
        if isinstance(error, ContextOverflow):
            message = f"prompt is too long: {error.prompt_tokens} tokens > {error.most} maximum"
        return {"type": "error", "error": {"type": kind, "message": message}}


WIRE = Messages()


def _refuse(body: Field, notes: list[str]) -> None:
    """What would change the answer and cannot be had, and what is left out with a note."""
    config = body["output_config"] if body["output_config"] else Field({}, "output_config")
    for form in (body["output_format"], config["format"]):
        if form and form["type"].text() != "text":
            raise form.error("text is not constrained to a form; ask for it in the prompt and leave this out")
    note_effort(config["effort"], notes)
    note_effort(body["thinking"], notes)
    if body["mcp_servers"].value:
        note(notes, "mcp_servers: their tools are not called from here; ignored")
    edits = body["context_management"]["edits"] if body["context_management"] else Field(None)
    for edit in edits.items():
        if edit["keep"].value != "all":
            note(notes, f"{edit.where}: the history is read as it was sent; {edit['type'].text()[:40]!r} is ignored")


def _tools(body: Field, notes: list[str]) -> tuple[Tool, ...]:
    tools: list[tuple[Field, Tool]] = []
    for item in body["tools"].items():
        if item["type"].text("custom") in ("custom", "function"):
            tools.append((item, function(item, "input_schema", notes)))
        else:
            hosted(item, notes)
    found = unique(tools)
    wanted = body["tool_choice"]
    if wanted and wanted["disable_parallel_tool_use"].flag():
        note(notes, f"tool_choice.disable_parallel_tool_use: {SEVERAL}")
    return found if choice(wanted, wanted["type"].text() if wanted else "auto") else ()


def _messages(body: Field, notes: list[str]) -> list[Message]:
    system = _system(body["system"])
    messages: list[Message] = [{"role": "system", "content": system}] if system else []
    given = list(body["messages"].items())
    if not given:
        raise body["messages"].error("there must be at least one")
    for item in given:
        note_unknown(item, MESSAGE, notes)
        role = item["role"].text()
        if role == "assistant":
            messages.append(_assistant(item["content"]))
        elif role == "user":
            messages += _user(item["content"])
        elif role == "system":
            messages.append({"role": "system", "content": _system(item["content"])})
        else:
            raise item["role"].error(f"{role[:40]!r} is unknown; use user, assistant or system")
    return messages


def _system(content: Field) -> str:
    """Without the billing header: a block, or the first line of a string."""
    if not isinstance(content.value, list):
        return BILLING.sub("", content.text(""))
    blocks = [parts(Field([block.value], content.where), TEXT) for block in content.items()]
    return "\n".join(text for block in blocks if (text := BILLING.sub("", block)) or not block)


def _user(content: Field) -> list[Message]:
    if not isinstance(content.value, list):
        return [{"role": "user", "content": content.text()}]
    messages: list[Message] = []
    before = ""
    for block in content.items():
        kind = kind_of(block, USER_BLOCKS, "only text can be read")
        if kind == "tool_result":
            result = parts(block["content"], TEXT)
            messages.append({"role": "tool", "content": result, "tool_call_id": block["tool_use_id"].text()})
        elif before == "text":
            messages[-1]["content"] += "\n" + block["text"].text()
        else:
            messages.append({"role": "user", "content": block["text"].text()})
        before = kind
    return messages or [{"role": "user", "content": ""}]


def _assistant(content: Field) -> Message:
    if not isinstance(content.value, list):
        return assistant(content.text(""), "", [], [])
    texts: dict[str, list[str]] = {"text": [], "thinking": []}
    calls: list[ToolCall] = []
    ids: list[str] = []
    for block in content.items():
        kind = kind_of(block, ASSISTANT_BLOCKS, "it is no part of a turn here")
        if kind == "tool_use":
            calls.append({"id": block["id"].text(), "name": block["name"].text(), "arguments": _input(block["input"])})
            ids.append(calls[-1]["id"])
        elif kind in texts:
            texts[kind].append(block[kind].text())
            ids.append(block["signature"].text(""))
    return assistant("".join(texts["text"]), "".join(texts["thinking"]), calls, ids)


def _input(given: Field) -> str:
    """JSON text of a call's arguments; of those that Claude Code could not read, the text that they were."""
    unread = given["__unparsedToolInput"] if given else Field(None)
    if unread and isinstance(unread.value, dict) and unread["raw"]:
        return unread["raw"].text()
    return given.json() if given else "{}"


class MessageWriter(BlockWriter):
    """Thinking is signed with the record's name, which clients send back."""

    def __init__(self, turn: Turn, name: str) -> None:
        super().__init__()
        self._turn, self._name = turn, name
        self._reason: str | None = None
        self._stop: str | None = None
        self._usage = Usage(prompt=0)

    def begin(self, usage: Usage) -> list[Event]:
        self._usage = usage
        return [self._event("message_start", message=self.whole() | {"content": []})]

    def end(self, cut: bool, usage: Usage, stop: str | None = None) -> list[Event]:
        self._usage = usage
        if cut:
            self._reason = "max_tokens"
        elif self.calls:
            self._reason = "tool_use"
        else:
            self._reason, self._stop = "end_turn" if stop is None else "stop_sequence", stop
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        ends = [self._event("message_delta", delta=delta, usage=_counts(usage)), self._event("message_stop")]
        return [*self.close_last(), *ends]

    def whole(self) -> Json:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "model": self._turn.model,
            "content": [self._content(block, written=True) for block in self.blocks],
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": _counts(self._usage),
        }

    def fail(self, error: ApiError) -> list[Event]:
        return [("error", WIRE.error(error))]

    def open(self, block: Block) -> list[Event]:
        content = self._content(block, written=False)
        return [self._event("content_block_start", index=block.index, content_block=content)]

    def grow(self, block: Block, text: str) -> list[Event]:
        if block.kind == "call":
            return [self._delta(block, "input_json_delta", partial_json=text)]
        return [self._delta(block, f"{block.kind}_delta", **{block.kind: text})]

    def close(self, block: Block) -> list[Event]:
        signed = [self._delta(block, "signature_delta", signature=self._name)] if block.kind == "thinking" else []
        return [*signed, self._event("content_block_stop", index=block.index)]

    def _content(self, block: Block, written: bool) -> Json:
        """A block as it is, or as it starts."""
        text = block.text if written else ""
        if block.kind == "text":
            return {"type": "text", "text": text}
        if block.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": self._name if written else ""}
        called = {"id": f"toolu_{self._name}_{block.nth}", "name": block.name}
        return {"type": "tool_use", **called, "input": _object(text) if written else {}}

    def _delta(self, block: Block, kind: str, **data: str) -> Event:
        return self._event("content_block_delta", index=block.index, delta={"type": kind, **data})

    @staticmethod
    def _event(kind: str, **data: Any) -> Event:
        return kind, {"type": kind, **data}


def _object(arguments: str) -> Json:
    """A call's arguments. A number that JSON has no value for is null, as JavaScript writes it."""
    value = json.loads(arguments, parse_constant=lambda _: None, parse_float=_finite)
    assert isinstance(value, dict), "a call's arguments are an object: others stay text"
    return value


def _finite(text: str) -> float | None:
    value = float(text)
    return value if abs(value) != float("inf") else None


def _counts(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.sampled,
    }
