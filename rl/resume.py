"""Where a run begins: at its own newest checkpoint, at that of the run it is forked from, or at the model's weights."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from rl.checkpoint import Checkpoints, locate, split
from rl.config import RunConfig
from rl.journal import Journal
from rl.run import Run
from rl.supervised import DataRun
from rl.trainer import Trainer


@dataclass(frozen=True)
class Place:
    """How far a run has come in its tasks, or in the examples of its file."""

    cursor: int = 0
    """train keys, or examples, that were issued"""
    pending: Sequence[int] = ()
    """those among them that nothing has been trained on yet"""


def check_fork(config: RunConfig, directory: Path, total: int) -> None:
    """Refuses a fork that cannot begin. One that has checkpoints of its own needs its parent no more.

    Raises:
        ValueError: it names no step, or one that the parent does not have, or leaves no step to do.
    """
    if not config.fork or Checkpoints(directory / "checkpoints").steps():
        return
    try:
        parent, step = locate(config.fork)
    except ValueError as error:
        raise ValueError(f"config.fork: {error}") from error
    if split(config.fork)[1] is None:
        raise ValueError(f"config.fork: {config.fork!r} names no step; write {config.fork}@STEP with one of {parent.steps()}")
    if step >= total:
        raise ValueError(f"config.steps: the fork begins after step {step} of {total}; steps count from the parent's first one")


def check_data(config: RunConfig, directory: Path, sha256: str | None) -> None:
    """Refuses to go on with another file than the run began with: the cursor would point into other examples.

    Raises:
        ValueError: its sha256 is not that of run.json.
    """
    path = directory / "run.json"
    if config.data and path.exists() and json.loads(path.read_text())["data_sha256"] != sha256:
        raise ValueError(
            f"data.path: {config.data.path} has changed since the run in {directory} began; restore it, or give this run "
            f"another config.name"
        )


def begin(run: Run | DataRun, checkpoints: Checkpoints, config_json: str, report: Callable[[str], None]) -> tuple[int, Place]:
    """Puts the run where its newest checkpoint, or else the parent's, left it: its step, and its place after it."""
    trainers = _trainers(run)
    like = {name: trainer.state for name, trainer in trainers.items()}
    found = checkpoints.resume(like, report)
    if found is not None:
        report(f"resuming from step {found[0]}")
    elif run.config.fork:
        parent, step = locate(run.config.fork)
        found = step, *parent.restore(step, like)
        report(f"forking {run.config.fork}")
    else:
        return 0, Place()
    step, states, meta = found
    for name, trainer in trainers.items():
        trainer.state = states[name]
    assert step == run.trainer.step, (step, run.trainer.step)
    place = Place(meta["cursor"], meta.get("pending", ()))
    if not checkpoints.steps():
        save(run, checkpoints, config_json, step, place)  # a fork's first: now its parent may be removed
    run.publish()
    return step, place


def go_on(journal: Journal, step: int, place: Place, keep: bool) -> None:
    """Brings a journal to where the run goes on.

    Args:
        keep: whether finished groups that nothing was trained on are kept, or made again, bit for bit.
    """
    if journal.cursor() == 0:
        journal.adopt(place.cursor, place.pending)
    journal.rewind(step, keep)


def save(run: Run | DataRun, checkpoints: Checkpoints, config_json: str, step: int, place: Place) -> None:
    """Begins to write what `begin` needs to go on after this step."""
    meta = {"step": step, "cursor": place.cursor, "pending": list(place.pending), "seed": run.config.seed}
    states = {name: trainer.state for name, trainer in _trainers(run).items()}
    checkpoints.save(step, states, {**meta, "config": json.loads(config_json)})


def _trainers(run: Run | DataRun) -> dict[str, Trainer]:
    """By the name of their state in a checkpoint."""
    critic = run.critic if isinstance(run, Run) else None
    return {"policy": run.trainer} | ({"critic": critic} if critic is not None else {})
