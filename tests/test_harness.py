"""Agent programs as agents of a run: in a sandbox, through the gateway, recorded as the episode, token for token."""

import re
from pathlib import Path
from typing import Any

import pytest

from inference.types import FinishReason, SamplingParams
from rl.episodes import Episodes
from rl.harness import Harness
from rl.rollout import Rollout
from rl.sandbox import Sandbox
from tests.runs import ended, lines_of, start
from tests.scripted import END, RENDERER, TOKENIZER, Scripted

PROGRAM = """
import json, os, sys, urllib.request
def ask(path, body, **headers):
    headers |= {"content-type": "application/json", "authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
    url = os.environ["OPENAI_BASE_URL"] + path
    request = urllib.request.Request(url, json.dumps(body).encode(), headers)
    return json.load(urllib.request.urlopen(request, timeout=30))
def chat(messages, **headers):
    return ask("/chat/completions", {"model": "policy", "messages": messages}, **headers)["choices"][0]["message"]
messages = [{"role": "user", "content": sys.stdin.read()}]
"""
TWICE = (
    PROGRAM
    + """
messages += [chat(messages), {"role": "user", "content": "sure?"}]
helper = chat([{"role": "user", "content": "help"}], **{"x-agent-id": "helper"})
chat(messages)
"""
)


@pytest.fixture(scope="module", autouse=True)
def _isolated() -> None:
    try:
        Sandbox()
    except ValueError as error:
        pytest.skip(str(error))


def harness(program: str, **options: Any) -> Harness:
    return Harness("arithmetic", ["python3", "/work/agent.py"], files=[("agent.py", program)], **{"seconds": 30.0, **options})


def play(environment: Harness, samples: int = 2, **options: Any) -> tuple[list[Rollout], Scripted]:
    engine = Scripted(lambda request: ([*TOKENIZER.encode("7"), END], FinishReason.STOP))
    running = Episodes(engine, environment.run, RENDERER, **{"seed": 3, "max_turns": 30, "max_context": 2000, **options})
    params = SamplingParams(max_tokens=20, temperature=0.7)
    batch = running.start([environment.task(5)], samples=samples, params=params, label="train-1", trainable=True)
    rollouts = running.finish(batch)
    environment.close()
    return rollouts, engine


def test_a_program_plays_an_episode() -> None:
    environment = harness(TWICE)
    rollouts, engine = play(environment)
    for rollout in rollouts:
        graph = rollout.graph
        assert (graph.episode.status, rollout.turns, rollout.sampled_tokens) == ("completed", 3, 6)
        assert rollout.task.env == "harness/arithmetic" and rollout.reward == float(environment.task(5).answer == "7")
        assert [(call.agent, call.parent, call.trainable) for call in graph.calls] == [
            ("main", None, True),
            ("helper", 0, True),
        ]
        first, second = graph.branches()
        assert {len(first.ids), len(second.ids)} and first.weights.sum() + second.weights.sum() == 6
        given = {request.prompt_ids for request in engine.requests if request.id.startswith(f"{graph.episode.id}#")}
        assert given == {tuple(graph.path_ids(node.parent)) for node in graph.nodes if node.kind == "sampled"}
    assert len({request.params.seed for request in engine.requests}) == 6


def test_the_last_turn_is_scored_and_no_title() -> None:
    summary = [{"role": "user", "content": "You are performing a CONTEXT CHECKPOINT COMPACTION"}]
    environment = harness(PROGRAM + f"chat(messages)\nchat({summary!r})\n")
    right = environment.task(5).answer
    engine = Scripted(
        lambda request: ([*TOKENIZER.encode("0" if len(request.prompt_ids) > 60 else str(right)), END], FinishReason.STOP)
    )
    running = Episodes(engine, environment.run, RENDERER, seed=3, max_turns=30, max_context=2000)
    params = SamplingParams(max_tokens=20, temperature=0.7)
    [rollout] = running.finish(running.start([environment.task(5)], samples=1, params=params, label="train-1", trainable=True))
    environment.close()
    assert [call.role for call in rollout.graph.calls] == ["assistant", "compaction"]
    assert rollout.reward == 1.0


def test_a_program_asks_no_more_than_it_may() -> None:
    """A branch with more turns than `environment.max_turns` would be too long for the trainer's layout, and end the run."""
    asking = (
        PROGRAM
        + """
for _ in range(3):
    messages += [chat(messages), {"role": "user", "content": "sure?"}]
"""
    )
    [rollout], engine = play(harness(asking), samples=1, max_turns=2)
    assert rollout.graph.episode.status == "completed" and len(engine.requests) == rollout.turns == 2


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import sys; print('broken'); sys.exit(3)", "RuntimeError: the program has ended with status 3.*broken"),
        ("import time; time.sleep(60)", "TimeoutError: the program took longer than 2 s"),
        (PROGRAM + "os.environ['OPENAI_API_KEY'] = 'tx-other'\nchat(messages)", "RuntimeError.*401"),
        ("import socket; socket.create_connection(('1.1.1.1', 80), 1)", "RuntimeError.*unreachable"),
    ],
)
def test_programs_that_fail_have_no_reward(program: str, error: str) -> None:
    [rollout], _ = play(harness(program, seconds=2.0 if "sleep" in program else 30.0), samples=1)
    episode = rollout.graph.episode
    assert episode.status == "failed" and rollout.reward is None
    assert re.search(error, episode.error or "", re.S), episode.error


def test_what_a_program_leaves_unfinished() -> None:
    """It asks, and ends before the answer is there: the request is cancelled, the record keeps what was whole."""
    leaving = (
        PROGRAM
        + """
import socket, threading
chat(messages)
threading.Thread(target=chat, args=([{"role": "user", "content": "more"}],), daemon=True).start()
import time; time.sleep(0.3)
os._exit(0)
"""
    )
    engine = Scripted(lambda request: ([*TOKENIZER.encode("7"), END], FinishReason.STOP))
    environment = harness(leaving)
    running = Episodes(engine, environment.run, RENDERER, seed=3, max_turns=30, max_context=2000)
    params = SamplingParams(max_tokens=20, temperature=0.7)
    [rollout] = running.finish(running.start([environment.task(5)], samples=1, params=params, label="train-1", trainable=True))
    environment.close()
    assert rollout.graph.episode.status == "completed" and rollout.reward is not None
    assert sum(float(branch.weights.sum()) for branch in rollout.graph.branches()) in (2, 4)


@pytest.mark.slow
def test_a_run_on_a_program(tmp_path: Path) -> None:
    """Every turn of a program's is trained on, and the trainer's log-probs are the sampler's."""
    ended(
        start(
            tmp_path,
            "steps=2",
            "engine.max_context=256",
            "engine.context_buckets=(256,)",
            "trainer.tokens_per_row=512",
            config="tiny_harness",
        )
    )
    for line in lines_of(tmp_path / "tiny_harness"):
        assert line["turns_mean"] == 1 and line["unscored"] == 0
        assert line["max_abs_gap"] <= 1e-5
