"""Corrections, denominators and reference KL against values computed by hand; what a config may not say."""

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from rl.corrections import old_log_probs
from rl.loss_batch import LossBatch
from rl.objective import Objective

pytestmark = pytest.mark.plain_code

# as in test_losses.py: ratios (1.2, 1.4) with A = 1, and (.8, 1, .5, 1) with A = -1
MASK = jnp.array([[1.0, 1, 0, 0], [1, 1, 1, 1]])
OLD = jnp.log(jnp.full((2, 4), 0.5))
NEW = jnp.log(jnp.array([[0.6, 0.7, 0.5, 0.5], [0.4, 0.5, 0.25, 0.5]]))
CASE = LossBatch(
    weights=MASK,
    sampler_logp=OLD,
    advantages=jnp.broadcast_to(jnp.array([[1.0], [-1]]), (2, 4)),
    sequence_tokens=jnp.array([2.0, 4]),
    num_sequences=jnp.array(2.0),
    num_tokens=jnp.array(6.0),
    lag=jnp.zeros((2, 4), jnp.int32),
    reference_logp=OLD,
)


def call(logp: Array, batch: LossBatch = CASE, **fields: Any) -> tuple[float, dict[str, Array]]:
    return jax.jit(Objective(**fields))(logp, batch)


@pytest.mark.parametrize(
    ("correction", "expected", "rejected"),
    [
        # with `current` the loss's own ratio is 1, so the value is -sum of factor * A: factors of o1 less those of o2
        ({"kind": "tis", "high": 1.3}, -(1.2 + 1.3 - 0.8 - 1 - 0.5 - 1), 0),
        # products over the branch: 1.68 and .4, on each token
        ({"kind": "tis", "level": "sequence", "high": 1.5}, -(2 * 1.5 - 4 * 0.4), 0),
        ({"kind": "mis", "high": 1.3}, -(1.2 - 3.3), 1),
        ({"kind": "mis", "high": 1.3, "low": 0.6}, -(1.2 - 2.8), 2),
        ({"kind": "mis", "level": "sequence", "high": 1.5}, 4 * 0.4, 2),
        ({"kind": "icepop", "low": 0.6, "high": 1.3}, -(1.2 - 2.8), 2),
        ({"kind": "icepop"}, -(2.6 - 3.3), 0),
        ({"kind": "decoupled"}, -(2.6 - 3.3), 0),
        # exp(mean log rho) is 1.296148 and .795271
        ({"kind": "geometric", "low": 0.79, "high": 1.2}, 4, 2),
        ({"kind": "geometric"}, 0, 6),
        # mean k3 is (.017678 + .063528) / 2 = .040603 and (.023144 + .193147) / 4 = .054073
        ({"kind": "k3", "high": 0.05}, -2, 4),
        # divided by the mean factor: 5.8 / 6 over tokens; (0 + .4) / 2 over episodes; the kept share 4 / 6 resp. 1 / 2
        ({"kind": "tis", "high": 1.3, "normalise": True}, 0.8 / (5.8 / 6), 0),
        ({"kind": "mis", "level": "sequence", "high": 1.5, "normalise": True}, 4 * 0.4 / 0.2, 2),
        ({"kind": "mis", "low": 0.6, "high": 1.3, "normalise": True}, 1.6 / (4 / 6), 2),
        ({"kind": "k3", "high": 0.05, "normalise": True}, -2 / (1 / 2), 4),
    ],
)
def test_corrections_by_hand(correction: dict[str, Any], expected: float, rejected: int) -> None:
    value, sums = call(NEW, loss="importance_sampling", old_logp="current", correction=correction)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)
    assert sums["rejected"] == rejected


def test_factors_have_no_gradient() -> None:
    """TIS with REINFORCE: dLoss/dlog pi = -min(rho, 1.3) A, of the factor nothing."""
    objective = Objective(
        loss="reinforce", options={"aggregation": "token_sum"}, old_logp="current", correction={"kind": "tis", "high": 1.3}
    )
    gradient, sums = jax.jit(jax.grad(objective, has_aux=True))(NEW, CASE)
    np.testing.assert_allclose(gradient, [[-1.2, -1.3, 0, 0], [0.8, 1, 0.5, 1]], rtol=1e-6)
    assert sums["truncated"] == 1
    np.testing.assert_allclose(sums["correction"], 5.8, rtol=1e-6)


def test_rejection_beside_the_samplers_ratio() -> None:
    """old_logp `sampler`: the ratio weighs, a correction only rejects; o2 is kept, with sum of r = 3.3."""
    value, _ = call(NEW, loss="importance_sampling", correction={"kind": "geometric", "low": 0.79, "high": 1.2})
    np.testing.assert_allclose(value, 3.3, rtol=1e-6)


def test_denominators_of_the_ratio() -> None:
    """a = (lag - 1) / lag: log old = log mu + a log r; lag 0 and 1 leave the sampler's."""
    batch = replace(CASE, lag=jnp.array([[0, 1, 0, 0], [2, 3, 4, 0]]))
    old = old_log_probs("interpolated", NEW, batch)
    log_r = np.log([0.8, 1, 0.5])
    np.testing.assert_allclose(old - OLD, [[0, 0, 0, 0], [log_r[0] / 2, 0, log_r[2] * 3 / 4, 0]], atol=1e-6)
    value, _ = call(NEW, batch, loss="importance_sampling", old_logp="interpolated")
    np.testing.assert_allclose(value, -(1.2 + 1.4 - 0.8**0.5 - 1 - 0.5**0.25 - 1), rtol=1e-5)
    # decoupled PPO: the factor old / mu times the ratio pi / old is pi / mu, as nothing is clipped
    value, _ = call(NEW, batch, loss="importance_sampling", old_logp="interpolated", correction={"kind": "decoupled"})
    np.testing.assert_allclose(value, 0.7, rtol=1e-5)
    value, sums = call(NEW, loss="grpo", old_logp="current")
    assert value == 0 and sums["clipped"] == 0  # ratio 1: (2 * 1 / 2 - 4 * 1 / 4) / 2


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("k1", -0.066249),  # mean log(pi / reference)
        ("k2", 0.056392),
        ("k3", 0.066687),  # mean of 1/r - 1 + log r: (.015655 + .050758 + .026856 + .306853) / 6
        ("k3_unbiased", 0.044126),  # the same times r: (.018786 + .071061 + .021485 + .153426) / 6
    ],
)
def test_reference_kl_by_hand(kind: str, expected: float) -> None:
    value, sums = call(NEW, loss="dapo", kl_coef=0.5, kl_kind=kind)
    np.testing.assert_allclose(value, 0.186667 + 0.5 * expected, atol=1e-6)
    np.testing.assert_allclose(sums["kl"] / 6, expected, atol=1e-6)
    norm = {"aggregation": "seq_mean_token_sum_norm", "scale_length": 10}
    with_norm, without = (call(NEW, loss="dapo", options=norm, kl_coef=c, kl_kind=kind)[0] for c in (0.5, 0.0))
    np.testing.assert_allclose(with_norm - without, 0.5 * expected * 6 / 20, atol=1e-6)


def test_kl_is_not_corrected() -> None:
    """All tokens are rejected: what is left is the KL."""
    value, _ = call(NEW, loss="dapo", kl_coef=1.0, kl_kind="k2", correction={"kind": "geometric"})
    np.testing.assert_allclose(value, 0.056392, atol=1e-6)


def test_what_is_reported() -> None:
    entropy = jnp.where(MASK > 0, 2.0, jnp.nan)
    value, sums = jax.jit(Objective(loss="grpo"))(NEW, CASE, entropy)
    assert sums["entropy"] == 12 and sums["tokens"] == 6 and sums["loss"] == value
    np.testing.assert_allclose(sums["nll"], 6 * 0.759397, rtol=1e-5)
    assert {"k3", "max_abs_gap", "clipped", "clip_low", "clip_high"} <= sums.keys()
    assert set(call(NEW, loss="sft")[1]) == {"tokens", "nll", "loss"}


def test_what_it_needs() -> None:
    assert Objective(loss="grpo").needs == frozenset() and not Objective(loss="grpo").joint
    assert Objective(loss="grpo", kl_coef=0.1).needs == {"reference_logp"}
    assert Objective(loss="value").needs == {"old_values", "returns"} and Objective(loss="value").readout == "value"
    assert Objective(loss="dpo").joint
    assert Objective(loss="rloo", old_logp="current", correction={"kind": "tis", "normalise": True}).joint
    with pytest.raises(AssertionError, match="reference_logp"):
        Objective(loss="distill")(NEW, replace(CASE, reference_logp=None))


TIS = {"kind": "tis"}


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"loss": "pg"}, r"trainer.loss: 'pg' is unknown; use one of \['cispo', 'dapo', "),
        ({"options": {"beta": 0.1}}, r"trainer.loss_options: 'grpo' does not know \['beta'\]; its options are .*clip_low"),
        ({"loss": "dr_grpo"}, r"trainer.loss_options: 'dr_grpo' needs \['scale_length'\]; set them"),
        ({"loss": "dr_grpo", "options": {"scale_length": None}}, "trainer.loss_options: scale_length must be a number"),
        ({"options": {"aggregation": "mean"}}, r"trainer.loss_options: aggregation: use one of \('token_mean', .*got 'mean'"),
        ({"options": {"aggregation": "seq_mean_token_sum_norm"}}, "trainer.loss_options: .* needs scale_length, in tokens"),
        ({"options": {"scale_length": 8}}, "trainer.loss_options: scale_length is for .*; leave it out"),
        ({"options": {"clip_low": -0.2}}, r"trainer.loss_options: clip_low must be a number from 0 up, got -0.2"),
        ({"options": {"clip_low": "wide"}}, r"trainer.loss_options: clip_low must be a number from 0 up, got 'wide'"),
        ({"old_logp": "behaviour"}, r"trainer.old_logp: use one of \('sampler', 'current', 'interpolated'\)"),
        ({"kl_kind": "k4"}, r"trainer.kl_kind: use one of \('k1', 'k2', 'k3', 'k3_unbiased'\)"),
        ({"kl_coef": -1.0}, "trainer.kl_coef: must be a number from 0 up"),
        ({"loss": "dpo", "kl_coef": 0.1}, "trainer.kl_coef: 'dpo' does not train on a policy's samples; leave it out"),
        ({"loss": "sft", "old_logp": "current"}, "trainer.old_logp: 'sft' does not train on a policy's samples"),
        ({"correction": TIS}, "trainer.correction: .*'tis' would count it twice; set trainer.old_logp to 'current'"),
        ({"correction": {"high": 2.0}}, "trainer.correction: needs a kind"),
        ({"correction": {**TIS, "cap": 2.0}}, r"trainer.correction: \['cap'\] are unknown; its keys are"),
        ({"correction": {"kind": "tos"}}, r"trainer.correction: kind 'tos' is unknown; use one of \['decoupled', "),
        ({"correction": {"kind": "k3", "level": "token"}}, r"trainer.correction: 'k3' has no level 'token'; .*\('sequence',\)"),
        ({"correction": {**TIS, "low": 0.5}}, r"trainer.correction: 'tis' has no bound 'low'; its bounds are \('high',\)"),
        ({"correction": {**TIS, "high": 0.0}}, "trainer.correction: high must be above 0, got 0.0"),
        ({"correction": {"kind": "icepop", "low": 6.0}}, "trainer.correction: low 6.0 is above high 5.0; exchange them"),
    ],
)
def test_mistakes_are_refused(fields: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=f"^{words}"):
        Objective(**{"loss": "grpo", **fields})
