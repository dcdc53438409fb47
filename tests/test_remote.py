"""Engines in processes of their own, real ones: the same completions bit for bit, and none lost when a server is killed."""

import os
import signal
import subprocess
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from inference.engine import Engine
from inference.types import Completion, FinishReason, Request, SamplingParams
from launch.serve import make_engine, settings
from rl.engines import Engines
from rl.processes import EngineProcess, ServedEngine
from rl.remote import EngineDied, RemoteEngine

REPO = Path(__file__).parents[1]
CONFIG = str(REPO / "configs/tiny_moe.py")
SMALL = [
    f"--config.{item}"
    for item in (
        *("model.shape.num_layers=1", "engine.max_context=128", "engine.num_pages=200", "engine.token_buckets=(128,)"),
        *("engine.slot_buckets=(32,)", "engine.context_buckets=(128,)", "engine.capture_routing=True"),
    )
]
COMMAND = [sys.executable, "-m", "launch.serve", "--config", CONFIG, *SMALL, "--port", "0", "--with-parent"]
DEADLINE = 120.0

pytestmark = [pytest.mark.slow, pytest.mark.plain_code]  # a server starts three times


def until(condition: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


@pytest.fixture(scope="module")
def engine() -> Engine:
    what = settings(Namespace(model=None, config=CONFIG), SMALL)
    made = make_engine(what.model, what.engine, what.seed)[0]
    made.warm_up()
    return made


@pytest.fixture(scope="module")
def served() -> Iterator[ServedEngine]:
    made = ServedEngine(EngineProcess(COMMAND))
    yield made
    made.close()


def requests(count: int, tokens: int = 12) -> list[Request]:
    return [
        Request(
            id=f"train-1/odd/{i // 4}/{i % 4}#0",
            prompt_ids=tuple(f"prompt {i // 4} is".encode()),
            params=SamplingParams(max_tokens=tokens, seed=i, ignore_eos=True, temperature=0.7, top_logprobs=2),
        )
        for i in range(count)
    ]


def finish(engine: Any, asked: list[Request]) -> dict[str, Completion]:
    for request in asked:
        engine.submit(request)
    return collect(engine, len(asked))


def collect(engine: Any, count: int) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    end = time.monotonic() + DEADLINE
    while len(done) < count:
        assert time.monotonic() < end, f"{len(done)} of {count} came"
        for completion in engine.step():
            assert completion.request_id not in done
            done[completion.request_id] = completion
    return done


def assert_equal(here: Completion, there: Completion) -> None:
    for name in ("ids", "logprobs", "logprobs_full", "versions", "top_ids", "top_logprobs"):
        a, b = getattr(here, name), getattr(there, name)
        assert a.dtype == b.dtype and a.tobytes() == b.tobytes(), name
    assert here.finish_reason == there.finish_reason and here.prompt_ids == there.prompt_ids
    assert here.routing is not None and there.routing is not None
    first = max(here.routing_start, there.routing_start)  # what was cached differs with the order of arrival
    np.testing.assert_array_equal(
        here.routing[first - here.routing_start :], there.routing[first - there.routing_start :], strict=True
    )


def test_completions_are_those_of_an_engine_here(engine: Engine, served: ServedEngine) -> None:
    """Bit for bit, in a second turn with its routing, too."""
    here, there = finish(engine, requests(8)), finish(served, requests(8))
    assert here.keys() == there.keys()
    for name in here:
        assert_equal(here[name], there[name])
    first = here["train-1/odd/0/0#0"]
    assert first.routing is not None
    ids = (*first.prompt_ids, *first.ids.tolist(), 65, 66)
    params = SamplingParams(max_tokens=5, seed=1, ignore_eos=True)
    second = Request(id="train-1/odd/0/0#1", prompt_ids=ids, params=params, routing=first.routing)
    assert_equal(finish(engine, [second])[second.id], finish(served, [second])[second.id])


def test_what_the_server_refuses_and_what_is_cancelled(served: ServedEngine) -> None:
    served.submit(Request(id="a/b/0/0#0", prompt_ids=(1,) * 200, params=SamplingParams(max_tokens=4)))
    with pytest.raises(ValueError, match=r"a/b/0/0#0: .*context"):
        collect(served, 1)
    (long,) = requests(1, 100)
    served.submit(long)
    gone = served.cancel(long.id)
    assert gone.finish_reason is FinishReason.ABORT and not len(gone.ids) and served.step() == []
    with pytest.raises(ValueError, match="store"):
        served.update(3)
    assert served.version == 0


def test_a_killed_server_loses_no_request(engine: Engine, served: ServedEngine) -> None:
    """Fault C30: those in flight are sampled again by its successor, the same tokens; those of another engine go on."""
    here = finish(engine, requests(16, 40))
    both = Engines([served, engine])
    for request in requests(16, 40):
        both.submit(request)
    pid = served.process.pid
    os.kill(pid, signal.SIGKILL)
    there = collect(both, 16)
    assert served.process.pid != pid and here.keys() == there.keys()
    for name in here:
        assert_equal(here[name], there[name])


def test_no_server_outlives_its_parent() -> None:
    program = f"""
import time
from rl.processes import EngineProcess
process = EngineProcess({COMMAND!r})
process.start()
print(process.pid, flush=True)
time.sleep(100)
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=REPO, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        stat = Path(f"/proc/{int(parent.stdout.readline())}/stat")
        assert stat.exists()
        parent.kill()
    until(lambda: not stat.exists() or stat.read_text().rpartition(")")[2].split()[0] == "Z")


def test_an_engine_that_only_dies_is_an_error() -> None:
    """With what it said; within its number of restarts."""
    process = EngineProcess([sys.executable, "-c", "import sys; sys.exit('no room')"], most=2)
    try:
        with pytest.raises(EngineDied, match="ended before it answered; it said: no room"):
            process.start()
        with pytest.raises(EngineDied, match="2 restarts finished no request; it said: .*no room"):
            process.restart()
    finally:
        process.close()
    with pytest.raises(EngineDied, match="127.0.0.1:9"):
        RemoteEngine("http://127.0.0.1:9")
