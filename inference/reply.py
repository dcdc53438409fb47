"""Bodies in, answers out: one JSON object, or server-sent events, for as long as the client is there."""

import asyncio
from collections.abc import AsyncGenerator, Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any, Literal

from fastapi import Request, Response
from starlette.types import Receive, Scope, Send

from inference.answers import Answer, Json, to_bytes
from inference.errors import ApiError
from inference.protocol import Limits


def json_response(value: Json, status: int = 200) -> Response:
    return Response(to_bytes(value), status, media_type="application/json")


def error_response(error: ApiError, body: Json | None = None) -> Response:
    """
    Args:
        body: in the client's dialect, where it is not OpenAI's.
    """
    response = json_response(error.body() if body is None else body, error.status)
    if error.status == 401:
        response.headers["www-authenticate"] = "Bearer"
    if error.status in (429, 503):
        response.headers["retry-after"] = "1"
    if error.status in (408, 413):  # the rest of the body is not read
        response.headers["connection"] = "close"
    return response


async def read_body(request: Request, limits: Limits) -> bytes:
    """The whole body, if it is JSON by name, no larger than allowed, and comes in time.

    Raises:
        ApiError: it is not.
    """
    # a web page of another origin can send other types without being asked first
    if request.headers.get("content-type", "").partition(";")[0].strip().lower() != "application/json":
        raise ApiError("body: must be JSON; send it with content-type: application/json", status=415)
    too_large = ApiError(f"body: is larger than {limits.max_body_bytes} bytes; send less", status=413)
    declared = request.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limits.max_body_bytes:
        raise too_large
    raw = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                raw += chunk
                if len(raw) > limits.max_body_bytes:
                    raise too_large
    except TimeoutError:
        raise ApiError(f"body: did not come within {limits.body_seconds:g} seconds", status=408) from None
    return bytes(raw)


class Reply(Response):
    """Runs an answer and sends it, until it is whole, the client has gone, or the server stops.

    Args:
        run: starts the answer's sequences and gives, as they come, the objects of a stream; closing it cancels them.
        stop: set when the server stops.
        ended: told the HTTP status, or `cancelled`.
    """

    def __init__(
        self,
        answer: Answer,
        run: Callable[[Answer], AsyncGenerator[list[Json], None]],
        stop: asyncio.Event,
        ended: Callable[[str], None],
    ) -> None:
        super().__init__()
        self._answer, self._run, self._stop, self._ended = answer, run, stop, ended
        self._begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            ended = await while_wanted(self._work(send), receive, self._stop)
            if ended == "gone":
                self._ended("cancelled")
            elif ended == "stopped":
                await self._fail(ApiError("the server is shutting down", status=503), send)
        finally:
            self._answer.close()

    async def _work(self, send: Send) -> None:
        answer, last = self._answer, list[Json]()
        try:
            async with aclosing(self._run(answer)) as pieces:
                async for piece in pieces:
                    if len(answer.done) == len(answer.requests):
                        last = piece  # goes out with the end
                    elif piece:
                        await self._send_events(piece, send)
        except ApiError as error:
            await self._fail(error, send)
            return
        self._ended("200")
        if answer.stream:
            await self._send_events([*last, *answer.closing()], send, answer.end, last=True)
        else:
            await _send(json_response(answer.whole()), send)

    async def _send_events(self, events: Sequence[Any], send: Send, end: bytes = b"", *, last: bool = False) -> None:
        """Events that are there together go out as one piece."""
        data = b"".join(map(self._answer.event, events)) + end
        if not self._begun:
            self._begun = True
            headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"cache-control", b"no-cache")]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": data, "more_body": not last})

    async def _fail(self, error: ApiError, send: Send) -> None:
        self._ended(str(error.status))
        if self._begun:  # the status is out: the error is the stream's last event
            await self._send_events(self._answer.failing(error), send, last=True)
        else:
            await _send(error_response(error, self._answer.error(error)), send)


async def _send(response: Response, send: Send) -> None:
    await send({"type": "http.response.start", "status": response.status_code, "headers": response.raw_headers})
    await send({"type": "http.response.body", "body": response.body})


async def while_wanted(
    work: Coroutine[Any, Any, None], receive: Receive, stop: asyncio.Event
) -> Literal["done", "gone", "stopped"]:
    """Runs what answers a request until it is done, the client has gone or the server stops; cancels it in the latter cases.

    Raises: what the work raises.
    """
    working = asyncio.create_task(work)
    gone, stopped = asyncio.create_task(_until_gone(receive)), asyncio.create_task(stop.wait())
    tasks = (working, gone, stopped)
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            await working
            return "done"
        return "gone" if gone.done() else "stopped"
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
