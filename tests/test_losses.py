"""Losses against values computed by hand, their gradients against differences, and the rules of cutting a batch."""

import textwrap
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import Array

from rl.loss_batch import PER_TOKEN, LossBatch, aggregate, total
from rl.losses import LOSSES, loss
from rl.measures import add_up
from rl.objective import Objective

pytestmark = pytest.mark.plain_code

# two sequences of 2 and 4 tokens; old probabilities .5, ratios (1.2, 1.4) and (.8, 1, .5, 1); advantages +1 and -1
MASK = jnp.array([[1.0, 1, 0, 0], [1, 1, 1, 1]])
OLD = jnp.log(jnp.full((2, 4), 0.5))
NEW = jnp.log(jnp.array([[0.6, 0.7, 0.5, 0.5], [0.4, 0.5, 0.25, 0.5]]))


def make_batch(weights: Any = MASK, **given: Any) -> LossBatch:
    """Every row is an episode, unless said otherwise."""
    weights = jnp.asarray(weights)
    tokens = weights.sum(1)
    fields = {
        "sampler_logp": OLD,
        "advantages": jnp.broadcast_to(jnp.array([[1.0], [-1]]), (2, 4)),
        "sequence_tokens": tokens,
        "num_sequences": (tokens > 0).sum(),
        "num_tokens": tokens.sum(),
        "lag": jnp.zeros(weights.shape, jnp.int32),
        **given,
    }
    return LossBatch(weights=weights, **{name: jnp.asarray(x) for name, x in fields.items()})


CASE = make_batch()
PAIR = make_batch(reference_logp=OLD, pair=[7, 7], chosen=[True, False], num_pairs=1)
TEACHER = make_batch(reference_logp=jnp.log(jnp.full((2, 4), 0.25)))


def run(name: str, logp: Array = NEW, batch: LossBatch = CASE, **options: Any) -> tuple[Array, dict[str, Array]]:
    return LOSSES[name].function(logp, batch, **options)


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("grpo", {}, -0.15),
        ("grpo", {"aggregation": "token_mean"}, 0.2),
        ("grpo", {"aggregation": "token_sum"}, 1.2),  # Tinker's ppo
        ("grpo", {"aggregation": "seq_mean_token_sum"}, 0.6),
        ("grpo", {"aggregation": "seq_mean_token_sum_norm", "scale_length": 4}, 0.15),
        ("ppo", {}, 0.2),
        ("reinforce_pp", {}, 0.2),
        ("dapo", {}, 0.186667),
        ("dapo", {"clip_high": 0.2}, 0.2),
        ("dr_grpo", {"scale_length": 4}, 0.15),
        ("gspo", {}, -0.00035),
        ("gspo", {"clip_low": 0.2, "clip_high": 0.2}, -0.2),
        ("cispo", {"clip_high": 0.28}, -0.290490),
        ("cispo", {"aggregation": "token_sum"}, -1.700138),  # Tinker's, one-sided 0 / 4
        ("importance_sampling", {}, 0.7),
        ("dro", {}, -2.804461),
        ("reinforce", {}, -0.470230),  # sum A log pi = ln(.6 * .7) - ln(.4 * .5 * .25 * .5) = 2.821379, over 6 tokens
        ("rloo", {}, -1.410690),  # over 2 sequences
        # 4 sigmoid(.2), 4 sigmoid(.4) have the mean 2.297044; 4 / 1.05 sigmoid(1.05 (r - 1)) of o2 1.732738; halved difference
        ("sapo", {}, -0.282152),
        # o1: exp of the mean of (.182322, .336472) = 1.296148; o2: of (-.223144, 0, -.4, 0) = .855742
        ("gmpo", {}, -0.220203),
        ("sft", {}, 0.759397),  # -ln(.6 * .7 * .4 * .5 * .25 * .5) / 6
    ],
)
def test_values_by_hand(name: str, options: dict[str, Any], expected: float) -> None:
    np.testing.assert_allclose(run(name, **options)[0], expected, atol=1e-6)


def test_clip_forms_by_hand() -> None:
    """o1's ratio 1.4 is above 1.2, o2's .5 below .8 (A < 0); with A of the other sign, a ratio of 4 is bounded by 3 alone."""
    sums = run("ppo")[1]
    assert (sums["clip_high"], sums["clip_low"], sums["clipped"]) == (1, 1, 2)
    far = make_batch([[1.0]], sampler_logp=[[0.0]], advantages=[[-1.0]])
    logp = jnp.log(jnp.array([[4.0]]))
    np.testing.assert_allclose(run("ppo", logp, far)[0], 4, rtol=1e-6)
    value, sums = run("ppo", logp, far, dual_clip=3.0)
    assert value == 3 and sums["clip_dual"] == sums["clipped"] == 1
    assert not jax.grad(lambda x: run("ppo", x, far, dual_clip=3.0)[0])(logp).any()
    far = replace(far, advantages=-far.advantages)
    np.testing.assert_allclose(run("ppo", logp, far, dual_clip=3.0)[0], -1.2, rtol=1e-6)


def test_gradients_by_hand() -> None:
    """dapo: clipped tokens have none. cispo: sg[clip(r, 0, 1.28)] A / 6, clipped or not. gspo within its clip: s A / T / 2."""

    def gradient(name: str, **options: Any) -> Array:
        return jax.grad(lambda x: run(name, x, **options)[0])(NEW)

    np.testing.assert_allclose(gradient("dapo") * 6, [[-1.2, 0, 0, 0], [0.8, 1, 0, 1]], atol=1e-6)
    expected = [[-0.2, -0.213333, 0, 0], [0.133333, 0.166667, 0.083333, 0.166667]]
    np.testing.assert_allclose(gradient("cispo", clip_high=0.28), expected, atol=1e-6)
    inside = gradient("gspo", clip_low=0.3, clip_high=0.3)
    np.testing.assert_allclose(inside * 2, [[-1.296148 / 2] * 2 + [0] * 2, [0.795271 / 4] * 4], atol=1e-6)
    assert not gradient("gspo").any()


def test_value_loss_by_hand() -> None:
    """One row: V = (1, 2, 0), old (.5, 1.9, 0), returns (2, 1, 0), c = .2.

    (V - R)^2 = (1, 1, 0); clipped V = (.7, 2, 0): (1.69, 1, 0). Half the larger: (.845, .5, 0), mean .448333; the first has
    no gradient. R - V = (1, -1, 0) has the variance 2/3, R 2/3 too: nothing is explained.
    """
    batch = make_batch(jnp.ones((1, 3)), sampler_logp=jnp.zeros((1, 3)), advantages=jnp.zeros((1, 3)))
    batch = replace(batch, old_values=jnp.array([[0.5, 1.9, 0]]), returns=jnp.array([[2.0, 1, 0]]))
    (value, sums), gradient = jax.value_and_grad(lambda v: run("value", v, batch), has_aux=True)(jnp.array([[1.0, 2, 0]]))
    np.testing.assert_allclose(value, 0.448333, atol=1e-6)
    np.testing.assert_allclose(gradient * 3, [[0, 1, 0]], atol=1e-6)
    assert sums["value_clipped"] == 1 and sums["value_error"] == 0 and sums["value_error_squared"] == 2
    np.testing.assert_allclose(run("value", jnp.array([[1.0, 2, 0]]), batch, clip=1e3)[0], 1 / 3, rtol=1e-6)


def test_dpo_by_hand() -> None:
    """chosen ln(1.2 * 1.4) = .518794, rejected ln(.8 * .5) = -.916291: margin .1435085, -log sigmoid .623966."""
    value, sums = run("dpo", NEW, PAIR)
    np.testing.assert_allclose(value, 0.623966, atol=1e-6)
    np.testing.assert_allclose(sums["pair_margin"], 0.1435085, atol=1e-6)
    assert sums["pairs"] == 1 and sums["pair_accuracy"] == 1
    assert run("dpo", NEW, replace(PAIR, chosen=jnp.array([False, True])))[1]["pair_accuracy"] == 0
    # the chosen side in two branches of one token each, and a row of no pair
    rows = [[0, 4, 4, 4], [1, 4, 4, 4], [4, 5, 6, 7], [4, 5, 6, 7]]
    new, old = (x.reshape(-1)[jnp.array(rows)] for x in (NEW, OLD))
    mask = jnp.array([[1.0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]])
    sides = {"pair": [3, 3, 3, -1], "chosen": [True, True, False, True], "num_pairs": 1}
    split = make_batch(mask, sampler_logp=old, advantages=old, reference_logp=old, **sides)
    np.testing.assert_allclose(run("dpo", new, split)[0], value, rtol=1e-6)


def test_distillation_by_hand() -> None:
    """The teacher gives .25 where the sampler gave .5: A = -ln 2 everywhere, the ratios add up to 5.9 of 6 tokens."""
    value, sums = run("distill", NEW, TEACHER)
    np.testing.assert_allclose(value, np.log(2) * 5.9 / 6, rtol=1e-6)
    np.testing.assert_allclose(sums["teacher_kl"], 6 * np.log(2), rtol=1e-6)
    np.testing.assert_allclose(run("distill", NEW, TEACHER, coef=0.5)[0], np.log(2) * 5.9 / 12, rtol=1e-6)


# name -> objective; the stop-gradient of those in FROZEN makes their gradient another than the value's
OBJECTIVES = {
    **{name: Objective(loss=name, options={"scale_length": 4} if name == "dr_grpo" else {}) for name in LOSSES},
    "gspo wide": Objective(loss="gspo", options={"clip_low": 0.3, "clip_high": 0.3}),
    "dual clip": Objective(loss="ppo", options={"dual_clip": 1.2}),
    "tis": Objective(loss="ppo", old_logp="current", correction={"kind": "tis", "level": "sequence"}),
    "decoupled": Objective(loss="ppo", old_logp="interpolated", correction={"kind": "decoupled"}),
    "k3 rejection": Objective(loss="grpo", correction={"kind": "k3", "high": 0.04}),
    **{f"kl {kind}": Objective(loss="grpo", kl_coef=0.5, kl_kind=kind) for kind in ("k1", "k2", "k3", "k3_unbiased")},
}
FROZEN = ("cispo", "tis", "decoupled")
ROWS, LENGTH = 8, 7


def random_batch(seed: int = 0) -> tuple[np.ndarray, LossBatch]:
    """float64; 8 rows of 7 with 1, 5, 2, 0, 4, 3, 3 and 1 trained tokens somewhere, rows 4 and 5 are one episode."""
    rng = np.random.default_rng(seed)
    weights = np.zeros((ROWS, LENGTH))
    for row, count in enumerate([1, 5, 2, 0, 4, 3, 3, 1]):
        weights[row, rng.permutation(LENGTH)[:count]] = 0.5 if row in (4, 5) else 1
    tokens = weights.sum(1)
    tokens[[4, 5]] = tokens[4] + tokens[5]
    old = rng.normal(-2, 1, weights.shape)

    def near(scale: float) -> np.ndarray:
        return old + rng.normal(0, scale, weights.shape)

    fields = {
        "sampler_logp": old,
        "advantages": np.broadcast_to(rng.normal(size=(ROWS, 1)), weights.shape),
        "sequence_tokens": tokens,
        "num_sequences": 6,
        "lag": rng.integers(0, 6, weights.shape),
        "reference_logp": near(0.5),
        "old_values": near(0.2),
        "returns": near(1),
        "pair": [0, 1, 0, -1, 5, 5, -1, 1],
        "chosen": [True, False, False, True, True, False, True, True],
        "num_pairs": 3,
    }
    return near(0.3), make_batch(weights, **fields)


@pytest.fixture
def float64() -> Iterator[None]:
    with jax.enable_x64(True):
        yield


@cache
def all_at_once() -> Callable[..., dict[str, tuple[tuple[Array, dict[str, Array]], Array]]]:
    """One program for all objectives: name -> ((value, sums), gradient)."""
    return jax.jit(lambda logp, batch: {n: jax.value_and_grad(f, has_aux=True)(logp, batch) for n, f in OBJECTIVES.items()})


@pytest.mark.usefixtures("float64")
def test_gradients_equal_differences() -> None:
    """Central differences in float64 along a random direction, at 1e-7 relative."""
    logp, batch = random_batch()
    direction = np.random.default_rng(1).normal(size=logp.shape)
    here, up, down = (all_at_once()(logp + step * direction, batch) for step in (0, 1e-6, -1e-6))
    for name in OBJECTIVES.keys() - FROZEN:
        difference = (up[name][0][0] - down[name][0][0]) / 2e-6
        assert abs(difference) > 1e-6, name
        np.testing.assert_allclose((here[name][1] * direction).sum(), difference, rtol=1e-7, err_msg=name)


def place(logp: np.ndarray, batch: LossBatch, rows: list[int], rng: np.random.Generator) -> tuple[np.ndarray, LossBatch, Any]:
    """Some rows at random places of an 8 x 7 share, their tokens too; NaN (of lag: a large number) everywhere else."""
    where = rng.permutation(ROWS)[: len(rows)][:, None], np.stack([rng.permutation(LENGTH) for _ in rows] or [[0] * LENGTH])

    def moved(x: Any, fill: Any) -> Any:
        out = np.full((ROWS, LENGTH), fill, np.asarray(x).dtype)
        if rows:
            out[where] = np.where(np.asarray(batch.weights)[rows] > 0, np.asarray(x)[rows], fill)
        return out

    row_fields = {"sequence_tokens": 0, "pair": -1, "chosen": False}
    for name, fill in row_fields.items():
        x = np.asarray(getattr(batch, name))
        row_fields[name] = np.full(x.shape, fill, x.dtype)
        row_fields[name][where[0][:, 0]] = x[rows]
    tokens = {n: moved(getattr(batch, n), 99 if n == "lag" else np.nan) for n in PER_TOKEN if getattr(batch, n) is not None}
    return moved(logp, np.nan), replace(batch, weights=moved(batch.weights, 0), **tokens, **row_fields), where


@pytest.mark.usefixtures("float64")
@hypothesis.settings(max_examples=20)
@hypothesis.given(num_cuts=st.sampled_from([1, 2, 4]), seed=st.integers(0, 2**32 - 1))
def test_a_batch_cut_in_pieces_adds_up(num_cuts: int, seed: int) -> None:
    """C14: cuts in 1, 2 or 4, order of rows, padding, NaN at masked places: the same value, gradient and sums (1e-12)."""
    rng = np.random.default_rng(seed)
    logp, batch = random_batch()
    whole = all_at_once()(logp, batch)
    order = np.array_split(rng.permutation(ROWS), num_cuts)
    shares = [place(logp, batch, rows.tolist(), rng) for rows in order]
    parts = [all_at_once()(*share[:2]) for share in shares]
    for name, objective in OBJECTIVES.items():
        if objective.joint and num_cuts > 1:
            continue
        (value, sums), gradient = whole[name]
        np.testing.assert_allclose(sum(part[name][0][0] for part in parts), value, rtol=1e-12, err_msg=name)
        for rows, (_, _, where), part in zip(order, shares, parts, strict=True):
            assert np.isfinite(part[name][1]).all(), name
            np.testing.assert_allclose(part[name][1][where], gradient[rows], rtol=1e-11, atol=1e-14, err_msg=name)
            assert np.abs(part[name][1]).sum() == pytest.approx(np.abs(gradient[rows]).sum(), rel=1e-11), name
        for key, total_ in add_up([part[name][0][1] for part in parts]).items():
            np.testing.assert_allclose(total_, sums[key], rtol=1e-11, atol=1e-13, err_msg=f"{name} {key}")


@pytest.mark.usefixtures("float64")
def test_a_share_without_tokens_is_nothing() -> None:
    logp, batch, _ = place(*random_batch(), [], np.random.default_rng(0))
    for empty in (
        batch,
        replace(batch, **{name: 0 * getattr(batch, name) for name in ("num_tokens", "num_sequences", "num_pairs")}),
    ):
        for name, ((value, sums), gradient) in all_at_once()(logp, empty).items():
            assert value == 0 and not gradient.any(), name
            assert sums["tokens"] == sums["loss"] == 0 and all(np.isfinite(x).all() for k, x in sums.items() if "min_" not in k)


def test_advantages_reach_every_turns_own_tokens() -> None:
    """C17: 3 turns, scalar .7: only trained tokens have it, each of them."""
    mask = jnp.array([[0.0, 0, 1, 1, 1]] * 3)
    zeros = jnp.zeros((3, 5))
    batch = make_batch(mask, sampler_logp=zeros, advantages=jnp.full((3, 5), 0.7))
    np.testing.assert_allclose(jax.grad(lambda x: run("dapo", x, batch)[0])(zeros), -0.7 / 9 * mask, rtol=1e-6)


def test_segments_do_not_inflate_an_episode() -> None:
    """C16: siblings of 2 and 3 tokens are one episode with 5; values 1, 3 | 2, 2, 5 have the mean 13/5."""
    mask = jnp.array([[1.0, 1, 0], [1, 1, 1]])
    values = jnp.array([[1.0, 3, 0], [2, 2, 5]])
    batch = make_batch(mask, sampler_logp=0 * mask, advantages=values, sequence_tokens=[5.0, 5], num_sequences=1)
    for name in ("grpo", "gspo"):
        np.testing.assert_allclose(run(name, 0 * mask, batch)[0], -13 / 5, rtol=1e-6)


def test_a_shared_token_is_trained_once() -> None:
    """C15: a token on 3 branches at weight 1/3 has the gradient of one token, and counts as one."""
    mask = jnp.array([[1 / 3, 1.0]] * 3)
    batch = make_batch(mask, sampler_logp=0 * mask, advantages=jnp.ones((3, 2)))
    np.testing.assert_allclose(batch.num_tokens, 4, rtol=1e-6)

    def of_shared(shared: Array) -> Array:
        logp = jnp.concatenate([jnp.broadcast_to(shared[:, None], (3, 1)), jnp.zeros((3, 1))], axis=1)
        return run("dapo", logp, batch)[0]

    np.testing.assert_allclose(jax.grad(of_shared)(jnp.zeros(1)), [-1 / 4], rtol=1e-6)


@pytest.mark.parametrize("name", [name for name, loss in LOSSES.items() if loss.sampled])
def test_no_ratio_overflows(name: str) -> None:
    for gap in (-200.0, 200.0):
        for advantage in (-1.0, 1.0):
            one = jnp.ones((1, 1))
            batch = make_batch(one, sampler_logp=0 * one, advantages=advantage * one, reference_logp=-one)
            options = {"scale_length": 4} if name == "dr_grpo" else {}
            value, gradient = jax.value_and_grad(lambda x, b=batch, o=options: run(name, x, b, **o)[0])(gap * one)
            assert np.isfinite(value) and np.isfinite(gradient).all()


def test_a_loss_of_ones_own() -> None:
    """The one that CONTRIBUTING.md shows: called through Objective by its name, with a reference KL for nothing."""
    text = (Path(__file__).parent.parent / "CONTRIBUTING.md").read_text()
    code = textwrap.dedent(text[text.index("       @loss()\n") : text.index("       config.trainer.loss")])
    names = {"loss": loss, "aggregate": aggregate, "total": total, "jnp": jnp}
    exec(code, names)
    try:
        objective = Objective(loss="squared_hinge", options={"margin": 0.4})
        value, sums = jax.jit(objective)(jnp.where(MASK > 0, NEW, jnp.nan), CASE)
        np.testing.assert_allclose(value, (np.log(0.6) + 0.4) ** 2 / 6, rtol=1e-5)
        assert sums["short"] == 1 and sums["tokens"] == 6 and sums["loss"] == value
        reference = replace(CASE, reference_logp=OLD)
        with_kl = Objective(loss="squared_hinge", options={"margin": 0.4}, kl_coef=2.0, kl_kind="k2")
        np.testing.assert_allclose(jax.jit(with_kl)(NEW, reference)[0] - value, 2 * 0.056392, atol=1e-6)
        with pytest.raises(ValueError, match="^loss: the name 'squared_hinge' is taken"):
            exec(code, names)
    finally:
        del LOSSES["squared_hinge"]
