"""Attention of one segment of a path, whose ancestors' keys and values stand in a buffer (depth-first training).

Legend: T tokens of the segment, C places of the buffer, H query heads, K kv heads, h head dim, N query blocks.

A key stands in the buffer at its position, so the lists of `models.attention` are the buffer itself, cut into key blocks:
a token's result has the bits that it has in a row of tries and in the engine.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.attention import ForestBlocks, forest_attend
from models.layers import published
from models.numerics import Numerics

QUERY_BLOCK = 64


@dataclass
class PathContext:
    """Each token sees the buffer's places before the segment, the segment's tokens before it, and itself."""

    keys: jax.Array
    """float [C, K, h], of one layer; places from `start` on are not read"""
    values: jax.Array
    start: jax.Array
    """int32 []: position of the segment's first token; start + T is at most C"""
    count: jax.Array
    """int32 []: tokens of the segment, the rest of T is padding"""
    numerics: Numerics
    new: tuple[jax.Array, jax.Array] | None = None
    """keys and values of the segment `[T, K, h]`, as the buffer is to hold them"""

    def attend(self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        T, H, h = q.shape
        C = self.keys.shape[0]
        k, v = (published(x, self.numerics.dtype) for x in (k, v))
        self.new = k, v

        def placed(buffer: jax.Array, x: jax.Array) -> jax.Array:
            return jax.lax.dynamic_update_slice_in_dim(buffer, x.astype(buffer.dtype), self.start, axis=0)[None]

        rows = placed(jnp.zeros((C, H, h), q.dtype), q), placed(self.keys, k), placed(self.values, v)
        out = forest_attend(*rows, _chain(self.start, self.count, T, C), self.numerics)[0]
        return jax.lax.dynamic_slice_in_dim(out, self.start, T, axis=0)


def _chain(start: jax.Array, count: jax.Array, T: int, C: int) -> ForestBlocks:
    """Blocks of `count` queries from `start` on in a row of one chain of C places."""
    N = T // QUERY_BLOCK
    token = jnp.arange(T, dtype=jnp.int32).reshape(N, QUERY_BLOCK)
    query = jnp.where(token < count, token + start, C)
    place = jnp.broadcast_to(jnp.arange(C, dtype=jnp.int32)[None], (N, C))
    past = jnp.broadcast_to((token[:, -1:] + start + 1), (N, C))
    return ForestBlocks(end=jnp.full((1, C), C, jnp.int32), query=query[None], key=jnp.where(place < past, place, C)[None])
