"""Where elements of a sharded array stand among those with an exponent like theirs: bit maps, on each device.

Legend: N elements of a device's shard, G groups of 128 elements, C classes, S runs of a shard, K changed elements (padded),
Z devices of the mesh.

An element's *bin* is the top 8 bits of its magnitude (a float's exponent), its *class* a range of bins. All elements of a shard,
sorted by (class, position), have a *place* each. Place and position are exchanged by counting bits in one bit map for each
class: `rank` for position to place, `select` for place to position. Both ends of a delta hold the old bits, so both have the
same bit maps, and only places travel.

Everything here is one program per device over flat shards (`shard_map`), and has no collective.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial, reduce
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

CLASSES = 6
GROUP = 128
_WORDS = GROUP // 32


@dataclass(frozen=True)
class Runs:
    """How a leaf is cut into shards, and each shard into runs that are contiguous in the whole leaf (row-major)."""

    shape: tuple[int, ...]
    sharding: NamedSharding

    @property
    def starts(self) -> np.ndarray:
        """Of each device's shard in the leaf `[Z, dims]`, in the order of the mesh."""
        indices = self.sharding.devices_indices_map(self.shape)
        return np.asarray(
            [[part.start or 0 for part in indices[device]] for device in self.sharding.mesh.devices.flat], np.int64
        ).reshape(self.sharding.mesh.size, len(self.shape))

    @property
    def local(self) -> tuple[int, ...]:
        return self.sharding.shard_shape(self.shape)

    @property
    def length(self) -> int:
        """Elements of a run: the last dim that is cut, and all after it."""
        cut = [dim for dim, (part, whole) in enumerate(zip(self.local, self.shape, strict=True)) if part != whole]
        return prod(self.local[cut[-1] :] if cut else self.local)

    @property
    def count(self) -> int:
        """Runs of a shard."""
        return prod(self.local) // self.length if self.length else 1

    def owners(self) -> tuple[np.ndarray, np.ndarray]:
        """The devices whose shards make up the leaf once `[shards]`, and for each of the devices `[Z]` which of those it equals."""
        _, first, same = np.unique(self.starts, axis=0, return_index=True, return_inverse=True)
        return first, same.reshape(-1)

    def order(self) -> np.ndarray:
        """Row-major order of all runs of the shards of `owners`: indices into `[shards, count]`, flat."""
        first, _ = self.owners()
        strides = np.asarray([prod(self.shape[dim + 1 :]) for dim in range(len(self.shape))], np.int64)
        at = np.arange(self.count, dtype=np.int64) * self.length  # of each run in its flat shard
        within = np.stack(np.unravel_index(at, self.local), -1) @ strides if self.shape else np.zeros(1, np.int64)
        return np.argsort(((self.starts[first] @ strides)[:, None] + within[None]).reshape(-1), kind="stable")


def unsigned(dtype: Any) -> np.dtype:
    """The unsigned integers with as many bits."""
    return np.dtype(f"u{np.dtype(dtype).itemsize}")


def bin_shift(dtype: Any) -> int:
    """Bits of the magnitude below the bin."""
    return max(0, 8 * np.dtype(dtype).itemsize - 9)


# Bit maps of one device. `words` [groups, 4] uint32; `starts` [groups + 1] int32 counts the bits before each group.


def _pack(mask: jax.Array) -> jax.Array:
    """bool `[..., N]` -> words `[..., G, 4]`; what pads the last group is not set."""
    size, whole = mask.shape[-1], mask.shape[-1] // GROUP * GROUP
    rest = jnp.pad(mask[..., whole:], [(0, 0)] * (mask.ndim - 1) + [(0, -size % GROUP)])  # apart: a padded whole packs slowly
    packed = [jnp.packbits(part, axis=-1, bitorder="little") for part in (mask[..., :whole], rest) if part.shape[-1]]
    return lax.bitcast_convert_type(jnp.concatenate(packed, axis=-1).reshape(*mask.shape[:-1], -1, _WORDS, 4), jnp.uint32)


def _starts(words: jax.Array) -> jax.Array:
    counts = jnp.sum(lax.population_count(words).astype(jnp.int32), axis=-1)
    rows = jnp.pad(counts, (0, -len(counts) % 32)).reshape(-1, 32)  # in two levels: XLA's cumsum is slow on CPUs
    inside = jnp.cumsum(rows, axis=1, dtype=jnp.int32)
    before = jnp.cumsum(inside[:, -1], dtype=jnp.int32) - inside[:, -1]
    ends = (inside + before[:, None]).reshape(-1)[: len(counts)]
    return jnp.concatenate([jnp.zeros(1, jnp.int32), ends])


def _low(bits: jax.Array) -> jax.Array:
    """Words with their first bits set, as many as each number says (0 to 32, clipped)."""
    bits = jnp.clip(bits, 0, 32).astype(jnp.uint32)
    # a shift by all 32 bits is not defined, so the full word is a case of its own
    return jnp.where(bits == 32, jnp.uint32(0xFFFFFFFF), (jnp.uint32(1) << (bits & 31)) - 1)


def _rank(words: jax.Array, starts: jax.Array, group: jax.Array, bit: jax.Array) -> jax.Array:
    """Set bits before bit `bit` (0 to 128) of a group."""
    below = _low(bit[:, None] - 32 * jnp.arange(_WORDS, dtype=jnp.int32)[None])
    return _take(starts, group) + jnp.sum(lax.population_count(_take(words, group) & below), axis=1).astype(jnp.int32)


def _group(starts: jax.Array, place: jax.Array) -> jax.Array:
    """The group of the set bit that has `place` set bits before it: the last that does not start after it."""
    group = jnp.zeros(place.shape, jnp.int32)
    last = len(starts) - 2
    for power in reversed(range(max(last, 0).bit_length())):
        step = jnp.minimum(group + (1 << power), last)
        group = jnp.where(_take(starts, step) <= place, step, group)
    return group


def _groups_in_turn(starts: jax.Array, room: int) -> jax.Array:
    """`_group` of the places 0, 1, ... up to `room`."""
    steps = jnp.zeros(room, jnp.int32).at[starts[1:-1]].add(1, mode="drop")
    return jnp.cumsum(steps, dtype=jnp.int32)


def _select(words: jax.Array, starts: jax.Array, place: jax.Array, group: jax.Array) -> jax.Array:
    """Bit in its group of the set bit that has `place` set bits before it. Nonsense past the last."""
    rest = place - _take(starts, group)
    own = _take(words, group)
    bits, at = own[:, 0], jnp.zeros_like(rest)
    for word in range(_WORDS - 1):
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


def _take(x: jax.Array, index: jax.Array) -> jax.Array:
    """Rows of x; every index is one of them."""
    return x.at[index].get(mode="promise_in_bounds")


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, unsigned(x.dtype)).reshape(-1)


def _magnitude(bits: jax.Array) -> jax.Array:
    return bits & bits.dtype.type(2 ** (8 * bits.dtype.itemsize - 1) - 1)


def _bins(bits: jax.Array) -> jax.Array:
    return (_magnitude(bits) >> bin_shift(bits.dtype)).astype(jnp.uint8)


def _class_map(old: jax.Array, edges: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One bit map a class, one after the other: words `[C * G, 4]`, starts.

    Args:
        edges: first bin of each class but the first, uint8 `[C - 1]`.
    """
    bits = _magnitude(_bits(old))
    above = _pack(bits[None] >= (edges.astype(bits.dtype) << bin_shift(bits.dtype))[:, None])
    groups = above.shape[1]
    every = _low(old.size - 32 * jnp.arange(_WORDS * groups, dtype=jnp.int32)).reshape(1, groups, _WORDS)
    # a class's elements are above its edge and not above the next
    words = jnp.concatenate([every, above]) & ~jnp.concatenate([above, jnp.zeros_like(every)])
    words = words.reshape(-1, _WORDS)
    return words, _starts(words)


def _table(words: jax.Array, starts: jax.Array, runs: int, length: int) -> jax.Array:
    """Place of the first element of each class at the start of each run, and past the last `[C, S + 1]`."""
    groups = len(words) // CLASSES
    at = jnp.arange(runs + 1, dtype=jnp.int32) * length
    # a run may end where the last group does: then it is all of the group before
    group = jnp.minimum(at // GROUP, max(groups - 1, 0))
    every = groups * jnp.arange(CLASSES, dtype=jnp.int32)[:, None] + group[None]
    bit = jnp.broadcast_to((at - group * GROUP)[None], every.shape)
    return _rank(words, starts, every.reshape(-1), bit.reshape(-1)).reshape(every.shape)


# Checksums: two sums over the elements of (bits * a hash of the coordinates in the leaf). Linear in the bits, so those of a
# result are known before it is written; a sum, so shards add up in any order. Factors are odd, so one changed element is seen.

SALTS = (0x9E3779B1, 0xC2B2AE3D)


def _hash(coordinate: jax.Array, salt: int, dim: int) -> jax.Array:
    x = (coordinate + jnp.uint32(dim << 28)) * jnp.uint32(salt)
    x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA77)
    return x ^ (x >> 13)


def _factors(coordinates: Sequence[jax.Array], salt: int) -> jax.Array:
    """Of elements with these coordinates in the leaf (one array a dim)."""
    hashes = [_hash(coordinate, salt, dim) for dim, coordinate in enumerate(coordinates)]
    return reduce(jnp.bitwise_xor, hashes, jnp.uint32(0)) | 1


def _sum_of(x: jax.Array, start: jax.Array, salt: int) -> jax.Array:
    """One of the sums over a shard. The order of the work is what XLA makes fast on CPUs: eight rows at a time."""
    shape = (1, *x.shape) if x.ndim < 2 else x.shape
    bits = lax.bitcast_convert_type(x, unsigned(x.dtype)).reshape(-1, *shape[-1:])
    rows, width = bits.shape
    inside = jnp.unravel_index(jnp.arange(rows, dtype=jnp.uint32), x.shape[:-1]) if x.ndim > 1 else ()
    outer = [index.astype(jnp.uint32) + first for index, first in zip(inside, start, strict=False)]
    row = reduce(jnp.bitwise_xor, [_hash(index, salt, dim) for dim, index in enumerate(outer)], jnp.zeros(rows, jnp.uint32))
    last = _hash(jnp.arange(width, dtype=jnp.uint32) + start[-1], salt, x.ndim - 1) if x.ndim else jnp.zeros(1, jnp.uint32)
    row, last = lax.optimization_barrier((row, last))  # made once, not once an element
    products = bits.astype(jnp.uint32) * ((row[:, None] ^ last[None]) | 1)
    whole = rows // 8 * 8
    by_eight = products[:whole].reshape(-1, 8, width)
    summed = reduce(jnp.add, [by_eight[:, i] for i in range(8)])
    return jnp.sum(summed, dtype=jnp.uint32) + jnp.sum(products[whole:], dtype=jnp.uint32)


# Programs over sharded leaves. Each takes and returns arrays `[Z, ...]`, one row for each device of the mesh.


@dataclass(frozen=True)
class Programs:
    """Jitted functions for leaves of one shape and sharding."""

    mark: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    """old, new -> words, starts, number of changed elements `[Z]`"""
    changes: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    """old, new, words, starts, K -> positions int32, bins uint8 and differences (unsigned) of changed elements `[Z, K]`"""
    rank: Callable[..., tuple[jax.Array, jax.Array]]
    """old, edges, positions -> places `[Z, K]`, table `[Z, C, S + 1]`"""
    classes: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    """old, edges -> words, starts, table"""
    locate: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    """old, words, starts, places `[Z, K]` (N: none), differences `[Z, K]`, shard starts -> positions, new bits, rise of the sums"""
    sums: Callable[..., jax.Array]
    """leaf, shard starts `[Z, dims]` uint32 -> uint32 `[Z, 2]`"""
    write: Callable[..., jax.Array]
    """old (donated), positions, new bits -> new"""


@cache
def programs(shape: tuple[int, ...], sharding: NamedSharding) -> Programs:
    """The programs for a leaf; jit keeps one of each dtype and K."""
    runs = Runs(shape, sharding)
    local, count, length = runs.local, runs.count, runs.length
    size = prod(local)
    assert size < 2**31 - GROUP, f"a shard of {list(shape)} has {size} elements; places are int32"
    specs = {"leaf": sharding.spec, "row": PartitionSpec(sharding.mesh.axis_names), "same": PartitionSpec()}

    def each(body: Callable[..., Any], ins: str, outs: str, **options: Any) -> Any:
        """Rows lose their device dim on the way in and get it back on the way out."""
        kinds = ins.split()

        def device(*arguments: jax.Array) -> Any:
            result = body(*(x[0] if kind == "row" else x for x, kind in zip(arguments, kinds, strict=True)))
            return result if outs == "leaf" else jax.tree.map(lambda x: x[None], result)

        in_specs = tuple(specs[kind] for kind in kinds)
        mapped = jax.shard_map(device, mesh=sharding.mesh, in_specs=in_specs, out_specs=specs[outs], check_vma=False)
        return jax.jit(mapped, **options)

    def mark(old: jax.Array, new: jax.Array) -> tuple[jax.Array, ...]:
        words = _pack(_bits(old) != _bits(new))
        starts = _starts(words)
        return words, starts, starts[-1]

    def changes(room: int, old: jax.Array, new: jax.Array, words: jax.Array, starts: jax.Array) -> tuple[jax.Array, ...]:
        group = _groups_in_turn(starts, room)
        position = group * GROUP + _select(words, starts, jnp.arange(room, dtype=jnp.int32), group)
        position = jnp.minimum(position, size - 1)
        before, after = _take(_bits(old), position), _take(_bits(new), position)
        return position, _bins(before), after - before

    def rank(old: jax.Array, edges: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        words, starts = _class_map(old, edges)
        bins = _bins(_take(_bits(old), position))
        own = jnp.sum(bins[:, None] >= edges[None], axis=1, dtype=jnp.int32)
        place = _rank(words, starts, own * (len(words) // CLASSES) + position // GROUP, position % GROUP)
        return place, _table(words, starts, count, length)

    def classes(old: jax.Array, edges: jax.Array) -> tuple[jax.Array, ...]:
        words, starts = _class_map(old, edges)
        return words, starts, _table(words, starts, count, length)

    def locate(
        old: jax.Array, words: jax.Array, starts: jax.Array, place: jax.Array, difference: jax.Array, at: jax.Array
    ) -> tuple[jax.Array, ...]:
        group = _group(starts, place)
        position = group % (len(words) // CLASSES) * GROUP + _select(words, starts, place, group)
        position = jnp.where(place < size, position, size)
        before = _take(_bits(old), jnp.minimum(position, size - 1))
        after = before + difference
        rise = jnp.where(place < size, after.astype(jnp.uint32) - before.astype(jnp.uint32), 0)
        inside = jnp.unravel_index(position, local) if local else ()
        whole = [index.astype(jnp.uint32) + start for index, start in zip(inside, at, strict=True)]
        return position, after, jnp.stack([jnp.sum(rise * _factors(whole, salt), dtype=jnp.uint32) for salt in SALTS])

    def sums(x: jax.Array, at: jax.Array) -> jax.Array:
        return jnp.stack([_sum_of(x, at, salt) for salt in SALTS])

    def write(old: jax.Array, position: jax.Array, after: jax.Array) -> jax.Array:
        bits = _bits(old).at[position].set(after, mode="drop")
        return lax.bitcast_convert_type(bits.reshape(local), old.dtype)

    @cache
    def changes_of(room: int) -> Any:
        return each(partial(changes, room), "leaf leaf row row", "row")

    return Programs(
        mark=each(mark, "leaf leaf", "row"),
        changes=lambda old, new, words, starts, room: changes_of(room)(old, new, words, starts),
        rank=each(rank, "leaf same row", "row"),
        classes=each(classes, "leaf same", "row"),
        locate=each(locate, "leaf row row row row row", "row"),
        sums=each(sums, "leaf row", "row"),
        write=each(write, "leaf row row", "leaf", donate_argnums=0),
    )
