"""Renderers: messages to token ids and back, so that a conversation only ever grows, token for token.

The law, for a sampled turn `ids` (with its end token, or cut without it) and new messages m2 (or none):

    render(m1 + [assistant] + m2) == render(m1) + ids + bridge(render(m1) + ids, m2)

whenever the sampled ids are the assistant's own encoding; when they are not (another split of the same string), the
right-hand side is the truth and nothing is encoded again. Turn separators are appended exactly once, never sampled. Where a
format rewrites what came before (thinking that is left out), `bridge` is None: the conversation is rendered anew and forks.
"""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from rl.chatml import ROLES, SMOLLM2_SYSTEM, ChatML, SmolLM2
from rl.library import Library
from rl.llama import Llama3
from rl.messages import Message, Tool
from rl.qwen import Qwen3, Qwen25, Qwen35
from rl.readers import Reader, TokenizerLike
from rl.templates import Template

__all__ = [
    "RENDERERS",
    "ROLES",
    "SMOLLM2_SYSTEM",
    "ChatML",
    "Library",
    "Llama3",
    "Qwen3",
    "Qwen25",
    "Qwen35",
    "Reader",
    "Renderer",
    "SmolLM2",
    "Template",
    "TokenizerLike",
]


class Renderer(Protocol):
    """Messages <-> ids for one chat format. `name` and `version` go into run.json."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def extends(self) -> bool:
        """Whether the law above holds for every conversation; otherwise `bridge` may be None."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Any of these, sampled, ends the assistant's turn."""
        ...

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = True) -> list[int]:
        """ids of a conversation.

        Raises:
            ValueError: there is no message, or the format has no form for something in it.
        """
        ...

    def reader(self, tools: Sequence[Tool] = ()) -> Reader:
        """Reads one sampled turn as it comes.

        Args:
            tools: their schemas tell texts from values in formats that write both alike (Qwen3.5).
        """
        ...

    def parse(self, ids: Sequence[int], name: str = "", tools: Sequence[Tool] = ()) -> Message:
        """The assistant's message in sampled ids, up to the first stop id, or whole when the turn was cut: what the reader
        reads of all of them.

        Args:
            name: of the message; its calls are named after it.
        """
        ...

    def bridge(self, prior_ids: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int] | None:
        """What to append to `prior_ids` (which end in a sampled turn): separators, new messages, the next header.

        None: with the new messages, what came before is rendered in another way, or nobody can tell; render it anew.

        Raises:
            ValueError: a message of the assistant is among the new ones.
        """
        ...


RENDERERS: dict[str, Callable[..., Any]] = {
    renderer.name: renderer for renderer in (ChatML, SmolLM2, Qwen25, Qwen3, Qwen35, Llama3, Template, Library)
}
