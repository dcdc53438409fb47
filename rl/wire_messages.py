"""Anthropic's Messages, as agent programs speak it. `WIRE` is the dialect (rl/wires.py); its writer is in wire_blocks.py.

A user's message that has results of tools and text is several messages here, in the order of its blocks. Tools that are
deferred until the model has searched for them are not offered at the start; the result that refers to one has its definition.
"""

import json
import re
from collections.abc import Mapping

from inference.errors import ApiError
from rl.identity import identity, kind_of_call
from rl.messages import Message, Tool, ToolCall
from rl.wire_blocks import MessageWriter, error_body
from rl.wire_body import (
    SEVERAL,
    Field,
    assistant,
    check_form,
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
from rl.wires import Json, Turn

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


class Messages:
    path = "/v1/messages"
    done = False

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> Turn:
        body, notes = load(raw), []
        note_unknown(body, BODY, notes)
        _refuse(body, notes)
        tools, deferred = _tools(body, notes)
        messages = with_names(_messages(body, deferred, notes))
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

    def writer(self, turn: Turn, name: str, created: int) -> MessageWriter:
        return MessageWriter(turn, name)

    def error(self, error: ApiError) -> Json:
        return error_body(error)


WIRE = Messages()


def _refuse(body: Field, notes: list[str]) -> None:
    """What would change the answer and cannot be had, and what is left out with a note."""
    config = body["output_config"] if body["output_config"] else Field({}, "output_config")
    for form in (body["output_format"], config["format"]):
        check_form(form)
    note_effort(config["effort"], notes)
    note_effort(body["thinking"], notes)
    if body["mcp_servers"].value:
        note(notes, "mcp_servers: their tools are not called from here; ignored")
    edits = body["context_management"]["edits"] if body["context_management"] else Field(None)
    for edit in edits.items():
        if edit["keep"].value != "all":
            note(notes, f"{edit.where}: the history is read as it was sent; {edit['type'].text()[:40]!r} is ignored")


def _tools(body: Field, notes: list[str]) -> tuple[tuple[Tool, ...], dict[str, Tool]]:
    """Tools that are offered at the start, and deferred ones by name."""
    tools: list[tuple[Field, Tool]] = []
    later: set[str] = set()
    for item in body["tools"].items():
        if item["type"].text("custom") not in ("custom", "function"):
            hosted(item, notes)
            continue
        tools.append((item, function(item, "input_schema", notes)))
        if item["defer_loading"].flag():
            later.add(tools[-1][1]["name"])
    found = unique(tools)
    deferred = {tool["name"]: tool for tool in found if tool["name"] in later}
    wanted = body["tool_choice"]
    if wanted and wanted["disable_parallel_tool_use"].flag():
        note(notes, f"tool_choice.disable_parallel_tool_use: {SEVERAL}")
    offered = choice(wanted, wanted["type"].text() if wanted else "auto")
    return tuple(tool for tool in found if offered and tool["name"] not in later), deferred


def _messages(body: Field, deferred: Mapping[str, Tool], notes: list[str]) -> list[Message]:
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
            messages += _user(item["content"], deferred)
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


def _user(content: Field, deferred: Mapping[str, Tool]) -> list[Message]:
    if not isinstance(content.value, list):
        return [{"role": "user", "content": content.text()}]
    messages: list[Message] = []
    before = ""
    for block in content.items():
        kind = kind_of(block, USER_BLOCKS, "only text can be read")
        if kind == "tool_result":
            result = _result(block["content"], deferred)
            messages.append({"role": "tool", "content": result, "tool_call_id": block["tool_use_id"].text()})
        elif before == "text":
            messages[-1]["content"] += "\n" + block["text"].text()
        else:
            messages.append({"role": "user", "content": block["text"].text()})
        before = kind
    return messages or [{"role": "user", "content": ""}]


def _result(content: Field, deferred: Mapping[str, Tool]) -> str:
    """What a tool has returned; references to deferred tools as what they refer to."""
    if not isinstance(content.value, list):
        return content.text("")
    texts: list[str] = []
    for part in content.items():
        kind = kind_of(part, ("text", "tool_reference"), "only text can be read")
        if kind == "text":
            texts.append(part["text"].text())
            continue
        name = part["tool_name"].text()
        texts.append(json.dumps(deferred[name], ensure_ascii=False) if name in deferred else name)
    return "\n".join(texts)


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
