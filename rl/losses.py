"""Policy losses: pure functions of (N, L) log-prob matrices. They never see trees, rows or devices.

Legend: N branches (or whole sequences), L longest branch.

All have one signature, `loss(logp, old_logp, advantages, mask, totals, **options) -> (loss, sums)`:

    logp        [N, L]  trainer's log-prob of each id, with the gradient
    old_logp    [N, L]  sampler's, under the sampling distribution
    advantages  [N] or [N, L]
    mask        [N, L]  1 on sampled tokens, 0 elsewhere, or a weight (Branch.weights: shared tokens count once)
    totals              denominators of the *whole* batch; the loss is these rows' share of the global loss, so the
                        shares of micro-batches and devices add up to it exactly
    sums                metrics to be added up over shares, then divided by what the name says

What stands at masked places, NaN included, changes neither value nor gradient.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

LOG_RATIO_LIMIT = 20.0
"""log ratios are clipped to +-this before exp, so that no ratio overflows"""


class Totals(NamedTuple):
    """Denominators over the global batch (all micro-batches, all devices)."""

    num_sequences: Array | float
    """episodes with at least one sampled token; an episode's branches count as one"""
    num_tokens: Array | float
    """sum of the mask"""
    sequence_tokens_N: Array | None = None
    """[N], this share's rows: sum of the mask over all of the row's episode. None: each row is a whole episode"""


Loss = tuple[Array, dict[str, Array]]


def count_totals(mask_NL: Array) -> Totals:
    """Totals of a whole batch in which every row is an episode; fully masked rows are not counted."""
    return Totals((mask_NL.sum(1) > 0).sum(), mask_NL.sum())


def grpo(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    totals: Totals,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Loss:
    """GRPO (2402.03300) without its KL term: mean over sequences of the mean over tokens."""
    objective, sums = _clipped(logp, old_logp, advantages, mask, clip_low, clip_high)
    tokens = mask.sum(1) if totals.sequence_tokens_N is None else totals.sequence_tokens_N
    return -_divide(_divide(objective.sum(1), tokens).sum(), totals.num_sequences), sums


def dapo(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    totals: Totals,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
) -> Loss:
    """DAPO (2503.14476): mean over the batch's tokens, with the upper clip raised."""
    objective, sums = _clipped(logp, old_logp, advantages, mask, clip_low, clip_high)
    return -_divide(objective.sum(), totals.num_tokens), sums


def dr_grpo(
    logp: Array,
    old_logp: Array,
    advantages: Array,
    mask: Array,
    totals: Totals,
    *,
    scale_length: int,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
) -> Loss:
    """Dr. GRPO (2503.20783): sum over tokens by a fixed `scale_length` (longest completion), mean over sequences."""
    objective, sums = _clipped(logp, old_logp, advantages, mask, clip_low, clip_high)
    return -_divide(objective.sum(), scale_length * totals.num_sequences), sums


def sft(logp: Array, old_logp: Array, advantages: Array, mask: Array, totals: Totals) -> Loss:
    """Negative log-likelihood, mean over the batch's tokens; `old_logp` and `advantages` are not read."""
    total = -(_at(mask, logp) * mask).sum()
    return _divide(total, totals.num_tokens), {"tokens": mask.sum(), "nll": total}


LOSSES: dict[str, Callable[..., Loss]] = {"grpo": grpo, "dapo": dapo, "dr_grpo": dr_grpo, "sft": sft}


def mismatch(logp_train: Array, logp_sampler: Array, mask: Array) -> dict[str, Array]:
    """How far the trainer is from the sampler on sampled tokens; log rho = trainer's - sampler's log-prob, all [N, L].

    Sums over tokens (divide by `tokens`) of k1 = -log rho, k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho, |log rho|,
    rho and rho^2; and `max_abs_gap`, `max_ratio`, of which shares take the maximum. From them: chi2 is the mean of
    rho^2 less 1, the effective share of samples (sum rho)^2 / (tokens * sum rho^2).
    """
    log_rho = _at(mask, logp_train) - _at(mask, logp_sampler)
    bounded = jnp.clip(log_rho, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rho = jnp.exp(bounded)
    sums = {
        "k1": -log_rho,
        "k2": log_rho**2 / 2,
        "k3": jnp.expm1(bounded) - log_rho,
        "abs_gap": jnp.abs(log_rho),
        "ratio": rho,
        "ratio_squared": rho**2,
    }
    result = {name: (value * mask).sum() for name, value in sums.items()}
    highest = {"max_abs_gap": jnp.abs(log_rho).max(), "max_ratio": jnp.where(mask > 0, rho, 0.0).max()}
    return {"tokens": mask.sum(), **result, **highest}


def _at(mask: Array, x: Array) -> Array:
    """x where the mask is not 0, else 0: chosen before any arithmetic, so that NaN elsewhere has no gradient."""
    return jnp.where(mask > 0, x, 0.0)


def _divide(x: Array, count: Array | float) -> Array:
    """x / count, and x where the count is 0 (then x is 0)."""
    return x / jnp.where(jnp.equal(count, 0), 1, count)


def _clipped(logp: Array, old_logp: Array, advantages: Array, mask: Array, clip_low: float, clip_high: float) -> Loss:
    """PPO's min(r A, clip(r) A) times the mask, [N, L], and its metrics. A clipped token has no gradient."""
    if advantages.ndim == 1:
        advantages = jnp.broadcast_to(advantages[:, None], logp.shape)
    advantages = _at(mask, advantages)
    log_ratio = jnp.clip(_at(mask, logp) - _at(mask, old_logp), -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    ratio = jnp.exp(log_ratio)
    bound = jnp.where(advantages > 0, 1 + clip_high, 1 - clip_low)
    clipped = jnp.where(advantages > 0, ratio > bound, (ratio < bound) & (advantages < 0))
    objective = jnp.where(clipped, bound, ratio) * advantages * mask
    sums = {"tokens": mask, "clipped": clipped * mask, "ratio": ratio * mask, "nll": -_at(mask, logp) * mask}
    return objective, {name: value.sum() for name, value in sums.items()}
