"""Log-probabilities of chosen tokens: one function for the sampler and the loss.

Legend: B rows, T tokens, D model, V vocab.
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
    hidden_BTD: jax.Array,
    ids_BT: jax.Array,
    temperature: jax.Array,
    used_BT: jax.Array,
    chunk: int,
) -> jax.Array:
    """log softmax(logits(hidden) / temperature)[ids], `[B, T]`, `chunk` tokens of each row at a time; `chunk` divides T.

    The logits of a chunk are recomputed in the backward, so neither pass ever holds `[T, V]`. Chunks without a used token
    give zeros and cost nothing. Rows stay a leading dim, so that a mesh that splits them splits this too.
    """
    B, T, D = hidden_BTD.shape
    assert T % chunk == 0, (T, chunk)

    def compute(hidden: jax.Array, ids: jax.Array) -> jax.Array:
        logits = model.logits(hidden.reshape(-1, D))
        logits = tempered(logits, jnp.broadcast_to(temperature, logits.shape))
        return log_prob(logits, ids.reshape(-1)).reshape(B, chunk)

    @jax.checkpoint
    def some(parts: tuple[jax.Array, jax.Array, jax.Array]) -> jax.Array:
        hidden, ids, used = parts
        return jax.lax.cond(used.any(), compute, lambda hidden, ids: jnp.zeros((B, chunk), hidden.dtype), hidden, ids)

    def split(x: jax.Array) -> jax.Array:
        return x.reshape(B, T // chunk, chunk, *x.shape[2:]).swapaxes(0, 1)

    out = jax.lax.map(some, (split(hidden_BTD), split(ids_BT), split(used_BT)))
    return out.swapaxes(0, 1).reshape(B, T)
