"""What goes into the engine and what comes out: tokens, never text."""

from dataclasses import dataclass
from enum import StrEnum

import numpy as np

MAX_STOP_IDS = 8


class FinishReason(StrEnum):
    STOP = "stop"
    """a stop id was sampled; it is the last of the completion's ids"""
    LENGTH = "length"
    """max_tokens or the context was reached"""
    ABORT = "abort"
    """cancelled"""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    max_tokens: int
    """most tokens sampled over the request's whole life, preemptions and updates included"""
    temperature: float = 1.0
    """0 is greedy: the sampling distribution is then a point mass, with log-prob 0"""
    top_k: int = 0
    """keep the k likeliest; 0 keeps all"""
    top_p: float = 1.0
    """keep the smallest set of likeliest tokens whose mass reaches p (Holtzman et al., arXiv 1904.09751)"""
    min_p: float = 0.0
    """keep tokens at least this fraction as likely as the likeliest (arXiv 2407.01082)"""
    seed: int = 0
    """with the position it fixes the noise, so tokens do not depend on batching, chunking or preemption"""
    stop_ids: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if self.max_tokens < 1:
            raise ValueError(f"max_tokens: must be at least 1, got {self.max_tokens}")
        if self.temperature != 0 and not 1e-4 <= self.temperature <= 1e4:
            raise ValueError(f"temperature: must be 0 (greedy) or in [1e-4, 1e4], got {self.temperature}")
        if not 0 <= self.top_k < 2**31:
            raise ValueError(f"top_k: must be 0 (off) or more, and below 2^31, got {self.top_k}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p: must be in [0, 1], got {self.min_p}")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: must be in [0, 2^32), got {self.seed}")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids: at most {MAX_STOP_IDS}, got {len(self.stop_ids)}")
        if not all(0 <= i < 2**31 for i in self.stop_ids):
            raise ValueError(f"stop_ids: token ids are in [0, 2^31), got {self.stop_ids}")


@dataclass(frozen=True, kw_only=True)
class Request:
    id: str
    """unique among the requests in flight"""
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    adapter: str = ""
    """part of the identity of cached state; no adapter is loaded yet, so it must be empty"""


@dataclass(frozen=True, kw_only=True)
class Completion:
    """One finished request. Arrays have one entry per sampled token."""

    request_id: str
    prompt_ids: tuple[int, ...]
    ids: np.ndarray
    """int32, the sampled tokens, a stop id included"""
    logprobs: np.ndarray
    """float32, under the sampling distribution (after temperature, top-k, top-p, min-p)"""
    logprobs_full: np.ndarray
    """float32, under the full vocabulary at temperature 1"""
    versions: np.ndarray
    """int32, the version of the weights that sampled each token"""
    finish_reason: FinishReason
    cached_tokens: int
    """prompt tokens found in the prefix cache when the request was first admitted"""
    prefilled_tokens: int
    """tokens computed for it that were not sampled in its decode steps: the rest of the prompt, and re-prefills"""
