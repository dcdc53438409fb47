"""Products of rows that are sorted by expert, each with the matrix of its own.

Legend: N rows, D and F the dims of a matrix, E experts, R rows of a tile.

`jax.lax.ragged_dot` where compilers have a kernel for it. XLA-CPU computes it as E masked products (10 times slower with 16
experts, measured), so a loop over tiles of one expert's rows stands there: as many as there are, however skewed the sizes.
"""

from collections.abc import Sequence
from functools import partial, reduce

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.layers import accumulator, outer, product, restored, stored

LARGEST_TILE = 64


def grouped(
    x: jax.Array, weights: Sequence[jax.Array], sizes: jax.Array, dtype: DTypeLike, platform: str = ""
) -> tuple[jax.Array, ...]:
    """`[N, F]` for each of `weights` `[E, D, F]`: the first sizes[0] rows of x `[N, D]` with the first matrix, and so on. Rows
    past the sum of `sizes` give 0. Rounding, results and gradients are those of `models.layers.dots`.

    Args:
        platform: that it will run on; empty: this process's own.
    """
    return _grouped(x, tuple(weights), sizes, np.dtype(dtype), platform or jax.default_backend())


@partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def _grouped(
    x: jax.Array, weights: tuple[jax.Array, ...], sizes: jax.Array, dtype: np.dtype, platform: str
) -> tuple[jax.Array, ...]:
    return tuple(_rows(x, w, sizes, dtype, platform) for w in weights)


def _grouped_forward(x: jax.Array, weights: tuple[jax.Array, ...], sizes: jax.Array, dtype: np.dtype, platform: str):
    return _grouped(x, weights, sizes, dtype, platform), (stored(x, dtype), jnp.zeros(0, x.dtype), weights, sizes)


def _grouped_backward(dtype: np.dtype, platform: str, saved: tuple, gs: tuple[jax.Array, ...]):
    x, like, weights, sizes = saved
    x = restored(x, dtype)
    parts = (_rows(g, w.swapaxes(1, 2), sizes, dtype, platform) for g, w in zip(gs, weights, strict=True))
    dx = reduce(jnp.add, parts).astype(like.dtype)
    return dx, tuple(_matrices(x, g, sizes, dtype, platform).astype(w.dtype) for g, w in zip(gs, weights, strict=True)), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _rows(x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: np.dtype, platform: str) -> jax.Array:
    x, w = x.astype(dtype), w.astype(dtype)
    if platform == "cpu":
        out = _tiled_rows(x, w, sizes, dtype)
    else:
        precision = None if dtype.itemsize == 2 else jax.lax.Precision.HIGHEST
        out = jax.lax.ragged_dot(x, w, sizes, precision=precision, preferred_element_type=accumulator(dtype))
    return jnp.where((jnp.arange(x.shape[0]) < sizes.sum())[:, None], out, 0)


def _matrices(x: jax.Array, g: jax.Array, sizes: jax.Array, dtype: np.dtype, platform: str) -> jax.Array:
    """The gradient of the weights, `[E, D, F]`."""
    x, g = x.astype(dtype), g.astype(dtype)
    if platform == "cpu":
        return _tiled_matrices(x, g, sizes, dtype)
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    precision = None if dtype.itemsize == 2 else jax.lax.Precision.HIGHEST
    return jax.lax.ragged_dot_general(x, g, sizes, numbers, precision=precision, preferred_element_type=accumulator(dtype))


def _tiles(sizes: jax.Array, N: int, R: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """How many tiles there are; and of each its expert and its first row."""
    E = sizes.shape[0]
    counts = -(-sizes // R)
    past = jnp.cumsum(counts)
    number = jnp.arange(N // R + E, dtype=jnp.int32)
    expert = jnp.minimum(jnp.searchsorted(past, number, side="right"), E - 1)
    first = jnp.take(jnp.cumsum(sizes) - sizes, expert)
    return past[-1], expert, first + (number - jnp.take(past - counts, expert)) * R


def _tile(N: int, E: int) -> int:
    """R: a power of 2 near the mean group; products have at least 8 rows, whose bits the number does not change."""
    return min(LARGEST_TILE, max(8, 1 << (N // E).bit_length() - 1 if N >= E else 8))


def _tiled_rows(x: jax.Array, w: jax.Array, sizes: jax.Array, dtype: np.dtype) -> jax.Array:
    (N, _), (E, _, F) = x.shape, w.shape
    R = _tile(N, E)
    count, expert, first = _tiles(sizes, N, R)
    x = jnp.pad(x, ((0, R), (0, 0)))

    def body(number: jax.Array, out: jax.Array) -> jax.Array:
        # A tile may reach into the rows of the next expert, whose own tile comes after it.
        rows = jax.lax.dynamic_slice_in_dim(x, first[number], R)
        matrix = jax.lax.dynamic_index_in_dim(w, expert[number], keepdims=False)
        new = product("td,df->tf", rows, matrix, dtype)
        return jax.lax.dynamic_update_slice_in_dim(out, new, first[number], axis=0)

    return jax.lax.fori_loop(0, count, body, jnp.zeros((N + R, F), accumulator(dtype)))[:N]


def _tiled_matrices(x: jax.Array, g: jax.Array, sizes: jax.Array, dtype: np.dtype) -> jax.Array:
    (N, D), F, E = x.shape, g.shape[1], sizes.shape[0]
    R = _tile(N, E)
    count, expert, first = _tiles(sizes, N, R)
    past = jnp.cumsum(sizes)
    x, g = (jnp.pad(y, ((0, R), (0, 0))) for y in (x, g))

    def body(number: jax.Array, out: jax.Array) -> jax.Array:
        mine = jnp.arange(R) + first[number] < past[expert[number]]
        rows = jnp.where(mine[:, None], jax.lax.dynamic_slice_in_dim(x, first[number], R), 0)
        new = outer("td", "tf", "df", rows, jax.lax.dynamic_slice_in_dim(g, first[number], R), dtype)
        old = jax.lax.dynamic_slice_in_dim(out, expert[number], 1)
        return jax.lax.dynamic_update_slice_in_dim(out, old + new[None], expert[number], axis=0)

    return jax.lax.fori_loop(0, count, body, jnp.zeros((E, D, F), accumulator(dtype)))
