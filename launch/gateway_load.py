"""What `launch.bench gateway` serves and who asks: a gateway in a thread, and a client that keeps a conversation in Chat."""

import asyncio
import http.client
import json
import socket
import threading
import time
from argparse import Namespace
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from inference.api import Door, Front
from inference.engine import Engine
from inference.protocol import Limits
from inference.types import SamplingParams
from launch.serve import Server, bind, make_door, make_engine, settings
from models.tokenizer import Tokenizer
from rl.gateway import Gateway
from rl.registry import Sessions
from rl.renderers import ChatML, Renderer

Json = dict[str, Any]
T = TypeVar("T")
TINY = str(Path(__file__).parents[1] / "configs/tiny.py")
NAMES = ("read", "write", "edit", "bash", "grep", "find")
TOOLS: list[Json] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": f"What it does, when to use it and what it gives, in a few lines as programs have them: {name}.",
            "parameters": {
                "type": "object",
                "properties": {
                    "path": {"type": "string", "description": "of the file, from the root of the project"},
                    "limit": {"type": "number", "description": "most lines"},
                },
                "required": ["path"],
            },
        },
    }
    for name in NAMES
]


def tiny_engine(context: int, slots: int) -> Engine:
    """A random model that reads bytes, as small as models can be: what it computes is noise in what the gateway takes.
    Warmed up."""
    sizes = {
        "max_context": context,
        "max_slots": slots,
        "page_size": 128,
        "num_pages": max(6 * context // 128, 40 * slots) + 1,
        "tokens_per_step": 512,
        "token_buckets": (64, 256, 512),
        "slot_buckets": tuple(sorted({8, slots})),
        "context_buckets": tuple(sorted({min(size, context) for size in (1024, 2048, context)})),
    }
    shape = {"max_positions": context, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1}
    overrides = [f"--config.engine.{name}={value}" for name, value in sizes.items()]
    overrides += [f"--config.model.shape.{name}={value}" for name, value in shape.items()]
    what = settings(Namespace(model=None, config=TINY), overrides)
    engine, _ = make_engine(what.model, what.engine, what.seed)
    engine.warm_up()
    return engine


class Live:
    """A gateway that answers."""

    def __init__(self, port: int, door: Door, sessions: Sessions, server: Server) -> None:
        self.port, self.door, self.sessions, self.server = port, door, sessions, server

    def wait(self, work: Coroutine[Any, Any, T]) -> T:
        """What a coroutine gives, run where the server runs."""
        return asyncio.run_coroutine_threadsafe(work, self.server.loop).result()


def tokenizer_of(engine: Engine) -> Tokenizer:
    assert isinstance(engine.tokenizer, Tokenizer)
    return engine.tokenizer


@contextmanager
def serving(
    engine: Engine,
    params: SamplingParams,
    *,
    renderer: Renderer | None = None,
    front: Front | None = None,
    key: str | None = None,
    limits: Limits | None = None,
    **options: Any,
) -> Iterator[Live]:
    """
    Args:
        front: where requests go, if not to the engine's own.
        options: of Sessions.
    """
    tokenizer = tokenizer_of(engine)
    door = make_door(engine, tokenizer, "tiny", limits or Limits(), key)
    door.front = front or door.front
    sessions = Sessions(renderer or ChatML(tokenizer), params, **{"max_context": door.served.max_context, **options})
    Gateway(door, sessions)
    with running(door) as (server, port):
        try:
            yield Live(port, door, sessions, server)
        finally:
            sessions.close()


@contextmanager
def running(door: Door) -> Iterator[tuple[Server, int]]:
    """A server in a thread, and its port."""
    with bind("127.0.0.1", 0, None) as listener:
        listener.listen(1024)
        server = Quiet(door)
        thread = threading.Thread(target=server.run, args=([listener],))
        thread.start()
        while not server.started:
            time.sleep(0.01)
        try:
            yield server, listener.getsockname()[1]
        finally:
            server.loop.call_soon_threadsafe(server.finish)
            thread.join()


class Quiet(Server):
    """Says nothing."""

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super(Server, self).startup(sockets)


class Client:
    """One agent's conversation: its history is what it has sent and got.

    Args:
        headers: of every request: who asks.
        prefix: of the path.
        echo: what of an answer is sent back.
    """

    def __init__(
        self,
        port: int,
        system: str,
        headers: dict[str, str] | None = None,
        *,
        prefix: str = "",
        echo: Callable[[Json], Json] = lambda message: message,
        tools: Sequence[Json] = TOOLS,
        stream: bool = False,
    ) -> None:
        self._http = http.client.HTTPConnection("127.0.0.1", port)
        self._http.connect()
        assert self._http.sock is not None
        self._http.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._path, self._headers = f"{prefix}/v1/chat/completions", {"content-type": "application/json", **(headers or {})}
        self._echo, self._tools, self._stream = echo, list(tools), stream
        self.history: list[Json] = [{"role": "system", "content": system}]
        self.seconds = 0.0
        """that the last answer took"""

    def ask(self, *messages: Json) -> Json:
        """Says something, and takes the answer into the history."""
        self.history += messages
        answer = self.post(self.history)
        self.history.append(self._echo(answer))
        return answer

    def user(self, text: str) -> Json:
        return self.ask({"role": "user", "content": text})

    def post(self, messages: list[Json]) -> Json:
        """The answer's message.

        Raises:
            RuntimeError: there is none.
        """
        body = {"model": "tiny", "messages": messages, "stream": self._stream}
        raw = json.dumps(body | ({"tools": self._tools} if self._tools else {})).encode()
        begun = time.perf_counter()
        self._http.request("POST", self._path, raw, self._headers)
        response = self._http.getresponse()
        data = response.read()
        self.seconds = time.perf_counter() - begun
        if response.status != 200:
            raise RuntimeError(f"{response.status}: {data.decode()}")
        return message_of(data) if self._stream else json.loads(data)["choices"][0]["message"]

    def close(self) -> None:
        self._http.close()


def message_of(stream: bytes) -> Json:
    """The message that the chunks of a stream make up."""
    lines = [line.removeprefix("data: ") for line in stream.decode().split("\n\n")]
    chunks = [json.loads(line) for line in lines if line and line != "[DONE]"]
    text, calls = "", {}
    for delta in (chunk["choices"][0]["delta"] for chunk in chunks if chunk["choices"]):
        text += delta.get("content", "")
        for call in delta.get("tool_calls", ()):
            known = calls.setdefault(call["index"], {**call, "function": {**call["function"], "arguments": ""}})
            known["function"]["arguments"] += call["function"]["arguments"]
    return {"role": "assistant", "content": text} | ({"tool_calls": list(calls.values())} if calls else {})
