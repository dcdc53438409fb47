"""From logits to tokens, on the device.

Legend: S rows sampled, T tokens of a prompt, D model, V vocab, N tiles of the vocab.

A token is drawn in two steps: a tile of TILE neighbouring tokens by its weight, then a token of the tile. Both are the arg
max of log-weights plus Gumbel noise, so the choice has exactly the warped distribution (Maddison et al., arXiv 1411.0030),
and a row needs N + TILE values of noise instead of V. Noise depends on (request seed, position) alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from inference.types import MAX_TOP_LOGPROBS, SamplingParams
from models.attention import Array
from models.logprobs import Tiles, likeliest, tiles
from models.numerics import Numerics
from models.transformer import Transformer
from sharding.vocabulary import TILE

PROMPT_CHUNK = 64
"""tokens of a prompt whose logits are held at once"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Warp:
    """Sampling parameters of S rows (`inference.types.SamplingParams`), as arrays so that no mix of them compiles anything."""

    temperature: Array
    """float32 [S]; 0 is greedy"""
    top_k: Array
    """int32 [S]; 0 is off"""
    top_p: Array
    """float32 [S]"""
    min_p: Array
    """float32 [S]"""
    repetition_penalty: Array
    """float32 [S]"""
    presence_penalty: Array
    """float32 [S]"""
    frequency_penalty: Array
    """float32 [S]"""
    biased: Array
    """bool [S]: the bias of the row's slot counts"""
    top_logprobs: Array
    """int32 [S]: likeliest tokens wanted"""
    seed: Array
    """uint32 [S]"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Tables:
    """What slots remember of their sequences. The last row is for padding."""

    counts: Array
    """int32 [slots + 1, V]: twice the times that a token was sampled, plus 1 if it is in the prompt"""
    bias: Array
    """float32 [slots + 1, V]: added to logits; -inf where a token is not allowed"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Sampled:
    ids: jax.Array
    """int32 [S]"""
    logprobs: jax.Array
    """float32 [S], under the sampling distribution; 0 where greedy"""
    logprobs_full: jax.Array
    """float32 [S], under the full vocabulary at temperature 1"""
    top_ids: jax.Array
    """int32 [S, MAX_TOP_LOGPROBS]: the likeliest, in order, equals by id; past the row's `top_logprobs` nothing but zeros"""
    top_logprobs: jax.Array
    """float32 [S, MAX_TOP_LOGPROBS], under the full vocabulary at temperature 1"""


def empty_warp(num_rows: int) -> Warp:
    """Host side: greedy rows, to be filled by `warp_row`."""
    dtypes = {"top_k": np.int32, "biased": np.bool_, "top_logprobs": np.int32, "seed": np.uint32}
    greedy = SamplingParams(max_tokens=1, temperature=0)
    names = Warp.__dataclass_fields__
    return Warp(**{name: np.full(num_rows, getattr(greedy, name), dtypes.get(name, np.float32)) for name in names})


def warp_row(warp: Warp, row: int, params: SamplingParams) -> None:
    """Host side: one row's parameters."""
    for name, values in vars(warp).items():
        values[row] = getattr(params, name)


def table_rows(
    params: SamplingParams, prompt_ids: Sequence[int], sampled_ids: Sequence[int], vocab_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Host side: a slot's rows of `Tables.counts` and `Tables.bias`. All ids are below `vocab_size`."""
    counts = np.zeros(vocab_size, np.int32)
    np.add.at(counts, np.asarray(sampled_ids, np.int64), 2)
    counts[np.asarray(prompt_ids, np.int64)] += 1  # once, however often it is there
    bias = np.full(vocab_size, 0 if params.allowed_ids is None else -np.inf, np.float32)
    if params.allowed_ids is not None:
        bias[np.asarray(params.allowed_ids)] = 0
    for token, value in params.logit_bias:
        bias[token] += value
    return counts, bias


def empty_tables(num_slots: int, vocab_size: int) -> Tables:
    shape = (num_slots + 1, vocab_size)
    return Tables(counts=jnp.zeros(shape, jnp.int32), bias=jnp.zeros(shape, jnp.float32))


def set_row(tables: Tables, slot: jax.Array, counts_V: jax.Array, bias_V: jax.Array) -> Tables:
    """A slot's rows, as `table_rows` makes them."""
    return Tables(counts=tables.counts.at[slot].set(counts_V), bias=tables.bias.at[slot].set(bias_V))


def count(tables: Tables, slot_S: jax.Array, ids_S: jax.Array, live_S: jax.Array) -> Tables:
    """The tables after the live rows have sampled `ids`."""
    slot_S = jnp.where(live_S, slot_S, tables.counts.shape[0] - 1)
    return Tables(counts=tables.counts.at[slot_S, ids_S].add(2), bias=tables.bias)


def _column(x_S: Array, like_SV: jax.Array) -> jax.Array:
    return jnp.broadcast_to(x_S[:, None], like_SV.shape)


def _rounded(x: jax.Array) -> jax.Array:
    """A product without its last bit: some programs would contract it with the sum after it (models/README.md)."""
    return jax.lax.reduce_precision(x, 8, 22)


def _penalise(logits_SV: jax.Array, slot_S: jax.Array, warp: Warp, tables: Tables) -> jax.Array:
    counts = jnp.take(tables.counts, slot_S, axis=0, mode="clip")
    factor = _column(warp.repetition_penalty, logits_SV)
    repeated = _rounded(logits_SV * jnp.where(logits_SV > 0, 1 / factor, factor))
    logits_SV = jnp.where((counts > 0) & (factor != 1), repeated, logits_SV)
    times = counts // 2
    penalty = _column(warp.presence_penalty, logits_SV) + _rounded(_column(warp.frequency_penalty, logits_SV) * times)
    return jnp.where(times > 0, logits_SV - penalty, logits_SV)


def _bias(logits_SV: jax.Array, slot_S: jax.Array, warp: Warp, tables: Tables) -> jax.Array:
    bias = jnp.take(tables.bias, slot_S, axis=0, mode="clip")
    return jnp.where(_column(warp.biased, logits_SV), logits_SV + bias, logits_SV)


def _sortable(x: jax.Array) -> jax.Array:
    """Bits of a float32 <-> int32 in the same order."""
    return jnp.where(x < 0, x ^ 0x7FFFFFFF, x)


def _halved_sum(x_SV: jax.Array, numerics: Numerics) -> jax.Array:
    """Sum over rows of values that are no products: elementwise sums of halves have no order that a compiler could change."""
    while x_SV.shape[-1] % 2 == 0 and x_SV.shape[-1] > TILE:
        half = x_SV.shape[-1] // 2
        x_SV = x_SV[:, :half] + x_SV[:, half:]
    return numerics.row_sum(x_SV)


def _edge(logits_SV: jax.Array, measure: jax.Array, limit_S: jax.Array, numerics: Numerics) -> jax.Array:
    """A number [S] between two logits: above it are all tokens whose likelier tokens measure less than the limit in sum.

    Bisection of the 2^32 floats. What it finds are facts about a row's sums, so a row's result is its own.
    """

    def halve(_: int, between: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        low, high = between
        middle = (low & high) + ((low ^ high) >> 1)  # their mean, which cannot overflow
        at = jax.lax.bitcast_convert_type(_sortable(middle), jnp.float32)
        kept = _halved_sum(jnp.where(logits_SV > _column(at, logits_SV), measure, 0), numerics) < limit_S
        return jnp.where(kept, low, middle), jnp.where(kept, middle, high)

    top = _sortable(jax.lax.bitcast_convert_type(logits_SV.max(axis=-1), jnp.int32))
    bottom = _sortable(jax.lax.bitcast_convert_type(jnp.full_like(logits_SV[:, 0], -jnp.inf), jnp.int32))
    low, _ = jax.lax.fori_loop(0, 32, halve, (bottom, top))
    return jax.lax.bitcast_convert_type(_sortable(low), jnp.float32)


def _truncate(logits_SV: jax.Array, warp: Warp, numerics: Numerics) -> jax.Array:
    """-inf outside the kept set of top-k, top-p and min-p, all of the same softmax."""
    weight = numerics.exp_from(logits_SV, logits_SV.max(axis=-1, keepdims=True))
    everything = jnp.full_like(logits_SV[:, 0], -jnp.inf)

    def by_rank() -> jax.Array:
        return _edge(logits_SV, jnp.ones_like(weight), jnp.asarray(warp.top_k).astype(jnp.float32), numerics)

    def by_mass() -> jax.Array:
        return _edge(logits_SV, weight, warp.top_p * numerics.row_sum(weight), numerics)

    edges = [
        jnp.where(on, jax.lax.cond(on.any(), edge, lambda: everything), everything)
        for on, edge in ((jnp.asarray(warp.top_k > 0), by_rank), (jnp.asarray(warp.top_p < 1), by_mass))
    ]
    kept = logits_SV > _column(jnp.maximum(*edges), logits_SV)
    return jnp.where(kept & (weight >= _column(warp.min_p, weight)), logits_SV, -jnp.inf)


def _noise(seed_S: Array, position_S: jax.Array, n: int) -> jax.Array:
    """Gumbel noise [S, n], from 64 random bits a value: unlikely tokens come as often as they should."""
    keys = jax.vmap(lambda seed, position: jax.random.fold_in(jax.random.key(seed), position))(seed_S, position_S)
    return jax.vmap(lambda key: jax.random.gumbel(key, (n,), jnp.float32, mode="high"))(keys)


def _draw(logits_SV: jax.Array, parts: Tiles, noise: jax.Array, greedy_S: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Ids [S] and their log-probs: by noise, or the first of the likeliest."""
    V, N = logits_SV.shape[-1], parts.tops_TN.shape[-1]
    score = jnp.log(parts.weights_TN) + noise[:, :N]
    tile = jnp.argmax(jnp.where(_column(greedy_S, score), parts.tops_TN, score), axis=-1)
    ids = tile[:, None].astype(jnp.int32) * TILE + jnp.arange(TILE, dtype=jnp.int32)[None]
    logits = jnp.take_along_axis(logits_SV, jnp.minimum(ids, V - 1), axis=-1)
    logits = jnp.where(ids < V, logits, -jnp.inf)
    score = logits - parts.top_T1 + noise[:, N:]
    place = jnp.argmax(jnp.where(_column(greedy_S, score), logits, score), axis=-1)[:, None]
    chosen = parts.log_probs(jnp.take_along_axis(logits, place, axis=-1))[:, 0]
    return jnp.take_along_axis(ids, place, axis=-1)[:, 0], jnp.where(greedy_S, 0.0, chosen)


def sample(
    logits_SV: jax.Array, position_S: jax.Array, slot_S: jax.Array, warp: Warp, tables: Tables, numerics: Numerics
) -> Sampled:
    """Next tokens of S rows. Penalties, bias, temperature and truncation cost nothing where no row asks for them.

    Args:
        position_S: place that each sampled token will take in its sequence.
        slot_S: the row of the tables that is each sequence's.
    """
    greedy = jnp.asarray(warp.temperature == 0)
    temperature = jnp.where(greedy, 1.0, warp.temperature)
    penalised = (warp.repetition_penalty != 1) | (warp.presence_penalty != 0) | (warp.frequency_penalty != 0)
    truncated = ~greedy & ((warp.top_k > 0) | (warp.top_p < 1) | (warp.min_p > 0))
    raw = tiles(logits_SV, numerics)
    n = raw.tops_TN.shape[-1] + TILE
    noise = jax.lax.cond(
        greedy.all(), lambda: jnp.zeros((len(greedy), n), jnp.float32), lambda: _noise(warp.seed, position_S, n)
    )

    def warped() -> tuple[jax.Array, jax.Array]:
        x = logits_SV
        x = jax.lax.cond(penalised.any(), lambda x: _penalise(x, slot_S, warp, tables), lambda x: x, x)
        x = jax.lax.cond(warp.biased.any(), lambda x: _bias(x, slot_S, warp, tables), lambda x: x, x)
        x = numerics.tempered(x, _column(temperature, x))
        x = jax.lax.cond(truncated.any(), lambda x: _truncate(x, warp, numerics), lambda x: x, x)
        return _draw(x, tiles(x, numerics), noise, greedy)

    asks = penalised | warp.biased | truncated | (temperature != 1)
    ids, logprobs = jax.lax.cond(asks.any(), warped, lambda: _draw(logits_SV, raw, noise, greedy))
    full = raw.log_probs(jnp.take_along_axis(logits_SV, ids[:, None], axis=-1))[:, 0]
    top_ids, top = _top_where(jnp.arange(MAX_TOP_LOGPROBS)[None] < warp.top_logprobs[:, None], logits_SV, raw)
    return Sampled(ids=ids, logprobs=logprobs, logprobs_full=full, top_ids=top_ids, top_logprobs=top)


def _top_where(wanted: jax.Array, logits_TV: jax.Array, parts: Tiles) -> tuple[jax.Array, jax.Array]:
    """The likeliest tokens and their log-probs where wanted `[T, MAX_TOP_LOGPROBS]`, else zeros, which cost nothing."""

    def some() -> tuple[jax.Array, jax.Array]:
        ids, top = likeliest(logits_TV, parts, MAX_TOP_LOGPROBS)
        return jnp.where(wanted, ids, 0), jnp.where(wanted, top, 0)

    return jax.lax.cond(wanted.any(), some, lambda: (jnp.zeros(wanted.shape, jnp.int32), jnp.zeros(wanted.shape, jnp.float32)))


def prompt_log_probs(
    model: Transformer, hidden_TD: jax.Array, next_ids_T: jax.Array, wanted_T: jax.Array, top_wanted: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Log-probs of the tokens that do follow, with the bits that sampling them would give as `logprobs_full`.

    Args:
        wanted_T: bool; a chunk without a wanted token costs nothing. What is not wanted means nothing.
        top_wanted: bool []; whether the likeliest tokens are.

    Returns:
        float32 [T]; ids [T, MAX_TOP_LOGPROBS] of the likeliest tokens and their log-probs.
    """
    T = hidden_TD.shape[0]
    pad = -T % PROMPT_CHUNK

    def compute(hidden: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        logits = model.logits(hidden)
        parts = tiles(logits, model.numerics)
        chosen = parts.log_probs(jnp.take_along_axis(logits, ids[:, None], axis=-1))[:, 0]
        return chosen, *_top_where(jnp.broadcast_to(top_wanted, (PROMPT_CHUNK, MAX_TOP_LOGPROBS)), logits, parts)

    def nothing(hidden: jax.Array, ids: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        top = jnp.zeros((PROMPT_CHUNK, MAX_TOP_LOGPROBS), jnp.float32)
        return top[:, 0], top.astype(jnp.int32), top

    def split(x: jax.Array) -> jax.Array:
        return jnp.pad(x, [(0, pad)] + [(0, 0)] * (x.ndim - 1)).reshape(-1, PROMPT_CHUNK, *x.shape[1:])

    chunks = (split(hidden_TD), split(next_ids_T), split(wanted_T))
    out = jax.lax.map(lambda chunk: jax.lax.cond(chunk[2].any(), compute, nothing, *chunk[:2]), chunks)
    chosen, top_ids, top = (x.reshape(T + pad, *x.shape[2:])[:T] for x in out)
    return chosen, top_ids, top
