"""The conversations of an episode: what is asked in each, and whose it is in the tree of calls."""

from collections.abc import Sequence
from dataclasses import dataclass

from rl.agents import MAIN, Ask
from rl.graph import Graph
from rl.histories import Histories, Prompt
from rl.messages import Message, Tool
from rl.records import Call
from rl.renderers import Renderer


@dataclass
class Conversation:
    """A call, and how far it is."""

    call: Call
    node: int | None = None
    asked: int = 0


class Conversations:
    """Those of one episode; its own is there from the beginning."""

    def __init__(self, graph: Graph, renderer: Renderer):
        self.graph = graph
        self.by_name = {MAIN: Conversation(graph.calls[0])}
        self._histories = Histories(graph, renderer)

    def prompt_of(self, messages: Sequence[Message], tools: Sequence[Tool]) -> Prompt:
        """The ids to sample after, whoever asked before. ValueError if the renderer has no form for these messages."""
        return self._histories.prompt(messages, tools)

    def asks(self, ask: Ask, prompt: Prompt) -> Conversation:
        """Puts a prompt in the record, as a new call's where the conversation has not asked before.

        Raises:
            ValueError: its parent is no conversation.
        """
        conversation = self.by_name.get(ask.call) or self._begin(ask)
        kind = "tool" if prompt.node is not None else "prompt" if conversation.node is None else "summary"
        conversation.node = self.graph.extend(
            prompt.ids, messages=prompt.new, kind=kind, call=conversation.call.id, after=prompt.node
        )
        conversation.asked += 1
        return conversation

    def answered(self, conversation: Conversation, prompt: Prompt, node: int, message: Message) -> None:
        conversation.node = node
        self._histories.said(prompt.digest, message, node)

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
