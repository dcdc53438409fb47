"""Floating-point operations that a model's products take, two for each multiplication with its addition."""

import jax

from models.config import ModelConfig
from models.transformer import describe

PEAK_FLOPS_PER_S = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v6 lite": 918e12,
    "NVIDIA A100": 312e12,
    "NVIDIA H100": 989e12,
    "NVIDIA H200": 989e12,
}
"""dense bfloat16 peak of one device, by the beginning of its kind's name (the makers' data sheets)"""


def forward_flops(model: ModelConfig, tokens: int, keys: int, logits: int) -> float:
    """Of a forward pass; forward and backward together take three times as much.

    Args:
        tokens: that go through the layers.
        keys: that these tokens see, in sum.
        logits: tokens whose logits are computed.
    """
    layers = layer_weights(model)
    # of one query and one key: a score, and a value's part in the sum
    attention = 2 * model.num_layers * model.num_heads * model.head_dim
    return 2.0 * (layers * tokens + attention * keys + model.model_dim * model.vocab_size * logits)


def layer_weights(model: ModelConfig) -> int:
    """Weights of the layers' matrices that a token passes: of the experts its own, and the shared one."""
    total = 0
    for name, weight in describe(model).items():
        if name.startswith("blocks.") and "embed" in weight.dims:
            share = (model.moe.experts_per_token, model.moe.num_experts) if model.moe and "experts" in weight.dims else (1, 1)
            total += weight.size * share[0] // share[1]
    return total


def peak_flops_per_s(device: jax.Device) -> float | None:
    """None where no data sheet is known, as for CPUs."""
    fitting = [name for name in PEAK_FLOPS_PER_S if device.device_kind.startswith(name)]
    return PEAK_FLOPS_PER_S[max(fitting, key=len)] if fitting else None
