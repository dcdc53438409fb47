"""The gateway over sockets, with a real engine: dialects, sessions, keys, clients that leave, records."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import pytest

from inference.engine import Engine
from inference.protocol import Limits
from inference.types import SamplingParams
from launch.gateway_load import Live, running, serving, tiny_engine, tokenizer_of
from launch.serve import make_door
from rl.columns import read
from rl.gateway import COUNT
from rl.graph import Graph
from rl.remote_front import RemoteFront
from tests.wire_clients import FIRST, REWRITTEN, WIRES, next_body, put_together

pytestmark = pytest.mark.plain_code

REPO = Path(__file__).parents[1]
CONTEXT = 2048
PARAMS = SamplingParams(max_tokens=8)
DEADLINE = 30.0
TOOLS: dict[str, Any] = {
    "chat": [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}],
    "responses": [{"type": "function", "name": "look", "parameters": {"type": "object"}}],
    "messages": [{"name": "look", "input_schema": {"type": "object"}}],
}


@pytest.fixture(scope="module")
def engine() -> Engine:
    return tiny_engine(CONTEXT, 8)


@contextmanager
def gateway(engine: Engine, params: SamplingParams = PARAMS, **options: Any) -> Iterator[tuple[Live, httpx.Client]]:
    with serving(engine, params, **options) as live:
        key = {"authorization": f"Bearer {options['key']}"} if options.get("key") else {}
        with httpx.Client(base_url=f"http://127.0.0.1:{live.port}", headers=key, timeout=DEADLINE) as client:
            yield live, client
    reconcile(engine)


def reconcile(engine: Engine) -> None:
    """Nothing is left in the engine, and every page can be had."""
    until(lambda: engine.num_in_flight == 0)
    assert not engine.scheduler.running and not engine.scheduler.waiting
    engine.scheduler.check()
    engine.forget()
    assert engine.scheduler.pool.num_free == engine.config.num_pages - 1


def until(condition: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def served(engine: Engine) -> Iterator[tuple[Live, httpx.Client]]:
    with gateway(engine) as made:
        yield made


def ask(client: httpx.Client, wire: str, body: Any, prefix: str = "", **headers: str) -> Any:
    """The answer as one object."""
    response = client.post(prefix + WIRES[wire].path, json=body, headers=headers)
    assert response.status_code == 200, response.text
    if not body.get("stream"):
        return response.json()
    events = []
    for block in response.text.split("\n\n"):
        name, data = "", ""
        for line in block.split("\n"):
            name = line.removeprefix("event: ") if line.startswith("event: ") else name
            data = line.removeprefix("data: ") if line.startswith("data: ") else data
        if data and data != "[DONE]":
            events.append((name, json.loads(data)))
    assert response.text.endswith("data: [DONE]\n\n") is WIRES[wire].done
    return put_together(wire, events)


def post(client: httpx.Client, path: str, body: Any = None, **headers: str) -> httpx.Response:
    return client.post(path, json={} if body is None else body, headers=headers)


# ---- dialects and sessions


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_two_turns_are_one_sample(served: tuple[Live, httpx.Client], wire: str, stream: bool) -> None:
    """However the client writes its history, and in whatever way it names its session."""
    live, client = served
    for number, rewrite in enumerate(REWRITTEN[wire]):
        for way in ("path", "key", "header"):
            name = f"{wire}-{stream}-{number}-{way}"
            prefix = f"/s/{name}" if way == "path" else ""
            headers = {"x-session": name} if way == "header" else {}
            if way == "key":
                key = post(client, "/sessions", {"name": name}).json()["key"]
                headers = {"x-api-key": key} if wire == "messages" else {"authorization": f"Bearer {key}"}
            first = ask(client, wire, {**FIRST[wire], "tools": TOOLS[wire], "stream": stream}, prefix, **headers)
            body = {**next_body(wire, first, rewrite), "tools": TOOLS[wire], "stream": stream}
            second = ask(client, wire, body, prefix, **headers)
            counts = client.get(f"/sessions/{name}").json()
            assert (counts["requests"], counts["samples"], counts["breaks"]) == (2, 1, 0), (way, first)
            graph = live.sessions.named(name).graph
            names = [node.request_id for node in graph.nodes if node.kind == "sampled"]
            assert all(
                str(of).partition("#")[2] in json.dumps(answer) for of, answer in zip(names, (first, second), strict=True)
            )


def test_a_stream_is_what_the_whole_answer_is(served: tuple[Live, httpx.Client]) -> None:
    """And a retry gets the same once more, streamed or not."""
    live, client = served
    for wire in WIRES:
        whole = ask(client, wire, FIRST[wire], f"/s/same-{wire}")
        streamed = ask(client, wire, {**FIRST[wire], "stream": True}, f"/s/same-{wire}")
        for answer in (whole, streamed):
            for name in ("created", "created_at", "completed_at", "metadata"):
                answer.pop(name, None)
        assert whole == streamed
        assert live.sessions.named(f"same-{wire}").counts()["requests"] == 1


def test_counting_and_looking(served: tuple[Live, httpx.Client]) -> None:
    live, client = served
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}], "tools": TOOLS["messages"]}
    counted = post(client, "/s/counted/v1/messages/count_tokens", body).json()
    assert "counted" not in live.sessions._sessions
    answer = ask(client, "messages", {**body, "max_tokens": 4}, "/s/counted")
    usage = answer["usage"]
    assert counted == {"input_tokens": usage["input_tokens"] + usage.get("cache_read_input_tokens", 0)}
    assert client.head("/").status_code == client.head("/s/any").status_code == 200
    for path in ("/v1/models", "/s/any/v1/models"):
        assert client.get(path).json()["data"][0]["id"] == "tiny"


def test_a_key_opens_one_session(engine: Engine) -> None:
    with gateway(engine, key="owner") as (_, client):
        keys = {name: post(client, "/sessions", {"name": name}).json()["key"] for name in ("a", "b")}
        body, path = FIRST["chat"], "/v1/chat/completions"
        for name, key in keys.items():
            mine = {"authorization": f"Bearer {key}"}
            assert client.post(path, json=body, headers=mine).status_code == 200
            assert client.post(f"/s/{name}{path}", json=body, headers=mine).status_code == 200
            other = "b" if name == "a" else "a"
            # not by path, and a header does not count against the key
            assert client.post(f"/s/{other}{path}", json=body, headers=mine).status_code == 401
            assert client.post(path, json=body, headers={**mine, "x-session": other}).status_code == 200
            assert client.get(f"/sessions/{other}", headers=mine).status_code == 401
            assert client.get(f"/sessions/{name}", headers=mine).status_code == 200
            for owners in ("/sessions", f"/sessions/{name}/finish"):
                assert client.post(owners, json={}, headers=mine).status_code == 401
        for wrong in ({"authorization": "Bearer tx-wrong"}, {"authorization": ""}, {"x-api-key": "", "authorization": ""}):
            for where in (path, f"/s/a{path}", "/v1/messages", "/sessions", "/v1/messages/count_tokens"):
                assert client.post(where, json=body, headers=wrong).status_code == 401
        requests = [client.get(f"/sessions/{name}").json()["requests"] for name in keys]
        assert requests == [1, 1]  # the same body again is a retry


def test_finished_with_rewards(engine: Engine, tmp_path: Path) -> None:
    with gateway(engine, folder=tmp_path) as (_, client):
        key = post(client, "/sessions", {"name": "run", "env": "coding", "key": 7, "group": "g", "seed": 3}).json()["key"]
        first = ask(client, "chat", FIRST["chat"], authorization=f"Bearer {key}")
        ask(client, "chat", next_body("chat", first), authorization=f"Bearer {key}")
        rewards = [{"name": "tests", "score": 0.5, "weight": 2.0}, {"name": "style", "score": None}]
        counts = post(client, "/sessions/run/finish", {"rewards": rewards})
        assert counts.status_code == 200 and counts.json()["samples"] == 1, counts.text
        assert post(client, "/sessions/run/finish").status_code == 409
        assert post(client, "/s/run/v1/chat/completions", FIRST["chat"]).status_code == 409
        assert post(client, "/sessions", {"name": "run"}).status_code == 409
        # its key opens nothing any more, not the default session either: a program that runs on must not write into another's
        late = post(client, "/v1/chat/completions", FIRST["chat"], authorization=f"Bearer {key}")
        assert late.status_code == 409 and "is finished" in late.text
        ask(client, "chat", FIRST["chat"])
        assert client.get("/sessions/default").json()["requests"] == 1
        (graph,) = read(tmp_path / "session_run.parquet")
    episode = graph.episode
    assert (episode.env, episode.key, episode.group_id, episode.status) == ("coding", 7, "g", "completed")
    assert [(reward.name, reward.score, reward.weight) for reward in episode.rewards] == [
        ("tests", 0.5, 2.0),
        ("style", None, 1.0),
    ]
    assert len(graph.branches()) == 1
    (default,) = read(tmp_path / "session_default.parquet")
    assert default.episode.status == "running"


@pytest.mark.parametrize(
    "body", [{"name": 3}, {"name": "../up"}, {"seed": -1}, {"seed": True}, {"env": "\ud800"}, {"colour": 1}, []]
)
def test_sessions_that_cannot_be(served: tuple[Live, httpx.Client], body: Any) -> None:
    _, client = served
    raw = json.dumps(body)  # escapes what has no UTF-8
    refused = client.post("/sessions", content=raw, headers={"content-type": "application/json"})
    assert refused.status_code == 400 and refused.json()["error"]["message"].partition(":")[0] in {*body, "body"}


OVERFLOW = {
    "chat": ("context_length_exceeded", "This model's maximum context length is 2048 tokens"),
    "responses": ("context_length_exceeded", ""),
    "messages": ("invalid_request_error", "prompt is too long: "),
}


@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("stream", [False, True])
def test_a_prompt_that_does_not_fit(served: tuple[Live, httpx.Client], wire: str, stream: bool) -> None:
    """In the words at which the dialect's clients compact; the session is as it was."""
    live, client = served
    body = json.loads(json.dumps(FIRST[wire]).replace("hi", "x" * CONTEXT)) | {"stream": stream}
    refused = post(client, f"/s/long-{wire}" + WIRES[wire].path, body)
    code, words = OVERFLOW[wire]
    assert refused.status_code == 400
    error = refused.json()["error"]
    assert code in (error.get("code"), error.get("type")) and error["message"].startswith(words)
    assert live.sessions.named(f"long-{wire}").counts()["requests"] == 0


# ---- clients that leave, servers that end

LONG = SamplingParams(max_tokens=1500, ignore_eos=True)


def begin(live: Live, path: str, body: Any) -> socket.socket:
    """A request whose answer nobody has read."""
    raw = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: {len(raw)}\r\n\r\n"
    made = socket.create_connection(("127.0.0.1", live.port), timeout=DEADLINE)
    made.sendall(head.encode() + raw)
    return made


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("wire", WIRES)
def test_a_client_that_leaves(engine: Engine, wire: str, stream: bool) -> None:
    with gateway(engine, LONG) as (live, client):
        body = {**FIRST[wire], "stream": stream} | ({"max_tokens": 1500} if wire == "messages" else {})
        with begin(live, f"/s/gone{WIRES[wire].path}", body) as connection:
            until(lambda: "gone" in live.sessions._sessions and live.sessions.named("gone").running)
            session = live.sessions.named("gone")
            if stream:
                assert connection.recv(12) == b"HTTP/1.1 200"
            until(lambda: engine.scheduler.running and engine.scheduler.running[0].num_sampled > 100)
        until(lambda: not session.running)
        reconcile(engine)
        (node,) = (node for node in session.graph.nodes if node.kind == "sampled")
        assert node.status == "abandoned" and 0 < len(node.ids) < LONG.max_tokens
        assert session.counts()["samples"] == 0 and session.counts()["trained_tokens"] == 0
        again = ask(
            client,
            wire,
            {**FIRST[wire], **({"max_tokens": 4} if wire != "responses" else {"max_output_tokens": 16})},
            "/s/gone",
        )
        counts = session.counts()
        assert again and counts["nodes"] == {"abandoned": 1, "cut": 1} and counts["samples"] == 1 and counts["breaks"] == 0


def test_a_retry_that_leaves_does_not_end_what_it_waits_for(engine: Engine) -> None:
    with gateway(engine, replace(LONG, max_tokens=300)) as (live, _):
        path, body = "/s/twice/v1/chat/completions", FIRST["chat"]
        with begin(live, path, body) as first:
            until(lambda: "twice" in live.sessions._sessions and live.sessions.named("twice").running)
            begun = live.door.metrics
            with begin(live, path, body):
                time.sleep(0.1)
            until(lambda: 'outcome="cancelled"' in begun.text().decode())
            answer = b""
            while b'"usage"' not in answer:
                part = first.recv(2**16)
                assert part, answer
                answer += part
        assert answer.startswith(b"HTTP/1.1 200")
        assert live.sessions.named("twice").counts()["nodes"] == {"cut": 1}


def test_one_that_waits_gets_the_answer_or_hears_why_not(engine: Engine) -> None:
    with gateway(engine, replace(LONG, max_tokens=1200)) as (live, _):
        path, body = "/s/waits/v1/chat/completions", FIRST["chat"]
        first = begin(live, path, body)
        until(lambda: "waits" in live.sessions._sessions and live.sessions.named("waits").running)
        with begin(live, path, body) as second:
            time.sleep(0.1)
            first.close()
            answer = second.recv(2**16)
        assert answer.startswith(b"HTTP/1.1 503") and b"retry-after" in answer and b"has left" in answer


def test_too_much_at_once(engine: Engine) -> None:
    with gateway(engine, LONG, limits=Limits(max_requests=1)) as (live, client):
        with begin(live, "/s/one/v1/messages", FIRST["messages"]):
            until(lambda: live.door.active)
            refused = post(client, "/s/two/v1/messages", FIRST["messages"])
            assert refused.status_code == 429 and refused.json()["error"]["type"] == "rate_limit_error"
        until(lambda: not live.sessions.named("one").running)


def test_a_record_that_is_written_holds_up_no_other_request(engine: Engine) -> None:
    with gateway(engine) as (live, client):
        begun = threading.Thread(target=lambda: ask(client, "chat", FIRST["chat"], "/s/a"))
        with live.sessions._lock:  # as while a session is let go
            begun.start()
            time.sleep(0.1)
            assert post(client, COUNT, FIRST["messages"]).status_code == 200
        begun.join(DEADLINE)
        assert live.sessions.named("a").counts()["requests"] == 1


def test_sessions_are_bounded(engine: Engine, tmp_path: Path) -> None:
    """The one used longest ago is written and let go; its name comes again as another episode."""
    with gateway(engine, most=2, folder=tmp_path) as (live, client):
        for name in ("a", "b", "a", "c", "b"):
            ask(client, "chat", FIRST["chat"], f"/s/{name}")
        assert list(live.sessions._sessions) == ["c", "b"]
    written = {path.name: read(path)[0] for path in tmp_path.iterdir()}
    assert set(written) == {f"session_{name}.parquet" for name in ("a", "b", "b~2", "c")}
    assert written["session_b.parquet"].episode.stop_reason == "idle"
    assert all(len(graph.branches()) == 1 for graph in written.values())


def test_a_session_whose_record_cannot_be_written_stays(engine: Engine, tmp_path: Path) -> None:
    folder, away = tmp_path / "records", tmp_path / "away"
    with gateway(engine, folder=folder) as (live, client):
        ask(client, "chat", FIRST["chat"], "/s/a")
        folder.rename(away)
        with pytest.raises(OSError):
            live.sessions.finish("a", "completed")
        away.rename(folder)
        assert post(client, "/s/a/v1/chat/completions", FIRST["chat"]).status_code == 409  # it is over all the same
        assert post(client, "/sessions/a/finish").status_code == 200
    (graph,) = read(folder / "session_a.parquet")
    assert graph.episode.status == "completed" and len(graph.branches()) == 1


def test_who_asks_may_be_in_the_body(served: tuple[Live, httpx.Client]) -> None:
    """Codex says it in `client_metadata` too."""
    live, client = served
    said = {"client_metadata": {"session_id": "codex", "thread_id": "t", "parent_thread_id": "codex"}}
    ask(client, "responses", FIRST["responses"] | said)
    assert live.sessions.named("codex").counts()["agents"] == ["main", "t"]


def nodes_of(graph: Graph) -> list[Any]:
    """Without what changes from run to run: names, and what the engine's cache did."""
    return [replace(node, request_id=None, cached_tokens=0, messages=()) for node in graph.nodes]


def test_an_engine_elsewhere_gives_the_same_record(engine: Engine, tmp_path: Path) -> None:
    door = make_door(engine, tokenizer_of(engine), "tiny", Limits(), None)
    found: list[list[Any]] = []
    with running(door) as (_, port):
        remote = RemoteFront(f"http://127.0.0.1:{port}")
        for front, folder in ((None, tmp_path / "here"), (remote, tmp_path / "there")):
            with serving(engine, PARAMS, front=front, folder=folder) as live:
                url = f"http://127.0.0.1:{live.port}"
                with httpx.Client(base_url=url, timeout=DEADLINE) as client:
                    for wire in WIRES:
                        first = ask(client, wire, {**FIRST[wire], "stream": wire != "chat"}, "/s/same")
                        ask(client, wire, next_body(wire, first), "/s/same")
                    assert post(client, "/sessions/same/finish").status_code == 200
                if front is not None:
                    live.wait(front.close())
            (graph,) = read(folder / "session_same.parquet")
            found.append(nodes_of(graph))
    assert found[0] == found[1] and sum(node.kind == "sampled" for node in found[0]) >= 4


def test_an_engine_elsewhere_that_has_gone_back(engine: Engine) -> None:
    """It was started again with older weights: a conversation cannot go on in one record, and others can begin."""

    def load(version: int) -> None:
        engine.pause()
        engine.load(engine.params, version, restart=True)
        engine.resume()

    load(3)
    with running(make_door(engine, tokenizer_of(engine), "tiny", Limits(), None)) as (_, port):
        remote = RemoteFront(f"http://127.0.0.1:{port}")
        with serving(engine, PARAMS, front=remote) as live:
            with httpx.Client(base_url=f"http://127.0.0.1:{live.port}", timeout=DEADLINE) as client:
                for wire in WIRES:
                    first = ask(client, wire, FIRST[wire], f"/s/{wire}")
                    load(0)
                    refused = post(client, f"/s/{wire}{WIRES[wire].path}", next_body(wire, first))
                    assert refused.status_code == 409, refused.text
                    assert "gone back to version 0, and this conversation was sampled up to 3" in refused.text
                    counts = client.get(f"/sessions/{wire}").json()
                    assert counts["requests"] == 2 and sum(counts["nodes"].values()) == 1
                    assert any("gone back to version 0" in note for note in counts["notes"])
                    ask(client, wire, FIRST[wire], f"/s/{wire}-anew")
                    load(3)
            live.wait(remote.close())


@pytest.mark.slow
def test_a_gateway_that_is_ended_writes_its_records(tmp_path: Path) -> None:
    """What runs is finished before."""
    sizes = ["max_context=512", "max_slots=8", "slot_buckets=(8,)", "token_buckets=(128,)", "context_buckets=(512,)"]
    command = [sys.executable, "-m", "launch.gateway", "--config", str(REPO / "configs/tiny.py"), "--port", "0"]
    command += ["--record", str(tmp_path), "--max-tokens", "300", *(f"--config.engine.{size}" for size in sizes)]
    environment = {**os.environ, "PYTHONPATH": str(REPO)}
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment, cwd=tmp_path) as process:
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with httpx.Client(base_url=url, timeout=120) as client:
                ask(client, "chat", FIRST["chat"], "/s/before")
                with client.stream("POST", "/s/during/v1/messages", json={**FIRST["messages"], "stream": True}) as response:
                    assert response.status_code == 200
                    process.send_signal(signal.SIGTERM)
                    text = "".join(response.iter_text())
            assert "message_stop" in text
            assert process.wait(60) == 0
        finally:
            process.kill()
    for name in ("before", "during"):
        (graph,) = read(tmp_path / f"session_{name}.parquet")
        assert [node.status in ("live", "cut") for node in graph.nodes] == [True, True]
