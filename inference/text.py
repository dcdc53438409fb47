"""Token ids to text as they come: text that no later token can change, and stop strings that straddle pieces."""

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

UNKNOWN = "\ufffd"
"""what bytes that are no character decode to"""
TAIL = 4
"""tokens, of at least a byte each, that an unfinished character lies within"""


class TokenizerLike(Protocol):
    """What is needed of a tokenizer (models.tokenizer has them)."""

    def encode(self, text: str, allow_special: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str: ...


class _Habits:
    """What single tokens do in a tokenizer's decoded text; found by asking it, and remembered per token."""

    def __init__(self, tokenizer: TokenizerLike, skip_special: bool) -> None:
        self._tokenizer, self._skip_special = tokenizer, skip_special
        self._letter = tokenizer.encode("a")
        """stands before the token asked about: the first piece of a text may lose a space"""
        self._known: dict[int, tuple[str, bool]] = {}
        self._alone: dict[int, str] = {}
        rare = "\U0010eeee"
        ids = tokenizer.encode(rare)
        self._byte = ids[-1] if self.decode(ids) == rare and not self.decode([*ids, ids[-1]]).startswith(rare) else None
        """a token of one byte, where one wrong byte makes the whole run of such tokens unreadable (ByteFallback)"""

    def decode(self, ids: Sequence[int]) -> str:
        return self._tokenizer.decode(ids, self._skip_special)

    def text(self, ids: list[int]) -> str:
        """As `decode`; what one token is alone is kept, as most are asked about alone."""
        if len(ids) != 1:
            return self.decode(ids)
        if ids[0] not in self._alone:
            self._alone[ids[0]] = self.decode(ids)
        return self._alone[ids[0]]

    def of(self, token: int) -> tuple[str, bool]:
        """(what it adds to a text, whether it belongs to a run of bytes that the next token may make unreadable)"""
        if token not in self._known:
            text = self.decode([*self._letter, token])
            run = self._byte is not None and (
                text.endswith(UNKNOWN) or self.decode([*self._letter, token, self._byte]) != text + UNKNOWN
            )
            self._known[token] = text[len(self.decode(self._letter)) :], run
        return self._known[token]


@lru_cache(maxsize=8)
def _habits(tokenizer: TokenizerLike, skip_special: bool) -> _Habits:
    return _Habits(tokenizer, skip_special)


def token_text(tokenizer: TokenizerLike, token: int) -> str:
    """Text of a token inside of a text, control tokens too; bytes that are no character become U+FFFD."""
    return _habits(tokenizer, False).of(token)[0]


class Detokenizer:
    """ids -> text, piece by piece. All pieces together are `tokenizer.decode` of all ids, however they are cut.

    What is returned after some ids depends on these ids alone, not on how they were cut either. A token costs the same
    wherever it stands: it is decoded behind the few before it.
    """

    def __init__(self, tokenizer: TokenizerLike, skip_special: bool = True) -> None:
        self._habits = _habits(tokenizer, skip_special)
        self._shown: list[int] = []
        """the last tokens whose text was returned; they end at the end of a character"""
        self._shown_text = ""
        self._held: list[int] = []
        """tokens after them, whose text may still change"""

    def add(self, ids: Sequence[int]) -> str:
        """The new text that is certain: an unfinished character (a U+FFFD at the end) is held back."""
        return "".join(map(self._add, ids))

    def flush(self) -> str:
        """At the end of all ids: what was held back."""
        text = self._habits.decode(self._shown + self._held)[len(self._shown_text) :]
        self._shown_text += text
        return text

    def _add(self, token: int) -> str:
        own, run = self._habits.of(int(token))
        if not own:
            return ""
        self._held.append(int(token))
        # Many held tokens are bytes that make no characters. Whether the last is one of them shows at their end.
        if run or (len(self._held) > 2 * TAIL and self._habits.decode(self._held[-TAIL:]).endswith(UNKNOWN)):
            return ""
        text = self._habits.decode(self._shown + self._held)
        if text.endswith(UNKNOWN):
            return ""
        new = text[len(self._shown_text) :]
        self._shown, self._held = self._held, []
        self._shown_text = self._habits.text(self._shown)
        return new


class StopStrings:
    """Finds the stop string that a text completes first; of two that end at the same character, the longer.

    Args:
        stops: the strings, none empty.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "an empty string is everywhere"
        self._stops = tuple(stops)
        self._held = ""
        self.found: str | None = None
        self.rest = ""
        """what came behind the one found, in the same piece"""

    def add(self, text: str) -> tuple[str, str | None]:
        """(text that can be shown: nothing that may begin a stop string, nothing from a found one on; the one found)

        After one was found, the rest of the text is not shown.
        """
        if self.found is not None:
            return "", self.found
        self._held += text
        ends = [(at + len(stop), at, stop) for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if ends:
            end, keep, self.found = min(ends)
            self.rest = self._held[end:]
        else:
            keep = min((self._beginning(stop) for stop in self._stops), default=len(self._held))
        shown, self._held = self._held[:keep], self._held[keep:]
        return shown, self.found

    def flush(self) -> str:
        """At the end of the text: what was held back, if no stop string came."""
        held, self._held = self._held, ""
        return held if self.found is None else ""

    def _beginning(self, stop: str) -> int:
        """Where the end of the held text may be the beginning of `stop`."""
        at = self._held.find(stop[0], max(0, len(self._held) - len(stop) + 1))
        while at >= 0 and not stop.startswith(self._held[at:]):
            at = self._held.find(stop[0], at + 1)
        return at if at >= 0 else len(self._held)
