"""From logits to tokens, on the device.

Legend: S rows sampled, V vocab.

Noise depends on (request seed, position) alone: a token is the arg max of warped logits plus Gumbel noise under that key.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp

from models.attention import Array
from models.layers import row_sum, tempered
from models.logprobs import log_prob


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Warp:
    """Sampling parameters of S rows, as arrays so that no mix of them compiles anything."""

    temperature: Array
    """float32 [S]; 0 is greedy"""
    top_k: Array
    """int32 [S]; 0 is off"""
    top_p: Array
    """float32 [S]"""
    min_p: Array
    """float32 [S]"""
    seed: Array
    """uint32 [S]"""


def _column(x_S: Array, like_SV: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x_S[:, None], like_SV.shape)


def _truncate(logits_SV: jax.Array, warp: Warp) -> jax.Array:
    """Logits outside the kept set of top-k, top-p and min-p (in that order of definition, all on the same softmax)."""
    descending = -jnp.sort(-logits_SV, axis=-1)
    V = logits_SV.shape[-1]
    rank = jnp.where(warp.top_k > 0, jnp.minimum(warp.top_k, V), V) - 1
    by_rank = jnp.take_along_axis(descending, rank[:, None], axis=-1)[:, 0]
    weight = jnp.exp(descending - _column(descending[:, 0], descending))
    p = weight / _column(row_sum(weight), weight)  # its bits do not depend on S, so neither does what is kept
    before = jnp.cumsum(p, axis=-1) - p  # mass of the likelier tokens; the first is always kept
    top_p = jnp.where(warp.top_p < 1, warp.top_p, jnp.inf)  # off is off, whatever the sum rounds to
    kept = (before < _column(top_p, p)) & (p >= _column(warp.min_p * p[:, 0], p))
    by_mass = jnp.where(kept, descending, jnp.inf).min(axis=-1)
    return jnp.where(logits_SV >= _column(jnp.maximum(by_rank, by_mass), logits_SV), logits_SV, -jnp.inf)


def sample(logits_SV: jax.Array, position_S: jax.Array, warp: Warp) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Next tokens of S rows.

    Args:
        position_S: place that each sampled token will take in its sequence.

    Returns:
        ids int32 [S]; log-probs [S] under the sampling distribution (0 where greedy); log-probs [S] under the full
        vocabulary at temperature 1.
    """
    greedy = warp.temperature == 0
    temperature = jnp.where(greedy, 1.0, warp.temperature)
    scaled = tempered(logits_SV, _column(temperature, logits_SV))
    truncated = (warp.top_k > 0) | (warp.top_p < 1) | (warp.min_p > 0)
    warped = jax.lax.cond((truncated & ~greedy).any(), lambda x: _truncate(x, warp), lambda x: x, scaled)
    warped = jnp.where(_column(truncated, scaled), warped, scaled)

    def noisy(x: jax.Array) -> jax.Array:
        keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))
        noise = jax.vmap(lambda key: jax.random.gumbel(key, x.shape[1:], x.dtype))(keys(warp.seed, position_S))
        return jnp.where(_column(greedy, x), x, x + noise)

    ids = jnp.argmax(jax.lax.cond(greedy.all(), lambda x: x, noisy, warped), axis=-1).astype(jnp.int32)
    full = log_prob(logits_SV, ids)
    plain = (~truncated & (temperature == 1)).all()
    drawn = jax.lax.cond(plain, lambda: full, lambda: log_prob(warped, ids))
    return ids, jnp.where(greedy, 0.0, drawn), full
