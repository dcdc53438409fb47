"""The two sides of a run on real parts: groups are sampled by its engines, batches are learned by its trainer."""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np

from rl.buffer import Group
from rl.environments import TRAIN_KEYS
from rl.files import Records
from rl.journal import Journal
from rl.learn import learn
from rl.rollout import Batch, Rollout
from rl.run import Run


class GroupSampler:
    """Runs the episodes of groups, writes them down, and tells the journal.

    The noise of a group derives from the version that it is issued at, its task and the sample: with lag 0 a broken run samples
    the same again.
    """

    def __init__(self, run: Run, records: Records, journal: Journal):
        self.run, self.records, self.journal = run, records, journal
        self._running: dict[int, tuple[Group, Batch]] = {}

    @property
    def idle(self) -> bool:
        return not self._running

    def start(self, group: Group) -> None:
        task = self.run.environment.task(TRAIN_KEYS[group.number])
        self.journal.issue(group.number, task, self.journal.attempt(group.number) + 1, group.version)
        config = self.run.config.rollout
        batch = self.run.start([task], label=f"train-{group.version + 1}", samples=config.samples, trainable=True)
        self._running[group.number] = group, batch

    def poll(self) -> list[tuple[Group, Sequence[Rollout], int]]:
        self.run.episodes.poll()
        ended = [(group, list(batch.rollouts.values())) for group, batch in self._running.values() if batch.done]
        return [(group, rollouts, self._write(group, rollouts)) for group, rollouts in ended]

    def _write(self, group: Group, rollouts: Sequence[Rollout]) -> int:
        """Returns the version of the oldest token."""
        del self._running[group.number]
        attempt = self.journal.attempt(group.number)
        label = f"train_{group.number:08d}" + (f"_{attempt}" if attempt > 1 else "")
        versions = {v for each in rollouts for node in each.graph.nodes for v in node.versions} or {group.version}
        self.journal.finish(group.number, self.records.rollouts(label, rollouts), min(versions), max(versions))
        return min(versions)


class BatchLearner:
    """Takes steps on batches of groups: at once, or beside the rollouts in a thread of its own.

    What is published is moved to the engines' devices at the end of the step, so that only the swap is left.
    """

    def __init__(self, run: Run, on_batch: Callable[[int, Sequence[Rollout]], None], *, beside: bool):
        self.run, self._on_batch = run, on_batch
        self._pool = ThreadPoolExecutor(1, "trainer") if beside else None
        self._job: Future[tuple[dict[str, Any], Any]] | None = None
        self._staged: Any = None

    def start(self, step: int, groups: Sequence[Group]) -> None:
        assert self._job is None, "one step at a time"
        rollouts = [rollout for group in groups for rollout in group.rollouts]
        self._on_batch(step, rollouts)
        if self._pool is not None:
            self._job = self._pool.submit(self._learn, rollouts)
        else:
            self._job = Future()
            self._job.set_result(self._learn(rollouts))

    def _learn(self, rollouts: Sequence[Rollout]) -> tuple[dict[str, Any], Any]:
        run = self.run
        metrics = learn(run.trainer, run.critic, run.config, rollouts)
        return {"phase": "rl", **rollout_metrics(rollouts), **metrics}, run.fleet.stage(run.trainer)

    def poll(self, wait: bool) -> dict[str, Any] | None:
        assert self._job is not None, "start a step first"
        if not wait and not self._job.done():
            return None
        metrics, self._staged = self._job.result()
        self._job = None
        return metrics

    def publish(self) -> float:
        paused, self._staged = self.run.fleet.swap(self._staged), None
        return paused

    def close(self) -> None:
        """Waits for the step that runs, if any."""
        if self._pool is not None:
            self._pool.shutdown()


def plain_step(run: Run, number: int) -> dict[str, Any]:
    """A step of lag 0 on the tasks of that number, for benchmarks: nothing is written down."""
    config = run.config.rollout
    tasks = [run.environment.task(key) for key in TRAIN_KEYS[number * config.prompts : (number + 1) * config.prompts]]
    started = time.perf_counter()
    rollouts = run.rollout(tasks, label=f"train-{number}", samples=config.samples, trainable=True)
    sampled = time.perf_counter()
    metrics = rollout_metrics(rollouts) | learn(run.trainer, run.critic, run.config, rollouts)
    learned = time.perf_counter()
    run.publish()
    times = {"rollout": sampled - started - metrics["time/reward_s"], "publish": time.perf_counter() - learned}
    return metrics | {f"time/{phase}_s": seconds for phase, seconds in times.items()}


def rollout_metrics(rollouts: Sequence[Rollout]) -> dict[str, Any]:
    lengths = [rollout.sampled_tokens for rollout in rollouts]
    return {
        "reward": float(np.mean([rollout.reward for rollout in rollouts if rollout.reward is not None])),
        "length_mean": float(np.mean(lengths)),
        "turns_mean": float(np.mean([rollout.turns for rollout in rollouts])),
        "calls_mean": float(np.mean([len(rollout.graph.calls) for rollout in rollouts])),
        "cut": float(np.mean([rollout.graph.episode.stop_reason == "length" for rollout in rollouts])),
        "prefix_hit_rate": sum(r.cached_tokens for r in rollouts) / max(sum(r.prompt_tokens for r in rollouts), 1),
        "computed_tokens": sum(rollout.computed_tokens for rollout in rollouts),
        "sampled_tokens": sum(lengths),
        "time/reward_s": sum(rollout.environment_s for rollout in rollouts),
    }
