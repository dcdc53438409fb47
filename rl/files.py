"""The files of a run: its records, the config they belong to, and what they come to."""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from rl.rollout import Rollout

CHANGEABLE = {"steps", "checkpoint", "transcripts_every", "export"}
"""config keys that a resumed run may change"""


class Records:
    """The files of a run, and its TensorBoard events.

    Lines past the step that a run resumes from are dropped: those steps are made again.
    """

    def __init__(self, directory: Path, resume_step: int):
        self.directory = directory
        (directory / "rollouts").mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            kept = [line for line in self._lines(name) if line["step"] <= resume_step]
            if resume_step == 0:
                kept = []
            write_whole(directory / name, "".join(json.dumps(line) + "\n" for line in kept))
        self._events = SummaryWriter(str(directory / "tensorboard"), purge_step=resume_step + 1)

    def _lines(self, name: str) -> list[dict[str, Any]]:
        path = self.directory / name
        # what follows the last newline was cut by a kill in the middle of a write; its step is made again
        lines = path.read_text().split("\n")[:-1] if path.exists() else []
        return [json.loads(line) for line in lines]

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.directory / name).open("a") as file:
            file.write(json.dumps(line) + "\n")
        for key, value in line.items():
            if isinstance(value, int | float) and key != "step":
                self._events.add_scalar(f"{name.removesuffix('.jsonl')}/{key}", value, line["step"])

    def close(self) -> None:
        self._events.close()

    def metrics(self) -> list[dict[str, Any]]:
        return self._lines("metrics.jsonl")

    def evaluations(self) -> list[dict[str, Any]]:
        return self._lines("evaluations.jsonl")

    def rollouts(self, label: str, rollouts: Sequence[Rollout]) -> None:
        """One file a batch, one episode a line, written whole."""
        text = "".join(rollout.graph.to_json() + "\n" for rollout in rollouts)
        write_whole(self.directory / "rollouts" / f"{label}.jsonl", text)


def write_whole(path: Path, text: str) -> None:
    """A kill leaves the old file or the new one."""
    temporary = path.with_suffix(path.suffix + ".new")
    temporary.write_text(text)
    os.replace(temporary, path)


def check_directory(directory: Path, config_json: str) -> None:
    """Refuses a folder that holds a run of another config.

    Raises:
        ValueError: names every key that differs.
    """
    path = directory / "config.json"
    if path.exists():
        changed = _changed(json.loads(path.read_text()), json.loads(config_json))
        changed = sorted(key for key in changed if key.split(".")[0] not in CHANGEABLE)
        if changed:
            raise ValueError(
                f"config.{', config.'.join(changed)}: differs from the run that {directory} holds; give this run another "
                f"config.name, or remove that folder"
            )


def _changed(old: Any, new: Any, where: str = "") -> list[str]:
    """Dotted names of what differs between two configs."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [name for key in old.keys() | new.keys() for name in _changed(old.get(key), new.get(key), f"{where}.{key}")]
    return [where.removeprefix(".")] if old != new else []


def summary(records: Records, compile_s: float) -> dict[str, Any]:
    """What the whole run came to, from its records."""
    lines = records.metrics()
    steps = [line for line in lines if line["phase"] == "rl"]
    evaluations = records.evaluations()

    def over(key: str) -> float:
        return sum(line[key] for line in steps)

    def at(index: int, key: str) -> float | None:
        return evaluations[index][key] if evaluations else None

    few = max(1, min(5, len(steps) // 4))
    ends = [np.mean([line["reward"] for line in part]) if part else None for part in (steps[:few], steps[-few:])]
    tokens = over("tokens")
    return {
        "eval_before": at(0, "eval"),
        "eval_after": at(-1, "eval"),
        "greedy_before": at(0, "greedy"),
        "greedy_after": at(-1, "greedy"),
        "constant_answer": at(0, "constant_answer"),
        "reward_first": ends[0],
        "reward_last": ends[1],
        "steps": len(steps),
        "sft_steps": len(lines) - len(steps),
        "train_wall_s": sum(line["time/step_s"] for line in lines),
        "compile_s": compile_s,
        "rollout_tokens_per_s": over("sampled_tokens") / max(over("time/rollout_s"), 1e-9),
        "train_tokens_per_s": over("tokens_in") / max(over("time/train_s"), 1e-9),
        "forest_compression": over("tokens_in") / max(over("tokens_kept"), 1),
        "prefix_hit_rate": over("prefix_hit_rate") / max(len(steps), 1),
        "max_abs_logprob_gap": max((line["max_abs_gap"] for line in steps), default=0.0),
        "mean_k3": sum(line["k3"] * line["tokens"] for line in steps) / max(tokens, 1),
        "compiles_after_warmup": max((line["compiles"] for line in lines), default=0),
    }
