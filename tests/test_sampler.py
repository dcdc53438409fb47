"""The sampler against exact distributions: what is kept, how often each token comes, and the log-probs it reports.

Legend: S rows sampled, V vocab.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from inference.sampler import Warp, _truncate, sample
from inference.types import MAX_STOP_IDS, SamplingParams

V = 32
DRAWS = 60_000
LOGITS_V = np.random.default_rng(0).normal(0, 1.5, V).astype(np.float32)
SAMPLE = jax.jit(sample)


def warp(S: int, **values: Any) -> Warp:
    """Parameters of S rows: scalars are repeated, what is not named is off."""
    defaults = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "seed": np.arange(S)}
    dtypes = {"temperature": np.float32, "top_k": np.int32, "top_p": np.float32, "min_p": np.float32, "seed": np.uint32}
    merged = defaults | values
    return Warp(**{name: np.broadcast_to(np.asarray(merged[name], dtypes[name]), (S,)).copy() for name in dtypes})


def draw(logits: np.ndarray, position: int | np.ndarray, w: Warp) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Ids and both log-probs; `logits` `[V]` are repeated for every row."""
    S = w.seed.shape[0]
    logits_SV = np.broadcast_to(logits, (S, logits.shape[-1]))
    ids, drawn, full = SAMPLE(logits_SV, np.broadcast_to(np.asarray(position, np.int32), (S,)), w)
    return np.asarray(ids), np.asarray(drawn), np.asarray(full)


def exact(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0) -> np.ndarray:
    """Log-probs of the sampling distribution in float64, token by token from the definitions."""
    scaled = logits.astype(np.float64) / temperature
    p = np.exp(scaled - scaled.max())
    p /= p.sum()
    kept = np.ones(len(p), bool)
    for token in range(len(p)):
        likelier = p[p > p[token]]
        if top_k:
            kept[token] &= len(likelier) < top_k
        kept[token] &= top_p == 1 or likelier.sum() < top_p
        kept[token] &= p[token] >= min_p * p.max()
    return np.log(np.where(kept, p, 0) / p[kept].sum(), where=kept, out=np.full(len(p), -np.inf))


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": V},
    {"top_k": 10 * V},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.95, "min_p": 0.02},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_frequencies_and_log_probs_are_exact(settings: dict[str, Any]) -> None:
    """C20: one log-prob is the sampled token's after the warp, the other over the full vocabulary at temperature 1."""
    ids, drawn, full = draw(LOGITS_V, 7, warp(DRAWS, **settings))
    want = exact(LOGITS_V, **settings)
    np.testing.assert_allclose(drawn, want[ids], rtol=0, atol=1e-5)
    np.testing.assert_allclose(full, exact(LOGITS_V)[ids], rtol=0, atol=1e-5)
    kept = np.isfinite(want)
    counts = np.bincount(ids, minlength=V)
    assert not counts[~kept].any(), "a token outside the kept set was drawn"
    if kept.sum() > 1:
        expected = np.exp(want[kept]) * DRAWS
        common = expected >= 5  # chi-square wants no rare cells: the rest count as one
        cells = [np.append(x[common], x[~common].sum()) for x in (counts[kept], expected)]
        observed, expected = (cell if cell[-1] else cell[:-1] for cell in cells)
        assert stats.chisquare(observed, expected * observed.sum() / expected.sum()).pvalue > 1e-3


def test_greedy_takes_the_first_of_the_likeliest_with_log_prob_zero() -> None:
    """A point mass: log-prob 0, whatever else is asked."""
    logits = LOGITS_V.copy()
    logits[20] = logits[11] = logits.max() + 1
    for settings in ({}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.2}):
        ids, drawn, full = draw(logits, 3, warp(64, temperature=0.0, **settings))
        assert (ids == 11).all() and (drawn == 0).all()
        np.testing.assert_allclose(full, exact(logits)[11], atol=1e-5)


def test_tokens_equally_likely_stay_or_go_together() -> None:
    logits = np.zeros(V, np.float32)
    logits[:4] = 2.0
    ids, drawn, _ = draw(logits, 0, warp(4000, top_k=2))
    assert set(ids.tolist()) == {0, 1, 2, 3}
    np.testing.assert_allclose(drawn, np.log(0.25), atol=1e-6)


def test_top_p_off_keeps_what_rounding_would_drop() -> None:
    """The likeliest token's mass rounds to 1; top_p = 1 must still keep all that top-k keeps."""
    logits_SV = np.full((1, V), -18.0, np.float32)
    logits_SV[0, 0] = 0.0
    assert np.isfinite(_truncate(jnp.asarray(logits_SV), warp(1, top_k=V))).all()


def test_a_row_does_not_depend_on_the_others() -> None:
    """Greedy, plain and truncated rows in one batch, against batches of other sizes and each alone (twice). V = 96: a
    plain softmax over 96 has bits that change with the number of rows."""
    rng = np.random.default_rng(1)
    logits_SV = rng.normal(0, 2, (40, 96)).astype(np.float32)
    mixed = warp(
        40,
        temperature=np.tile([0, 1, 0.7, 1, 1.5], 8),
        top_k=np.tile([0, 0, 8, 0, 0, 5, 0, 0], 5),
        top_p=np.tile([1, 1, 1, 0.6, 0.9], 8),
        min_p=np.tile([0, 0, 0, 0, 0, 0, 0.1, 0], 5),
    )
    position_S = rng.integers(0, 1000, 40).astype(np.int32)
    together = [np.asarray(x) for x in SAMPLE(logits_SV, position_S, mixed)]
    for rows in (np.arange(8), np.arange(8, 40), *(np.array([row, row]) for row in range(40))):
        some = SAMPLE(logits_SV[rows], position_S[rows], jax.tree.map(lambda x, rows=rows: x[rows], mixed))
        for a, b in zip(together, some, strict=True):
            assert (a[rows] == np.asarray(b)).all()


def test_noise_is_fixed_by_seed_and_position_alone() -> None:
    flat = np.zeros(V, np.float32)
    ids, _, _ = draw(flat, np.arange(2000), warp(2000, seed=5))
    again, _, _ = draw(flat, np.arange(2000)[::-1], warp(2000, seed=5))
    assert (ids == again[::-1]).all(), "the row counts"
    other, _, _ = draw(flat, np.arange(2000), warp(2000, seed=6))
    assert abs((ids == other).mean() - 1 / V) < 0.02, "two seeds draw alike"
    assert stats.chisquare(np.bincount(ids, minlength=V)).pvalue > 1e-3, "positions of one seed draw alike"
    # the same noise whatever the warp: a token that stays likeliest under noise is drawn again
    noisy = draw(LOGITS_V, 9, warp(500))[0]
    kept = draw(LOGITS_V, 9, warp(500, top_k=V))[0]
    assert (noisy == kept).all()
    largest = draw(flat, 0, warp(4, seed=np.array([0, 1, 2**31, 2**32 - 1])))[0]
    assert largest.shape == (4,)


def test_no_mix_of_parameters_compiles(assert_no_compiles) -> None:
    for settings in ({"temperature": 0.0}, {}):
        draw(LOGITS_V, 0, warp(16, **settings))
    with assert_no_compiles():
        for settings in SETTINGS:
            draw(LOGITS_V, 4, warp(16, **settings))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("max_tokens", 0),
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", float("inf")),
        ("temperature", 1e-30),
        ("top_k", -1),
        ("top_k", 2**31),
        ("top_p", 0.0),
        ("top_p", 1.01),
        ("top_p", float("nan")),
        ("min_p", -0.1),
        ("min_p", 1.5),
        ("seed", -1),
        ("seed", 2**32),
        ("stop_ids", tuple(range(MAX_STOP_IDS + 1))),
        ("stop_ids", (-1,)),
        ("stop_ids", (2**31,)),
    ],
)
def test_wrong_parameters_are_refused_by_name(field: str, value: Any) -> None:
    values: dict[str, Any] = {"max_tokens": 4, field: value}
    with pytest.raises(ValueError, match=f"^{field}: "):
        SamplingParams(**values)
