"""A versioned store of published weights on tensorstore's key-value layer: `memory://`, `file:///folder/`, `gs://`, `s3://`.

    head                          the only key that changes: all versions that are kept, and who reads which. Compare-and-swap
    data/VERSION-DIGEST/manifest  names, shapes, dtypes and checksums of the leaves; never changes
                       /delta     from the version before, if the publisher had that
                       /anchor/*  every n versions: all bits of each leaf

A publisher stages its keys, which nobody sees, then swaps the head; keys hold a digest of the content, so publishers of the
same version never write over each other, and one that was killed leaves nothing that anyone reads. What is read is believed
only if the checksums of the result, computed where the weights end up, are the manifest's.
"""

import hashlib
import json
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import tensorstore as ts
from jax.sharding import Sharding

from sharding.delta_file import Delta, Manifest, check_manifest
from sharding.deltas import Params, apply, checksums, diff, manifest, stage
from sharding.head import Head, Version

NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*")
IN_FLIGHT = 2**28
"""bytes of an anchor that are on their way at once"""
CONTEXT = ts.Context()
"""shared, so that all stores of a process see the same `memory://`"""


class Superseded(RuntimeError):
    """Another publisher was first."""


def open_url(url: str) -> ts.KvStore:
    """What a URL names. Of `s3://`, AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL says where it is if not at AWS, as it does to AWS's
    own programs (tensorstore does not read them). Its writes on a condition must be atomic, as AWS's are."""
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    if not (endpoint and url.startswith("s3://")):
        return ts.KvStore.open(url, context=CONTEXT).result()
    bucket, _, path = url.removeprefix("s3://").partition("/")
    region = os.environ.get("AWS_REGION", "us-east-1")  # requests are signed for one
    spec = {"driver": "s3", "bucket": bucket, "path": path, "endpoint": endpoint, "aws_region": region}
    return ts.KvStore.open(spec, context=CONTEXT).result()


class WeightStore:
    """Reads and writes one store. Any number of these, in any processes, may use one at once.

    Args:
        url: a folder or prefix; it ends in a slash.
        anchor_every: versions from one anchor to the next.
        keep: how many of the newest versions `collect` keeps.
    """

    def __init__(self, url: str, anchor_every: int = 25, keep: int = 4):
        if anchor_every < 1 or keep < 1:
            raise ValueError(f"anchor_every, keep: must be at least 1, got {anchor_every} and {keep}")
        if not url.endswith("/"):
            raise ValueError(f"url: {url!r} must end in a slash, as it is a folder")
        self.anchor_every, self.keep = anchor_every, keep
        self._kv = open_url(url)

    def head(self) -> Head:
        return self._head()[0]

    def publish(self, params: Params, version: int, base: int | None = None, old: Params | None = None) -> Version:
        """Stages a version and makes it the head. The same version with the same bits again is a no-op.

        Args:
            params: unrolled weights in the published dtype.
            base: the version that the head must have now (None: the store is empty).
            old: the weights of `base`, sharded as `params`; without them an anchor is written and no delta.

        Raises:
            ValueError: the head is of another version than `base`, the trees differ, or `version` was published with other
                bits. Nothing has changed then.
            Superseded: another publisher swapped the head meanwhile.
        """
        for name in params:
            if not NAME.fullmatch(name):
                raise ValueError(f"params: {name!r} is no name of a weight; use letters, digits, dots, dashes and underscores")
        head, generation = self._head()
        if version in head.versions:
            return self._again(head.versions[version], _manifest_text(manifest(params), checksums(params)))
        if head.version != base:
            raise ValueError(f"base: is {base}, but the head is version {head.version}; publish what follows the head")
        if base is not None:
            if version <= base:
                raise ValueError(f"version: {version} does not come after base {base}; versions rise")
            check_manifest("publish", manifest(params), self.manifest(head.versions[base])[0])
        made = diff(old, params, base, version) if old is not None and base is not None else None
        delta = made.to_bytes() if made else b""
        sums = {entry.name: entry.checksum for entry in made.entries} if made else checksums(params)
        text = _manifest_text(manifest(params), sums)
        digest = _digest(text)
        anchor = not delta or self._since_anchor(head) >= self.anchor_every
        size = sum(array.nbytes for array in params.values()) if anchor else 0
        entry = Version(version, base if delta else None, digest, size, len(delta))
        self._stage(entry, text, delta, params if anchor else {})
        while not self._swap(replace(head, versions={**head.versions, version: entry}), generation):
            before = head.versions
            head, generation = self._head()
            if version in head.versions and head.versions[version].digest == digest:
                return head.versions[version]
            if head.versions != before:  # else a reader only pinned something
                raise Superseded(f"version {version}: another publisher was first, the head is version {head.version} now")
        return entry

    def fetch(self, version: int, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        """Exactly this version, from the nearest anchor.

        Raises:
            ValueError: the store does not hold it, its names are not those of `shardings`, or what was read is corrupt.
        """
        head = self.head()
        anchor, deltas = head.way(version, None)
        assert anchor is not None
        params = self._read_anchor(head.versions[anchor], shardings)
        return self._follow(params, anchor, deltas)

    def catch_up(self, params: Params, have: int, version: int) -> dict[str, jax.Array]:
        """Exactly `version`, from what one has: along the deltas, or from an anchor where that is less to read.

        `params` are donated if one delta leads there; otherwise both versions are in memory for a while. After an error they
        are as they were.

        Raises:
            ValueError: as for `fetch`, or `params` are not version `have`.
        """
        head = self.head()
        if have == version:
            head.way(version, None)
            return dict(params)
        anchor, deltas = head.way(version, have)
        if anchor is not None:
            shardings = {name: array.sharding for name, array in params.items()}
            return self._follow(self._read_anchor(head.versions[anchor], shardings), anchor, deltas)
        if len(deltas) > 1:
            params = {name: jnp.copy(array) for name, array in params.items()}
        return self._follow(dict(params), have, deltas)

    def delta(self, entry: Version) -> Delta:
        """Read and verified, for a reader that stages it itself.

        Raises:
            ValueError: it is gone or corrupt.
        """
        try:
            delta = Delta.from_bytes(self._read(f"{entry.key}/delta"))
        except ValueError as error:
            raise ValueError(f"version {entry.version}: {error}") from error
        found, sums = self.manifest(entry)
        assert (delta.base, delta.version) == (entry.base, entry.version), "the head and a delta name the same versions"
        check_manifest(f"version {entry.version}", {each.name: (each.shape, each.dtype) for each in delta.entries}, found)
        assert {each.name: each.checksum for each in delta.entries} == sums
        return delta

    def manifest(self, entry: Version) -> tuple[Manifest, dict[str, str]]:
        """Shapes and dtypes, and checksums, by name.

        Raises:
            ValueError: it is gone or corrupt.
        """
        text = self._read(f"{entry.key}/manifest")
        if _digest(text) != entry.digest:
            raise ValueError(f"version {entry.version}: {entry.key}/manifest is corrupt; fetch another version")
        leaves = json.loads(text)
        shapes = {name: (tuple(shape), dtype) for name, (shape, dtype, _) in leaves.items()}
        return shapes, {name: checksum for name, (_, _, checksum) in leaves.items()}

    def pin(self, reader: str, version: int) -> None:
        """`collect` keeps this version, and what it is made of, until the reader pins another or none.

        Raises:
            ValueError: the store does not hold it.
        """

        def pinned(head: Head) -> Head:
            head.way(version, None)
            return replace(head, pins={**head.pins, reader: version})

        self._change(pinned)

    def unpin(self, reader: str) -> None:
        self._change(lambda head: replace(head, pins={name: at for name, at in head.pins.items() if name != reader}))

    def rewind(self, version: int | None) -> list[int]:
        """Makes an older version the head: a trainer went back to it, and publishes what follows it again, with other bits.
        Newer versions are gone, and so are their readers' pins. None: all are.

        Returns: the versions that are gone.

        Raises:
            ValueError: the store does not hold it.
        """
        gone: list[int] = []

        def rewound(head: Head) -> Head:
            if version is not None:
                head.way(version, None)
            last = -1 if version is None else version
            gone[:] = sorted(number for number in head.versions if number > last)
            versions = {number: entry for number, entry in head.versions.items() if number <= last}
            return Head(versions, {reader: at for reader, at in head.pins.items() if at <= last})

        self._change(rewound)
        return gone

    def collect(self) -> list[int]:
        """Forgets what nobody needs: all but the newest `keep` versions, pinned ones, and what those are made of.

        Returns: the versions that are gone.
        """
        gone: list[int] = []

        def kept(head: Head) -> Head:
            after = head.collected(self.keep)
            gone[:] = sorted(head.versions.keys() - after.versions.keys())
            return after

        self._change(kept)
        keys = [key.decode() for key in self._kv.list().result() if key.startswith(b"data/")]
        head = self.head()  # after the list: what was published meanwhile is in the head, what is being staged is newer than it
        alive = {entry.key for entry in head.versions.values()}
        for key in keys:
            folder = "/".join(key.split("/")[:2])
            if folder not in alive and int(folder.removeprefix("data/").partition("-")[0]) <= (head.version or 0):
                self._kv.write(key, None).result()
        return gone

    # One key.

    def _head(self) -> tuple[Head, bytes]:
        found = self._kv.read("head").result()
        return Head.from_json(found.value), found.stamp.generation

    def _swap(self, head: Head, generation: bytes) -> bool:
        """Whether the head was still the one that was read."""
        return bool(self._kv.write("head", head.to_json(), if_equal=generation).result().generation)

    def _change(self, change: Callable[[Head], Head]) -> None:
        while True:
            head, generation = self._head()
            if (changed := change(head)) == head or self._swap(changed, generation):
                return

    def _read(self, key: str) -> bytes:
        found = self._kv.read(key).result()
        if found.state != "value":
            raise ValueError(f"{key}: is not in the store (any more); fetch another version, and pin it first")
        return found.value

    # One version.

    def _again(self, entry: Version, text: bytes) -> Version:
        if entry.digest != _digest(text):
            raise ValueError(f"version: {entry.version} was published with other bits; give these another version")
        return entry

    def _since_anchor(self, head: Head) -> int:
        """Versions since the newest anchor, and this one."""
        anchors = [number for number, entry in head.versions.items() if entry.anchor_bytes]
        return 1 + sum(number > max(anchors, default=-1) for number in head.versions)

    def _stage(self, entry: Version, text: bytes, delta: bytes, anchor: Params) -> None:
        waiting, size = [self._kv.write(f"{entry.key}/manifest", text)], 0
        if delta:
            waiting.append(self._kv.write(f"{entry.key}/delta", delta))
        for name, array in anchor.items():
            waiting.append(self._kv.write(f"{entry.key}/anchor/{name}", np.ascontiguousarray(array).tobytes()))
            size += array.nbytes
            if size > IN_FLIGHT:
                _wait(waiting)
                size = 0
        _wait(waiting)

    def _read_anchor(self, entry: Version, shardings: Mapping[str, Sharding]) -> dict[str, jax.Array]:
        leaves, sums = self.manifest(entry)
        check_manifest(f"version {entry.version}", dict.fromkeys(shardings, ((), "")), dict.fromkeys(leaves, ((), "")))
        params = {}
        for name, (shape, dtype) in leaves.items():
            data = self._read(f"{entry.key}/anchor/{name}")
            if len(data) != prod(shape) * jnp.dtype(dtype).itemsize:
                raise ValueError(
                    f"version {entry.version}: anchor of {name} has {len(data)} bytes, which is not its size; it is corrupt"
                )
            whole = np.frombuffer(data, jnp.dtype(dtype)).reshape(shape)
            params[name] = jax.make_array_from_callback(shape, shardings[name], lambda index, whole=whole: whole[index])
        for name, checksum in checksums(params).items():
            if checksum != sums[name]:
                raise ValueError(
                    f"version {entry.version}: anchor of {name} has checksum {checksum}, wanted {sums[name]}; it is corrupt"
                )
        return params

    def _follow(self, params: dict[str, jax.Array], version: int, entries: list[Version]) -> dict[str, jax.Array]:
        for entry in entries:
            params = apply(params, stage(params, version, self.delta(entry)))
            version = entry.version
        return params


def _manifest_text(leaves: Manifest, sums: Mapping[str, str]) -> bytes:
    listed = {name: [list(shape), dtype, sums[name]] for name, (shape, dtype) in sorted(leaves.items())}
    return json.dumps(listed, separators=(",", ":")).encode()


def _digest(text: bytes) -> str:
    return hashlib.sha256(text).hexdigest()[:16]


def _wait(futures: list[Any]) -> None:
    for future in futures:
        future.result()
    futures.clear()
