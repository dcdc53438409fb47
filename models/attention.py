"""Attention, and the contexts that decide what a query may see.

Legend: B rows, T tokens, N query blocks, Q queries of a block, C keys of a block, H query heads, K kv heads, h head dim,
P pages, W key blocks.

There is one computation, `attend_blocks`: blocks of queries, each with its own list of keys *in path order* (position 0
first), cut at multiples of KEY_BLOCK. The engine reads the lists from its page pool, the trainer from its row. The sum
over keys runs inside a key block in list order and then over key blocks in order, so a token's result has the same bits
whoever asks, whatever shares its block and however far the list is padded.
"""

from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.layers import COLUMNS, accumulator, dot, exp_from, published

KEY_BLOCK = 128
"""keys summed in one product; a key's place in its list fixes its block"""
SCORES_PER_CHUNK = {"cpu": 1 << 19}
"""score elements computed at a time: on a CPU they should stay in cache; other platforms: 2^27"""
MASKED = -1e30

Array = Any
"""a field that the host fills with numpy and the device reads as jax.Array"""


class Context(Protocol):
    """What a layer sees of the rest of the world."""

    def attend(self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """q `[..., T, H, h]`, k and v `[..., T, K, h]`, rotated -> `[..., T, H * h]`."""
        ...


def attend_blocks(
    q_NQHh: jax.Array, k_KNCh: jax.Array, v_KNCh: jax.Array, visible_NQC: jax.Array, dtype: DTypeLike
) -> jax.Array:
    """Softmax attention of N blocks of Q queries over C listed keys each -> `[N, Q, H * h]`.

    C is a multiple of KEY_BLOCK; every query sees at least one key.
    """
    N, Q, H, h = q_NQHh.shape
    K, _, C, _ = k_KNCh.shape
    W, G = C // KEY_BLOCK, H // K
    if G == 1 and (Q == 1 or W == 1):
        # A product of one row takes another path, with other bits; and where neither heads nor key blocks stand
        # between the transposition of q and its product, XLA-CPU makes one product of both, on another path too.
        # Twice the heads avoid either.
        twice = attend_blocks(jnp.repeat(q_NQHh, 2, axis=2), k_KNCh, v_KNCh, visible_NQC, dtype)
        return twice.reshape(N, Q, H, 2, h)[:, :, :, 0].reshape(N, Q, H * h)
    q = (q_NQHh * h**-0.5).reshape(N, Q, K, G, h).transpose(2, 0, 3, 1, 4).reshape(K, N, 1, G * Q, h)
    k = k_KNCh.reshape(K, N, W, KEY_BLOCK, h)
    v = v_KNCh.reshape(K, N, W, KEY_BLOCK, h).astype(accumulator(dtype))
    scores = dot("knwmh,knwch->knwmc", jnp.broadcast_to(q, (K, N, W, G * Q, h)), k, dtype)
    seen = visible_NQC.reshape(N, Q, W, KEY_BLOCK).transpose(0, 2, 1, 3)[None, :, :, None]
    scores = jnp.where(
        jnp.broadcast_to(seen, (K, N, W, G, Q, KEY_BLOCK)), scores.reshape(K, N, W, G, Q, KEY_BLOCK), MASKED
    ).reshape(K, N, W, G * Q, KEY_BLOCK)
    top = jax.lax.stop_gradient(scores.max(axis=-1, keepdims=True).max(axis=2, keepdims=True))
    p = exp_from(scores, top)
    # At widths that are a multiple of COLUMNS the place of masked keys does not matter. The denominators are a product too,
    # so that they are summed exactly as the numerators are.
    if h % COLUMNS:
        v = jnp.pad(v, ((0, 0),) * 4 + ((0, -h % COLUMNS),))
    parts = dot("knwmc,knwch->knwmh", p, v, v.dtype)
    sums = dot("knwmc,ch->knwmh", p, jnp.ones((KEY_BLOCK, COLUMNS), v.dtype), v.dtype)[..., 0]
    total, mass = parts[:, :, 0], sums[:, :, 0]
    for block in range(1, W):
        total, mass = total + parts[:, :, block], mass + sums[:, :, block]
    out = total[..., :h] / jnp.broadcast_to(mass[..., None], (*total.shape[:-1], h))
    return out.reshape(K, N, G, Q, h).transpose(1, 3, 0, 2, 4).reshape(N, Q, H * h)


def blocks_per_chunk(num_blocks: int, scores_per_block: int) -> int:
    """The largest divisor of `num_blocks` whose scores fit SCORES_PER_CHUNK (at least 1)."""
    limit = SCORES_PER_CHUNK.get(jax.default_backend(), 1 << 27)
    fitting = (n for n in range(num_blocks, 0, -1) if num_blocks % n == 0 and n * scores_per_block <= limit)
    return next(fitting, 1)


def _live_chunks(live_N: jax.Array, chunk: int) -> jax.Array:
    """How many chunks of blocks are worth computing: up to the last that holds a live block."""
    return (jnp.max(jnp.where(live_N, jnp.arange(live_N.shape[0]), -1)) + chunk) // chunk


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class ForestBlocks:
    """Which queries and keys of a row of tries form which block; made by `rl.forest`. An index of T means nothing."""

    end: Array
    """int32 [B, T]: where the subtree of v ends; u attends to v iff v <= u < end[v]"""
    query: Array
    """int32 [B, N, Q]: row places of a block's queries"""
    key: Array
    """int32 [B, N, C]: row places of a block's keys; those in key block w have depths in [w, w + 1) * KEY_BLOCK"""


def _chunk_of(blocks: ForestBlocks, index: jax.Array, size: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """query `[B, n, Q]`, key `[B, n, C]` and what is visible `[B, n, Q, C]` in the index-th chunk of `size` blocks."""
    query, key = (jax.lax.dynamic_slice_in_dim(jnp.asarray(x), index * size, size, axis=1) for x in (blocks.query, blocks.key))
    end = jnp.pad(jnp.asarray(blocks.end), ((0, 0), (0, 1)))  # the place T is never visible
    key_end = jax.vmap(lambda end, key: jnp.take(end, key))(end, key)
    visible = (key[:, :, None] <= query[..., None]) & (query[..., None] < key_end[:, :, None])
    return query, key, visible


def _take(x_BT: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of `x` at `[B, ...]` places; a place of T gives the last row."""
    return jax.vmap(lambda x, i: jnp.take(x, i, axis=0, mode="clip"))(x_BT, index)


def _listed(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`attend_blocks` over B rows of n blocks: q `[B, n, Q, H, h]`, k and v `[B, n, C, K, h]` -> `[B, n, Q, H * h]`."""
    B, n = q.shape[:2]
    q, k, v, visible = (x.reshape(B * n, *x.shape[2:]) for x in (q, k, v, visible))
    out = attend_blocks(q, k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3), visible, dtype)
    return out.reshape(B, n, *out.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _forest_attend(q: jax.Array, k: jax.Array, v: jax.Array, blocks: ForestBlocks, dtype: DTypeLike) -> jax.Array:
    B, T, H, h = q.shape
    size = _forest_chunk(q, blocks)

    def body(index: jax.Array, out: jax.Array) -> jax.Array:
        query, key, visible = _chunk_of(blocks, index, size)
        part = _listed(_take(q, query), _take(k, key), _take(v, key), visible, dtype)
        return jax.vmap(lambda out, i, part: out.at[i].set(part, mode="drop"))(out, query, part)

    return jax.lax.fori_loop(0, _forest_live(q, blocks), body, jnp.zeros((B, T, H * h), q.dtype))


def _forest_chunk(q: jax.Array, blocks: ForestBlocks) -> int:
    B, _, H, _ = q.shape
    N, Q = blocks.query.shape[1:]
    return blocks_per_chunk(N, B * Q * H * blocks.key.shape[-1])


def _forest_live(q: jax.Array, blocks: ForestBlocks) -> jax.Array:
    return _live_chunks((jnp.asarray(blocks.query) < q.shape[1]).any(axis=(0, 2)), _forest_chunk(q, blocks))


def _forest_forward(q: jax.Array, k: jax.Array, v: jax.Array, blocks: ForestBlocks, dtype: DTypeLike):
    return _forest_attend(q, k, v, blocks, dtype), (q, k, v, blocks)


def _forest_backward(dtype: DTypeLike, saved: tuple[jax.Array, jax.Array, jax.Array, ForestBlocks], g: jax.Array):
    q, k, v, blocks = saved
    T = q.shape[1]
    size = _forest_chunk(q, blocks)

    def body(index: jax.Array, grads: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        query, key, visible = _chunk_of(blocks, index, size)
        parts = _take(q, query), _take(k, key), _take(v, key)
        _, transpose = jax.vjp(lambda q, k, v: _listed(q, k, v, visible, dtype), *parts)
        asked = jnp.broadcast_to((query < T)[..., None], (*query.shape, g.shape[-1]))
        new = transpose(jnp.where(asked, _take(g, query), 0))
        add = jax.vmap(lambda total, i, part: total.at[i].add(part, mode="drop"))
        # Rows of one flat dim scatter 10x faster than [K, h] (CPU).
        return tuple(
            add(total, index, part.reshape(*index.shape, -1))
            for total, index, part in zip(grads, (query, key, key), new, strict=True)
        )

    zeros = tuple(jnp.zeros((*x.shape[:2], x.shape[2] * x.shape[3]), x.dtype) for x in (q, k, v))
    grads = jax.lax.fori_loop(0, _forest_live(q, blocks), body, zeros)
    return *(grad.reshape(x.shape) for grad, x in zip(grads, (q, k, v), strict=True)), None


_forest_attend.defvjp(_forest_forward, _forest_backward)


@dataclass(frozen=True)
class ForestContext:
    """Each token sees its ancestors in its trie, and itself."""

    blocks: ForestBlocks
    dtype: DTypeLike

    def attend(self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # Rounded as the page pool rounds them, but kept wide so that gradients of shared keys add up in float32.
        return _forest_attend(q, published(k, self.dtype), published(v, self.dtype), self.blocks, self.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class PagedBlocks:
    """Where a flat mix of tokens of many sequences is written, and which pages each query block reads."""

    page: Array
    """int32 [T]: page that token t is written to (0: the trash page)"""
    offset: Array
    """int32 [T]: place in that page"""
    query: Array
    """int32 [N, Q]: tokens of a block, all of one sequence"""
    position: Array
    """int32 [N, Q]: their positions; -1 for padding"""
    table: Array
    """int32 [N, C / page size]: pages of the block's sequence, in order"""
    slot: Array
    """int32 [T]: where token t stands in the flattened [N * Q]"""


def pool_dtype(dtype: DTypeLike) -> np.dtype:
    """What the page pool stores: 16-bit floats as their bit patterns, others as they are.

    XLA on CPU scatters 16-bit floats by converting the whole pool to float32 and back, at every step; bits it just moves.
    """
    return np.dtype(np.uint16) if np.dtype(dtype).itemsize == 2 else np.dtype(dtype)


def to_bits(x: jax.Array) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, pool_dtype(x.dtype))


def from_bits(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    return jax.lax.bitcast_convert_type(x, dtype)


class PagedContext:
    """Writes each layer's keys and values into the page pool, then attends to the pages. Unrolled layers only.

    `pool` is a list over layers of (keys, values), each `[K, P, page size, h]` in `pool_dtype(dtype)`; after the forward it is
    the new pool.
    """

    def __init__(self, pool: list[tuple[jax.Array, jax.Array]], blocks: PagedBlocks, dtype: DTypeLike):
        self.pool = list(pool)
        self.blocks = blocks
        self.dtype = dtype

    def attend(self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        assert isinstance(layer, int), "the page pool is a list over layers: unroll the model"
        blocks = self.blocks
        _, H, h = q.shape
        keys, values = (
            pool.at[:, blocks.page, blocks.offset].set(to_bits(published(new, self.dtype).astype(self.dtype)).swapaxes(0, 1))
            for pool, new in zip(self.pool[layer], (k, v), strict=True)
        )
        self.pool[layer] = keys, values
        (N, Q), (K, _, page_size, _) = blocks.query.shape, keys.shape
        C = blocks.table.shape[-1] * page_size

        def some(query: jax.Array, position: jax.Array, table: jax.Array) -> jax.Array:
            visible = jnp.arange(C)[None, None, :] <= position[:, :, None]
            listed_k, listed_v = (
                from_bits(jnp.take(pool, table, axis=1), self.dtype).reshape(K, -1, C, h) for pool in (keys, values)
            )
            return attend_blocks(jnp.take(q, query, axis=0), listed_k, listed_v, visible, self.dtype)

        size = blocks_per_chunk(N, Q * H * C)
        arrays = tuple(jnp.asarray(x) for x in (blocks.query, blocks.position, blocks.table))
        if size == N:
            out = some(*arrays)
        else:

            def body(index: jax.Array, out: jax.Array) -> jax.Array:
                part = some(*(jax.lax.dynamic_slice_in_dim(x, index * size, size) for x in arrays))
                return jax.lax.dynamic_update_slice_in_dim(out, part, index * size, axis=0)

            live = _live_chunks((arrays[1] >= 0).any(axis=1), size)
            out = jax.lax.fori_loop(0, live, body, jnp.zeros((N, Q, H * h), q.dtype))
        return jnp.take(out.reshape(N * Q, -1), blocks.slot, axis=0)
