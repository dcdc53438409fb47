"""Rollouts beside training on devices of their own: what is learned, how old it is, and that nothing is lost."""

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from inference.types import Completion, FinishReason, Request
from launch.cli import read_config
from rl.config import RunConfig, build
from rl.engines import Engines
from rl.journal import Journal
from rl.loop import train
from rl.placement import placed
from tests.runs import KILLS, REPO, Lines, ended, lines_of, start, weights_of

TINY = str(REPO / "configs/tiny_async.py")
TWO = ("orchestrator.engines=2", "trainer.mesh.fsdp=1", "trainer.rows=1")


def config_of(*overrides: str) -> tuple[RunConfig, str]:
    values = read_config(TINY, [f"--config.{text}" for text in overrides])
    return build(RunConfig, values), json.dumps(values)


def ledger(directory: Path, steps: int) -> dict[int, list[Any]]:
    with closing(Journal(directory / "journal.sqlite", read_only=True)) as journal:
        assert journal.pending() == []
        return {step: journal.trained(step) for step in range(1, steps + 1)}


@pytest.mark.slow
def test_it_learns_as_the_synchronous_run_does(tmp_path: Path, report: Callable[[str], None]) -> None:
    """Lag 2, two engines: as much as tiny.py, which goes from 0.03 to 0.51; no token older than the bound; each task once."""
    result = train(*config_of(*TWO, f"run_dir={tmp_path}", "transcripts_every=0"), Lines())
    lines = lines_of(tmp_path / "tiny_async")
    assert result["eval_after"] > result["eval_before"] + 0.3 and result["compiles_after_warmup"] == 0
    assert max(line["lag_max"] for line in lines) == 2 and lines[0]["lag_max"] == 0
    rows = ledger(tmp_path / "tiny_async", 20)
    assert sorted(row.number for of_step in rows.values() for row in of_step) == list(range(80))
    for step, of_step in rows.items():
        assert len(of_step) == 4 and {row.lag for row in of_step} <= {0, 1, 2}
        assert all(row.oldest is not None and row.lag == step - 1 - row.oldest for row in of_step)
        assert lines[step - 1]["lag_max"] == max(row.lag or 0 for row in of_step)
    report(f"lag 2: reward {result['eval_before']:.3f} -> {result['eval_after']:.3f}, mean k3 {result['mean_k3']:.2g}")


@pytest.mark.slow
def test_killed_with_groups_in_flight(tmp_path: Path) -> None:
    """The kill finds groups that run, wait and are trained on; the run that goes on trains on exactly the planned tasks, keeps
    finished ones that its weights could have made, and says what became of every attempt."""
    options = (*TWO, "steps=40", "checkpoint.every=3", "rollout.max_tokens=16")
    directory = tmp_path / "tiny_async"

    def steps_done() -> int:
        path = directory / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    process, limit = start(tmp_path, *options, config="tiny_async"), time.monotonic() + 200
    while steps_done() < 10 and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.001)
    assert process.poll() is None, process.communicate()[1]
    process.send_signal(signal.SIGKILL)
    process.communicate()
    with closing(Journal(directory / "journal.sqlite", read_only=True)) as journal:
        counts = journal.counts()
    assert counts["trained"] >= 20 and counts["issued"] + counts["finished"] > 0
    said = ended(start(tmp_path, *options, config="tiny_async"))
    assert "resuming from step" in said
    rows = ledger(directory, 40)
    assert sorted(row.number for of_step in rows.values() for row in of_step) == list(range(80))
    assert all(len(of_step) == 2 for of_step in rows.values())
    assert [line["step"] for line in lines_of(directory)] == list(range(1, 41))
    assert max(line["lag_max"] for line in lines_of(directory)) <= 2
    assert any(row.attempt > 1 for of_step in rows.values() for row in of_step)


def test_where_engines_and_trainer_are() -> None:
    """Of eight devices: three quarters for engines, the trainer after them; with lag 0 they share."""
    config = placed(config_of()[0])
    assert (config.orchestrator.engines, config.trainer.first_device) == (6, 6)
    config = placed(config_of("engine.mesh.tensor=2", "orchestrator.lag=1")[0])
    assert (config.orchestrator.engines, config.trainer.first_device) == (3, 6)
    config = placed(config_of("orchestrator.lag=0")[0])
    assert (config.orchestrator.engines, config.trainer.first_device) == (1, 0)
    with pytest.raises(
        ValueError, match="orchestrator.lag: .* 6 engines have 0 to 5, and the trainer 5 to 6; set trainer.first"
    ):
        placed(config_of("trainer.first_device=5")[0])
    with pytest.raises(ValueError, match="orchestrator.mode: 'abort' is unknown; use 'retract' or 'keep'"):
        config_of("orchestrator.mode=abort")


class Slow:
    """An engine whose requests end in order, one a step."""

    def __init__(self) -> None:
        self.version = 3
        self.waiting: list[Request] = []

    def submit(self, request: Request) -> None:
        self.waiting.append(request)

    def cancel(self, request_id: str) -> Completion:
        [found] = [request for request in self.waiting if request.id == request_id]
        self.waiting.remove(found)
        return self.done(found, FinishReason.ABORT)

    def step(self) -> list[Completion]:
        return [self.done(self.waiting.pop(0), FinishReason.STOP)]

    def done(self, request: Request, reason: FinishReason) -> Completion:
        return Completion(
            request_id=request.id, prompt_ids=request.prompt_ids, finish_reason=reason, stop_reason=None, cached_tokens=0,
            prefilled_tokens=0, prompt_logprobs=None, ids=np.zeros(0, np.int32), logprobs=np.zeros(0, np.float32),
            logprobs_full=np.zeros(0, np.float32), versions=np.zeros(0, np.int32), top_ids=np.zeros((0, 0), np.int32),
            top_logprobs=np.zeros((0, 0), np.float32),
        )  # fmt: skip


def test_a_group_stays_on_one_engine() -> None:
    parts = [Slow(), Slow()]
    engines = Engines(parts)

    def submit(*names: str) -> None:
        for name in names:
            request: Any = SimpleNamespace(id=f"train-1/{name}", prompt_ids=(1,))
            engines.submit(request)

    submit("sum/7/0#0", "sum/7/1#0", "sum/7/2#0", "sum/8/0#0", "sum/9/0#0")
    assert [len(part.waiting) for part in parts] == [3, 2]  # 9 goes to the engine with fewer requests
    assert {completion.request_id for completion in engines.step()} == {"train-1/sum/7/0#0", "train-1/sum/8/0#0"}
    submit("sum/7/0#1", "sum/8/0#1")  # the next turns: 7 is at home, 8 has no request there any more
    assert [request.id for request in parts[0].waiting] == [f"train-1/sum/7/{n}" for n in ("1#0", "2#0", "0#1")]
    assert engines.cancel("train-1/sum/9/0#0").finish_reason is FinishReason.ABORT
    assert [request.id for request in parts[1].waiting] == ["train-1/sum/8/0#1"]
    ended = [completion.request_id for _ in range(3) for completion in engines.step()]
    assert len(ended) == 4 and engines.step() == [] and engines.version == 3


# ---- processes


def children(parent: int, what: str) -> list[int]:
    """Processes of a run whose command line has this word."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, IndexError):
            ppid = int((path / "stat").read_text().rpartition(")")[2].split()[1])
            if ppid == parent and what.encode() in (path / "cmdline").read_bytes().split(b"\0"):
                found.append(int(path.name))
    return found


@pytest.mark.slow
def test_anything_may_be_killed(tmp_path: Path, report: Callable[[str], None]) -> None:
    """TWINAX_KILLS times an engine, an environment's worker or the whole program is gone at a random moment.

    With lag 0 the run then trains on the planned tasks and ends with the weights of a run in one process that nobody disturbed,
    bit for bit."""
    options = (f"steps={5 * KILLS + 10}", "checkpoint.every=2", "evaluation.every=9", "rollout.max_tokens=8")
    served = (*options, "orchestrator.processes=true", "orchestrator.engines=2", "orchestrator.workers=2")
    steps = 5 * KILLS + 10
    ended(start(tmp_path / "unbroken", *options))
    directory, expected = tmp_path / "killed/tiny", tmp_path / "unbroken/tiny"
    draw = np.random.default_rng(6)

    def steps_done() -> int:
        path = directory / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    process, killed = start(tmp_path / "killed", *served), Counter[str]()
    for number in range(KILLS):
        kind = ("engine", "worker", "program", "worker")[number % 4]
        module = {"engine": "launch.serve", "worker": "rl.worker"}.get(kind)
        before, limit = steps_done(), time.monotonic() + 200
        if number % 8 != 6:  # else while it starts
            while steps_done() < before + 2 and process.poll() is None and time.monotonic() < limit:
                time.sleep(0.001)
        time.sleep(draw.uniform(0, 0.5))
        assert process.poll() is None, f"kill {number} came too late: {process.communicate()[1]}"
        for victim in children(process.pid, module)[:1] if module else [process.pid]:
            with suppress(ProcessLookupError):
                os.kill(victim, signal.SIGKILL)
                killed[kind] += 1
        if kind == "program":
            process.communicate()
            process = start(tmp_path / "killed", *served)
    said = ended(process)
    report(f"killed {dict(killed)}")
    assert min(killed[kind] for kind in ("engine", "worker", "program")) > 0 and said
    assert [line["step"] for line in lines_of(directory)] == list(range(1, steps + 1))
    for key in ("weights", "reward", "loss"):
        assert [line[key] for line in lines_of(directory)] == [line[key] for line in lines_of(expected)], key
    evaluations = [[line["eval"] for line in lines_of(each, "evaluations")] for each in (directory, expected)]
    assert evaluations[0] == evaluations[1]
    for each in (directory, expected):
        rows = ledger(each, steps)
        assert [row.number for step in rows for row in rows[step]] == list(range(2 * steps))
    assert weights_of(directory) and not children(os.getpid(), "launch.serve")


@pytest.mark.slow
def test_engines_in_processes_beside_training(tmp_path: Path) -> None:
    """Lag 2 with two served engines: it learns, and an engine that was killed is several versions behind when it is back."""
    options = ("orchestrator.processes=true", *TWO, "steps=60", "rollout.prompts=4", "rollout.samples=8")
    process = start(tmp_path, *options, config="tiny_async")
    directory = tmp_path / "tiny_async"
    limit = time.monotonic() + 200
    while process.poll() is None and time.monotonic() < limit:
        path = directory / "metrics.jsonl"
        if path.exists() and path.read_text().count("\n") >= 10:
            break
        time.sleep(0.01)
    os.kill(children(process.pid, "launch.serve")[0], signal.SIGKILL)
    said = ended(process)
    assert "starting it again" in said
    lines = lines_of(directory)
    assert [line["step"] for line in lines] == list(range(1, 61)) and max(line["lag_max"] for line in lines) <= 2
    rows = ledger(directory, 60)
    assert sorted(row.number for of_step in rows.values() for row in of_step) == list(range(240))
    rewards = [line["reward"] for line in lines]
    assert np.mean(rewards[-5:]) > np.mean(rewards[:5]) + 0.2
