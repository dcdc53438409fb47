"""Where elements of a sharded array stand among those with an exponent like theirs: bit maps, on each device.

Legend: N elements of a device's shard, G groups of 128 elements, C classes, S runs of a shard, K changed elements (padded),
Z devices of the mesh.

An element's *bin* is the top 8 bits of its magnitude (a float's exponent), its *class* a range of bins. All elements of a
shard, sorted by (class, position), have a *place* each. Place and position are exchanged by counting bits in one bit map for
each class (`bitmaps.py`). Both ends of a delta hold the old bits, so both have the same bit maps, and only places travel.

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
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sharding.bitmaps import GROUP, WORDS, group_of, groups_in_turn, low, pack, rank_of, select, starts_of, take

CLASSES = 4


@dataclass(frozen=True)
class Runs:
    """How a leaf is cut into shards, and each shard into runs that are contiguous in the whole leaf (row-major)."""

    shape: tuple[int, ...]
    sharding: NamedSharding

    @property
    def starts(self) -> np.ndarray:
        """Of each device's shard in the leaf `[Z, dims]`, in the order of the mesh."""
        mesh, indices = self.sharding.mesh, self.sharding.devices_indices_map(self.shape)
        assert isinstance(mesh, Mesh), "arrays are on devices"
        rows = [[part.start or 0 for part in indices[device]] for device in mesh.devices.flat]
        return np.asarray(rows, np.int64).reshape(mesh.size, len(self.shape))

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
        """The devices whose shards make up the leaf once `[shards]`, and for each device `[Z]` which of those it equals."""
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
    above = pack(bits[None] >= (edges.astype(bits.dtype) << bin_shift(bits.dtype))[:, None])
    groups = above.shape[1]
    every = low(old.size - 32 * jnp.arange(WORDS * groups, dtype=jnp.int32)).reshape(1, groups, WORDS)
    # a class's elements are above its edge and not above the next
    words = jnp.concatenate([every, above]) & ~jnp.concatenate([above, jnp.zeros_like(every)])
    words = words.reshape(-1, WORDS)
    return words, starts_of(words)


def _table(words: jax.Array, starts: jax.Array, runs: int, length: int) -> jax.Array:
    """Place of the first element of each class at the start of each run, and past the last `[C, S + 1]`."""
    groups = len(words) // CLASSES
    at = jnp.arange(runs + 1, dtype=jnp.int32) * length
    # a run may end where the last group does: then it is all of the group before
    group = jnp.minimum(at // GROUP, max(groups - 1, 0))
    every = groups * jnp.arange(CLASSES, dtype=jnp.int32)[:, None] + group[None]
    bit = jnp.broadcast_to((at - group * GROUP)[None], every.shape)
    return rank_of(words, starts, every.reshape(-1), bit.reshape(-1)).reshape(every.shape)


# Checksums: sums over the elements of (bits * f) and (bits * f * g), f a hash of all coordinates in the leaf, g of the last.
# Linear in the bits, so those of a result are known before it is written; sums, so shards add up in any order; f and g are odd,
# so one changed element is always seen.

_SALTS = (0x9E3779B1, 0xC2B2AE3D)


def _hash(coordinate: jax.Array, dim: int, salt: int = _SALTS[0]) -> jax.Array:
    x = (coordinate + jnp.uint32(dim << 28)) * jnp.uint32(salt)
    x = (x ^ (x >> 15)) * jnp.uint32(0x85EBCA77)
    return x ^ (x >> 13)


def _sums_of_some(coordinates: Sequence[jax.Array], bits: jax.Array) -> jax.Array:
    """uint32 `[2]` over elements `[K]` with these coordinates in the leaf (one array a dim)."""
    if not coordinates:  # a scalar has one element, at 0
        coordinates = [jnp.zeros(bits.shape, jnp.uint32)]
    first = bits * (reduce(jnp.bitwise_xor, [_hash(index, dim) for dim, index in enumerate(coordinates)]) | 1)
    second = first * (_hash(coordinates[-1], 0, _SALTS[1]) | 1)
    return jnp.stack([jnp.sum(first, dtype=jnp.uint32), jnp.sum(second, dtype=jnp.uint32)])


def _sums_of_all(x: jax.Array, start: jax.Array) -> jax.Array:
    """uint32 `[2]` over a shard that begins at these coordinates. Eight rows at a time: XLA's sums are slow on CPUs."""
    x, start = (x.reshape(1), jnp.zeros(1, jnp.uint32)) if x.ndim == 0 else (x, start)
    bits = lax.bitcast_convert_type(x, unsigned(x.dtype)).reshape(prod(x.shape[:-1]), x.shape[-1])
    rows, width = bits.shape
    inside = jnp.unravel_index(jnp.arange(rows, dtype=jnp.uint32), x.shape[:-1]) if x.ndim > 1 else ()
    outer = [_hash(index.astype(jnp.uint32) + start[dim], dim) for dim, index in enumerate(inside)]
    row = reduce(jnp.bitwise_xor, outer, jnp.zeros(rows, jnp.uint32))
    last = jnp.arange(width, dtype=jnp.uint32) + start[-1]
    row, column = lax.optimization_barrier((row, _hash(last, x.ndim - 1)))  # made once, not once an element
    products = bits.astype(jnp.uint32) * ((row[:, None] ^ column[None]) | 1)
    whole = rows // 8 * 8
    by_eight = products[:whole].reshape(rows // 8, 8, width)
    eighths = lax.optimization_barrier(reduce(jnp.add, [by_eight[:, i] for i in range(8)]))
    columns = jnp.sum(eighths, axis=0, dtype=jnp.uint32) + jnp.sum(products[whole:], axis=0, dtype=jnp.uint32)
    second = columns * (_hash(last, 0, _SALTS[1]) | 1)
    return jnp.stack([jnp.sum(columns, dtype=jnp.uint32), jnp.sum(second, dtype=jnp.uint32)])


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
    """old, words, starts, places (N: none) and differences `[Z, K]`, shard starts -> positions, new bits, rise of the sums"""
    sums: Callable[..., jax.Array]
    """leaf, shard starts `[Z, dims]` uint32 -> uint32 `[Z, 2]`"""
    write: Any
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
        words = pack(_bits(old) != _bits(new))
        starts = starts_of(words)
        return words, starts, starts[-1]

    def changes(room: int, old: jax.Array, new: jax.Array, words: jax.Array, starts: jax.Array) -> tuple[jax.Array, ...]:
        group = groups_in_turn(starts, room)
        position = group * GROUP + select(words, starts, jnp.arange(room, dtype=jnp.int32), group)
        position = jnp.minimum(position, size - 1)
        before, after = take(_bits(old), position), take(_bits(new), position)
        return position, _bins(before), after - before

    def rank(old: jax.Array, edges: jax.Array, position: jax.Array) -> tuple[jax.Array, jax.Array]:
        words, starts = _class_map(old, edges)
        bins = _bins(take(_bits(old), position))
        own = jnp.sum(bins[:, None] >= edges[None], axis=1, dtype=jnp.int32)
        place = rank_of(words, starts, own * (len(words) // CLASSES) + position // GROUP, position % GROUP)
        return place, _table(words, starts, count, length)

    def classes(old: jax.Array, edges: jax.Array) -> tuple[jax.Array, ...]:
        words, starts = _class_map(old, edges)
        return words, starts, _table(words, starts, count, length)

    def locate(
        old: jax.Array, words: jax.Array, starts: jax.Array, place: jax.Array, difference: jax.Array, at: jax.Array
    ) -> tuple[jax.Array, ...]:
        group = group_of(starts, place)
        position = group % (len(words) // CLASSES) * GROUP + select(words, starts, place, group)
        position = jnp.where(place < size, position, size)
        before = take(_bits(old), jnp.minimum(position, size - 1))
        after = before + difference
        rise = jnp.where(place < size, after.astype(jnp.uint32) - before.astype(jnp.uint32), 0)
        inside = jnp.unravel_index(position, local) if local else ()
        whole = [index.astype(jnp.uint32) + start for index, start in zip(inside, at, strict=True)]
        return position, after, _sums_of_some(whole, rise)

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
        sums=each(_sums_of_all, "leaf row", "row"),
        write=each(write, "leaf row row", "leaf", donate_argnums=0),
    )
