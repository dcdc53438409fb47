"""An engine that follows a weight store: it is brought to the versions it is told, along deltas where it can."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import jax
from jax.sharding import Sharding

from inference.engine import Engine
from inference.updates import Acknowledgement, Update
from sharding.deltas import checksums, stage
from sharding.head import Version
from sharding.store import WeightStore


class Follower:
    """Not to be used by two threads at once.

    Args:
        url: of the store.
        name: under which it pins what it reads; no other reader has it.
    """

    def __init__(self, engine: Engine, url: str, name: str) -> None:
        self.engine, self.name = engine, name
        self.store = WeightStore(url)

    def prepare(self, version: int, mode: str = "retract", restart: bool = False) -> Update:
        """An update that is staged; it touches nothing that a step of the engine uses, so the engine may serve meanwhile.

        Raises:
            ValueError: the store does not hold the version, what it holds is corrupt or of another model, or as `Update`.
        """
        with pinned(self.store, self.name, version):
            update = Update(self.engine, version, mode=mode, restart=restart)
            head = self.store.head()
            entry = head.versions[version]
            leaves, sums = self.store.manifest(entry)
            update.check(leaves, lambda: sums)
            if update.again:
                update.stage_again()
                return update
            have = self.engine.version if self._has(head.versions.get(self.engine.version)) else None
            anchor, deltas = head.way(version, have)
            shardings = {name: array.sharding for name, array in self.engine.params.items()}
            if have is None or anchor is not None:
                update.stage(self.store.fetch(version, shardings))
            elif len(deltas) == 1:
                update.stage(stage(self.engine.params, have, self.store.delta(entry)))
            else:  # on a copy, so the pause swaps references
                update.stage(self.store.catch_up(self.engine.params, have, version))
            return update

    def update(self, version: int, mode: str = "retract", restart: bool = False) -> Acknowledgement:
        """Brings the engine to exactly this version, where nobody else touches it meanwhile.

        Raises:
            As `prepare` and `Update.swap`. The engine serves what it served then.
        """
        return self.prepare(version, mode, restart).finish()

    def _has(self, entry: Version | None) -> bool:
        """Whether the engine has what the store means by its version: after a trainer went back, the number does not say."""
        return entry is not None and self.store.manifest(entry)[1] == checksums(self.engine.params)


@contextmanager
def pinned(store: WeightStore, name: str, version: int) -> Iterator[None]:
    store.pin(name, version)
    try:
        yield
    finally:
        store.unpin(name)


def newest(url: str, name: str, shardings: Mapping[str, Sharding]) -> tuple[int, dict[str, jax.Array]] | None:
    """Version and weights of the store's head, for an engine that starts late; None if the store is empty.

    Raises:
        ValueError: the weights have other names, or what was read is corrupt.
    """
    store = WeightStore(url)
    version = store.head().version
    if version is None:
        return None
    with pinned(store, name, version):
        return version, store.fetch(version, shardings)
