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
    x: jax.Array, weights: Sequence[jax.Array], sizes: jax.Array, dtype: DTypeLike, platform: str = "", rows: int = 0
) -> tuple[jax.Array, ...]:
    """`[N, F]` for each of `weights` `[E, D, F]`: the first sizes[0] rows of x `[N, D]` with the first matrix, and so on. Rows
    past the sum of `sizes` give 0. Rounding, results and gradients are those of `models.layers.dots`.

    Args:
        platform: that it will run on; empty: this process's own.
        rows: of a CPU's tiles, see `Numerics.rows`; 0: as many as suit the sizes. The backward is free to choose.
    """
    return _grouped(x, tuple(weights), sizes, np.dtype(dtype), platform or jax.default_backend(), rows)


@partial(jax.custom_vjp, nondiff_argnums=(3, 4, 5))
def _grouped(
    x: jax.Array, weights: tuple[jax.Array, ...], sizes: jax.Array, dtype: np.dtype, platform: str, rows: int
) -> tuple[jax.Array, ...]:
    return _rows((x,) * len(weights), weights, sizes, dtype, platform, rows)


def _grouped_forward(x: jax.Array, weights: tuple[jax.Array, ...], sizes: jax.Array, dtype: np.dtype, platform: str, rows: int):
    return _grouped(x, weights, sizes, dtype, platform, rows), (stored(x, dtype), jnp.zeros(0, x.dtype), weights, sizes)


def _grouped_backward(dtype: np.dtype, platform: str, rows: int, saved: tuple, gs: tuple[jax.Array, ...]):
    x, like, weights, sizes = saved
    x = restored(x, dtype)
    dx = reduce(jnp.add, _rows(gs, [w.swapaxes(1, 2) for w in weights], sizes, dtype, platform)).astype(like.dtype)
    new = _matrices(x, gs, sizes, dtype, platform)
    return dx, tuple(dw.astype(w.dtype) for dw, w in zip(new, weights, strict=True)), None


_grouped.defvjp(_grouped_forward, _grouped_backward)


def _rows(
    xs: Sequence[jax.Array], weights: Sequence[jax.Array], sizes: jax.Array, dtype: np.dtype, platform: str, rows: int = 0
) -> tuple[jax.Array, ...]:
    """Of each x with its own weights."""
    xs, weights = [x.astype(dtype) for x in xs], [w.astype(dtype) for w in weights]
    if platform == "cpu":
        outs = _tiled_rows(xs, weights, sizes, dtype, rows)
    else:
        ragged = partial(jax.lax.ragged_dot, precision=_precision(dtype), preferred_element_type=accumulator(dtype))
        outs = tuple(ragged(x, w, sizes) for x, w in zip(xs, weights, strict=True))
    real = (jnp.arange(xs[0].shape[0]) < sizes.sum())[:, None]
    return tuple(jnp.where(real, out, 0) for out in outs)


def _matrices(x: jax.Array, gs: Sequence[jax.Array], sizes: jax.Array, dtype: np.dtype, platform: str) -> tuple[jax.Array, ...]:
    """The gradients of the weights, `[E, D, F]` for each of gs."""
    x, gs = x.astype(dtype), [g.astype(dtype) for g in gs]
    if platform == "cpu":
        return _tiled_matrices(x, gs, sizes, dtype)
    numbers = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(((0,), (0,)), ((), ())), lhs_ragged_dimensions=[0], rhs_group_dimensions=[]
    )
    ragged = partial(jax.lax.ragged_dot_general, precision=_precision(dtype), preferred_element_type=accumulator(dtype))
    return tuple(ragged(x, g, sizes, numbers) for g in gs)


def _precision(dtype: np.dtype) -> jax.lax.Precision | None:
    return None if dtype.itemsize == 2 else jax.lax.Precision.HIGHEST


def _tiles(sizes: jax.Array, N: int, R: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """How many tiles there are; and of each its expert and its first row."""
    E = sizes.shape[0]
    counts = -(-sizes // R)
    past = jnp.cumsum(counts)
    number = jnp.arange(N // R + E, dtype=jnp.int32)
    expert = jnp.minimum((past[None] <= number[:, None]).sum(axis=1, dtype=jnp.int32), E - 1)
    first = jnp.take(jnp.cumsum(sizes) - sizes, expert)
    return past[-1], expert, first + (number - jnp.take(past - counts, expert)) * R


def _tile(N: int, E: int) -> int:
    """R: a power of 2 near the mean group; products have at least 8 rows, whose bits the number does not change."""
    return min(LARGEST_TILE, max(8, 1 << (N // E).bit_length() - 1 if N >= E else 8))


def _tiled_rows(
    xs: Sequence[jax.Array], weights: Sequence[jax.Array], sizes: jax.Array, dtype: np.dtype, rows: int
) -> tuple[jax.Array, ...]:
    N, E = xs[0].shape[0], weights[0].shape[0]
    R = rows or _tile(N, E)
    count, expert, first = _tiles(sizes, N, R)
    xs = [jnp.pad(x, ((0, R), (0, 0))) for x in xs]

    def body(number: jax.Array, outs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        # A tile may reach into the rows of the next expert, whose own tile comes after it.
        def one(x: jax.Array, w: jax.Array, out: jax.Array) -> jax.Array:
            rows = jax.lax.dynamic_slice_in_dim(x, first[number], R)
            matrix = jax.lax.dynamic_index_in_dim(w, expert[number], keepdims=False)
            return jax.lax.dynamic_update_slice_in_dim(out, product("td,df->tf", rows, matrix, dtype), first[number], axis=0)

        return tuple(map(one, xs, weights, outs))

    zeros = tuple(jnp.zeros((N + R, w.shape[2]), accumulator(dtype)) for w in weights)
    return tuple(out[:N] for out in jax.lax.fori_loop(0, count, body, zeros))


def _tiled_matrices(x: jax.Array, gs: Sequence[jax.Array], sizes: jax.Array, dtype: np.dtype) -> tuple[jax.Array, ...]:
    (N, D), E = x.shape, sizes.shape[0]
    R = _tile(N, E)
    count, expert, first = _tiles(sizes, N, R)
    past = jnp.cumsum(sizes)
    x, *gs = (jnp.pad(y, ((0, R), (0, 0))) for y in (x, *gs))

    def body(number: jax.Array, outs: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
        mine = jnp.arange(R) + first[number] < past[expert[number]]
        rows = jnp.where(mine[:, None], jax.lax.dynamic_slice_in_dim(x, first[number], R), 0)

        def one(g: jax.Array, out: jax.Array) -> jax.Array:
            new = outer("td", "tf", "df", rows, jax.lax.dynamic_slice_in_dim(g, first[number], R), dtype)
            old = jax.lax.dynamic_slice_in_dim(out, expert[number], 1)
            return jax.lax.dynamic_update_slice_in_dim(out, old + new[None], expert[number], axis=0)

        return tuple(map(one, gs, outs))

    zeros = tuple(jnp.zeros((E, D, g.shape[1]), accumulator(dtype)) for g in gs)
    return jax.lax.fori_loop(0, count, body, zeros)
