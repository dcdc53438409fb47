"""Environments in processes: what comes back is what a step gives here, whatever dies on the way."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from rl.environments import AgentEnvironment, Environment, Step
from rl.kinds import make
from rl.workers import Inline, StepError, WorkerDied, Workers

TESTS = str(Path(__file__).parent)
ODD = "odd_environment:Odd"
DEADLINE = 30.0


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", os.pathsep.join([TESTS, *filter(None, [os.environ.get("PYTHONPATH")])]))
        patch.syspath_prepend(TESTS)
        yield


@pytest.fixture
def workers() -> Iterator[Workers]:
    made = Workers(ODD, {}, 2)
    yield made
    made.close()


def until(condition: Any) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.01)


def ask(runner: Workers | Inline, content: str, key: int = 3) -> Future[Step]:
    task = make(ODD, {}).task(key)
    return runner.submit(task, [*task.messages, {"role": "assistant", "content": content}])


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def odd() -> Environment:
    made = make(ODD, {})
    assert not isinstance(made, AgentEnvironment)
    return made


def written(path: Path) -> list[int]:
    until(lambda: path.exists() and path.read_text())
    return [int(word) for word in path.read_text().split()]


def test_equal_to_inline_in_any_order(workers: Workers) -> None:
    """An environment that prints breaks nothing; scores come back bit for bit."""
    inline = Inline(odd())
    contents = [f"{'x' * i} answer" for i in range(20)] + ["more"]
    there = [ask(workers, content, key) for key, content in reversed([*enumerate(contents)])]
    here = [ask(inline, content, key) for key, content in enumerate(contents)]
    assert [future.result(DEADLINE) for future in reversed(there)] == [future.result() for future in here]


def test_errors_have_class_and_text(workers: Workers) -> None:
    """As the episode records them, `KeyError: 'k'`."""
    error, own = ask(workers, "raise k").exception(DEADLINE), ask(Inline(odd()), "raise k").exception()
    assert isinstance(error, StepError) and isinstance(own, KeyError)
    assert (type(error).__name__, str(error)) == (type(own).__name__, str(own)) == ("KeyError", "'k'")


def test_a_killed_workers_step_goes_to_another(workers: Workers, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    answer = ask(workers, f"once {mark}")
    (pid,) = written(mark)
    os.kill(pid, signal.SIGKILL)
    assert answer.result(DEADLINE) == ask(Inline(odd()), f"once {mark}").result()
    assert pid not in [process.pid for process in workers.processes if process]


def test_an_idle_worker_that_dies_is_replaced(workers: Workers) -> None:
    first = [ask(workers, "a").result(DEADLINE)]
    for process in workers.processes:
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
    assert [ask(workers, "a").result(DEADLINE) for _ in range(4)] == first * 4


def test_a_step_that_kills_three_is_given_up(workers: Workers, tmp_path: Path) -> None:
    error = ask(workers, f"die {tmp_path / 'log'}").exception(DEADLINE)
    assert isinstance(error, WorkerDied) and (tmp_path / "log").read_text().count("died") == 3
    assert ask(workers, "others go on").result(DEADLINE).done


def test_a_step_that_takes_too_long(tmp_path: Path) -> None:
    workers = Workers(ODD, {}, 1, seconds=0.5)
    try:
        error = ask(workers, f"child {tmp_path / 'pids'}").exception(DEADLINE)
        assert isinstance(error, TimeoutError) and "0.5 seconds" in str(error)
        until(lambda: not any(map(alive, written(tmp_path / "pids"))))  # what the environment started is gone, too
        assert ask(workers, "next").result(DEADLINE).done
    finally:
        workers.close()


def test_closing_ends_what_runs(tmp_path: Path) -> None:
    workers = Workers(ODD, {}, 1)
    running, queued = ask(workers, f"child {tmp_path / 'pids'}"), ask(workers, "queued")
    pids = written(tmp_path / "pids")
    workers.close()
    assert isinstance(running.exception(0), WorkerDied) and isinstance(queued.exception(0), WorkerDied)
    until(lambda: not any(map(alive, pids)))


PARENT = f"""
import sys
from rl.kinds import make
from rl.workers import Workers
task = make({ODD!r}, {{}}).task(1)
workers = Workers({ODD!r}, {{}}, 2)
say = lambda text: [*task.messages, {{"role": "assistant", "content": text}}]
busy = workers.submit(task, say("child " + sys.argv[1]))
workers.submit(task, say("x")).result()
print(*(process.pid for process in workers.processes), flush=True)
busy.result()
"""


def test_no_process_outlives_its_parent(tmp_path: Path) -> None:
    """kill -9 of the parent: idle workers go, and one in the middle of a step with all that it started."""
    with subprocess.Popen([sys.executable, "-c", PARENT, tmp_path / "pids"], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        pids += written(tmp_path / "pids")
        assert len(set(pids)) == 3 and all(map(alive, pids))
        parent.kill()
    until(lambda: not any(map(alive, pids)))


def test_kinds() -> None:
    with pytest.raises(ValueError, match="environment.kind: 'nowhere:Odd' cannot be imported"):
        make("nowhere:Odd", {})
    with pytest.raises(ValueError, match="environment.options: .*'no'"):
        make("arithmetic", {"no": 1})
