"""The message graph: the only record of an episode, and what training reads.

A node holds the ids that it adds to its parent's path; a branch is a root-to-leaf view. Rules:

* `extend(ids)`: a request whose rendered ids extend a path token for token continues it; otherwise it forks from the
  last node boundary before the first difference. Nodes are never split, so a fork repeats the ids of the node in which
  it diverges, as prompt ids (mask 0): rewritten history is not trained on. Retried and abandoned nodes are closed.
* `add_completion` commits what the engine sampled, after asserting that the path is what the engine was given, that the
  number of log-probs is the sum of the mask, and that versions do not decrease along the path.
* Rows of routing stand where they were first recorded: a completion brings those that its path lacks, up to the last but one
  token. A record with other rows is refused.
* One request id is one node: a repeated commit returns the node there is.
* A branch ends at each sampled node of a trainable call from which no other such node descends. A sampled token on n branches
  weighs 1/n on each, so that it is trained once, and the weights add up to the count of sampled tokens.
"""

import copy
import dataclasses
import math
from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from inference.types import Completion
from models.routes import blank
from rl.environments import Reward
from rl.messages import Message
from rl.records import Branch, Call, Episode, EpisodeStatus, FinishReason, Node, NodeStatus


class Graph:
    """Nodes and calls of one episode, in the order in which they were committed."""

    def __init__(self, episode: Episode, calls: Sequence[Call] = (Call(id=0),)) -> None:
        self.episode = episode
        self.calls = list(calls)
        self.nodes: list[Node] = []
        self._requests: dict[str, int] = {}
        self._children: dict[int | None, list[int]] = {}
        self._newest: list[int] = []
        """of each node: the version of the last sampled id on its path, or -1"""

    def snapshot(self) -> "Graph":
        """The graph as it is now; to be read, and not to be added to."""
        graph = copy.copy(self)
        graph.nodes, graph.calls = list(self.nodes), list(self.calls)
        return graph

    def path(self, node_id: int | None) -> list[int]:
        """Node ids from the root to this node."""
        path: list[int] = []
        while node_id is not None:
            path.append(node_id)
            node_id = self.nodes[node_id].parent
        return path[::-1]

    def path_ids(self, node_id: int | None) -> list[int]:
        """Token ids from the root to the end of this node."""
        ids: list[int] = []
        for i in self.path(node_id):
            ids += self.nodes[i].ids
        return ids

    def routing(self, node_id: int | None) -> np.ndarray | None:
        """The rows of the path to this node, as many as there are; None if there are none."""
        nodes = [self.nodes[i] for i in self.path(node_id)]
        parts = [node.routing for node in nodes if node.routing is not None]
        return np.concatenate(parts) if parts else None

    def newest(self, node_id: int) -> int:
        """The version of the last sampled id on the path to this node; -1 where nothing was sampled."""
        return self._newest[node_id]

    def completion(self, request_id: str) -> Node | None:
        """The node of a request that was committed before."""
        found = self._requests.get(request_id)
        return None if found is None else self.nodes[found]

    def extend(
        self,
        ids: Sequence[int],
        *,
        messages: Sequence[Message] = (),
        kind: Literal["prompt", "tool", "summary"] = "prompt",
        call: int = 0,
        after: int | None = None,
    ) -> int:
        """The node whose path is exactly these ids: found, or added as continuation or fork (module docstring).

        `messages` and `kind` describe what is added; they are not used when the path is there already. The ids begin with
        those of the path to `after`, and go on from there.
        """
        if not ids:
            raise ValueError("ids: a request needs at least one token")
        ids = tuple(ids)
        length, parent = self._longest(ids, after)
        if parent is not None and length == len(ids):
            return parent
        node = Node(
            id=len(self.nodes),
            parent=parent,
            call=call,
            kind=kind,
            ids=tuple(map(int, ids[length:])),
            mask=(False,) * (len(ids) - length),
            messages=tuple(messages),
        )
        return self._commit(node)

    def add_completion(
        self,
        parent: int,
        *,
        request_id: str,
        prompt_ids: Sequence[int],
        ids: Sequence[int],
        logprobs: Sequence[float],
        logprobs_full: Sequence[float],
        versions: Sequence[int],
        temperature: float,
        finish_reason: FinishReason,
        message: Message,
        cached_tokens: int = 0,
        routing: np.ndarray | None = None,
        routing_start: int = 0,
        call: int = 0,
    ) -> int:
        """Commits what the engine sampled after `prompt_ids`, and returns its node.

        The same request id again returns the first node. A completion of no tokens has nothing to commit.
        AssertionError when the record would break a rule; ValueError for a greedy completion of a trainable call, for
        a request id used for something else, or for rows of routing that are not the path's.
        """
        if temperature <= 0 and self.calls[call].trainable:
            raise ValueError(
                "temperature: greedy samples have no sampling distribution to train on; sample with a temperature "
                "above 0, or record the call as not trainable"
            )
        known = self.completion(request_id)
        if known is not None:
            if known.parent != parent or known.ids != tuple(ids):
                raise ValueError(f"request_id: {request_id!r} already names another completion; give each its own id")
            return known.id
        assert self.path_ids(parent) == list(prompt_ids), "the path is not what the engine was given"
        return self._commit(
            Node(
                id=len(self.nodes),
                parent=parent,
                call=call,
                kind="sampled",
                ids=tuple(int(token) for token in ids),
                mask=(True,) * len(ids),
                messages=(message,),
                status="live" if finish_reason == "stop" else "cut",
                logprobs=tuple(float(np.float32(x)) for x in logprobs),
                logprobs_full=tuple(float(np.float32(x)) for x in logprobs_full),
                versions=tuple(int(version) for version in versions),
                temperature=float(temperature),
                finish_reason=finish_reason,
                cached_tokens=cached_tokens,
                request_id=request_id,
                routing=routing,
                routing_start=routing_start,
            )
        )

    def record(self, parent: int, completion: Completion, message: Message, *, temperature: float, call: int) -> int:
        """`add_completion` of what the engine has returned."""
        return self.add_completion(
            parent,
            request_id=completion.request_id,
            prompt_ids=completion.prompt_ids,
            ids=completion.ids.tolist(),
            logprobs=completion.logprobs.tolist(),
            logprobs_full=completion.logprobs_full.tolist(),
            versions=completion.versions.tolist(),
            temperature=temperature,
            finish_reason=completion.finish_reason.value,
            message=message,
            cached_tokens=completion.cached_tokens,
            routing=completion.routing,
            routing_start=completion.routing_start,
            call=call,
        )

    def restore(self, node: Node) -> None:
        """Adds a node of a record, after the same checks as when it was made. AssertionError, or ValueError for its routing."""
        self._commit(node)

    def mark(self, node_id: int, status: NodeStatus) -> None:
        """Changes a node's status; retried and abandoned nodes leave every branch, with all that follows them."""
        self.nodes[node_id] = dataclasses.replace(self.nodes[node_id], status=status)

    def supersede(self, node_id: int) -> None:
        """Of several answers of a call to one question that nothing follows, only this one counts: the others are retried."""
        mine = self.nodes[node_id]
        for other in (self.nodes[i] for i in self._children[mine.parent] if i != node_id):
            if other.call == mine.call and other.kind == "sampled" and self._open(other.id) and other.id not in self._children:
                self.mark(other.id, "retried")

    def finish(self, status: EpisodeStatus, *, rewards: Sequence[Reward] = (), **changes: Any) -> None:
        """Closes the episode; `changes` are further fields of Episode."""
        self.episode = dataclasses.replace(self.episode, status=status, rewards=tuple(rewards), **changes)

    def branches(self, advantage: float | Sequence[float] = 0.0, call: int | None = None) -> list[Branch]:
        """Root-to-leaf views, in the order of their leaves.

        Args:
            advantage: put on every sampled token; or one for each call, put on what it sampled.
            call: only what this call sampled has weight, and only branches with any of it are there.
        """
        values = [advantage] * len(self.calls) if isinstance(advantage, int | float) else advantage
        kept: list[bool] = []
        for node in self.nodes:  # parents come before their children
            kept.append(self._open(node.id) and (node.parent is None or kept[node.parent]))
        sampled = [node.id for node in self.nodes if kept[node.id] and any(node.mask) and self.calls[node.call].trainable]
        passing, paths = [0] * len(self.nodes), list[list[int]]()
        for leaf in reversed(sampled):  # children come before their parents
            if not passing[leaf]:
                paths.insert(0, self.path(leaf))
                for i in paths[0]:
                    passing[i] += 1
        if call is not None:
            paths = [path for path in paths if any(self.nodes[i].call == call and any(self.nodes[i].mask) for i in path)]
        return [self._branch(path, passing, values, call) for path in paths]

    def _branch(self, path: list[int], passing: list[int], advantages: Sequence[float], call: int | None) -> Branch:
        nodes = [self.nodes[i] for i in path]
        mask = np.array([sampled for node in nodes for sampled in node.mask], bool)
        share = [self.calls[node.call].trainable / passing[node.id] if call in (None, node.call) else 0.0 for node in nodes]

        def spread(values: list[float] | list[int], fill: float, dtype: type) -> np.ndarray:
            out = np.full(len(mask), fill, dtype)
            out[mask] = np.array(values, dtype)
            return out

        counts = [sum(node.mask) for node in nodes]
        rows = self.routing(path[-1])
        return Branch(
            node_ids=tuple(path),
            ids=np.array([token for node in nodes for token in node.ids], np.int32),
            mask=mask,
            logprobs=spread([x for node in nodes for x in node.logprobs], 0, np.float32),
            logprobs_full=spread([x for node in nodes for x in node.logprobs_full], 0, np.float32),
            versions=spread([x for node in nodes for x in node.versions], -1, np.int32),
            temperatures=spread([node.temperature or 0.0 for node in nodes for _ in node.logprobs], 1, np.float32),
            advantages=spread([advantages[node.call] for node in nodes for _ in node.logprobs], 0, np.float32),
            weights=spread([x for x, count in zip(share, counts, strict=True) for _ in range(count)], 0, np.float32),
            routing=None if rows is None else np.concatenate([rows, blank(len(mask) - len(rows), rows)]),
        )

    def _open(self, node_id: int) -> bool:
        return self.nodes[node_id].status in ("live", "cut")

    def _longest(self, ids: tuple[int, ...], after: int | None) -> tuple[int, int | None]:
        """(number of ids, node) of the longest open path that `ids` begins with, of those through `after`.

        Of equal ones that with more sampled ids, then the oldest.
        """
        path = self.path(after)
        assert all(map(self._open, path)), "what goes on from a closed node would be in no branch"
        known = sum(len(self.nodes[i].ids) for i in path)
        best: tuple[int, int, int] = (known, 0, -(after or 0))  # ids, sampled ids, minus the node
        todo: list[tuple[int | None, int, int]] = [(after, known, 0)]
        while todo:
            parent, begin, sampled = todo.pop()
            for child in self._children.get(parent, ()):
                node = self.nodes[child]
                end = begin + len(node.ids)
                if self._open(child) and ids[begin:end] == node.ids:
                    todo.append((child, end, sampled + len(node.logprobs)))
                    best = max(best, (end, todo[-1][2], -child))
        return best[0], -best[2] if best[0] else None

    def _commit(self, node: Node) -> int:
        """Adds a node after checking the rules of records.md that can be seen from here."""
        count = sum(node.mask)
        assert node.id == len(self.nodes) and node.call < len(self.calls), "node or call out of order"
        assert node.ids and len(node.ids) == len(node.mask), "the mask must be as long as the ids, which are not empty"
        assert len(node.logprobs) == len(node.logprobs_full) == len(node.versions) == count, (
            f"{count} ids were sampled, with {len(node.logprobs)} and {len(node.logprobs_full)} log-probs and "
            f"{len(node.versions)} versions"
        )
        assert all(math.isfinite(x) for x in (*node.logprobs, *node.logprobs_full)), "a log-prob is not finite"
        stream = [-1 if node.parent is None else self._newest[node.parent], *node.versions]
        assert stream == sorted(stream), f"versions decrease: {stream}"
        assert all(version >= 0 for version in node.versions), f"a sampled id has no version: {node.versions}"
        if node.routing is not None:
            self._check_rows(node, node.routing)
        self.nodes.append(node)
        self._newest.append(stream[-1])
        self._children.setdefault(node.parent, []).append(node.id)
        if node.request_id is not None:
            self._requests[node.request_id] = node.id
        return node.id

    def _check_rows(self, node: Node, rows: np.ndarray) -> None:
        """Raises ValueError for rows that do not go on where the path's end; whether they can be a model's is checked where
        they are used (`models.routes.check_rows`)."""
        what, before = f"routing: episode {self.episode.id!r}, node {node.id}", self.routing(node.parent)
        known = 0 if before is None else len(before)
        tokens = len(self.path_ids(node.parent)) + len(node.ids)
        if node.routing_start != known:
            raise ValueError(f"{what}: its rows start at token {node.routing_start}, but the path has rows of {known}")
        if known + len(rows) != tokens - 1:
            raise ValueError(
                f"{what}: {known} + {len(rows)} rows are not one for each of {tokens} tokens but the last; it is corrupted"
            )
        if before is not None and (rows.dtype != before.dtype or rows.shape[1:] != before.shape[1:]):
            raise ValueError(
                f"{what}: rows are {rows.dtype} {list(rows.shape[1:])}, those before {before.dtype} {list(before.shape[1:])}; "
                f"they are of different models"
            )
