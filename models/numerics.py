"""Sums, exponentials and norms, in an order of their own or in the compiler's: `Numerics` says which.

Exact numerics keep a token's bits independent of its company, so that sampler and trainer agree bit for bit: models/README.md
says what was measured. Fast numerics leave order and fusion to the compiler.
"""

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from models.layers import dot, dots, rounded

COLUMNS = 64
"""float32 products with a multiple of so many columns have bits that depend neither on the number of rows nor on where zeros
stand between terms (measured on CPU, jax 0.10.2 and 0.12; with fewer columns they do)"""

MOST_ROWS, ROWS = 256, (2, 25, 33)
"""what a machine's bits are checked with: rows of a whole, and of its parts (all products that moved did at one of these)"""
TILE_ROWS = 16
"""rows of a product where their number would matter: decode has few, and more in a tile are little faster (measured)"""
PROBED = ((64, 264), (576, 192), (1536, 576))
"""products that other paths of XLA-CPU compute with bits that depend on the rows (measured)"""


@dataclass(frozen=True)
class Numerics:
    """How a model computes; the same for sampler and trainer where their log-probs are to agree."""

    dtype: np.dtype
    """operands of products"""
    exact: bool = True
    """whether a token's bits are its own"""
    rows: int = 0
    """products with weights are made of tiles of so many rows, all of one shape; 0: of all rows at once, where the machine
    computes those with bits that do not depend on how many there are (`tile_rows`)"""

    def __init__(self, dtype: DTypeLike, exact: bool = True, rows: int = 0):
        object.__setattr__(self, "dtype", np.dtype(dtype))
        object.__setattr__(self, "exact", exact)
        object.__setattr__(self, "rows", rows)

    def dot(self, spec: str, x: jax.Array, w: jax.Array) -> jax.Array:
        """`layers.dot` with a weight; rows are the first dim of `x`."""
        return self.dots(spec, x, (w,))[0]

    def dots(self, spec: str, x: jax.Array, weights: Sequence[jax.Array]) -> tuple[jax.Array, ...]:
        """`layers.dots` with weights; rows are the first dim of `x`."""
        T = x.shape[0]
        least = least_rows(math.prod(x.shape[1:])) if self.exact and not self.rows else 0
        if least > T:
            x = jnp.pad(x, [(0, least - T)] + [(0, 0)] * (x.ndim - 1))
        return tuple(out[:T] for out in dots(spec, x, weights, self.dtype, self.rows))

    def row_sum(self, x: jax.Array) -> jax.Array:
        """Sum over the last dim."""
        return row_sum(x) if self.exact else x.sum(axis=-1)

    def halved_sum(self, x: jax.Array) -> jax.Array:
        """Sum over a last dim of 2^n values that are no products."""
        return halved_sum(x) if self.exact else x.sum(axis=-1)

    def exp_from(self, x: jax.Array, top: jax.Array) -> jax.Array:
        """exp(x - top), where `top` is a maximum of `x` and broadcasts to its shape."""
        return exp_from(x, top) if self.exact else jnp.exp(x - jnp.broadcast_to(top, x.shape))

    def tempered(self, logits: jax.Array, temperature: jax.Array) -> jax.Array:
        """logits / temperature, of the same shape."""
        return tempered(logits, temperature) if self.exact else logits / temperature


def least_rows(terms: int) -> int:
    """Products of 16-bit operands that sum so many terms have bits of their own with fewer rows than this (measured on
    processors with and without AMX, jax 0.10.2 and 0.12)."""
    return 16 if terms < 16 else 8 if terms % 32 else 3


def tile_rows(dtype: DTypeLike) -> int:
    """`Numerics.rows` for exact numerics on this process's devices: 0 or TILE_ROWS, found by running products."""
    return _tile_rows(np.dtype(dtype), jax.default_backend())


@functools.cache
def _tile_rows(dtype: np.dtype, platform: str) -> int:
    if platform != "cpu" or dtype.itemsize != 2:
        return 0
    rng = np.random.default_rng(0)
    xs = [rng.standard_normal((MOST_ROWS, shape[0]), np.float32) for shape in PROBED]
    weights = [jnp.asarray(rng.standard_normal(shape, np.float32), dtype) for shape in PROBED]
    plain = Numerics(dtype)
    run = jax.jit(lambda xs, weights: [plain.dot("td,df->tf", x, w) for x, w in zip(xs, weights, strict=True)])
    whole = jax.device_get(run(xs, weights))
    for n in ROWS:
        some = jax.device_get(run([x[:n] for x in xs], weights))
        if any((part != all_[:n]).any() for part, all_ in zip(some, whole, strict=True)):
            return TILE_ROWS
    return 0


@jax.custom_vjp
def row_sum(x: jax.Array) -> jax.Array:
    """Sum over the last dim in an order that the shape alone fixes: tiles of at most 128, then tiles of the tiles' sums.

    A plain sum's order changes with the number of rows (measured on CPU); a product with COLUMNS columns of ones does not.
    """
    n = x.shape[-1]
    tile = max((t for t in range(64, 129) if n % t == 0), default=128) if n > 128 else n
    if n % tile:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -n % tile)])
    tiles = x.reshape(
        -1, tile
    )  # merged rows, though a mesh that splits heads then gathers them: jax 0.12 sums others otherwise
    sums = dot("nt,tc->nc", tiles, jnp.ones((tile, COLUMNS), x.dtype), x.dtype)[:, 0].reshape(*x.shape[:-1], -1)
    return sums[..., 0] if sums.shape[-1] == 1 else row_sum(sums)


def _row_sum_forward(x: jax.Array):
    return row_sum(x), jnp.zeros((0, x.shape[-1]), x.dtype)  # its shape is all the backward needs


def _row_sum_backward(like: jax.Array, g: jax.Array):
    return (jnp.broadcast_to(g[..., None], (*g.shape, like.shape[-1])),)


row_sum.defvjp(_row_sum_forward, _row_sum_backward)


@jax.custom_vjp
def halved_sum(x: jax.Array) -> jax.Array:
    """`row_sum` of a last dim of 2^n, by adding halves: no order that a compiler could change, and for many short rows twice as
    fast (measured). What is added must be no product, which some programs would contract with the sum; the barrier keeps an
    exponential in a kernel of its own, as it may have other bits in this one."""
    x = jax.lax.optimization_barrier(x)
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _halved_sum_forward(x: jax.Array):
    return halved_sum(x), jnp.zeros((0, x.shape[-1]), x.dtype)


halved_sum.defvjp(_halved_sum_forward, _row_sum_backward)


def exp_from(x: jax.Array, top: jax.Array) -> jax.Array:
    """exp(x - top), where `top` is a maximum of `x` and broadcasts to its shape.

    The float32 difference loses its last bit: a rounding between them keeps a compiler from making one kernel of
    reduction and exponential. XLA-CPU does so from 4,096 elements on, and exp is another function there (measured).
    """
    difference = x - jnp.broadcast_to(top, x.shape)
    return jnp.exp(rounded(difference, 8, 22) if x.dtype == jnp.float32 else difference)


def tempered(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """logits / temperature (same shapes), the logits themselves where it is 1; float32 loses its last bit elsewhere.

    Compilers divide by way of the reciprocal, and contract that product with the difference after it in some programs
    only (measured on CPU): a rounding between them keeps the bits the same everywhere.
    """
    scaled = logits * (1 / temperature)
    return jnp.where(temperature == 1, logits, rounded(scaled, 8, 22) if scaled.dtype == jnp.float32 else scaled)


def rms_norm(x: jax.Array, scale: jax.Array, eps: float, numerics: Numerics) -> jax.Array:
    """x / rms(x) * scale over the last dim, in x's dtype (Zhang and Sennrich, arXiv 1910.07467).

    D stands outside the root: a product before the sum with eps might be contracted with it in one program and not in another.
    """
    return _rms_norm(x, scale, eps, numerics)


@partial(jax.custom_vjp, nondiff_argnums=(2, 3))
def _rms_norm(x: jax.Array, scale: jax.Array, eps: float, numerics: Numerics) -> jax.Array:
    return _rms_norm_forward(x, scale, eps, numerics)[0]


def _inverse_rms(x: jax.Array, eps: float, numerics: Numerics) -> jax.Array:
    D = x.shape[-1]
    return jax.lax.rsqrt(numerics.row_sum(x * x) + D * eps)[..., None] * D**0.5


def _rms_norm_forward(x: jax.Array, scale: jax.Array, eps: float, numerics: Numerics):
    inverse = _inverse_rms(x, eps, numerics)
    return x * inverse * jnp.broadcast_to(scale, x.shape), (x, inverse, scale)


def _rms_norm_backward(eps: float, numerics: Numerics, saved: tuple[jax.Array, jax.Array, jax.Array], g: jax.Array):
    x, inverse, scale = saved
    unit = x * inverse
    g_unit = g * jnp.broadcast_to(scale, x.shape)
    dx = inverse * (g_unit - unit * (numerics.row_sum(g_unit * unit) / x.shape[-1])[..., None])
    return dx, (g * unit).sum(axis=tuple(range(x.ndim - 1)))


_rms_norm.defvjp(_rms_norm_forward, _rms_norm_backward)
