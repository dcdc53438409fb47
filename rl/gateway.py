"""The gateway: agent programs talk to the engine in their own dialects, and what they do is recorded in sessions.

    POST /v1/chat/completions, /v1/responses, /v1/messages     each also behind /s/NAME, which names the session
    POST /v1/messages/count_tokens                             counted, not recorded
    HEAD /, GET /s/NAME/v1/models                              what clients look for at their start
    POST /sessions {"name": ...}                               -> {"name", "key"}: requests with that API key are the session's
    GET /sessions/NAME                                         what is recorded so far, in counts
    POST /sessions/NAME/finish {"rewards": [...]}              writes its record

Which session a request belongs to: the path says, else its API key, else the client's own header, else it is `default`. A key
that opens a session opens no other.
"""

import asyncio
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

from fastapi import Request, Response

from inference.answers import Answer, Json, to_bytes
from inference.api import Door, given_key
from inference.errors import ApiError
from inference.reply import json_response, read_body
from inference.text import StopStrings
from inference.types import Completion, Tokens
from rl import wire_chat, wire_messages, wire_responses
from rl.messages import Piece
from rl.registry import Sessions
from rl.session_bodies import finish_body, open_body
from rl.sessions import Asked, Session
from rl.wires import Event, Turn, Usage, Wire

WIRES: tuple[Wire, ...] = (wire_chat.WIRE, wire_responses.WIRE, wire_messages.WIRE)
COUNT = "/v1/messages/count_tokens"


class Turned(Answer):
    """The answer to a turn: sampled, or given once more."""

    def __init__(self, session: Session, asked: Asked, turn: Turn, wire: Wire, created: int, mine: bool) -> None:
        """
        Args:
            mine: this request samples it; else it waits for the one that does.
        """
        super().__init__([asked.request] if mine else [])
        self.stream, self.end = turn.stream, b"data: [DONE]\n\n" if wire.done else b""
        self._session, self._asked, self._wire, self._mine = session, asked, wire, mine
        self._writer = wire.writer(turn, asked.name, created)
        self._reader = session.renderer.reader(turn.tools)
        self._parts: list[Tokens] = []
        self._read: list[Piece] = []
        self._rest: list[Piece] = []
        """what was held back until the answer's end"""
        self._seen = 0
        self._begun = False
        self._stops = StopStrings(asked.request.params.stop)

    async def ready(self) -> None:
        if not self._mine:
            # shielded, as this client may leave while the other one waits on
            await asyncio.shield(asyncio.wrap_future(self._asked.done))

    def add(self, index: int, part: Tokens) -> list[Event]:
        super().add(index, part)
        if isinstance(part, Completion):
            if part.finish_reason == "abort":
                self._parts = [part] if len(part.ids) else []  # all of it, to be kept
                raise ApiError("the request was aborted by an update of the weights; send it again", status=503)
        else:
            self._parts.append(part)
        new = part.ids[self._seen :] if isinstance(part, Completion) else part.ids
        self._seen += len(new)
        events = self._pieces(new.tolist())
        if isinstance(part, Completion):
            self._rest = self._reader.flush()
            if not self._asked.done.done():  # behind a bridge, the run has recorded it
                self._session.commit(self._asked, part, [*self._read, *self._rest])
        return events if self.stream else []

    def closing(self) -> list[Event]:
        completion = self._asked.done.result()
        events: list[Event] = []
        if not self._mine:
            events, self._rest = self._pieces(completion.ids.tolist()), self._reader.flush()
        last = [*self._shown(self._rest), Piece("text", self._stops.flush())]
        usage = Usage(prompt=len(completion.prompt_ids), cached=completion.cached_tokens, sampled=len(completion.ids))
        cut = completion.finish_reason == "length"
        return [*events, *self._writer.add(last), *self._writer.end(cut, usage, self._stops.found)]

    def whole(self) -> Json:
        self.closing()
        return self._writer.whole()

    def _pieces(self, ids: Sequence[int]) -> list[Event]:
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            events += self._writer.begin(Usage(prompt=len(self._asked.request.prompt_ids)))
        read = self._reader.add(ids)
        self._read += read
        return [*events, *self._writer.add(self._shown(read))]

    def _shown(self, pieces: Sequence[Piece]) -> list[Piece]:
        """Text up to a stop string, as `Session.commit` has it; what may begin one is held back."""
        shown = []
        for piece in pieces:
            if piece.kind == "text":
                shown.append(Piece("text", self._stops.add(piece.text)[0]))
            else:
                shown += [Piece("text", self._stops.flush()), piece]
        return shown

    def event(self, item: Any) -> bytes:
        name, data = item
        return (f"event: {name}\n".encode() if name else b"") + b"data: " + to_bytes(data) + b"\n\n"

    def error(self, error: ApiError) -> Json:
        return self._wire.error(error)

    def failing(self, error: ApiError) -> list[Any]:
        return self._writer.fail(error)

    def close(self) -> None:
        if self._mine and not self._asked.done.done():
            self._session.abandon(self._asked, self._parts, "its client has left, or the engine has")


class Counted(Answer):
    """How long a prompt is."""

    def __init__(self, tokens: int) -> None:
        super().__init__([])
        self._tokens = tokens

    def whole(self) -> Json:
        return {"input_tokens": self._tokens}


class Gateway:
    """Adds the routes of the module's docstring to a door."""

    def __init__(self, door: Door, sessions: Sessions, wires: Sequence[Wire] = WIRES) -> None:
        self.door, self.sessions = door, sessions
        app = door.app
        others = len(app.router.routes)
        for prefix in ("", "/s/{session}"):
            for wire in WIRES if prefix else wires:
                app.add_route(prefix + wire.path, partial(self._turn, wire), methods=["POST"])
            app.add_route(prefix + COUNT, self._count, methods=["POST"])
        app.add_route("/s/{session}/v1/models", self._models, methods=["GET"])
        for path in ("/", "/s/{session}", "/s/{session}/"):
            app.add_route(path, self._here, methods=["HEAD"])
        app.add_route("/sessions", self._open, methods=["POST"])
        app.add_route("/sessions/{session}", self._state, methods=["GET"])
        app.add_route("/sessions/{session}/finish", self._finish, methods=["POST"])
        # the first route that fits answers: these before the door's
        app.router.routes[:] = app.router.routes[others:] + app.router.routes[:others]

    async def _turn(self, wire: Wire, request: Request) -> Response:
        return await self.door.post(wire.path, partial(self._make, wire, request), request, self._check, wire.error)

    def _make(self, wire: Wire, request: Request, raw: bytes) -> Answer:
        turn = _read(wire, request, raw)
        session = self.sessions.of(request.path_params.get("session"), given_key(request), turn.identity)
        asked, mine = session.ask(turn, turn.identity)
        return Turned(session, asked, turn, wire, int(time.time()), mine)

    async def _count(self, request: Request) -> Response:
        wire = wire_messages.WIRE

        def make(raw: bytes) -> Answer:
            turn = _read(wire, request, raw)
            return Counted(len(self.sessions.renderer.render(turn.messages, turn.tools)))

        return await self.door.post(COUNT, make, request, self._check, wire.error)

    def _check(self, request: Request) -> None:
        """Lets in who has the server's key, or that of the session that is asked for."""
        owner = self.sessions.owner(given_key(request))
        if owner is None:
            self.door.check_key(request)
        elif request.path_params.get("session", owner) != owner:
            raise ApiError("the API key is another session's", status=401, code="invalid_api_key")
        else:
            self.door.check_host(request)

    async def _models(self, request: Request) -> Response:
        self._check(request)
        return json_response(self.door.models())

    async def _here(self, request: Request) -> Response:
        return Response()

    async def _open(self, request: Request) -> Response:
        self.door.check_key(request)
        fields = open_body(await read_body(request, self.door.served.limits))
        name, key = await asyncio.to_thread(self.sessions.open, fields)  # it looks for a record of that name
        return json_response({"name": name, "key": key})

    async def _state(self, request: Request) -> Response:
        self._check(request)
        name = request.path_params["session"]
        return json_response(await asyncio.to_thread(lambda: self.sessions.named(name).counts()))

    async def _finish(self, request: Request) -> Response:
        self.door.check_key(request)
        body = finish_body(await read_body(request, self.door.served.limits))
        name = request.path_params["session"]
        counts = await asyncio.to_thread(self.sessions.finish, name, "completed", body)
        return json_response(counts)


def _read(wire: Wire, request: Request, raw: bytes) -> Turn:
    return wire.parse(raw, dict(request.headers.items()))  # ASGI has their names in lower case
