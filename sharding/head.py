"""The head of a weight store: which versions it holds, what leads where, and who reads which."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace


@dataclass(frozen=True)
class Version:
    """What the head says about a version."""

    version: int
    base: int | None
    """what its delta leads from; None: it has none"""
    digest: str
    """of its manifest"""
    anchor_bytes: int
    """0: it has no anchor"""
    delta_bytes: int

    @property
    def key(self) -> str:
        return f"data/{self.version:010d}-{self.digest}"


@dataclass(frozen=True)
class Head:
    """Versions that are kept, by number, and the version that each reader has pinned."""

    versions: Mapping[int, Version]
    pins: Mapping[str, int]

    @property
    def version(self) -> int | None:
        return max(self.versions, default=None)

    def to_json(self) -> bytes:
        return json.dumps({"versions": [asdict(each) for each in self.versions.values()], "pins": dict(self.pins)}).encode()

    @classmethod
    def from_json(cls, text: bytes) -> "Head":
        head = json.loads(text) if text else {"versions": [], "pins": {}}
        return cls({each["version"]: Version(**each) for each in head["versions"]}, head["pins"])

    def way(self, version: int, have: int | None) -> tuple[int | None, list[Version]]:
        """What to read for `version`: an anchor or None for what one has, and the deltas after it. The least bytes win.

        Raises:
            ValueError: the store does not have it.
        """
        if version not in self.versions:
            has = ", ".join(map(str, sorted(self.versions))) or "none"
            raise ValueError(f"version: the store does not hold {version}; it holds {has}")
        found: list[tuple[int, int | None, list[Version]]] = []
        at, size, deltas = version, 0, list[Version]()
        while True:
            if at == have:
                found.append((size, None, deltas))
                break
            if (entry := self.versions.get(at)) is None:
                break
            if entry.anchor_bytes:
                found.append((size + entry.anchor_bytes, at, deltas))
            if entry.base is None:
                break
            at, size, deltas = entry.base, size + entry.delta_bytes, [entry, *deltas]
        assert found, f"version {version} is kept, but not what it is made of"
        _, anchor, deltas = min(found, key=lambda way: way[0])
        return anchor, deltas

    def needed(self, version: int) -> list[int]:
        """Versions without which this one cannot be read.

        Raises:
            ValueError: the store does not have it.
        """
        anchor, deltas = self.way(version, None)
        assert anchor is not None
        return [anchor, *(entry.version for entry in deltas)]

    def collected(self, keep: int) -> "Head":
        """Without what nobody needs: it keeps the newest `keep` versions, pinned ones, and what those are made of."""
        wanted = {*sorted(self.versions)[-keep:], *self.pins.values()}
        needed = {version for each in wanted for version in self.needed(each)}
        return replace(self, versions={number: each for number, each in self.versions.items() if number in needed})
