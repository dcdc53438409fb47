"""Episodes: environment and engine in turn, recorded token for token in message graphs.

    task -> render -> submit ... completion -> graph -> environment -> done, or bridge -> submit ...

All episodes in flight advance together; the engine batches whatever there is. Batches of episodes begin and end independently.
"""

import time
import zlib
from collections.abc import Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from inference.types import Completion, FinishReason, Request, SamplingParams
from rl.columns import read
from rl.environments import Environment, Step, Task, total_reward
from rl.graph import Graph
from rl.messages import Message
from rl.records import Call, Episode, EpisodeStatus
from rl.renderers import Renderer


class SamplerEngine(Protocol):
    """What episodes need of an engine."""

    @property
    def version(self) -> int: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> Completion: ...

    def step(self) -> list[Completion]: ...


class Steps(Protocol):
    """Who runs environments: `rl.workers.Inline` or `rl.workers.Workers`."""

    def submit(self, task: Task, messages: Sequence[Message]) -> Future[Step]: ...

    def close(self) -> None: ...


@dataclass
class Rollout:
    """One episode while it runs, and its record afterwards."""

    task: Task
    graph: Graph
    messages: list[Message]
    node: int = 0
    """node whose path is the next request's prompt"""
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    computed_tokens: int = 0
    """that went through the model for it: prefills, again after an update, and decode steps"""
    generate_s: float = 0.0
    """from submitting to the completion, queue included"""
    environment_s: float = 0.0
    since: float = 0.0
    """when it was last given to the engine or the environment"""

    @property
    def reward(self) -> float | None:
        return total_reward(self.graph.episode.rewards)


@dataclass
class Batch:
    """Episodes that were begun together."""

    params: SamplingParams
    deadline: float
    rollouts: dict[str, Rollout] = field(default_factory=dict)
    """by episode id, in order"""
    running: set[str] = field(default_factory=set)

    @property
    def done(self) -> bool:
        return not self.running


def sample_seed(*parts: Any) -> int:
    """A 32-bit seed from what names a sample, so that a resumed run draws the same noise."""
    return zlib.crc32("/".join(map(str, parts)).encode())


class Episodes:
    """Episodes in flight on one engine and one set of environments.

    An environment that raises fails its episode, which then has no reward; the others go on.

    Args:
        max_context: most tokens of an episode; one that would outgrow it between turns ends there, truncated.
        seconds: that an episode may take; it is aborted then and has no reward. 0: any.
    """

    def __init__(
        self,
        engine: SamplerEngine,
        steps: Steps,
        renderer: Renderer,
        *,
        seed: int,
        max_context: int,
        max_turns: int = 1,
        seconds: float = 0.0,
    ):
        self.engine, self.steps, self.renderer, self.seed = engine, steps, renderer, seed
        self.max_context, self.max_turns, self.seconds = max_context, max_turns, seconds
        self._sampling: dict[str, tuple[Batch, str]] = {}
        """request -> whose it is"""
        self._asked: list[tuple[Batch, str, Completion, Future[Step]]] = []
        """in the order in which the environment was asked"""

    def start(self, tasks: Sequence[Task], *, samples: int, params: SamplingParams, label: str, trainable: bool) -> Batch:
        """Begins `samples` episodes of each task.

        Args:
            params: of every request; its seed and stop ids are set here.
            label: names the batch; request ids and noise derive from it, the task and the sample.
            trainable: whether the record may be trained on (greedy samples may not).

        Raises:
            ValueError: a prompt does not fit the engine's context.
        """
        deadline = time.monotonic() + self.seconds if self.seconds else float("inf")
        batch = Batch(replace(params, stop_ids=tuple(self.renderer.stop_ids)), deadline)
        for task in tasks:
            prompt = tuple(self.renderer.render(list(task.messages)))
            for number in range(samples):
                name = f"{label}/{task.env}/{task.key}/{number}"
                assert name not in batch.rollouts, f"two tasks of a batch are {name}"
                episode = Episode(
                    id=name,
                    env=task.env,
                    key=task.key,
                    content_hash=task.content_hash,
                    group_id=f"{label}/{task.env}/{task.key}",
                    seed=sample_seed(self.seed, label, task.env, task.key, number),
                )
                rollout = Rollout(task, Graph(episode, (Call(id=0, trainable=trainable),)), list(task.messages))
                rollout.node = rollout.graph.extend(prompt, messages=task.messages)
                batch.rollouts[name] = rollout
        batch.running = set(batch.rollouts)
        for name in batch.rollouts:
            self._submit(batch, name)
        return batch

    def finish(self, batch: Batch) -> list[Rollout]:
        """Goes on, with whatever else is in flight, until a batch is done; in the order of its tasks."""
        while not batch.done:
            self.poll()
        return list(batch.rollouts.values())

    def poll(self) -> None:
        """A step of the engine, and all that follows from what is there."""
        if self._sampling:
            for completion in self.engine.step():
                batch, name = self._sampling.pop(completion.request_id)
                self._record(batch, name, completion)
        elif self._asked:  # nothing to do until some environment has answered
            wait([asked[3] for asked in self._asked], timeout=0.05, return_when=FIRST_COMPLETED)
        for asked in [asked for asked in self._asked if asked[3].done()]:
            self._asked.remove(asked)
            self._answered(*asked)
        if self.seconds:
            self._end_overdue()

    def _end_overdue(self) -> None:
        now = time.monotonic()
        late = [request for request, (batch, _) in self._sampling.items() if batch.deadline < now]
        for request in late:  # the environment's own steps have their own limit
            batch, name = self._sampling.pop(request)
            self._record(batch, name, self.engine.cancel(request), "timeout")

    def _submit(self, batch: Batch, name: str) -> None:
        rollout = batch.rollouts[name]
        own = replace(batch.params, seed=rollout.graph.episode.seed)
        prompt = tuple(rollout.graph.path_ids(rollout.node))
        request = Request(
            id=f"{name}#{rollout.turns}", prompt_ids=prompt, params=own, routing=rollout.graph.routing(rollout.node)
        )
        rollout.since = time.perf_counter()
        self.engine.submit(request)
        self._sampling[request.id] = batch, name

    def _record(self, batch: Batch, name: str, completion: Completion, why: str = "abort") -> None:
        """Commits a completion and asks the environment."""
        rollout, graph = batch.rollouts[name], batch.rollouts[name].graph
        rollout.generate_s += time.perf_counter() - rollout.since
        message = self.renderer.parse(completion.ids.tolist(), f"call_{rollout.turns}")
        before = rollout.node
        if len(completion.ids):
            rollout.node = graph.add_completion(
                rollout.node,
                request_id=completion.request_id,
                prompt_ids=completion.prompt_ids,
                ids=completion.ids.tolist(),
                logprobs=completion.logprobs.tolist(),
                logprobs_full=completion.logprobs_full.tolist(),
                versions=completion.versions.tolist(),
                temperature=batch.params.temperature,
                finish_reason=completion.finish_reason.value,
                message=message,
                cached_tokens=completion.cached_tokens,
                routing=completion.routing,
                routing_start=completion.routing_start,
            )
        if completion.finish_reason is FinishReason.ABORT:
            if rollout.node != before:
                graph.mark(rollout.node, "abandoned")
            return self._over(batch, name, "aborted", why)
        rollout.turns += 1
        rollout.messages.append(message)
        rollout.prompt_tokens += len(completion.prompt_ids)
        rollout.cached_tokens += completion.cached_tokens
        rollout.sampled_tokens += len(completion.ids)
        rollout.computed_tokens += completion.prefilled_tokens + len(completion.ids)
        rollout.since = time.perf_counter()
        answer = self.steps.submit(rollout.task, rollout.messages)
        if answer.done():
            self._answered(batch, name, completion, answer)
        else:
            self._asked.append((batch, name, completion, answer))

    def _answered(self, batch: Batch, name: str, completion: Completion, answer: Future[Step]) -> None:
        """Ends the episode, or goes on with what the environment said."""
        rollout = batch.rollouts[name]
        rollout.environment_s += time.perf_counter() - rollout.since
        if error := answer.exception():  # whatever a scorer does to odd text, it is not the run's end, nor a reward of 0
            return self._over(batch, name, "failed", "environment", error=f"{type(error).__name__}: {error}")
        step = answer.result()
        if step.done:
            return self._over(batch, name, "completed", completion.finish_reason.value, rewards=step.rewards)
        if rollout.turns >= self.max_turns:
            return self._over(batch, name, "truncated", "max_turns", rewards=step.rewards)
        ids = rollout.graph.path_ids(rollout.node)
        added = self.renderer.bridge(ids, step.messages)
        whole = [*rollout.messages, *step.messages]
        prompt = self.renderer.render(whole) if added is None else [*ids, *added]  # rendered anew, the record forks
        if len(prompt) >= self.max_context:
            return self._over(batch, name, "truncated", "context", rewards=step.rewards)
        rollout.node = rollout.graph.extend(prompt, messages=step.messages, kind="tool")
        rollout.messages = whole
        self._submit(batch, name)

    def _over(self, batch: Batch, name: str, status: EpisodeStatus, reason: str, **changes: Any) -> None:
        rollout = batch.rollouts[name]
        times = {"generate_s": rollout.generate_s, "environment_s": rollout.environment_s}
        rollout.graph.finish(status, stop_reason=reason, **times, **changes)
        batch.running.remove(name)


def recorded(path: Path, environment: Environment) -> list[Rollout]:
    """What a file of rollouts holds, as it was when it was written, but for times and what the engine's cache did.

    Raises:
        ValueError: it cannot be read, or its tasks are not those that the environment makes of their keys now.
    """
    rollouts = []
    for graph in read(path):
        episode, task = graph.episode, environment.task(graph.episode.key)
        if (episode.env, episode.content_hash) != (task.env, task.content_hash):
            raise ValueError(
                f"{path}: task {episode.key} of {episode.env!r} is another one now ({task.env!r}); use the environment, its "
                f"options and its version that the run began with"
            )
        sampled = [node for node in graph.nodes if node.kind == "sampled" and node.status != "abandoned"]
        rollouts.append(
            Rollout(
                task,
                graph,
                [message for node in graph.nodes for message in node.messages],
                node=len(graph.nodes) - 1,
                turns=len(sampled),
                prompt_tokens=sum(len(graph.path_ids(node.parent)) for node in sampled),
                cached_tokens=sum(node.cached_tokens for node in sampled),
                sampled_tokens=sum(len(node.ids) for node in sampled),
                generate_s=episode.generate_s,
                environment_s=episode.environment_s,
            )
        )
    return rollouts
