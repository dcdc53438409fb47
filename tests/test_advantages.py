"""Advantages against values computed by hand and against slow, plain sums."""

from collections.abc import Sequence

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest

from rl.advantages import (
    dynamic_sampling,
    gae,
    group_advantages,
    reinforce_pp,
    soft_overlong,
    whiten,
)


def advantages(rewards: Sequence[float | None], groups: list, **options) -> list[float]:
    return group_advantages(rewards, groups, **{"std": "none", "baseline": "mean", **options})[0].tolist()


def test_groups() -> None:
    """C19"""
    assert advantages([1, 0, 1, 0], ["t"] * 4) == [0.5, -0.5, 0.5, -0.5]
    assert advantages([1, 0, 1, 0], ["a", "b", "c", "d"]) == [0, 0, 0, 0]
    # a rejected row does not move its siblings
    values, scored = group_advantages([1, None, 0, float("nan")], ["t"] * 4, std="none", baseline="mean")
    assert values.tolist() == [0.5, 0, -0.5, 0] and scored.tolist() == [True, False, True, False]
    assert values.dtype == np.float32
    # one key in two environments
    groups = [("a", 0), ("b", 0), ("a", 0), ("b", 0)]
    assert advantages([1, 5, 0, 3], groups) == [0.5, 1, -0.5, -1]
    # unscored is not 0: alone with an unscored sibling there is nothing to compare with
    assert advantages([1, None], ["t", "t"]) == [0, 0]


def test_divisors_and_baselines_by_hand() -> None:
    one_of_four = ([1, 0, 0, 0], ["t"] * 4)
    np.testing.assert_allclose(advantages(*one_of_four, std="population"), [1.732051] + [-0.57735] * 3, atol=1e-5)
    np.testing.assert_allclose(advantages(*one_of_four, std="sample"), [1.5] + [-0.5] * 3, atol=1e-5)
    np.testing.assert_allclose(advantages(*one_of_four, baseline="leave_one_out"), [1] + [-1 / 3] * 3, rtol=1e-6)
    assert advantages([1, 1, 1], ["t"] * 3, std="population") == [0, 0, 0]
    # C16: by episode, then spread over segments
    values = np.array(advantages([0, 1, 2, 4], [0, 0, 1, 1]))
    assert values[[0, 1, 1, 1, 2, 2, 3]].tolist() == [-0.5, 0.5, 0.5, 0.5, -1, -1, 1]


def test_mistakes_are_refused() -> None:
    for field, options in [("std", {"std": "yes"}), ("baseline", {"baseline": "median"})]:
        with pytest.raises(ValueError, match=f"^{field}: use one of"):
            advantages([1], ["t"], **options)
    with pytest.raises(ValueError, match=r"^group_ids: "):
        advantages([1], [])
    with pytest.raises(ValueError, match=r"^rewards: "):
        advantages([float("inf")], ["t"])


def test_rloo_by_hand() -> None:
    """Section 7: rewards (1, 0) in a group of two; G / (G - 1) (r - mean) = (1, -1)."""
    assert advantages([1, 0], ["t", "t"], baseline="leave_one_out") == [1, -1]


def test_groups_without_signal() -> None:
    """DAPO's dynamic sampling: a: equal; b: not; c: one scored; d: none. Three of four groups have no signal."""
    rewards = [1, 1, 0, 1, None, 0.5, None, None]
    kept, share = dynamic_sampling(rewards, ["a", "a", "b", "b", "b", "c", "c", "d"])
    assert kept.tolist() == [False, False, True, True, False, False, False, False] and share == 0.75
    # a mean of three .1 is not .1 in floating point; equal is equal all the same
    assert dynamic_sampling([0.1] * 3, ["t"] * 3)[1] == 1
    assert dynamic_sampling([], [])[1] == 0


@pytest.mark.parametrize(("length", "expected"), [(0, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (150, -1)])
def test_soft_overlong_by_hand(length: int, expected: float) -> None:
    """Section 7: L_max 100, L_cache 20, 90 tokens: -.5."""
    np.testing.assert_allclose(soft_overlong(length, 100, 20), expected, rtol=1e-12)
    with pytest.raises(ValueError, match="^cache: must be from 1 to max_length = 100, got 0"):
        soft_overlong(length, 100, 0)


def ragged(*rows: Sequence[float]) -> list[np.ndarray]:
    return [np.array(row, np.float64) for row in rows]


def test_whitening_by_hand() -> None:
    """Values (1, 3) weighing 1, and 5 weighing .5 on two branches: mean 3, variance 8/3 over three tokens."""
    values = ragged([1, np.nan, 3], [5], [np.inf, 5])
    out = whiten(values, ragged([1, 0, 1], [0.5], [0, 0.5]))
    end = 2 / np.sqrt(8 / 3)
    for got, expected in zip(out, ragged([-end, 0, 0], [end], [0, end]), strict=True):
        np.testing.assert_allclose(got, expected, atol=1e-6)
        assert got.dtype == np.float32
    assert not np.concatenate(whiten(ragged([2, 2], [2]), ragged([1, 1], [1]))).any()
    assert [x.tolist() for x in whiten(ragged([1, 2]), ragged([0, 0]))] == [[0, 0]] and whiten([], []) == []


def test_reinforce_pp_by_hand() -> None:
    """R 1 with kl (.1, obs, .3), R 0 with kl .2; beta 1. To go: (1 - .3 - .1, 1 - .3) and -.2; whitened."""
    kl, weights = ragged([0.1, np.nan, 0.3], [0.2]), ragged([1, 0, 1], [1])
    to_go = np.array([0.6, 0.7, -0.2])
    expected = (to_go - to_go.mean()) / to_go.std()
    first, second = reinforce_pp([1, 0], kl, weights, beta=1)
    np.testing.assert_allclose([first[0], first[2], second[0]], expected, rtol=1e-6)
    assert first[1] == 0
    # gamma .6: .6 * .7 - .1 = .32
    to_go = np.array([0.32, 0.7, -0.2])
    first, second = reinforce_pp([1, 0], kl, weights, beta=1, gamma=0.6)
    np.testing.assert_allclose([first[0], first[2], second[0]], (to_go - to_go.mean()) / to_go.std(), rtol=1e-6)


def test_gae_by_hand() -> None:
    """Section 7: V = (.5, .6, .7), r = (0, 0, 1), gamma 1, lambda .95; also with observations, NaN among them, between."""
    got, returns = gae(np.array([0, 0, 1]), np.array([0.5, 0.6, 0.7]), np.ones(3))
    np.testing.assert_allclose(got, [0.46575, 0.385, 0.3], rtol=1e-6)
    np.testing.assert_allclose(returns, [0.96575, 0.985, 1], rtol=1e-6)
    mask = np.array([0, 1, 0, 0, 1, 1, 0])
    values = np.array([np.nan, 0.5, 9, np.nan, 0.6, 0.7, 9])
    gapped = gae(np.array([0, 0, 0, 0, 0, 1, 0]), values, mask)
    for one, whole in zip(gapped, (got, returns), strict=True):
        np.testing.assert_array_equal(one[mask > 0], whole)
        assert not one[mask == 0].any()
    with pytest.raises(ValueError, match=r"^rewards: tokens \[6\] are no actions; put their reward on the action before"):
        gae(np.array([0, 0, 0, 0, 0, 0, 1]), values, mask)


@hypothesis.given(seed=st.integers(0, 2**32 - 1), gamma=st.floats(0, 1), lam=st.floats(0, 1))
def test_gae_is_a_sum_of_errors(seed: int, gamma: float, lam: float) -> None:
    """A_t = sum_k (gamma lam)^k delta_(t+k) over actions; lambda 1: the discounted return less the value."""
    rng = np.random.default_rng(seed)
    mask = rng.integers(0, 2, 9)
    rewards, values = rng.normal(size=9) * mask, rng.normal(size=9)
    r, v = rewards[mask > 0], values[mask > 0]
    delta = r + gamma * np.append(v, 0)[1:] - v
    expected = [sum((gamma * lam) ** k * delta[t + k] for k in range(len(v) - t)) for t in range(len(v))]
    np.testing.assert_allclose(gae(rewards, values, mask, gamma=gamma, lam=lam)[0][mask > 0], expected, atol=1e-5)
    to_go = [sum(gamma**k * r[t + k] for k in range(len(v) - t)) for t in range(len(v))]
    np.testing.assert_allclose(gae(rewards, values, mask, gamma=gamma, lam=1)[1][mask > 0], to_go, atol=1e-5)
