"""Episodes: environment and engine in turn, recorded token for token in message graphs.

    task -> render -> submit ... completion -> graph -> environment -> done, or bridge -> submit ...

All episodes of a batch advance together; the engine batches whatever is in flight.
"""

import time
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import jax

from inference.types import Completion, FinishReason, Request, SamplingParams
from rl.environments import Environment, Message, Task, total_reward
from rl.graph import Graph
from rl.records import Call, Episode, EpisodeStatus
from rl.renderers import Renderer


class SamplerEngine(Protocol):
    """What rl needs of an engine."""

    @property
    def version(self) -> int: ...

    def submit(self, request: Request) -> None: ...

    def step(self) -> list[Completion]: ...

    def pause(self, mode: str = "retract") -> None: ...

    def load(self, params: Mapping[str, jax.Array], version: int) -> None: ...

    def resume(self) -> None: ...


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
    generate_s: float = 0.0
    """from submitting to the completion, queue included"""
    environment_s: float = 0.0
    submitted: float = 0.0

    @property
    def reward(self) -> float | None:
        return total_reward(self.graph.episode.rewards)


def sample_seed(*parts: Any) -> int:
    """A 32-bit seed from what names a sample, so that a resumed run draws the same noise."""
    return zlib.crc32("/".join(map(str, parts)).encode())


def run_episodes(
    engine: SamplerEngine,
    environment: Environment,
    renderer: Renderer,
    tasks: Sequence[Task],
    *,
    samples: int,
    params: SamplingParams,
    label: str,
    seed: int,
    trainable: bool,
    max_context: int,
    max_turns: int = 1,
) -> list[Rollout]:
    """Runs `samples` episodes of each task, in task order; all are in flight together.

    An environment that raises fails its episode, which then has no reward; the others go on.

    Args:
        params: of every request; its seed and stop ids are set here.
        label: names the batch; request ids and noise derive from it, the task and the sample.
        trainable: whether the record may be trained on (greedy samples may not).
        max_context: most tokens of an episode; one that would outgrow it between turns ends there, truncated.

    Raises:
        ValueError: a prompt does not fit the engine's context.
    """
    rollouts: dict[str, Rollout] = {}
    for task in tasks:
        prompt = tuple(renderer.render(list(task.messages)))
        for number in range(samples):
            name = f"{label}/{task.env}/{task.key}/{number}"
            assert name not in rollouts, f"two tasks of a batch are {name}"
            episode = Episode(
                id=name,
                env=task.env,
                key=task.key,
                content_hash=task.content_hash,
                group_id=f"{label}/{task.env}/{task.key}",
                seed=sample_seed(seed, label, task.env, task.key, number),
            )
            rollout = Rollout(task, Graph(episode, (Call(id=0, trainable=trainable),)), list(task.messages))
            rollout.node = rollout.graph.extend(prompt, messages=task.messages)
            rollouts[name] = rollout
    for name, rollout in rollouts.items():
        _submit(engine, renderer, name, rollout, params)
    running = set(rollouts)
    while running:
        for completion in engine.step():
            name = completion.request_id.rsplit("#", 1)[0]
            if _advance(environment, renderer, rollouts[name], completion, params, max_turns, max_context):
                running.remove(name)
            else:
                _submit(engine, renderer, name, rollouts[name], params)
    return list(rollouts.values())


def _submit(engine: SamplerEngine, renderer: Renderer, name: str, rollout: Rollout, params: SamplingParams) -> None:
    own = replace(params, seed=rollout.graph.episode.seed, stop_ids=tuple(renderer.stop_ids))
    prompt = tuple(rollout.graph.path_ids(rollout.node))
    rollout.submitted = time.perf_counter()
    rows = rollout.graph.routing(rollout.node)
    engine.submit(Request(id=f"{name}#{rollout.turns}", prompt_ids=prompt, params=own, routing=rows))


def _advance(
    environment: Environment,
    renderer: Renderer,
    rollout: Rollout,
    completion: Completion,
    params: SamplingParams,
    max_turns: int,
    max_context: int,
) -> bool:
    """Records a completion and asks the environment; True when the episode is over."""
    graph = rollout.graph
    rollout.generate_s += time.perf_counter() - rollout.submitted
    message = renderer.parse(completion.ids.tolist())
    node = rollout.node
    if len(completion.ids):
        node = graph.add_completion(
            rollout.node,
            request_id=completion.request_id,
            prompt_ids=completion.prompt_ids,
            ids=completion.ids.tolist(),
            logprobs=completion.logprobs.tolist(),
            logprobs_full=completion.logprobs_full.tolist(),
            versions=completion.versions.tolist(),
            temperature=params.temperature,
            finish_reason=completion.finish_reason.value,
            message=message,
            cached_tokens=completion.cached_tokens,
            routing=completion.routing,
            routing_start=completion.routing_start,
        )

    def over(status: EpisodeStatus, reason: str, **changes: Any) -> bool:
        times = {"generate_s": rollout.generate_s, "environment_s": rollout.environment_s}
        graph.finish(status, stop_reason=reason, **times, **changes)
        return True

    if completion.finish_reason is FinishReason.ABORT:
        if node != rollout.node:
            graph.mark(node, "abandoned")
        return over("aborted", "abort")
    rollout.turns += 1
    rollout.messages.append(message)
    rollout.prompt_tokens += len(completion.prompt_ids)
    rollout.cached_tokens += completion.cached_tokens
    rollout.sampled_tokens += len(completion.ids)
    started = time.perf_counter()
    try:
        step = environment.step(rollout.task, rollout.messages)
    except Exception as error:  # whatever a scorer does to odd text, it is not the run's end, nor a reward of 0
        return over("failed", "environment", error=f"{type(error).__name__}: {error}")
    finally:
        rollout.environment_s += time.perf_counter() - started
    if step.done:
        return over("completed", completion.finish_reason.value, rewards=step.rewards)
    if rollout.turns >= max_turns:
        return over("truncated", "max_turns", rewards=step.rewards)
    ids = graph.path_ids(node)
    prompt = [*ids, *renderer.bridge(ids, list(step.messages))]
    if len(prompt) >= max_context:
        return over("truncated", "context", rewards=step.rewards)
    rollout.node = graph.extend(prompt, messages=step.messages, kind="tool")
    rollout.messages.extend(step.messages)
    return False
