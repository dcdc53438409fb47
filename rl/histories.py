"""The conversations of an episode: which ids a history that is given whole has, and whose it is in the tree of calls."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rl.agents import MAIN, Ask
from rl.graph import Graph
from rl.messages import Message, Tool, chain, tools_digest
from rl.records import Call
from rl.renderers import Renderer


class Prompt(NamedTuple):
    ids: list[int]
    new: Sequence[Message]
    """what stands after the part that was sampled before; of a history rendered anew, all of it"""
    extends: bool
    """whether it goes on from a sampled answer, token for token"""
    tools: Sequence[Tool]
    digest: bytes
    """names the history; `chain(digest, answer)` names it with an answer"""


@dataclass
class Conversation:
    """A call, and how far it is."""

    call: Call
    node: int | None = None
    asked: int = 0


class Conversations:
    """Those of one episode; its own is there from the beginning."""

    def __init__(self, graph: Graph, renderer: Renderer):
        self.graph, self.renderer = graph, renderer
        self.by_name = {MAIN: Conversation(graph.calls[0])}
        self._known: dict[bytes, int] = {}
        """names of histories that end in a sampled answer -> the answer's node"""

    def prompt_of(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Prompt:
        """The ids to sample after: what was sampled of a history stands as it was sampled, whoever asked; the rest is rendered.

        Raises:
            ValueError: the renderer has no form for these messages.
        """
        digest, last, node = tools_digest(tools), 0, None
        for number, message in enumerate(messages, 1):
            digest = chain(digest, message)
            if digest in self._known:
                last, node = number, self._known[digest]
        new = messages[last:]
        if node is not None and not any(message["role"] == "assistant" for message in new):
            ids = self.graph.path_ids(node)
            bridge = self.renderer.bridge(ids, new, tools)
            if bridge is not None:
                return Prompt([*ids, *bridge], new, True, tools, digest)
        return Prompt(self.renderer.render(messages, tools), messages, False, tools, digest)

    def asks(self, ask: Ask, prompt: Prompt) -> Conversation:
        """Puts a prompt in the record, as a new call's where the conversation has not asked before.

        Raises:
            ValueError: its parent is no conversation.
        """
        conversation = self.by_name.get(ask.call) or self._begin(ask)
        kind = "tool" if prompt.extends else "prompt" if conversation.node is None else "summary"
        conversation.node = self.graph.extend(prompt.ids, messages=prompt.new, kind=kind, call=conversation.call.id)
        conversation.asked += 1
        return conversation

    def answered(self, conversation: Conversation, prompt: Prompt, node: int, message: Message) -> None:
        conversation.node = node
        self._known[chain(prompt.digest, message)] = node

    def _begin(self, ask: Ask) -> Conversation:
        parent, calls = self.by_name.get(ask.parent), self.graph.calls
        if parent is None:
            raise ValueError(f"parent: no conversation {ask.parent!r} has asked yet; there is {', '.join(self.by_name)}")
        call = Call(
            id=len(calls),
            parent=parent.call.id,
            agent=ask.call,
            role=ask.role,
            depth=parent.call.depth + 1,
            position=len(self.graph.path_ids(parent.node)),
            trainable=calls[0].trainable and ask.trainable,
        )
        calls.append(call)
        self.by_name[ask.call] = Conversation(call)
        return self.by_name[ask.call]
