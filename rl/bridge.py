"""From a gateway's thread to the engine of a run, which only the run's own loop may touch: a front of `inference.api.Door`.

    gateway's thread    Session.ask -> Bridge.stream ............................ answer, or the client has left
    the run's           poll -> engine -> Session.commit, or abandon -> give

What the engine has sampled for a program is in the record before anybody is told, whether its client waits or not, and before
its episode is closed. So nothing of it is lost, and the gateway records nothing a second time.
"""

import asyncio
import queue
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from typing import NamedTuple

from inference.errors import ApiError
from inference.types import Completion, FinishReason, Request, Tokens
from inference.updates import Acknowledgement, Update
from rl.remote import nothing
from rl.rollout import SamplerEngine
from rl.sessions import Session


class Passing(NamedTuple):
    """A request on its way to the engine, and where its completion goes, or why it has none."""

    request: Request
    give: Callable[[Completion | ApiError], None]


class Bridge:
    """`stream` waits in the gateway's loop; the run takes what has come with `take`, and gives each completion back."""

    engine = None

    def __init__(self) -> None:
        self.version = 0
        """of the engine's weights, as far as it is known here"""
        self._asked: queue.SimpleQueue[Passing] = queue.SimpleQueue()
        self._gone: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._waiting: dict[str, Passing] = {}
        self._closed = False

    async def stream(self, request: Request) -> AsyncGenerator[Tokens | Completion, None]:
        """The request's completion. Who is cancelled waits until the run has recorded what was sampled, and gets it.

        Raises:
            ApiError: the run has ended, or the session cannot record the completion.
        """
        loop = asyncio.get_running_loop()
        done: asyncio.Future[Completion] = loop.create_future()

        def settle(answer: Completion | ApiError) -> None:
            if done.done():
                return
            if isinstance(answer, ApiError):
                done.set_exception(answer)
            else:
                done.set_result(answer)

        def give(answer: Completion | ApiError) -> None:
            with suppress(RuntimeError):  # the gateway has ended
                loop.call_soon_threadsafe(settle, answer)

        passing = self._waiting[request.id] = Passing(request, give)
        try:
            self._asked.put(passing)
            if self._closed:  # asked after the last look at who waits
                raise ApiError("the run has ended", status=503)
            while not done.done():
                try:
                    await asyncio.shield(done)
                except asyncio.CancelledError:
                    self._gone.put(request.id)
            yield done.result()
        finally:
            del self._waiting[request.id]

    def take(self) -> list[Passing]:
        """Requests that have come."""
        return [self._asked.get_nowait() for _ in range(self._asked.qsize())]

    def gone(self) -> list[str]:
        """Ids of requests that nobody waits for any more."""
        return [self._gone.get_nowait() for _ in range(self._gone.qsize())]

    def close(self) -> None:
        """Nobody takes requests any more: those that wait end, and others are refused."""
        self._closed = True
        for passing in list(self._waiting.values()):
            passing.give(nothing(passing.request))

    async def update(self, prepare: Callable[[], Update]) -> Acknowledgement:
        raise AssertionError("the run updates its engines itself")


class Outside:
    """What came through bridges, on the engine of a run's episodes. Request ids are EPISODE#NAME."""

    def __init__(self, engine: SamplerEngine) -> None:
        self.engine = engine
        self._bridges: set[Bridge] = set()
        self._members: dict[str, tuple[Session, Callable[[Completion], None]]] = {}
        """episode -> its session, and who counts its completions"""
        self._in_flight: dict[str, Passing] = {}

    def __bool__(self) -> bool:
        """Whether any episode is asked for from outside."""
        return bool(self._members)

    @property
    def sampling(self) -> bool:
        return bool(self._in_flight)

    def attach(self, bridge: Bridge, session: Session, count: Callable[[Completion], None]) -> None:
        self._bridges.add(bridge)
        self._members[session.graph.episode.id] = session, count

    def poll(self) -> None:
        """Takes in what has come, and cancels what nobody waits for."""
        for bridge in self._bridges:
            bridge.version = self.engine.version
            for passing in bridge.take():
                if _episode(passing.request.id) not in self._members:  # it is over
                    passing.give(nothing(passing.request))
                    continue
                self._in_flight[passing.request.id] = passing
                self.engine.submit(passing.request)
            for name in bridge.gone():
                self._cancel(name)

    def done(self, completion: Completion) -> bool:
        """Records a completion and hands it back, if it was asked for from outside."""
        passing = self._in_flight.pop(completion.request_id, None)
        if passing is not None:
            self._record(passing, completion)
        return passing is not None

    def leave(self, episode: str) -> None:
        """Of an episode that is about to be closed: what it still asks for is cancelled, and nothing more is asked."""
        if episode in self._members:
            self._members[episode][0].leave()
            for name in [name for name in self._in_flight if _episode(name) == episode]:
                self._cancel(name)
            del self._members[episode]

    def _cancel(self, name: str) -> None:
        passing = self._in_flight.pop(name, None)
        if passing is not None:
            self._record(passing, self.engine.cancel(name))

    def _record(self, passing: Passing, completion: Completion) -> None:
        episode, _, name = passing.request.id.rpartition("#")
        session, count = self._members[episode]
        asked = session.running[name]
        if completion.finish_reason is FinishReason.ABORT:
            session.abandon(asked, [completion] if len(completion.ids) else [], "its client has left, or the engine has")
            return passing.give(completion)
        try:
            session.commit(asked, completion)
        except ApiError as error:  # the client's to hear; the run goes on
            session.abandon(asked, [], str(error))
            return passing.give(error)
        count(completion)
        passing.give(completion)


def _episode(request: str) -> str:
    return request.rpartition("#")[0]
