"""Products and rotary positions, each written once for trainer and engine.

Legend: T tokens, D model, h head dim.

A token's bits must not depend on its company, so: products take `dtype` operands (bfloat16 by default) and accumulate and
*return* float32, everything else is float32. models/README.md says what was measured.
"""

import functools
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike

from models.config import ModelConfig
from sharding.rules import Weight


def weight(shape: tuple[int, ...], dims: tuple[str, ...], init: float) -> nnx.Param:
    """A parameter that so far is only its description."""
    return nnx.Param(jax.ShapeDtypeStruct(shape, jnp.float32), description=Weight(shape, dims, init))


def accumulator(dtype: DTypeLike) -> np.dtype:
    """The dtype in which sums, norms and the residual stream live when operands have `dtype`."""
    return np.dtype(np.float64 if np.dtype(dtype) == np.float64 else np.float32)


def dot(spec: str, x: jax.Array, w: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`einsum(spec, x, w)` with operands rounded to `dtype`, accumulated and returned in `accumulator(dtype)`.

    Its gradient rounds the cotangent to `dtype` and returns float32 products in the dtypes of `x` and `w`, so that the
    backward products stay on the same fast path and master weights get unrounded gradients.
    """
    return dots(spec, x, (w,), dtype)[0]


def dots(spec: str, x: jax.Array, weights: Sequence[jax.Array], dtype: DTypeLike) -> tuple[jax.Array, ...]:
    """`dot` of one x with each of several weights; their backward shares what it keeps of x, which is x rounded to `dtype`."""
    return _dots(spec, x, tuple(weights), np.dtype(dtype))


@partial(jax.custom_vjp, nondiff_argnums=(0, 3))
def _dots(spec: str, x: jax.Array, weights: tuple[jax.Array, ...], dtype: np.dtype) -> tuple[jax.Array, ...]:
    return tuple(product(spec, x, w, dtype) for w in weights)


def product(spec: str, x: jax.Array, w: jax.Array, dtype: np.dtype) -> jax.Array:
    """`dot` without its gradient."""
    x, w = x.astype(dtype), w.astype(dtype)
    precision = None if dtype.itemsize == 2 else jax.lax.Precision.HIGHEST
    tiled = _tiled(spec, x, w) if dtype == np.float32 else None
    spec, x, w = tiled or (spec, x, w)
    out = jnp.einsum(spec, x, w, precision=precision, preferred_element_type=accumulator(dtype))
    return out.sum(axis=0) if tiled else out


def _tiled(spec: str, x: jax.Array, w: jax.Array, tile: int = 64) -> tuple[str, jax.Array, jax.Array] | None:
    """The product with its one summed dim cut into tiles, which lead the result: sums of sums halve a float32 product's
    rounding error (measured against float64). None up to 128 terms, where fixed-order sums stay one product, and where
    tiles do not fit."""
    operands, out = spec.split("->")
    left, right = operands.split(",")
    summed = [letter for letter in left if letter in right and letter not in out]
    size = x.shape[left.index(summed[0])] if len(summed) == 1 else 0
    if size <= 128 or size % tile:
        return None
    letter = summed[0]

    def cut(array: jax.Array, letters: str) -> jax.Array:
        at = letters.index(letter)
        return array.reshape(*array.shape[:at], size // tile, tile, *array.shape[at + 1 :])

    left_z, right_z = (letters.replace(letter, f"z{letter}") for letters in (left, right))
    return f"{left_z},{right_z}->z{out}", cut(x, left), cut(w, right)


def _dots_forward(spec: str, x: jax.Array, weights: tuple[jax.Array, ...], dtype: np.dtype):
    return _dots(spec, x, weights, dtype), (stored(x, dtype), jnp.zeros(0, x.dtype), weights)


def _dots_backward(spec: str, dtype: np.dtype, saved: tuple[jax.Array, jax.Array, tuple], gs: tuple[jax.Array, ...]):
    x, like, weights = saved
    x = restored(x, dtype)
    operands, out = spec.split("->")
    left, right = operands.split(",")
    parts = (product(f"{out},{right}->{left}", g, w, dtype) for g, w in zip(gs, weights, strict=True))
    dx = functools.reduce(jnp.add, parts).astype(like.dtype)
    return dx, tuple(outer(left, out, right, x, g, dtype).astype(w.dtype) for g, w in zip(gs, weights, strict=True))


_dots.defvjp(_dots_forward, _dots_backward)


def outer(left: str, out: str, right: str, x: jax.Array, g: jax.Array, dtype: np.dtype) -> jax.Array:
    """The gradient of a weight, `einsum("left,out->right", x, g)`.

    16-bit matrices: XLA-CPU contracts over the first dim of the left operand in float32, at 40 % of the rate that the last one
    gets (measured), so the operand that gives the result's rows is turned first.
    """
    if x.ndim != 2 or g.ndim != 2 or dtype.itemsize != 2:
        return product(f"{left},{out}->{right}", x, g, dtype)
    if right[0] in out:
        left, out, x, g = out, left, g, x
    return product(f"{left[::-1]},{out}->{right}", turned(x.astype(dtype)), g, dtype)


def stored(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """x rounded to `dtype`, for a backward: 16-bit floats as bit patterns, as XLA-CPU would widen a scan's whole stack of them
    (measured)."""
    x = x.astype(dtype)
    return jax.lax.bitcast_convert_type(x, jnp.uint16) if x.dtype.itemsize == 2 else x


def restored(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """What `stored` was given, rounded to the same `dtype`."""
    return jax.lax.bitcast_convert_type(x, dtype) if x.dtype == jnp.uint16 else x


def turned(x: jax.Array) -> jax.Array:
    """The transpose of a matrix, written out by way of three dims. XLA folds a plain one into the product that reads it, which
    XLA-CPU then runs in float32, or, where the right operand contracts its last dim, not at all (jax 0.10.2: an error)."""
    n, m = x.shape
    part = next((s for s in (64, 32, 16, 8, 4, 2) if n % s == 0), 1)
    return x.reshape(n // part, part, m).transpose(2, 0, 1).reshape(m, n)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def rounded(x: jax.Array, exponent_bits: int, mantissa_bits: int) -> jax.Array:
    return jax.lax.reduce_precision(x, exponent_bits, mantissa_bits)


def _rounded_forward(x: jax.Array, exponent_bits: int, mantissa_bits: int):
    return rounded(x, exponent_bits, mantissa_bits), None


def _rounded_backward(exponent_bits: int, mantissa_bits: int, saved: None, g: jax.Array):
    return (g,)


rounded.defvjp(_rounded_forward, _rounded_backward)


def published(w: jax.Array, dtype: DTypeLike) -> jax.Array:
    """`w` rounded to `dtype` but kept in `accumulator(dtype)`; the gradient passes straight through.

    `reduce_precision`, not a pair of casts: XLA is free to drop a pair of casts.
    """
    info = jnp.finfo(dtype)
    return rounded(w.astype(accumulator(dtype)), info.nexp, info.nmant)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def gated(gate: jax.Array, up: jax.Array, dtype: DTypeLike) -> jax.Array:
    """silu(gate) * up (Shazeer, arXiv 2002.05202); the backward keeps both rounded to `dtype`."""
    return jax.nn.silu(gate) * up


def _gated_forward(gate: jax.Array, up: jax.Array, dtype: DTypeLike):
    return gated(gate, up, dtype), (stored(gate, dtype), stored(up, dtype))


def _gated_backward(dtype: DTypeLike, saved: tuple[jax.Array, jax.Array], g: jax.Array):
    gate, up = (restored(x, dtype).astype(g.dtype) for x in saved)
    sigmoid = jax.nn.sigmoid(gate)
    return g * up * sigmoid * (1 + gate * (1 - sigmoid)), g * gate * sigmoid


gated.defvjp(_gated_forward, _gated_backward)


def rope_frequencies(config: ModelConfig) -> np.ndarray:
    """Inverse wavelengths `[h / 2]` in radians per position, with Llama 3's scaling where the config has it."""
    h = config.head_dim
    freq = 1.0 / config.rope_theta ** (np.arange(0, h, 2, dtype=np.float64) / h)
    if (scaling := config.rope_scaling) is not None:
        wavelength = 2 * np.pi / freq
        low = scaling.original_max_position / scaling.low_freq_factor
        high = scaling.original_max_position / scaling.high_freq_factor
        smooth = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        mixed = (1 - smooth) * freq / scaling.factor + smooth * freq
        freq = np.where(wavelength > low, freq / scaling.factor, np.where(wavelength < high, freq, mixed))
    return freq


def rope_tables(config: ModelConfig, positions: jax.Array, dtype: DTypeLike) -> tuple[jax.Array, jax.Array]:
    """cos and sin `[..., T, h]` (each half repeated, the sine's first one negated) at integer `positions [..., T]`."""
    accum = accumulator(dtype)
    frequencies = jnp.asarray(rope_frequencies(config), accum).reshape((1,) * positions.ndim + (-1,))
    angle = positions[..., None].astype(accum) * frequencies
    cos, sin = _exact_factor(jnp.cos(angle), dtype), _exact_factor(jnp.sin(angle), dtype)
    return jnp.concatenate([cos, cos], axis=-1), jnp.concatenate([-sin, sin], axis=-1)


def _exact_factor(x: jax.Array, dtype: DTypeLike) -> jax.Array:
    """Twelve significant bits where operands are 16-bit: products of two such are exact in float32, so the sum of two
    products has the same bits whether or not the compiler contracts it (measured: it does so in some programs only)."""
    return rounded(x, 8, 11) if np.dtype(dtype).itemsize == 2 else x


def rotate(x: jax.Array, tables: tuple[jax.Array, jax.Array], dtype: DTypeLike) -> jax.Array:
    """Rotary positions on heads `[..., T, H, h]` (Su et al., arXiv 2104.09864; first half paired with second half)."""
    x = _exact_factor(x, dtype)
    cos, sin = (jnp.broadcast_to(table[..., None, :], x.shape) for table in tables)
    half = x.shape[-1] // 2
    swapped = jnp.concatenate([x[..., half:], x[..., :half]], axis=-1)
    return x * cos + swapped * sin
