"""What layers and log-probs rely on: a token's bits do not depend on its company (attention: test_attention.py).

Everything here is exact equality unless a tolerance is named. A processor that computes bfloat16 products in another
way may fail here first: then engine and trainer do not agree bit for bit there, and a test says which primitive it is.

Legend: h head dim, V vocab.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models.config import ModelConfig, MoEConfig, RopeScaling
from models.layers import dot, gated, published, rope_frequencies, rope_tables, rotate
from models.logprobs import log_prob, token_log_probs
from models.numerics import Numerics, exp_from, halved_sum, rms_norm, row_sum, tempered, tile_rows
from models.router import gates_of, scores_of, select
from sharding.shards import Shards
from sharding.vocabulary import Head

ROWS = (2, 3, 8, 17, 100, 511)
BF16 = jnp.bfloat16
EXACT = Numerics(BF16, rows=tile_rows(BF16))


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def same(actual: Any, expected: Any) -> None:
    """Bit for bit, the sign of zero included."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(f"u{actual.itemsize}"), expected.view(f"u{expected.itemsize}"))


def rows_do_not_matter(function: Any, x: np.ndarray, rows: tuple[int, ...] = ROWS) -> None:
    """`function` of some rows of `x`, at the front or in other places, is those rows of `function(x)`."""
    whole = np.asarray(function(x))
    for n in rows:
        same(function(x[:n]), whole[:n])
        same(function(x[-n:]), whole[-n:])
    other = x[::-1].copy()
    same(function(other), whole[::-1])
    other = np.concatenate([x[:5], 1e3 * x[5:]])  # other company
    same(np.asarray(function(other))[:5], whole[:5])


# ---- products, sums, norms


@pytest.mark.parametrize("shape", [(64, 64), (64, 264), (128, 64), (576, 1536), (1536, 576), (100, 36)], ids=str)
def test_dot_rows(shape: tuple[int, int]) -> None:
    w = normal(1, *shape)
    rows_do_not_matter(jax.jit(lambda x: EXACT.dot("td,df->tf", x, w)), normal(0, 512, shape[0]))


def test_dot_rows_with_transposed_weights() -> None:
    w = normal(1, 1000, 64)  # a tied head
    rows_do_not_matter(jax.jit(lambda x: EXACT.dot("td,vd->tv", x, w)), normal(0, 512, 64))


def test_dot_accumulates_and_returns_float32() -> None:
    x, w = normal(0, 8, 4096), normal(1, 4096, 8)
    out = dot("td,df->tf", x, w, BF16)
    assert out.dtype == jnp.float32
    exact = x.astype(ml_dtypes.bfloat16).astype(np.float64) @ w.astype(ml_dtypes.bfloat16).astype(np.float64)
    np.testing.assert_allclose(out, exact, rtol=0, atol=1e-4 * 64)  # sqrt(4096) = 64 is the size of a sum


@pytest.mark.parametrize("n", [16, 64, 100, 128, 200, 576, 1536, 16640])
def test_row_sum_rows(n: int) -> None:
    x = normal(0, 512, n)
    rows_do_not_matter(jax.jit(row_sum), x)
    np.testing.assert_allclose(row_sum(jnp.asarray(x)), x.astype(np.float64).sum(-1), rtol=0, atol=1e-6 * n)


@pytest.mark.parametrize("n", [2, 64])
def test_halved_sum_rows(n: int) -> None:
    """Of exponentials, as log-softmax has them; and its gradient."""
    x = normal(0, 512, 9, n)
    rows_do_not_matter(jax.jit(lambda x: halved_sum(jnp.exp(x))), x)
    np.testing.assert_allclose(halved_sum(jnp.asarray(x)), x.astype(np.float64).sum(-1), rtol=0, atol=1e-6 * n)
    same(jax.grad(lambda x: (halved_sum(x) ** 2).sum())(jnp.ones((3, n))), np.full((3, n), 2.0 * n, np.float32))


def test_row_sum_of_wide_rows() -> None:
    rows_do_not_matter(jax.jit(row_sum), normal(0, 20, 49152), (2, 3, 8, 17))  # a vocabulary


def test_exponentials_below_a_maximum() -> None:
    """XLA-CPU makes another kernel of reduction and exponential from 4,096 elements on, unless they are kept apart."""
    x = normal(0, 512, 128)
    function = jax.jit(lambda x: exp_from(x, x.max(axis=-1, keepdims=True)))
    rows_do_not_matter(function, x, (1, *ROWS))
    exact = np.exp(x.astype(np.float64) - x.max(-1, keepdims=True))
    np.testing.assert_allclose(function(x), exact, rtol=2e-6)


def test_tempered_in_other_programs() -> None:
    """With the difference after it that a compiler would contract it with, for temperatures of rows and for one of all."""
    logits, top = 4 * normal(0, 512, 264), normal(1, 512, 264)
    temperature = np.abs(normal(2, 512, 1)) + np.float32(0.5)
    wide = np.broadcast_to(temperature, logits.shape)
    alone = np.asarray(jax.jit(tempered)(logits, wide)) - top
    minus = jax.jit(lambda x, t, top: tempered(x, jnp.broadcast_to(t, x.shape)) - top)
    for n in (1, *ROWS):
        same(minus(logits[:n], temperature[:n], top[:n]), alone[:n])
        same(minus(logits[-n:], temperature[-n:], top[-n:]), alone[-n:])
    at_once = jax.jit(lambda x, t, top: tempered(x, jnp.full_like(x, t)) - top)
    same(at_once(logits, np.float32(0.7), top), np.asarray(jax.jit(tempered)(logits, np.full_like(logits, 0.7))) - top)


def test_gated_in_other_programs() -> None:
    x, w = normal(0, 512, 64), (normal(1, 64, 192), normal(2, 64, 192))
    pair = jax.jit(lambda x: EXACT.dots("td,df->tf", x, w))
    alone = np.asarray(jax.jit(lambda gate, up: gated(gate, up, BF16))(*pair(x)))
    whole = jax.jit(lambda x: gated(*EXACT.dots("td,df->tf", x, w), BF16))
    same(whole(x), alone)
    rows_do_not_matter(whole, x)


@pytest.mark.parametrize("renormalise", [True, False])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_gates_in_other_programs(scoring: Any, renormalise: bool) -> None:
    config = MoEConfig(num_experts=64, experts_per_token=4, ffn_dim=8, scoring=scoring, renormalise=renormalise)
    x, w = normal(0, 512, 64), normal(1, 64, 64)

    def gates(logits: Any) -> jax.Array:
        return gates_of(config, logits, select(config, scores_of(config, logits)))

    whole = jax.jit(lambda x: gates(EXACT.dot("td,de->te", x, w)))
    same(whole(x), jax.jit(gates)(jax.jit(lambda x: EXACT.dot("td,de->te", x, w))(x)))
    rows_do_not_matter(whole, x)


@pytest.mark.parametrize("n", [16, 64, 576])
def test_rms_norm_rows(n: int) -> None:
    x, scale = normal(0, 512, n), normal(1, n)
    rows_do_not_matter(jax.jit(lambda x: rms_norm(x, jnp.asarray(scale), 1e-5, EXACT)), x)
    exact = x / np.sqrt((x.astype(np.float64) ** 2).mean(-1, keepdims=True) + 1e-5) * scale
    np.testing.assert_allclose(rms_norm(jnp.asarray(x), jnp.asarray(scale), 1e-5, EXACT), exact, rtol=1e-5, atol=1e-6)


def test_rms_norm_in_other_programs() -> None:
    x, w, scale = normal(0, 64, 128), normal(1, 128, 128), jnp.asarray(normal(2, 128))
    product = jax.jit(lambda x: dot("td,df->tf", x, w, BF16))
    norm = jax.jit(lambda x: rms_norm(x, scale, 1e-5, EXACT))
    both = jax.jit(lambda x: rms_norm(dot("td,df->tf", x, w, BF16), scale, 1e-5, EXACT))
    alone = norm(product(x))
    same(both(x), alone)
    same(both(x[:10]), alone[:10])
    heads = jax.jit(lambda x: rms_norm(dot("td,df->tf", x, w, BF16).reshape(-1, 8, 16), scale[:16], 1e-5, EXACT))
    same(heads(x[:10]), jax.jit(lambda x: rms_norm(x, scale[:16], 1e-5, EXACT))(product(x).reshape(-1, 8, 16))[:10])


# ---- rotary positions

CONFIG = ModelConfig(
    family="llama", vocab_size=8, model_dim=64, ffn_dim=8, num_layers=1, num_heads=4, num_kv_heads=4, head_dim=16,
    max_positions=4096,
)  # fmt: skip


def test_rope_tables_rows() -> None:
    tables = jax.jit(lambda positions: rope_tables(CONFIG, positions, BF16))
    whole = tables(np.arange(512, dtype=np.int32))
    for places in (np.arange(300, 309), np.array([511, 0, 7, 7, 130]), np.arange(1, 512)):
        for some, table in zip(tables(places.astype(np.int32)), whole, strict=True):
            same(some, np.asarray(table)[places])
    for some, table in zip(tables(np.arange(512, dtype=np.int32).reshape(2, 256)), whole, strict=True):
        same(np.asarray(some).reshape(512, 16), table)


def test_rotate_in_other_programs() -> None:
    x, w, scale = normal(0, 512, 64), normal(1, 64, 64), jnp.asarray(normal(2, 16))
    positions = np.arange(512, dtype=np.int32)
    product = jax.jit(lambda x: dot("td,df->tf", x, w, BF16).reshape(-1, 4, 16))
    tables = jax.jit(lambda positions: rope_tables(CONFIG, positions, BF16))
    turn = jax.jit(lambda x, tables: rotate(x, tables, BF16))
    alone = np.asarray(turn(product(x), tables(positions)))

    whole = jax.jit(lambda x, positions: rotate(product(x), rope_tables(CONFIG, positions, BF16), BF16))
    same(whole(x, positions), alone)
    for n in ROWS:
        same(whole(x[-n:], positions[-n:]), alone[-n:])
    # with a scale after it, as the queries have, and rounding, as the keys have
    scaled = jax.jit(lambda x, positions: rotate(product(x), rope_tables(CONFIG, positions, BF16), BF16) * 0.25)
    same(scaled(x[:9], positions[:9]), alone[:9] * np.float32(0.25))
    rounded = jax.jit(lambda x, positions: published(whole(x, positions), BF16))
    same(rounded(x[:9], positions[:9]), jax.jit(lambda x: published(x, BF16))(alone[:9]))
    # behind a norm, as Qwen3 has it
    norm = jax.jit(lambda x: rms_norm(x, scale, 1e-5, EXACT))
    normed = jax.jit(lambda x, positions: rotate(norm(product(x)), rope_tables(CONFIG, positions, BF16), BF16))
    same(normed(x[:9], positions[:9]), np.asarray(turn(norm(product(x)), tables(positions)))[:9])
    # leading dims
    batched = whole(x.reshape(512, 64), positions.reshape(512))
    same(turn(product(x).reshape(2, 256, 4, 16), tables(positions.reshape(2, 256))), batched.reshape(2, 256, 4, 16))


def test_rotation_keeps_angles() -> None:
    """q at position a times k at position b depends on a - b only: float64, 1e-12."""
    with jax.enable_x64(True):
        q, k = (jnp.asarray(normal(seed, 1, 1, 16), jnp.float64) for seed in (0, 1))
        products = []
        for a, b in ((5, 2), (103, 100), (3, 0)):
            turned = (
                rotate(x, rope_tables(CONFIG, jnp.asarray([place]), jnp.float64), jnp.float64) for x, place in ((q, a), (k, b))
            )
            products.append(float(np.prod(np.stack([np.asarray(x) for x in turned]), axis=0).sum()))
        np.testing.assert_allclose(products[1:], products[0], rtol=1e-12)


def test_rope_frequencies() -> None:
    np.testing.assert_allclose(rope_frequencies(CONFIG), [10000 ** -(2 * i / 16) for i in range(8)], rtol=1e-15)


def test_llama3_rope_frequencies() -> None:
    """The three bands by the formula of Llama 3.1's model card, written out for one frequency at a time."""
    scaling = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position=256)
    config = ModelConfig(**{**vars(CONFIG), "rope_scaling": scaling})
    expected, bands = [], set()
    for i in range(8):
        freq = 10000 ** -(2 * i / 16)
        turns = 256 * freq / (2 * np.pi)  # over the original context
        if turns > 4:  # short waves stay
            bands.add("short")
            expected.append(freq)
        elif turns < 1:  # long ones are stretched
            bands.add("long")
            expected.append(freq / 8)
        else:
            bands.add("between")
            smooth = (turns - 1) / (4 - 1)
            expected.append((1 - smooth) * freq / 8 + smooth * freq)
    assert bands == {"short", "between", "long"}
    np.testing.assert_allclose(rope_frequencies(config), expected, rtol=1e-14)


# ---- log-probabilities


@pytest.mark.parametrize("V", [100, 264, 16640])
def test_log_prob_rows(V: int) -> None:
    rows = 512 if V < 1000 else 40
    logits, ids = 4 * normal(0, rows, V), np.random.default_rng(1).integers(0, V, rows).astype(np.int32)
    function = jax.jit(partial(log_prob, numerics=EXACT))
    whole = np.asarray(function(logits, ids))
    for n in (n for n in ROWS if n < rows):
        same(function(logits[:n], ids[:n]), whole[:n])
        same(function(logits[-n:], ids[-n:]), whole[-n:])
    wide = logits.astype(np.float64)
    wide -= wide.max(-1, keepdims=True)
    exact = wide[np.arange(rows), ids] - np.log(np.exp(wide).sum(-1))
    np.testing.assert_allclose(whole, exact, rtol=1e-6, atol=1e-5)


def test_log_prob_chunks() -> None:
    head = normal(1, 64, 264)
    model: Any = SimpleNamespace(
        shards=Shards(), dtype=BF16, numerics=EXACT, head_spec="td,dv->tv", head_part=lambda: Head(head, 0, 264, ())
    )
    hidden, ids = 4 * normal(0, 256, 64), np.random.default_rng(2).integers(0, 264, 256).astype(np.int32)
    used = np.arange(256) < 250
    function = jax.jit(partial(token_log_probs, model), static_argnums=4)

    def run(some: slice, chunk: int) -> jax.Array:
        return function(hidden[None, some], ids[None, some], jnp.float32(0.7), used[None, some], chunk)[0][0]

    whole = run(slice(None), 256)
    for chunk in (2, 16, 64, 128):
        same(run(slice(0, 250 // chunk * chunk), chunk), whole[: 250 // chunk * chunk])
    same(run(slice(96, 128), 8), whole[96:128])

    def gradient(chunk: int) -> jax.Array:
        def total(hidden: jax.Array) -> jax.Array:
            return function(hidden[None], ids[None], jnp.float32(0.7), used[None], chunk)[0][0, :250].sum()

        return jax.grad(total)(hidden)

    same(gradient(64), gradient(256))


# ---- gradients


def plain(spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
    return jnp.einsum(spec, x, w, precision=jax.lax.Precision.HIGHEST)


SPECS = [
    ("td,df->tf", (24, 40), (40, 16)),
    ("td,vd->tv", (24, 40), (16, 40)),
    ("knwmh,knwch->knwmc", (2, 3, 1, 8, 16), (2, 3, 1, 32, 16)),
]


@pytest.mark.parametrize(("spec", "x_shape", "w_shape"), SPECS, ids=[spec for spec, _, _ in SPECS])
def test_gradient_of_dot(spec: str, x_shape: tuple[int, ...], w_shape: tuple[int, ...]) -> None:
    """In float32 exact: the bits of autodiff. In bfloat16: the float32 gradient of the rounded operands but for the
    rounding of the cotangent (relative error 2^-9), so within 2^-8 of the sum of the terms' sizes; unrounded itself."""
    x, w = jnp.asarray(normal(0, *x_shape)), jnp.asarray(normal(1, *w_shape))
    g = jnp.asarray(normal(2, *plain(spec, x, w).shape))

    @partial(jax.jit, static_argnums=3)
    def ours(x, w, g, dtype):
        return jax.vjp(lambda x, w: dot(spec, x, w, dtype), x, w)[1](g)

    @jax.jit
    def autodiff(x, w, g):
        return jax.vjp(lambda x, w: plain(spec, x, w), x, w)[1](g)

    for actual, expected in zip(ours(x, w, g, jnp.float32), autodiff(x, w, g), strict=True):
        same(actual, expected)
    x_rounded, w_rounded = (a.astype(BF16).astype(jnp.float32) for a in (x, w))
    sizes = autodiff(abs(x_rounded), abs(w_rounded), abs(g))
    expected = autodiff(x_rounded, w_rounded, g)
    for actual, want, size in zip(ours(x, w, g, BF16), expected, sizes, strict=True):
        assert actual.dtype == jnp.float32
        assert (abs(actual - want) <= 2**-8 * size).all()
        assert (actual != actual.astype(BF16)).any()


def test_published_rounds_to_nearest_even() -> None:
    x = np.concatenate([normal(0, 4096), normal(1, 100) * 1e-30, [0.0, -0.0, 1.00390625, 1.01171875]]).astype(np.float32)
    same(jax.jit(lambda x: published(x, BF16))(x), x.astype(ml_dtypes.bfloat16).astype(np.float32))
    same(published(jnp.asarray(x), jnp.float32), x)


def test_published_passes_gradients_through() -> None:
    x, g = jnp.asarray(normal(0, 100)), jnp.asarray(normal(1, 100))
    same(jax.jit(jax.grad(lambda x: (published(x, BF16) * g).sum()))(x), g)
    half = x.astype(BF16)
    out, back = jax.vjp(lambda x: published(x, BF16), half)
    assert out.dtype == jnp.float32
    assert back(g)[0].dtype == BF16
