"""One version on its way into one engine.

                check             stage             swap                 acknowledge
    started ----------> checked --------> staged ---------> swapped ----------------> acknowledged
                |                 |                 |
                +-----------------+-----------------+----> failed: the old version serves on

`check` and `stage` run while the engine serves. `swap` waits for a step boundary: pause, compare the loaded version with the
one that was staged for, load, resume. The same version with the same bits again passes through without a pause.
"""

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from enum import StrEnum

import jax
import numpy as np

from inference.engine import PAUSE_MODES, Engine
from sharding.delta_file import Manifest, check_manifest
from sharding.deltas import Staged, checksums


class State(StrEnum):
    STARTED = "started"
    CHECKED = "checked"
    STAGED = "staged"
    SWAPPED = "swapped"
    ACKNOWLEDGED = "acknowledged"
    FAILED = "failed"


class UpdateFailed(RuntimeError):
    """A swap failed; the cause is chained. The engine serves what it served before."""


class WeightsLost(RuntimeError):
    """A swap failed when the old weights were partly overwritten; the cause is chained. The engine is paused for good."""


@dataclass(frozen=True)
class Acknowledgement:
    """What an engine serves now, and what it took."""

    version: int
    base: int
    """what it served before"""
    fetch_ms: float
    """from the start until all was staged: the engine served meanwhile"""
    pause_ms: float
    """from the pause to the resume"""
    retracted: int
    """requests that gave up their pages"""

    def as_json(self) -> dict[str, float]:
        return asdict(self)


class Update:
    """Call `check`, `stage`, `swap`, `acknowledge`, in this order. Any of them may fail, and the update has failed then.

    Args:
        base: the version that must be loaded (default: what is loaded now).
        restart: as for `Engine.load`.

    Raises:
        ValueError: unknown mode, `base` is not loaded, or the version is older than the loaded one and it is no restart.
    """

    def __init__(
        self, engine: Engine, version: int, *, mode: str = "retract", base: int | None = None, restart: bool = False
    ) -> None:
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode: {mode!r} is unknown; use one of {PAUSE_MODES}")
        if restart and mode == "keep":
            raise ValueError("mode: 'keep' would read pages of weights that are gone; use retract or abort with restart")
        if base not in (None, engine.version):
            raise ValueError(f"base: {version} follows {base}, but {engine.version} is loaded; load what follows that")
        if version < engine.version and not restart:
            raise ValueError(
                f"version: {version} is older than the loaded {engine.version}; set restart if the trainer went back"
            )
        self.engine, self.version, self.mode, self.restart = engine, version, mode, restart
        self.base = engine.version
        self.state = State.STARTED
        self.again = False
        """the engine has these bits already"""
        self._weights: Mapping[str, jax.Array] | Staged | None = None
        self._begun = time.perf_counter()
        self._fetch_ms = self._pause_ms = 0.0
        self._retracted = 0

    def check(self, leaves: Manifest, sums: Callable[[], Mapping[str, str]]) -> None:
        """Compares what is to come with what the engine has, before anything is moved.

        Args:
            sums: gives the checksums; asked for only if the engine has a version of this number.

        Raises:
            ValueError: names, shapes or dtypes differ, or the version is loaded with other bits and it is no restart.
        """
        with self._step(State.STARTED, State.CHECKED):
            check_manifest(f"version {self.version}", leaves, self._manifest())
            if self.version == self.base:
                self.again = dict(sums()) == checksums(self.engine.params)
                if not self.again and not self.restart:
                    raise ValueError(f"version: {self.version} is loaded with other bits; set restart if the trainer went back")

    def stage(self, weights: Mapping[str, jax.Array] | Staged) -> None:
        """Takes what `swap` loads, and waits until it is on the engine's devices.

        Raises:
            ValueError: the tree is not placed as the engine's, or the delta was staged for another version.
        """
        with self._step(State.CHECKED, State.STAGED):
            if isinstance(weights, Staged):
                if (weights.base, weights.version) != (self.base, self.version):
                    raise ValueError(
                        f"delta: leads from {weights.base} to {weights.version}, wanted {self.base} to {self.version}"
                    )
                jax.block_until_ready((weights.dense, weights.writes))
            else:
                self.engine.runner.check_params(weights)
                jax.block_until_ready(weights)
            self._weights = weights
            self._fetch_ms = 1e3 * (time.perf_counter() - self._begun)

    def stage_again(self) -> None:
        """In the place of `stage` where there is nothing to load."""
        assert self.again
        with self._step(State.CHECKED, State.STAGED):
            self._fetch_ms = 1e3 * (time.perf_counter() - self._begun)

    def swap(self) -> None:
        """Pauses, loads, resumes. An engine that was paused stays so.

        Raises:
            ValueError: the loaded version is no longer the one that was staged for.
            UpdateFailed, WeightsLost: the swap itself failed.
        """
        with self._step(State.STAGED, State.SWAPPED):
            if self.again:
                self._compare()
                return
            assert self._weights is not None
            engine, paused, preempted = self.engine, self.engine.paused, self.engine.scheduler.num_preemptions
            before, begun = engine.params, time.perf_counter()
            try:
                self._compare()
                engine.pause(self.mode)
                engine.load(self._weights, self.version, base=self.base, restart=self.restart)
                jax.block_until_ready(engine.params)
            except ValueError:
                raise
            except Exception as error:
                if any(array.is_deleted() for array in before.values()):
                    paused = True
                    raise WeightsLost("the weights were lost in a swap that failed; start the engine again") from error
                raise UpdateFailed(f"version {self.version}: the swap failed, {engine.version} serves on ({error})") from error
            finally:
                if not paused:
                    engine.resume()
            self._weights = None
            self._pause_ms = 1e3 * (time.perf_counter() - begun)
            self._retracted = engine.scheduler.num_preemptions - preempted

    def acknowledge(self) -> Acknowledgement:
        with self._step(State.SWAPPED, State.ACKNOWLEDGED):
            assert self.engine.version == self.version
            return Acknowledgement(self.version, self.base, self._fetch_ms, self._pause_ms, self._retracted)

    def finish(self) -> Acknowledgement:
        """Both of these, at a step boundary."""
        self.swap()
        return self.acknowledge()

    def _compare(self) -> None:
        if self.engine.version != self.base:
            raise ValueError(
                f"base: {self.version} was staged for {self.base}, but {self.engine.version} is loaded; update anew"
            )

    def _manifest(self) -> Manifest:
        definition = self.engine.runner.definition
        dtype = str(np.dtype(self.engine.runner.dtype))
        return {name: (weight.shape, dtype) for name, weight in definition.weights.items()}

    @contextmanager
    def _step(self, before: State, after: State) -> Iterator[None]:
        assert self.state == before, f"an update that is {self.state} cannot become {after}"
        try:
            yield
        except BaseException:
            self.state, self._weights = State.FAILED, None
            raise
        self.state = after


def staged(
    engine: Engine, params: Mapping[str, jax.Array], version: int, *, mode: str = "retract", restart: bool = False
) -> Update:
    """An update with a tree that is on the engine's devices, checked and staged."""
    made = Update(engine, version, mode=mode, restart=restart)
    leaves = {name: (array.shape, str(array.dtype)) for name, array in params.items()}
    made.check(leaves, lambda: checksums(params))
    made.stage_again() if made.again else made.stage(params)
    return made


def update(
    engine: Engine, params: Mapping[str, jax.Array], version: int, *, mode: str = "retract", restart: bool = False
) -> Acknowledgement:
    """All states of one. Nobody else may touch the engine meanwhile."""
    return staged(engine, params, version, mode=mode, restart=restart).finish()
