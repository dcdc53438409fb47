"""Whole runs of small configs, for tests: in this process or in one of their own."""

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from rl.checkpoint import Checkpoints
from rl.rollout import Rollout

REPO = Path(__file__).parents[1]
KILLS = int(os.environ.get("TWINAX_KILLS", "4"))
"""how often tests kill what they started"""
SMALL = (
    "model.shape.num_layers=1", "rollout.prompts=2", "rollout.samples=4", "evaluation.tasks=2", "evaluation.samples=2",
    "engine.max_slots=8", "engine.slot_buckets=(8,)", "engine.tokens_per_step=64", "engine.token_buckets=(64,)",
    "engine.num_pages=64", "trainer.tokens_per_row=256", "trainer.rows=2", "transcripts_every=0",
)  # fmt: skip


class Lines:
    """A reporter that keeps what it is told."""

    def __init__(self) -> None:
        self.phases: list[str] = []

    def phase(self, text: str) -> None:
        self.phases.append(text)

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None: ...

    def transcript(self, step: int, rollout: Rollout, text: str) -> None: ...


def lines_of(directory: Path, name: str = "metrics") -> list[dict[str, Any]]:
    """Whole lines, without wall times and the count of compiles."""
    read = [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "wait/")) and k != "compiles"} for line in read]


def start(run_dir: Path, *overrides: str, config: str = "tiny") -> subprocess.Popen[str]:
    given = [f"--config.{text}" for text in (f"run_dir={run_dir}", *SMALL, *overrides)]
    command = [sys.executable, "-m", "launch.train", "--config", f"configs/{config}.py", *given]
    return subprocess.Popen(command, cwd=REPO, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def ended(process: subprocess.Popen[str]) -> str:
    _, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return err


def weights_of(directory: Path) -> dict[str, Any]:
    """The arrays of the newest checkpoint of a run, as they are on the disk."""
    checkpoints = Checkpoints(directory / "checkpoints")
    path = checkpoints.directory / str(checkpoints.latest()) / "policy"
    with ocp.PyTreeCheckpointer() as reader:
        as_numpy = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), reader.metadata(path).item_metadata.tree)
        return reader.restore(path, restore_args=as_numpy)
