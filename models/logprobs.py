"""Log-probabilities of chosen tokens: one computation for the sampler, the prompt and the loss.

Legend: B rows, T tokens, D model, V vocab, N tiles of the vocab.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.layers import exp_from, row_sum, tempered
from models.transformer import Transformer
from sharding.vocabulary import Head

PADDING = -1e30
"""logit of what is no id: its weight is 0, and so is weight x logit"""
TILE = 64
"""neighbouring tokens whose weights are summed first; the sampler draws a tile, then a token of it"""


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


def tiles(logits_TV: jax.Array, axes: tuple[str, ...] = ()) -> Tiles:
    """Logits may be -inf, but not a whole row of them.

    Args:
        axes: mesh axes that split V; `tops` and `weights` are then of this device's part.
    """
    T, V = logits_TV.shape
    if V % TILE:
        logits_TV = jnp.pad(logits_TV, [(0, 0), (0, -V % TILE)], constant_values=-jnp.inf)
    tops = jax.lax.stop_gradient(logits_TV).reshape(T, -1, TILE).max(axis=-1)
    top = tops.max(axis=-1, keepdims=True)
    top = jax.lax.pmax(top, axes) if axes else top
    weights = row_sum(exp_from(logits_TV, top).reshape(T, -1, TILE))
    total = _all_ids(row_sum(weights), axes)
    return Tiles(tops_TN=tops, weights_TN=weights, top_T1=top, log_total_T1=jnp.log(total)[:, None])


def _all_ids(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """The sum over the devices that have parts of the vocabulary."""
    return jax.lax.psum(x, axes) if axes else x


def log_prob(logits_TV: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Log-softmax of `logits` at `ids`, `[T]`."""
    return tiles(logits_TV).log_probs(jnp.take_along_axis(logits_TV, ids_T[:, None], axis=-1))[:, 0]


def _of_parts(logits_TV: jax.Array, ids_T: jax.Array, head: Head) -> tuple[jax.Array, jax.Array]:
    """`log_prob` and `entropy` where each device has the logits of its part of the vocabulary."""
    T, V = logits_TV.shape
    logits_TV = jnp.where(jnp.broadcast_to(jnp.arange(V)[None] < head.count, (T, V)), logits_TV, PADDING)
    parts = tiles(logits_TV, head.axes)
    at = ids_T - head.first
    mine = (at >= 0) & (at < head.count)
    chosen = jnp.take_along_axis(logits_TV, jnp.clip(at, 0, V - 1)[:, None], axis=-1)
    logp = parts.log_probs(_all_ids(jnp.where(mine[:, None], chosen, 0), head.axes))[:, 0]
    held = jax.tree.map(jax.lax.stop_gradient, parts)
    log_p = held.log_probs(jax.lax.stop_gradient(logits_TV))
    return logp, -_all_ids((jnp.exp(log_p) * log_p).sum(axis=-1), head.axes)


def entropy(logits_TV: jax.Array) -> jax.Array:
    """Of softmax(logits), in nats, `[T]`."""
    log_p = jax.nn.log_softmax(logits_TV, axis=-1)
    return -(jnp.exp(log_p) * log_p).sum(axis=-1)


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

    The logits of a chunk are recomputed in the backward, so neither pass ever holds `[T, V]`. Chunks without a used token
    give zeros and cost nothing. On a mesh each device makes the logits of its part of the vocabulary (`sharding.vocabulary`).
    """
    B, T, D = hidden_BTD.shape
    assert T % chunk == 0, (T, chunk)
    shards, head = model.shards, model.head_part()

    def compute(hidden: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        hidden, ids = (shards.everyones(x, head.axes, model.dtype) for x in (hidden, ids))
        logits = model.products(hidden.reshape(-1, D), head.weight)
        logits = tempered(logits, jnp.broadcast_to(temperature, logits.shape))
        if head.axes:
            logp, spread = _of_parts(logits, ids.reshape(-1), head)
        else:
            spread = entropy(jax.lax.stop_gradient(logits))
            logp = log_prob(logits, ids.reshape(-1))
        logp, spread = (shards.own(x.reshape(ids.shape), head.axes) for x in (logp, spread))
        return logp, spread

    def nothing(hidden: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((B, chunk), hidden.dtype), jnp.zeros((B, chunk), hidden.dtype)

    @jax.checkpoint
    def some(parts: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, ids, used = parts
        return jax.lax.cond(used, compute, nothing, hidden, ids)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(B, T // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)

    # all devices that compute a chunk together must agree to
    used = shards.everyones(split(used_BT).any(axis=(1, 2))[None, :, None], head.axes, bool)
    used = used.reshape(-1, T // chunk).any(axis=0)
    logp, spread = jax.lax.map(some, (split(hidden_BTD), split(ids_BT), used))
    return logp.swapaxes(0, 1).reshape(B, T), spread.swapaxes(0, 1).reshape(B, T)
