"""A delta as bytes: what it leads from and to, an entry for each leaf, their data, and a checksum of all of it."""

import hashlib
import json
import struct
import zlib
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from math import prod
from typing import Literal, get_args

import jax.numpy as jnp
import numpy as np

MAGIC = b"twinax delta 1\n\0"
_HEAD = struct.Struct("<16sQ")
_SUM_BYTES = hashlib.sha256().digest_size
Kind = Literal["same", "sparse", "dense"]
Manifest = Mapping[str, tuple[tuple[int, ...], str]]
"""name -> shape, dtype"""


@dataclass(frozen=True)
class Entry:
    """One leaf of the new version."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    base_checksum: str
    """of the leaf that it leads from (`deltas.checksums`)"""
    checksum: str
    """of the result"""
    kind: Kind
    """sparse: places and differences of changed elements; dense: all bits, row-major"""
    size: int
    """bytes of its data"""


@dataclass(frozen=True)
class Delta:
    """Leads from exactly `base` to exactly `version`."""

    base: int
    version: int
    entries: tuple[Entry, ...]
    data: tuple[memoryview, ...]

    def to_bytes(self) -> bytes:
        """Raises no error: what `diff` makes can be stored."""
        header = {"base": self.base, "version": self.version, "entries": [asdict(entry) for entry in self.entries]}
        packed = zlib.compress(json.dumps(header, separators=(",", ":")).encode(), 6)
        whole = b"".join([_HEAD.pack(MAGIC, len(packed)), packed, *self.data])
        return whole + hashlib.sha256(whole).digest()

    @classmethod
    def from_bytes(cls, whole: bytes) -> "Delta":
        """Shares the bytes.

        Raises:
            ValueError: they are not those that `to_bytes` made.
        """
        view = memoryview(whole)
        if len(view) < _HEAD.size + _SUM_BYTES or hashlib.sha256(view[:-_SUM_BYTES]).digest() != bytes(view[-_SUM_BYTES:]):
            raise ValueError("delta: its checksum is not that of its bytes, so it is cut or corrupted; fetch it again")
        magic, length = _HEAD.unpack_from(view)
        if magic != MAGIC:
            raise ValueError(f"delta: begins with {magic!r}, wanted {MAGIC!r}; it is of another format")
        header = json.loads(zlib.decompress(view[_HEAD.size : _HEAD.size + length]))
        entries = tuple(Entry(**entry | {"shape": tuple(entry["shape"])}) for entry in header["entries"])
        assert all(entry.kind in get_args(Kind) for entry in entries)
        ends = _HEAD.size + length + np.cumsum([0, *(entry.size for entry in entries)])
        assert ends[-1] == len(view) - _SUM_BYTES, "a delta's data is as long as its entries say"
        data = tuple(view[start:end] for start, end in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True))
        return cls(header["base"], header["version"], entries, data)

    @property
    def weight_bytes(self) -> int:
        """Of the weights that it is about."""
        return sum(prod(entry.shape) * jnp.dtype(entry.dtype).itemsize for entry in self.entries)


def check_manifest(what: str, have: Manifest, want: Manifest) -> None:
    """Names, shapes and dtypes, both ways, and everything at once.

    Raises:
        ValueError: with one line for each difference.
    """
    faults = [f"{name} is missing" for name in want if name not in have]
    faults += [f"{name} is extra" for name in have if name not in want]
    faults += [
        f"{name} is {dtype} {list(shape)}, wanted {want[name][1]} {list(want[name][0])}"
        for name, (shape, dtype) in have.items()
        if name in want and (shape, dtype) != want[name]
    ]
    if faults:
        listing = "\n  ".join(faults)
        raise ValueError(
            f"{what}: the trees differ in {len(faults)} places, nothing was changed; describe both with one model config:\n"
            f"  {listing}"
        )
