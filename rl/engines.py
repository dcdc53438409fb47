"""Several engines as one.

The requests of a group go to one engine, where they share the group's prefix; a group that begins goes to the engine with the
fewest requests in flight.
"""

from collections.abc import Sequence

from inference.types import Completion, Request
from rl.rollout import SamplerEngine


class Engines:
    """A SamplerEngine made of others. Each is stepped while it has requests."""

    def __init__(self, engines: Sequence[SamplerEngine]):
        self.engines = engines
        self._in_flight: list[set[str]] = [set() for _ in engines]
        self._home: dict[str, int] = {}
        """group -> engine, while requests of it are in flight"""

    @property
    def version(self) -> int:
        return min(engine.version for engine in self.engines)

    def submit(self, request: Request) -> None:
        group = _group(request.id)
        number = self._home.get(group)
        if number is None:
            number = min(range(len(self.engines)), key=lambda each: len(self._in_flight[each]))
        self.engines[number].submit(request)
        self._home[group] = number
        self._in_flight[number].add(request.id)

    def cancel(self, request_id: str) -> Completion:
        number = self._home[_group(request_id)]
        completion = self.engines[number].cancel(request_id)
        self._left(number, request_id)
        return completion

    def step(self) -> list[Completion]:
        done = []
        for number, engine in enumerate(self.engines):
            if self._in_flight[number]:
                for completion in engine.step():
                    self._left(number, completion.request_id)
                    done.append(completion)
        return done

    def _left(self, number: int, request_id: str) -> None:
        running = self._in_flight[number]
        running.remove(request_id)
        group = _group(request_id)
        if not any(_group(other) == group for other in running):
            del self._home[group]


def _group(request_id: str) -> str:
    """Of LABEL/ENV/KEY/SAMPLE#CALL:TURN."""
    return request_id.partition("#")[0].rpartition("/")[0]
