"""The router of a mixture of experts: which experts a token passes, and with which weights.

Legend: T tokens, E experts, k experts per token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from models.config import MoEConfig
from models.numerics import exp_from, row_sum

LANES = 16
"""values of float32 in the widest vectors of a CPU"""


class Routing(NamedTuple):
    """What a layer's router did with each token; of all layers, stacked on a leading dim."""

    ids: jax.Array
    """int32 [..., k]: the experts, in the order of their use"""
    differs: jax.Array
    """bool [...]: the router alone would have chosen another set"""
    balance: jax.Array
    """float [...]: E x sum over experts of load x probability; 1 where either is uniform (Fedus et al., arXiv 2101.03961)"""
    z: jax.Array
    """float [...]: logsumexp(logits) squared (Zoph et al., ST-MoE, arXiv 2202.08906)"""
    gap: jax.Array
    """float [...]: how far the last chosen is before the best of the rest: of the router alone, in scores"""


def unrecorded(replay: jax.Array) -> jax.Array:
    """bool [...]: which rows `[..., k]` say "not recorded": those full of the dtype's largest value."""
    return (replay == jnp.iinfo(replay.dtype).max).all(axis=-1)


def scores_of(config: MoEConfig, logits: jax.Array, bias: jax.Array | None = None) -> jax.Array:
    """What experts are chosen by, `[T, E]`; -inf outside of a token's groups."""
    scores = jax.nn.sigmoid(logits) if config.scoring == "sigmoid" else logits
    if bias is not None:
        scores = scores + bias[None]
    if config.groups > 1:
        T, E = scores.shape
        by_group = scores.reshape(T, config.groups, E // config.groups)
        best = jax.lax.top_k(by_group, min(2 if config.selection_bias else 1, by_group.shape[-1]))[0].sum(axis=-1)
        chosen = jax.lax.top_k(best, config.groups_per_token)[1]
        kept = (chosen[:, :, None] == jnp.arange(config.groups)[None, None]).any(axis=1)
        scores = jnp.where(jnp.repeat(kept, E // config.groups, axis=1), scores, -jnp.inf)
    return scores


def select(config: MoEConfig, scores: jax.Array) -> jax.Array:
    """The router's own choice: scores `[T, E]` -> ids int32 `[T, k]`, best first; of equals the lowest id."""
    return jax.lax.top_k(scores, config.experts_per_token)[1].astype(jnp.int32)


def gates_of(config: MoEConfig, logits: jax.Array, ids: jax.Array) -> jax.Array:
    """Weights `[T, k]` of the experts `ids`, from the dense logits `[T, E]`: what was not selected gets no gradient by way of
    a renormalised gate, and what is selected always does."""
    chosen = jnp.take_along_axis(logits, ids, axis=1)
    if config.scoring == "sigmoid":
        gates = jax.nn.sigmoid(chosen)
        if config.renormalise:
            gates = gates * (1 / (fold(gates) + 1e-20))[:, None]
    elif config.renormalise:
        gates = _exp_from(chosen, jax.lax.stop_gradient(chosen.max(axis=1, keepdims=True)))
        gates = gates * (1 / fold(gates))[:, None]
    else:
        gates = probabilities(config, logits, chosen)
    return gates if config.scaling == 1 else gates * config.scaling


def probabilities(config: MoEConfig, logits: jax.Array, of: jax.Array) -> jax.Array:
    """The softmax over all logits `[T, E]`, at the logits `of` `[T, ...]`."""
    top = jax.lax.stop_gradient(logits.max(axis=1, keepdims=True))
    return _exp_from(of, top) * (1 / row_sum(exp_from(logits, top)))[:, None]


def _exp_from(x: jax.Array, top: jax.Array) -> jax.Array:
    """`exp_from` of few columns `[T, k]`: filled up to whole vectors, as jax 0.12 computes what is left over behind the last
    as single values, with other bits (measured: 1 of 2,044)."""
    k = x.shape[1]
    filled = jnp.pad(x, ((0, 0), (0, -k % LANES)), constant_values=-jnp.inf)
    return jax.lax.optimization_barrier(exp_from(filled, top))[:, :k]


def fold(x: jax.Array) -> jax.Array:
    """The sum over dim 1 in order: a plain sum's order is the compiler's."""
    total = x[:, 0]
    for j in range(1, x.shape[1]):
        total = total + x[:, j]
    return total


def gap_of(config: MoEConfig, scores: jax.Array) -> jax.Array:
    """`Routing.gap` of scores `[T, E]`, `[T]`; infinite where all experts are chosen."""
    k = config.experts_per_token
    best = jax.lax.top_k(scores, min(k + 1, scores.shape[1]))[0]
    return best[:, k - 1] - best[:, k] if best.shape[1] > k else jnp.full(len(best), jnp.inf, best.dtype)
