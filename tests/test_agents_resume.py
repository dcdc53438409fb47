"""A run with agents that is killed in the middle of an episode, and while a checkpoint is written, and goes on."""

import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import jax
import numpy as np
import pytest

from rl.checkpoint import TEMPORARY
from rl.columns import read
from rl.journal import Journal
from rl.sandbox import Sandbox
from tests.runs import ended, lines_of, start, weights_of

STEPS = 5
OPTIONS = (
    f"steps={STEPS}", "checkpoint.every=2", "evaluation.tasks=1", "evaluation.samples=1", "engine.max_context=256",
    "engine.context_buckets=(256,)", "trainer.tokens_per_row=512",
)  # fmt: skip


def killed(process: subprocess.Popen[str], when: Callable[[], bool], then: float = 0.0) -> str:
    """What the process had said."""
    limit = time.monotonic() + 200
    while not when() and process.poll() is None and time.monotonic() < limit:
        time.sleep(0.001)
    time.sleep(then)
    assert process.poll() is None, f"the kill came too late: {process.communicate()[1]}"
    process.send_signal(signal.SIGKILL)
    return process.communicate()[1]


def isolated() -> bool:
    try:
        Sandbox()
    except ValueError:
        return False
    return True


def steps_done(directory: Path) -> int:
    path = directory / "metrics.jsonl"
    return path.read_text().count("\n") if path.exists() else 0


def ledger(directory: Path) -> list[list[int]]:
    """Numbers of the tasks of each step; each has the file that it was trained on."""
    with closing(Journal(directory / "journal.sqlite", read_only=True)) as journal:
        assert journal.pending() == [] and journal.cursor() == 2 * STEPS
        rows = [journal.trained(step) for step in range(1, STEPS + 1)]
    for row in (row for of_step in rows for row in of_step):
        assert {graph.episode.key for graph in read(directory / str(row.file))} == {row.key}
    return [[row.number for row in of_step] for of_step in rows]


@pytest.mark.slow
def test_a_killed_run_ends_as_an_undisturbed_one(tmp_path: Path) -> None:
    """The same weights, bit for bit, and every planned task trained on once. Programs behind the gateway play; where none can
    be shut in, an agent in the run's own process does."""
    config, episode_s = ("tiny_harness", 0.3) if isolated() else ("tiny_tools", 0.03)
    ended(start(tmp_path / "unbroken", *OPTIONS, config=config))
    directory, expected = tmp_path / "killed" / config, tmp_path / "unbroken" / config

    killed(start(tmp_path / "killed", *OPTIONS, config=config), lambda: steps_done(directory) >= 3, episode_s)
    with closing(Journal(directory / "journal.sqlite", read_only=True)) as journal:
        counts = journal.counts()
    assert counts["issued"] + counts["finished"] > 0  # a step was broken off

    def writing() -> bool:
        return any((directory / "checkpoints").glob(f"4{TEMPORARY}*"))

    said = killed(start(tmp_path / "killed", *OPTIONS, config=config), writing)
    assert "resuming from step 2" in said
    assert "resuming from step" in ended(start(tmp_path / "killed", *OPTIONS, config=config))

    weights = [line["weights"] for line in lines_of(expected)]
    assert len(set(weights)) > 2  # there was something to learn
    for key in ("weights", "reward", "loss", "grad_norm", "turns_mean"):
        assert [line[key] for line in lines_of(directory)] == [line[key] for line in lines_of(expected)], key
    evaluations = [[line["eval"] for line in lines_of(each, "evaluations")] for each in (directory, expected)]
    assert evaluations[0] == evaluations[1]
    pairs = zip(*(jax.tree.leaves(weights_of(each)) for each in (directory, expected)), strict=True)
    for x, y in pairs:
        np.testing.assert_array_equal(x, y)
    assert ledger(directory) == ledger(expected) == [[2 * step, 2 * step + 1] for step in range(STEPS)]
