"""Trains a recorded batch again, bit for bit, or with another loss: `launch.train --replay runs/NAME --step N`.

    checkpoint before N (or the model's weights) -> every recorded step from there on -> step N

There is no engine: what was sampled is read from the run's files, supervised steps derive from their keys. Nothing is written.
"""

import json
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import jax

from rl.build import build
from rl.checkpoint import Checkpoints, Damaged, digest, split
from rl.config import RunConfig
from rl.environments import Tasks
from rl.files import among, changes, lock, read_lines
from rl.journal import Journal
from rl.learn import learn, learn_answers
from rl.rollout import recorded
from rl.run import make_environment, make_model, make_trainer
from rl.trainer import Trainer

CHANGEABLE = ("trainer", "advantages")
"""sections that may differ from the run's: what comes between a batch and its step"""


def values_of(directory: Path) -> dict[str, Any]:
    """The config of a run, as its folder has it.

    Raises:
        ValueError: there is no run.
    """
    if not (path := directory / "config.json").exists():
        raise ValueError(f"{directory}: holds no run; give the folder that has its config.json")
    return json.loads(path.read_text())


def replay(directory: Path, step: int, config: RunConfig, report: Callable[[str], None]) -> dict[str, Any]:
    """Takes a run's step again.

    Args:
        config: the run's own, or one whose trainer or advantages differ: then the steps before are the run's, and this one is
            as `config` says.

    Returns: metrics of the step, as recorded and as they are now; `equal`: whether they, and the weights, are the same bits.

    Raises:
        ValueError: the step is not on record, or another part of the config differs.
    """
    own: RunConfig = build(RunConfig, values_of(directory))
    changed = changes(own, config)
    if refused := [key for key in changed if not among(key, CHANGEABLE)]:
        raise ValueError(
            f"config.{', config.'.join(refused)}: cannot differ in a replay, as the batch was made with it; only "
            f"{' and '.join(f'{section}.*' for section in CHANGEABLE)} can"
        )
    if own.data is not None:
        raise ValueError("data: this run learns from a file and has no rollouts; fork it to take a step again")
    if "gae" in (own.advantages.kind, config.advantages.kind) and own.advantages.kind != config.advantages.kind:
        raise ValueError("advantages.kind: 'gae' needs the critic of the run; leave it as it was")
    with lock(directory), closing(Journal(directory / "journal.sqlite", read_only=True)) as journal:
        lines = {line["step"]: line for line in read_lines(directory / "metrics.jsonl")}
        if step not in lines:
            raise ValueError(
                f"step: {step} is not on record; {directory} has steps {min(lines, default=0)} to {max(lines, default=0)}"
            )
        past = Past(own, directory, journal)
        began = past.go_to(step, report)
        if changed:
            past = past.otherwise(config)
        report(f"step {step}" + (f" with another config.{', config.'.join(changed)}" if changed else ""))
        metrics = json.loads(json.dumps(past.take(step)))
    line = lines[step]
    compared = {key: line.get(key) for key in metrics if not key.startswith("time/")}
    differs = sorted(key for key, value in compared.items() if metrics[key] != value)
    return {
        "run": own.name,
        "step": step,
        "replayed_from": began,
        "changed": changed,
        "equal": not differs,
        "differs": differs,
        "metrics": metrics,
        "recorded": {key: value for key, value in compared.items() if value is not None},
    }


class Past:
    """The trainers of a run, and what they learned from."""

    def __init__(self, config: RunConfig, directory: Path, journal: Journal):
        self.config, self.directory, self.journal = config, directory, journal
        self.model, self.source, self.tokenizer = make_model(config.model)
        self.environment: Tasks
        self.environment, self.renderer = make_environment(config, self.tokenizer)
        self.trainers: dict[str, Trainer] = {"policy": make_trainer(self.config, self.model, self.source)}
        if config.advantages.kind == "gae":
            self.trainers["critic"] = make_trainer(self.config, self.model, self.source, critic=True)
        for trainer in self.trainers.values():
            trainer.warm_up()
        if config.warmup.steps:
            self.trainers["policy"].warm_up("sft")

    def go_to(self, step: int, report: Callable[[str], None]) -> int:
        """Puts the trainers where they were before a step; returns the step of the weights it began with."""
        began = self._restore(step, report)
        for number in range(began + 1, step):
            report(f"step {number}")
            self.take(number)
        return began

    def _restore(self, step: int, report: Callable[[str], None]) -> int:
        checkpoints = Checkpoints(self.directory / "checkpoints")
        like = {name: trainer.state for name, trainer in self.trainers.items()}
        for saved in [each for each in reversed(checkpoints.steps()) if each < step]:
            try:
                states, _ = checkpoints.restore(saved, like)
            except Damaged as error:
                report(f"{error}; taking an older checkpoint")
                continue
            for name, trainer in self.trainers.items():
                trainer.state = states[name]
            return saved
        if first := split(self.config.fork)[1]:
            raise ValueError(
                f"step: no checkpoint before step {step} is left, and this run is a fork from step {first}; replay a later step"
            )
        return 0

    def take(self, step: int) -> dict[str, Any]:
        """The metrics of a step on what the run took it on, and a digest of the weights that come of it."""
        policy = self.trainers["policy"]
        assert policy.step == step - 1, (policy.step, step)
        if step <= self.config.warmup.steps:
            metrics = learn_answers(policy, self.config, self.environment, self.renderer, self.tokenizer, step)
        else:
            rows = self.journal.trained(step)
            if not rows:
                raise ValueError(f"step: the journal of {self.directory} has no tasks of step {step}")
            files = [self.directory / (row.file or "") for row in rows]
            rollouts = [rollout for file in files for rollout in recorded(file, self.environment)]
            metrics = learn(policy, self.trainers.get("critic"), self.config, rollouts)
        return metrics | {"weights": digest(policy.state)}

    def otherwise(self, config: RunConfig) -> "Past":
        """The same weights and optimizer states, with the trainers of another config."""
        other = Past(config, self.directory, self.journal)
        for name, trainer in other.trainers.items():
            ours, theirs = self.trainers[name].state, trainer.state
            if jax.tree.map(lambda x: (x.shape, x.dtype), ours) != jax.tree.map(lambda x: (x.shape, x.dtype), theirs):
                raise ValueError(
                    "config.trainer: its optimizer keeps other arrays than the run's; leave what it trains as it was"
                )
            trainer.state = jax.tree.map(lambda x, like: jax.device_put(x, like.sharding), ours, theirs)
        return other
