"""A request while it is in the engine: the host's books of one sequence.

Legend: L layers, k experts per token.
"""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from inference.text import Detokenizer, StopStrings
from inference.types import FinishReason, PromptLogprobs, Request, Tokens


@dataclass(eq=False)
class Sequence:
    request: Request
    arrival: int
    ids: list[int]
    """prompt, then what was sampled and read"""
    on_tokens: Callable[[Tokens], None] | None = None
    pending: int = 0
    """tokens sampled after `ids` that were not read yet"""
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    slot: int = -1
    logprobs: list[float] = field(default_factory=list)
    logprobs_full: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    top: list[tuple[np.ndarray, np.ndarray]] = field(default_factory=list)
    """ids and log-probs of the likeliest tokens at each sampled place"""
    prompt_logprobs: PromptLogprobs | None = None
    """filled as the prompt is computed"""
    prompt_done: int = 1
    """prompt tokens whose log-probs are known, or on their way; the first has none"""
    text: tuple[Detokenizer, StopStrings] | None = None
    """where stop strings are looked for"""
    behind: "tuple[Sequence, int] | None" = None
    """the prefill that it waits for, and how many tokens of that are too few to look again"""
    cached: int | None = None
    """prompt tokens found cached at the first admission"""
    prefilled: int = 0
    private: bool = False
    """its pages hold keys of more than one version (pause mode keep): they never enter the prefix tree"""
    known: np.ndarray | None = None
    """`[n, L, k]`: how its first n tokens are routed when they are computed"""
    given: int = 0
    """rows that came with the request"""
    routed: int = 0
    """tokens of whom the store has a row that was read"""
    origin: int | None = None
    """version at which its first token was computed; None if its first rows came with the request"""
    marks: list[int] | None = None
    """its first tokens with `known`, as keys of the prefix tree"""
    path: list[int] = field(default_factory=list)
    """what its first tokens are known by; the others, and all where this is empty, by their ids"""
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None

    @property
    def keys(self) -> list[int]:
        """What its cached state is known by."""
        return [*self.path, *self.ids[len(self.path) :]] if self.path else self.ids

    @property
    def uncomputed(self) -> int:
        return len(self.ids) + self.pending - self.computed

    @property
    def num_sampled(self) -> int:
        return len(self.ids) + self.pending - len(self.request.prompt_ids)

    @property
    def wants_prompt(self) -> bool:
        return self.prompt_logprobs is not None and self.prompt_done < len(self.request.prompt_ids)

    @property
    def may_stop(self) -> bool:
        """Whether it may end before its budget does."""
        params = self.request.params
        return bool(params.stop) or (bool(params.stop_ids) and not params.ignore_eos)

    @property
    def order(self) -> tuple[int, int]:
        return self.request.priority, self.arrival
