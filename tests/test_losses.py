"""Losses, advantages and mismatch numbers against values computed by hand, and the rules of cutting a batch."""

from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from rl.advantages import group_advantages
from rl.losses import LOSSES, Totals, count_totals, dapo, dr_grpo, grpo, mismatch, sft

# two sequences of 2 and 4 tokens; old probabilities .5, ratios (1.2, 1.4) and (.8, 1, .5, 1); advantages +1 and -1
MASK = jnp.array([[1.0, 1, 0, 0], [1, 1, 1, 1]])
OLD = jnp.log(jnp.full((2, 4), 0.5))
NEW = jnp.log(jnp.array([[0.6, 0.7, 0.5, 0.5], [0.4, 0.5, 0.25, 0.5]]))
ADVANTAGES = jnp.array([1.0, -1.0])
ALL = {**LOSSES, "dr_grpo": partial(dr_grpo, scale_length=4)}


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (grpo, -0.15),
        (dapo, 0.186667),
        (partial(dapo, clip_high=0.2), 0.2),
        (partial(dr_grpo, scale_length=4), 0.15),
        (sft, -np.log([0.6, 0.7, 0.4, 0.5, 0.25, 0.5]).mean()),
    ],
)
def test_values_by_hand(loss, expected: float) -> None:
    value, sums = loss(NEW, OLD, ADVANTAGES, MASK, count_totals(MASK))
    np.testing.assert_allclose(value, expected, atol=1e-6)
    assert sums["tokens"] == 6


def test_clipped_tokens_are_counted_and_have_no_gradient() -> None:
    """dapo: ratio 1.4 > 1.28 is clipped up, .5 < .8 down (A < 0); 1.2 and .8 are inside. dLoss/dlogp = -r A / 6."""
    (_, sums), gradient = jax.value_and_grad(dapo, has_aux=True)(NEW, OLD, ADVANTAGES, MASK, count_totals(MASK))
    np.testing.assert_allclose(gradient * 6, [[-1.2, 0, 0, 0], [0.8, 1, 0, 1]], atol=1e-6)
    assert sums["clipped"] == 2
    np.testing.assert_allclose(sums["ratio"], 5.9, rtol=1e-6)


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("num_cuts", [1, 2, 4])
def test_a_batch_cut_in_pieces_adds_up(name: str, num_cuts: int) -> None:
    """C14: 8 uneven rows in 1, 2 or 4 micro-batches: the same loss and gradient; one row is fully masked."""
    with jax.enable_x64(True):
        rng = np.random.default_rng(0)
        old = rng.normal(-2, 1, (8, 5))
        new = old + rng.normal(0, 0.3, (8, 5))
        advantages = rng.normal(size=8)
        mask = (np.arange(5)[None] < np.array([[1], [5], [2], [0], [4], [3], [3], [1]])).astype(np.float64)
        totals = count_totals(jnp.array(mask))
        assert (totals.num_sequences, totals.num_tokens) == (7, 19)
        grad = jax.jit(jax.value_and_grad(ALL[name], has_aux=True))
        (whole, whole_sums), whole_gradient = grad(new, old, advantages, mask, totals)
        parts = [grad(*(x[c] for x in (new, old, advantages, mask)), totals) for c in np.split(np.arange(8), num_cuts)]
        np.testing.assert_allclose(sum(value for (value, _), _ in parts), whole, rtol=1e-12)
        np.testing.assert_allclose(np.concatenate([gradient for _, gradient in parts]), whole_gradient, rtol=1e-12)
        for key, value in whole_sums.items():
            np.testing.assert_allclose(sum(sums[key] for (_, sums), _ in parts), value, rtol=1e-12)
        assert np.abs(whole_gradient).sum() > 0 and not np.any(np.asarray(whole_gradient)[3])


@pytest.mark.parametrize("name", ALL)
def test_nan_at_masked_places_changes_nothing(name: str) -> None:
    grad = jax.jit(jax.value_and_grad(ALL[name], has_aux=True))
    totals = count_totals(MASK)
    advantages = jnp.broadcast_to(ADVANTAGES[:, None], MASK.shape)
    dirty = [jnp.where(MASK > 0, x, jnp.nan) for x in (NEW, OLD, advantages)]
    (clean, sums), gradient = grad(NEW, OLD, advantages, MASK, totals)
    (value, dirty_sums), dirty_gradient = grad(*dirty, MASK, totals)
    assert value == clean and sums == dirty_sums
    np.testing.assert_array_equal(gradient, dirty_gradient)
    empty = jnp.zeros_like(MASK)
    (value, _), gradient = grad(*[jnp.full_like(MASK, jnp.nan)] * 3, empty, count_totals(empty))
    assert value == 0 and not np.any(gradient)


def test_advantages_reach_every_turns_own_tokens() -> None:
    """C17: 3 turns, scalar .7; [N] and [N, L] say the same, and only masked tokens count."""
    mask = jnp.array([[0.0, 0, 1, 1, 1]] * 3)
    zeros = jnp.zeros((3, 5))
    per_row = jax.grad(lambda x: dapo(x, zeros, jnp.full(3, 0.7), mask, count_totals(mask))[0])(zeros)
    per_token = jax.grad(lambda x: dapo(x, zeros, jnp.full((3, 5), 0.7), mask, count_totals(mask))[0])(zeros)
    np.testing.assert_allclose(per_row, -0.7 / 9 * mask, rtol=1e-6)
    np.testing.assert_array_equal(per_row, per_token)


def test_segments_do_not_inflate_an_episode() -> None:
    """C16: siblings of 2 and 3 tokens are one episode with 5; values 1, 3 | 2, 2, 5 have the mean 13/5."""
    mask = jnp.array([[1.0, 1, 0], [1, 1, 1]])
    values = jnp.array([[1.0, 3, 0], [2, 2, 5]])
    zeros = jnp.zeros((2, 3))
    loss, _ = grpo(zeros, zeros, values, mask, Totals(1, 5, jnp.array([5.0, 5.0])))
    np.testing.assert_allclose(loss, -13 / 5, rtol=1e-6)


def test_a_shared_token_is_trained_once() -> None:
    """C15: a token on 3 branches at weight 1/3 has the gradient of one token, and counts as one."""
    third = 1 / 3
    mask = jnp.array([[third, 1.0], [third, 1.0], [third, 1.0]])
    totals = count_totals(mask)
    np.testing.assert_allclose(totals.num_tokens, 4, rtol=1e-6)
    shared = jnp.zeros(1)

    def loss(shared: jax.Array) -> jax.Array:
        logp = jnp.concatenate([jnp.broadcast_to(shared[:, None], (3, 1)), jnp.zeros((3, 1))], axis=1)
        return dapo(logp, jnp.zeros((3, 2)), jnp.ones(3), mask, totals)[0]

    np.testing.assert_allclose(jax.grad(loss)(shared), [-1 / 4], rtol=1e-6)


def test_no_ratio_overflows() -> None:
    for gap in (-200.0, 200.0):
        for advantage in (-1.0, 1.0):
            args = (jnp.zeros((1, 1)), jnp.array([advantage]), jnp.ones((1, 1)), Totals(1, 1))
            gradient = jax.grad(lambda x, args=args: grpo(x, *args)[0])(jnp.full((1, 1), gap))
            assert np.isfinite(gradient).all()


def test_mismatch_by_hand() -> None:
    sums = jax.jit(mismatch)(jnp.where(MASK > 0, NEW, jnp.nan), OLD, MASK)
    tokens = sums["tokens"]
    for name, expected in [("k1", 0.066249), ("k2", 0.056392), ("k3", 0.049583), ("ratio_squared", 1.048333)]:
        np.testing.assert_allclose(sums[name] / tokens, expected, atol=1e-6)
    np.testing.assert_allclose(sums["ratio"] ** 2 / (tokens * sums["ratio_squared"]), 0.922364, atol=1e-6)
    np.testing.assert_allclose(sums["max_ratio"], 1.4, rtol=1e-6)
    np.testing.assert_allclose(sums["max_abs_gap"], 0.693147, rtol=1e-6)
    same = mismatch(NEW, NEW, MASK)
    assert same["max_abs_gap"] == 0 and same["k3"] == 0


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
