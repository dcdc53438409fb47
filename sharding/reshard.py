"""Weights from one layout to another, derived from the two descriptions; nobody writes a name map.

A stacked weight `blocks.q` (its first dim is `layer`) and the unrolled weights `blocks.0.q`, `blocks.1.q`, ... hold the
same *leaves*. Every movement is leaf to leaf: read and cast on the source devices, copy shard to shard, write on the
target devices. README.md beside this file has the picture and a worked example.
"""

import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Sharding
from jax.typing import DTypeLike

from sharding.route import Route, route, without_first_dim
from sharding.rules import Weight

DEFAULT_CHUNK_BYTES = 256 * 2**20


def abstract(
    weights: Mapping[str, Weight], dtype: DTypeLike, shardings: Mapping[str, Sharding] | None = None
) -> dict[str, jax.ShapeDtypeStruct]:
    """Shapes, dtype and (optionally) shardings of a tree without any array: for restoring, lowering and planning."""
    return {
        name: jax.ShapeDtypeStruct(weight.shape, dtype, sharding=shardings[name] if shardings else None)
        for name, weight in weights.items()
    }


def init(
    weights: Mapping[str, Weight], key: jax.Array, dtype: DTypeLike, shardings: Mapping[str, Sharding]
) -> dict[str, jax.Array]:
    """Fresh weights, each made in place under its sharding.

    A weight depends on `key`, its name, shape and `Weight.init` alone: not on the other weights, nor on the mesh.

    Args:
        key: a typed key (`jax.random.key`) or a raw one.
        dtype: dtype of the result; draws are made in float32.
    """
    params: dict[str, jax.Array] = {}
    for name, weight in weights.items():
        own = jax.random.fold_in(key, np.uint32(zlib.crc32(name.encode())))
        draw = _draw(weight.shape, jnp.dtype(dtype), weight.init == 0, shardings[name])
        params[name] = draw(own, np.float32(weight.init))
    return params


def reshard(
    params: Mapping[str, jax.Array],
    source: Mapping[str, Weight],
    target: Mapping[str, Weight],
    shardings: Mapping[str, Sharding],
    dtype: DTypeLike,
    chunk_bytes: int = DEFAULT_CHUNK_BYTES,
) -> dict[str, jax.Array]:
    """The same weights in another layout, dtype and place. Shares no buffer with `params`.

    Args:
        params: name -> array, as `source` describes them.
        source: what `params` holds.
        target: what is wanted; stacked and unrolled blocks may be mixed with either of them in `source`.
        shardings: target name -> where it goes (`Rules.shardings`).
        dtype: dtype of the result; the cast happens on the source devices, before anything moves.
        chunk_bytes: bytes (in `dtype`) in flight before waiting. Transient memory of a device stays below twice this,
            plus the largest leaf (a weight of one layer, or the embedding).

    Raises:
        ValueError: names or shapes differ; lists every difference. Nothing has moved then.
    """
    _check_manifest(params, source, target, shardings)
    dtype = jnp.dtype(dtype)
    leaves = {leaf.name: leaf for leaf in _leaves(source)}
    moved: dict[str, jax.Array] = {}
    in_flight: list[jax.Array] = []
    bytes_in_flight = 0

    def account(array: jax.Array, num_bytes: int) -> None:
        nonlocal bytes_in_flight
        in_flight.append(array)
        bytes_in_flight += num_bytes
        if bytes_in_flight >= chunk_bytes:
            jax.block_until_ready(in_flight)
            in_flight.clear()
            bytes_in_flight = 0

    for name, weight in target.items():
        sharding = shardings[name]
        size = weight.size * dtype.itemsize
        if name in source and (not _is_stacked(weight) or size <= chunk_bytes):
            moved[name] = _move(params[name], None, sharding, dtype)
            account(moved[name], size)
        elif not _is_stacked(weight):
            leaf = leaves[name]
            moved[name] = _move(params[leaf.owner], leaf.layer, sharding, dtype)
            account(moved[name], size)
        else:
            layer_sharding = without_first_dim(sharding, len(weight.shape))
            stack = _zeros(weight.shape, dtype, sharding)()
            for target_leaf in _expand(name, weight):
                leaf = leaves[target_leaf.name]
                value = _move(params[leaf.owner], leaf.layer, layer_sharding, dtype)
                stack = _write(sharding)(stack, value, np.int32(target_leaf.layer or 0))
                # the stack is donated to the next write: wait for the layer itself, which bounds what is in flight
                account(value, size // weight.shape[0])
            moved[name] = stack
    jax.block_until_ready(moved)
    return moved


@dataclass(frozen=True)
class _Leaf:
    """One weight of one layer, or a weight outside the blocks."""

    name: str
    shape: tuple[int, ...]
    dims: tuple[str, ...]
    owner: str
    """the weight in the tree that holds it"""
    layer: int | None
    """its index in the owner; None when the owner is the leaf"""


def _is_stacked(weight: Weight) -> bool:
    return bool(weight.dims) and weight.dims[0] == "layer"


def _expand(name: str, weight: Weight) -> Iterable[_Leaf]:
    if not _is_stacked(weight):
        yield _Leaf(name, weight.shape, weight.dims, name, None)
        return
    prefix, _, rest = name.partition(".")
    assert rest, f"a stacked weight is named prefix.rest, got {name!r}"
    for layer in range(weight.shape[0]):
        yield _Leaf(f"{prefix}.{layer}.{rest}", weight.shape[1:], weight.dims[1:], name, layer)


def _leaves(weights: Mapping[str, Weight]) -> Iterable[_Leaf]:
    for name, weight in weights.items():
        yield from _expand(name, weight)


def _check_manifest(
    params: Mapping[str, jax.Array],
    source: Mapping[str, Weight],
    target: Mapping[str, Weight],
    shardings: Mapping[str, Sharding],
) -> None:
    """Both ways, and everything at once.

    Raises:
        ValueError: with one line for each difference.
    """
    have, want = {leaf.name: leaf for leaf in _leaves(source)}, {leaf.name: leaf for leaf in _leaves(target)}
    faults = [f"params: {name} is missing; the source describes it" for name in source if name not in params]
    faults += [f"params: {name} is extra; the source does not describe it" for name in params if name not in source]
    faults += [
        f"params: {name} has shape {list(array.shape)}, but the source describes {list(source[name].shape)}"
        for name, array in params.items()
        if name in source and tuple(array.shape) != source[name].shape
    ]
    faults += [f"target: {what} is missing from the source" for what in _unmatched(want, have)]
    faults += [f"source: {what} is extra; the target does not want it" for what in _unmatched(have, want)]
    faults += [
        f"target: {name} is {_shown(want[name])}, but the source has {_shown(leaf)}"
        for name, leaf in have.items()
        if name in want and (leaf.shape, leaf.dims) != (want[name].shape, want[name].dims)
    ]
    faults += [f"shardings: {name} is missing" for name in target if name not in shardings]
    faults += [f"shardings: {name} is extra" for name in shardings if name not in target]
    if faults:
        listing = "\n  ".join(faults)
        raise ValueError(
            f"reshard: the two trees differ in {len(faults)} places, nothing was moved; describe both with one model "
            f"config and read params of that config:\n  {listing}"
        )


def _shown(leaf: _Leaf) -> str:
    return "[" + ", ".join(f"{dim}={size}" for dim, size in zip(leaf.dims, leaf.shape, strict=True)) + "]"


def _unmatched(these: Mapping[str, _Leaf], others: Mapping[str, _Leaf]) -> list[str]:
    """Leaves of `these` that `others` lack; a stack of which all layers are lacking is named once."""
    present = {leaf.owner for name, leaf in these.items() if name in others}
    return list(
        dict.fromkeys(name if leaf.owner in present else leaf.owner for name, leaf in these.items() if name not in others)
    )


def _move(array: jax.Array, layer: int | None, target: Sharding, dtype: np.dtype) -> jax.Array:
    """One leaf (or a whole weight, with `layer` None): read and cast, copy, re-layout."""
    if layer is None:
        way = route(array.sharding, target, array.ndim)
        read = _read(dtype, way)(array)
    else:
        way = route(without_first_dim(array.sharding, array.ndim), target, array.ndim - 1)
        read = _read_layer(dtype, way)(array, np.int32(layer))
    copied = jax.device_put(read, way.after)
    return copied if way.after == target else _relayout(target)(copied)


# Jitted functions, one for each dtype and route; jit itself keeps one program for each shape.


@cache
def _read(dtype: np.dtype, way: Route):
    # copy: without it a read that changes nothing would return the caller's own buffer, which a later step may donate
    return jax.jit(lambda x: _gather(jnp.copy(x.astype(dtype)), way), out_shardings=way.before)


@cache
def _read_layer(dtype: np.dtype, way: Route):
    def read(x: jax.Array, layer: jax.Array) -> jax.Array:
        return _gather(jax.lax.dynamic_index_in_dim(x, layer, keepdims=False).astype(dtype), way)

    return jax.jit(read, out_shardings=way.before)


def _gather(x: jax.Array, way: Route) -> jax.Array:
    """Says the steps one by one: cast, then gather, then cut. Left alone, XLA may gather before the cast."""
    x = jax.lax.with_sharding_constraint(x, way.source)
    return jax.lax.with_sharding_constraint(x, way.common)


@cache
def _relayout(sharding: Sharding):
    return jax.jit(lambda x: x, out_shardings=sharding)


@cache
def _write(sharding: Sharding):
    def write(stack: jax.Array, value: jax.Array, layer: jax.Array) -> jax.Array:
        return jax.lax.dynamic_update_index_in_dim(stack, value, layer, axis=0)

    return jax.jit(write, out_shardings=sharding, donate_argnums=0)


@cache
def _zeros(shape: tuple[int, ...], dtype: np.dtype, sharding: Sharding):
    return jax.jit(partial(jnp.zeros, shape, dtype), out_shardings=sharding)


@cache
def _draw(shape: tuple[int, ...], dtype: np.dtype, ones: bool, sharding: Sharding):
    def draw(key: jax.Array, std: jax.Array) -> jax.Array:
        return jnp.ones(shape, dtype) if ones else (std * jax.random.normal(key, shape, jnp.float32)).astype(dtype)

    return jax.jit(draw, out_shardings=sharding)
