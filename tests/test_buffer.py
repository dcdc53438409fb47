"""Groups between issue and training, under the real loop with scripted sides: the bound on the lag holds, no task is lost."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.buffer import Buffer, Group
from rl.orchestrator import Orchestrator
from rl.rollout import Rollout


class Scored:
    """What the loop reads of a rollout."""

    def __init__(self, reward: float | None = 1.0):
        self.reward = reward
        self.graph = self
        self.episode, self.error, self.stop_reason = self, "KeyError: odd text", "environment"


class World:
    """Both sides and the ledger, in ticks: a group takes as many as are drawn for it, a step `train`."""

    def __init__(self, buffer: Buffer, ticks: Sequence[int], train: int, unscored: frozenset[int] = frozenset()):
        self.buffer, self.ticks, self.train_ticks, self.unscored = buffer, ticks, train, unscored
        self.now, self.version = 0, 0
        self.running: list[tuple[int, Group]] = []
        self.ends, self.step = 0, 0
        self.most = 0
        self.trained: dict[int, list[int]] = {}
        self.lags: list[int] = []
        self.dropped: list[int] = []
        self.retried: list[int] = []

    # sampler
    @property
    def idle(self) -> bool:
        return not self.running

    def start(self, group: Any) -> None:
        if isinstance(group, Group):
            assert group.version == self.version
            self.running.append((self.now + self.ticks[group.number % len(self.ticks)], group))
            on_their_way = len(self.running) + len(self.buffer.finished) + len(self.buffer.taken)
            self.most = max(self.most, on_their_way)

    def poll(self, wait: bool | None = None) -> Any:
        if wait is None:
            self.now += 1
            ended = [group for at, group in self.running if at <= self.now]
            self.running = [(at, group) for at, group in self.running if at > self.now]
            return [(g, [Scored(None if g.number in self.unscored else 1.0)], g.version) for g in ended]
        if wait:
            self.now = max(self.now, self.ends)
        return {"step": self.step} if self.now >= self.ends else None

    # ledger
    def retry(self, number: int, reason: str) -> None:
        self.retried.append(number)

    def drop(self, number: int, reason: str, step: int) -> None:
        assert reason == "unscored: KeyError: odd text" and step == self.version + 1
        self.dropped.append(number)

    def train(self, step: int, lags: Mapping[int, int]) -> None:
        self.trained[step] = list(lags)
        self.lags += lags.values()

    def publish(self) -> float:
        self.version += 1
        return 0.0


class Side:
    """The learner of a world, whose `start` is of another shape than the sampler's."""

    def __init__(self, world: World):
        self.world, self.publish = world, world.publish

    def start(self, step: int, groups: Sequence[Group]) -> None:
        assert step == self.world.version + 1
        self.world.step, self.world.ends = step, self.world.now + self.world.train_ticks

    def poll(self, wait: bool) -> dict[str, Any] | None:
        return self.world.poll(wait)


def play(
    lag: int, batch: int, steps: int, ticks: Sequence[int], train: int, unscored: frozenset[int] = frozenset(), **options: Any
) -> tuple[World, list[dict[str, Any]]]:
    buffer = Buffer(lag=lag, batch=batch, last=steps, **options)
    world = World(buffer, ticks, train, unscored)
    loop = Orchestrator(buffer, world, Side(world), world, version=0, clock=lambda: float(world.now))
    return world, [metrics for _, metrics in loop.steps()]


@settings(max_examples=200, deadline=None)
@given(
    lag=st.integers(0, 5),
    batch=st.integers(1, 4),
    steps=st.integers(1, 12),
    ticks=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    train=st.integers(1, 20),
    unscored=st.frozensets(st.integers(0, 40), max_size=3),
)
def test_any_lengths(lag: int, batch: int, steps: int, ticks: list[int], train: int, unscored: frozenset[int]) -> None:
    """The bound holds always, without giving a group up; each step has its batch, each task is trained on once."""
    if len(unscored) >= batch:
        unscored = frozenset()
    world, lines = play(lag, batch, steps, ticks, train, unscored)
    assert max(world.lags) <= lag and max(line["lag_max"] for line in lines) == max(world.lags)
    assert [len(numbers) for numbers in world.trained.values()] == [batch] * steps
    counts = Counter(number for numbers in world.trained.values() for number in numbers)
    assert set(counts.values()) == {1} and not world.retried
    issued = world.buffer.cursor
    assert {*counts, *world.dropped} == set(range(issued)) and not world.buffer.pending
    assert world.most <= (lag + 1) * batch
    if lag == 0:
        assert list(world.trained.values()) == [sorted(numbers) for numbers in world.trained.values()]


def test_lag_0_is_synchronous() -> None:
    """Each step trains on the tasks issued for it, in their order; who waits for whom adds up to the whole time."""
    world, lines = play(0, 3, 4, [5, 2, 9], 4)
    assert world.trained == {step: list(range(3 * step - 3, 3 * step)) for step in range(1, 5)}
    for line in lines:
        assert (line["wait/trainer_s"], line["wait/rollout_s"], line["time/step_s"]) == (9, 4, 13)


def test_with_a_lag_both_go_on() -> None:
    _, sync = play(0, 4, 40, [5, 7, 30, 6, 5, 9, 6], 8)
    world, beside = play(3, 4, 40, [5, 7, 30, 6, 5, 9, 6], 8)
    took = [sum(line["time/step_s"] for line in lines) for lines in (sync, beside)]
    assert took[1] < 0.45 * took[0] and max(world.lags) <= 3


def test_a_straggler_is_waited_for_in_time() -> None:
    """Group 0 takes 100 ticks, the others 1: with bound 2 it is trained on by the step that consumes version 2."""
    world, _ = play(2, 2, 8, [100, *[1] * 30], 1)
    [step] = [step for step, numbers in world.trained.items() if 0 in numbers]
    assert step == 3 and not world.dropped and not world.retried


def test_several_stragglers_are_waited_for_before_there_are_too_many() -> None:
    """Four of six groups of version 0 are slow: step 2 must wait for two of them, or step 3 could not take them all."""
    world, _ = play(2, 2, 6, [50, 50, 50, 50, *[1] * 30], 1)
    assert world.trained[1] == [4, 5] and sorted(world.trained[2] + world.trained[3]) == [0, 1, 2, 3]


def test_lag_counts_flight_and_queue() -> None:
    """Made at version 3 and consumed by batch 7, which trains version 6: lag 3; with bound 2 the whole group goes back."""
    buffer = Buffer(lag=2, batch=1, last=20, cursor=9)
    group = buffer.issue(3)
    rollouts = cast(list[Rollout], [Scored(), Scored()])
    buffer.finish(group, rollouts, oldest=3)
    assert buffer.stale(5) == [] and buffer.stale(6) == [group]
    buffer.retry(group)
    assert buffer.pending == [9] and not buffer.finished
    again = buffer.issue(6)
    assert (again.number, again.oldest, buffer.cursor) == (9, 6, 10)


def test_capacity_is_that_of_areal() -> None:
    """(lag + version + 1) * batch - (accepted + running), also where a run goes on with some accepted and some lost."""
    buffer = Buffer(lag=2, batch=4, last=100, cursor=44, pending=[37, 39, 42])
    buffer.restore(Group(39, version=8, oldest=8))
    steps_done, accepted, running = 10, 10 * 4 + 1, 0
    assert buffer.capacity(10) == (2 + steps_done + 1) * 4 - (accepted + running) == 11
    issued = [buffer.issue(10).number for _ in range(11)]
    assert issued == [37, 42, *range(44, 53)] and buffer.capacity(10) == 0
    assert Buffer(lag=2, batch=4, last=100).capacity(99) == 4  # the last step needs no more than its batch


def test_a_broken_run_trains_on_the_rest() -> None:
    """Tasks 0..7, batch 2, killed with two in flight and one in the queue: all eight are trained on once."""
    world, _ = play(1, 2, 2, [3, 1, 4, 1, 5, 9, 2, 6], 2)
    before = [number for numbers in world.trained.values() for number in numbers]
    rest = sorted(set(range(8)) - set(before))
    again, _ = play(1, 2, 2, [3, 1, 4, 1, 5, 9, 2, 6], 2, cursor=7, pending=[n for n in rest if n < 7])
    after = [number for numbers in again.trained.values() for number in numbers]
    assert sorted(before + after) == list(range(8))


def test_tasks_that_are_never_scored_end_the_run() -> None:
    with pytest.raises(ValueError, match="environment: no episode of 3 tasks was scored, the last with 'KeyError: odd text'"):
        play(1, 3, 5, [2], 1, frozenset(range(3, 20)))


def test_no_step_is_taken_of_what_is_stale() -> None:
    """A run that goes on with a smaller bound than it had sends what is too old back."""
    buffer = Buffer(lag=1, batch=1, last=9, cursor=3, pending=[0, 2])
    buffer.restore(Group(0, version=2, oldest=2, rollouts=cast(list[Rollout], [Scored()])))
    world = World(buffer, [1], 1)
    world.version = 5
    loop = Orchestrator(buffer, world, Side(world), world, version=5, clock=lambda: float(world.now))
    lines = [metrics for _, metrics in loop.steps()]
    assert world.retried == [0] and max(world.lags) <= 1 and len(lines) == 4
    counts = Counter(np.concatenate(list(world.trained.values())).tolist())
    assert {0, 2} <= counts.keys() and set(counts.values()) == {1}


def test_a_smaller_bound_gives_back_what_cannot_be_taken_in_time() -> None:
    """Ten groups of version 0 were finished under lag 4; with lag 1 and batches of 2 only four can be trained on in time."""
    buffer = Buffer(lag=1, batch=2, last=9, cursor=10, pending=range(10))
    for number in range(10):
        buffer.restore(Group(number, version=0, oldest=0, rollouts=cast(list[Rollout], [Scored()])))
    world = World(buffer, [1], 1)
    loop = Orchestrator(buffer, world, Side(world), world, version=0, clock=lambda: float(world.now))
    assert len(list(loop.steps())) == 9
    assert world.retried == list(range(4, 10)) and max(world.lags) <= 1
    assert sorted(number for numbers in world.trained.values() for number in numbers) == list(range(18))
