"""What goes into the engine and what comes out: tokens, never text."""

from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

MAX_STOP_IDS = 8
MAX_TOP_LOGPROBS = 20
"""likeliest tokens that can be asked for at each place; the OpenAI API's limit"""


class FinishReason(StrEnum):
    STOP = "stop"
    """a stop id was sampled, or a stop string completed; the token that did it is the last of the completion's ids"""
    LENGTH = "length"
    """max_tokens or the context was reached"""
    ABORT = "abort"
    """cancelled"""


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How a request is sampled. Logits are changed in this order: penalties and bias, temperature, then allowed ids, top-k,
    top-p and min-p cut the support."""

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
    repetition_penalty: float = 1.0
    """positive logits of tokens seen in prompt or output are divided by it, others multiplied (CTRL, arXiv 1909.05858)"""
    presence_penalty: float = 0.0
    """taken from the logit of each token that was sampled before (OpenAI's definition)"""
    frequency_penalty: float = 0.0
    """taken from the logit of each token once for each time it was sampled before (OpenAI's definition)"""
    logit_bias: tuple[tuple[int, float], ...] = ()
    """(token id, what is added to its logit)"""
    allowed_ids: tuple[int, ...] | None = None
    """only these tokens can be sampled"""
    seed: int = 0
    """with the position it fixes the noise, so tokens do not depend on batching, chunking or preemption"""
    stop_ids: tuple[int, ...] = ()
    stop: tuple[str, ...] = ()
    """strings that end the sequence as soon as its text holds one; they may straddle tokens"""
    ignore_eos: bool = False
    """go on past stop_ids, up to max_tokens"""
    top_logprobs: int = 0
    """record so many likeliest tokens at each sampled place, under the full vocabulary at temperature 1"""
    prompt_logprobs: bool = False
    """record the prompt's own log-probs too, and its `top_logprobs`; the prompt is then computed whole, not taken from the
    prefix cache, so that they are the same cold and warm"""

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
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ValueError(f"repetition_penalty: must be in [0.01, 100], got {self.repetition_penalty}")
        for name in ("presence_penalty", "frequency_penalty"):
            if not -100 <= getattr(self, name) <= 100:
                raise ValueError(f"{name}: must be in [-100, 100], got {getattr(self, name)}")
        for token, bias in self.logit_bias:
            if not 0 <= token < 2**31 or not -1e4 <= bias <= 1e4:
                raise ValueError(f"logit_bias: takes token ids in [0, 2^31) and values in [-1e4, 1e4], got {token}: {bias}")
        if self.allowed_ids is not None and not (self.allowed_ids and all(0 <= i < 2**31 for i in self.allowed_ids)):
            raise ValueError("allowed_ids: needs at least one token id, all in [0, 2^31); None allows every token")
        if not 0 <= self.seed < 2**32:
            raise ValueError(f"seed: must be in [0, 2^32), got {self.seed}")
        if len(self.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"stop_ids: at most {MAX_STOP_IDS}, got {len(self.stop_ids)}")
        if not all(0 <= i < 2**31 for i in self.stop_ids):
            raise ValueError(f"stop_ids: token ids are in [0, 2^31), got {self.stop_ids}")
        if not all(self.stop):
            raise ValueError("stop: an empty string would stop everything; leave it out")
        if not 0 <= self.top_logprobs <= MAX_TOP_LOGPROBS:
            raise ValueError(f"top_logprobs: must be in [0, {MAX_TOP_LOGPROBS}], got {self.top_logprobs}")

    @property
    def penalised(self) -> bool:
        """Whether what was sampled before changes the logits."""
        return (self.repetition_penalty, self.presence_penalty, self.frequency_penalty) != (1, 0, 0)

    @property
    def biased(self) -> bool:
        return bool(self.logit_bias) or self.allowed_ids is not None


@dataclass(frozen=True, kw_only=True)
class Request:
    id: str
    """unique among the requests in flight"""
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    priority: int = 0
    """lower goes first, and gives up its pages last; equals go by arrival"""
    adapter: str = ""
    """part of the identity of cached state; no adapter is loaded yet, so it must be empty"""
    routing: np.ndarray | None = field(default=None, compare=False, repr=False)
    """`[n, L, k]`, n < prompt tokens: how the first n prompt tokens are routed, where their rows say (`models/routes.py`)"""


@dataclass(frozen=True, kw_only=True)
class Tokens:
    """Sampled tokens with what is recorded of each. Arrays have one entry per token."""

    ids: np.ndarray
    """int32, a stop id included"""
    logprobs: np.ndarray
    """float32, under the sampling distribution (after penalties, bias, temperature and every cut of the support)"""
    logprobs_full: np.ndarray
    """float32, under the full vocabulary at temperature 1"""
    versions: np.ndarray
    """int32, the version of the weights that sampled each token"""
    top_ids: np.ndarray
    """int32 [tokens, top_logprobs]: the likeliest, in order"""
    top_logprobs: np.ndarray
    """float32 [tokens, top_logprobs], under the full vocabulary at temperature 1"""


@dataclass(frozen=True, kw_only=True)
class PromptLogprobs:
    """Log-probs of a prompt's own tokens under the full vocabulary at temperature 1; entry 0 is NaN: nothing precedes it."""

    logprobs: np.ndarray
    """float32 [prompt tokens]"""
    top_ids: np.ndarray
    """int32 [prompt tokens, top_logprobs]: the likeliest at that place; row 0 means nothing"""
    top_logprobs: np.ndarray
    """float32 [prompt tokens, top_logprobs]"""


@dataclass(frozen=True, kw_only=True)
class Completion(Tokens):
    """One finished request."""

    request_id: str
    prompt_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: int | str | None
    """the stop id or stop string that ended it"""
    cached_tokens: int
    """prompt tokens found in the prefix cache when the request was first admitted"""
    prefilled_tokens: int
    """tokens computed for it that were not sampled in its decode steps: the rest of the prompt, and re-prefills"""
    prompt_logprobs: PromptLogprobs | None
    routing: np.ndarray | None = None
    """`[tokens - 1 - routing_start, L, k]`: how each token but the last was routed; None for models without experts"""
    routing_start: int = 0
    """the token of its first row: those before it came with the request"""
