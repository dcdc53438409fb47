"""When numerics are exact, and who refuses: `model.numerics` of a run."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh
from jax.typing import DTypeLike

from models.config import ModelConfig
from models.invariance import check
from models.numerics import Numerics, tile_rows
from models.transformer import describe
from sharding.rules import Rules
from sharding.shards import Shards

MODES = ("auto", "exact", "fast")
"""exact: a token's bits do not depend on its company, or else nothing starts; fast: sums in the compiler's order; auto: exact
on CPUs, as far as it goes there, and fast elsewhere"""


def is_exact(
    mode: str, model: ModelConfig, dtype: DTypeLike, mesh: Mesh, rules: Rules, side: str, depth_first: bool = False
) -> bool:
    """Whether a side of a run, `engine` or `trainer` (which may walk tries depth first), computes exactly.

    Raises:
        ValueError: the mode is `exact`, and cannot be promised: says why.
    """
    assert mode in MODES, mode
    if mode == "fast":
        return False
    platform = mesh.devices.flat[0].platform
    reasons = _unpromised(model, np.dtype(dtype), mesh, rules, side, depth_first)
    if mode == "exact":
        if reasons := reasons or list(_moved(model, Numerics(dtype, rows=tile_rows(dtype)))):
            raise ValueError(f"model.numerics: exact cannot be promised here: {'; '.join(reasons)}. Change that, or use auto")
        return True
    if platform == "cpu":
        logging.info("numerics of the %s: exact, but for: %s", side, "; ".join(reasons) or "a check of this machine")
    return platform == "cpu"


def _unpromised(model: ModelConfig, dtype: np.dtype, mesh: Mesh, rules: Rules, side: str, depth_first: bool) -> list[str]:
    """Why it cannot be, before anything is computed."""
    for platform in (mesh.devices.flat[0].platform, jax.default_backend()):
        if platform != "cpu":
            return [f"on {platform} products and attention cut their sums by shape, and no kernel was checked"]
    reasons = []
    if dtype != jnp.bfloat16:
        reasons.append(f"the {side} computes in {dtype.name}, whose products have other bits in other company; use bfloat16")
    weights = describe(model)
    if side == "engine":  # the compiler's to split, so it may split what a trainer's step does not
        whole = rules.uneven(mesh, weights)
        split = [dim for dim in rules.table if dim not in whole and rules.ways(mesh, dim) > 1]
    else:
        shards = Shards.of(mesh, rules, weights)
        split = [dim for dim in rules.table if _in_parts(shards, dim, depth_first)]
    if split:
        reasons.append(f"{side}.rules split {', '.join(split)} over devices, so sums are made of parts")
    return reasons


def _in_parts(shards: Shards, dim: str, depth_first: bool) -> bool:
    """Whether a trainer adds up parts of sums over this dim. Most weights are whole where they are used; where experts are
    split, a token's parts all travel back to it, unless every device has all tokens."""
    if dim == "experts" and not depth_first and set(shards.kept(dim)) <= set(shards.rows):
        return False
    return bool(shards.kept(dim) or (dim == "vocab" and shards.axes(dim)))


@functools.cache
def _moved(model: ModelConfig, numerics: Numerics) -> tuple[str, ...]:
    """Once a process, as both sides ask."""
    return tuple(check(model, numerics))
