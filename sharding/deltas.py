"""Bitwise deltas between two versions of published weights, made and applied shard by shard.

    trainer   old, new (one sharding) --- compare ---> positions ---> places, differences     host: merge shards, code
    engine    old (any sharding)      <-- scatter ---- positions <--- places, differences     host: decode, split by shard

An element's place is its rank among those of the leaf with an exponent like its own (`places.py`). A step of about the same
size everywhere changes an element with a probability that its exponent sets, so coding gaps between ranks class by class
(`bits.py`) takes fewer bits than positions would. Places do not depend on how either side is sharded.

Legend: Z devices of a mesh, C classes, S runs of a shard, K changed elements of a shard (padded).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec

from sharding.bits import Reader, Writer
from sharding.delta_file import Delta, Entry, Manifest, check_manifest
from sharding.places import CLASSES, Runs, programs, unsigned

Params = Mapping[str, jax.Array]
CHANGES_PER_CLASS = 1024
"""below this a class of its own costs more than it saves"""


def checksums(params: Params) -> dict[str, str]:
    """Of each leaf, the same for every sharding. Computed on the devices."""
    _check_arrays("checksums", params)
    sums = {name: programs(array.shape, _named(array)).sums(array, _starts(array)) for name, array in params.items()}
    return {name: _hex(_total(params[name], value)) for name, value in sums.items()}


def diff(old: Params, new: Params, base: int, version: int) -> Delta:
    """What leads from version `base` to `version`.

    Args:
        old, new: unrolled trees of the published dtype, sharded alike. Nothing is gathered but what a dense leaf holds.

    Raises:
        ValueError: names, shapes, dtypes or shardings differ, or `version` does not come after `base`.
    """
    if version <= base:
        raise ValueError(f"version: {version} does not come after base {base}; versions rise")
    _check_arrays("diff", old)
    check_manifest("diff", manifest(new), manifest(old))
    for name, array in old.items():
        if new[name].sharding != array.sharding:
            raise ValueError(
                f"diff: {name} is sharded in two ways, {array.sharding} and {new[name].sharding}; reshard one first"
            )
    bases, results = checksums(old), checksums(new)
    entries, payloads = [], []
    for name, array in old.items():
        data = _encode(array, new[name]) if array.size else b""
        kind = "sparse" if data else "same"
        if len(data) >= array.nbytes > 0:
            kind, data = "dense", np.ascontiguousarray(new[name]).reshape(-1).view(np.uint8).tobytes()
        entries.append(Entry(name, array.shape, str(array.dtype), bases[name], results[name], kind, len(data)))
        payloads.append(memoryview(data))
    return Delta(base, version, tuple(entries), tuple(payloads))


@dataclass(frozen=True)
class Staged:
    """A delta that is on the devices and was verified: only `apply` is left."""

    base: int
    version: int
    checksums: Mapping[str, str]
    dense: Params
    writes: Mapping[str, tuple[jax.Array, jax.Array]]
    """positions in each shard int32 `[Z, K]`, new bits `[Z, K]`"""


def stage(params: Params, version: int, delta: Delta) -> Staged:
    """Decodes a delta for these arrays and checks what would come of it. Changes nothing.

    Args:
        version: what `params` holds.

    Raises:
        ValueError: the delta is of another base or another manifest, or its result would not be what was published.
    """
    if delta.base != version:
        raise ValueError(f"delta.base: is {delta.base}, but the weights are version {version}; apply deltas once and in order")
    _check_arrays("stage", params)
    bases = {entry.name: entry.base_checksum for entry in delta.entries}
    check_manifest("stage", manifest(params), {entry.name: (entry.shape, entry.dtype) for entry in delta.entries})
    for name, checksum in checksums(params).items():
        if checksum != (wanted := bases[name]):
            raise ValueError(
                f"delta.{name}: leads from checksum {wanted}, but the weights have {checksum}; they are not version "
                f"{version} as it was published: fetch a snapshot"
            )
    dense: dict[str, jax.Array] = {}
    writes: dict[str, tuple[jax.Array, jax.Array]] = {}
    for entry, data in zip(delta.entries, delta.data, strict=True):
        name, array = entry.name, params[entry.name]
        result = entry.base_checksum
        if entry.kind == "sparse":
            position, after, rise = _decode(array, data)
            writes[name] = position, after
            programs(array.shape, _named(array)).write.lower(array, position, after).compile()  # so that `apply` does not
            result = _hex(_unhex(result) + _total(array, rise))
        elif entry.kind == "dense":
            whole = np.frombuffer(data, jnp.dtype(entry.dtype)).reshape(entry.shape)
            dense[name] = jax.make_array_from_callback(entry.shape, array.sharding, lambda index, whole=whole: whole[index])
            result = checksums({name: dense[name]})[name]
        if result != entry.checksum:
            raise ValueError(
                f"delta.{name}: its result would have checksum {result}, but {entry.checksum} was published as version "
                f"{delta.version}; fetch the delta again"
            )
    return Staged(delta.base, delta.version, {entry.name: entry.checksum for entry in delta.entries}, dense, writes)


def apply(params: Params, staged: Staged) -> dict[str, jax.Array]:
    """The new version in the place of the old, whose changed arrays are donated. Nothing but scatters on the devices."""
    assert params.keys() == staged.checksums.keys(), "a staged delta is applied to the tree it was staged for"
    result = {}
    for name, array in params.items():
        if name in staged.writes:
            array = programs(array.shape, _named(array)).write(array, *staged.writes[name])
        result[name] = staged.dense.get(name, array)
    return result


def manifest(params: Params) -> Manifest:
    return {name: (array.shape, str(array.dtype)) for name, array in params.items()}


# One leaf.


def _encode(old: jax.Array, new: jax.Array) -> bytes:
    """Empty if nothing changed."""
    make, places = programs(old.shape, _named(old)), _Places(old)
    words, starts, count = make.mark(old, new)
    counts = [int(row) for row in places.rows(count)]
    if not any(counts):
        return b""
    position, bins, difference = make.changes(old, new, words, starts, _room(max(counts)))
    bins_of = [row[:count] for row, count in zip(places.rows(bins), counts, strict=True)]
    edges = _edges(np.sum([np.bincount(row, minlength=256) for row in bins_of], axis=0))
    place, table = make.rank(old, edges, position)
    places.learn(table)
    class_of = np.searchsorted(edges, np.arange(256), side="right").astype(np.uint8)
    merged, steps = [], []
    for shard, (row, step) in enumerate(zip(places.rows(place), places.rows(difference), strict=True)):
        order = np.argsort(class_of[bins_of[shard]], kind="stable")  # within a class, places rise with positions
        merged.append(places.to_leaf(shard, row[order]))
        steps.append(step.view(f"i{step.itemsize}")[order])
    whole, step = merged[0], steps[0]
    if len(merged) > 1:
        order = np.argsort(whole := np.concatenate(merged), kind="stable")
        whole, step = whole[order], np.concatenate(steps)[order]
    writer = Writer()
    writer.data += edges.tobytes()
    for first, last in zip(places.classes[:-1], places.classes[1:], strict=True):
        inside = slice(*np.searchsorted(whole, (first, last)))
        writer.positions(whole[inside] - first, last - first)
        writer.steps(step[inside].astype(np.int64))
    return bytes(writer.data)


def _decode(old: jax.Array, data: memoryview) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Positions and new bits `[Z, K]`, and by how much the sums rise `[Z, 2]`."""
    make, places = programs(old.shape, _named(old)), _Places(old)
    reader = Reader(data)
    words, starts, table = make.classes(old, reader.bytes(CLASSES - 1))
    places.learn(table)
    wholes, steps = [], []
    for first, last in zip(places.classes[:-1], places.classes[1:], strict=True):
        wholes.append(reader.positions(last - first) + first)
        steps.append(reader.steps(len(wholes[-1])))
    step = np.concatenate(steps).astype(unsigned(old.dtype))
    shard, local = places.to_shards(np.concatenate(wholes))
    mine = [slice(None)] if len(places.first) == 1 else [np.flatnonzero(shard == at) for at in range(len(places.first))]
    parts = [local[own] for own in mine]
    room = _room(max(map(len, parts)))
    place = np.full((len(parts), room), prod(places.runs.local), np.int32)
    difference = np.zeros((len(parts), room), step.dtype)
    for row, (part, own) in enumerate(zip(parts, mine, strict=True)):
        place[row, : len(part)], difference[row, : len(part)] = part, step[own]
    put = NamedSharding(_named(old).mesh, PartitionSpec(_named(old).mesh.axis_names))
    place, difference = jax.device_put((place[places.same], difference[places.same]), put)
    return make.locate(old, words, starts, place, difference, _starts(old))


class _Places:
    """Between places in the shards and places in the whole leaf. Both are sorted by class first."""

    def __init__(self, array: jax.Array):
        self.runs = Runs(array.shape, _named(array))
        self.first, self.same = self.runs.owners()

    def rows(self, array: jax.Array) -> list[np.ndarray]:
        """Of an array `[Z, ...]`, those of the shards that make up the leaf."""
        return [row[0] for row in _rows(array, self.first)]

    def learn(self, table: jax.Array) -> None:
        """Takes the tables of the shards `[Z, C, S + 1]`."""
        tables = np.stack(self.rows(table)).astype(np.int64)
        order = self.runs.order()
        count = np.diff(tables, axis=2).swapaxes(0, 1).reshape(CLASSES, -1)  # [C, shards * S]
        ends = np.cumsum(count[:, order])
        starts = np.concatenate([[0], ends[:-1]]).reshape(count.shape)
        self.classes = [*starts[:, 0].tolist(), int(ends[-1])]
        self._ordered = starts.reshape(-1)  # of each class and run, in the order of the leaf
        self._owner = np.broadcast_to(order[None] // self.runs.count, count.shape).reshape(-1)
        in_shard = tables[:, :, :-1].swapaxes(0, 1).reshape(CLASSES, -1)
        self._shift = (starts - in_shard[:, order]).reshape(-1)  # leaf minus shard, in the order of the leaf
        back = np.empty(count.shape, np.int64)
        back[:, order] = self._shift.reshape(count.shape)
        self._shift_of = back.reshape(CLASSES, len(self.first), self.runs.count).swapaxes(0, 1)
        self._tables = tables

    def to_leaf(self, shard: int, place: np.ndarray) -> np.ndarray:
        if len(self.first) == 1:
            return place.astype(np.int64)
        run = np.searchsorted(self._tables[shard, :, :-1].reshape(-1), place, side="right") - 1
        return place + self._shift_of[shard].reshape(-1)[run]

    def to_shards(self, place: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Shard and place in it."""
        if len(self.first) == 1:
            return np.zeros(0, np.int64), place
        run = np.searchsorted(self._ordered, place, side="right") - 1
        return self._owner[run], place - self._shift[run]


def _edges(counts: np.ndarray) -> np.ndarray:
    """First bins of the classes after the first uint8 `[C - 1]`: each class with about as many changes."""
    total = int(counts.sum())
    wanted = min(CLASSES, 1 + total // CHANGES_PER_CLASS)
    shares = np.arange(1, wanted) * total / wanted
    edges = np.unique(np.searchsorted(np.cumsum(counts), shares) + 1)
    return np.concatenate([edges, np.full(CLASSES - 1 - len(edges), 255)]).clip(max=255).astype(np.uint8)


def _room(count: int) -> int:
    """A power of two or a quarter of one more: few sizes, so few programs, and little that is empty."""
    quarter = 1 << max(10, (max(count, 1) - 1).bit_length() - 3)
    return -(-max(count, 1) // quarter) * quarter


def _rows(array: jax.Array, wanted: np.ndarray) -> list[np.ndarray]:
    held = {shard.index[0].start or 0: shard.data for shard in array.addressable_shards}
    return jax.device_get([held[row] for row in wanted.tolist()])


def _total(array: jax.Array, sums: jax.Array) -> np.ndarray:
    """uint32 `[2]` of a leaf, from those of the devices `[Z, 2]`: each shard counts once."""
    rows = _rows(sums, Runs(array.shape, _named(array)).owners()[0])
    return np.concatenate(rows).sum(0, dtype=np.uint32)


def _starts(array: jax.Array) -> np.ndarray:
    return Runs(array.shape, _named(array)).starts.astype(np.uint32)


def _hex(sums: np.ndarray) -> str:
    return f"{sums[0]:08x}{sums[1]:08x}"


def _unhex(checksum: str) -> np.ndarray:
    return np.asarray([int(checksum[:8], 16), int(checksum[8:], 16)], np.uint32)


def _named(array: jax.Array) -> NamedSharding:
    assert isinstance(array.sharding, NamedSharding), array.sharding
    return array.sharding


def _check_arrays(what: str, params: Params) -> None:
    for name, array in params.items():
        if not isinstance(array.sharding, NamedSharding):
            raise ValueError(f"{what}: {name} has {array.sharding}; place it by rules on a mesh (sharding.reshard)")
        if np.dtype(array.dtype).itemsize not in (1, 2, 4) or not array.is_fully_addressable:
            raise ValueError(f"{what}: {name} is {array.dtype}; deltas are of 8, 16 or 32 bits, in one process")
