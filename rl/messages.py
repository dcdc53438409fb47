"""Messages, tools and tool calls, as renderers, environments, agents and the gateway have them; and when two mean the same.

Imports nothing of twinax: workers of environments start with it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, NotRequired, TypedDict

ENCODER = json.JSONEncoder(sort_keys=True, ensure_ascii=False, separators=(",", ":"), default=dict)
"""made once: `json.dumps` makes one for each value, and a gateway has many for every request"""
CallKind = Literal["turn", "title", "compaction"]
"""what a request to the model is for; all but turns are auxiliary"""


class ToolCall(TypedDict):
    """A call that an assistant's message makes. Data: nothing here runs anything."""

    id: str
    """names the call to clients, who send it back with the result; no part of what the model reads or writes"""
    name: str
    arguments: str
    """JSON text of an object, as it was written"""


class Message(TypedDict):
    """One turn; role is system, user, assistant or tool.

    thinking: an assistant's reasoning, without its markers.
    tool_calls: an assistant's. What looks like a call and is none stays in its content, as text.
    tool_call_id, name: of a tool's result: the call that it answers, and the tool.
    id: of an assistant's message: what the record calls it, where a client has sent that back.
    """

    role: str
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[ToolCall]]
    tool_call_id: NotRequired[str]
    name: NotRequired[str]
    id: NotRequired[str]


class Tool(TypedDict):
    """A function that a model may call; the one form of it, whatever form a client has sent."""

    name: str
    description: str
    parameters: Mapping[str, Any]
    """JSON schema of an object"""


class Piece(NamedTuple):
    """A part of an assistant's turn while it is sampled. All pieces of a turn make up its message."""

    kind: Literal["thinking", "text", "call"]
    text: str
    """of a call, the JSON text of its arguments"""
    name: str = ""
    """of a call: the tool"""


def message_of(pieces: Sequence[Piece], name: str = "") -> Message:
    """The assistant's message that pieces make up.

    Args:
        name: of the message; its calls are named NAME_0, NAME_1, ...
    """
    message: Message = {"role": "assistant", "content": "".join(piece.text for piece in pieces if piece.kind == "text")}
    thinking = [piece.text for piece in pieces if piece.kind == "thinking"]
    if thinking:
        message["thinking"] = "".join(thinking)
    calls = [piece for piece in pieces if piece.kind == "call"]
    if calls:
        message["tool_calls"] = [
            {"id": f"{name}_{i}", "name": call.name, "arguments": call.text} for i, call in enumerate(calls)
        ]
    return message


def same_json(text: str) -> str:
    """JSON text in the one form that all texts of the same value have; what is no JSON as it stands.

    Numbers compare as values (1.0 is 1), the order of keys does not matter.
    """
    try:
        return canonical(json.loads(text))
    except (ValueError, RecursionError):
        return text


def canonical(value: Any) -> str:
    """The one JSON text of a value."""
    return ENCODER.encode(_plain(value))


def _plain(value: Any) -> Any:
    if isinstance(value, str):  # most are, and a gateway does this to every history that it is sent
        return value
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return int(value) if isinstance(value, float) and value.is_integer() else value


def meaning(message: Message) -> tuple[Any, ...]:
    """What two messages must have in common to be the same: ids do not count, arguments compare as data.

    Thinking of no text is none: clients leave it out when they send a turn back.
    """
    calls = [(call["name"], same_json(call["arguments"])) for call in message.get("tool_calls", ())]
    return message["role"], message["content"], message.get("thinking") or None, tuple(calls), message.get("name")


def chain(before: bytes, message: Message) -> bytes:
    """Names a conversation: `before` names what stands before this message."""
    return hashlib.sha256(before + repr(meaning(message)).encode()).digest()  # repr escapes what UTF-8 has not


def tools_digest(tools: Sequence[Tool]) -> bytes:
    """Names an empty conversation with these tools; their order counts, as the model reads them in it, and so do forms of
    numbers."""
    return hashlib.sha256(ENCODER.encode(list(tools)).encode("utf-8", "surrogatepass")).digest()
