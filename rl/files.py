"""The files of a run: its records, the config they belong to, and what they come to."""

import dataclasses
import fcntl
import hashlib
import importlib.metadata
import json
import os
import platform
import subprocess
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from tensorboardX import SummaryWriter

from rl import columns
from rl.checkpoint import split
from rl.config import RunConfig, build
from rl.rollout import Rollout
from rl.whole import write_whole

CHANGEABLE = {"steps", "data.epochs", "checkpoint", "transcripts_every", "export"}
"""config keys that a resumed run may change, and goes on bit for bit"""
PLACES = {f"{side}.{key}" for side in ("trainer", "engine") for key in ("mesh", "rules", "first_device")}
PLACES |= {"trainer.rows", "trainer.remat", "orchestrator"}
"""those that it may change too, and goes on within rounding (1e-5 in float32): where and in which order it computes"""
PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "numpy", "tokenizers")
"""those whose versions a run records"""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "tokenizer_config.json", "chat_template.jinja")


class Records:
    """The files of a run, and its TensorBoard events.

    Lines, and rollouts of evaluations, past the step that a run resumes from are dropped: those steps are made again; which
    rollouts of training are kept, the journal says. A step's rollouts are written before its line, and its line before its
    checkpoint begins, so none is missing for the step of a checkpoint.
    """

    def __init__(self, directory: Path, resume_step: int):
        self.directory = directory
        self._resume_step = resume_step
        self._events: SummaryWriter | None = None
        (directory / "rollouts").mkdir(parents=True, exist_ok=True)
        for name in ("metrics.jsonl", "evaluations.jsonl"):
            kept = [line for line in read_lines(directory / name) if line["step"] <= resume_step]
            if resume_step == 0:
                kept = []
            write_whole(directory / name, "".join(json.dumps(line) + "\n" for line in kept))
        for path in (directory / "rollouts").glob("eval_*"):  # eval_STEP.parquet
            if int(path.name.partition(".")[0].rpartition("_")[2]) > resume_step:
                path.unlink()

    def append(self, name: str, line: Mapping[str, Any]) -> None:
        with (self.directory / name).open("a") as file:
            file.write(json.dumps(line) + "\n")
            file.flush()
            os.fsync(file.fileno())  # a checkpoint, which is on the disk, never outlives the lines before it
        if self._events is None:  # not before: reading a finished run's records leaves no event file
            self._events = SummaryWriter(str(self.directory / "tensorboard"), purge_step=self._resume_step + 1)
        for key, value in line.items():
            if isinstance(value, int | float) and key != "step":
                self._events.add_scalar(f"{name.removesuffix('.jsonl')}/{key}", value, line["step"])

    def close(self) -> None:
        if self._events is not None:
            self._events.close()

    def metrics(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "metrics.jsonl")

    def evaluations(self) -> list[dict[str, Any]]:
        return read_lines(self.directory / "evaluations.jsonl")

    def rollouts(self, label: str, rollouts: Sequence[Rollout]) -> str:
        """One file a batch, written whole; its name, from the run's folder on."""
        name = f"rollouts/{label}.parquet"
        columns.write(self.directory / name, [rollout.graph for rollout in rollouts])
        return name

    def keep(self, files: Collection[str]) -> None:
        """Removes rollouts of training that are not among these: a kill came before they were finished, or they were sampled
        with weights that are no more."""
        for path in (self.directory / "rollouts").iterdir():
            if not path.name.startswith("eval_") and f"rollouts/{path.name}" not in files:
                path.unlink()


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Of `metrics.jsonl` or `evaluations.jsonl`; none where there is no such file."""
    # what follows the last newline was cut by a kill in the middle of a write; its step is made again
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [json.loads(line) for line in lines]


def check_directory(directory: Path, config_json: str) -> list[str]:
    """Refuses a folder that holds a run of another config; what is left to its default is equal to that default.

    Returns: the keys of PLACES that differ.

    Raises:
        ValueError: names every key that differs.
    """
    path = directory / "config.json"
    if path.exists():
        try:
            old: RunConfig = build(RunConfig, json.loads(path.read_text()))
        except ValueError as error:
            raise ValueError(
                f"{path}: is no config of this version of twinax ({error}); give this run another config.name, or remove "
                f"that folder"
            ) from error
        changed = [key for key in changes(old, build(RunConfig, json.loads(config_json))) if not among(key, CHANGEABLE)]
        if refused := [key for key in changed if not among(key, PLACES)]:
            raise ValueError(
                f"config.{', config.'.join(refused)}: differs from the run that {directory} holds; give this run another "
                f"config.name, or remove that folder"
            )
        return changed
    return []


def among(key: str, sections: Collection[str]) -> bool:
    """Whether a dotted key is one of these, or below one."""
    return any(key == section or key.startswith(f"{section}.") for section in sections)


def changes(old: RunConfig, new: RunConfig) -> list[str]:
    """Dotted names of what differs between two configs, but for the place of the run's folder, which may move."""
    return sorted(name for name in _changed(dataclasses.asdict(old), dataclasses.asdict(new)) if name != "run_dir")


def _changed(old: Any, new: Any, where: str = "") -> list[str]:
    """Dotted names of what differs between two configs."""
    if isinstance(old, dict) and isinstance(new, dict):
        return [name for key in old.keys() | new.keys() for name in _changed(old.get(key), new.get(key), f"{where}.{key}")]
    return [where.removeprefix(".")] if old != new else []


@contextmanager
def lock(directory: Path) -> Iterator[None]:
    """Holds a run's folder, which is made if need be, for this process alone; freed at the end, or by a kill.

    Raises:
        ValueError: another process holds it.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with (directory / ".lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(
                f"{directory}: another process is at this run; wait until it ends, or give this run another config.name"
            ) from error
        yield


def run_record(
    config_json: str, model_source: Path | None, renderer_name: str, renderer_version: int, seed: int, fork: str = ""
) -> dict[str, Any]:
    """What a run was made with. Hashes are sha256; None: there is no such file, or no git checkout."""
    weights = sorted(model_source.glob("*.safetensors")) if model_source else []
    tokenizer = [model_source / name for name in TOKENIZER_FILES] if model_source else []
    return {
        "id": json.loads(config_json)["name"],
        "config_sha256": hashlib.sha256(config_json.encode()).hexdigest(),
        "code_commit": _commit(Path(__file__).resolve().parents[1]),
        "packages": {name: importlib.metadata.version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "tokenizer_sha256": _sha256([path for path in tokenizer if path.is_file()]),
        "model_sha256": _sha256(weights),
        "renderer": renderer_name,
        "renderer_version": renderer_version,
        "seed": seed,
        "fork": _parent(fork),
    }


def _parent(fork: str) -> dict[str, Any] | None:
    """The run that a run was forked from."""
    directory, step = split(fork)
    return {"id": Path(directory).name, "directory": directory, "step": step} if fork else None


def _commit(checkout: Path) -> str | None:
    """What HEAD of a checkout names."""
    if not (checkout / ".git").exists():
        return None
    try:
        done = subprocess.run(["git", "-C", str(checkout), "rev-parse", "HEAD"], capture_output=True, text=True)
    except FileNotFoundError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def _sha256(paths: Sequence[Path]) -> str | None:
    """Of the files one after the other, a megabyte at a time: of one file, what `sha256sum` prints."""
    digest = hashlib.sha256()
    for path in paths:
        with path.open("rb") as file:
            while block := file.read(2**20):
                digest.update(block)
    return digest.hexdigest() if paths else None


def summary(records: Records, compile_s: float) -> dict[str, Any]:
    """What the whole run came to, from its records."""
    lines = records.metrics()
    steps = [line for line in lines if line["phase"] == "rl"]
    evaluations = records.evaluations()

    def over(key: str, some: Sequence[Mapping[str, Any]] = steps) -> float:
        return sum(line[key] for line in some)

    def at(index: int, key: str) -> float | None:
        return evaluations[index][key] if evaluations else None

    trained = steps or lines  # a run that learns from a file has no others
    preferences = [line for line in lines if line["phase"] == "dpo"]
    tokens = over("tokens")
    return {
        **_ends("loss", trained),
        **(_ends("pair_accuracy", preferences) if preferences else {}),
        "eval_before": at(0, "eval"),
        "eval_after": at(-1, "eval"),
        "greedy_before": at(0, "greedy"),
        "greedy_after": at(-1, "greedy"),
        "constant_answer": at(0, "constant_answer"),
        **_ends("reward", steps),
        "steps": len(steps),
        "sft_steps": len(lines) - len(steps) - len(preferences),
        "dpo_steps": len(preferences),
        "train_wall_s": sum(line["time/step_s"] for line in lines),
        "compile_s": compile_s,
        "rollout_tokens_per_s": over("sampled_tokens") / max(over("time/rollout_s"), 1e-9),
        "train_tokens_per_s": over("tokens_in", trained) / max(over("time/train_s", trained), 1e-9),
        "forest_compression": over("tokens_in", trained) / max(over("tokens_kept", trained), 1),
        "prefix_hit_rate": over("prefix_hit_rate") / max(len(steps), 1),
        "max_abs_logprob_gap": max((line["max_abs_gap"] for line in steps), default=0.0),
        "mean_k3": sum(line["k3"] * line["tokens"] for line in steps) / max(tokens, 1),
        "compiles_after_warmup": sum(line["compiles"] for line in lines),
    }


def _ends(key: str, lines: Sequence[Mapping[str, Any]]) -> dict[str, float | None]:
    """Means over the first and the last few lines; None where there are none."""
    few = max(1, min(5, len(lines) // 4))
    parts = {"first": lines[:few], "last": lines[-few:]}
    return {f"{key}_{end}": float(np.mean([line[key] for line in part])) if part else None for end, part in parts.items()}
