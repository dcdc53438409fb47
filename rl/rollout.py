"""Episodes while they run and afterwards: records, counts, and what a file of them holds."""

import zlib
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from inference.types import Completion, Request, SamplingParams
from rl.columns import read
from rl.environments import Task, Tasks, total_reward
from rl.graph import Graph
from rl.messages import Message


class SamplerEngine(Protocol):
    """What episodes need of an engine."""

    @property
    def version(self) -> int: ...

    def submit(self, request: Request) -> None: ...

    def cancel(self, request_id: str) -> Completion: ...

    def step(self) -> list[Completion]: ...


@dataclass
class Rollout:
    """One episode while it runs, and its record afterwards."""

    task: Task
    graph: Graph
    turns: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    sampled_tokens: int = 0
    computed_tokens: int = 0
    """that went through the model for it: prefills, again after an update, and decode steps"""
    generate_s: float = 0.0
    """from submitting to the completion, queue included"""
    environment_s: float = 0.0

    def count(self, completion: Completion) -> None:
        """Adds an answer of the model to the numbers."""
        self.turns += 1
        self.prompt_tokens += len(completion.prompt_ids)
        self.cached_tokens += completion.cached_tokens
        self.sampled_tokens += len(completion.ids)
        self.computed_tokens += completion.prefilled_tokens + len(completion.ids)

    @property
    def reward(self) -> float | None:
        return total_reward(self.graph.episode.rewards)

    @property
    def messages(self) -> list[Message]:
        """All messages, in the order in which they came."""
        return [message for node in self.graph.nodes if node.status != "abandoned" for message in node.messages]


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


def recorded(path: Path, environment: Tasks) -> list[Rollout]:
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
                turns=len(sampled),
                prompt_tokens=sum(len(graph.path_ids(node.parent)) for node in sampled),
                cached_tokens=sum(node.cached_tokens for node in sampled),
                sampled_tokens=sum(len(node.ids) for node in sampled),
                generate_s=episode.generate_s,
                environment_s=episode.environment_s,
            )
        )
    return rollouts
