"""`launch.bench gateway`: what the gateway costs over the bare engine, and whether it keeps conversations apart and whole.

A tiny random model on the real engine, as the gateway's work does not depend on the model's; the gateway in a thread, clients
of Chat Completions over sockets in the same process. Histories are 10 turns with 6 tools, of 5,500 to 8,400 tokens.

    added_ms_p50     median over requests of the time over HTTP (a stream, from the request to its end) less the time in the
                     bare engine, in process, token ids in and out: the same requests, in turn, one at a time, on an engine of
                     its own, so that both find the same in their caches and sample the same. `_first`: of the first requests
                     of conversations alone, whose whole prompt is new
    sessions         many at once, each with a secret of its own in all that it says, named by key, path or header:
                     `foreign` texts (answers and records that hold another's secret), `strangers` (answers that are not what is
                     recorded for them) and `unlike` (recorded tokens that the engine does not sample alone) must be 0
    requests_per_s   of them, and of the bare engine with the same requests at once
    breaks, samples  counted by kind of history, next to those that there must be
"""

import argparse
import asyncio
import json
import random
import re
import statistics
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from inference.engine import Engine
from inference.front import AsyncEngine
from inference.types import Completion, Request, SamplingParams
from launch.forced import Forced
from launch.gateway_load import Client, Json, Live, serving, tiny_engine, tokenizer_of
from launch.quiet import Others, warn
from models.tokenizer import Tokenizer
from rl.renderers import ChatML, Qwen3, Renderer
from rl.sessions import Session

SIZES = {
    "full": {"context": 10240, "slots": 32, "conversations": 12, "turns": 10, "sampled": 16, "sessions": 200},
    "small": {"context": 7168, "slots": 8, "conversations": 2, "turns": 3, "sampled": 4, "sessions": 12},
}
SECRET = re.compile("secret-[0-9]+-")
WORDS = ("the", "model", "reads", "files", "and", "runs", "what", "has", "been", "written", "until", "tests", "pass", "again")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", choices=SIZES, default="full", help="small: to see that it works")


def gateway(arguments: argparse.Namespace) -> dict[str, Any]:
    sizes = SIZES[arguments.scale]
    engine, bare = (tiny_engine(sizes["context"], sizes["slots"]) for _ in range(2))
    tokenizer, params = tokenizer_of(engine), SamplingParams(max_tokens=sizes["sampled"])
    with Others() as others:
        costs = overhead(engine, bare, params, sizes)
        together = crowd(engine, bare, params, sizes)
    warn(others.cpus, "during the requests")
    kinds = {"append-only": append_only, "re-serialised": reserialised, "compaction": compaction, "sub-agents": sub_agents}
    found = {name: counted(engine, ChatML(tokenizer), play) for name, play in kinds.items()}
    found["stripped-thinking"] = counted(engine, Qwen3(tokenizer, keep_thinking=False), stripped)
    return {**costs, "other_cpus": others.cpus, "sessions": together, "histories": found}


# ---- what it costs


def overhead(engine: Engine, bare: Engine, params: SamplingParams, sizes: dict[str, int]) -> dict[str, float]:
    rng, front, alone = random.Random(0), Forced(engine, keep=True), AsyncEngine(bare)
    added: list[float] = []
    first: list[float] = []
    lengths: list[int] = []
    with serving(engine, params, front=front) as live:
        for number in range(-1, sizes["conversations"]):  # the first one warms up
            client = Client(live.port, words(rng, 3000), prefix=f"/s/cost-{number}", stream=True)
            for turn in range(sizes["turns"]):
                client.user(words(rng, rng.randint(100, 300)))
                assert front.requests
                request = front.requests.popitem()[1]
                seconds = live.wait(timed(alone, request))
                if number >= 0:
                    (added if turn else first).append(1e3 * (client.seconds - seconds))
                    lengths.append(len(request.prompt_ids))
            client.close()
    return {
        "added_ms_p50": statistics.median(added),
        "added_ms_p90": statistics.quantiles(added, n=10)[-1],
        "added_ms_p50_first": statistics.median(first),
        "prompt_tokens_p50": statistics.median(lengths),
        "prompt_tokens_max": max(lengths),
    }


def words(rng: random.Random, count: int) -> str:
    """About so many bytes of text."""
    return " ".join(rng.choices(WORDS, k=count // 5))


async def timed(front: AsyncEngine, request: Request) -> float:
    begun = time.perf_counter()
    await front.generate(request)
    return time.perf_counter() - begun


# ---- many at once


def crowd(engine: Engine, bare: Engine, params: SamplingParams, sizes: dict[str, int]) -> dict[str, Any]:
    front, count = Forced(engine, keep=True), sizes["sessions"]
    with serving(engine, params, front=front) as live, ThreadPoolExecutor(count) as threads:
        clients = [(number, *client_of(live, number)) for number in range(count)]
        begun = time.perf_counter()
        answers = list(threads.map(lambda each: talk(each[2], each[0], sizes["turns"]), clients))
        seconds = time.perf_counter() - begun
        sessions = [live.sessions.named(name) for _, name, _ in clients]
        for _, _, client in clients:
            client.close()
        requests = list(front.requests.values()) if front.requests else []
        begun = time.perf_counter()
        completions = live.wait(at_once(AsyncEngine(bare), requests))
        bare_seconds = time.perf_counter() - begun
    return {
        "count": count,
        "requests": len(requests),
        "requests_per_s": len(requests) / seconds,
        "bare_requests_per_s": len(requests) / bare_seconds,
        "foreign": sum(map(foreign, [tokenizer_of(engine)] * count, range(count), sessions, answers)),
        "strangers": sum(map(strangers, sessions, answers)),
        "unlike": sum(unlike(session, completions) for session in sessions),
        "breaks": sum(session.breaks for session in sessions),
        "samples": sum(len(session.graph.branches()) for session in sessions),
    }


def client_of(live: Live, number: int) -> tuple[str, Client]:
    """A session's name and its client; sessions are told apart in three ways."""
    name, secret = f"crowd-{number}", f"secret-{number}-"
    prefix = f"/s/{name}" if number % 3 == 0 else ""
    headers = {"x-session": name} if number % 3 == 1 else {}
    if number % 3 == 2:
        _, key = live.sessions.open({"id": name})
        headers = {"authorization": f"Bearer {key}"}
    return name, Client(live.port, f"{secret} is what you know", headers, prefix=prefix, tools=())


def talk(client: Client, number: int, turns: int) -> list[Json]:
    rng = random.Random(number)
    return [client.user(f"{words(rng, 60)} secret-{number}- {turn}") for turn in range(turns)]


async def at_once(front: AsyncEngine, requests: Sequence[Request]) -> dict[str, Completion]:
    done = await asyncio.gather(*(front.generate(request) for request in requests))
    return {completion.request_id: completion for completion in done}


def foreign(tokenizer: Tokenizer, number: int, session: Session, answers: Sequence[Json]) -> int:
    """Texts of a session that hold another's secret."""
    texts = [*(tokenizer.decode(node.ids) for node in session.graph.nodes), *map(json.dumps, answers)]
    return sum(bool(set(SECRET.findall(text)) - {f"secret-{number}-"}) for text in texts)


def strangers(session: Session, answers: Sequence[Json]) -> int:
    """Answers that are not the session's own records, in order."""
    recorded = [node.messages[0]["content"] for node in session.graph.nodes if node.kind == "sampled"]
    return sum(answer["content"] != content for answer, content in zip(answers, recorded, strict=True))


def unlike(session: Session, completions: dict[str, Completion]) -> int:
    """Recorded answers whose prompt or tokens are not those of the same request to the bare engine."""
    graph = session.graph
    sampled = [node for node in graph.nodes if node.kind == "sampled" and node.request_id is not None]
    pairs = [(node, completions[node.request_id or ""]) for node in sampled]
    return sum(
        node.ids != tuple(alone.ids.tolist()) or graph.path_ids(node.parent) != list(alone.prompt_ids) for node, alone in pairs
    )


# ---- histories


class Script:
    """A client of one session whose answers are given beforehand."""

    def __init__(self, front: Forced, live: Live, renderer: Renderer) -> None:
        assert isinstance(renderer, ChatML)
        self._front, self._live, self._tokenizer, self._end = front, live, renderer.tokenizer, renderer.stop_ids[0]
        self.clients: list[Client] = []

    def client(self, agent: str = "main", **options: Any) -> Client:
        headers = {"x-session": "history", "x-agent-id": agent}
        self.clients.append(Client(self._live.port, f"you are {agent}", headers, **options))
        return self.clients[-1]

    def say(self, text: str) -> None:
        """The next answer."""
        self._front.answers.append((*self._tokenizer.encode(text, allow_special=True), self._end))

    def call(self, client: Client, arguments: str, *messages: Json) -> None:
        """The next answer is a call; then its result comes, and an answer in words."""
        self.say(f'I look.<tool_call>\n{{"name": "read", "arguments": {arguments}}}\n</tool_call>')
        answer = client.ask(*messages)
        self.say("there it is")
        client.ask({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "line 1\nline 2"})


def counted(engine: Engine, renderer: Renderer, play: Any) -> dict[str, int]:
    front = Forced(engine)
    with serving(engine, SamplingParams(max_tokens=256), front=front, renderer=renderer) as live:
        script = Script(front, live, renderer)
        breaks, samples = play(script)
        for client in script.clients:
            client.close()
        counts = live.sessions.named("history").counts()
    return {"breaks": counts["breaks"], "breaks_expected": breaks, "samples": counts["samples"], "samples_expected": samples}


def append_only(script: Script) -> tuple[int, int]:
    client = script.client()
    for turn in range(4):
        script.call(client, '{"path": "a.py", "limit": 3}', asked(turn))
    return 0, 1


def reserialised(script: Script) -> tuple[int, int]:
    """Parsed, and written again with other spaces, numbers and order of keys."""

    def again(message: Json) -> Json:
        message = json.loads(json.dumps(message))
        for call in message.get("tool_calls", ()):
            written = json.loads(call["function"]["arguments"])
            call["function"]["arguments"] = json.dumps(written, sort_keys=True, separators=(",", ":"))
        return message

    client = script.client(echo=again)
    for turn, arguments in enumerate(
        ('{"path":  "a", "limit": 1.0}', '{"x": false}', '{ "path": "\\u00e9", "limit": [1, {}] }')
    ):
        script.call(client, arguments, asked(turn))
    return 0, 1


def compaction(script: Script) -> tuple[int, int]:
    """A summary is asked for, and the conversation begins again with it."""
    client = script.client()
    for turn in range(2):
        script.call(client, '{"path": "a.py"}', asked(turn))
    script.say("what happened so far")
    summary = client.post([*client.history, {"role": "user", "content": "You are performing a CONTEXT CHECKPOINT COMPACTION."}])
    client.history[1:] = [{"role": "user", "content": f"Another model began, and says: {summary['content']}"}]
    for turn in range(2):
        script.call(client, '{"path": "b.py"}', asked(turn))
    return 1, 2


def sub_agents(script: Script) -> tuple[int, int]:
    """Two, in between the turns of the one that they work for."""
    clients = [script.client(agent) for agent in ("main", "one", "two")]
    for turn in range(3):
        for client in clients:
            script.call(client, '{"path": "a.py"}', asked(turn))
    return 0, 3


def stripped(script: Script) -> tuple[int, int]:
    """The template leaves out the thinking before the user's last message; the client sends it all."""

    def thought(text: str) -> str:
        return f"<think>\nfirst this\n</think>\n\n{text}"

    client = script.client()
    for turn in range(3):
        script.say(thought('<tool_call>\n{"name": "read", "arguments": {"path": "a"}}\n</tool_call>'))
        answer = client.ask(asked(turn))
        script.say(thought("there it is"))
        client.ask({"role": "tool", "tool_call_id": answer["tool_calls"][0]["id"], "content": "line 1"})
    return 2, 3


def asked(turn: int) -> Json:
    return {"role": "user", "content": f"now do step {turn}"}
