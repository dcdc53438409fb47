"""Paged attention in plain XLA: gather the key blocks that somebody reads, then attend.

Legend: T flat tokens, S rows (sequences of this step), N query blocks, Q queries of a block, M key blocks, C = KEY_BLOCK keys,
H query heads, K kv heads, P pages, h head dim, X chunks.

A step computes a flat mix of tokens of S sequences. Its work is listed by the host as pairs (query block, key block), cut into
chunks whose scores fit the cache: a key block that no query of a block may see is not in the list, so causal and ragged
lengths cost what they are.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.attention import KEY_BLOCK, Array, Ragged, attend_lists
from models.layers import published
from models.numerics import Numerics

Layer = tuple[jax.Array, jax.Array]
"""one layer's keys and values, each `[P, K, page size, h]` in `pool_dtype`"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Reads:
    """Which pages each query block reads, in X chunks that stand for themselves. Without `query`, there is one chunk and its
    query block s is token s."""

    query: Array | None
    """int32 [X, N, Q]: tokens of a block, all of one sequence; T for none"""
    position: Array
    """int32 [X, N, Q]: their positions; -1 for none"""
    row: Array
    """int32 [X, M]: sequence that a key block belongs to"""
    number: Array
    """int32 [X, M]: its place in the sequence, in key blocks"""
    lists: Ragged
    """[X, M] and [X, N, W]"""
    num_chunks: Array
    """int32 []: chunks with something in them"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PagedBlocks:
    """Where the tokens of a step are written, and what they read. Tokens of a row stand together, in order of position."""

    page: Array
    """int32 [T]: page that token t is written to (0: the trash page)"""
    offset: Array
    """int32 [T]: place in that page"""
    table: Array
    """int32 [S, pages]: pages of each row in order; whole key blocks"""
    starts: Array
    """int32 [S + 1]: row s owns tokens starts[s] to starts[s + 1]"""
    lengths: Array
    """int32 [S]: keys of row s after this step; 0 for an empty row"""
    num_rows: Array
    """int32 [1]: rows before the first that is empty for good"""
    reads: tuple[Reads, ...]
    """of the gather backend; each token is in one of them"""


def pool_dtype(dtype: DTypeLike) -> np.dtype:
    """What the page pool stores: 16-bit floats as their bit patterns, others as they are.

    XLA on CPU scatters 16-bit floats by converting the whole pool to float32 and back, at every step; bits it just moves.
    """
    return np.dtype(np.uint16) if np.dtype(dtype).itemsize == 2 else np.dtype(dtype)


def to_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, pool_dtype(x.dtype))


def from_bits(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, dtype)


def write(layer: Layer, k: jax.Array, v: jax.Array, blocks: PagedBlocks, dtype: DTypeLike) -> Layer:
    """Puts the step's keys and values `[T, K, h]` into their pages."""
    rounded = (to_bits(published(new, dtype).astype(dtype)) for new in (k, v))
    keys, values = (pool.at[blocks.page, :, blocks.offset].set(new) for pool, new in zip(layer, rounded, strict=True))
    return keys, values


def attend(layer: Layer, q: jax.Array, blocks: PagedBlocks, numerics: Numerics) -> jax.Array:
    """`[T, H, h]` -> `[T, H * h]`; tokens that no query block names give zeros."""
    T, H, h = q.shape
    if blocks.reads[0].query is None:
        (reads,) = blocks.reads
        first = jax.tree.map(lambda x: x[0] if x.ndim else x, reads)
        return _chunk(layer, q[:, None], first, blocks.table, numerics)[:, 0]

    def body(index: jax.Array, out: jax.Array, reads: Reads) -> jax.Array:
        one = jax.tree.map(lambda x: jax.lax.dynamic_index_in_dim(x, index, keepdims=False) if x.ndim else x, reads)
        part = _chunk(layer, jnp.take(q, one.query, axis=0, mode="clip"), one, blocks.table, numerics)
        return out.at[one.query].set(part, mode="drop")

    out = jnp.zeros((T, H * h), q.dtype)
    for reads in blocks.reads:
        out = jax.lax.fori_loop(0, reads.num_chunks, partial(body, reads=reads), out)
    return out


def _chunk(layer: Layer, q_NQHh: jax.Array, reads: Reads, table: jax.Array, numerics: Numerics) -> jax.Array:
    _, K, page_size, h = layer[0].shape
    blocks = table.reshape(table.shape[0], -1, KEY_BLOCK // page_size)
    pages = blocks[reads.row, reads.number]
    place = reads.number[:, None] * KEY_BLOCK + jnp.arange(KEY_BLOCK)[None]
    position = jnp.take(reads.position, reads.lists.owner, axis=0)
    visible = place[:, None, :] <= position[:, :, None]
    # A page's tail may hold anything, also NaN: what no query of the block sees is read as zero.
    some = jnp.broadcast_to((place <= position.max(axis=1, keepdims=True))[:, None, :, None], (len(place), K, KEY_BLOCK, h))
    keys, values = (jnp.take(pool, pages, axis=0).swapaxes(1, 2).reshape(some.shape) for pool in layer)
    values = from_bits(jnp.where(some, values, jnp.zeros((), values.dtype)), numerics.dtype)
    return attend_lists(q_NQHh, from_bits(keys, numerics.dtype), values, visible, reads.lists, numerics)
