"""The objective of a run, made from its config: a loss with its options, a correction, a reference KL, and what is measured."""

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import jax.numpy as jnp
from jax import Array

from rl.corrections import KL_KINDS, OLD_LOGPS, Correction, KlKind, OldLogp, old_log_probs, reference_kl
from rl.loss_batch import AGGREGATIONS, LossBatch, aggregate, clean, log_ratio, total
from rl.losses import LOSSES, Loss, Readout, Result
from rl.measures import mismatch


@dataclass(frozen=True, kw_only=True, eq=False)
class Objective:
    """What the trainer calls: a loss by name with its options, a correction and a reference KL."""

    loss: str
    options: Mapping[str, Any] = field(default_factory=dict)
    old_logp: OldLogp = "sampler"
    """denominator of the ratio, see rl.corrections.old_log_probs"""
    correction: Mapping[str, Any] = field(default_factory=dict)
    """fields of rl.corrections.Correction; none when empty"""
    kl_coef: float = 0.0
    """of the reference KL added to the loss, aggregated as the loss is"""
    kl_kind: KlKind = "k3"

    def __post_init__(self) -> None:
        """ValueError names the key and what to change."""
        if self.loss not in LOSSES:
            raise ValueError(f"trainer.loss: {self.loss!r} is unknown; use one of {sorted(LOSSES)}")
        _check_options(self.loss, self.options)
        for name, known in (("old_logp", OLD_LOGPS), ("kl_kind", KL_KINDS)):
            if getattr(self, name) not in known:
                raise ValueError(f"trainer.{name}: use one of {known}, got {getattr(self, name)!r}")
        if not (isinstance(self.kl_coef, int | float) and 0 <= self.kl_coef < float("inf")):
            raise ValueError(f"trainer.kl_coef: must be a number from 0 up, got {self.kl_coef!r}")
        correction = self._correction()
        set_ = {"old_logp": self.old_logp != "sampler", "correction": correction is not None, "kl_coef": self.kl_coef > 0}
        if not self._loss.sampled and any(set_.values()):
            name = next(name for name, is_set in set_.items() if is_set)
            raise ValueError(f"trainer.{name}: {self.loss!r} does not train on a policy's samples; leave it out")
        if correction is not None and correction.weighs and self.old_logp == "sampler":
            raise ValueError(
                f"trainer.correction: the ratio of old_logp 'sampler' starts from the sampler, so {correction.kind!r} would "
                "count it twice; set trainer.old_logp to 'current' or 'interpolated', or use a kind that only rejects"
            )
        if self.kl_coef > 0 and "aggregation" not in self._loss.options:
            raise ValueError(f"trainer.kl_coef: {self.loss!r} has no option `aggregation` to add a KL by; set it to 0")

    @property
    def _loss(self) -> Loss:
        return LOSSES[self.loss]

    def _correction(self) -> Correction | None:
        if not self.correction:
            return None
        known = [f.name for f in fields(Correction)]
        if unknown := sorted(set(self.correction) - set(known)):
            raise ValueError(f"trainer.correction: {unknown} are unknown; its keys are {known}")
        if "kind" not in self.correction:
            raise ValueError("trainer.correction: needs a kind; set it, or leave the correction out")
        return Correction(**self.correction)

    @property
    def needs(self) -> frozenset[str]:
        """Optional fields of LossBatch that must be there."""
        return self._loss.needs | ({"reference_logp"} if self.kl_coef > 0 else set())

    @property
    def joint(self) -> bool:
        """It must be called with the whole batch."""
        correction = self._correction()
        return self._loss.joint or (correction is not None and correction.normalise)

    @property
    def readout(self) -> Readout:
        return self._loss.readout

    def __call__(self, logp: Array, batch: LossBatch, entropy: Array | None = None) -> Result:
        """These rows' share of the batch's loss, [], and sums for `rl.measures.add_up` and `finish`.

        Args:
            logp: [N, L], the trainer's log-probs under the sampling temperature, or a critic's values.
            entropy: [N, L], of the distribution each token was read from; reported alone.
        """
        assert all(getattr(batch, name) is not None for name in self.needs), f"the batch lacks one of {sorted(self.needs)}"
        logp, batch = clean(logp, batch)
        sums = {"tokens": batch.weights.sum()}
        if self._loss.sampled:
            sums |= mismatch(logp, batch)
            batch, corrected = self._corrected(logp, batch)
            sums |= corrected
        value, own = self._loss.function(logp, batch, **self.options)
        if self.kl_coef > 0:
            kl = self._kl(logp, batch)
            how = {**self._loss.options, **self.options}
            # the correction is for the objective's own terms
            plain = replace(batch, correction=None)
            value += self.kl_coef * aggregate(kl, plain, how["aggregation"], how.get("scale_length"))
            sums["kl"] = total(kl, batch)
        if self.readout == "log_prob":
            sums["nll"] = -total(logp, batch)
        if entropy is not None:
            sums["entropy"] = total(jnp.where(batch.weights > 0, entropy, 0), batch)
        return value, {**sums, **own, "loss": value}

    def _corrected(self, logp: Array, batch: LossBatch) -> tuple[LossBatch, dict[str, Array]]:
        """The batch with the denominator of the ratio and the factors of the correction."""
        old = old_log_probs(self.old_logp, logp, batch)
        batch = replace(batch, old_logp=old)
        correction = self._correction()
        if correction is None:
            return batch, {}
        # where the ratio starts from mu, what is left to reject is pi against mu
        policy = logp if self.old_logp == "sampler" else old
        factors, sums = correction(policy - batch.sampler_logp, batch)
        return replace(batch, correction=factors), sums

    def _kl(self, logp: Array, batch: LossBatch) -> Array:
        assert batch.reference_logp is not None
        return reference_kl(self.kl_kind, logp, batch.reference_logp, log_ratio(logp, batch))


def _check_options(loss: str, given: Mapping[str, Any]) -> None:
    options = LOSSES[loss].options
    if unknown := sorted(set(given) - options.keys()):
        raise ValueError(f"trainer.loss_options: {loss!r} does not know {unknown}; its options are {sorted(options)}")
    if missing := [n for n, default in options.items() if default is inspect.Parameter.empty and n not in given]:
        raise ValueError(f"trainer.loss_options: {loss!r} needs {missing}; set them")
    chosen = {**options, **given}
    for name, value in given.items():
        number = isinstance(options[name], int | float | None) or options[name] is inspect.Parameter.empty
        if name == "aggregation" and value not in AGGREGATIONS:
            raise ValueError(f"trainer.loss_options: aggregation: use one of {AGGREGATIONS}, got {value!r}")
        if number and not _is_size(value) and not (value is None and options[name] is None):
            raise ValueError(f"trainer.loss_options: {name} must be a number from 0 up, got {value!r}")
    norm = chosen.get("aggregation") == "seq_mean_token_sum_norm"
    if norm and not chosen.get("scale_length"):
        raise ValueError("trainer.loss_options: aggregation 'seq_mean_token_sum_norm' needs scale_length, in tokens; set it")
    if not norm and chosen.get("scale_length") is not None:
        raise ValueError("trainer.loss_options: scale_length is for aggregation 'seq_mean_token_sum_norm'; leave it out")


def _is_size(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value) and value >= 0
