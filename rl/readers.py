"""Sampled ids to pieces of a message, as they come. To parse a turn is to read all of it, so that a stream and the whole agree.

Markers (`<think>`, `<tool_call>`) are control tokens where the tokenizer has such, and then their spelling in other tokens is
text; elsewhere they are their spelling. Readers see one text, in which a control token stands as a sign that no decoded text
holds (a lone surrogate).
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, Protocol

from inference.calls import CLOSE, OPEN, FoundCall, ToolCalls, hermes_call
from inference.text import Detokenizer, StopStrings
from rl.messages import Message, Piece, message_of

THINK, UNTHINK = "<think>", "</think>"
MARKERS = (THINK, UNTHINK, OPEN, CLOSE)
SIGNS: dict[str, str] = dict(zip(MARKERS, "\ud800\ud801\ud802\ud803", strict=True))
SPELL = re.compile("[\ud800-\ud803]")
LINES = "\n\n"
"""between thinking and content"""

Thinking = Literal["none", "free", "open"]
"""whether a turn has thinking: none; where the turn begins with the marker; always, as the prompt ends with the marker"""


class TokenizerLike(Protocol):
    """What renderers need of a tokenizer (models.tokenizer has two)."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str, allow_special: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str: ...

    def special_id(self, token: str) -> int: ...


class Reader(Protocol):
    """Reads one assistant's turn."""

    def add(self, ids: Sequence[int]) -> list[Piece]:
        """The pieces that are certain; nothing after a stop id."""
        ...

    def flush(self) -> list[Piece]:
        """At the end of the turn, whether by a stop id or cut: what was held back."""
        ...


class CallFinder(Protocol):
    """Finds calls in a text as it comes."""

    def parts(self, text: str) -> list[str | FoundCall]: ...

    def flush(self) -> str | FoundCall: ...


def marker(tokenizer: TokenizerLike, text: str) -> int | str:
    """The control token's id; the text itself where the tokenizer has none of it."""
    try:
        return tokenizer.special_id(text)
    except ValueError:
        return text


def read(reader: Reader, ids: Sequence[int], name: str = "") -> Message:
    """The assistant's message in sampled ids."""
    return message_of([*reader.add(ids), *reader.flush()], name)


class TurnReader:
    """Reads the turns of a format that has thinking in front, then text and calls.

    Args:
        stop_ids: end the turn.
        calls: makes the finder of calls, given what the markers of a call look like and how to spell what is between them.
    """

    def __init__(
        self,
        tokenizer: TokenizerLike,
        stop_ids: Sequence[int],
        calls: Callable[[Mapping[str, str]], CallFinder],
        thinking: Thinking = "none",
    ) -> None:
        found = {text: marker(tokenizer, text) for text in MARKERS}
        self._signs = {token: SIGNS[text] for text, token in found.items() if isinstance(token, int)}
        looks = {text: text if isinstance(token, str) else SIGNS[text] for text, token in found.items()}
        self._tokenizer, self._stop_ids = tokenizer, frozenset(stop_ids)
        self._detokenizer = Detokenizer(tokenizer, skip_special=False)
        self._thoughts = _Thoughts(looks[THINK], looks[UNTHINK], thinking)
        self._calls = calls(looks)
        self._over = False

    def add(self, ids: Sequence[int]) -> list[Piece]:
        text = ""
        for token in map(int, ids):
            self._over = self._over or token in self._stop_ids
            if self._over:
                break
            if token in self._signs:
                text += self._detokenizer.flush() + self._signs[token]
                self._detokenizer = Detokenizer(self._tokenizer, skip_special=False)
                self._detokenizer.add([token])  # what follows stands inside of a text
            else:
                text += self._detokenizer.add([token])
        return self._pieces(*self._thoughts.add(text))

    def flush(self) -> list[Piece]:
        pieces = self._pieces(*self._thoughts.add(self._detokenizer.flush()))
        self._detokenizer = Detokenizer(self._tokenizer, skip_special=False)
        return [*pieces, *self._pieces(*self._thoughts.flush()), *self._listed([self._calls.flush()])]

    def _pieces(self, thinking: str, content: str) -> list[Piece]:
        thoughts = [Piece("thinking", spelled(thinking))] if thinking else []
        return [*thoughts, *self._listed(self._calls.parts(content))]

    def _listed(self, parts: Sequence[str | FoundCall]) -> list[Piece]:
        return [
            Piece("text", spelled(part)) if isinstance(part, str) else Piece("call", part.arguments, part.name)
            for part in parts
            if part
        ]


def spelled(text: str) -> str:
    """A text with control tokens as they are written."""
    return SPELL.sub(lambda sign: MARKERS[ord(sign.group()) - 0xD800], text)


def hermes(looks: Mapping[str, str]) -> ToolCalls:
    """Finds `<tool_call>` with JSON in it (see `TurnReader`)."""
    return ToolCalls(lambda body: hermes_call(spelled(body)), looks[OPEN], looks[CLOSE])


class NoCalls:
    """Finds none: for formats that have no place for calls."""

    def __init__(self, looks: Mapping[str, str]) -> None:
        pass

    def parts(self, text: str) -> list[str | FoundCall]:
        return [text]

    def flush(self) -> str:
        return ""


class _Thoughts:
    """Parts a text in thinking and content; line breaks inside of the markers, and two after them, are markup."""

    def __init__(self, opening: str, closing: str, thinking: Thinking) -> None:
        self._opening = opening
        self._finder = StopStrings(["\n" + closing, closing])
        self._state: Literal["start", "first", "thinking", "after", "content"]
        """before the marker; right behind it; inside; right behind the end; behind all that"""
        self._state = "start" if thinking == "free" else "thinking" if thinking == "open" else "content"
        self._held = ""

    def add(self, text: str) -> tuple[str, str]:
        """(thinking, content)"""
        thinking = ""
        if self._state == "start":
            text = self._start(text)
        if self._state in ("first", "thinking"):
            shown, found = self._finder.add(text)
            if self._state == "first" and shown:
                self._state, shown = "thinking", shown.removeprefix("\n")
            thinking, text = shown, ""
            if found is not None:
                self._state, text = "after", self._finder.rest
        if self._state == "after":
            text = self._after(text)
        return thinking, text if self._state == "content" else ""

    def flush(self) -> tuple[str, str]:
        """At the end of the text: what was held back."""
        state, held, self._held = self._state, self._held, ""
        if state in ("first", "thinking"):
            rest = self._finder.flush()
            return ("" if rest == "\n" else rest.removeprefix("\n") if state == "first" else rest), ""
        self._state = "content"
        return "", held if state == "start" else ""

    def _start(self, text: str) -> str:
        """White space before the marker belongs to it; anything else is content."""
        text = self._held + text
        begins = text.lstrip()
        if begins.startswith(self._opening):
            self._state, self._held = "first", ""
            return begins[len(self._opening) :]
        if self._opening.startswith(begins):
            self._held = text
            return ""
        self._state, self._held = "content", ""
        return text

    def _after(self, text: str) -> str:
        text = self._held + text
        if len(text) < len(LINES) and LINES.startswith(text):
            self._held = text
            return ""
        self._state, self._held = "content", ""
        return text.removeprefix("\n").removeprefix("\n")
