"""Corrections for samples that another policy made, and the KL to a reference.

Legend: N branches, L longest branch.

Three policies may differ: mu sampled the tokens (the engine, maybe some versions ago), old is the denominator of the loss's
ratio, pi is being trained. The loss's ratio covers old -> pi; a correction covers mu -> old, by a factor on each token's
term that has no gradient and leaves the denominators alone.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
from jax import Array

from rl.loss_batch import LOG_RATIO_LIMIT, LossBatch, divide, row_mean, total

OldLogp = Literal["sampler", "current", "interpolated"]
Level = Literal["token", "sequence"]
KlKind = Literal["k1", "k2", "k3", "k3_unbiased"]
KL_KINDS = get_args(KlKind)
OLD_LOGPS = get_args(OldLogp)


class Kind(NamedTuple):
    levels: tuple[str, ...]
    """the first is the default"""
    low: float | None = None
    high: float | None = None
    bounds: tuple[str, ...] = ("high",)
    weighs: bool = True
    """multiplies by rho; else it only rejects"""


KINDS = {
    "tis": Kind(("token", "sequence"), high=2.0),
    "mis": Kind(("token", "sequence"), high=2.0, bounds=("low", "high")),
    "icepop": Kind(("token",), 0.5, 5.0, ("low", "high")),
    "decoupled": Kind(("token",), bounds=()),
    "geometric": Kind(("sequence",), 0.999, 1.001, ("low", "high"), weighs=False),
    "k3": Kind(("sequence",), high=0.01, weighs=False),
}
"""bounds are verl's, IcePop's and Geo-RS's published ones"""


@dataclass(frozen=True, kw_only=True)
class Correction:
    """Factors w from rho = old / mu: of a token, or of a branch (the product over its tokens).

    tis        min(rho, high)                                truncated importance sampling (Espeholt et al., 1802.01561)
    mis        rho where low <= rho <= high, else 0          masked importance sampling
    icepop     the same with both bounds, of tokens          IcePop (Ring-1T, 2510.18855)
    decoupled  rho                                           decoupled PPO (Hilton et al., 2110.00641)
    geometric  1 where low <= exp(mean log rho) <= high, else 0: rejects branches, whatever their length
    k3         1 where mean(rho - 1 - log rho) <= high, else 0: rejects branches

    `normalise` divides by the mean of w over the batch (over tokens, or over episodes for a sequence level). It needs the
    whole batch at once.
    """

    kind: str
    level: Level | None = None
    low: float | None = None
    high: float | None = None
    normalise: bool = False

    def __post_init__(self) -> None:
        if self.kind not in KINDS:
            raise ValueError(f"trainer.correction: kind {self.kind!r} is unknown; use one of {sorted(KINDS)}")
        known = KINDS[self.kind]
        if self.level not in (None, *known.levels):
            raise ValueError(f"trainer.correction: {self.kind!r} has no level {self.level!r}; use one of {known.levels}")
        for name in ("low", "high"):
            value = getattr(self, name)
            if value is not None and name not in known.bounds:
                raise ValueError(f"trainer.correction: {self.kind!r} has no bound {name!r}; its bounds are {known.bounds}")
            if value is not None and not value > 0:
                raise ValueError(f"trainer.correction: {name} must be above 0, got {value}")
        low, high = self.range
        if low is not None and high is not None and low > high:
            raise ValueError(f"trainer.correction: low {low} is above high {high}; exchange them")

    @property
    def range(self) -> tuple[float | None, float | None]:
        known = KINDS[self.kind]
        return (known.low if self.low is None else self.low), (known.high if self.high is None else self.high)

    @property
    def weighs(self) -> bool:
        return KINDS[self.kind].weighs

    def __call__(self, log_rho: Array, batch: LossBatch) -> tuple[Array, dict[str, Array]]:
        """Factors [N, L], and sums over tokens of: the factors, those rejected (0), those truncated.

        log_rho: [N, L], 0 where the weight is 0.
        """
        sequence = (self.level or KINDS[self.kind].levels[0]) == "sequence"
        rho = self._rho(jax.lax.stop_gradient(log_rho), sequence)
        statistic = self._statistic(jax.lax.stop_gradient(log_rho), rho, batch)
        low, high = self.range
        below = statistic < (-jnp.inf if low is None else low)
        above = statistic > (jnp.inf if high is None else high)
        rejected = jnp.zeros_like(below) if self.kind == "tis" else below | above
        factor = jnp.where(rejected, 0.0, jnp.minimum(rho, jnp.inf if high is None else high) if self.weighs else 1.0)
        factor = jnp.broadcast_to(factor, log_rho.shape)
        if self.normalise:
            factor = divide(factor, _batch_mean(factor, batch, sequence))
        truncated = {"truncated": total(above, batch)} if self.kind == "tis" else {}
        return factor, {"correction": total(factor, batch), "rejected": total(rejected, batch), **truncated}

    def _rho(self, log_rho: Array, sequence: bool) -> Array:
        """Of tokens, [N, L], or of whole branches, [N, 1]: each of its tokens once, whatever its weight."""
        log_rho = log_rho.sum(1, keepdims=True) if sequence else log_rho
        return jnp.exp(jnp.clip(log_rho, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))

    def _statistic(self, log_rho: Array, rho: Array, batch: LossBatch) -> Array:
        """What the bounds are for."""
        bounded = jnp.clip(log_rho, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
        if self.kind == "geometric":
            return jnp.exp(row_mean(bounded, batch))
        if self.kind == "k3":
            return row_mean(jnp.expm1(bounded) - bounded, batch)
        return rho


def _batch_mean(factor: Array, batch: LossBatch, sequence: bool) -> Array:
    """Over the whole batch's tokens, or its episodes: a branch counts by its share of its episode's tokens."""
    if not sequence:
        return divide(total(factor, batch), batch.num_tokens)
    return divide(divide((factor * batch.weights).sum(1), batch.sequence_tokens).sum(), batch.num_sequences)


def old_log_probs(kind: OldLogp, logp: Array, batch: LossBatch) -> Array:
    """The denominator of the loss's ratio, [N, L], without a gradient.

    sampler       mu
    current       pi itself: the ratio is 1 with pi's gradient, right for one update a batch
    interpolated  log mu + a (log pi - log mu) with a = (v_old - v_mu) / (v_pi - v_mu), v_old = v_pi - 1: an estimate of the
                  policy one update ago without a forward pass of it (AReaL); a is 0 at lag 0
    """
    logp = jax.lax.stop_gradient(logp)
    if kind == "sampler":
        return batch.sampler_logp
    if kind == "current":
        return logp
    lag = batch.lag.astype(logp.dtype)
    share = jnp.maximum(lag - 1, 0) / jnp.maximum(lag, 1)
    return batch.sampler_logp + share * (logp - batch.sampler_logp)


def reference_kl(kind: KlKind, logp: Array, reference_logp: Array, log_ratio: Array) -> Array:
    """Per-token estimate of KL(pi || reference), [N, L] (http://joschu.net/blog/kl-approx.html).

    With d = log reference - log pi: k1 = -d, k2 = d^2 / 2, k3 = exp(d) - 1 - d (GRPO, 2402.03300), and k3_unbiased = k3 times
    the policy ratio with its gradient, whose gradient is the KL's (DeepSeek-V3.2 report). log_ratio: the loss's.
    """
    d = reference_logp - logp
    if kind == "k1":
        return -d
    if kind == "k2":
        return d**2 / 2
    k3 = jnp.expm1(jnp.clip(d, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)) - d
    return k3 if kind == "k3" else jnp.exp(log_ratio) * k3
