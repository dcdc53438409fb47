"""Sizes of an engine."""

from dataclasses import dataclass

from models.attention import KEY_BLOCK
from models.config import ModelConfig

MIN_ROWS = 8
"""fewest rows of any product: fewer are slower (measured), and a single one has other bits"""


def powers(low: int, high: int) -> tuple[int, ...]:
    """low, 2 low, 4 low ... up to and including `high`."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return (*sizes, high)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine; all are fixed at start."""

    max_context: int
    """most tokens of a sequence, prompt and sampled; a multiple of 128"""
    max_slots: int = 64
    """sequences that run at once"""
    num_pages: int = 256
    page_size: int = 128
    """tokens of a page; divides 128. On a CPU pages of 128 are gathered five times faster than pages of 16 (measured)"""
    tokens_per_step: int = 512
    """most tokens of one extend"""
    decode_steps: int = 8
    """most decode steps of one call"""
    attention: str = "auto"
    """backend of paged attention (`models/paged.py`); auto takes the first that can"""
    capture_routing: bool = True
    """record how each token was routed (models with experts), and replay it where a sequence is prefilled again"""
    token_buckets: tuple[int, ...] = ()
    """extend sizes to compile for (default: an eighth of tokens_per_step, a quarter, a half, all)"""
    slot_buckets: tuple[int, ...] = ()
    """decode batch sizes to compile for (default: 8, 16 ... max_slots)"""
    context_buckets: tuple[int, ...] = ()
    """mean keys of a decoding sequence, each counted in whole blocks of 128, to compile decode for (default: 128, 256 ...
    max_context)"""

    def __post_init__(self) -> None:
        for name in ("max_context", "max_slots", "num_pages", "page_size", "tokens_per_step", "decode_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name}: must be at least 1, got {getattr(self, name)}")
        if KEY_BLOCK % self.page_size:
            raise ValueError(f"engine.page_size: must divide {KEY_BLOCK}, got {self.page_size}")
        if self.max_context % KEY_BLOCK:
            raise ValueError(f"engine.max_context: {self.max_context} is not a multiple of {KEY_BLOCK}")
        for name, sizes, most in (
            ("context_buckets", self.contexts, self.max_context),
            ("slot_buckets", self.slots, max(MIN_ROWS, self.max_slots)),
            ("token_buckets", self.tokens, max(MIN_ROWS, self.tokens_per_step)),
        ):
            if sizes != tuple(sorted(set(sizes))) or sizes[-1] != most or sizes[0] < MIN_ROWS:
                raise ValueError(f"engine.{name}: {sizes} must start at {MIN_ROWS} or more, increase and end at {most}")
        if self.tokens_per_step < self.max_slots:
            raise ValueError(
                f"engine.tokens_per_step: {self.tokens_per_step} is less than max_slots ({self.max_slots}); "
                f"each running sequence needs room for one token"
            )

    @property
    def contexts(self) -> tuple[int, ...]:
        return self.context_buckets or powers(KEY_BLOCK, self.max_context)

    @property
    def slots(self) -> tuple[int, ...]:
        return self.slot_buckets or powers(MIN_ROWS, max(MIN_ROWS, self.max_slots))

    @property
    def tokens(self) -> tuple[int, ...]:
        whole = max(MIN_ROWS, self.tokens_per_step)
        return self.token_buckets or powers(max(MIN_ROWS, -(-whole // 8)), whole)

    def key_blocks(self, rows: int) -> tuple[int, ...]:
        """Sizes of a decode of so many rows, in key blocks of all rows together."""
        return tuple(sorted({max(rows, -(-rows * context // KEY_BLOCK)) for context in self.contexts}))


def captures(model: ModelConfig, config: EngineConfig) -> bool:
    """Whether an engine records how tokens are routed."""
    return model.moe is not None and config.capture_routing
