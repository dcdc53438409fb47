"""Fields of one episode's record: flat, typed, frozen. rl.graph holds the rules and puts them together."""

from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from rl.environments import Reward
from rl.messages import Message

NodeKind = Literal["prompt", "tool", "sampled", "summary"]
NodeStatus = Literal["live", "retried", "cut", "abandoned"]
FinishReason = Literal["stop", "length", "abort"]
EpisodeStatus = Literal["running", "completed", "truncated", "aborted", "failed"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One agent's conversation in the episode; call 0 is the episode's own."""

    id: int
    parent: int | None = None
    agent: str = "main"
    """what the environment, or the client, calls the conversation; one call of an episode has the name"""
    role: str = "assistant"
    depth: int = 0
    position: int | None = None
    """token position in the parent call at which this one was spawned"""
    policy: str = "policy"
    trainable: bool = True
    rewards: tuple[Reward, ...] = ()
    """its own, where the environment gave any; the episode has rewards apart from them"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Node:
    """The ids that one message, or one completion, adds to its parent's path."""

    id: int
    """index in Graph.nodes"""
    parent: int | None
    call: int
    kind: NodeKind
    ids: tuple[int, ...]
    mask: tuple[bool, ...]
    """which ids were sampled; as long as ids"""
    messages: tuple[Message, ...] = ()
    """as sent; of a sampled node the one message, as parsed"""
    status: NodeStatus = "live"
    # the rest is of sampled nodes; the first three have one value per sampled id
    logprobs: tuple[float, ...] = ()
    """of the id under the sampling distribution: after temperature, top-k/p, penalties (float32 values)"""
    logprobs_full: tuple[float, ...] = ()
    """of the id at temperature 1 over the full vocabulary (float32 values)"""
    versions: tuple[int, ...] = ()
    """weight version that sampled the id"""
    temperature: float | None = None
    finish_reason: FinishReason | None = None
    cached_tokens: int = 0
    """prompt tokens that the engine found in its cache"""
    request_id: str | None = None
    routing: np.ndarray | None = field(default=None, compare=False)
    """`[n, L, k]`: how the path's tokens were routed, from `routing_start` to the last but one; None without experts"""
    routing_start: int = 0
    """tokens of the path whose rows its earlier nodes have: the last one sampled before is the first here"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Episode:
    """One run of an environment. `env` and `key` name its task."""

    id: str
    env: str
    key: int
    content_hash: str
    group_id: str
    seed: int
    status: EpisodeStatus = "running"
    stop_reason: str | None = None
    rewards: tuple[Reward, ...] = ()
    error: str | None = None
    """class and text of the error that failed it; apart from the reward"""
    generate_s: float = 0.0
    """from submitting requests to their completions, queue included"""
    environment_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Branch:
    """One path as one flat stream: every array is [L], aligned with ids; there is no prompt/response split."""

    node_ids: tuple[int, ...]
    ids: np.ndarray
    """int32"""
    mask: np.ndarray
    """bool: sampled"""
    logprobs: np.ndarray
    """float32, under the sampling distribution; 0 where not sampled"""
    logprobs_full: np.ndarray
    """float32, temperature 1, full vocabulary; 0 where not sampled"""
    versions: np.ndarray
    """int32; -1 where not sampled"""
    temperatures: np.ndarray
    """float32; 1 where not sampled"""
    advantages: np.ndarray
    """float32; 0 where not sampled"""
    weights: np.ndarray
    """float32: 1 / (number of branches through the sampled token); 0 where not sampled or not trainable"""
    routing: np.ndarray | None = None
    """`[len(ids), L, k]`; the last row, and those that nobody recorded, say "not recorded" (`models/routes.py`)"""

    @property
    def oldest_version(self) -> int:
        """The minimum over sampled tokens."""
        return int(self.versions[self.mask].min())
