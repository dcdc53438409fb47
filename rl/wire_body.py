"""Reading the bodies of agent programs: any bytes give a value of the right type, or an ApiError that names the field.

Programs send more with every version, so what is not known is ignored, with a note; a field that is known must have its type.
"""

import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from typing import Any, NoReturn

from inference.calls import MAX_DEPTH, too_deep
from inference.errors import ApiError
from rl.messages import ENCODER, Message, Tool, ToolCall
from rl.wires import Json, record_of

MAX_INT = 2**31 - 1
HALF = re.compile("[\ud800-\udfff]")
"""half of a surrogate pair: JSON may escape one, UTF-8 has none"""
SEVERAL = "the model may make several calls in one turn; ignored"
BROKEN = "has half of a surrogate pair, which is no text; cut strings between characters"


class Field:
    """A value in a body and the place where it stands. A null is as good as nothing.

    Args:
        name: in the object or list that it stands in, or the whole of its place where `outer` is not given.
    """

    __slots__ = ("_name", "_outer", "value")

    def __init__(self, value: Any, name: str | int = "", outer: "Field | None" = None) -> None:
        self.value, self._name, self._outer = value, name, outer

    @property
    def where(self) -> str:
        """Put together when it is asked for: most fields have nothing to complain of."""
        before = "" if self._outer is None else self._outer.where
        return f"{before}.{self._name}" if before else str(self._name)

    def __getitem__(self, name: str) -> "Field":
        return Field(self.object().get(name), name, self)

    def __bool__(self) -> bool:
        """Whether it is there."""
        return self.value is not None

    def error(self, message: str) -> ApiError:
        return ApiError(f"{self.where or 'body'}: {message}", param=self.where or None)

    def object(self) -> Json:
        if not isinstance(self.value, dict):
            raise self._mistyped("an object")
        return self.value

    def items(self) -> "Iterator[Field]":
        """Of a list; nothing is an empty one."""
        if self.value is None:
            return
        if not isinstance(self.value, list):
            raise self._mistyped("a list")
        for i, item in enumerate(self.value):
            yield Field(item, i, self)

    def text(self, default: str | None = None) -> str:
        """
        Args:
            default: if there is nothing; None: it must be there.
        """
        if self.value is None and default is not None:
            return default
        if not isinstance(self.value, str):
            raise self._mistyped("a string")
        if not self.value.isascii() and HALF.search(self.value):
            raise self.error(BROKEN)
        return self.value

    def flag(self) -> bool:
        if not isinstance(self.value, bool | None):
            raise self._mistyped("true or false")
        return bool(self.value)

    def number(self) -> float:
        if isinstance(self.value, bool) or not isinstance(self.value, int | float) or not abs(self.value) <= MAX_INT:
            raise self._mistyped(f"a number, at most {MAX_INT}")
        return float(self.value)

    def integer(self, low: int = 0, high: int = MAX_INT) -> int:
        whole = isinstance(self.value, int) or (isinstance(self.value, float) and self.value.is_integer())
        if isinstance(self.value, bool) or not whole or not low <= self.value <= high:
            raise self._mistyped(f"a whole number in [{low}, {high}]")
        return int(self.value)

    def json(self) -> str:
        """The JSON text of an object; half surrogates, which a model may have written as escapes, are escaped again."""
        text = json.dumps(self.shallow(), ensure_ascii=False)
        return HALF.sub(lambda half: f"\\u{ord(half[0]):04x}", text)

    def shallow(self) -> Json:
        """An object that is nested no deeper than `MAX_DEPTH`."""
        if too_deep(self.object()):
            raise self.error(f"is nested deeper than {MAX_DEPTH}; make it flatter")
        return self.value

    def _mistyped(self, wanted: str) -> ApiError:
        if self.value is None:
            return self.error(f"is required, and is {wanted}")
        kinds = {dict: "an object", list: "a list", str: "a string", bool: "true or false", int: "a number", float: "a number"}
        return self.error(f"must be {wanted}, got {kinds[type(self.value)]}")


def load(raw: bytes) -> Field:
    """The body. ApiError if it is no JSON object."""
    try:
        value = DECODER.decode(raw.decode())
    except RecursionError:
        raise ApiError("body: is nested too deep; make it flatter") from None
    except ValueError as error:  # bad UTF-8 and numbers of thousands of digits too
        raise ApiError(f"body: is no JSON that can be read: {error}; send one object in UTF-8") from None
    body = Field(value)
    body.object()
    return body


def _refuse(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number")


def _finite(text: str) -> float:
    value = float(text)
    return value if math.isfinite(value) else _refuse(text[:40])


def _unique(pairs: list[tuple[str, Any]]) -> Json:
    made = dict(pairs)
    if len(made) < len(pairs):
        seen: set[str] = set()
        twice = next(name for name, _ in pairs if name in seen or seen.add(name))
        raise ValueError(f"{twice[:40]!r} is there twice in one object")
    return made


DECODER = json.JSONDecoder(parse_constant=_refuse, parse_float=_finite, object_pairs_hook=_unique)


def parts(content: Field, kinds: Mapping[str, str], joint: str = "\n") -> str:
    """Text that a client sends as a string or as parts; one part alone is the same as a string.

    Args:
        kinds: of parts that are read, and the field that has their text.
        joint: put between parts.

    Raises:
        ApiError: a part of another kind, such as an image.
    """
    if not isinstance(content.value, list):
        return content.text("")
    return joint.join(part[kinds[kind_of(part, kinds, "only text can be read")]].text() for part in content.items())


def kind_of(part: Field, kinds: Iterable[str], why: str, default: str | None = None) -> str:
    """The `type` of a part or item, one of `kinds`."""
    kind = part["type"].text(default)
    if kind not in kinds:
        raise part["type"].error(f"{kind[:40]!r} is not supported, {why}; it can be {', '.join(sorted(kinds))}")
    return kind


def note_unknown(body: Field, known: Set[str], notes: list[str]) -> None:
    """Notes the fields that are not known."""
    for name in sorted(body.object().keys() - known):
        note(notes, f"{body.where or 'body'}: field {name[:40]!r} is not known and is ignored")


def note(notes: list[str], text: str) -> None:
    if text not in notes and len(notes) < 100:
        notes.append(text)


def note_effort(effort: Field, notes: list[str]) -> None:
    """How much a client wants thought."""
    if effort:
        note(notes, f"{effort.where}: how much the model thinks is its own, and its renderer's; ignored")


def function(tool: Field, schema: str, notes: list[str]) -> Tool:
    """The one form of a function that a client offers, nested as Chat has it or flat.

    Args:
        schema: the field that has its parameters.
    """
    tool = tool["function"] if tool["function"] else tool
    name, parameters = tool["name"].text(), tool[schema]
    if not name:
        raise tool["name"].error("is empty; give the tool a name")
    if tool["strict"].flag():
        note(notes, f"{tool.where}.strict: arguments are not constrained to the schema; ignored")
    if parameters and HALF.search(ENCODER.encode(parameters.shallow())):
        raise parameters.error(BROKEN)
    return {
        "name": name,
        "description": tool["description"].text(""),
        "parameters": parameters.value if parameters else {"type": "object", "properties": {}},
    }


def check_form(form: Field) -> None:
    """Refuses a form that the answer is to have."""
    if form and form["type"].text() != "text":
        raise form.error("text is not constrained to a form; ask for it in the prompt and leave this out")


def hosted(tool: Field, notes: list[str]) -> None:
    """A tool that is none of ours to call: the client's provider would run it."""
    note(notes, f"{tool.where}: hosted tool {tool['type'].text()[:40]!r} is ignored")


def unique(tools: list[tuple[Field, Tool]]) -> tuple[Tool, ...]:
    """Tools as they are read, each with a name of its own."""
    seen: set[str] = set()
    for where, tool in tools:
        if tool["name"] in seen:
            raise where.error(f"a tool before it is called {tool['name'][:80]!r} too; give each a name of its own")
        seen.add(tool["name"])
    return tuple(tool for _, tool in tools)


def choice(wanted: Field, kind: str) -> bool:
    """Whether tools may be called, as a `tool_choice` of that kind has it."""
    if kind not in ("auto", "none"):
        raise wanted.error(f"{kind[:40]!r} is not supported, calls cannot be forced; use 'auto' or 'none'")
    return kind == "auto"


def may_call(body: Field, notes: list[str]) -> bool:
    """Whether tools may be called, in both of OpenAI's dialects."""
    if body["parallel_tool_calls"] and not body["parallel_tool_calls"].flag() and body["tools"].value:
        note(notes, f"parallel_tool_calls: {SEVERAL}")
    wanted = body["tool_choice"]
    return choice(wanted, wanted["type"].text() if isinstance(wanted.value, dict) else wanted.text("auto"))


def arguments(field: Field) -> str:
    """A call's, as the JSON text that they are, or of the object that some clients send; nothing is no argument."""
    if isinstance(field.value, dict):
        return field.json()
    text = field.text("")
    return text if text.strip() else "{}"


def assistant(content: str, thinking: str, calls: list[ToolCall], ids: Iterable[str]) -> Message:
    """An assistant's message.

    Args:
        ids: that the client has sent back; if all that name a record name the same, it is the message's id.
    """
    message: Message = {"role": "assistant", "content": content}
    if thinking:
        message["thinking"] = thinking
    if calls:
        message["tool_calls"] = calls
    records = {record for identifier in ids if (record := record_of(identifier))}
    if len(records) == 1:
        message["id"] = records.pop()
    return message


def with_names(messages: Iterable[Message]) -> tuple[Message, ...]:
    """The same messages, where results of tools have the name of the tool whose call they answer."""
    names: dict[str, str] = {}
    named: list[Message] = []
    for message in messages:
        for call in message.get("tool_calls", ()):
            names[call["id"]] = call["name"]
        name = names.get(message.get("tool_call_id", "")) if message["role"] == "tool" else None
        named.append({**message, "name": name} if name else message)
    return tuple(named)
