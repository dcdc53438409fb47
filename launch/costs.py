"""How long a chip takes for a step of an engine or a trainer: by the figures of data sheets (`launch.virtual` goes by it).

A step of an engine takes the longer of reading its weights and computing its tokens, then reading keys and values, then a
fixed time.
"""

from collections.abc import Sequence
from dataclasses import dataclass

PAGE = 256
"""tokens; larger than an engine's own, so that the books of a run of millions of tokens are quick"""


@dataclass(frozen=True)
class Model:
    """bfloat16. `parameters`, keys and values of a token (bytes), and FLOPs of a token's attention to one other (forward)."""

    parameters: float
    kv_bytes: int
    attention_flops: float


@dataclass(frozen=True)
class Chip:
    """H100 SXM: NVIDIA's data sheet. The shares are what serving and training stacks reach on it."""

    peak: float = 989e12
    """FLOP/s of dense bfloat16 products"""
    bandwidth: float = 3.35e12
    """bytes/s of HBM"""
    memory: float = 80e9
    usable: float = 0.85
    """of the memory, for weights and pages; the rest is for activations and programs"""
    read_share: float = 0.8
    """of the bandwidth, in decode steps"""
    prefill_share: float = 0.5
    """of the peak, in extends"""
    train_share: float = 0.4
    """of the peak, in a training step (6N a token)"""
    step_s: float = 1.5e-3
    """host and launches, each step of an engine"""
    optimizer_s: float = 2.0
    """fixed part of a training step"""
    swap_s: float = 1.0
    """an engine's pause at an update: gathering the new weights and swapping them in"""

    def pages(self, model: Model) -> int:
        return int((self.memory * self.usable - 2 * model.parameters) / (model.kv_bytes * PAGE))

    def engine_step(self, model: Model, tokens: float, context: float, attended: float) -> float:
        """Seconds of one step on `tokens` tokens.

        Args:
            context: tokens whose keys and values are read.
            attended: pairs of tokens in extends' attention.
        """
        flops = 2 * model.parameters * tokens + model.attention_flops * attended
        read = 2 * model.parameters / (self.bandwidth * self.read_share)
        kv = context * model.kv_bytes / (self.bandwidth * self.read_share)
        return max(read, flops / (self.peak * self.prefill_share)) + kv + self.step_s

    def train_step(self, model: Model, lengths: Sequence[int], chips: int) -> float:
        flops = sum(6 * model.parameters * n + 3 * model.attention_flops * n * n / 2 for n in lengths)
        return flops / (chips * self.peak * self.train_share) + self.optimizer_s
