"""Which tensors a Hugging Face checkpoint has, and where each one's numbers are in our tree: one table, read and written.

Legend: L layers, D model, H query heads, K kv heads, h head dim, F ffn, V vocab, E experts.
"""

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from math import prod

import numpy as np

from models.config import ModelConfig
from models.transformer import describe
from sharding.rules import Weight

Params = dict[str, np.ndarray]

NAMES: dict[str, tuple[str, int | None]] = {
    "embed": ("model.embed_tokens.weight", None),
    "blocks.attn_norm": ("model.layers.{}.input_layernorm.weight", None),
    "blocks.mlp_norm": ("model.layers.{}.post_attention_layernorm.weight", None),
    "blocks.q": ("model.layers.{}.self_attn.q_proj.weight", 1),
    "blocks.k": ("model.layers.{}.self_attn.k_proj.weight", 1),
    "blocks.v": ("model.layers.{}.self_attn.v_proj.weight", 1),
    "blocks.o": ("model.layers.{}.self_attn.o_proj.weight", 2),
    "blocks.q_bias": ("model.layers.{}.self_attn.q_proj.bias", 0),
    "blocks.k_bias": ("model.layers.{}.self_attn.k_proj.bias", 0),
    "blocks.v_bias": ("model.layers.{}.self_attn.v_proj.bias", 0),
    "blocks.q_norm": ("model.layers.{}.self_attn.q_norm.weight", None),
    "blocks.k_norm": ("model.layers.{}.self_attn.k_norm.weight", None),
    "blocks.gate": ("model.layers.{}.mlp.gate_proj.weight", 1),
    "blocks.up": ("model.layers.{}.mlp.up_proj.weight", 1),
    "blocks.down": ("model.layers.{}.mlp.down_proj.weight", 1),
    "blocks.moe.router": ("model.layers.{}.mlp.gate.weight", 1),
    "blocks.moe.gate": ("model.layers.{}.mlp.experts.{}.gate_proj.weight", 1),
    "blocks.moe.up": ("model.layers.{}.mlp.experts.{}.up_proj.weight", 1),
    "blocks.moe.down": ("model.layers.{}.mlp.experts.{}.down_proj.weight", 1),
    "blocks.moe.shared_gate": ("model.layers.{}.mlp.shared_expert.gate_proj.weight", 1),
    "blocks.moe.shared_up": ("model.layers.{}.mlp.shared_expert.up_proj.weight", 1),
    "blocks.moe.shared_down": ("model.layers.{}.mlp.shared_expert.down_proj.weight", 1),
    "blocks.moe.shared_router": ("model.layers.{}.mlp.shared_expert_gate.weight", 1),
    "norm": ("model.norm.weight", None),
    "head": ("lm_head.weight", 1),
}
"""Our name -> (Hugging Face's, number of leading dims that are inputs). A linear layer is [in..., out...] here and a
flattened [out, in] there; None stands for an array that is the same in both. A name has a place for each index that selects a
tensor: layer, and expert."""
FUSED = {
    "blocks.moe.gate": "model.layers.{}.mlp.experts.gate_up_proj",
    "blocks.moe.up": "model.layers.{}.mlp.experts.gate_up_proj",
    "blocks.moe.down": "model.layers.{}.mlp.experts.down_proj",
}
"""transformers 5's own form: all experts of a layer in one tensor [E, out, in], where gate's and up's outputs are neighbours"""


@dataclass(frozen=True)
class Tensor:
    """A stored tensor."""

    parts: tuple[str, ...]
    """our weights whose outputs are side by side in it"""
    at: tuple[int, ...]
    """the place in each of them: layer, expert"""
    shape: tuple[int, ...]


def manifest(config: ModelConfig, fused: bool = False) -> dict[str, Tensor]:
    """Every tensor of a checkpoint, by its name there.

    Args:
        fused: experts are stored as FUSED says.
    """
    tensors: dict[str, Tensor] = {}
    for name, weight in describe(config).items():
        template = FUSED.get(name, NAMES[name][0]) if fused else NAMES[name][0]
        indices = weight.shape[: template.count("{}")]
        for at in np.ndindex(indices):
            stored = template.format(*at)
            before = tensors.get(stored)
            parts = (*before.parts, name) if before else (name,)
            tensors[stored] = Tensor(parts, at, _stored_shape(name, weight.shape[len(at) :], len(parts)))
    return tensors


def expected(config: ModelConfig, present: Collection[str]) -> dict[str, Tensor]:
    """The manifest of a checkpoint that has these tensors: the experts of a layer are fused if any tensor of theirs is, or if
    none is there and those of another layer are."""
    if not config.moe:
        return manifest(config)
    single, fused = manifest(config), manifest(config, fused=True)
    layers = {fused[name].at for name in present if name in fused.keys() - single.keys()}
    if layers:
        seen = {single[name].at[:1] for name in present if name in single.keys() - fused.keys()}
        layers |= {(layer,) for layer in range(config.num_layers)} - seen
    chosen = {name: tensor for name, tensor in single.items() if name in fused or tensor.at[:1] not in layers}
    return chosen | {name: tensor for name, tensor in fused.items() if tensor.at in layers}


def take(value: np.ndarray, tensor: Tensor, weights: Mapping[str, Weight]) -> list[np.ndarray]:
    """A stored tensor -> of each of its parts, what belongs at `tensor.at`."""
    num_in = NAMES[tensor.parts[0]][1]
    if num_in:
        value = value.swapaxes(-1, -2)
    pieces = np.split(value, len(tensor.parts), axis=-1) if num_in else [value]
    shapes = [weights[name].shape[len(tensor.at) :] for name in tensor.parts]
    return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def make(tensor: Tensor, part: Callable[[str], np.ndarray], dtype: np.dtype) -> np.ndarray:
    """The tensor as it is stored.

    Args:
        part: our weight's name -> what it has at `tensor.at`.
    """
    num_in = NAMES[tensor.parts[0]][1]
    if not num_in:
        return part(tensor.parts[0]).reshape(tensor.shape).astype(dtype, order="C")
    result = np.empty(tensor.shape, dtype)
    for name, place in zip(tensor.parts, np.split(result, len(tensor.parts), axis=-2), strict=True):
        place[...] = part(name).reshape(place.swapaxes(-1, -2).shape).swapaxes(-1, -2)
    return result


def _stored_shape(name: str, shape: tuple[int, ...], num_parts: int) -> tuple[int, ...]:
    num_in = NAMES[name][1]
    if num_in is None:
        return shape
    if num_in == 0:
        return (prod(shape),)
    experts = shape[:-2] if name in FUSED else ()
    shape = shape[len(experts) :]
    return *experts, num_parts * prod(shape[num_in:]), prod(shape[:num_in])
