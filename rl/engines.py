"""Several engines as one.

All requests of a group, of every turn, go to one engine, where they find the prefixes that they share; a group that begins goes
to the engine with the fewest requests in flight.
"""

from collections import OrderedDict
from collections.abc import Sequence

from inference.types import Completion, Request
from rl.rollout import SamplerEngine

MOST_HOMES = 10_000


class Engines:
    """A SamplerEngine made of others. Each is stepped while it has requests."""

    def __init__(self, engines: Sequence[SamplerEngine]):
        self.engines = engines
        self._in_flight: list[set[str]] = [set() for _ in engines]
        self._home: OrderedDict[str, int] = OrderedDict()
        """group -> engine, of the groups that asked last"""

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
        self._home.move_to_end(group)
        self._in_flight[number].add(request.id)
        if len(self._home) > MOST_HOMES:
            self._home.popitem(last=False)

    def cancel(self, request_id: str) -> Completion:
        number = next(number for number, running in enumerate(self._in_flight) if request_id in running)
        completion = self.engines[number].cancel(request_id)
        self._in_flight[number].remove(request_id)
        return completion

    def step(self) -> list[Completion]:
        done = []
        for number, engine in enumerate(self.engines):
            if self._in_flight[number]:
                for completion in engine.step():
                    self._in_flight[number].remove(completion.request_id)
                    done.append(completion)
        return done


def _group(request_id: str) -> str:
    """Of LABEL/ENV/KEY/SAMPLE#CALL:TURN."""
    return request_id.partition("#")[0].rpartition("/")[0]
