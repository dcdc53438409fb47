"""Log-probabilities of chosen tokens: one function for the sampler and the loss.

Legend: T tokens, D model, V vocab.
"""

import jax
import jax.numpy as jnp

from models.layers import row_sum
from models.transformer import Transformer


def log_prob(logits_TV: jax.Array, ids_T: jax.Array) -> jax.Array:
    """Log-softmax of `logits` at `ids`, `[T]`."""
    top = jax.lax.stop_gradient(logits_TV.max(axis=-1, keepdims=True))
    total = row_sum(jnp.exp(logits_TV - jnp.broadcast_to(top, logits_TV.shape)))
    chosen = jnp.take_along_axis(logits_TV, ids_T[:, None], axis=-1)[:, 0]
    return chosen - top[:, 0] - jnp.log(total)


def token_log_probs(
    model: Transformer, hidden_TD: jax.Array, ids_T: jax.Array, temperature_T: jax.Array, chunk: int
) -> jax.Array:
    """log softmax(logits(hidden_t) / temperature_t)[ids_t], `[T]`, `chunk` tokens of logits at a time.

    The logits of a chunk are recomputed in the backward, so neither pass ever holds `[T, V]`. `chunk` divides T.
    """
    T = ids_T.shape[0]
    assert T % chunk == 0, (T, chunk)

    @jax.checkpoint
    def some(parts: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden, ids, temperature = parts
        logits = model.logits(hidden)
        return log_prob(logits / jnp.broadcast_to(temperature[:, None], logits.shape), ids)

    split = (array.reshape(T // chunk, chunk, *array.shape[1:]) for array in (hidden_TD, ids_T, temperature_T))
    return jax.lax.map(some, tuple(split)).reshape(T)
