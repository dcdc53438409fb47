"""An engine behind `launch.serve` as the asyncio front of a gateway: tokens come when a sequence is whole."""

from collections.abc import AsyncGenerator, Callable

import httpx

from inference.errors import ApiError
from inference.types import Completion, Request, Tokens
from inference.updates import Acknowledgement, Update
from rl.remote import LONGEST_ANSWER, body_of, completion_of, message_of


class RemoteFront:
    """Args:
    url: that the server has printed.
    key: its API key, if it has one.

    Raises:
        ValueError: it does not answer, or refuses the key.
    """

    engine = None

    def __init__(self, url: str, key: str | None = None) -> None:
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        try:
            health = httpx.get(f"{url}/health", timeout=10)
            card = httpx.get(f"{url}/v1/models", headers=headers, timeout=10)
        except httpx.HTTPError as error:
            raise ValueError(f"--engine: {url} does not answer ({error}); start launch.serve there") from error
        if health.status_code != 200 or card.status_code != 200:
            refused = next(response for response in (health, card) if response.status_code != 200)
            raise ValueError(f"--engine: {url}: {message_of(refused)}")
        self.version = int(health.json()["version"])
        self.max_context = int(card.json()["data"][0]["max_model_len"])
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        timeout = httpx.Timeout(30, read=LONGEST_ANSWER)
        self._http = httpx.AsyncClient(base_url=url, headers=headers, limits=limits, timeout=timeout, trust_env=False)

    async def stream(self, request: Request) -> AsyncGenerator[Tokens | Completion, None]:
        """The request's completion. Closing the iterator makes the server cancel it.

        Raises:
            ApiError: the server refuses it, or cannot be reached.
        """
        try:
            response = await self._http.post("/generate", json=body_of(request))
        except httpx.HTTPError as error:
            raise ApiError(f"the engine does not answer: {type(error).__name__}: {error}", status=503) from error
        if response.status_code != 200:
            raise ApiError(message_of(response), status=response.status_code)
        try:
            completion = completion_of(request, response.json())
        except (KeyError, TypeError, ValueError) as error:
            raise ApiError(f"the engine's answer is none: {type(error).__name__}: {error}", status=502) from error
        self.version = max([self.version, *completion.versions.tolist()])
        yield completion

    async def close(self) -> None:
        """Closes its connections."""
        await self._http.aclose()

    async def update(self, prepare: Callable[[], Update]) -> Acknowledgement:
        raise AssertionError("the server of the engine takes its updates itself")
