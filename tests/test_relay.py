"""The relay: what clients ask reaches another server as it is, both sides are written down, and nothing of keys is."""

import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai import OpenAI

import launch.gateway
from inference.engine import Engine
from inference.protocol import Limits
from launch.serve import Server, bind
from rl.relay import RELAY_KEY, Relay
from tests.test_serve import DEADLINE, HELLO, engine, serving, unhurried, until

__all__ = ["engine", "unhurried"]
CHAT, MESSAGES, RESPONSES = "/v1/chat/completions", "/v1/messages", "/v1/responses"


@dataclass
class Relaying:
    url: str
    folder: Path
    relay: Relay
    server: Server

    def client(self, prefix: str = "", key: str = "none") -> OpenAI:
        return OpenAI(base_url=f"{self.url}{prefix}/v1", api_key=key, max_retries=0, timeout=DEADLINE)

    def post(self, path: str, body: Any, **options: Any) -> httpx.Response:
        return httpx.post(f"{self.url}{path}", json=body, timeout=DEADLINE, **options)

    def lines(self, session: str = "default") -> list[dict[str, Any]]:
        until(lambda: not self.relay.active)
        file = self.folder / f"relayed_{session}.jsonl"
        return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@contextmanager
def relaying(
    url: str, folder: Path, *, key: str | None = None, upstream_key: str | None = None, **limits: Any
) -> Iterator[Relaying]:
    relay = Relay(url, folder, api_key=key, upstream_key=upstream_key, limits=Limits(**limits))
    listener = bind("127.0.0.1", 0, key)
    listener.listen()
    server = Server(relay)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        until(lambda: server.started)
        yield Relaying(f"http://127.0.0.1:{listener.getsockname()[1]}", folder, relay, server)
    finally:
        with suppress(RuntimeError):  # the test has ended it
            server.loop.call_soon_threadsafe(server.finish)
        thread.join(DEADLINE)
        assert not thread.is_alive()
        listener.close()


def ask(client: OpenAI, **options: Any) -> Any:
    return client.chat.completions.create(model="tiny", messages=HELLO, temperature=0, max_tokens=8, **options)


def test_the_openai_client_sees_no_difference(engine: Engine, tmp_path: Path) -> None:
    with serving(engine) as live, relaying(live.url, tmp_path) as relay, live.client() as direct:
        expected = ask(direct).choices[0].message.content
        assert expected
        with relay.client("/s/one") as client:
            assert ask(client).choices[0].message.content == expected
            chunks = list(ask(client, stream=True))
            assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected
            with pytest.raises(openai.NotFoundError, match="does not exist; .tiny. does"):
                client.chat.completions.create(model="other", messages=HELLO)
            assert [model.id for model in client.models.list()] == ["tiny"]
        whole, stream, refused = relay.lines("one")
    asked = {"model": "tiny", "messages": HELLO, "temperature": 0, "max_tokens": 8}
    assert (whole["session"], whole["path"], whole["status"], whole["whole"]) == ("one", CHAT, 200, True)
    assert whole["request"] == asked and whole["answer"]["choices"][0]["message"]["content"] == expected
    assert stream["request"] == asked | {"stream": True} and stream["status"] == 200 and stream["whole"]
    assert stream["answer"].startswith("data: {") and stream["answer"].endswith("data: [DONE]\n\n")
    assert (refused["status"], refused["answer"]["error"]["code"], refused["whole"]) == (404, "model_not_found", True)
    assert [path.name for path in tmp_path.iterdir()] == ["relayed_one.jsonl"]


@pytest.mark.usefixtures("unhurried")
def test_a_client_that_leaves_ends_the_request(engine: Engine, tmp_path: Path) -> None:
    """At the server behind too; what had come is written down."""
    body = {"model": "tiny", "messages": HELLO, "max_tokens": 200, "stream": True, "ignore_eos": True}
    with serving(engine) as live, relaying(live.url, tmp_path) as relay:
        with httpx.stream("POST", relay.url + CHAT, json=body, timeout=DEADLINE) as response:
            next(response.iter_bytes())
            assert live.door.active == 1
        until(lambda: live.door.active == 0)
        [line] = relay.lines()
        assert not line["whole"] and line["status"] == 200 and line["answer"].startswith("data: ")
        assert '"finish_reason":"length"' not in line["answer"]
        with pytest.raises(httpx.ReadTimeout):  # nothing has come yet
            httpx.post(relay.url + CHAT, json=body | {"stream": False}, timeout=0.05)
        until(lambda: live.door.active == 0)
        assert [line["whole"] for line in relay.lines()] == [False, False]


def test_a_server_that_is_down_is_said_in_the_dialect(tmp_path: Path) -> None:
    listener = bind("127.0.0.1", 0, None)  # nobody accepts there
    url = f"http://127.0.0.1:{listener.getsockname()[1]}"
    with relaying(url, tmp_path) as relay:
        for path, shape in ((CHAT, {"error"}), (MESSAGES, {"type", "error", "request_id"}), (RESPONSES, {"error"})):
            response = relay.post(path, {"model": "m"}, headers={"x-session": "down"})
            assert response.status_code == 502 and "does not answer: ConnectError" in response.json()["error"]["message"]
            assert {"error"} <= response.json().keys() <= shape
            assert path != MESSAGES or response.json()["type"] == "error"
        with relay.client() as client, pytest.raises(openai.InternalServerError, match="does not answer"):
            ask(client)
        lines = relay.lines("down")
    assert [(line["path"], line["status"], line["answer"], line["whole"]) for line in lines] == [
        (path, None, "", False) for path in (CHAT, MESSAGES, RESPONSES)
    ]
    listener.close()


Answer = Callable[[BaseHTTPRequestHandler], None]


@contextmanager
def behind(answer: Answer) -> Iterator[tuple[str, list[dict[str, str]]]]:
    """A server that answers so; what headers it got."""
    asked: list[dict[str, str]] = []

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["content-length"]))
            self.do_GET()

        def do_GET(self) -> None:
            asked.append({"path": self.path, **{name.lower(): value for name, value in self.headers.items()}})
            answer(self)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}", asked
        finally:
            server.shutdown()
            thread.join()


def send(handler: BaseHTTPRequestHandler, status: int, headers: dict[str, str], body: bytes) -> None:
    handler.send_response(status)
    for name, value in {**headers, "content-length": str(len(body))}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def test_headers(tmp_path: Path) -> None:
    """What matters is kept both ways; what belongs to one connection, and cookies, are not."""
    given = {"retry-after": "7", "request-id": "r", "content-type": "application/json", "x-ratelimit-limit": "3"}
    dropped = {"set-cookie": "a=b", "keep-alive": "timeout=5"}
    with (
        behind(lambda handler: send(handler, 429, given | dropped, b'{"type": "error"}')) as (url, asked),
        relaying(f"{url}/base/", tmp_path) as relay,
    ):
        headers = {"x-api-key": "sk-own", "anthropic-version": "1", "cookie": "c=d", "connection": "x-hop", "x-hop": "1"}
        headers |= {"x-claude-code-session-id": "see/../me"}
        response = relay.post(f"{MESSAGES}?beta=true&x=%2F", {"a": 1}, headers=headers)
        assert response.status_code == 429 and response.json() == {"type": "error"}
        assert given.items() <= dict(response.headers).items() and not dropped.keys() & set(response.headers)
        [line] = relay.lines("see%2F..%2Fme")
        assert (line["session"], line["status"], line["request"], line["path"]) == ("see/../me", 429, {"a": 1}, MESSAGES)
        assert "sk-own" not in json.dumps(line)
        assert httpx.get(f"{relay.url}/v1/models").status_code == 429 and httpx.head(relay.url).status_code == 200
        assert len(list(tmp_path.iterdir())) == 1  # only what is posted is written down
        assert relay.post("/s/a%20b/v1/messages", {}).status_code == 400
    post, get = asked
    assert post["path"] == f"/base{MESSAGES}?beta=true&x=%2F" and get["path"] == "/base/v1/models"
    assert post["x-api-key"] == "sk-own" and post["anthropic-version"] == "1" and post["host"] == url.removeprefix("http://")
    assert post["content-type"] == "application/json" and post["accept-encoding"] == "identity"
    assert not {"cookie", "x-hop"} & post.keys()


def test_keys(tmp_path: Path) -> None:
    """The server behind gets its own key, and never one of the relay's."""
    with behind(lambda handler: send(handler, 200, {"content-type": "application/json"}, b"{}")) as (url, asked):
        with relaying(url, tmp_path, key="ours", upstream_key="theirs") as relay:
            assert relay.post(CHAT, {}).status_code == relay.post(CHAT, {}, headers={"x-api-key": "theirs"}).status_code == 401
            assert relay.post(MESSAGES, {}).json()["error"]["type"] == "authentication_error" and not asked
            assert relay.post(CHAT, {}, headers={"authorization": "Bearer ours"}).status_code == 200
            assert relay.post(MESSAGES, {}, headers={"x-api-key": "ours"}).status_code == 200
        assert [(one.get("authorization"), one.get("x-api-key")) for one in asked] == [
            ("Bearer theirs", None),
            (None, "theirs"),
        ]
        with relaying(url, tmp_path, key="ours") as relay:
            assert relay.post(CHAT, {}, headers={"authorization": "Bearer ours"}).status_code == 200
        assert "authorization" not in asked[-1] and "ours" not in str(asked)
        with relaying(url, tmp_path) as relay:
            assert relay.post(CHAT, {}, headers={"host": "evil.example"}).status_code == 403
            assert relay.post(CHAT, {}, headers={"content-type": "text/plain"}).status_code == 415
            assert httpx.post(relay.url + CHAT, content=b"{", headers={"content-type": "application/json"}).status_code == 200
            assert relay.lines()[-1]["request"] == "{"  # what it says to that is the server's business
        assert not any("ours" in path.read_text() or "theirs" in path.read_text() for path in tmp_path.iterdir())


def test_a_stream_that_breaks_off_says_so(tmp_path: Path) -> None:
    chunk = {"id": "c", "object": "chat.completion.chunk", "created": 1, "model": "m"}
    first = f"data: {json.dumps(chunk | {'choices': [{'index': 0, 'delta': {'content': 'a'}}]})}\n\n".encode()

    def broken(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.send_header("content-type", "text/event-stream")
        handler.send_header("transfer-encoding", "chunked")
        handler.end_headers()
        handler.wfile.write(b"%x\r\n%s\r\n" % (len(first), first))
        handler.close_connection = True

    with behind(broken) as (url, _), relaying(url, tmp_path) as relay, relay.client() as client:
        stream = iter(ask(client, stream=True))
        assert next(stream).choices[0].delta.content == "a"
        with pytest.raises(openai.APIError, match="the server behind the relay does not answer: RemoteProtocolError"):
            next(stream)
        [line] = relay.lines()
    assert (line["status"], line["whole"], line["answer"]) == (200, False, first.decode())


def test_a_disk_that_is_slow_holds_up_nobody(tmp_path: Path) -> None:
    """Not even those whose own records wait for it: an answer is out before it is written down."""

    def answer(handler: BaseHTTPRequestHandler) -> None:
        send(handler, 200, {"content-type": "application/json"}, b"{}")

    stuck = tmp_path / "relayed_stuck.jsonl"
    os.mkfifo(stuck)  # who opens it to write waits until somebody reads
    with behind(answer) as (url, _), relaying(url, tmp_path) as relay:
        for name in ("stuck", "one", "two"):
            assert relay.post(CHAT, {}, headers={"x-session": name}).status_code == 200
        assert relay.relay.active >= 1
        with stuck.open() as reading:
            assert json.loads(reading.readline())["session"] == "stuck"
        assert [len(relay.lines(name)) for name in ("one", "two")] == [1, 1]


def test_shutting_down(tmp_path: Path) -> None:
    """What runs has some time to end, then it is told; nothing new is taken on."""
    begun, end = threading.Event(), threading.Event()

    def slow(handler: BaseHTTPRequestHandler) -> None:
        begun.set()
        end.wait(DEADLINE)
        with suppress(OSError):  # nobody listens any more
            send(handler, 200, {"content-type": "application/json"}, b"{}")

    with behind(slow) as (url, _):
        got: list[httpx.Response] = []
        with relaying(url, tmp_path, grace_seconds=0.2, max_requests=1) as relay:
            asking = threading.Thread(target=lambda: got.append(relay.post(CHAT, {})))
            asking.start()
            assert begun.wait(DEADLINE)
            assert relay.post(CHAT, {}).status_code == 429
            started = time.monotonic()
            relay.server.loop.call_soon_threadsafe(relay.server.finish)
            until(lambda: relay.relay.draining)
            assert relay.post(CHAT, {}).status_code == 503
            asking.join(DEADLINE)
            assert [response.status_code for response in got] == [503] and time.monotonic() - started < DEADLINE
        end.set()
    assert [line["whole"] for line in relay.lines()] == [False]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--relay", "example.org"], r"--relay: 'example.org' is no URL of a server"),
        (["--relay", "http://user:pw@host"], r"--relay: .* is no URL of a server"),
        (["--relay", "http://x", "--engine", "http://y"], r"--engine: a relay has no model; leave it out"),
        (["--relay", "http://x", "--config.engine.max_slots=3"], r"config.engine: a relay has no model"),
        (["--relay", "http://x", "--config.server.max_requests=0"], r"server.max_requests: must be above 0"),
        (["--relay", "http://x", "--model", "y"], r"not allowed with argument"),
    ],
)
def test_mistakes(arguments: list[str], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["gateway", *arguments, "--port", "0", "--record", str(tmp_path / "r")])
    monkeypatch.delenv(RELAY_KEY, raising=False)
    with pytest.raises(ValueError, match=message):
        launch.gateway.main()
    assert not (tmp_path / "r").exists()
