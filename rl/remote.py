"""An engine in another process, over `launch.serve`'s HTTP: a SamplerEngine that gives completions as they were made there, bit
for bit. Its weights come from a store (`update`); nothing of them travels here.

A request that the server did not answer is lost, never finished: `give_up` gives it back, to be submitted elsewhere.
"""

import asyncio
import queue
import threading
from collections.abc import Coroutine
from concurrent.futures import Future
from dataclasses import asdict
from typing import Any

import httpx
import numpy as np

from inference.types import Completion, FinishReason, Request
from models.routes import from_json, to_json

MOST_WAITS = 5
"""for a server that is shutting down, before it counts as gone"""
POLL_SECONDS = 0.02
LONGEST_ANSWER = 3600.0
"""seconds; a server that is silent for longer counts as gone"""


class EngineDied(RuntimeError):
    """The server cannot be reached, or serves nothing more."""


class RemoteEngine:
    """Args:
    url: that the server has printed.
    key: its API key, if it has one.
    seconds: that anything but an answer to /generate may take.

    Raises:
        EngineDied: it does not answer.
    """

    def __init__(self, url: str, *, key: str | None = None, seconds: float = 600.0):
        self.url = url
        self._done: queue.Queue[Completion | tuple[str, ValueError] | None] = queue.Queue()
        """None: something was lost"""
        self._held: ValueError | None = None
        self._tasks: dict[str, tuple[Request, Future[None]]] = {}
        self._lost: dict[str, Request] = {}
        self._why = ""
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="remote", daemon=True)
        self._thread.start()
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=seconds, trust_env=False)
        self._seconds, self._longest = seconds, httpx.Timeout(seconds, read=LONGEST_ANSWER)
        try:
            self._version = int(self._call("GET", "/health")["version"])
        except BaseException:
            self.close()
            raise

    @property
    def version(self) -> int:
        """The last that was acknowledged."""
        return self._version

    def submit(self, request: Request) -> None:
        """Returns at once; what the server refuses is raised by `step`."""
        assert request.id not in self._tasks, f"{request.id} is in flight"
        self._tasks[request.id] = request, self._start(self._generate(request))

    def cancel(self, request_id: str) -> Completion:
        """Lets go of a request; what the server had sampled of it is gone."""
        request, task = self._tasks.pop(request_id)
        task.cancel()
        return nothing(request)

    def step(self, timeout: float = POLL_SECONDS) -> list[Completion]:
        """Completions that have come; waits for the first.

        Raises:
            ValueError: the server refuses a request.
        """
        if self._held is not None:
            error, self._held = self._held, None
            raise error
        done: list[Completion] = []
        wait = bool(self._tasks)
        while True:
            try:
                item = self._done.get(block=wait, timeout=timeout if wait else None)
            except queue.Empty:
                return done
            wait = False
            if isinstance(item, tuple):
                name, error = item
                if self._tasks.pop(name, None):
                    if not done:
                        raise error
                    self._held = error  # after what came before it
                    return done
                continue
            if item is not None and self._tasks.pop(item.request_id, None):
                done.append(item)

    @property
    def lost(self) -> bool:
        """Whether the server has let a request down; `give_up` gives all back then."""
        return bool(self._lost)

    def give_up(self) -> list[Request]:
        """Lets go of all requests in flight, and returns them, in the order of their submission."""
        requests = []
        for request, task in self._tasks.values():
            task.cancel()
            requests.append(request)
        self._tasks.clear()
        self._lost.clear()
        return requests

    @property
    def why(self) -> str:
        """What went wrong last, where something was lost."""
        return self._why

    def update(self, version: int, mode: str, restart: bool = False) -> dict[str, Any]:
        """Makes the server swap to a version of its store; returns what it acknowledges.

        Raises:
            ValueError: it refuses, and serves what it had.
            EngineDied: it cannot be reached.
        """
        answer = self._call("POST", "/update", {"version": version, "mode": mode, "restart": restart})
        self._version = int(answer["version"])
        return answer

    def close(self) -> None:
        async def end() -> None:
            await self._http.aclose()

        for _, task in self._tasks.values():
            task.cancel()
        self._start(end()).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        try:
            response = self._start(self._http.request(method, path, json=body)).result(self._seconds + 10)
        except httpx.TransportError as error:
            self._why = f"{self.url}: {type(error).__name__}: {error}"
            raise EngineDied(self._why) from error
        if response.status_code >= 500:
            self._why = f"{self.url}{path}: {response.status_code}: {response.text}"
            raise EngineDied(self._why)
        if response.status_code >= 400:
            raise ValueError(message_of(response))
        return response.json()

    async def _generate(self, request: Request) -> None:
        body = body_of(request)
        waits, drains = 0, 0
        try:
            while True:
                response = await self._http.post("/generate", json=body, timeout=self._longest)
                draining = response.status_code == 503 and "failed" not in response.text
                drains += draining
                if response.status_code != 429 and not (draining and drains <= MOST_WAITS):
                    break
                await asyncio.sleep(min(1.0, 0.05 * 2**waits))
                waits = min(waits + 1, 8)
            if response.status_code == 200:
                self._done.put(completion_of(request, response.json()))
            elif response.status_code < 500:
                self._done.put((request.id, ValueError(f"request {request.id}: {message_of(response)}")))
            else:
                self._lose(request, f"{response.status_code}: {response.text}")
        except httpx.TransportError as error:
            self._lose(request, f"{type(error).__name__}: {error}")
        except (KeyError, TypeError, ValueError) as error:
            self._lose(request, f"an answer that is none: {type(error).__name__}: {error}")

    def _lose(self, request: Request, why: str) -> None:
        self._why = f"{self.url}: {why}"
        self._lost[request.id] = request
        self._done.put(None)


def body_of(request: Request) -> dict[str, Any]:
    """What POST /generate takes."""
    body = {"prompt_ids": request.prompt_ids, "sampling": asdict(request.params), "priority": request.priority}
    return body if request.routing is None else body | {"routing": to_json(request.routing)}


def message_of(response: httpx.Response) -> str:
    try:
        return str(response.json()["error"]["message"])
    except (KeyError, TypeError, ValueError):
        return f"{response.status_code}: {response.text}"


def _floats(values: Any) -> np.ndarray:
    """JSON has no infinities: the door writes null. A float32 that went through JSON's doubles is the same float32."""
    return np.where([value is None for value in values], -np.inf, np.asarray(values, float)).astype(np.float32)


def completion_of(request: Request, answer: dict[str, Any]) -> Completion:
    """From what POST /generate answers."""
    n, top = len(answer["ids"]), request.params.top_logprobs
    rows = answer.get("routing")
    return Completion(
        ids=np.asarray(answer["ids"], np.int32),
        logprobs=_floats(answer["logprobs"]),
        logprobs_full=_floats(answer["logprobs_full"]),
        versions=np.asarray(answer["versions"], np.int32),
        top_ids=np.asarray(answer.get("top_ids", []), np.int32).reshape(n, top),
        top_logprobs=_floats([x for row in answer.get("top_logprobs", []) for x in row]).reshape(n, top),
        request_id=request.id,
        prompt_ids=request.prompt_ids,
        finish_reason=FinishReason(answer["finish_reason"]),
        stop_reason=answer["stop_reason"],
        cached_tokens=answer["cached_tokens"],
        prefilled_tokens=answer["prefilled_tokens"],
        prompt_logprobs=None,
        routing=None if rows is None else from_json(rows, "routing"),
        routing_start=answer.get("routing_start", 0),
    )


def nothing(request: Request) -> Completion:
    answer: dict[str, Any] = dict.fromkeys(("ids", "logprobs", "logprobs_full", "versions"), ())
    plain = {"finish_reason": "abort", "stop_reason": None, "cached_tokens": 0, "prefilled_tokens": 0}
    return completion_of(request, answer | plain)
