"""Attention, and the contexts that decide what a query may see.

Legend: B rows, T tokens, N query blocks, Q queries of a block, C keys of a block, H query heads, K kv heads, h head dim,
P pages, W key blocks.

There is one computation, `attend_blocks`: blocks of queries, each with its own list of keys *in path order* (position 0
first), cut at multiples of KEY_BLOCK. The engine reads the lists from its page pool, the trainer from its row. The sum
over keys runs inside a key block in list order and then over key blocks in order, so a token's result has the same bits
whoever asks, whatever shares its block and however far the list is padded.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp

from models.gradient import UNSEEN, forest_gradient
from models.layers import accumulator, dot, published, restored, stored
from models.numerics import COLUMNS, Numerics, least_rows
from sharding.shards import Shards

KEY_BLOCK = 128
"""keys summed in one product; a key's place in its list fixes its block"""
SCORES_PER_CHUNK = {"cpu": 1 << 19}
"""score elements computed at a time: on a CPU they should stay in cache; other platforms: 2^27"""
MASKED = -1e30
UNROLLED = 16
"""longest list of key blocks whose sum is written out; longer ones are a loop, or programs would grow with the context"""

Array = Any
"""a field that the host fills with numpy and the device reads as jax.Array"""


class Context(Protocol):
    """What a layer sees of the rest of the world."""

    def attend(self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        """q `[..., T, H, h]`, k and v `[..., T, K, h]`, rotated -> `[..., T, H * h]`."""
        ...


class Lists(Protocol):
    """Which key blocks belong to which query block, in path order; at most `width` for each of N query blocks.

    `queries` and `keys` are the leading dims of arrays of either: `k` kv heads, `n` query blocks, `m` key blocks; or `nw` where
    every query block has as many key blocks (merged, XLA-CPU would make other products of them, with other bits)."""

    queries: str
    keys: str

    @property
    def width(self) -> int: ...

    def spread(self, x: jax.Array) -> jax.Array:
        """`[*queries, ...]` -> `[*keys, ...]`: for each key block what belongs to its query block."""
        ...

    def collect(self, x: jax.Array, w: int | jax.Array, none: float) -> jax.Array:
        """`[*keys, ...]` -> `[*queries, ...]`: of each query block's w-th key block; `none` where it has no such."""
        ...


@dataclass(frozen=True)
class Equal:
    """Every query block has `width` key blocks."""

    width: int
    queries = "kn"
    keys = "knw"

    def spread(self, x: jax.Array) -> jax.Array:
        K, N, *rest = x.shape
        return jnp.broadcast_to(x[:, :, None], (K, N, self.width, *rest))

    def collect(self, x: jax.Array, w: int | jax.Array, none: float) -> jax.Array:
        return x[:, :, w]


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Ragged:
    """Every query block has as many key blocks as it needs."""

    owner: Array
    """int32 [M]: query block that reads key block m; any for a key block that nobody reads"""
    index: Array
    """int32 [N, width]: key blocks of a query block in path order; M for none"""
    queries = "nk"
    keys = "mk"

    @property
    def width(self) -> int:
        return self.index.shape[1]

    def spread(self, x: jax.Array) -> jax.Array:
        return jnp.take(x, self.owner, axis=0)

    def collect(self, x: jax.Array, w: int | jax.Array, none: float) -> jax.Array:
        return jnp.take(x, self.index[:, w], axis=0, mode="fill", fill_value=none)


def attend_lists(
    q_NQHh: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, lists: Lists, numerics: Numerics
) -> jax.Array:
    """Softmax attention of N blocks of Q queries, each over its own list of blocks of C = KEY_BLOCK keys -> `[N, Q, H * h]`.

    keys and values are `[*lists.keys, C, h]`, visible is `[*lists.keys without k, Q, C]`. Every query sees at least one key;
    values that nobody sees must be finite.
    """
    return attend_lists_mass(q_NQHh, keys, values, visible, lists, numerics)[0]


def attend_lists_mass(
    q_NQHh: jax.Array, keys: jax.Array, values: jax.Array, visible: jax.Array, lists: Lists, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """`attend_lists`, and the log of the sum of each query's exp(score), `[N, Q, H]`."""
    N, Q, H, h = q_NQHh.shape
    K, W, m = keys.shape[lists.keys.index("k")], lists.width, lists.keys
    G = H // K
    if numerics.exact and G == 1 and (Q == 1 or W == 1 or m == "mk"):
        # A product of one row takes another path, with other bits; and where neither heads nor key blocks stand
        # between the transposition of q and its product, XLA-CPU makes one product of both, on another path too.
        # Twice the heads avoid either.
        twice, mass = attend_lists_mass(jnp.repeat(q_NQHh, 2, axis=2), keys, values, visible, lists, numerics)
        return twice.reshape(N, Q, H, 2, h)[:, :, :, 0].reshape(N, Q, H * h), mass[:, :, ::2]

    def in_order(x: jax.Array, none: float, combine: Callable[[jax.Array, jax.Array], jax.Array]) -> jax.Array:
        first = lists.collect(x, 0, none)
        if W <= UNROLLED:
            return functools.reduce(combine, (lists.collect(x, w, none) for w in range(1, W)), first)
        return jax.lax.fori_loop(1, W, lambda w, total: combine(total, lists.collect(x, w, none)), first)

    to_rows = "nqkgh->" + lists.queries + "gqh"
    q = jnp.einsum(to_rows, (q_NQHh * h**-0.5).reshape(N, Q, K, G, h)).reshape(*_sizes(lists.queries, K, N), G * Q, h)
    rows = lists.spread(q)
    if numerics.exact and (least := least_rows(h)) > G * Q:
        rows = jnp.pad(rows, [(0, 0)] * len(m) + [(0, least - G * Q), (0, 0)])
    scores = dot(f"{m}rh,{m}ch->{m}rc", rows, keys, numerics.dtype)[..., : G * Q, :]
    seen = jnp.expand_dims(visible, (m.index("k"), -3))
    seen = jnp.broadcast_to(seen, (*scores.shape[: len(m)], G, Q, KEY_BLOCK))
    scores = jnp.where(seen, scores.reshape(seen.shape), MASKED).reshape(scores.shape)
    top = in_order(jax.lax.stop_gradient(scores.max(axis=-1)), MASKED, jnp.maximum)
    p = numerics.exp_from(scores, lists.spread(top)[..., None])
    v = values.astype(accumulator(numerics.dtype))
    if numerics.exact and h % COLUMNS:
        v = jnp.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, -h % COLUMNS)])
    parts, sums = dot(f"{m}rc,{m}ch->{m}rh", p, v, v.dtype), _denominators(p, m, numerics)
    total, mass = in_order(parts, 0, jnp.add), in_order(sums, 0, jnp.add)
    out = total[..., :h] / jnp.broadcast_to(mass[..., None], (*total.shape[:-1], h))
    out = out.reshape(*_sizes(lists.queries, K, N), G, Q, h)
    log_mass = (top + jnp.log(mass)).reshape(out.shape[:-1])
    out = jnp.einsum(lists.queries + "gqh->nqkgh", out).reshape(N, Q, H * h)
    return out, jnp.einsum(lists.queries + "gq->nqkg", log_mass).reshape(N, Q, H)


def _denominators(p: jax.Array, m: str, numerics: Numerics) -> jax.Array:
    """The sum of the weights `[*m, r, c]` over a block's keys.

    Exactly as the numerators are: by a product, as at widths that are a multiple of COLUMNS the place of masked keys does not
    matter.
    """
    if not numerics.exact:
        return p.sum(axis=-1)
    return dot(f"{m}rc,ch->{m}rh", p, jnp.ones((KEY_BLOCK, COLUMNS), p.dtype), p.dtype)[..., 0]


def _sizes(dims: str, K: int, N: int) -> tuple[int, ...]:
    return tuple({"k": K, "n": N}[dim] for dim in dims)


def attend_blocks(
    q_NQHh: jax.Array, k_KNCh: jax.Array, v_KNCh: jax.Array, visible_NQC: jax.Array, numerics: Numerics
) -> jax.Array:
    """`attend_lists` where every query block lists C keys, a multiple of KEY_BLOCK."""
    return _attend_blocks_mass(q_NQHh, k_KNCh, v_KNCh, visible_NQC, numerics)[0]


def _attend_blocks_mass(
    q_NQHh: jax.Array, k_KNCh: jax.Array, v_KNCh: jax.Array, visible_NQC: jax.Array, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    N, Q, _, h = q_NQHh.shape
    K, _, C, _ = k_KNCh.shape
    W = C // KEY_BLOCK
    k, v = (x.reshape(K, N, W, KEY_BLOCK, h) for x in (k_KNCh, v_KNCh))
    visible = visible_NQC.reshape(N, Q, W, KEY_BLOCK).swapaxes(1, 2)
    return attend_lists_mass(q_NQHh, k, v, visible, Equal(W), numerics)


def blocks_per_chunk(num_blocks: int, scores_per_block: int, platform: str) -> int:
    """The largest divisor of `num_blocks` whose scores fit SCORES_PER_CHUNK (at least 1)."""
    limit = SCORES_PER_CHUNK.get(platform or jax.default_backend(), 1 << 27)
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
    first: Array | None = None
    """int32 []: row place of the first query that is here; None: all are"""
    platform: str = field(default="", metadata={"static": True})
    """that computes them; empty: this process's own"""


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


def _listed(q: jax.Array, k: jax.Array, v: jax.Array, visible: jax.Array, numerics: Numerics) -> tuple[jax.Array, jax.Array]:
    """B rows of n blocks: q `[B, n, Q, H, h]`, k and v `[B, n, C, K, h]` -> output `[B, n, Q, H * h]`, mass `[B, n, Q, H]`."""
    B, n = q.shape[:2]
    q, k, v, visible = (x.reshape(B * n, *x.shape[2:]) for x in (q, k, v, visible))
    out, mass = _attend_blocks_mass(q, k.transpose(2, 0, 1, 3), v.transpose(2, 0, 1, 3), visible, numerics)
    return out.reshape(B, n, *out.shape[1:]), mass.reshape(B, n, *mass.shape[1:])


@partial(jax.custom_vjp, nondiff_argnums=(4,))
def _forest_attend(q: jax.Array, k: jax.Array, v: jax.Array, blocks: ForestBlocks, numerics: Numerics) -> jax.Array:
    return _forest_attend_mass(q, k, v, blocks, numerics)[0]


def _forest_attend_mass(
    q: jax.Array, k: jax.Array, v: jax.Array, blocks: ForestBlocks, numerics: Numerics
) -> tuple[jax.Array, jax.Array]:
    """The output `[B, T, H * h]` and the log of the sum of each query's weights `[B, T, H]`."""
    (B, T, H, _), places = q.shape, blocks.end.shape[1]
    size, W = _forest_chunk(q, blocks), blocks.key.shape[-1] // KEY_BLOCK
    # Key blocks that no query of a chunk lists would add zeros: a shorter list has the same bits.
    widths = sorted({-(-W // 2**n) for n in range(3)})
    needed = jnp.where(jnp.asarray(blocks.key) < places, jnp.arange(W * KEY_BLOCK)[None, None] // KEY_BLOCK + 1, 0).max((0, 2))
    levels = sum((needed.reshape(-1, size).max(axis=1) > width).astype(jnp.int32) for width in widths[:-1])
    levels = jnp.broadcast_to(levels, len(needed) // size)

    def body(index: jax.Array, found: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        query, key, visible = _chunk_of(blocks, index, size)
        here = query if blocks.first is None else query - blocks.first  # past the queries that are here where there is none

        def attend(width: int) -> tuple[jax.Array, jax.Array]:
            listed = key[..., : width * KEY_BLOCK]
            return _listed(_take(q, here), _take(k, listed), _take(v, listed), visible[..., : width * KEY_BLOCK], numerics)

        parts = jax.lax.switch(levels[index], [partial(attend, width) for width in widths])
        put = jax.vmap(lambda out, i, part: out.at[i].set(part, mode="drop"))
        return tuple(put(out, here, part) for out, part in zip(found, parts, strict=True))

    nothing = jnp.zeros((B, T, H * q.shape[-1]), q.dtype), jnp.full((B, T, H), UNSEEN, q.dtype)
    return jax.lax.fori_loop(0, _forest_live(q, blocks), body, nothing)


def _forest_chunk(q: jax.Array, blocks: ForestBlocks) -> int:
    B, _, H, _ = q.shape
    N, Q = blocks.query.shape[1:]
    return blocks_per_chunk(N, B * Q * H * blocks.key.shape[-1], blocks.platform)


def _forest_live(q: jax.Array, blocks: ForestBlocks) -> jax.Array:
    return _live_chunks((jnp.asarray(blocks.query) < blocks.end.shape[1]).any(axis=(0, 2)), _forest_chunk(q, blocks))


def _forest_forward(q: jax.Array, k: jax.Array, v: jax.Array, blocks: ForestBlocks, numerics: Numerics):
    out, log_mass = _forest_attend_mass(q, k, v, blocks, numerics)
    scaled = q * q.shape[-1] ** -0.5  # before its rounding, as in the forward
    kept = replace(blocks, end=jnp.asarray(blocks.end), query=None, key=None)
    return out, (*(stored(x, numerics.dtype) for x in (scaled, k, v, out)), log_mass, kept)


def _forest_backward(numerics: Numerics, saved: tuple[Any, ...], g: jax.Array):
    *kept, log_mass, blocks = saved
    q, k, v, out = (restored(x, numerics.dtype) for x in kept)
    first = 0 if blocks.first is None else blocks.first
    return *forest_gradient(q, k, v, out, log_mass, blocks.end, g, first, blocks.platform), None


_forest_attend.defvjp(_forest_forward, _forest_backward)


def forest_attend(q: jax.Array, k: jax.Array, v: jax.Array, blocks: ForestBlocks, numerics: Numerics) -> jax.Array:
    """q `[B, T, H, h]`, k and v `[B, T, K, h]`, float32 but rounded as the page pool rounds them -> `[B, T, H * h]`.

    With `blocks.first`, q is of a part of the row, k and v of all of it.
    """
    return _forest_attend(q, k, v, blocks, numerics)


@dataclass(frozen=True)
class ForestContext:
    """Each token sees its ancestors in its trie, and itself."""

    blocks: ForestBlocks
    numerics: Numerics
    shards: Shards = field(default_factory=Shards)
    """where the row's tokens are split, keys and values of all come here (Li et al., 2105.13120, all-gather form)"""

    def attend(self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        # Rounded as the page pool rounds them, but kept wide so that gradients of shared keys add up in float32.
        shards, dtype = self.shards, self.numerics.dtype
        k, v = (shards.everyones(published(x, dtype), shards.context, dtype) for x in (k, v))
        return forest_attend(q, k, v, self.blocks, self.numerics)
