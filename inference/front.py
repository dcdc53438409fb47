"""Many asyncio callers on one engine."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from contextlib import aclosing, asynccontextmanager, suppress

import jax

from inference.engine import Engine
from inference.types import Completion, Request, Tokens
from inference.updates import Acknowledgement, Update


class StepFailed(RuntimeError):
    """A step of the engine failed; the cause is chained. No request's fault, as far as one can tell."""


class AsyncEngine:
    """asyncio front: many callers await their own completion while one task steps the engine in a thread.

    Nothing but this object may touch the engine while a request is in flight: all its methods wait for a step boundary.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._boundary = asyncio.Lock()
        """held while the engine steps, and by whoever changes it between steps; fair, so nobody waits for two steps"""
        self._updating = asyncio.Lock()
        self._callers = 0
        """who wants the boundary: the next step is kept short for them"""
        self._parts: dict[str, asyncio.Queue[Tokens | Completion | Exception]] = {}
        self._gone: set[str] = set()
        """requests whose callers have left"""
        self._stepper: asyncio.Task[None] | None = None

    @property
    def version(self) -> int:
        return self.engine.version

    async def generate(self, request: Request) -> Completion:
        """The request's completion. Cancelling the caller cancels the request at the next step boundary.

        Raises:
            ValueError: as `Engine.submit`.
            StepFailed: a step failed while the request was in flight.
        """
        async with aclosing(self._follow(request, streaming=False)) as parts:
            *_, completion = [part async for part in parts]
        assert isinstance(completion, Completion), "a request ends with its completion"
        return completion

    def stream(self, request: Request) -> AsyncGenerator[Tokens | Completion, None]:
        """The request's tokens as they are recorded, then its completion. Closing the iterator cancels the request at the
        next step boundary.

        Raises:
            ValueError: as `Engine.submit`, when iteration begins.
        """
        return self._follow(request, streaming=True)

    async def _follow(self, request: Request, streaming: bool) -> AsyncGenerator[Tokens | Completion, None]:
        parts: asyncio.Queue[Tokens | Completion | Exception] = asyncio.Queue()
        loop = asyncio.get_running_loop()

        def forward(tokens: Tokens) -> None:
            loop.call_soon_threadsafe(parts.put_nowait, tokens)

        async with self._between_steps():
            self.engine.submit(request, forward if streaming else None)
            self._gone.discard(request.id)  # an earlier request of that id, long gone
            self._parts[request.id] = parts
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._run())
        finished = False
        try:
            while not finished:
                part = await parts.get()
                finished = not isinstance(part, Tokens) or isinstance(part, Completion)
                if isinstance(part, Exception):
                    raise part
                yield part
        finally:
            if not finished:
                self._gone.add(request.id)

    async def pause(self, mode: str = "retract") -> None:
        """As `Engine.pause`, at the next step boundary."""
        async with self._between_steps():
            try:
                await asyncio.to_thread(self.engine.pause, mode)  # it reads the step in flight
            except ValueError:
                raise
            except Exception as error:
                self._fail(error)
                raise

    async def load(self, params: Mapping[str, jax.Array], version: int) -> None:
        """As `Engine.load`."""
        async with self._between_steps():
            self.engine.load(params, version)

    async def update(self, prepare: Callable[[], Update]) -> Acknowledgement:
        """Stages an update in a thread while requests go on, and swaps at the next step boundary. One at a time.

        Args:
            prepare: returns an update that is staged (`Follower.prepare`).

        Raises:
            As `prepare` and `Update.swap`.
        """
        async with self._updating:
            update = await asyncio.to_thread(prepare)
            async with self._between_steps():
                return await asyncio.to_thread(update.finish)  # it reads the step in flight

    async def resume(self) -> None:
        """As `Engine.resume`."""
        async with self._between_steps():
            self.engine.resume()

    @asynccontextmanager
    async def _between_steps(self) -> AsyncIterator[None]:
        self._callers += 1
        try:
            async with self._boundary:
                yield
        finally:
            self._callers -= 1

    async def _run(self) -> None:
        while self._parts:
            async with self._boundary:
                for request_id in self._gone & self._parts.keys():
                    del self._parts[request_id]
                    with suppress(ValueError):  # an abort finished it first
                        self.engine.cancel(request_id)
                self._gone.clear()
                try:
                    done = await asyncio.to_thread(self.engine.step, 1 if self._callers else None)
                except Exception as error:
                    self._fail(error)
                    return
                for completion in done:
                    # After the tokens that the step's thread has sent on their way.
                    if completion.request_id in self._parts:
                        self._parts.pop(completion.request_id).put_nowait(completion)
            if self.engine.paused:
                await asyncio.sleep(0.001)

    def _fail(self, error: Exception) -> None:
        """Every caller gets the error; none of their requests stays behind."""
        for request_id, parts in self._parts.items():
            with suppress(ValueError):  # it had finished before the step failed
                self.engine.cancel(request_id)
            failure = StepFailed(str(error))
            failure.__cause__ = error
            parts.put_nowait(failure)
        self._parts.clear()
        self._gone.clear()
