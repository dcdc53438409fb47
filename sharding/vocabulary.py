"""The table of embeddings and the head, of which no device ever holds the whole.

Legend: B rows, T tokens, D model, V vocab.

Both are split over the axes of the rules; tokens may be split over the same axes. So tokens travel, not weights: to the table
go ids, and back come columns of their rows; the head changes columns of D for ids of V (as many bytes as a device has of it),
and each device makes the logits of its ids for the tokens of all.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from sharding.shards import Shards

TILE = 64
"""neighbouring ids whose weights are summed first; the sampler draws a tile, then a token of it"""


def lookup(shards: Shards, table: jax.Array, tokens: jax.Array) -> jax.Array:
    """A table `[V, D]` at tokens `[..., T]` -> `[..., T, D]`, given this device's part of each."""
    vocab, columns = shards.axes("vocab"), shards.axes("embed")
    tokens = shards.everyones(tokens, (*vocab, *columns), tokens.dtype)
    x = _rows_of(table, tokens, vocab)
    for axis in reversed(columns):
        if (dim := shards.token_dim(axis)) is None:
            x = jax.lax.all_gather(x, axis, axis=x.ndim - 1, tiled=True)
        else:
            x = jax.lax.all_to_all(x, axis, dim, x.ndim - 1, tiled=True)
    for axis in reversed(vocab):
        if (dim := shards.token_dim(axis)) is None:
            x = jax.lax.psum(x, axis)
        else:
            x = jax.lax.psum_scatter(x, axis, scatter_dimension=dim, tiled=True)
    return x


def _rows_of(table: jax.Array, tokens: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Rows of the table of which this device has a part; zeros for others."""
    if not axes:
        return jnp.take(table, tokens, axis=0)
    at = tokens - jax.lax.axis_index(axes) * table.shape[0]
    x = jnp.take(table, at, axis=0, mode="clip")
    mine = (at >= 0) & (at < table.shape[0])
    return jnp.where(jnp.broadcast_to(mine[..., None], x.shape), x, 0)


@dataclass(frozen=True)
class Head:
    """This device's part of the head: all columns of D, some ids of V."""

    weight: jax.Array
    """`[D, V]` or `[V, D]`"""
    first: int | jax.Array
    """the id of its first; the others follow"""
    count: int | jax.Array
    """how many ids it has, the rest is padding"""
    axes: tuple[str, ...]
    """that split the vocabulary; tokens of all devices along them are computed together"""
    num_tiles: int | None = None
    """of the whole vocabulary, where each part begins with a tile"""

    @staticmethod
    def of(shards: Shards, weight: jax.Array, dims: tuple[str, ...], dtype: DTypeLike) -> "Head":
        v, d = dims.index("vocab"), dims.index("embed")
        vocab, columns = shards.axes("vocab"), shards.axes("embed")
        size, ways = weight.shape[v], int(np.prod([jax.lax.axis_size(axis) for axis in columns]))
        first = jax.lax.axis_index(vocab) * size if vocab else 0
        if not columns:
            return Head(weight, first, size, vocab)
        padding = [(0, 0), (0, 0)]
        padding[v] = (0, -size % (ways if vocab else ways * TILE))
        part = (size + padding[v][1]) // ways
        here = jax.lax.axis_index(columns[::-1]) * part
        moved: Any = _exchange(jnp.pad(weight, padding), columns, d, v, np.dtype(dtype))
        num_tiles = None if vocab else -(-size // TILE)
        return Head(moved, first + here, jnp.clip(size - here, 0, part), (*vocab, *columns), num_tiles)

    def every_tile(self, x_TN: jax.Array) -> jax.Array:
        """Tiles of the whole vocabulary, in the order of their ids, given those of this part."""
        assert self.num_tiles is not None
        return jax.lax.all_gather(x_TN, self.axes[::-1], axis=1, tiled=True)[:, : self.num_tiles]


def _exchange_forward(w: jax.Array, axes: tuple[str, ...], d: int, v: int, dtype: np.dtype):
    return _exchange(w, axes, d, v, dtype), None


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _exchange(w: jax.Array, axes: tuple[str, ...], d: int, v: int, dtype: np.dtype) -> jax.Array:
    """Some columns of D and all ids -> all columns and some ids, rounded to `dtype`; the gradient is not rounded."""
    narrow = w.astype(dtype)
    for axis in reversed(axes):
        narrow = jax.lax.all_to_all(narrow, axis, v, d, tiled=True)
    return narrow.astype(w.dtype)


def _exchange_backward(axes: tuple[str, ...], d: int, v: int, dtype: np.dtype, saved: None, g: jax.Array):
    for axis in axes:
        g = jax.lax.all_to_all(g, axis, d, v, tiled=True)
    return (g,)


_exchange.defvjp(_exchange_forward, _exchange_backward)
