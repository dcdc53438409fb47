"""Mismatch numbers against values computed by hand and against plain numpy; sums over shares."""

from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.loss_batch import LossBatch
from rl.measures import FACTORS, add_up, finish, mismatch

MASK = np.array([[1.0, 1, 0, 0], [1, 1, 1, 1]])
OLD = np.log(np.full((2, 4), 0.5))
NEW = np.log(np.array([[0.6, 0.7, 0.5, 0.5], [0.4, 0.5, 0.25, 0.5]]))
COMPILED = jax.jit(mismatch)


def batch_of(weights: Any, sampler_logp: Any, lag: Any = None) -> LossBatch:
    """What mismatch reads; the rest is empty."""
    weights = jnp.asarray(weights, jnp.float32)
    zero = jnp.zeros_like(weights)
    return LossBatch(
        weights=weights,
        sampler_logp=jnp.asarray(sampler_logp, jnp.float32),
        advantages=zero,
        sequence_tokens=weights.sum(1),
        num_sequences=jnp.array(0.0),
        num_tokens=weights.sum(),
        lag=zero.astype(jnp.int32) if lag is None else jnp.asarray(lag, jnp.int32),
    )


def measure(logp: Any, batch: LossBatch) -> dict[str, float]:
    return finish(add_up([jax.device_get(COMPILED(jnp.asarray(logp, jnp.float32), batch))]))


def test_mismatch_by_hand() -> None:
    """Section 6.1's six tokens: log rho = (.182322, .336472, -.223144, 0, -.693147, 0)."""
    result = measure(np.where(MASK > 0, NEW, np.nan), batch_of(MASK, np.where(MASK > 0, OLD, np.inf)))
    expected = {
        "tokens": 6,
        "k1": 0.066249,
        "k2": 0.056392,
        "k3": 0.049583,
        "chi2": 0.048333,
        "ess": 0.922364,
        "max_ratio": 1.4,
    }
    expected |= {"ratio": 5.9 / 6, "abs_gap": 1.435085 / 6, "abs_gap_p99": 0.693147, "max_abs_gap": 0.693147}
    expected |= {"max_rho_geo": 1.296148, "min_rho_geo": 0.795271, "lag_mean": 0, "lag_max": 0}
    for name, value in expected.items():
        np.testing.assert_allclose(result[name], value, atol=1e-6, err_msg=name)
        if not name.startswith("lag"):
            assert result[f"lag_0/{name}"] == result[name]
    assert not any(name.startswith(("lag_1", "lag_2", "lag_4")) for name in result)


def test_extreme_tokens() -> None:
    """max(rho, 1 / rho) of (1.2, 1.5, .4, 3, .2, 1): F(1.25) = 4/6, F(2) = 3/6, F(4) = 1/6."""
    batch = batch_of(np.ones((1, 6)), np.zeros((1, 6)))
    result = measure(np.log([[1.2, 1.5, 0.4, 3, 0.2, 1]]), batch)
    assert [result[f"f_{tau:g}"] for tau in FACTORS] == [4 / 6, 3 / 6, 1 / 6]


def test_equal_policies_have_no_mismatch() -> None:
    result = measure(NEW, batch_of(MASK, NEW))
    zero = ("k1", "k2", "k3", "abs_gap", "abs_gap_p99", "max_abs_gap", "f_1.25", "chi2")
    assert all(result[name] == 0 for name in zero) and result["ess"] == result["max_ratio"] == result["min_rho_geo"] == 1


def test_lag_buckets() -> None:
    """Lags 0, 1 | 2, 3, 4, 9: each bucket has its own tokens; a bucket without tokens is not there."""
    lag = np.array([[0, 1, 0, 0], [2, 3, 4, 9]])
    result = measure(NEW, batch_of(MASK, OLD, lag))
    assert [result[f"{bucket}/tokens"] for bucket in ("lag_0", "lag_1", "lag_2-3", "lag_4+")] == [1, 1, 2, 2]
    gaps = [result[f"{bucket}/abs_gap"] for bucket in ("lag_0", "lag_1", "lag_2-3", "lag_4+")]
    np.testing.assert_allclose(gaps, [0.182322, 0.336472, 0.223144 / 2, 0.693147 / 2], atol=1e-6)
    np.testing.assert_allclose(result["lag_2-3/min_rho_geo"], 0.8**0.5, rtol=1e-6)
    assert result["lag_mean"] == 19 / 6 and result["lag_max"] == 9
    masked = measure(NEW, batch_of(MASK * (lag < 2), OLD, np.where(lag < 2, lag, 77)))
    assert masked["lag_max"] == 1 and not any(name.startswith(("lag_2", "lag_4")) for name in masked)


@hypothesis.settings(max_examples=25)
@hypothesis.given(scale=st.floats(-9, 1.2), seed=st.integers(0, 2**32 - 1))
def test_percentile_is_at_most_a_bin_too_high(scale: float, seed: int) -> None:
    """J26: the 99th percentile of |log rho| within 6 % above numpy's, over ten decades; below 1e-8 it is 0."""
    rng = np.random.default_rng(seed)
    gaps = (10**scale * np.exp(rng.normal(size=(8, 64)))).astype(np.float32)
    result = measure(gaps * rng.choice([-1, 1], gaps.shape), batch_of(np.ones(gaps.shape), np.zeros(gaps.shape)))
    exact = float(np.quantile(gaps, 0.99, method="inverted_cdf"))
    if exact < 0.99e-8:
        assert result["abs_gap_p99"] == 0
    else:
        assert exact * 0.9999 <= result["abs_gap_p99"] <= exact * 1.0595


@hypothesis.settings(max_examples=25)
@hypothesis.given(seed=st.integers(0, 2**32 - 1))
def test_shares_add_up(seed: int) -> None:
    """J26: rows in any order over 4 shares, one of them fully masked, give the numbers of the whole batch."""
    rng = np.random.default_rng(seed)
    weights = rng.choice([0, 0.5, 1], (8, 4))
    weights[:2] = 0
    weights[7] = 1
    logp, old, lag = rng.normal(-2, 1, (8, 4)), rng.normal(-2, 1, (8, 4)), rng.integers(0, 6, (8, 4))
    whole = measure(logp, batch_of(weights, old, lag))
    order = [[0, 1], *np.split(rng.permutation(np.arange(2, 8)), 3)]
    parts = [COMPILED(jnp.asarray(logp[rows], jnp.float32), batch_of(weights[rows], old[rows], lag[rows])) for rows in order]
    shared = finish(add_up(jax.device_get(parts)))
    assert shared.keys() == whole.keys()
    for name, value in whole.items():
        np.testing.assert_allclose(shared[name], value, rtol=1e-5, atol=1e-5, err_msg=name)
    np.testing.assert_allclose(whole["tokens"], weights.sum())


def test_a_truncated_sampler_shows_in_the_mean_ratio() -> None:
    """C21: sampled from the kept mass .896 and renormalised, but trained on the full vocabulary: the mean ratio is .896."""
    p = np.array([0.5, 0.296, 0.1, 0.104])
    kept = np.array([0, 1, 2])
    ids = np.random.default_rng(0).choice(kept, p=p[kept] / p[kept].sum(), size=(4, 50))
    batch = batch_of(np.ones(ids.shape), np.log(p[ids] / p[kept].sum()))
    np.testing.assert_allclose(measure(np.log(p[ids]), batch)["ratio"], 0.896, rtol=1e-5)
    np.testing.assert_allclose(measure(np.log(p[ids] / p[kept].sum()), batch)["ratio"], 1, rtol=1e-6)


def test_an_empty_batch_is_finite() -> None:
    result = measure(np.full((2, 4), np.nan), batch_of(0 * MASK, OLD))
    assert result["tokens"] == result["ess"] == result["chi2"] == result["abs_gap_p99"] == 0
    assert all(np.isfinite(value) for value in result.values())


def test_finish_divides_by_what_the_name_says() -> None:
    sums = {"tokens": 4.0, "loss": 3.0, "nll": 8.0, "pairs": 2.0, "pair_margin": 1.0, "max_lag": 5.0, "lag": 6.0}
    assert finish(sums) == {"tokens": 4, "loss": 3, "nll": 2, "pairs": 2, "pair_margin": 0.5, "lag_mean": 1.5, "lag_max": 5}


@pytest.mark.parametrize(("offset", "expected"), [(0.0, 1.0), (1.0, 1.0), (None, 0.0)])
def test_explained_variance(offset: float | None, expected: float) -> None:
    """Values equal to the returns up to a constant explain all; a constant explains nothing."""
    returns = np.array([1.0, 2, 4, 9])
    error = returns if offset is None else np.full(4, offset)
    sums = {"return": returns, "return_squared": returns**2, "value_error": error, "value_error_squared": error**2}
    result = finish({"tokens": 4.0, **{name: x.sum() for name, x in sums.items()}})
    np.testing.assert_allclose(result["explained_variance"], expected, atol=1e-12)
    assert result["return"] == 4
    flat = {"tokens": 1.0, "return": 2.0, "return_squared": 4.0, "value_error": 1.0, "value_error_squared": 1.0}
    assert "explained_variance" not in finish(flat)
