"""When numerics are exact, and who refuses: `model.numerics` of a run."""

import functools

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from models.config import ModelConfig
from models.invariance import check
from models.numerics import Numerics, tile_rows
from sharding.rules import Rules
from sharding.shards import Shards

MODES = ("auto", "exact", "fast")
"""exact: a token's bits do not depend on its company, or else nothing starts; fast: sums in the compiler's order; auto: exact
on CPUs, as far as it goes there, and fast elsewhere"""


def is_exact(mode: str, model: ModelConfig, dtype: DTypeLike, mesh: Mesh, rules: Rules, side: str) -> bool:
    """Whether a side of a run, `engine` or `trainer`, computes exactly.

    Raises:
        ValueError: the mode is `exact`, and cannot be promised: says why.
    """
    assert mode in MODES, mode
    if mode == "exact" and (reasons := _unpromised(model, np.dtype(dtype), mesh, rules, side)):
        raise ValueError(f"model.numerics: exact cannot be promised here: {'; '.join(reasons)}. Change that, or use auto")
    return mode == "exact" or (mode == "auto" and mesh.devices.flat[0].platform == "cpu")


def _unpromised(model: ModelConfig, dtype: np.dtype, mesh: Mesh, rules: Rules, side: str) -> list[str]:
    platform = mesh.devices.flat[0].platform
    if platform != "cpu":
        return [f"on {platform} products and attention cut their sums by shape, and no kernel was checked"]
    reasons = []
    if dtype != jnp.bfloat16:
        reasons.append(f"model.dtype is {dtype.name}, whose products have other bits in other company (bfloat16's have not)")
    shards = Shards.of(mesh, rules, {})
    if side == "engine":
        split = [dim for dim in rules.table if shards.axes(dim)]
    else:  # what it gathers where it is used is whole; experts get all of their tokens
        split = [dim for dim in rules.table if dim != "experts" and (shards.kept(dim) or (dim == "vocab" and shards.axes(dim)))]
    if split:
        reasons.append(f"{side}.rules split {', '.join(split)} over devices, so sums are made of parts")
    return reasons or list(_moved(model, Numerics(dtype, rows=tile_rows(dtype))))


@functools.cache
def _moved(model: ModelConfig, numerics: Numerics) -> tuple[str, ...]:
    """Once a process, as both sides ask."""
    return tuple(check(model, numerics))
