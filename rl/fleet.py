"""The engines of a run, and how weights reach them.

Local    in this process:    reshard onto their devices -> swap
Served   in their own:       a delta into the store -> each fetches and stages it -> swap
"""

import secrets
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

import jax
from jax.sharding import Sharding
from jax.typing import DTypeLike

from inference.engine import Engine
from inference.updates import Update, staged
from rl.engines import Engines
from rl.processes import EngineProcess, ServedEngine
from rl.rollout import SamplerEngine
from rl.trainer import Trainer
from sharding.reshard import reshard
from sharding.rules import Weight
from sharding.store import WeightStore

API_KEY = "TWINAX_API_KEY"
"""where `launch.serve` looks for the key that its clients must send"""


class Fleet(Protocol):
    def sampler(self) -> SamplerEngine:
        """All of them as one."""
        ...

    def start(self, trainer: Trainer) -> None:
        """They serve the trainer's weights, and compile nothing after it."""
        ...

    def stage(self, trainer: Trainer) -> Any:
        """Brings the trainer's masters, rounded to the published dtype, to where a swap takes them; the engines go on. Their
        version is the number of optimizer steps that made them."""
        ...

    def swap(self, staged: Any) -> float:
        """What was staged becomes the engines' weights, each at a step boundary of its own. Returns the seconds they paused."""
        ...

    def forget(self) -> None:
        """Empties prefix caches, where a run of lag 0 is to be the same bit for bit."""
        ...

    def close(self) -> None: ...


def published_params(
    trainer: Trainer, weights: Mapping[str, Weight], shardings: Mapping[str, Sharding], dtype: DTypeLike
) -> dict[str, jax.Array]:
    """The trainer's masters in the engine's layout, dtype and place; derived from the two descriptions."""
    return reshard(trainer.state.masters, trainer.definition.weights, weights, shardings, dtype)


class Local:
    """Engines in this process."""

    def __init__(self, engines: Sequence[Engine], mode: str):
        self.engines, self.mode = engines, mode

    def sampler(self) -> SamplerEngine:
        return self.engines[0] if len(self.engines) == 1 else Engines(self.engines)

    def start(self, trainer: Trainer) -> None:
        for engine in self.engines:
            engine.warm_up()
        jax.block_until_ready([self._params(trainer, engine) for engine in self.engines])

    def stage(self, trainer: Trainer) -> list[Update]:
        made = [(engine, self._params(trainer, engine)) for engine in self.engines]
        return [staged(engine, params, trainer.step, mode=self.mode) for engine, params in made]

    def _params(self, trainer: Trainer, engine: Engine) -> dict[str, jax.Array]:
        runner = engine.runner
        return published_params(trainer, runner.definition.weights, runner.shardings, runner.dtype)

    def swap(self, staged: list[Update]) -> float:
        return sum(update.finish().pause_ms for update in staged) / 1e3

    def forget(self) -> None:
        for engine in self.engines:
            engine.forget()

    def close(self) -> None:
        pass


class Served:
    """Engines in processes of their own, which follow a store of weights; one that dies is started again and catches up.

    Args:
        command: starts one, which serves the store's newest version and prints its address.
        weights, shardings, dtype: of what is published, on the trainer's devices.
    """

    def __init__(
        self,
        count: int,
        command: Sequence[str],
        store: Callable[[], WeightStore],
        mode: str,
        weights: Mapping[str, Weight],
        shardings: Mapping[str, Sharding],
        dtype: DTypeLike,
    ):
        self._key = secrets.token_urlsafe()
        self._processes = [EngineProcess(command, environment={API_KEY: self._key}) for _ in range(count)]
        self._open, self.mode, self._weights, self._shardings, self._dtype = store, mode, weights, shardings, dtype
        self.engines: list[ServedEngine] = []
        self._last: tuple[int, dict[str, jax.Array]] | None = None
        """what was published last"""

    def sampler(self) -> SamplerEngine:
        return self.engines[0] if len(self.engines) == 1 else Engines(self.engines)

    def start(self, trainer: Trainer) -> None:
        self.stage(trainer)
        with ThreadPoolExecutor(len(self._processes)) as pool:
            self.engines = list(pool.map(lambda process: ServedEngine(process, key=self._key, mode=self.mode), self._processes))

    def stage(self, trainer: Trainer) -> int:
        store, version = self._open(), trainer.step
        if self._last is not None and self._last[0] == version:
            return version
        base, old = self._last or (None, None)
        if base is None:  # what is there is of this run before it was broken off, and may be of steps that are made again
            store.rewind(None)
        params = published_params(trainer, self._weights, self._shardings, self._dtype)
        store.publish(params, version, base, old)
        self._last = version, params
        store.collect()
        return version

    def swap(self, staged: int) -> float:
        answers = [engine.update(staged) for engine in self.engines if engine.version != staged]
        return sum(answer.get("pause_ms", 0.0) for answer in answers) / 1e3

    def forget(self) -> None:
        """What is cached is not asked over HTTP; only counts of cached tokens depend on it."""

    def close(self) -> None:
        for engine in self.engines:
            engine.close()
        for process in self._processes:
            process.close()
