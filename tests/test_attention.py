"""attend_blocks: a query's bits do not depend on other queries, other blocks, padding, or what stands between its keys.

Everything here is exact equality unless a tolerance is named.

Legend: N query blocks, Q queries of a block, C keys of a block, K kv heads, G query heads of a kv head, h head dim.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import KEY_BLOCK, attend_blocks
from models.numerics import Numerics

HEADS = [(h, G) for h in (16, 64) for G in (1, 2, 3)]


def normal(seed: int, *shape: int) -> Any:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def same(actual: Any, expected: Any) -> None:
    """Bit for bit, the sign of zero included."""
    actual, expected = np.asarray(actual), np.asarray(expected)
    assert actual.dtype == expected.dtype
    np.testing.assert_array_equal(actual.view(f"u{actual.itemsize}"), expected.view(f"u{expected.itemsize}"))


@partial(jax.jit, static_argnums=4)
def attend(q: Any, k: Any, v: Any, visible: Any, dtype: Any = jnp.bfloat16) -> jax.Array:
    return attend_blocks(q, k, v, visible, Numerics(dtype))


def paths(h: int, G: int, num: int, Q: int, C: int) -> tuple[np.ndarray, ...]:
    """q, k, v and what is visible: `num` sequences of C keys, whose last Q tokens ask."""
    K = 2
    q, k, v = normal(0, num, Q, K * G, h), normal(1, K, num, C, h), normal(2, K, num, C, h)
    visible = np.arange(C)[None, :] <= (C - Q + np.arange(Q))[:, None]
    return q, k, v, np.broadcast_to(visible, (num, Q, C)).copy()


@pytest.mark.parametrize(("h", "G"), HEADS)
def test_attention_of_many_blocks_is_that_of_each(h: int, G: int) -> None:
    q, k, v, visible = paths(h, G, 5, 64, 256)
    visible[2, :, 100:] = False  # one that sees less
    whole = np.asarray(attend(q, k, v, visible))
    for n in range(5):
        same(attend(q[n : n + 1], k[:, n : n + 1], v[:, n : n + 1], visible[n : n + 1]), whole[n : n + 1])


@pytest.mark.parametrize("C", [128, 256])
@pytest.mark.parametrize(("h", "G"), HEADS)
def test_attention_of_one_query_is_that_of_many(h: int, G: int, C: int) -> None:
    """Also of one sequence: XLA-CPU makes other kernels for fewer than 4,096 scores."""
    q, k, v, visible = paths(h, G, 3, 64, C)
    whole = np.asarray(attend(q, k, v, visible))
    for n in (1, 2, 7):
        for first in (0, 64 - n):
            some = slice(first, first + n)
            same(attend(q[:, some], k, v, visible[:, some]), whole[:, some])
            same(attend(q[:1, some], k[:, :1], v[:, :1], visible[:1, some]), whole[:1, some])


@pytest.mark.parametrize(("h", "G"), HEADS)
def test_attention_does_not_see_padding(h: int, G: int) -> None:
    """Whatever stands behind the last visible key, in its block or in blocks of padding."""
    q, k, v, visible = paths(h, G, 3, 16, 256)
    visible[..., 150:] = False
    whole = attend(q, k, v, visible)
    k[:, :, 150:], v[:, :, 150:] = 3.0, -7.0
    same(attend(q, k, v, visible), whole)
    pad = [(0, 0), (0, 0), (0, 2 * KEY_BLOCK), (0, 0)]
    padded = np.pad(visible, [(0, 0), (0, 0), (0, 2 * KEY_BLOCK)])
    same(attend(q, np.pad(k, pad), np.pad(v, pad, constant_values=5.0), padded), whole)
    one = (q, k[:, :, :KEY_BLOCK], v[:, :, :KEY_BLOCK], visible[..., :KEY_BLOCK])
    visible[..., KEY_BLOCK:] = False
    same(attend(q, k, v, visible), attend(*one))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("h", "G"), HEADS)
def test_attention_does_not_see_keys_in_between(h: int, G: int, seed: int) -> None:
    """Keys of siblings between the ancestors of one key block, as in a forest; once in front, once anywhere."""
    q, k, v, visible = paths(h, G, 3, 8, KEY_BLOCK)
    rng = np.random.default_rng(seed)
    n = 40 + 37 * seed
    visible[..., n:] = False
    whole = np.asarray(attend(q, k, v, visible))
    for places in (np.sort(rng.permutation(KEY_BLOCK)[:n]), np.arange(KEY_BLOCK - n, KEY_BLOCK)):
        spread_k, spread_v = normal(3, *k.shape), normal(4, *v.shape)
        spread_k[:, :, places], spread_v[:, :, places] = k[:, :, :n], v[:, :, :n]
        seen = np.zeros_like(visible)
        seen[..., places] = visible[..., :n]
        same(attend(q, spread_k, spread_v, seen), whole)
        same(attend(q[:1, :1], spread_k[:, :1], spread_v[:, :1], seen[:1, :1]), whole[:1, :1])


@pytest.mark.parametrize(("h", "G"), [(16, 1), (64, 3)])
def test_attention_is_softmax(h: int, G: int) -> None:
    """float32 operands against the definition in float64: 1e-5; bfloat16 ones: 2e-2."""
    q, k, v, visible = paths(h, G, 2, 8, 256)
    k64, v64 = (x.astype(np.float64).repeat(G, axis=0) for x in (k, v))
    scores = np.einsum("nqhd,hncd->nhqc", q.astype(np.float64), k64) * h**-0.5
    p = np.where(visible[:, None], np.exp(scores - scores.max(-1, keepdims=True)), 0)
    exact = np.einsum("nhqc,hncd->nqhd", p / p.sum(-1, keepdims=True), v64).reshape(2, 8, -1)
    np.testing.assert_allclose(attend(q, k, v, visible, jnp.float32), exact, rtol=0, atol=1e-5)
    np.testing.assert_allclose(attend(q, k, v, visible), exact, rtol=0, atol=2e-2)
