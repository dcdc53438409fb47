"""The HTTP door of an engine: OpenAI's API, `/generate` and vLLM's form of it for token ids, `/update`, `/health`, `/metrics`.

A request ends in one of three ways: with its answer, with its client gone, or with the server stopping. Whichever comes
first, its sequences leave the engine and their pages are free.
"""

import asyncio
import hmac
import time
from collections.abc import AsyncGenerator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Protocol

from fastapi import FastAPI, Request, Response
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from inference.answers import Answer, GenerateAnswer, Json, Served
from inference.engine import Engine
from inference.errors import ApiError, refusal
from inference.follower import Follower
from inference.formats import ChatAnswer, CompletionAnswer
from inference.ids import IdsAnswer, IdsBody
from inference.metrics import Metrics
from inference.protocol import ChatBody, CompletionBody, GenerateBody, UpdateBody, parse
from inference.reply import Reply, error_response, json_response, read_body
from inference.types import Completion, Tokens
from inference.types import Request as EngineRequest
from inference.updates import Acknowledgement, Update, UpdateFailed, WeightsLost

Make = Callable[[bytes], Answer]
"""of a request's body; raises ApiError or ValueError"""
Part = tuple[int, Tokens | ApiError]
"""of the sequence with this place in the answer"""


MAKES: dict[str, Callable[[Served, bytes], Answer]] = {
    "/v1/completions": lambda served, raw: CompletionAnswer(parse(CompletionBody, raw, served.name), served),
    "/v1/chat/completions": lambda served, raw: ChatAnswer(parse(ChatBody, raw, served.name), served),
    "/generate": lambda served, raw: GenerateAnswer(parse(GenerateBody, raw), served),
    "/inference/v1/generate": lambda served, raw: IdsAnswer(parse(IdsBody, raw), served),
}


class Front(Protocol):
    """What the door needs of an engine's asyncio front."""

    @property
    def engine(self) -> Engine | None:
        """None: it is not in this process."""
        ...

    @property
    def version(self) -> int: ...

    def stream(self, request: EngineRequest) -> AsyncGenerator[Tokens | Completion, None]: ...

    async def update(self, prepare: Callable[[], Update]) -> Acknowledgement: ...


class Door:
    """Serves one engine's model. `app` is the ASGI application.

    Args:
        api_key: clients give it as bearer token, or as x-api-key; None lets everyone in.
        follower: of the store that `/update` takes weights from.
    """

    def __init__(self, front: Front, served: Served, *, api_key: str | None = None, follower: Follower | None = None) -> None:
        self.front, self.served, self.follower = front, served, follower
        self.metrics = Metrics(front.engine)
        self.draining = False
        self.failure: str | None = None
        """why the engine serves nothing more"""
        self.active = 0
        """sequences in flight"""
        self.stop = asyncio.Event()
        """what still runs has to end"""
        self._idle = asyncio.Event()
        self._key = None if api_key is None else api_key.encode()
        self._started = int(time.time())
        # of its own: engine steps run in asyncio's threads, and must not wait behind a tokenizer
        self._parsers = ThreadPoolExecutor(2, "parse")
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        # plain routes: bodies are read by `parse` and rl/wire_body.py, and FastAPI's own look for them takes time (measured)
        for path, make in MAKES.items():
            self.app.add_route(path, partial(self._post, path, partial(make, served)), methods=["POST"])
        self.app.add_route("/update", self._update, methods=["POST"])
        for path, get in (
            ("/v1/models", self._models),
            ("/v1/models/{name:path}", self._model),
            ("/metrics", self._metrics),
            ("/health", self._health),
        ):
            self.app.add_route(path, get, methods=["GET"])
        self.app.add_exception_handler(HTTPException, _http_error)
        self.app.add_exception_handler(ApiError, _api_error)
        self.app.add_exception_handler(ClientDisconnect, _gone)
        self.app.add_exception_handler(Exception, _bug)

    async def drain(self) -> None:
        """Refuses what is new, waits for what runs, and after the grace time ends it."""
        self.draining = True
        with suppress(TimeoutError):
            async with asyncio.timeout(self.served.limits.grace_seconds):
                await self._until_idle()
        self.stop.set()
        await self._until_idle()

    async def _until_idle(self) -> None:
        while self.active:
            self._idle.clear()
            await self._idle.wait()

    async def run(self, answer: Answer) -> AsyncGenerator[list[Json], None]:
        """Runs the answer's sequences; gives what a client that streams gets, as it comes. Closing it cancels them.

        Raises:
            ApiError: the engine refuses a sequence or has failed, or there is no room.
        """
        self._check_open(len(answer.requests))
        await answer.ready()
        parts: asyncio.Queue[Part] = asyncio.Queue()
        tasks = [asyncio.create_task(self._sample(i, request, parts)) for i, request in enumerate(answer.requests)]
        self.active += len(tasks)
        for task in tasks:
            task.add_done_callback(self._left)
        try:
            while len(answer.done) < len(tasks):
                there = [await parts.get()]
                while not parts.empty():
                    there.append(parts.get_nowait())
                events: list[Json] = []
                try:
                    for index, part in there:
                        if isinstance(part, ApiError):
                            raise part
                        events += answer.add(index, part)
                finally:  # also what came before an error
                    yield events
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _sample(self, index: int, request: EngineRequest, parts: asyncio.Queue[Part]) -> None:
        last, begun = time.perf_counter(), False
        try:
            async for part in self.front.stream(request):
                parts.put_nowait((index, part))
                if isinstance(part, Completion):
                    return
                now, new = time.perf_counter(), len(part.ids)
                if begun:
                    for _ in range(new):
                        self.metrics.next_token.observe((now - last) / new)
                else:
                    self.metrics.first_token.observe(now - last)
                last, begun = now, True
        except (ApiError, ValueError) as error:
            parts.put_nowait((index, error if isinstance(error, ApiError) else refusal(error)))
        except Exception as error:  # whatever made a step fail; the engine's state is unknown then
            self.failure = f"{type(error).__name__}: {error}"
            parts.put_nowait((index, ApiError(f"the engine has failed: {self.failure}", status=500)))
            raise

    def _left(self, task: asyncio.Task[None]) -> None:
        self.active -= 1
        self._idle.set()

    def _check_open(self, num_sequences: int) -> None:
        if self.failure is not None:
            raise ApiError(f"the engine has failed: {self.failure}", status=503)
        if self.draining:
            raise ApiError("the server is shutting down", status=503)
        most = self.served.limits.max_requests
        if self.active + num_sequences > most:
            raise ApiError(f"{most} sequences are in flight already; try again later", status=429, code="rate_limit_exceeded")

    def check_key(self, request: Request) -> None:
        """Refuses, with an ApiError, who may not come in."""
        check_key(request, self._key)

    def check_host(self, request: Request) -> None:
        check_host(request, self._key)

    async def _post(self, route: str, make: Make, request: Request) -> Response:
        return await self.post(route, make, request, self.check_key)

    async def post(
        self,
        route: str,
        make: Make,
        request: Request,
        check: Callable[[Request], None],
        shape: Callable[[ApiError], Json] = ApiError.body,
    ) -> Response:
        """Answers a request.

        Args:
            route: what metrics call it.
            make: runs in a thread.
            check: raises an ApiError for who may not come in.
            shape: the body of an answer that is an error.
        """
        try:
            check(request)
            self._check_open(1)
            raw = await read_body(request, self.served.limits)
            answer = await asyncio.get_running_loop().run_in_executor(self._parsers, make, raw)
        except (ApiError, ValueError) as error:
            error = error if isinstance(error, ApiError) else refusal(error)
            self._ended(route, str(error.status))
            return error_response(error, shape(error))
        except ClientDisconnect:
            self._ended(route, "cancelled")
            return Response(status_code=400)  # nobody reads it
        return Reply(answer, self.run, self.stop, partial(self._ended, route))

    async def _update(self, request: Request) -> Response:
        self.check_key(request)
        self._check_open(0)
        body = parse(UpdateBody, await read_body(request, self.served.limits))
        if self.follower is None:
            raise ApiError("update: this server follows no weight store; start it with --store URL", status=409)
        try:
            prepare = partial(self.follower.prepare, body.version, body.mode, body.restart)
            return json_response((await self.front.update(prepare)).as_json())
        except ValueError as error:
            raise ApiError(str(error), status=409) from error
        except UpdateFailed as error:
            raise ApiError(str(error), status=500) from error
        except WeightsLost as error:
            self.failure = str(error)
            raise ApiError(self.failure, status=500) from error

    def _ended(self, route: str, outcome: str) -> None:
        self.metrics.requests.labels(route, outcome).inc()

    async def _models(self, request: Request) -> Response:
        self.check_key(request)
        return json_response(self.models())

    def models(self) -> Json:
        return {"object": "list", "data": [self._card()]}

    async def _model(self, request: Request) -> Response:
        self.check_key(request)
        name = request.path_params["name"]
        if name != self.served.name:
            raise ApiError(f"the model {name!r} does not exist", status=404, param="model", code="model_not_found")
        return json_response(self._card())

    def _card(self) -> Json:
        card = {"id": self.served.name, "object": "model", "created": self._started, "owned_by": "twinax"}
        return card | {"max_model_len": self.served.max_context}

    async def _metrics(self, request: Request) -> Response:
        self.check_key(request)
        return Response(self.metrics.text(), media_type="text/plain; version=0.0.4; charset=utf-8")

    async def _health(self, request: Request) -> Response:
        status = "shutting down" if self.draining else "ok"
        if self.failure is not None:
            status = f"the engine has failed: {self.failure}"
        return json_response({"status": status, "version": self.front.version}, 200 if status == "ok" else 503)


def check_key(request: Request, key: bytes | None) -> None:
    """Refuses, with an ApiError, who has not the server's key."""
    check_host(request, key)
    if key is not None and not hmac.compare_digest(given_key(request), key):
        raise ApiError("the API key is missing or wrong; send it as bearer token", status=401, code="invalid_api_key")


def check_host(request: Request, key: bytes | None) -> None:
    """Refuses, where there is no key, requests to another name than this machine's own."""
    host = request.url.hostname
    if key is None and host not in ("localhost", "127.0.0.1", "::1"):
        # A web page whose name was made to point here is of the same origin, so a browser lets it read the answers.
        raise ApiError(f"host: {host!r} is not this machine; call it 127.0.0.1 or localhost, or serve with a key", status=403)


def given_key(request: Request) -> bytes:
    """The key that a client has sent, as OpenAI's or as Anthropic's clients send one."""
    kind, _, key = request.headers.get("authorization", "").partition(" ")
    given = key if kind.lower() == "bearer" else request.headers.get("x-api-key", "")
    return given.strip().encode()


async def _api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    return error_response(error)


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return error_response(ApiError(f"{request.method} {request.url.path}: {error.detail}", status=error.status_code))


async def _gone(request: Request, error: Exception) -> Response:
    return Response(status_code=400)  # nobody reads it


async def _bug(request: Request, error: Exception) -> Response:
    return error_response(ApiError("internal error; the server's log says more", status=500))
