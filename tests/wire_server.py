"""A server that answers in all dialects with scripted pieces: no model, no tokens. For real clients of the dialects."""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from inference.errors import ApiError
from inference.reply import to_bytes
from rl.messages import Piece
from rl.wires import Event, Turn
from tests.wire_clients import NAME, USAGE, WIRES

Script = Callable[[Turn], Sequence[Piece]]
"""what is sampled for a turn; may raise an ApiError"""


class Handler(BaseHTTPRequestHandler):
    server: "WireServer"

    def log_message(self, format: str, *args: Any) -> None:
        """Says nothing."""

    def do_POST(self) -> None:
        raw = self.rfile.read(int(self.headers["content-length"]))
        path = self.path.partition("?")[0]
        wire = next(wire for wire in WIRES.values() if path.startswith(wire.path))
        try:
            turn = wire.parse(raw, {name.lower(): value for name, value in self.headers.items()})
            self.server.turns.append(turn)
            pieces = self.server.script(turn)
        except ApiError as error:
            self._send(error.status, "application/json", to_bytes(wire.error(error)))
            return
        if path.endswith("count_tokens"):
            self._send(200, "application/json", b'{"input_tokens": 7}')
            return
        writer = wire.writer(turn, NAME, created=1)
        events = writer.begin(USAGE)
        for piece in pieces:  # calls come whole, the rest in small parts
            step = len(piece.text) if piece.kind == "call" else 3
            parts = [piece.text[i : i + step] for i in range(0, len(piece.text), step)]
            events += writer.add([piece._replace(text=part) for part in parts])
        events += writer.end(self.server.cut, USAGE)
        if turn.stream:
            self._send(200, "text/event-stream", to_stream(events, wire.done))
        else:
            self._send(200, "application/json", to_bytes(writer.whole()))

    def _send(self, status: int, kind: str, data: bytes) -> None:
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def to_stream(events: Sequence[Event], done: bool) -> bytes:
    lines = [(f"event: {name}\n" if name else "").encode() + b"data: " + to_bytes(data) + b"\n\n" for name, data in events]
    return b"".join([*lines, b"data: [DONE]\n\n" if done else b""])


class WireServer(ThreadingHTTPServer):
    def __init__(self, script: Script, cut: bool = False) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.script, self.cut = script, cut
        self.turns: list[Turn] = []
        """asked for so far"""

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


@contextmanager
def serving(script: Script, cut: bool = False) -> Iterator[WireServer]:
    with WireServer(script, cut) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()
