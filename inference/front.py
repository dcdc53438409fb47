"""Many asyncio callers on one engine."""

import asyncio
from collections.abc import Mapping
from contextlib import suppress

import jax

from inference.engine import Engine
from inference.types import Completion, Request


class AsyncEngine:
    """asyncio front: many callers await their own completion while one task steps the engine in a thread.

    Nothing but this object may touch the engine while a request is in flight: all its methods wait for a step boundary.
    """

    def __init__(self, engine: Engine):
        self.engine = engine
        self._boundary = asyncio.Lock()
        """held while the engine steps, and by whoever changes it between steps; fair, so nobody waits for two steps"""
        self._waiting: dict[str, asyncio.Future[Completion]] = {}
        self._stepper: asyncio.Task[None] | None = None

    async def generate(self, request: Request) -> Completion:
        """The request's completion. Cancelling the caller cancels the request at the next step boundary.

        Raises:
            ValueError: as `Engine.submit`.
        """
        async with self._boundary:
            self.engine.submit(request)
            future = self._waiting[request.id] = asyncio.get_running_loop().create_future()
        if self._stepper is None or self._stepper.done():
            self._stepper = asyncio.create_task(self._run())
        return await future

    async def pause(self, mode: str = "retract") -> None:
        """As `Engine.pause`, at the next step boundary."""
        async with self._boundary:
            self.engine.pause(mode)

    async def load(self, params: Mapping[str, jax.Array], version: int) -> None:
        """As `Engine.load`."""
        async with self._boundary:
            self.engine.load(params, version)

    async def resume(self) -> None:
        """As `Engine.resume`."""
        async with self._boundary:
            self.engine.resume()

    async def _run(self) -> None:
        while self._waiting:
            async with self._boundary:
                for request_id in [i for i, future in self._waiting.items() if future.cancelled()]:
                    del self._waiting[request_id]
                    with suppress(ValueError):  # an abort finished it first
                        self.engine.cancel(request_id)
                try:
                    done = await asyncio.to_thread(self.engine.step)
                except Exception as error:
                    self._fail(error)
                    return
                for completion in done:
                    future = self._waiting.pop(completion.request_id, None)
                    if future is not None and not future.done():
                        future.set_result(completion)
            if self.engine.paused:
                await asyncio.sleep(0.001)

    def _fail(self, error: Exception) -> None:
        """Every caller gets the error; none of their requests stays behind."""
        for request_id, future in self._waiting.items():
            with suppress(ValueError):  # it had finished before the step failed
                self.engine.cancel(request_id)
            if not future.done():
                future.set_exception(error)
        self._waiting.clear()
