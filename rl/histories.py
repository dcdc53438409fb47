"""Which ids a conversation that is given whole has: what was sampled of it stays as it was sampled, the rest is rendered.

* A conversation (tools, then messages) is named by a digest of what it means (rl/messages.py), so that markers, the order of
  keys in arguments and the like do not matter. Of sampled turns of one meaning, that whose name a client has sent back counts,
  else the agent's own, else the last one.
* The ids of the longest history that ends in a sampled turn stay, and what follows is put behind them. An assistant's turn that
  was not sampled so (rewritten, repaired, the client's own) is prompt.
* Where nothing fits (a new conversation, a compacted one, a sub-agent, a template that strips thinking) all is rendered.
"""

from collections.abc import Sequence
from typing import NamedTuple

from rl.graph import Graph
from rl.messages import Message, Tool, chain, tools_digest
from rl.renderers import Renderer


class Prompt(NamedTuple):
    ids: list[int]
    """of the whole history, up to the assistant's next turn"""
    new: Sequence[Message]
    """what stands after the part that was sampled before; of a conversation rendered anew, all of it"""
    node: int | None
    """the sampled turn that it goes on from, token for token"""
    tools: Sequence[Tool]
    digest: bytes
    """names the history"""


class Histories:
    """Of one message graph."""

    def __init__(self, graph: Graph, renderer: Renderer) -> None:
        self.graph, self.renderer = graph, renderer
        self._said: dict[bytes, list[int]] = {}
        """history that ends in a sampled turn -> its nodes"""
        self._named: dict[str, int] = {}

    def said(self, digest: bytes, message: Message, node: int, name: str = "") -> None:
        """Takes note of a turn that was sampled.

        Args:
            digest: of the history before it.
            name: that its message has as `id` where it is sent back.
        """
        self._said.setdefault(chain(digest, message), []).append(node)
        if name:
            self._named[name] = node

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = (), call: int | None = None) -> Prompt:
        """The ids to sample after.

        Args:
            call: whose turns come before those of others of the same meaning.

        Raises:
            ValueError: the renderer has no form for these messages.
        """
        links = [tools_digest(tools)]
        for message in messages:
            links.append(chain(links[-1], message))
        for i in range(len(messages), 0, -1):
            node = self._node(links[i], messages[i - 1], call) if messages[i - 1]["role"] == "assistant" else None
            if node is None:
                continue
            ids = self._go_on(self.graph.path_ids(node), messages, i, tools)
            if ids is None:
                break
            return Prompt(ids, messages[i:], node, tools, links[-1])
        return Prompt(self.renderer.render(messages, tools), messages, None, tools, links[-1])

    def _node(self, digest: bytes, message: Message, call: int | None) -> int | None:
        """Of a sampled turn. One that another had superseded counts again: it is the one that the client has chosen."""
        nodes = [node for node in self._said.get(digest, ()) if self.graph.nodes[node].status != "abandoned"]
        if not nodes:
            return None
        named = self._named.get(message.get("id", ""))
        own = [node for node in nodes if self.graph.nodes[node].call == call]
        node = named if named in nodes else (own or nodes)[-1]
        if self.graph.nodes[node].status == "retried":
            self.graph.mark(node, "live" if self.graph.nodes[node].finish_reason == "stop" else "cut")
            self.graph.supersede(node)
        return node

    def _go_on(self, ids: list[int], messages: Sequence[Message], start: int, tools: Sequence[Tool]) -> list[int] | None:
        """`ids`, which end in a sampled turn, and the messages from `start` on; None if no form of them begins with `ids`."""
        new: list[Message] = []
        for i in range(start, len(messages)):
            if messages[i]["role"] != "assistant":
                new.append(messages[i])
                continue
            bridge, said = self.renderer.bridge(ids, new, tools), self._as_prompt(messages[: i + 1], tools)
            if bridge is None or said is None:
                return None
            ids, new = [*ids, *bridge, *said], []
        bridge = self.renderer.bridge(ids, new, tools)
        return None if bridge is None else [*ids, *bridge]

    def _as_prompt(self, messages: Sequence[Message], tools: Sequence[Tool]) -> list[int] | None:
        """ids of the last message, an assistant's that was not sampled, up to the end of its turn."""
        before = self.renderer.render(messages[:-1], tools)
        whole = self.renderer.render(messages, tools, add_generation_prompt=False)
        if whole[: len(before)] != before:
            return None
        ends = [i for i in range(len(before), len(whole)) if whole[i] in self.renderer.stop_ids]
        return whole[len(before) : ends[-1] + 1] if ends else None
