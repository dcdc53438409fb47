"""Bit maps of one device: how many bits are set before one, and where the n-th set bit is.

Legend: N bits, G groups of 128 bits, K questions.

`words` uint32 `[G, 4]`; `starts` int32 `[G + 1]` counts the set bits before each group.
"""

import jax
import jax.numpy as jnp
from jax import lax

GROUP = 128
WORDS = GROUP // 32


def pack(mask: jax.Array) -> jax.Array:
    """bool `[..., N]` -> words `[..., G, 4]`; what pads the last group is not set."""
    size, whole = mask.shape[-1], mask.shape[-1] // GROUP * GROUP
    rest = jnp.pad(mask[..., whole:], [(0, 0)] * (mask.ndim - 1) + [(0, -size % GROUP)])  # apart: a padded whole packs slowly
    packed = [jnp.packbits(part, axis=-1, bitorder="little") for part in (mask[..., :whole], rest) if part.shape[-1]]
    return lax.bitcast_convert_type(jnp.concatenate(packed, axis=-1).reshape(*mask.shape[:-1], -1, WORDS, 4), jnp.uint32)


def starts_of(words: jax.Array) -> jax.Array:
    counts = jnp.sum(lax.population_count(words).astype(jnp.int32), axis=-1)
    rows = jnp.pad(counts, (0, -len(counts) % 32)).reshape(-1, 32)  # in two levels: XLA's cumsum is slow on CPUs
    inside = jnp.cumsum(rows, axis=1, dtype=jnp.int32)
    before = jnp.cumsum(inside[:, -1], dtype=jnp.int32) - inside[:, -1]
    ends = (inside + before[:, None]).reshape(-1)[: len(counts)]
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends])


def low(bits: jax.Array) -> jax.Array:
    """Words with their first bits set, as many as each number says (0 to 32, clipped)."""
    bits = jnp.clip(bits, 0, 32).astype(jnp.uint32)
    # a shift by all 32 bits is not defined, so the full word is a case of its own
    return jnp.where(bits == 32, jnp.uint32(0xFFFFFFFF), (jnp.uint32(1) << (bits & 31)) - 1)


def rank_of(words: jax.Array, starts: jax.Array, group: jax.Array, bit: jax.Array) -> jax.Array:
    """Set bits before bit `bit` (0 to 128) of a group."""
    below = low(bit[:, None] - 32 * jnp.arange(WORDS, dtype=jnp.int32)[None])
    return take(starts, group) + jnp.sum(lax.population_count(take(words, group) & below), axis=1).astype(jnp.int32)


def group_of(starts: jax.Array, place: jax.Array) -> jax.Array:
    """The group of the set bit that has `place` set bits before it: the last that does not start after it."""
    group = jnp.zeros(place.shape, jnp.int32)
    last = len(starts) - 2
    for power in reversed(range(max(last, 0).bit_length())):
        step = jnp.minimum(group + (1 << power), last)
        group = jnp.where(take(starts, step) <= place, step, group)
    return group


def groups_in_turn(starts: jax.Array, room: int) -> jax.Array:
    """`group_of` of the places 0, 1, ... up to `room`."""
    steps = jnp.zeros(room, jnp.int32).at[starts[1:-1]].add(1, mode="drop")
    return jnp.cumsum(steps, dtype=jnp.int32)


def select(words: jax.Array, starts: jax.Array, place: jax.Array, group: jax.Array) -> jax.Array:
    """Bit in its group of the set bit that has `place` set bits before it. Nonsense past the last."""
    rest = place - take(starts, group)
    own = take(words, group)
    bits, at = own[:, 0], jnp.zeros_like(rest)
    for word in range(WORDS - 1):
        count = lax.population_count(own[:, word]).astype(jnp.int32)
        later = (rest >= count) & (at == 32 * word)
        rest = jnp.where(later, rest - count, rest)
        bits, at = jnp.where(later, own[:, word + 1], bits), jnp.where(later, at + 32, at)
    for half in (16, 8, 4, 2, 1):
        count = lax.population_count(bits & jnp.uint32((1 << half) - 1)).astype(jnp.int32)
        above = rest >= count
        rest, at = jnp.where(above, rest - count, rest), jnp.where(above, at + half, at)
        bits = jnp.where(above, bits >> half, bits)
    return at


def take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of x; every index is one of them."""
    return x.at[index].get(mode="promise_in_bounds")
