"""What a loss reads beside the trainer's log-probs, and how per-token terms become one number.

Legend: N branches, L longest branch.

A loss is called with some rows of a batch (a micro-batch, a device's rows). Its value is these rows' share of the global
loss: denominators are those of the whole batch, so shares add up to it exactly, however the batch is cut.
"""

from dataclasses import dataclass, replace
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from jax import Array

LOG_RATIO_LIMIT = 20.0
"""log ratios are clipped to +-this before exp, so that no ratio overflows"""
Aggregation = Literal["token_mean", "token_sum", "seq_mean_token_mean", "seq_mean_token_sum", "seq_mean_token_sum_norm"]
AGGREGATIONS = get_args(Aggregation)
PER_TOKEN = (
    "sampler_logp",
    "advantages",
    "lag",
    "reference_logp",
    "old_values",
    "returns",
    "old_logp",
    "correction",
)
"""fields of shape [N, L], but for the weights"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LossBatch:
    """Rows of a batch; float32 [N, L] unless said. What stands where `weights` is 0 is never read."""

    weights: Array
    """0 on tokens that are not trained, 1 / branches on sampled tokens of several branches"""
    sampler_logp: Array
    """the engine's, under the sampling distribution (mu)"""
    advantages: Array
    sequence_tokens: Array
    """[N]: sum of weights over the branch's whole episode"""
    num_sequences: Array
    """[]: episodes with at least one trained token in the whole batch"""
    num_tokens: Array
    """[]: sum of weights in the whole batch"""
    lag: Array
    """int32 [N, L]: consumer's version - token's version"""
    reference_logp: Array | None = None
    """of a frozen model: the reference of a KL, or the teacher"""
    old_values: Array | None = None
    """the critic's, before the update"""
    returns: Array | None = None
    """what values are regressed on"""
    pair: Array | None = None
    """int32 [N]: the rows with one number are (chosen, rejected) of one preference pair; -1: none"""
    chosen: Array | None = None
    """bool [N]"""
    num_pairs: Array | None = None
    """[]: pairs of the whole batch"""
    old_logp: Array | None = None
    """denominator of the ratio; set by Objective. None: the sampler's"""
    correction: Array | None = None
    """factor of each token's term; set by Objective. None: 1"""


def clean(logp: Array, batch: LossBatch) -> tuple[Array, LossBatch]:
    """Both with 0 where the weight is 0: chosen before any arithmetic, so that NaN there has no gradient either."""
    trained = batch.weights > 0

    def at(x: Array) -> Array:
        return jnp.where(trained, x, jnp.zeros_like(x))

    present = {name: getattr(batch, name) for name in PER_TOKEN if getattr(batch, name) is not None}
    return at(logp), replace(batch, **{name: at(jnp.asarray(x)) for name, x in present.items()})


def divide(x: Array, count: Array | float) -> Array:
    """x / count, and x where the count is 0 (then x is 0)."""
    return x / jnp.where(jnp.equal(count, 0), 1, count)


def total(x: Array, batch: LossBatch) -> Array:
    """[]: weighted sum over tokens; `sums` of a loss are made of these. x: [N, L], of numbers or truth values."""
    return (x * batch.weights).sum()


def row_mean(x: Array, batch: LossBatch) -> Array:
    """[N, 1]: each branch's weighted mean over its own tokens."""
    return divide((x * batch.weights).sum(1, keepdims=True), batch.weights.sum(1, keepdims=True))


def log_ratio(logp: Array, batch: LossBatch, limit: float = LOG_RATIO_LIMIT) -> Array:
    """[N, L]: log of the policy ratio, clipped to +-limit."""
    old = batch.sampler_logp if batch.old_logp is None else batch.old_logp
    return jnp.clip(logp - old, -limit, limit)


def aggregate(x: Array, batch: LossBatch, how: Aggregation, scale_length: float | None = None) -> Array:
    """This share of the batch's loss, [], from each token's term x [N, L].

    token_mean               sum over tokens / tokens of the batch
    token_sum                sum over tokens
    seq_mean_token_mean      mean over episodes of the mean over their tokens
    seq_mean_token_sum       mean over episodes of the sum over their tokens
    seq_mean_token_sum_norm  the same / `scale_length`, a fixed number of tokens

    An episode's branches are one sequence: `sequence_tokens` and `num_sequences` count them so.
    """
    weights = batch.weights if batch.correction is None else batch.weights * batch.correction
    rows = (x * weights).sum(1)
    match how:
        case "token_mean":
            return divide(rows.sum(), batch.num_tokens)
        case "token_sum":
            return rows.sum()
        case "seq_mean_token_mean":
            return divide(divide(rows, batch.sequence_tokens).sum(), batch.num_sequences)
        case "seq_mean_token_sum":
            return divide(rows.sum(), batch.num_sequences)
        case "seq_mean_token_sum_norm":
            assert scale_length is not None
            return divide(rows.sum(), scale_length * batch.num_sequences)
