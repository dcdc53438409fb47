"""Log-probabilities of chosen tokens: one computation for the sampler, the prompt and the loss.

Legend: B rows, T tokens, D model, V vocab, N tiles of the vocab.
"""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from models.layers import dot, turned
from models.numerics import Numerics
from models.transformer import Transformer
from sharding.vocabulary import TILE, Head

PADDING = -1e30
"""logit of what is no id: its weight is 0, and so is weight x logit"""
VOCAB_TILE = 2048
"""rows of the head whose gradient is computed at a time"""
TOKENS_AT_ONCE = 1024
"""tokens of all rows that do so together: with so many, a tile's logits take 8 MB (1,024 is 10 % faster than 512, and no slower
than 2,048: measured)"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Tiles:
    """What a softmax over the vocabulary needs, tile by tile. Weights are exp(logit - the row's largest logit)."""

    tops_TN: jax.Array
    """largest logit of each tile"""
    weights_TN: jax.Array
    """sum of each tile's weights"""
    top_T1: jax.Array
    log_total_T1: jax.Array
    """log of the sum of all weights"""

    def log_probs(self, chosen: jax.Array) -> jax.Array:
        """Log-softmax of some logits `[T, any]` of the same rows."""
        return chosen - self.top_T1 - self.log_total_T1


def tiles(logits_TV: jax.Array, numerics: Numerics, head: Head | None = None) -> Tiles:
    """Logits may be -inf, but not a whole row of them.

    Args:
        head: the part of the vocabulary that the logits are of, where it is split; so are `tops` and `weights` then.
    """
    axes = head.axes if head else ()
    T, V = logits_TV.shape
    if V % TILE:
        logits_TV = jnp.pad(logits_TV, [(0, 0), (0, -V % TILE)], constant_values=-jnp.inf)
    tops = jax.lax.stop_gradient(logits_TV).reshape(T, -1, TILE).max(axis=-1)
    top = tops.max(axis=-1, keepdims=True)
    top = jax.lax.pmax(top, axes) if axes else top
    weights = numerics.halved_sum(numerics.exp_from(logits_TV, top).reshape(T, -1, TILE))
    if head and head.num_tiles and numerics.exact:
        total = numerics.row_sum(head.every_tile(weights))  # in the order that one device sums them
    else:
        total = _all_ids(numerics.row_sum(weights), axes)
    return Tiles(tops_TN=tops, weights_TN=weights, top_T1=top, log_total_T1=jnp.log(total)[:, None])


def _all_ids(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over the devices that have parts of the vocabulary."""
    return jax.lax.psum(x, axes) if axes else x


def log_prob(logits_TV: jax.Array, ids_T: jax.Array, numerics: Numerics) -> jax.Array:
    """Log-softmax of `logits` at `ids`, `[T]`."""
    return tiles(logits_TV, numerics).log_probs(jnp.take_along_axis(logits_TV, ids_T[:, None], axis=-1))[:, 0]


def _of_parts(logits_TV: jax.Array, ids_T: jax.Array, head: Head, numerics: Numerics) -> tuple[jax.Array, jax.Array]:
    """`log_prob` and `entropy` where each device has the logits of its part of the vocabulary."""
    T, V = logits_TV.shape
    logits_TV = jnp.where(jnp.broadcast_to(jnp.arange(V)[None] < head.count, (T, V)), logits_TV, PADDING)
    parts = tiles(logits_TV, numerics, head)
    at = ids_T - head.first
    mine = (at >= 0) & (at < head.count)
    chosen = jnp.take_along_axis(logits_TV, jnp.clip(at, 0, V - 1)[:, None], axis=-1)
    logp = parts.log_probs(_all_ids(jnp.where(mine[:, None], chosen, 0), head.axes))[:, 0]
    held = jax.tree.map(jax.lax.stop_gradient, parts)
    log_p = held.log_probs(jax.lax.stop_gradient(logits_TV))
    return logp, -_all_ids((jnp.exp(log_p) * log_p).sum(axis=-1), head.axes)


def entropy(logits_TV: jax.Array, parts: Tiles) -> jax.Array:
    """Of softmax(logits), in nats, `[T]`; logits are finite."""
    below = logits_TV - jnp.broadcast_to(parts.top_T1, logits_TV.shape)
    mean = (jnp.exp(below) * below).sum(axis=-1) * jnp.exp(-parts.log_total_T1[:, 0])
    return parts.log_total_T1[:, 0] - mean


def likeliest(logits_TV: jax.Array, parts: Tiles, n: int) -> tuple[jax.Array, jax.Array]:
    """Ids `[T, n]` of the likeliest tokens in order, equals by id, and their log-probs; n is at most TILE.

    None of them is outside the n tiles of the largest maxima: on a CPU that is 5 times faster than `top_k` of all (measured).
    A vocabulary smaller than n is filled up with log-probs of -inf.
    """
    T, V = logits_TV.shape
    _, best = jax.lax.top_k(parts.tops_TN, min(n, parts.tops_TN.shape[-1]))
    best = jnp.sort(best, axis=-1)  # candidates in the order of their ids: top_k takes the first of equals
    ids = (best[:, :, None] * TILE + jnp.arange(TILE, dtype=best.dtype)[None, None]).reshape(T, -1)
    logits = jnp.take_along_axis(logits_TV, jnp.minimum(ids, V - 1), axis=-1)
    logits, place = jax.lax.top_k(jnp.where(ids < V, logits, -jnp.inf), n)
    return jnp.take_along_axis(ids, place, axis=-1), parts.log_probs(logits)


def token_log_probs(
    model: Transformer,
    hidden_BTD: jax.Array,
    ids_BT: jax.Array,
    temperature: jax.Array,
    used_BT: jax.Array,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """log softmax(logits(hidden) / temperature)[ids] and that distribution's entropy (without a gradient), both `[B, T]`.

    `chunk` tokens of each row are computed at a time; `chunk` divides T.

    Logits are recomputed in the backward, so neither pass ever holds `[T, V]`. Chunks without a used token give zeros and cost
    nothing. Rows stay a leading dim, so that a mesh that splits them splits this too. `temperature` has no gradient.
    """
    assert hidden_BTD.shape[1] % chunk == 0, (hidden_BTD.shape, chunk)
    head, ids, used = model.head_part(), jnp.asarray(ids_BT), jnp.asarray(used_BT)
    temperature = jax.lax.stop_gradient(temperature)
    if head.axes:
        return _log_probs_of_parts(model, head, hidden_BTD, ids, temperature, used, chunk)
    return _log_probs(hidden_BTD, head.weight, ids, temperature, used, model.head_spec, model.numerics, chunk)


def _chunks(x_BT: jax.Array, chunk: int) -> jax.Array:
    """`[B, T, ...]` -> `[T / chunk, B, chunk, ...]`"""
    B, T, *rest = x_BT.shape
    return x_BT.reshape(B, T // chunk, chunk, *rest).swapaxes(0, 1)


def _tokens(chunks: jax.Array) -> jax.Array:
    """What `_chunks` cut, `[B, T]` again."""
    chunks = chunks.swapaxes(0, 1)
    return chunks.reshape(len(chunks), -1)


def _log_probs_of_parts(
    model: Transformer,
    head: Head,
    hidden_BTD: jax.Array,
    ids_BT: jax.Array,
    temperature: jax.Array,
    used_BT: jax.Array,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    """`token_log_probs` on a mesh: each device makes the logits of its part of the vocabulary (`sharding.vocabulary`)."""
    (B, T, D), shards = hidden_BTD.shape, model.shards

    def compute(hidden: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden, ids = (shards.everyones(x, head.axes, model.dtype) for x in (hidden, ids))
        logits = model.products(hidden.reshape(-1, D), head.weight)
        logits = model.numerics.tempered(logits, jnp.broadcast_to(temperature, logits.shape))
        found = _of_parts(logits, ids.reshape(-1), head, model.numerics)
        logp, spread = (shards.own(x.reshape(ids.shape), head.axes) for x in found)
        return logp, spread

    def nothing(hidden: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((B, chunk), hidden.dtype), jnp.zeros((B, chunk), hidden.dtype)

    @jax.checkpoint
    def some(parts: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, ids, used = parts
        return jax.lax.cond(used, compute, nothing, hidden, ids)

    # all devices that compute a chunk together must agree to
    used = shards.everyones(_chunks(used_BT, chunk).any(axis=(1, 2))[None, :, None], head.axes, bool)
    used = used.reshape(-1, T // chunk).any(axis=0)
    logp, spread = jax.lax.map(some, (_chunks(hidden_BTD, chunk), _chunks(ids_BT, chunk), used))
    return _tokens(logp), _tokens(spread)


@partial(jax.custom_vjp, nondiff_argnums=(5, 6, 7))
def _log_probs(
    hidden: jax.Array,
    weight: jax.Array,
    ids: jax.Array,
    temperature: jax.Array,
    used: jax.Array,
    spec: str,
    numerics: Numerics,
    chunk: int,
) -> tuple[jax.Array, jax.Array]:
    return _log_probs_forward(hidden, weight, ids, temperature, used, spec, numerics, chunk)[0]


def _log_probs_forward(hidden, weight, ids, temperature, used, spec: str, numerics: Numerics, chunk: int):
    B, _, D = hidden.shape
    rounded = weight.astype(numerics.dtype)

    def compute(hidden: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        logits = numerics.dot(spec, hidden.reshape(-1, D), rounded)
        logits = numerics.tempered(logits, jnp.broadcast_to(temperature, logits.shape))
        parts = tiles(logits, numerics)
        chosen = parts.log_probs(jnp.take_along_axis(logits, ids.reshape(-1)[:, None], axis=-1))
        log_total = parts.top_T1 + parts.log_total_T1
        return tuple(x.reshape(B, chunk) for x in (chosen, log_total, entropy(logits, parts)))

    def nothing(hidden: jax.Array, ids: jax.Array) -> tuple[jax.Array, ...]:
        return (jnp.zeros((B, chunk), hidden.dtype),) * 3

    def some(parts: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, ...]:
        hidden, ids, used = parts
        return jax.lax.cond(used.any(), compute, nothing, hidden, ids)

    found = jax.lax.map(some, tuple(_chunks(x, chunk) for x in (hidden, ids, used)))
    out, log_totals, spread = map(_tokens, found)
    return (out, spread), (hidden, weight, ids, temperature, used, log_totals)


def _log_probs_backward(
    spec: str, numerics: Numerics, chunk: int, saved: tuple[jax.Array, ...], gs: tuple[jax.Array, jax.Array]
):
    """By tiles of the vocab, and in each by chunks of tokens: a tile's logits stay in cache, and its weights' gradient is
    written once. A tile takes rows of 8 stretches of the vocab, so that a mesh that splits the vocab splits each tile.

    Logits are made as vocab x tokens: then each product contracts the last dim of its left operand (see `layers.dots`).
    """
    hidden, weight, ids, temperature, used, log_totals = saved
    dtype = numerics.dtype
    g_BT, _ = gs
    (B, T, D), turn = hidden.shape, spec == "td,dv->tv"
    table = turned(weight) if turn else weight  # rounded tile by tile: XLA-CPU would widen a 16-bit one for its slices
    V = table.shape[0]
    size = min(VOCAB_TILE, V + -V % 8)
    part, N = size // 8, -(-V // size)
    table = jnp.pad(table, ((0, N * size - V), (0, 0))).reshape(8, N, part, D)
    many = max(c for c in range(chunk, T + 1, chunk) if T % c == 0 and (c == chunk or B * c <= TOKENS_AT_ONCE))

    def split(x: jax.Array) -> jax.Array:
        """`[B, T, ...]` -> `[T / many, B many, ...]`"""
        return x.reshape(B, T // many, many, *x.shape[2:]).swapaxes(0, 1).reshape(T // many, B * many, *x.shape[2:])

    alive = split(used).any(axis=1)
    [chunks] = jnp.nonzero(alive, size=len(alive), fill_value=0)
    slope = jnp.where(split(used), split(g_BT) / temperature, 0)
    states, ids, log_totals = split(hidden).astype(dtype), split(ids), split(log_totals)

    def tile(n: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        dtable, dstates = grads
        w = table[:, n].reshape(size, D).astype(dtype)
        w_turned = turned(w)
        first = jnp.arange(8)[:, None] * (N * part) + n * part
        names = (first + jnp.arange(part)[None]).reshape(size, 1)

        def some(at: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            dw, dstates = grads
            c = chunks[at]
            logits = dot("vd,td->vt", w, states[c], dtype) / temperature
            p = jnp.exp(logits - jnp.broadcast_to(log_totals[c][None], logits.shape))
            hit = jnp.broadcast_to(names, p.shape) == jnp.broadcast_to(ids[c][None], p.shape)
            dlogits = (hit.astype(p.dtype) - p) * jnp.broadcast_to(slope[c][None], p.shape)
            dw += dot("vt,td->vd", dlogits, states[c], dtype)
            return dw, dstates.at[c].add(dot("dv,vt->dt", w_turned, dlogits, dtype))

        dw, dstates = jax.lax.fori_loop(0, alive.sum(), some, (jnp.zeros((size, D), g_BT.dtype), dstates))
        return dtable.at[:, n].set(dw.reshape(8, part, D)), dstates

    zeros = jnp.zeros((8, N, part, D), g_BT.dtype), jnp.zeros((T // many, D, B * many), g_BT.dtype)
    dtable, dstates = jax.lax.fori_loop(0, N, tile, zeros)
    dtable = dtable.reshape(N * size, D)[:V]
    dhidden = dstates.reshape(T // many, D, B, many).transpose(2, 0, 3, 1).reshape(B, T, D)
    return (
        dhidden.astype(hidden.dtype),
        (turned(dtable) if turn else dtable).astype(weight.dtype),
        None,
        jnp.zeros_like(temperature),
        None,
    )


_log_probs.defvjp(_log_probs_forward, _log_probs_backward)
