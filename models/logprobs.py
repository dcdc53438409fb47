"""Log-probabilities of chosen tokens: one computation for the sampler, the prompt and the loss.

Legend: B rows, T tokens, D model, V vocab, N tiles of the vocab.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.layers import exp_from, row_sum, tempered
from models.transformer import Transformer

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


def tiles(logits_TV: jax.Array) -> Tiles:
    """Logits may be -inf, but not a whole row of them."""
    T, V = logits_TV.shape
    if V % TILE:
        logits_TV = jnp.pad(logits_TV, [(0, 0), (0, -V % TILE)], constant_values=-jnp.inf)
    tops = jax.lax.stop_gradient(logits_TV).reshape(T, -1, TILE).max(axis=-1)
    top = tops.max(axis=-1, keepdims=True)
    weights = row_sum(exp_from(logits_TV, top).reshape(T, -1, TILE))
    return Tiles(tops_TN=tops, weights_TN=weights, top_T1=top, log_total_T1=jnp.log(row_sum(weights))[:, None])


def log_prob(logits_TV: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Log-softmax of `logits` at `ids`, `[T]`."""
    return tiles(logits_TV).log_probs(jnp.take_along_axis(logits_TV, ids_T[:, None], axis=-1))[:, 0]


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
    give zeros and cost nothing. Rows stay a leading dim, so that a mesh that splits them splits this too.
    """
    B, T, D = hidden_BTD.shape
    assert T % chunk == 0, (T, chunk)

    def compute(hidden: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        logits = model.logits(hidden.reshape(-1, D))
        logits = tempered(logits, jnp.broadcast_to(temperature, logits.shape))
        spread = entropy(jax.lax.stop_gradient(logits))
        return log_prob(logits, ids.reshape(-1)).reshape(B, chunk), spread.reshape(B, chunk)

    def nothing(hidden: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array]:
        return jnp.zeros((B, chunk), hidden.dtype), jnp.zeros((B, chunk), hidden.dtype)

    @jax.checkpoint
    def some(parts: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        hidden, ids, used = parts
        return jax.lax.cond(used.any(), compute, nothing, hidden, ids)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(B, T // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)

    logp, spread = jax.lax.map(some, (split(hidden_BTD), split(ids_BT), split(used_BT)))
    return logp.swapaxes(0, 1).reshape(B, T), spread.swapaxes(0, 1).reshape(B, T)
