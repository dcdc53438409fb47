"""Rollouts and training beside each other. One light loop on the host, for every lag; with lag 0 it is synchronous training.

    issue groups, while there is capacity -> a step of sampling -> train, when a batch is ready -> publish -> issue ...

    who          waits for                                        is waited for by                    in metrics.jsonl
    rollouts     capacity, when no group is running: a            the trainer                         wait/rollout_s
                 published version
    the trainer  a batch: finished groups, and old ones that      rollouts, once they are lag         wait/trainer_s
                 would else come too late                         versions ahead
    publish      the optimizer step; the step boundary of the     the capacity that a version gives   time/publish_s
                 engine, for the swap alone
    checkpoint   the metrics line of its step                     the next step

Samplers and learners are behind small Protocols, so that the same loop runs on a virtual clock (`launch.bench async`).
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from rl.buffer import Buffer, Group
from rl.rollout import Rollout


class Sampler(Protocol):
    """Runs the episodes of groups."""

    @property
    def idle(self) -> bool:
        """Nothing is running."""
        ...

    def start(self, group: Group) -> None: ...

    def poll(self) -> list[tuple[Group, Sequence[Rollout], int]]:
        """Goes on for a moment. Returns groups that have ended, with their rollouts and the version of their oldest token."""
        ...


class Learner(Protocol):
    """Takes optimizer steps, one at a time, and publishes what comes of them."""

    def start(self, step: int, groups: Sequence[Group]) -> None: ...

    def poll(self, wait: bool) -> dict[str, Any] | None:
        """Metrics of the step, once it is done and its weights are where the engines can swap them in.

        Args:
            wait: until it is done, as there is nothing else to do.
        """
        ...

    def publish(self) -> float:
        """The weights of the step that was polled last become the engines'. Returns the seconds that those paused."""
        ...


class Ledger(Protocol):
    """Where it is written down what becomes of a task: `rl.journal`."""

    def retry(self, number: int, reason: str) -> None: ...

    def drop(self, number: int, reason: str, step: int) -> None: ...

    def train(self, step: int, lags: Mapping[int, int]) -> None: ...


class Orchestrator:
    """Moves groups from issue to training.

    Args:
        version: that is loaded: the number of optimizer steps that made it.
    """

    def __init__(
        self,
        buffer: Buffer,
        sampler: Sampler,
        learner: Learner,
        ledger: Ledger,
        version: int,
        clock: Callable[[], float] = time.perf_counter,
    ):
        self.buffer, self.sampler, self.learner, self.ledger, self.version = buffer, sampler, learner, ledger, version
        self._clock = clock
        self._training: list[Group] = []
        self._unscored = 0
        """groups without a reward since the last one that had one"""

    def steps(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Steps that are done and published, with their metrics, up to the buffer's last.

        What the caller does between two happens at a boundary: no step is running. Rollouts go on only if the caller polls.

        Raises:
            ValueError: no episode of a whole batch of groups had a reward.
        """
        while self.version < self.buffer.last:
            yield self._step()

    def _step(self) -> tuple[int, dict[str, Any]]:
        began = now = self._clock()
        spent = {"wait/rollout_s": 0.0, "wait/trainer_s": 0.0, "time/rollout_s": 0.0}
        self._give_back()
        metrics = None
        while metrics is None:
            self._issue()
            if not self._training and (groups := self.buffer.take(self.version)) is not None:
                self._training = groups
                self.learner.start(self.version + 1, groups)
            was, idle, free = now, self.sampler.idle, not self._training
            assert not (idle and free), f"nobody can go on at version {self.version}"
            if not idle:
                for group, rollouts, oldest in self.sampler.poll():
                    self._ended(group, rollouts, oldest)
            if self._training:
                metrics = self.learner.poll(wait=idle)
            now = self._clock()
            spent["wait/rollout_s" if idle else "time/rollout_s"] += now - was
            spent["wait/trainer_s"] += (now - was) * free
        lags = {group.number: self.version - group.oldest for group in self._training}
        paused = self.learner.publish()
        self.buffer.trained()
        self._training = []
        self.version += 1
        self.ledger.train(self.version, lags)
        published = self._clock()
        about = {
            "lag_mean": sum(lags.values()) / len(lags),
            "lag_max": max(lags.values()),
            "running": len(self.buffer.running),
            "queued": len(self.buffer.finished),
            "time/publish_s": published - now,
            "time/pause_s": paused,
            "time/step_s": published - began,
        }
        return self.version, about | metrics | spent

    def _give_back(self) -> None:
        """Once a version: what is finished under it was issued under this bound, and can be taken in time."""
        for group in self.buffer.stale(self.version):
            self.ledger.retry(group.number, f"stale: made by version {group.oldest}, now {self.version}")
            self.buffer.retry(group)

    def _issue(self) -> None:
        while self.buffer.capacity(self.version) > 0:
            self.sampler.start(self.buffer.issue(self.version))

    def _ended(self, group: Group, rollouts: Sequence[Rollout], oldest: int) -> None:
        if any(rollout.reward is not None for rollout in rollouts):
            self.buffer.finish(group, rollouts, oldest)
            self._unscored = 0
            return
        reason = next((each.graph.episode.error or each.graph.episode.stop_reason for each in rollouts), None)
        self.buffer.drop(group)
        self.ledger.drop(group.number, f"unscored: {reason}", self.version + 1)
        self._unscored += 1
        if self._unscored >= self.buffer.batch:
            raise ValueError(
                f"environment: no episode of {self._unscored} tasks was scored, the last with {reason!r}; the newest files in "
                f"rollouts/ have their errors"
            )
