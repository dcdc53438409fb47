"""What the dialects of agent programs have in common: a turn that is asked for, and an answer that goes out piece by piece.

    body + headers --wire.parse--> Turn --gateway: engine--> pieces --wire.writer--> events, or one JSON object

The dialects are in wire_chat.py (OpenAI Chat Completions), wire_responses.py (OpenAI Responses), wire_messages.py (Anthropic
Messages). Nothing here knows tokens.
"""

import re
import secrets
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from inference.errors import ApiError
from rl.messages import CallKind, Message, Piece, Tool

Json = dict[str, Any]
Event = tuple[str, Json]
"""of a stream: its name ("" for dialects without), and its data"""
RECORD = re.compile(r"tx[0-9a-f]{20}")


class PromptTooLong(ApiError):
    """A prompt that does not fit; each dialect says it in the words at which its clients compact their history."""

    def __init__(self, prompt_tokens: int, most: int) -> None:
        super().__init__(
            f"This model's maximum context length is {most} tokens. However, your messages resulted in {prompt_tokens} tokens; "
            f"shorten them",
            code="context_length_exceeded",
        )
        self.prompt_tokens, self.most = prompt_tokens, most


@dataclass(frozen=True, kw_only=True)
class Identity:
    """Who asks, from the client's own headers."""

    session: str | None = None
    """the root conversation; None: the client does not say"""
    agent: str = "main"
    """a conversation in it; "main" is the root's own"""
    parent: str | None = None
    """the agent that started this one, where it is known; "main" for the root's own"""


@dataclass(frozen=True, kw_only=True)
class Turn:
    """The next turn of a conversation, asked for in some dialect."""

    model: str
    messages: tuple[Message, ...]
    """at least one. Markers that come and go (cache_control, billing headers) are out, text parts are put together"""
    tools: tuple[Tool, ...] = ()
    sampling: Mapping[str, Any] = field(default_factory=dict)
    """fields of SamplingParams that the client sets; `max_tokens` may be missing"""
    stream: bool = False
    kind: CallKind = "turn"
    notes: tuple[str, ...] = ()
    """what was asked for and is not done, for people: "tools: hosted tool web_search is ignored" """
    identity: Identity = field(default_factory=Identity)


@dataclass(frozen=True, kw_only=True)
class Usage:
    """True counts: clients compact their history by them."""

    prompt: int
    cached: int = 0
    sampled: int = 0


class Writer(Protocol):
    """Writes one answer. `begin`, any number of `add`, `end`, in this order; `whole` after `end`."""

    def begin(self, usage: Usage) -> list[Event]: ...

    def add(self, pieces: Sequence[Piece]) -> list[Event]:
        """Pieces as they come; those of one kind that follow each other are one block."""
        ...

    def end(self, cut: bool, usage: Usage, stop: str | None = None) -> list[Event]:
        """
        Args:
            cut: max_tokens or the context ended it.
            stop: the client's own stop string that ended it.
        """
        ...

    def whole(self) -> Json:
        """The answer as one object, the same content as the events'."""
        ...

    def fail(self, error: ApiError) -> list[Event]:
        """An error in the middle of a stream."""
        ...


class Wire(Protocol):
    """A dialect."""

    path: str
    """that clients POST to, after any prefix: /v1/messages"""
    done: bool
    """whether a stream ends with `data: [DONE]`"""

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> Turn:
        """
        Args:
            headers: names in lower case.

        Raises:
            ApiError: names the field and the fix.
        """
        ...

    def writer(self, turn: Turn, name: str, created: int) -> Writer:
        """
        Args:
            name: of the record (`new_name`); every id in the answer holds it.
        """
        ...

    def error(self, error: ApiError) -> Json:
        """The body of an answer that is an error; one of code `context_length_exceeded` in the client's own words."""
        ...


def new_name() -> str:
    """Of a record; in every id that its answer has."""
    return f"tx{secrets.token_hex(10)}"


def record_of(identifier: str) -> str | None:
    """The record's name in an id that a client sends back."""
    found = RECORD.search(identifier)
    return None if found is None else found.group()


@dataclass
class Block:
    """What a writer puts out as one: neighbouring pieces of one kind, or a call."""

    kind: Literal["thinking", "text", "call"]
    index: int
    """among all blocks of the answer"""
    nth: int
    """among those of its kind"""
    name: str
    """of a call: the tool"""
    parts: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        return "".join(self.parts)


class BlockWriter(ABC):
    """What the writers have in common: pieces as blocks. A piece without text is in none."""

    def __init__(self) -> None:
        self.blocks: list[Block] = []

    def add(self, pieces: Sequence[Piece]) -> list[Event]:
        events: list[Event] = []
        for piece in pieces:
            if not piece.text:
                continue
            if not self.blocks or piece.kind == "call" or piece.kind != self.blocks[-1].kind:
                events += self.close_last()
                nth = sum(block.kind == piece.kind for block in self.blocks)
                self.blocks.append(Block(piece.kind, len(self.blocks), nth, piece.name))
                events += self.open(self.blocks[-1])
            self.blocks[-1].parts.append(piece.text)
            events += self.grow(self.blocks[-1], piece.text)
        return events

    def close_last(self) -> list[Event]:
        return self.close(self.blocks[-1]) if self.blocks else []

    def joined(self, kind: str) -> str:
        return "".join(block.text for block in self.blocks if block.kind == kind)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.kind == "call"]

    @abstractmethod
    def open(self, block: Block) -> list[Event]: ...

    @abstractmethod
    def grow(self, block: Block, text: str) -> list[Event]: ...

    @abstractmethod
    def close(self, block: Block) -> list[Event]: ...
