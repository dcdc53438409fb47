"""Losses: pure functions of (N, L) log-prob matrices. They never see trees, rows of tokens or devices.

Legend: N branches, L longest branch.

All have one signature, `loss(logp, batch, **options) -> (value, sums)`:

    logp     [N, L]  trainer's log-prob of each id, with the gradient (a critic's values for a loss of readout `value`)
    batch            LossBatch: the sampler's log-probs, advantages, weights, the whole batch's denominators
    value    []      these rows' share of the global loss
    sums             more numbers to report, added up over shares, then divided by the number of tokens

`@loss(...)` adds a function to LOSSES under its name, and shows it zeros where the weight is 0, so that what stands there,
NaN included, changes neither value nor gradient. A config names one, and `rl.objective.Objective` calls it.
"""

import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from rl.loss_batch import Aggregation, LossBatch, aggregate, clean, divide, log_ratio, row_mean, total

Result = tuple[Array, dict[str, Array]]
Readout = Literal["log_prob", "value"]


class Loss(NamedTuple):
    function: Callable[..., Result]
    needs: frozenset[str]
    """which optional fields of LossBatch it reads"""
    joint: bool
    """compares rows with each other: it is only called with the whole batch"""
    readout: Readout
    """what its first argument is"""
    sampled: bool
    """trains on samples of a policy, with their log-probs: corrections, reference KL and mismatch numbers make sense"""
    options: Mapping[str, Any]
    """name -> default; inspect.Parameter.empty if it must be given"""


LOSSES: dict[str, Loss] = {}


def loss(
    *, needs: tuple[str, ...] = (), joint: bool = False, readout: Readout = "log_prob", sampled: bool = True
) -> Callable[[Callable[..., Result]], Callable[..., Result]]:
    """Registers a loss under its function's name."""

    def register(function: Callable[..., Result]) -> Callable[..., Result]:
        @functools.wraps(function)
        def safe(logp: Array, batch: LossBatch, **options: Any) -> Result:
            return function(*clean(logp, batch), **options)

        name = getattr(function, "__name__", "")
        if name in LOSSES:
            raise ValueError(f"loss: the name {name!r} is taken; call the function something else")
        known = inspect.signature(function).parameters.values()
        options = {p.name: p.default for p in known if p.kind is p.KEYWORD_ONLY}
        LOSSES[name] = Loss(safe, frozenset(needs), joint, readout, sampled, options)
        return safe

    return register


def variant(name: str, of: str, *, needs_also: tuple[str, ...] = (), **defaults: Any) -> Callable[..., Result]:
    """Registers the loss `of` under another name with other defaults; options in `needs_also` must be given."""
    old = LOSSES[of]
    function = functools.partial(old.function, **defaults)
    required = dict.fromkeys(needs_also, inspect.Parameter.empty)
    LOSSES[name] = old._replace(function=function, options={**old.options, **defaults, **required})
    return function


def clipped(ratio: Array, batch: LossBatch, clip_low: float, clip_high: float, dual_clip: float | None = None) -> Result:
    """PPO's min(r A, clip(r, 1 - clip_low, 1 + clip_high) A), [N, L], and clip fractions. A clipped token has no gradient.

    With `dual_clip` c > 1 the term of a negative advantage is at least c A (Ye et al., 1912.09729).
    """
    advantages = batch.advantages
    high = (advantages > 0) & (ratio > 1 + clip_high)
    low = (advantages < 0) & (ratio < 1 - clip_low)
    bounded = jnp.where(high, 1 + clip_high, jnp.where(low, 1 - clip_low, ratio))
    sums = {"clip_low": total(low, batch), "clip_high": total(high, batch), "clipped": total(low | high, batch)}
    if dual_clip is not None:
        dual = (advantages < 0) & (ratio > dual_clip)
        bounded = jnp.where(dual, dual_clip, bounded)
        sums |= {"clip_dual": total(dual, batch), "clipped": total(low | high | dual, batch)}
    return bounded * advantages, sums


@loss()
def ppo(
    logp: Array,
    batch: LossBatch,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
    aggregation: Aggregation = "token_mean",
    scale_length: float | None = None,
) -> Result:
    """PPO's clipped surrogate (1707.06347), mean over the batch's tokens; advantages by `rl.advantages.gae`."""
    objective, sums = clipped(jnp.exp(log_ratio(logp, batch)), batch, clip_low, clip_high, dual_clip)
    return aggregate(-objective, batch, aggregation, scale_length), sums


grpo = variant("grpo", "ppo", aggregation="seq_mean_token_mean")
"""GRPO (2402.03300): mean over sequences of the mean over tokens; its KL term is Objective.kl_coef (0.04 in the paper)"""
dr_grpo = variant("dr_grpo", "ppo", aggregation="seq_mean_token_sum_norm", needs_also=("scale_length",))
"""Dr. GRPO (2503.20783): sum over tokens / `scale_length` (longest completion), mean over sequences; advantages without std"""
dapo = variant("dapo", "ppo", clip_high=0.28)
"""DAPO (2503.14476): mean over the batch's tokens, with the upper clip raised"""
reinforce_pp = variant("reinforce_pp", "ppo")
"""REINFORCE++ (2501.03262) and its baseline form: PPO's loss; `rl.advantages` has their advantages"""


@loss()
def gspo(
    logp: Array,
    batch: LossBatch,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    log_ratio_limit: float = 10.0,
    aggregation: Aggregation = "seq_mean_token_mean",
    scale_length: float | None = None,
) -> Result:
    """GSPO (2507.18071): the ratio is the geometric mean over the branch's tokens, and is clipped as one.

    Each token carries sg[s] pi / sg[pi], so its gradient is s A / T, and advantages may differ between tokens (GSPO-token).
    """
    mean = row_mean(log_ratio(logp, batch, jnp.inf), batch)
    ratio = jnp.exp(
        jnp.clip(jax.lax.stop_gradient(mean), -log_ratio_limit, log_ratio_limit) + logp - jax.lax.stop_gradient(logp)
    )
    objective, sums = clipped(ratio, batch, clip_low, clip_high)
    return aggregate(-objective, batch, aggregation, scale_length), sums


@loss()
def cispo(
    logp: Array,
    batch: LossBatch,
    *,
    clip_low: float = 1.0,
    clip_high: float = 3.0,
    log_ratio_limit: float = 20.0,
    aggregation: Aggregation = "token_mean",
    scale_length: float | None = None,
) -> Result:
    """CISPO (2506.13585): sg[clip(r, 1 - clip_low, 1 + clip_high)] A log pi; no token loses its gradient.

    The paper has no lower bound and does not say its upper one; [0, 4] is Tinker's, after ScaleRL (2510.13786).
    """
    ratio = jax.lax.stop_gradient(jnp.exp(log_ratio(logp, batch, log_ratio_limit)))
    low, high = ratio < 1 - clip_low, ratio > 1 + clip_high
    sums = {"clip_low": total(low, batch), "clip_high": total(high, batch), "clipped": total(low | high, batch)}
    objective = jnp.clip(ratio, 1 - clip_low, 1 + clip_high) * batch.advantages * logp
    return aggregate(-objective, batch, aggregation, scale_length), sums


@loss()
def sapo(
    logp: Array,
    batch: LossBatch,
    *,
    tau_positive: float = 1.0,
    tau_negative: float = 1.05,
    aggregation: Aggregation = "seq_mean_token_mean",
    scale_length: float | None = None,
) -> Result:
    """SAPO (2511.20347): a soft gate instead of a clip, A (4 / tau) sigmoid(tau (r - 1)), tau by the sign of A."""
    tau = jnp.where(batch.advantages > 0, tau_positive, tau_negative)
    gate = 4 / tau * jax.nn.sigmoid(tau * (jnp.exp(log_ratio(logp, batch)) - 1))
    return aggregate(-gate * batch.advantages, batch, aggregation, scale_length), {}


@loss()
def gmpo(
    logp: Array,
    batch: LossBatch,
    *,
    log_clip: float = 0.4,
    aggregation: Aggregation = "seq_mean_token_mean",
    scale_length: float | None = None,
) -> Result:
    """GMPO (2507.20673): A times the geometric mean of the ratios, each clipped where it has gone too far A's way."""
    sign = jnp.sign(batch.advantages)
    log_r = log_ratio(logp, batch)
    far = sign * log_r > log_clip
    mean = jnp.exp(row_mean(jnp.where(far, sign * log_clip, log_r), batch))
    return aggregate(-mean * batch.advantages, batch, aggregation, scale_length), {"clipped": total(far, batch)}


@loss()
def reinforce(
    logp: Array, batch: LossBatch, *, aggregation: Aggregation = "token_mean", scale_length: float | None = None
) -> Result:
    """REINFORCE (Williams, 1992): A log pi, without a ratio; a correction can weigh what another policy sampled."""
    return aggregate(-logp * batch.advantages, batch, aggregation, scale_length), {}


rloo = variant("rloo", "reinforce", aggregation="seq_mean_token_sum")
"""RLOO (2402.14740): mean over sequences of A log pi(sequence); advantages of baseline `leave_one_out`"""


@loss()
def importance_sampling(
    logp: Array, batch: LossBatch, *, aggregation: Aggregation = "token_sum", scale_length: float | None = None
) -> Result:
    """r A without a clip (Tinker's `importance_sampling`, which sums over tokens)."""
    return aggregate(-jnp.exp(log_ratio(logp, batch)) * batch.advantages, batch, aggregation, scale_length), {}


@loss()
def dro(
    logp: Array,
    batch: LossBatch,
    *,
    beta: float = 0.05,
    aggregation: Aggregation = "token_sum",
    scale_length: float | None = None,
) -> Result:
    """Direct Reward Optimisation (2405.19107) of tokens, as in Tinker: A log pi - beta / 2 (log r)^2."""
    penalty = beta / 2 * log_ratio(logp, batch) ** 2
    return aggregate(penalty - logp * batch.advantages, batch, aggregation, scale_length), {"penalty": total(penalty, batch)}


@loss(needs=("reference_logp",))
def distill(
    logp: Array,
    batch: LossBatch,
    *,
    coef: float = 1.0,
    aggregation: Aggregation = "token_mean",
    scale_length: float | None = None,
) -> Result:
    """On-policy distillation (Lu, Thinking Machines, 2025): r A with A = coef (log teacher - log mu) of each sampled token.

    A policy gradient of the reverse KL with no look ahead. The teacher is the reference; `advantages` are not read. Tinker
    sums over tokens.
    """
    assert batch.reference_logp is not None
    reverse_kl = batch.sampler_logp - batch.reference_logp
    objective = -coef * jnp.exp(log_ratio(logp, batch)) * reverse_kl
    return aggregate(-objective, batch, aggregation, scale_length), {"teacher_kl": total(reverse_kl, batch)}


@loss(sampled=False)
def sft(logp: Array, batch: LossBatch, *, aggregation: Aggregation = "token_mean", scale_length: float | None = None) -> Result:
    """Negative log-likelihood, mean over the batch's tokens; reads weights alone."""
    return aggregate(-logp, batch, aggregation, scale_length), {}


@loss(needs=("reference_logp", "pair", "chosen", "num_pairs"), joint=True, sampled=False)
def dpo(logp: Array, batch: LossBatch, *, beta: float = 0.1) -> Result:
    """DPO (2305.18290): -log sigmoid(beta (chosen's - rejected's log pi / reference)), mean over pairs.

    Rows without a pair have no gradient. Several branches of one side add up.
    """
    assert batch.reference_logp is not None and batch.pair is not None and batch.chosen is not None
    assert batch.num_pairs is not None
    reward = beta * ((logp - batch.reference_logp) * batch.weights).sum(1)
    signed = jnp.where(batch.chosen, reward, -reward)
    same = (batch.pair[:, None] == batch.pair[None, :]) & (batch.pair >= 0)[:, None]
    margin = jnp.where(same, signed[None, :], 0.0).sum(1)
    share = divide((batch.pair >= 0).astype(logp.dtype), same.sum(1))  # of its pair: 1 / rows
    sums = {"pairs": share, "pair_margin": share * margin, "pair_accuracy": share * (margin > 0)}
    value = divide((share * jax.nn.softplus(-margin)).sum(), batch.num_pairs)
    return value, {name: x.sum() for name, x in sums.items()}


@loss(needs=("old_values", "returns"), readout="value", sampled=False)
def value(
    values: Array,
    batch: LossBatch,
    *,
    clip: float = 0.2,
    aggregation: Aggregation = "token_mean",
    scale_length: float | None = None,
) -> Result:
    """A critic's loss with PPO's clip: max((V - R)^2, (Vold + clip(V - Vold, +-clip) - R)^2) / 2. A large clip never binds."""
    assert batch.old_values is not None and batch.returns is not None
    error = (values - batch.returns) ** 2
    bounded = (batch.old_values + jnp.clip(values - batch.old_values, -clip, clip) - batch.returns) ** 2
    wrong = batch.returns - values
    sums = {"value_clipped": bounded > error, "value_error": wrong, "value_error_squared": wrong**2}
    sums |= {"return": batch.returns, "return_squared": batch.returns**2}
    result = aggregate(jnp.maximum(error, bounded) / 2, batch, aggregation, scale_length)
    return result, {name: total(x, batch) for name, x in sums.items()}
