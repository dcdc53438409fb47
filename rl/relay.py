"""Passes what agent programs ask on to any server that speaks their dialect, and writes down both sides. Texts, no tokens.

    client --any path--> relay --the same path--> URL          RECORD/relayed_SESSION.jsonl: one line a POST

A line has `time`, `session`, `path`, `request` and `answer` (JSON where they are such, a stream's own text otherwise), `status`
(null: none came), and `whole`: false where the client left or the server broke off, and the answer is what had come until then.
Keys and other headers are not recorded. Which tokens were sampled, and with which probability, is not known: such a record may
be made into examples for `sft`, and cannot be trained on token by token.

The session is the path's (/s/NAME in front of it), else that of the client's own headers, else `default`.
"""

import asyncio
import json
import re
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
from fastapi import FastAPI, Request, Response
from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from inference.answers import Json, to_bytes
from inference.api import check_key
from inference.errors import ApiError
from inference.protocol import Limits
from inference.reply import error_response, read_body, while_wanted
from rl import wire_chat, wire_messages, wire_responses
from rl.identity import identity
from rl.registry import DEFAULT
from rl.session_bodies import NAME
from rl.wires import Wire

WIRES: dict[str, Wire] = {wire.path: wire for wire in (wire_chat.WIRE, wire_responses.WIRE, wire_messages.WIRE)}
ANTHROPIC = "/v1/messages"
RELAY_KEY = "TWINAX_RELAY_KEY"
"""the environment variable with the key of the server behind"""
HOP = {
    *("connection", "keep-alive", "proxy-authenticate", "proxy-authorization", "proxy-connection", "te", "trailer"),
    *("transfer-encoding", "upgrade"),
}
"""headers of one connection"""
NOT_ASKED = HOP | {"host", "content-length", "accept-encoding", "cookie", "expect", "x-forwarded-for", "forwarded"}
NOT_ANSWERED = HOP | {
    "content-length",
    "content-encoding",
    "set-cookie",
    "date",
    "server",
    "strict-transport-security",
    "alt-svc",
}
AUTH = {"authorization", "x-api-key", "api-key"}
CONNECT_SECONDS = 30.0
LONGEST_ANSWER = 3600.0


class Relay:
    """Args:
    url: of the server behind, without the path that clients ask for.
    folder: of the records.
    upstream_key: of the server behind. None: clients' own keys are passed on, unless they are keys of this one.
    api_key: that clients must send here; None lets everyone on this machine in.

    Raises:
        ValueError: the URL is none.
    """

    def __init__(
        self,
        url: str,
        folder: Path,
        *,
        upstream_key: str | None = None,
        api_key: str | None = None,
        limits: Limits | None = None,
    ) -> None:
        if re.fullmatch(r"https?://[^/?#@\s]+(/[^?#\s]*)?", url) is None:
            raise ValueError(f"--relay: {url!r} is no URL of a server; give http://HOST:PORT or https://HOST")
        self.limits = limits or Limits()
        self.folder, self._upstream_key = folder, upstream_key
        self._key = None if api_key is None else api_key.encode()
        self._url = url.rstrip("/")
        timeout = httpx.Timeout(LONGEST_ANSWER, connect=CONNECT_SECONDS)
        most = httpx.Limits(max_connections=None, max_keepalive_connections=100)
        self.http = httpx.AsyncClient(timeout=timeout, limits=most)
        self.stop, self.active, self.draining = asyncio.Event(), 0, False
        self._lock = threading.Lock()
        folder.mkdir(parents=True, exist_ok=True)
        self.app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None)
        for path in ("/s/{session}/{path:path}", "/s/{session}", "/{path:path}"):
            self.app.add_route(path, self._pass, methods=["GET", "HEAD", "POST", "DELETE"])

    async def drain(self) -> None:
        """Refuses what is new, waits for what runs, and after the grace time ends it."""
        self.draining = True
        end = time.monotonic() + self.limits.grace_seconds
        while self.active and time.monotonic() < end:
            await asyncio.sleep(0.05)
        self.stop.set()
        while self.active:
            await asyncio.sleep(0.01)
        await self.http.aclose()

    async def _pass(self, request: Request) -> Response:
        path = "/" + request.path_params.get("path", "")
        wire = WIRES.get(path)
        try:
            check_key(request, self._key)
            if self.draining:
                raise ApiError("the server is shutting down", status=503)
            if self.active >= self.limits.max_requests:
                most = self.limits.max_requests
                raise ApiError(f"{most} requests are in flight already; try again later", status=429)
            if path == "/" and request.method == "HEAD":  # what clients look for at their start
                return Response()
            raw = await read_body(request, self.limits) if request.method == "POST" else b""
            return Relayed(self, request, path, self._session(request), raw)
        except ApiError as error:
            return error_response(error, None if wire is None else wire.error(error))
        except ClientDisconnect:
            return Response(status_code=400)  # nobody reads it

    def _session(self, request: Request) -> str:
        name = request.path_params.get("session")
        if name is not None and NAME.fullmatch(name) is None:
            raise ApiError(f"session: {name[:200]!r} must match {NAME.pattern}")
        return name or identity({key.lower(): value for key, value in request.headers.items()}).session or DEFAULT

    def upstream(self, request: Request, path: str, raw: bytes) -> httpx.Request:
        """The request to the server behind."""
        named = {name.strip().lower() for name in request.headers.get("connection", "").split(",")}
        # a key of this server is nobody else's business
        left_out = NOT_ASKED | named | (AUTH if self._key is not None or self._upstream_key is not None else set())
        headers = {name: value for name, value in request.headers.items() if name.lower() not in left_out}
        headers["accept-encoding"] = "identity"
        if self._upstream_key is not None and path.startswith(ANTHROPIC):
            headers["x-api-key"] = self._upstream_key
        elif self._upstream_key is not None:
            headers["authorization"] = f"Bearer {self._upstream_key}"
        query = f"?{request.url.query}" if request.url.query else ""
        url = self._url + quote(path, safe="/:@!$&'()*+,;=~") + query
        return self.http.build_request(request.method, url, headers=headers, content=raw or None)

    def record(self, session: str, line: Json) -> None:
        """Appends a line to the session's file, whole."""
        data = to_bytes(line) + b"\n"
        name = quote(session, safe="")
        with self._lock, open(self.folder / f"relayed_{name[:200]}.jsonl", "ab", buffering=0) as file:
            file.write(data)


class Relayed(Response):
    """One request on its way, and what comes back, for as long as its client is there."""

    def __init__(self, relay: Relay, request: Request, path: str, session: str, raw: bytes) -> None:
        super().__init__()
        self._relay, self._session, self._path, self._raw = relay, session, path, raw
        self._upstream = relay.upstream(request, path, raw)
        self._wire = WIRES.get(path)
        self._came, self._whole, self._begun = bytearray(), False, False
        self._status: int | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._relay.active += 1
        try:
            ended = await while_wanted(self._work(send), receive, self._relay.stop)
            if ended == "stopped":
                await self._fail(ApiError("the server is shutting down", status=503), send)
        finally:
            try:
                if self._upstream.method == "POST":
                    await asyncio.to_thread(self._record)  # others do not wait for the disk
            finally:
                self._relay.active -= 1

    async def _work(self, send: Send) -> None:
        try:
            response = await self._relay.http.send(self._upstream, stream=True)
            try:
                self._status = response.status_code
                headers = [
                    (name.lower(), value)
                    for name, value in response.headers.raw
                    if name.decode("latin-1").lower() not in NOT_ANSWERED
                ]
                if response.headers.get("content-type", "").startswith("text/event-stream"):
                    await self._begin(headers, send)
                    async for piece in response.aiter_bytes():
                        self._came += piece
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                    self._whole = True
                    await send({"type": "http.response.body", "body": b""})
                else:
                    async for piece in response.aiter_bytes():
                        self._came += piece
                    self._whole = True
                    length = (b"content-length", str(len(self._came)).encode())
                    await self._begin(headers if self._upstream.method == "HEAD" else [*headers, length], send)
                    await send({"type": "http.response.body", "body": bytes(self._came)})
            finally:
                await response.aclose()
        except httpx.HTTPError as error:
            said = f"the server behind the relay does not answer: {type(error).__name__}: {error}".rstrip(": ")
            await self._fail(ApiError(said, status=502), send)

    async def _begin(self, headers: list[tuple[bytes, bytes]], send: Send) -> None:
        self._begun = True
        await send({"type": "http.response.start", "status": self._status, "headers": headers})

    async def _fail(self, error: ApiError, send: Send) -> None:
        body = error.body() if self._wire is None else self._wire.error(error)
        if self._begun:  # the status is out: the error is the stream's last event
            await send({"type": "http.response.body", "body": b"event: error\ndata: " + to_bytes(body) + b"\n\n"})
        else:
            response = error_response(error, body)
            await send({"type": "http.response.start", "status": error.status, "headers": response.raw_headers})
            await send({"type": "http.response.body", "body": response.body})

    def _record(self) -> None:
        line = {
            "time": time.time(),
            "session": self._session,
            "path": self._path,
            "request": _json_or_text(self._raw),
            "status": self._status,
            "answer": _json_or_text(bytes(self._came)),
            "whole": self._whole,
        }
        self._relay.record(self._session, line)


def _json_or_text(data: bytes) -> Any:
    with suppress(ValueError, RecursionError):
        return json.loads(data, parse_constant=_no_constant)
    return data.decode(errors="replace")


def _no_constant(name: str) -> Mapping[str, Any]:
    raise ValueError(f"{name} is no JSON")
