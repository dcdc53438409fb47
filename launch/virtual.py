"""Engines and a trainer whose device is a clock: the real scheduler decides, and `launch.costs` says how long each step takes.

What the scheduler plans is what happens: slots, pages, chunks, the prefix tree, preemption, and at an update all that runs is
retracted and prefilled again. Token ids are dummies; only lengths matter.
"""

import heapq
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, cast

from inference.scheduler import Plan, Scheduler
from inference.sequence import Sequence as Running
from inference.types import FinishReason, Request, SamplingParams
from launch.costs import PAGE, Chip, Model
from rl.buffer import Group
from rl.rollout import Rollout


class Clock:
    def __init__(self) -> None:
        self.now = 0.0
        self.host_s = 0.0
        """real seconds inside the simulated sides"""

    @contextmanager
    def inside(self) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self.host_s += time.perf_counter() - started


@dataclass(frozen=True)
class Turn:
    added: int
    """tokens of the prompt, or of a tool's output"""
    sampled: int
    wait_s: float = 0.0
    """of the tool, before its output is there"""


@dataclass(eq=False)
class Conversation:
    """One sample of a group. Its length stands for it where the loop wants a rollout."""

    name: int
    group: Group
    turns: Sequence[Turn]
    ids: list[int]
    at: int = 0
    oldest: int | None = None
    known: int = 0
    """tokens whose keys and values were computed at any time"""
    reward: float | None = None

    def request(self, max_tokens: int) -> Request:
        return Request(id=f"{self.name}-{self.at}", prompt_ids=tuple(self.ids), params=SamplingParams(max_tokens=max_tokens))


class Engine:
    """One chip. It dispatches a plan, is busy until the plan is done, and swaps weights between two plans."""

    def __init__(self, model: Model, chip: Chip, clock: Clock, *, max_slots: int, max_context: int, decode_steps: int):
        self.model, self.chip, self.clock, self.decode_steps = model, chip, clock, decode_steps
        self.scheduler = Scheduler(
            num_pages=chip.pages(model), page_size=PAGE, max_slots=max_slots, max_context=max_context, tokens_per_step=16384
        )
        self.mine: dict[Running, Conversation] = {}
        self.version = 0
        self.plan: Plan | None = None
        self.until: float | None = None
        """when it is free again; None: it has nothing to do"""
        self.busy_s = self.idle_s = self.pause_s = 0.0
        self._free_at = 0.0
        self.sampled = self.extended = self.again = 0
        """tokens sampled; computed in extends; of those, computed before already"""

    def add(self, conversation: Conversation, max_tokens: int) -> None:
        self.mine[self.scheduler.add(conversation.request(max_tokens))] = conversation

    def begin(self) -> None:
        """Dispatches the next plan, if it is free and there is one."""
        if self.until is not None:
            return
        seconds = 0.0
        if self.version != self.scheduler.version:
            for sequence in list(self.scheduler.running):
                self.scheduler.preempt(sequence)
            self.scheduler.version = self.version
            seconds = self.chip.swap_s
            self.pause_s += seconds
        else:
            seconds = self._dispatch()
        if seconds:
            self.idle_s += self.clock.now - self._free_at
            self.busy_s += seconds
            self.until = self.clock.now + seconds

    def _dispatch(self) -> float:
        # A real engine's calls are shorter and end rows on the way; here a call ends where the first of its rows does.
        ends = [self._left(s) for s in self.scheduler.running]
        plan = self.plan = self.scheduler.schedule(min([self.decode_steps, *ends]), drained=True)
        if plan is None:
            return 0.0
        rows = sum(s.computed for s, _ in plan.chunks)
        if plan.steps:
            n = len(plan.chunks)
            seconds = plan.steps * self.chip.engine_step(self.model, n, rows + n * (plan.steps + 1) / 2, 0)
        else:
            tokens = sum(n for _, n in plan.chunks)
            attended = sum(n * (s.computed + n / 2) for s, n in plan.chunks)
            seconds = self.chip.engine_step(self.model, tokens, rows + tokens, attended)
            for sequence, n in plan.chunks:
                conversation, end = self.mine[sequence], sequence.computed + n
                self.extended += n
                self.again += max(min(conversation.known, end) - sequence.computed, 0)
                conversation.known = max(conversation.known, end)
        self.scheduler.dispatched(plan)
        return seconds

    def _left(self, sequence: Running) -> int:
        conversation = self.mine[sequence]
        return conversation.turns[conversation.at].sampled - sequence.num_sampled

    def end(self) -> list[Conversation]:
        """Reads the plan that is done. Returns conversations whose turn has ended."""
        self.until, self._free_at, plan, self.plan = None, self.clock.now, self.plan, None
        ended = []
        for sequence, _ in plan.chunks if plan else ():
            conversation, new, sequence.pending = self.mine[sequence], sequence.pending, 0
            if new and conversation.oldest is None:
                conversation.oldest = self.scheduler.version
            new = min(new, conversation.turns[conversation.at].sampled - sequence.num_sampled)
            sequence.ids.extend([conversation.name] * new)
            self.sampled += new
            conversation.known = max(conversation.known, len(sequence.ids) - 1)
            if not self._left(sequence):
                self.scheduler.finish(sequence, FinishReason.STOP)
                del self.mine[sequence]
                conversation.ids = sequence.ids
                ended.append(conversation)
        return ended

    def times(self) -> tuple[float, float]:
        """Busy and idle seconds up to now."""
        ahead = max((self.until or 0.0) - self.clock.now, 0.0)
        return self.busy_s - ahead, self.idle_s + (self.clock.now - self._free_at if self.until is None else 0.0)


@dataclass
class Trainer:
    """A learner on so many chips."""

    model: Model
    chip: Chip
    clock: Clock
    chips: int
    engines: Sequence[Engine]
    ends: float | None = None
    busy_s: float = 0.0
    samples: int = 0
    tokens: int = 0
    _batch: list[int] = field(default_factory=list)

    def start(self, step: int, groups: Sequence[Group]) -> None:
        conversations = cast(list[Conversation], [each for group in groups for each in group.rollouts])
        self._batch = [len(each.ids) for each in conversations]
        seconds = self.chip.train_step(self.model, self._batch, self.chips)
        self.ends = self.clock.now + seconds
        self.busy_s += seconds

    def poll(self, wait: bool) -> dict[str, Any] | None:
        assert self.ends is not None
        if wait:
            self.clock.now = max(self.clock.now, self.ends)
        if self.clock.now < self.ends:
            return None
        self.ends = None
        self.samples += len(self._batch)
        self.tokens += sum(self._batch)
        return {}

    def publish(self) -> float:
        for engine in self.engines:
            engine.version += 1
        return self.chip.swap_s * len(self.engines)

    def time(self) -> float:
        """Busy seconds up to now."""
        return self.busy_s - max((self.ends or 0.0) - self.clock.now, 0.0)


class Sampler:
    """Conversations of groups on several engines; each is on one engine from its first turn to its last.

    Args:
        draw: the turns of a task's samples.
        max_tokens: cap of one turn, which the scheduler knows; when a turn really ends it does not.
        at_once: conversations on an engine, those that wait for tools included. With more, what they wait with is evicted.
    """

    def __init__(self, engines: Sequence[Engine], trainer: Trainer, draw: Any, max_tokens: int, at_once: int):
        self.engines, self.trainer, self._draw, self._max_tokens = engines, trainer, draw, max_tokens
        self._at_once, self._queue = at_once, deque[Conversation]()
        self._clock = trainer.clock
        self._load = [0] * len(engines)
        self._home: dict[int, int] = {}
        self._unfinished: dict[int, list[Conversation]] = {}
        self._missing: dict[int, int] = {}
        self._tools: list[tuple[float, int, Conversation]] = []
        self._count = 0

    @property
    def idle(self) -> bool:
        return not self._unfinished

    def start(self, group: Group) -> None:
        with self._clock.inside():
            prompt = [-1 - group.number]
            self._unfinished[group.number] = []
            for turns in self._draw(group.number):
                self._count += 1
                each = Conversation(self._count, group, turns, prompt * turns[0].added)
                self._unfinished[group.number].append(each)
                self._queue.append(each)
            self._missing[group.number] = len(self._unfinished[group.number])
            self._fill()

    def _fill(self) -> None:
        """Conversations begin, in order, each on the engine with the fewest."""
        while self._queue and min(self._load) < self._at_once:
            each, at = self._queue.popleft(), self._load.index(min(self._load))
            self._home[each.name] = at
            self._load[at] += 1
            self.engines[at].add(each, self._max_tokens)

    def poll(self) -> list[tuple[Group, Sequence[Rollout], int]]:
        """To the next moment at which anything happens."""
        with self._clock.inside():
            for engine in self.engines:
                engine.begin()
            times = [engine.until for engine in self.engines if engine.until is not None]
            times += [self._tools[0][0]] if self._tools else []
            times += [self.trainer.ends] if self.trainer.ends is not None else []
            self._clock.now = max(min(times), self._clock.now)
            done = []
            for engine in self.engines:
                if engine.until is not None and engine.until <= self._clock.now:
                    done += [group for each in engine.end() for group in self._turned(each)]
            while self._tools and self._tools[0][0] <= self._clock.now:
                each = heapq.heappop(self._tools)[2]
                self.engines[self._home[each.name]].add(each, self._max_tokens)
            self._fill()
            return [(group, cast(list[Rollout], own), min(each.oldest or 0 for each in own)) for group, own in done]

    def _turned(self, each: Conversation) -> list[tuple[Group, list[Conversation]]]:
        """What has ended with this turn: a group, with all its conversations, or nothing."""
        each.at += 1
        if each.at < len(each.turns):
            turn = each.turns[each.at]
            each.ids = each.ids + [-(10**9) - each.name] * turn.added
            heapq.heappush(self._tools, (self._clock.now + turn.wait_s, each.name, each))
            return []
        each.reward = 1.0
        self._load[self._home.pop(each.name)] -= 1
        self._missing[each.group.number] -= 1
        if self._missing[each.group.number]:
            return []
        del self._missing[each.group.number]
        return [(each.group, self._unfinished.pop(each.group.number))]
