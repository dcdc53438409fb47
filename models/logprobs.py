"""Log-probabilities of chosen tokens: one function for the sampler and the loss.

Legend: T tokens, D model, V vocab.
"""

import jax
import jax.numpy as jnp

from models.layers import exp_from, row_sum, tempered
from models.transformer import Transformer


def log_prob(logits_TV: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Log-softmax of `logits` at `ids`, `[T]`."""
    top = jax.lax.stop_gradient(logits_TV.max(axis=-1, keepdims=True))
    total = row_sum(exp_from(logits_TV, top))
    chosen = jnp.take_along_axis(logits_TV, ids_T[:, None], axis=-1)[:, 0]
    return chosen - top[:, 0] - jnp.log(total)


def token_log_probs(
    model: Transformer,
    hidden_TD: jax.Array,
    ids_T: jax.Array,
    temperature: jax.Array,
    used_T: jax.Array,
    chunk: int,
) -> jax.Array:
    """log softmax(logits(hidden_t) / temperature)[ids_t], `[T]`, `chunk` tokens of logits at a time; `chunk` divides T.

    The logits of a chunk are recomputed in the backward, so neither pass ever holds `[T, V]`. Chunks without a used token
    give zeros and cost nothing.
    """
    T, D = hidden_TD.shape
    assert T % chunk == 0, (T, chunk)

    def compute(hidden: jax.Array, ids: jax.Array) -> jax.Array:
        logits = model.logits(hidden)
        return log_prob(tempered(logits, jnp.broadcast_to(temperature, logits.shape)), ids)

    @jax.checkpoint
    def some(parts: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden, ids, used = parts
        return jax.lax.cond(used.any(), compute, lambda hidden, ids: jnp.zeros(chunk, hidden.dtype), hidden, ids)

    parts = (hidden_TD.reshape(-1, chunk, D), ids_T.reshape(-1, chunk), used_T.reshape(-1, chunk))
    return jax.lax.map(some, parts).reshape(T)
