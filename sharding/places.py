"""Where elements of a sharded array stand among those with an exponent like theirs: bit maps, on each device.

Legend: N elements of a device's shard, G groups of 128 elements, C classes, S runs of a shard, K changed elements (padded),
Z devices of the mesh.

An element's *bin* is the top 8 bits of its magnitude (a float's exponent), its *class* a range of bins. All elements of a shard,
sorted by (class, position), have a *place* each. Place and position are exchanged by counting bits in one bit map for each
class: `rank` for position to place, `select` for place to position. Both ends of a delta hold the old bits, so both have the
same bit maps, and only places travel.

Everything here is one program per device over flat shards (`shard_map`), and has no collective.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, partial
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
    padded = jnp.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, -mask.shape[-1] % GROUP)])
    packed = jnp.packbits(padded, axis=-1, bitorder="little")
    return lax.bitcast_convert_type(packed.reshape(*mask.shape[:-1], -1, _WORDS, 4), jnp.uint32)


def _starts(words: jax.Array) -> jax.Array:
    counts = jnp.sum(lax.population_count(words).astype(jnp.int32), axis=-1)
    return jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(counts, dtype=jnp.int32)])


def _rank(words: jax.Array, starts: jax.Array, group: jax.Array, bit: jax.Array) -> jax.Array:
    """Set bits before bit `bit` (0 to 128) of a group."""
    below = jnp.clip(bit[:, None] - 32 * jnp.arange(_WORDS, dtype=jnp.int32)[None], 0, 32).astype(jnp.uint32)
    # a shift by all 32 bits is not defined, so the full word is a case of its own
    mask = jnp.where(below == 32, jnp.uint32(0xFFFFFFFF), (jnp.uint32(1) << (below & 31)) - 1)
    group_words = words[jnp.minimum(group, len(words) - 1)]
    return starts[group] + jnp.sum(lax.population_count(group_words & mask), axis=1).astype(jnp.int32)


def _select(words: jax.Array, starts: jax.Array, place: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Group and bit of the set bit that has `place` set bits before it. Nonsense past the last."""
    group = jnp.searchsorted(starts, place, side="right", method="scan_unrolled").astype(jnp.int32) - 1
    group = jnp.clip(group, 0, len(words) - 1)
    rest = place - starts[group]
    group_words = words[group]
    ends = jnp.cumsum(lax.population_count(group_words).astype(jnp.int32), axis=1)
    word = jnp.minimum(jnp.sum(ends <= rest[:, None], axis=1, dtype=jnp.int32), _WORDS - 1)
    rest = rest - jnp.where(word > 0, jnp.take_along_axis(ends, jnp.maximum(word - 1, 0)[:, None], axis=1)[:, 0], 0)
    bits, at = jnp.take_along_axis(group_words, word[:, None], axis=1)[:, 0], 32 * word
    for half in (16, 8, 4, 2, 1):
        low = lax.population_count(bits & jnp.uint32((1 << half) - 1)).astype(jnp.int32)
        above = rest >= low
        rest, at = jnp.where(above, rest - low, rest), jnp.where(above, at + half, at)
        bits = jnp.where(above, bits >> half, bits)
    return group, at


def _bits(x: jax.Array) -> jax.Array:
    return lax.bitcast_convert_type(x, unsigned(x.dtype)).reshape(-1)


def _bins(bits: jax.Array) -> jax.Array:
    magnitude = bits & bits.dtype.type(2 ** (8 * bits.dtype.itemsize - 1) - 1)
    return (magnitude >> bin_shift(bits.dtype)).astype(jnp.uint8)


def _class_map(old: jax.Array, edges: jax.Array) -> tuple[jax.Array, jax.Array]:
    """One bit map a class, one after the other: words `[C * G, 4]`, starts. `edges` uint8 `[C - 1]`: first bin of the next class."""
    bins = _bins(_bits(old))
    above = [_pack(bins >= edges[i]) for i in range(CLASSES - 1)]  # a class's bits: above its edge and not above the next
    every = _pack(jnp.ones(bins.shape, bool))
    words = jnp.concatenate([a & ~b for a, b in zip([every, *above], [*above, jnp.zeros_like(every)], strict=True)])
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


# Checksums: two sums over the elements of (bits * a hash of the position in the leaf). Linear in the bits, so those of a result
# are known before it is written; a sum, so shards add up in any order. The factors are odd: one changed element is always seen.


def _factors(position: jax.Array) -> list[jax.Array]:
    x = position * jnp.uint32(0x9E3779B1)
    x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA77)
    x = x ^ (x >> 13)
    return [x | 1, (x * jnp.uint32(0xC2B2AE3D)) ^ (x >> 16) | 1]


def _sums(position: jax.Array, bits: jax.Array) -> jax.Array:
    return jnp.stack([jnp.sum(bits * factor, dtype=jnp.uint32) for factor in _factors(position)])


def _wrapped(shape: tuple[int, ...]) -> list[np.uint32]:
    """Row-major strides, modulo 2^32."""
    return [np.uint32(prod(shape[dim + 1 :]) % 2**32) for dim in range(len(shape))]


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
    local, count, length, strides = runs.local, runs.count, runs.length, _wrapped(shape)
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
        group, bit = _select(words, starts, jnp.arange(room, dtype=jnp.int32))
        position = jnp.clip(group * GROUP + bit, 0, max(size - 1, 0))
        before, after = _bits(old)[position], _bits(new)[position]
        return position, _bins(before), after - before

    def rank(old: jax.Array, edges: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        words, starts = _class_map(old, edges)
        bins = _bins(_bits(old)[position])
        own = jnp.sum(bins[:, None] >= edges[None], axis=1, dtype=jnp.int32)
        place = _rank(words, starts, own * (len(words) // CLASSES) + position // GROUP, position % GROUP)
        return place, _table(words, starts, count, length)

    def classes(old: jax.Array, edges: jax.Array) -> tuple[jax.Array, ...]:
        words, starts = _class_map(old, edges)
        return words, starts, _table(words, starts, count, length)

    def locate(
        old: jax.Array, words: jax.Array, starts: jax.Array, place: jax.Array, difference: jax.Array, at: jax.Array
    ) -> tuple[jax.Array, ...]:
        group, bit = _select(words, starts, place)
        position = jnp.where(place < size, group % (len(words) // CLASSES) * GROUP + bit, size)
        before = _bits(old)[jnp.minimum(position, size - 1)]
        after = before + difference
        rise = jnp.where(place < size, after.astype(jnp.uint32) - before.astype(jnp.uint32), 0)
        inside = jnp.unravel_index(position, local) if local else ()
        whole = jnp.zeros(position.shape, jnp.uint32)
        for index, start, stride in zip(inside, at, strides, strict=True):
            whole = whole + (index.astype(jnp.uint32) + start) * stride
        return position, after, _sums(whole, rise)

    def sums(x: jax.Array, at: jax.Array) -> jax.Array:
        whole = jnp.zeros(local, jnp.uint32)
        for dim, stride in enumerate(strides):
            whole = whole + (lax.broadcasted_iota(jnp.uint32, local, dim) + at[dim]) * stride
        return _sums(whole, lax.bitcast_convert_type(x, unsigned(x.dtype)).astype(jnp.uint32))

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
