"""Sessions: whatever an agent program asks of the model becomes one message graph, token for token.

A client sends its whole history with each request, as text; rl/histories.py finds the sampled turn that it goes on from. The
graph shares what is equal, token for token, and forks where it is not. Agents are calls of the graph; so are auxiliary requests
(titles, summaries), which are not trained on.

The same request again, as a retry sends it, gets the answer that there is, or the one on its way, until something follows it. A
turn that was asked for again otherwise, or whose client has left, is kept and closed.
"""

import hashlib
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from inference.errors import ApiError
from inference.text import StopStrings
from inference.types import Completion, FinishReason, Request, SamplingParams, Tokens
from rl.environments import Reward
from rl.graph import Graph
from rl.histories import Histories
from rl.messages import CallKind, Message, Piece, Tool, message_of
from rl.records import Call, EpisodeStatus
from rl.renderers import Renderer
from rl.rollout import sample_seed
from rl.wires import Identity, PromptTooLong, Turn, new_name

MOST_CALLS = 1000
"""agents and auxiliary requests of a session"""
MOST_NOTES = 100


@dataclass
class Asked:
    """A request of a session, from its rendering to its record."""

    name: str
    call: int
    node: int
    """whose path is the prompt"""
    request: Request
    conversation: bytes
    """names what was asked, up to its last message"""
    key: bytes
    """that a retry has too"""
    tools: tuple[Tool, ...]
    done: Future[Completion] = field(default_factory=Future)


class Session:
    """One root conversation and all that its agents ask: an episode.

    Args:
        graph: its record; the seed of all noise is its episode's.
        params: of every request; what a client asks for is `limited` to them.
        max_context: most tokens of a request with its answer.
        client_sampling: whether temperature, top_p and the like are the client's where it sets them, not `params`'.
        trainable: kinds of requests that are trained on.
        max_asked: most requests; None: any.
    """

    def __init__(
        self,
        graph: Graph,
        renderer: Renderer,
        params: SamplingParams,
        *,
        max_context: int,
        client_sampling: bool = False,
        trainable: Sequence[CallKind] = ("turn",),
        max_asked: int | None = None,
    ) -> None:
        self.graph = graph
        self.renderer, self.params, self.max_context = renderer, params, max_context
        self.client_sampling, self.trainable, self.max_asked = client_sampling, tuple(trainable), max_asked
        self.notes: dict[str, None] = {}
        """what clients asked for and did not get"""
        self.asked = 0
        self.breaks = 0
        """histories of an agent that do not go on from its last answer, token for token"""
        self._calls: dict[tuple[str, CallKind, bool], int] = {("main", "turn", True): 0}
        self._histories = Histories(self.graph, renderer)
        self._answers: dict[bytes, Asked] = {}
        """by key: on their way, or there and nothing follows them"""
        self._keys: dict[int, bytes] = {}
        self._last: dict[int, int] = {}
        """call -> what was sampled last in it"""
        self._prompts: set[tuple[int, int]] = set()
        """(call, node) that were asked for: again, they are no break"""
        self.running: dict[str, Asked] = {}
        """by name: requests whose answers are on their way"""
        self._left = False
        self._lock = threading.Lock()
        self._writing = threading.Lock()
        self.used = time.monotonic()
        self.changed = False
        """since it was last written"""

    def ask(self, turn: Turn, who: Identity) -> tuple[Asked, bool]:
        """What the engine is to be given for a turn, and whether it is: not where the same request has brought it there before.

        Raises:
            ApiError: it does not fit the context, the episode is over, or there are too many agents or requests.
            ValueError: the renderer has no form for a message.
        """
        with self._lock:
            if self._left or self.graph.episode.status != "running":  # who has found the session may come after its end
                raise ApiError(f"session: {self.graph.episode.id!r} is finished; open another", status=409)
            self._note(*turn.notes)
            params = self._sampling(turn)
            own = self._calls.get((who.agent, turn.kind, params.temperature > 0))
            prompt = self._histories.prompt(turn.messages, turn.tools, own)
            key = hashlib.sha256(prompt.digest + repr((who.agent, turn.kind, params)).encode()).digest()
            if key in self._answers:
                return self._answers[key], False
            if self.asked == self.max_asked:
                raise ApiError(f"the episode may ask {self.max_asked} times (environment.max_turns)", status=403)
            ids = tuple(prompt.ids)
            if len(ids) + 1 > self.max_context:
                raise PromptTooLong(len(ids), self.max_context)
            self.asked += 1
            call = self._call(who, turn.kind, params.temperature > 0)
            node = self.graph.extend(ids, messages=prompt.new, call=call, after=prompt.node)
            path = self.graph.path(node)
            known = turn.kind != "turn" or (call, node) in self._prompts
            self.breaks += not known and self._last.get(call, path[0]) not in path
            self._prompts.add((call, node))
            for followed in path:  # whoever got that answer has gone on
                self._answers.pop(self._keys.pop(followed, b""), None)
            name = new_name()
            seed = sample_seed(self.graph.episode.seed, self.asked)
            room = min(params.max_tokens, self.max_context - len(ids))
            asked = Asked(
                name,
                call,
                node,
                Request(
                    id=f"{self.graph.episode.id}#{name}",
                    prompt_ids=ids,
                    params=replace(params, seed=seed, max_tokens=room),
                    routing=self.graph.routing(node),
                ),
                prompt.digest,
                key,
                turn.tools,
            )
            self._answers[key] = asked
            self.running[name] = asked
            self.changed = True
            return asked, True

    def commit(self, asked: Asked, completion: Completion, read: Sequence[Piece] | None = None) -> Message:
        """Records what was sampled, and returns it as a message.

        Args:
            read: all of it, as the renderer's reader has it; None: it is read here.

        Raises:
            ApiError: by older weights than what it goes on from: the engine has gone back. It is noted, not recorded.
        """
        with self._lock:
            if (back := self._gone_back(asked, [completion])) is not None:
                self._note(back)
                raise ApiError(f"session: {back}; open another session", status=409)
            name = f"call_{asked.name}"
            known = None if read is None else message_of(read, name)
            message = known or self.renderer.parse(completion.ids.tolist(), name, asked.tools)
            shown, stop = StopStrings(asked.request.params.stop).add(message["content"])
            if stop is not None:  # the client is not shown it, and so does not send it back
                message["content"] = shown
            node = self._record(asked, completion, message)
            self.graph.supersede(node)
            self._histories.said(asked.conversation, message, node, asked.name)
            self._keys[node], self._last[asked.call] = asked.key, node
            del self.running[asked.name]
            self.changed = True
        asked.done.set_result(completion)
        return message

    def abandon(self, asked: Asked, parts: Sequence[Tokens], why: str) -> None:
        """Records what was sampled of an answer that nobody waits for any more; it is not trained on."""
        with self._lock:
            if self._answers.get(asked.key) is asked:
                del self._answers[asked.key]
            try:
                if parts and (back := self._gone_back(asked, parts)) is not None:
                    self._note(back)
                elif parts and self.graph.episode.status == "running":  # a record that is closed is being read
                    self._keep(asked, parts)
            finally:  # whoever waits hears of it, also where the tokens are none that can be recorded
                del self.running[asked.name]
                self.changed = True
                said = f"the request that this one repeats has ended without an answer: {why}"
                asked.done.set_exception(ApiError(said, status=503))

    @contextmanager
    def whole(self) -> Iterator[Graph]:
        """The record as it is now, to be written; who comes later, has a later one and waits. The session goes on meanwhile."""
        with self._writing:
            with self._lock:
                self.changed = False
                graph = self.graph.snapshot()
            try:
                yield graph
            except BaseException:
                self.changed = True
                raise

    def settle(self, seconds: float = 30.0) -> None:
        """Waits until no answer is on its way. TimeoutError if that takes too long."""
        end = time.monotonic() + seconds
        while self.running:
            if time.monotonic() > end:
                raise TimeoutError(f"{len(self.running)} requests have not ended")
            time.sleep(0.005)

    def leave(self) -> None:
        """Refuses what is asked from now on, as the episode is about to be closed."""
        with self._lock:
            self._left = True

    def finish(self, status: EpisodeStatus, rewards: Sequence[Reward], reason: str) -> None:
        """Closes the episode. ApiError where answers are on their way: they would be in no record."""
        with self._lock:
            if self.running:
                name = self.graph.episode.id
                raise ApiError(f"session: {name!r} has requests in flight; finish it when they have ended", status=409)
            self.graph.finish(status, rewards=rewards, stop_reason=reason)
            self.changed = True

    def counts(self) -> dict[str, Any]:
        """What is recorded, in numbers."""
        with self._lock:
            nodes, branches = self.graph.nodes, self.graph.branches()
            return {
                "name": self.graph.episode.id,
                "status": self.graph.episode.status,
                "requests": self.asked,
                "breaks": self.breaks,
                "samples": len(branches),
                "trained_tokens": round(sum(float(branch.weights.sum()) for branch in branches)),
                "sampled_tokens": sum(sum(node.mask) for node in nodes),
                "agents": [call.agent for call in self.graph.calls if call.role == "assistant"],
                "auxiliary": [call.role for call in self.graph.calls if call.role != "assistant"],
                "nodes": dict(Counter(node.status for node in nodes if node.kind == "sampled")),
                "notes": list(self.notes),
            }

    def _gone_back(self, asked: Asked, parts: Sequence[Tokens]) -> str | None:
        """What to say of tokens by older weights than those before them: a record has versions in order."""
        versions = [self.graph.newest(asked.node), *(version for part in parts for version in part.versions.tolist())]
        if versions == sorted(versions):
            return None
        return f"the engine has gone back to version {versions[-1]}, and this conversation was sampled up to {max(versions)}"

    def _keep(self, asked: Asked, parts: Sequence[Tokens]) -> None:
        """Records what was sampled of an answer that is none."""
        arrays: dict[str, Any] = {
            item.name: np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(Tokens)
        }
        whole = Completion(
            **arrays,
            request_id=asked.request.id,
            prompt_ids=asked.request.prompt_ids,
            finish_reason=FinishReason.ABORT,
            stop_reason=None,
            cached_tokens=0,
            prefilled_tokens=0,
            prompt_logprobs=None,
        )
        message = self.renderer.parse(whole.ids.tolist(), f"call_{asked.name}", asked.tools)
        self.graph.mark(self._record(asked, whole, message), "abandoned")

    def _record(self, asked: Asked, completion: Completion, message: Message) -> int:
        temperature = asked.request.params.temperature
        return self.graph.record(asked.node, completion, message, temperature=temperature, call=asked.call)

    def _sampling(self, turn: Turn) -> SamplingParams:
        """The session's parameters with the client's limits: its stop strings, fewer tokens, and more if it may."""
        wanted = dict(turn.sampling)
        most = min(wanted.pop("max_tokens", None) or self.params.max_tokens, self.params.max_tokens)
        stop = tuple(wanted.pop("stop", ()))
        changes = {name: value for name, value in wanted.items() if self.client_sampling}
        for name in sorted(wanted.keys() - changes.keys()):
            if wanted[name] != getattr(self.params, name):
                self._note(f"{name}: the run's own value was used")
        stops = dict.fromkeys((*self.params.stop_ids, *self.renderer.stop_ids))
        return replace(self.params, **changes, max_tokens=most, stop=(*self.params.stop, *stop), stop_ids=tuple(stops))

    def _note(self, *notes: str) -> None:
        for note in notes:
            if len(self.notes) < MOST_NOTES:
                self.notes[note] = None

    def _call(self, who: Identity, kind: CallKind, sampled: bool) -> int:
        """The call of an agent's requests of a kind; greedy ones are a call of their own, as they are never trained on."""
        key = (who.agent, kind, sampled)
        if key in self._calls:
            return self._calls[key]
        if len(self._calls) >= MOST_CALLS:
            raise ApiError(f"the session has {MOST_CALLS} agents already; open another session", status=429)
        own = kind == "turn" and sampled
        parent_agent = who.agent if not own else "main" if who.parent in (None, who.agent) else who.parent
        parent = self._call(Identity(agent=parent_agent), "turn", True)
        above = self.graph.calls[parent]
        # the parent may have asked on before its child does
        said = [node.id for node in self.graph.nodes if node.call == parent and node.kind == "sampled"]
        call = Call(
            id=len(self.graph.calls),
            parent=parent,
            agent=who.agent,
            role="assistant" if kind == "turn" else kind,
            depth=above.depth + own,
            position=len(self.graph.path_ids(said[-1])) if said else 0,
            trainable=sampled and kind in self.trainable,
        )
        self.graph.calls.append(call)
        self._calls[key] = call.id
        return call.id
