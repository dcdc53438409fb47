"""Tool calls out of what a model answers, as data: nothing here runs anything."""

import json
import re
import uuid
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from inference.text import StopStrings

OPEN, CLOSE = "<tool_call>", "</tool_call>"


def _no_json(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")


MAX_DEPTH = 64
"""objects and lists within each other in a call's arguments: deeper ones could be sent, but not sent back"""
DECODER = json.JSONDecoder(parse_constant=_no_json)
SPACE = re.compile(r"[ \t\n\r]*")


@dataclass(frozen=True)
class FoundCall:
    """A call of a tool that was found in a model's text."""

    name: str
    arguments: str
    """a JSON object, as text"""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")


Read = Callable[[str], "FoundCall | None"]
"""what is between the markers of a call -> the call, if it is one"""


class ToolCalls:
    """Finds `<tool_call>{"name": ..., "arguments": {...}}</tool_call>` (Hermes, Qwen) in a text as it comes.

    What is no such call stays text. The line break before a call, and white space after one, belong to the markup.

    Args:
        read: reads what is between the markers; other formats have their own.
        before: texts before the opening marker that belong to it.
    """

    def __init__(
        self, read: Read | None = None, opening: str = OPEN, closing: str = CLOSE, before: Sequence[str] = ("\n",)
    ) -> None:
        self._read = read or hermes_call
        self._openings = [*(text + opening for text in before), opening]
        self._closing = closing
        self._finder = StopStrings(self._openings)
        self._opened = ""
        """the markup that opened the call that is being read"""
        self._body = ""
        self._blank = ""
        """white space after a call, held back until something follows"""
        self._after = False
        """whether a call ended here"""

    def add(self, text: str) -> tuple[str, list[FoundCall]]:
        """(text that is certain to be no call, calls that are complete)"""
        parts = self.parts(text)
        shown = "".join(part for part in parts if isinstance(part, str))
        return shown, [part for part in parts if isinstance(part, FoundCall)]

    def parts(self, text: str) -> list[str | FoundCall]:
        """The same, in the order in which they stand."""
        parts: list[str | FoundCall] = []
        while True:
            new, found = self._finder.add(text)
            if self._opened:
                self._body += new
            else:
                parts.append(self._spaced(new))
            if found is None:
                return [part for part in parts if part]
            text = self._finder.rest
            if self._opened:
                call = self._read(self._body)
                if call is not None:
                    parts.append(call)
                    self._after, self._blank = True, ""
                else:
                    parts.append(self._spaced(self._opened + self._body + self._closing))
                self._opened, self._body = "", ""
                self._finder = StopStrings(self._openings)
            else:
                self._opened = found
                self._finder = StopStrings([self._closing])

    def flush(self) -> str:
        """At the end of the text: what was held back; a call without an end is text."""
        rest = self._opened + self._body + self._finder.flush()
        self._opened = self._body = ""
        return self._spaced(rest)

    def _spaced(self, text: str) -> str:
        if self._after and not text.strip():
            self._blank += text
            return ""
        text, self._blank, self._after = self._blank + text, "", False
        return text


def hermes_call(body: str, arguments: str = "arguments") -> FoundCall | None:
    """The call in `{"name": ..., "arguments": {...}}`, its arguments as they are written; None where it is none.

    Args:
        arguments: what the format calls them.
    """
    try:
        call = members(body)
    except (ValueError, RecursionError):
        return None
    name, text = call.get("name", (None, "")), call.get(arguments, (None, ""))
    if too_deep(text[0]):
        return None
    return FoundCall(name[0], text[1]) if isinstance(name[0], str) and name[0] and isinstance(text[0], dict) else None


def too_deep(value: Any) -> bool:
    """Whether a JSON value is nested deeper than `MAX_DEPTH`."""
    level = [value]
    for _ in range(MAX_DEPTH):
        level = [inner for outer in level for inner in _inside(outer)]
        if not level:
            return False
    return True


def _inside(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def members(text: str) -> dict[str, tuple[Any, str]]:
    """Members of the JSON object that a text is: value, and the text of the value as it is written.

    Raises:
        ValueError: the text is no JSON object.
        RecursionError: it is nested too deeply.
    """
    found: dict[str, tuple[Any, str]] = {}
    at = _expect(text, 0, "{")
    if text[at : at + 1] == "}":
        return _whole(found, text, at + 1)
    while True:
        if text[at : at + 1] != '"':
            raise ValueError(f"no JSON object: expected a name at {at}")
        name, at = DECODER.raw_decode(text, at)
        begin = _expect(text, at, ":")
        value, end = DECODER.raw_decode(text, begin)
        found[name] = value, text[begin:end]
        at = SPACE.match(text, end).end()  # pyright: ignore[reportOptionalMemberAccess]: it matches nothing too
        if text[at : at + 1] == "}":
            return _whole(found, text, at + 1)
        at = _expect(text, at, ",")


def _expect(text: str, at: int, sign: str) -> int:
    """Where what follows a sign begins, with the white space around it left out."""
    match = re.compile(rf"[ \t\n\r]*{re.escape(sign)}[ \t\n\r]*").match(text, at)
    if match is None:
        raise ValueError(f"no JSON object: expected {sign} at {at}")
    return match.end()


def _whole(found: dict[str, tuple[Any, str]], text: str, end: int) -> dict[str, tuple[Any, str]]:
    if text[end:].strip(" \t\n\r"):
        raise ValueError(f"no JSON object: it ends at {end}, but more follows")
    return found
