"""The sampler against exact distributions: what is kept, how often each token comes, and the log-probs it reports.

Legend: S rows sampled, T tokens of a prompt, V vocab.
"""

import dataclasses
from collections.abc import Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from scipy import stats

from inference.sampler import (
    Sampled,
    Tables,
    Warp,
    _noise,
    count,
    empty_tables,
    empty_warp,
    prompt_log_probs,
    sample,
    set_row,
    table_rows,
    warp_row,
)
from inference.types import MAX_STOP_IDS, MAX_TOP_LOGPROBS, SamplingParams
from models.layers import dot
from models.logprobs import log_prob
from models.numerics import Numerics

V = 96  # a tile and a half
SLOTS = 64
DRAWS = 4000  # of one call; few shapes, because a compile costs more than most tests
LOGITS_V = np.random.default_rng(0).normal(0, 1.5, V).astype(np.float32)
PROMPT, OUTPUT = (1, 5, 5, 7, 40, 90), (5, 6, 6, 6, 41, 91)
EXACT = Numerics(jnp.float32)
SAMPLE, SET_ROW, COUNT = jax.jit(partial(sample, numerics=EXACT)), jax.jit(set_row), jax.jit(count)


def params(**values: Any) -> SamplingParams:
    return SamplingParams(max_tokens=1, **values)


def rows(S: int, p: SamplingParams, seeds: np.ndarray | None = None) -> Warp:
    """S rows with the same parameters, and seeds 0, 1 .. unless others are given."""
    one = empty_warp(1)
    warp_row(one, 0, p)
    warp = jax.tree.map(lambda x: np.repeat(x, S, axis=0), one)
    return dataclasses.replace(warp, seed=np.asarray(np.arange(S) if seeds is None else seeds, np.uint32))


def tables(p: SamplingParams, prompt: Sequence[int] = PROMPT, output: Sequence[int] = OUTPUT, vocab: int = V) -> Tables:
    """Slot 0 is this sequence's; the others hold nonsense."""
    counts, bias = np.full((SLOTS + 1, vocab), 77, np.int32), np.full((SLOTS + 1, vocab), np.nan, np.float32)
    counts[0], bias[0] = table_rows(p, prompt, output, vocab)
    return Tables(counts=counts, bias=bias)


def draw(logits: np.ndarray, p: SamplingParams, position: Any = 7, seeds: np.ndarray | None = None) -> Sampled:
    """DRAWS draws from `logits` `[V]`."""
    S = DRAWS
    logits_SV = np.broadcast_to(logits, (S, logits.shape[-1]))
    position_S = np.broadcast_to(np.asarray(position, np.int32), (S,))
    known = tables(p, vocab=logits.shape[-1])
    return jax.tree.map(np.asarray, SAMPLE(logits_SV, position_S, np.zeros(S, np.int32), rows(S, p, seeds), known))


def kept_set(x: np.ndarray, p: SamplingParams, slack: float = 0) -> np.ndarray:
    """Which tokens top-k, top-p and min-p keep of tempered float64 logits; `slack` moves every edge."""
    mass = np.exp(x - x.max())
    mass /= mass.sum()
    kept = np.isfinite(x)
    for token in range(len(x)):
        likelier = (x > x[token] + slack) & (np.arange(len(x)) != token)
        kept[token] &= not p.top_k or likelier.sum() < p.top_k
        kept[token] &= p.top_p == 1 or mass[likelier].sum() < p.top_p * (1 + slack)
        kept[token] &= mass[token] >= p.min_p * mass.max() * (1 - slack) or x[token] == x.max()
    return kept


def exact(logits: np.ndarray, p: SamplingParams, prompt: Sequence[int] = PROMPT, output: Sequence[int] = OUTPUT) -> np.ndarray:
    """Log-probs of the sampling distribution in float64, token by token from the definitions. NaN where the kept set hangs
    on the sixth digit."""
    x = logits.astype(np.float64)
    for token in range(len(x)):
        if token in prompt or token in output:
            x[token] = x[token] / p.repetition_penalty if x[token] > 0 else x[token] * p.repetition_penalty
        x[token] -= p.presence_penalty * (token in output) + p.frequency_penalty * list(output).count(token)
        x[token] += sum(value for biased, value in p.logit_bias if biased == token)
        if p.allowed_ids is not None and token not in p.allowed_ids:
            x[token] = -np.inf
    if p.temperature == 0:
        return np.where(np.arange(len(x)) == x.argmax(), 0, -np.inf)
    x /= p.temperature
    kept = kept_set(x, p)
    if any((kept_set(x, p, slack) != kept).any() for slack in (-1e-5, 1e-5)):
        return np.full(len(x), np.nan)
    return full_log_probs(np.where(kept, x, -np.inf))


def full_log_probs(logits: np.ndarray) -> np.ndarray:
    """Float64 log-softmax over the last dim."""
    x = logits.astype(np.float64)
    x -= x.max(axis=-1, keepdims=True)
    return x - np.log(np.exp(x).sum(axis=-1, keepdims=True))


def p_value(ids: np.ndarray, log_probs: np.ndarray) -> float:
    """Chi-square; a token that cannot come must not."""
    kept = np.isfinite(log_probs)
    counts = np.bincount(ids, minlength=len(log_probs))
    assert not counts[~kept].any(), "a token outside the kept set was drawn"
    expected = np.exp(log_probs[kept]) * len(ids)
    common = expected >= 5  # chi-square wants no rare cells: they join the rarest of the others
    observed, expected = counts[kept][common], expected[common]
    rarest = expected.argmin()
    observed[rarest] += len(ids) - observed.sum()
    expected[rarest] += len(ids) - expected.sum()
    return stats.chisquare(observed, expected).pvalue if len(observed) > 1 else 1.0


SETTINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6},
    {"temperature": 1.7},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": V},
    {"top_k": 2**31 - 1},
    {"top_p": 0.8},
    {"top_p": 0.05},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.7},
    {"presence_penalty": 1.5},
    {"presence_penalty": -1.5},
    {"frequency_penalty": 0.7},
    {"frequency_penalty": -0.7},
    {"logit_bias": ((3, 2.5), (7, -4.0), (3, 0.5), (95, 3.0))},
    {"allowed_ids": (2, 3, 5, 63, 64, 95)},
    {"allowed_ids": (70,)},
    {"temperature": 0.8, "top_k": 12, "top_p": 0.9},
    {"temperature": 1.3, "top_p": 0.7, "min_p": 0.05},
    {"temperature": 0.9, "top_k": 9, "top_p": 0.95, "min_p": 0.02},
    {"allowed_ids": (2, 3, 5, 41), "top_k": 9, "top_p": 0.9, "temperature": 2.0},
    {"repetition_penalty": 1.4, "presence_penalty": 0.4, "frequency_penalty": 0.3, "logit_bias": ((6, 3.0), (0, -9.0))},
    {
        "temperature": 0.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "repetition_penalty": 1.2, "frequency_penalty": 0.5,
        "logit_bias": ((6, 3.0), (41, 2.0)), "allowed_ids": tuple(range(5, 90)),
    },
]  # fmt: skip


@pytest.mark.parametrize("values", SETTINGS, ids=" ".join)
def test_frequencies_and_log_probs_are_exact(values: dict[str, Any]) -> None:
    """C20: 200,000 draws of each warp and of mixes. One log-prob is the sampled token's after the warp, the other over the
    full vocabulary at temperature 1."""
    p = params(**values)
    drawn = [draw(LOGITS_V, p, position) for position in range(50)]
    ids, logprobs, full = (np.concatenate([getattr(d, n) for d in drawn]) for n in ("ids", "logprobs", "logprobs_full"))
    want = exact(LOGITS_V, p)
    np.testing.assert_allclose(logprobs, want[ids], rtol=0, atol=1e-5)
    np.testing.assert_allclose(full, full_log_probs(LOGITS_V)[ids], rtol=0, atol=1e-5)
    assert p_value(ids, want) > 1e-3


def test_frequencies_over_many_tiles() -> None:
    """200,000 draws from 2,000 tokens in 32 tiles, in which rare tokens stand beside common ones."""
    logits = np.random.default_rng(3).normal(0, 3, 2000).astype(np.float32)
    ids = np.concatenate([draw(logits, params(), position).ids for position in range(50)])
    assert p_value(ids, full_log_probs(logits)) > 1e-3


choices = st.sampled_from


@settings(max_examples=150)
@given(
    data_seed=st.integers(0, 2**32 - 1),
    vocab=choices([2, 96]),
    scale=choices([0.3, 2.0, 8.0]),
    temperature=choices([0.0, 1.0, 1.0, 0.3, 2.5]),
    top_k=choices([0, 0, 1, 2, 10, 500]),
    top_p=choices([1.0, 1.0, 0.99, 0.6, 0.1]),
    min_p=choices([0.0, 0.0, 0.02, 0.5]),
    penalties=choices([(1.0, 0.0, 0.0), (1.3, 0.0, 0.0), (0.8, 0.2, -0.4), (1.0, -1.0, 0.0), (2.0, 0.5, 0.9)]),
    num_biased=choices([0, 0, 3]),
    num_allowed=choices([None, None, 1, 4]),
)
def test_any_parameters(
    data_seed: int,
    vocab: int,
    scale: float,
    num_biased: int,
    num_allowed: int | None,
    penalties: tuple[float, ...],
    **values: Any,
) -> None:
    """Log-probs of 64 draws against the plain float64 reference, and no likely token is missing."""
    rng = np.random.default_rng(data_seed)
    names = ("repetition_penalty", "presence_penalty", "frequency_penalty")
    values |= dict(zip(names, penalties, strict=True))
    values["logit_bias"] = tuple((int(rng.integers(vocab)), float(rng.normal(0, 3))) for _ in range(num_biased))
    if num_allowed:
        values["allowed_ids"] = tuple(rng.integers(0, vocab, num_allowed).tolist())
    p = params(**values)
    logits = rng.normal(0, scale, vocab).astype(np.float32)
    prompt, output = (rng.integers(0, vocab, n).tolist() for n in rng.integers(0, 9, 2))
    want = exact(logits, p, prompt, output)
    assume(not np.isnan(want).any())
    S = SLOTS
    known, slot_S = tables(p, prompt, output, vocab), np.zeros(S, np.int32)
    got = SAMPLE(np.broadcast_to(logits, (S, vocab)), np.full(S, 3, np.int32), slot_S, rows(S, p), known)
    np.testing.assert_allclose(got.logprobs, want[got.ids], rtol=0, atol=1e-5 * max(1, scale / 2))
    likely = np.flatnonzero(want > np.log(0.3))
    assert set(likely) <= set(np.asarray(got.ids).tolist()), "a likely token never came"


def test_greedy_takes_the_first_of_the_likeliest_with_log_prob_zero() -> None:
    """A point mass: log-prob 0, whatever else is asked."""
    logits = LOGITS_V.copy()
    logits[80] = logits[11] = logits[20] = logits.max() + 1
    for values in ({}, {"top_k": 3}, {"top_p": 0.5, "min_p": 0.2}):
        got = draw(logits, params(temperature=0.0, **values))
        assert (got.ids == 11).all() and (got.logprobs == 0).all()
        np.testing.assert_allclose(got.logprobs_full, full_log_probs(logits)[11], atol=1e-5)


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"repetition_penalty": 1.5}, 8),
        ({"presence_penalty": 0.5}, 8),
        ({"frequency_penalty": 0.5}, 8),
        ({"logit_bias": ((70, 9.0),)}, 70),
        ({"allowed_ids": (0, 70)}, 0),
        ({"allowed_ids": (0, 70), "logit_bias": ((70, 0.5),)}, 70),
    ],
    ids=str,
)
def test_greedy_follows_penalties_and_bias(values: dict[str, Any], expected: int) -> None:
    logits = np.zeros(V, np.float32)
    logits[6], logits[8], logits[0] = 3, 2.8, 0.1
    assert (draw(logits, params(temperature=0.0)).ids == 6).all()
    got = draw(logits, params(temperature=0.0, **values))
    assert (got.ids == expected).all() and (got.logprobs == 0).all()


def test_tokens_equally_likely_stay_or_go_together() -> None:
    logits = np.zeros(V, np.float32)
    logits[[0, 30, 64, 95]] = 2.0
    got = draw(logits, params(top_k=2))
    assert set(got.ids.tolist()) == {0, 30, 64, 95}
    np.testing.assert_allclose(got.logprobs, np.log(0.25), atol=1e-6)


def test_top_p_off_keeps_what_rounding_would_drop() -> None:
    """The likeliest token's mass rounds to 1; top_p = 1 must still keep all that top-k keeps."""
    logits = np.full(V, -4.0, np.float32)
    logits[0] = 14.0
    logits = np.where(np.arange(V) == 0, -np.inf, logits).astype(np.float32)  # what is left is far below 0, and flat
    assert len(set(draw(logits, params(top_k=V)).ids.tolist())) == V - 1


def test_the_likeliest_tokens_are_in_order() -> None:
    """Ties go by id, also between tiles. Log-probs 1e-5; entries past a row's wish are zeros."""
    rng = np.random.default_rng(5)
    for vocab in (12, 96, 4160):
        S = SLOTS
        logits_SV = np.round(rng.normal(0, 3, (S, vocab)), 1).astype(np.float32) + 0.0  # no -0
        warp = dataclasses.replace(rows(S, params(temperature=0.5)), top_logprobs=np.arange(S, dtype=np.int32) % 21)
        got = SAMPLE(logits_SV, np.arange(S, dtype=np.int32), np.zeros(S, np.int32), warp, empty_tables(SLOTS, vocab))
        got = jax.tree.map(np.asarray, got)
        order = np.argsort(-logits_SV, axis=-1, kind="stable")[:, :MAX_TOP_LOGPROBS]
        want = np.take_along_axis(full_log_probs(logits_SV), order, axis=-1)
        for row, n in enumerate(warp.top_logprobs):
            there = min(n, vocab)
            np.testing.assert_array_equal(got.top_ids[row, :there], order[row, :there])
            np.testing.assert_allclose(got.top_logprobs[row, :there], want[row, :there], rtol=0, atol=1e-5)
            assert (got.top_logprobs[row, there:n] == -np.inf).all()
            assert not got.top_ids[row, n:].any() and not got.top_logprobs[row, n:].any()


def mixed(vocab: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, Warp, Tables]:
    """64 rows that ask for everything beside rows that ask for nothing."""
    S = SLOTS
    rng = np.random.default_rng(1)
    asks: list[dict[str, Any]] = [{}, {"temperature": 0.0}, {"temperature": 0.7}, {}, *SETTINGS[3:]]
    asks += [{"temperature": 0.0, "frequency_penalty": 1.0}, {"top_logprobs": 20}, {"top_p": 0.9, "top_logprobs": 3}]
    warp, known = empty_warp(S), empty_tables(S, vocab)
    for row in range(S):
        p = params(seed=int(rng.integers(2**32)), **asks[row % len(asks)])
        warp_row(warp, row, p)
        known = SET_ROW(
            known, row, *table_rows(p, rng.integers(0, vocab, 50).tolist(), rng.integers(0, 96, 30).tolist(), vocab)
        )
    logits_SV = rng.normal(0, 3, (S, vocab)).astype(np.float32)
    return logits_SV, rng.integers(0, 1000, S).astype(np.int32), np.arange(S, dtype=np.int32), warp, known


def same(actual: Any, expected: Any) -> None:
    """Bit for bit."""
    for a, b in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(np.asarray(a).view(np.int32), np.asarray(b).view(np.int32))


@pytest.mark.parametrize("vocab", [96, 4160])
def test_a_row_does_not_depend_on_the_others(vocab: int) -> None:
    """64 rows against batches of 8 and 16 of them, rows of a kind, other orders, and each row alone (twice)."""
    S = SLOTS
    *given, warp, known = mixed(vocab)
    together = jax.tree.map(np.asarray, SAMPLE(*given, warp, known))
    easy = (warp.top_k == 0) & (warp.top_p == 1) & (warp.min_p == 0) & ~warp.biased & (warp.repetition_penalty == 1)
    kinds = [np.resize(np.flatnonzero(easy & (warp.temperature == t)), 16) for t in (0, 1)]
    order = np.random.default_rng(2).permutation(S)
    groups = [order, *order.reshape(4, 16), *order.reshape(8, 8), *kinds, *(np.array([row, row]) for row in range(S))]
    for some in groups:
        part = SAMPLE(*(x[some] for x in given), jax.tree.map(lambda x, some=some: x[some], warp), known)
        same(part, jax.tree.map(lambda x, some=some: x[some], together))


def test_log_probs_have_the_bits_of_the_loss() -> None:
    """The function that the trainer scores with, in a program of its own."""
    S, vocab = SLOTS, 4160
    logits_SV = 3 * np.random.default_rng(8).standard_normal((S, vocab), np.float32)
    temperature = np.resize(np.array([1, 0.7, 1.3], np.float32), S)
    warp = dataclasses.replace(rows(S, params()), temperature=temperature)
    got = SAMPLE(logits_SV, np.arange(S, dtype=np.int32), np.zeros(S, np.int32), warp, empty_tables(SLOTS, vocab))
    same(got.logprobs_full, jax.jit(partial(log_prob, numerics=EXACT))(logits_SV, got.ids))
    scored = jax.jit(lambda x, t, ids: log_prob(EXACT.tempered(x, jnp.broadcast_to(t, x.shape)), ids, EXACT))
    for t in (1, 0.7, 1.3):
        some = temperature == np.float32(t)
        same(got.logprobs[some], scored(logits_SV[some], jnp.float32(t), got.ids[some]))


def test_neutral_parameters_change_no_bit() -> None:
    """Full tables beside rows that ask for nothing, in the paths that the last row's wishes open."""
    S = SLOTS
    given = (
        4 * np.random.default_rng(3).standard_normal((S, V), np.float32),
        np.arange(S, dtype=np.int32),
        np.zeros(S, np.int32),
    )
    neutral = rows(S, params())
    plain = SAMPLE(*given, neutral, empty_tables(SLOTS, V))
    same(SAMPLE(*given, neutral, tables(params())), plain)
    asking: list[dict[str, Any]] = [{"frequency_penalty": 1.0}, {"logit_bias": ((3, 1.0),)}, {"top_k": 3}, {"temperature": 2.0}]
    for values in asking:
        warp = jax.tree.map(np.copy, neutral)
        warp_row(warp, S - 1, params(**values))
        got = SAMPLE(*given, warp, tables(params(**values)))
        same(jax.tree.map(lambda x: x[:-1], got), jax.tree.map(lambda x: x[:-1], plain))
    for values in ({"top_k": V}, {"logit_bias": ((3, 0.0),)}, {"allowed_ids": tuple(range(V))}):
        same(SAMPLE(*given, rows(S, params(**values)), tables(params(**values))), plain)


def test_noise_is_fixed_by_seed_and_position_alone() -> None:
    flat = np.zeros(V, np.float32)
    seeds, positions = np.full(DRAWS, 5), np.arange(DRAWS)
    ids = draw(flat, params(), positions, seeds).ids
    again = draw(flat, params(), positions[::-1], seeds).ids
    assert (ids == again[::-1]).all(), "the row counts"
    other = draw(flat, params(), positions, seeds + 1).ids
    assert abs((ids == other).mean() - 1 / V) < 0.01, "two seeds draw alike"
    assert abs((ids[1:] == other[:-1]).mean() - 1 / V) < 0.01, "a seed is another one shifted"
    assert stats.chisquare(np.bincount(ids, minlength=V)).pvalue > 1e-3, "positions of one seed draw alike"
    draw(flat, params(), 0, np.resize([0, 1, 2**31, 2**32 - 1], DRAWS))


def test_noise_is_gumbel_and_independent() -> None:
    """Kolmogorov-Smirnov on 2 million values; neighbouring columns, positions and seeds have no rank correlation (5 sigma)."""
    S, n = 2000, 1000
    by_position = np.asarray(jax.jit(_noise, static_argnums=2)(np.full(S, 9, np.uint32), np.arange(S, dtype=np.int32), n))
    by_seed = np.asarray(jax.jit(_noise, static_argnums=2)(np.arange(S, dtype=np.uint32), np.full(S, 9, np.int32), n))
    for noise in (by_position, by_seed):
        assert stats.kstest(noise.ravel(), stats.gumbel_r.cdf).pvalue > 1e-3
        uniform = np.exp(-np.exp(-noise)) - 0.5
        for a, b in ((uniform[1:], uniform[:-1]), (uniform[:, 1:], uniform[:, :-1])):
            assert abs(12 * (a * b).mean()) < 5 / a.size**0.5


def test_no_mix_of_parameters_compiles(assert_no_compiles) -> None:
    for values in ({"temperature": 0.0}, {}):
        draw(LOGITS_V, params(**values))
    with assert_no_compiles():
        for values in SETTINGS:
            draw(LOGITS_V, params(**values))


def test_counts_follow_what_is_sampled() -> None:
    """Against lists: slots filled and refilled, dead rows, shared padding. A row filled anew equals one that was counted."""
    rng, num_slots = np.random.default_rng(4), 6
    known, p = empty_tables(num_slots, V), params(logit_bias=((3, 1.0),))
    prompts: list[list[int]] = [[] for _ in range(num_slots)]
    outputs: list[list[int]] = [[] for _ in range(num_slots)]
    for step in range(40):
        if step % 5 == 0:
            slot = int(rng.integers(num_slots))
            prompts[slot], outputs[slot] = (rng.integers(0, V, n).tolist() for n in (20, step % 3))
            known = SET_ROW(known, slot, *table_rows(p, prompts[slot], outputs[slot], V))
        slot_S = np.append(rng.permutation(num_slots), [num_slots, num_slots]).astype(np.int32)
        ids_S, live_S = rng.integers(0, V, 8).astype(np.int32), rng.random(8) < 0.7
        known = COUNT(known, slot_S, ids_S, live_S)
        for slot, token, live in zip(slot_S, ids_S, live_S, strict=True):
            if live and slot < num_slots:
                outputs[slot].append(int(token))
    for slot in range(num_slots):
        want = [2 * outputs[slot].count(token) + (token in prompts[slot]) for token in range(V)]
        np.testing.assert_array_equal(known.counts[slot], want)
        np.testing.assert_array_equal(table_rows(p, prompts[slot], outputs[slot], V)[0], want)


def test_table_rows_hold_bias_and_allowed_tokens() -> None:
    _, bias = table_rows(params(logit_bias=((3, 1.5), (3, 1.0), (4, -2.0)), allowed_ids=(3, 5)), (), (), 8)
    np.testing.assert_array_equal(bias, np.array([-np.inf, -np.inf, -np.inf, 2.5, -np.inf, 0, -np.inf, -np.inf], np.float32))
    counts, bias = table_rows(params(), (), (), 8)
    assert (counts.dtype, bias.dtype) == (np.int32, np.float32) and not counts.any() and not bias.any()
    known = SET_ROW(empty_tables(2, 8), 1, counts + 3, bias + 2)
    assert (np.asarray(known.counts) == [[0], [3], [0]]).all() and (np.asarray(known.bias) == [[0], [2], [0]]).all()


@pytest.mark.parametrize("T", [2, 192])
def test_prompt_log_probs_are_the_samplers(T: int) -> None:
    """The bits of `logprobs_full` and the likeliest tokens, wherever the chunks are cut; float64 within 1e-5."""
    rng = np.random.default_rng(6)
    head = jnp.asarray(rng.standard_normal((64, 264), np.float32))
    model: Any = SimpleNamespace(logits=lambda hidden: dot("td,dv->tv", hidden, head, jnp.bfloat16), numerics=EXACT)
    hidden_TD, everything = rng.standard_normal((T, 64), np.float32), np.ones(T, bool)
    function, logits = jax.jit(partial(prompt_log_probs, model)), np.asarray(jax.jit(model.logits)(hidden_TD))
    warp = rows(T, params(top_logprobs=20, temperature=0.8))
    sampled = SAMPLE(logits, np.arange(T, dtype=np.int32), np.zeros(T, np.int32), warp, empty_tables(SLOTS, 264))
    sampled = jax.tree.map(np.asarray, sampled)
    got = jax.tree.map(np.asarray, function(hidden_TD, sampled.ids, everything, np.bool_(True)))
    same(got, (sampled.logprobs_full, sampled.top_ids, sampled.top_logprobs))
    np.testing.assert_allclose(got[0], full_log_probs(logits)[np.arange(T), sampled.ids], rtol=0, atol=1e-5)
    half = T // 2
    part = function(hidden_TD[half:], sampled.ids[half:], everything[half:], np.bool_(True))
    same(part, jax.tree.map(lambda x: x[half:], got))
    wanted = np.arange(T) >= 70
    some = jax.tree.map(np.asarray, function(hidden_TD, sampled.ids, wanted, np.bool_(False)))
    same(some[0][wanted], got[0][wanted])
    assert not some[0][:64].any(), "a chunk without a wanted token was computed"
    assert not some[1].any() and not some[2].any()


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
        ("repetition_penalty", 0.0),
        ("repetition_penalty", float("nan")),
        ("presence_penalty", 101.0),
        ("presence_penalty", float("nan")),
        ("frequency_penalty", -101.0),
        ("logit_bias", ((-1, 0.0),)),
        ("logit_bias", ((2**31, 0.0),)),
        ("logit_bias", ((0, float("-inf")),)),
        ("logit_bias", ((0, float("nan")),)),
        ("allowed_ids", ()),
        ("allowed_ids", (3, -1)),
        ("seed", -1),
        ("seed", 2**32),
        ("stop_ids", tuple(range(MAX_STOP_IDS + 1))),
        ("stop_ids", (-1,)),
        ("stop_ids", (2**31,)),
        ("stop", ("a", "")),
        ("top_logprobs", -1),
        ("top_logprobs", MAX_TOP_LOGPROBS + 1),
    ],
)
def test_wrong_parameters_are_refused_by_name(field: str, value: Any) -> None:
    values: dict[str, Any] = {"max_tokens": 4, field: value}
    with pytest.raises(ValueError, match=f"^{field}: "):
        SamplingParams(**values)
