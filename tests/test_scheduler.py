"""The scheduler with a device of plain Python: random use with every read and write checked, and the rules one by one."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.prefix import SHORTEST_TAIL, Match, common
from inference.scheduler import Plan, Scheduler
from inference.sequence import Sequence
from inference.types import FinishReason, PromptLogprobs, Request, SamplingParams

SIZE = 8
"""tokens of a page"""
STOP = 99


def asked(name: str, ids: Items[int], max_tokens: int = 4, *, priority: int = 0, adapter: str = "", **params: Any) -> Request:
    sampling = SamplingParams(max_tokens=max_tokens, **params)
    return Request(id=name, prompt_ids=tuple(ids), params=sampling, priority=priority, adapter=adapter)


def scheduler(**sizes: Any) -> Scheduler:
    given = {"num_pages": 33, "page_size": SIZE, "max_slots": 4, "max_context": 64, "tokens_per_step": 16}
    return Scheduler(**{**given, **sizes})


Keys = tuple[int, str, int]
"""what stands for the keys of a token: weight version, adapter, and a hash of all tokens up to it"""
JUNK: Keys = -1, "", 0


def hashes(tokens: Items[int], before: int = 0) -> list[int]:
    """Of each token with all before it."""
    return list(accumulate(tokens, lambda total, token: hash((total, token)), initial=before))[1:]


@dataclass
class Step:
    """A dispatched step. Of rows that sample nothing `sampled` is None."""

    plan: Plan
    sampled: list[list[int] | None]
    prompt: list[range]
    """prompt tokens of each row whose log-probs come with it"""


class Device:
    """An engine without a model: it keeps `Engine.step`'s order, and the device's pool and slots hold what tokens they are of.

    Every step checks that what its rows read is their own. The token sampled at a position depends on the position alone, but
    for stops; so requests of one prompt go on alike, and share what they sampled too.
    """

    def __init__(self, books: Scheduler):
        self.books = books
        self.pool: dict[tuple[int, int], Keys] = {}
        self.newest = dict.fromkeys(range(books.max_slots), -1)
        self.owner: dict[int, Sequence] = {}
        self.real: dict[str, list[int]] = {}
        """all tokens of each request, read or not"""
        self.stops: dict[str, int] = {}
        """how many tokens a request samples until a stop; the device sees stop ids, the host alone sees strings"""
        self.read_prompt: dict[str, set[int]] = {}
        self.unread: Step | None = None
        self.plans: list[Plan] = []
        self.started: list[str] = []
        self.finished: list[str] = []

    def add(self, request: Request, stop_after: int = 0) -> Sequence:
        sequence = self.books.add(request)
        if request.params.prompt_logprobs:
            none = np.zeros(len(request.prompt_ids))
            sequence.prompt_logprobs = PromptLogprobs(logprobs=none, top_ids=none, top_logprobs=none)
            self.read_prompt[request.id] = {0}
        self.real[request.id], self.stops[request.id] = list(request.prompt_ids), stop_after
        return sequence

    # ---- the device

    def step(self, max_steps: int = 1) -> Plan | None:
        before, self.unread = self.unread, None
        plan = self._schedule(max_steps, before is None)
        if plan is None and before is not None:
            self._read(before)
            before, plan = None, self._schedule(max_steps, True)
        if plan is not None:
            self.unread = self._dispatch(plan)
            self.plans.append(plan)
            self.books.check()
        if before is not None:
            self._read(before)
        return plan

    def drain(self, max_steps: int = 1) -> None:
        for _ in range(5_000):
            if not (self.books.running or self.books.waiting):
                return
            self.step(max_steps)
        raise AssertionError("the scheduler does not finish")

    def _schedule(self, max_steps: int, drained: bool) -> Plan | None:
        plan = self.books.schedule(max_steps, drained)
        self.books.check()
        self._check_tree()
        if drained and plan is None:
            assert not self.books.running, "nothing is in flight, and nobody gets on"
        return plan

    def _dispatch(self, plan: Plan) -> Step:
        books = self.books
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets) <= books.max_slots
        self.pool |= {
            (target, at): self.pool.get((source, at), JUNK) for source, target in plan.copies for at in range(books.page_size)
        }
        for sequence in plan.fresh:
            assert sequence.pending == 0, "its tables would lack what was not read"
            self.owner[sequence.slot] = sequence
        self._check_plan(plan, max(plan.steps, 1))
        before = {s: s.computed for s, _ in plan.chunks}
        prompt = [self._prompt_read(s, n) for s, n in plan.chunks]
        compute = self._decode if plan.steps else self._extend
        sampled = [compute(s, plan.steps or n, left) for (s, n), left in zip(plan.chunks, plan.left, strict=True)]
        books.dispatched(plan)
        for sequence, n in plan.chunks:
            if sequence.request.id not in self.started:
                self.started.append(sequence.request.id)
            assert sequence.computed - before[sequence] >= n and sequence.uncomputed >= 1
        return Step(plan, sampled, prompt)

    def _check_plan(self, plan: Plan, steps: int) -> None:
        books = self.books
        assert len({s.slot for s, _ in plan.chunks}) == len(plan.chunks) <= books.max_slots
        assert plan.steps or sum(n for _, n in plan.chunks) <= books.tokens_per_step
        assert plan.left == [books.budget_left(s) for s, _ in plan.chunks] and min(plan.left) > 0
        for (sequence, n), left in zip(plan.chunks, plan.left, strict=True):
            assert sequence in books.running and sequence.finish_reason is None
            assert self.owner[sequence.slot] is sequence, "the slot's tables are another's"
            assert 1 <= n <= sequence.uncomputed and (n == sequence.uncomputed == 1 or not plan.steps)
            ahead = sequence.computed + (min(steps, left) if plan.steps else n)
            pages = len(sequence.pages)
            assert -(-ahead // books.page_size) <= pages <= -(-books.max_context // books.page_size)

    def _prompt_read(self, sequence: Sequence, n: int) -> range:
        if not sequence.wants_prompt:
            return range(0)
        assert sequence.pending == 0
        return range(sequence.computed + 1, min(sequence.computed + n + 1, len(sequence.request.prompt_ids)))

    def _check_reads(self, sequence: Sequence, end: int) -> None:
        """What a row reads are the keys of its own tokens up to `end`."""
        size, expected = self.books.page_size, hashes(self.real[sequence.request.id][:end])
        for at in range(end):
            version, adapter, mark = self.pool[sequence.pages[at // size], at % size]
            assert (adapter, mark) == (sequence.request.adapter, expected[at]), "the keys are another's"
            assert version == self.books.version or sequence.private, "the keys are of another version"

    def _write(self, sequence: Sequence, at: int, keys: Keys) -> None:
        page, size = sequence.pages[at // self.books.page_size], self.books.page_size
        shared = [other for other in self.books.running if other is not sequence and page in other.pages]
        assert not shared and page != 0, "it writes to a page that others read"
        self.pool[page, at % size] = keys

    def _take(self, sequence: Sequence, at: int) -> int:
        """The newest token, from the host if it knows it."""
        if at < len(sequence.ids):
            assert sequence.pending == 0 or at < len(sequence.ids) - 1
            return sequence.ids[at]
        assert at == len(sequence.ids) + sequence.pending - 1, "only a row's newest token may be unread"
        return self.newest[sequence.slot]

    def _sample(self, sequence: Sequence) -> int:
        """Appends the next token; -1 if the device sees that it is the last."""
        request, real = sequence.request, self.real[sequence.request.id]
        num_sampled = len(real) - len(request.prompt_ids) + 1
        stops = num_sampled == self.stops[request.id] and request.params.stop_ids
        real.append(STOP if stops else len(real) * len(real) // 3 % 2)
        return -1 if stops and not request.params.ignore_eos else real[-1]

    def _extend(self, sequence: Sequence, n: int, left: int) -> list[int] | None:
        first, real = sequence.computed, self.real[sequence.request.id]
        tokens = [self._take(sequence, at) for at in range(first, first + n)]
        live = tokens[-1] >= 0
        if live:
            assert tokens == real[first : first + n]
            self._check_reads(sequence, first)
        for at, mark in list(enumerate(hashes(real[: first + n])))[first:]:
            self._write(sequence, at, (self.books.version, sequence.request.adapter, mark) if live else JUNK)
        if n < sequence.uncomputed:
            return None
        if live:
            assert len(real) == first + n
            self.newest[sequence.slot] = self._sample(sequence)
        return real[first + n : first + n + 1]

    def _decode(self, sequence: Sequence, steps: int, left: int) -> list[int]:
        real, token = self.real[sequence.request.id], self._take(sequence, sequence.computed)
        start = sequence.computed + 1
        if token >= 0:
            self._check_reads(sequence, start - 1)
        for at in range(start - 1, start - 1 + min(steps, left)):
            if token >= 0:
                assert (len(real), real[-1]) == (at + 1, token)
                self._write(sequence, at, (self.books.version, sequence.request.adapter, hashes(real)[-1]))
                token = self._sample(sequence)
        self.newest[sequence.slot] = token
        return real[start : start + min(steps, left)]

    def _check_tree(self) -> None:
        """Pages hold what the tree says of them, as soon as the device gets there."""
        for (version, adapter), root in self.books.tree._roots.items():
            ends = {root: 0}
            for node in root.below():  # parents first
                if node.parent is not None:
                    expected = hashes(node.tokens, ends[node.parent])
                    ends[node] = expected[-1]
                    held = [self.pool.get((node.page, at)) for at in range(len(node.tokens))]
                    assert held == [(version, adapter, mark) for mark in expected], "the tree promises what no page holds"

    # ---- the host

    def _read(self, step: Step) -> None:
        for row, (sequence, _) in enumerate(step.plan.chunks):
            if sequence.finish_reason is not None:
                continue
            if step.prompt[row]:
                self.read_prompt[sequence.request.id] |= set(step.prompt[row])
            sampled = step.sampled[row]
            if sampled is None:
                continue
            sequence.pending -= min(step.plan.steps or 1, step.plan.left[row])
            for token in sampled:
                sequence.ids.append(token)
                if reason := self._ends(sequence):
                    self._finish(sequence, reason)
                    break
        self.books.check()

    def _ends(self, sequence: Sequence) -> FinishReason | None:
        request, num_sampled = sequence.request, len(sequence.ids) - len(sequence.request.prompt_ids)
        if sequence.may_stop and num_sampled == self.stops[request.id]:
            return FinishReason.STOP
        full = num_sampled == request.params.max_tokens or len(sequence.ids) == self.books.max_context
        return FinishReason.LENGTH if full else None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> None:
        name, params, prompt = sequence.request.id, sequence.request.params, sequence.request.prompt_ids
        real, num_sampled = self.real[name], len(sequence.ids) - len(prompt)
        assert sequence.ids == real[: len(sequence.ids)]
        if reason is not FinishReason.ABORT:
            assert num_sampled <= params.max_tokens and len(sequence.ids) <= self.books.max_context
            assert self.read_prompt.get(name, set(range(len(prompt)))) == set(range(len(prompt)))
        self.books.finish(sequence, reason)
        self.finished.append(name)
        self.books.check()
        self._check_tree()

    def cancel(self, sequence: Sequence) -> None:
        if sequence.finish_reason is None:
            self._finish(sequence, FinishReason.ABORT)

    def pause(self, mode: str, version: int) -> None:
        if self.unread is not None:
            self._read(self.unread)
            self.unread = None
        for sequence in sorted(self.books.running, key=lambda s: s.order, reverse=True):
            if mode == "retract":
                self.books.preempt(sequence)
            else:
                sequence.private = True
        self.books.check()
        self.books.version = version


# ---- Random schedules

PROMPT = st.tuples(st.sampled_from([0, 0, 1]), st.integers(1, 40), st.integers(0, 12))
"""a stream that prompts share, how much of it, and how many tokens of its own"""
OPTIONS = st.fixed_dictionaries(
    {"max_tokens": st.integers(1, 24)},
    optional={
        "priority": st.integers(-1, 1),
        "adapter": st.sampled_from(["", "lora"]),
        "stop": st.just(("stop",)),
        "stop_ids": st.just((STOP,)),
        "ignore_eos": st.booleans(),
        "prompt_logprobs": st.booleans(),
    },
)
ACTION = st.one_of(
    st.tuples(st.just("add"), PROMPT, OPTIONS, st.integers(1, 6)),
    st.tuples(st.just("add"), PROMPT, OPTIONS, st.integers(1, 6)),
    st.tuples(st.just("follow"), st.integers(0, 9), OPTIONS, st.integers(1, 6)),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("step"), st.integers(1, 5)),
    st.tuples(st.just("cancel"), st.integers(0, 9)),
    st.tuples(st.just("pause"), st.sampled_from(["retract", "keep"]), st.integers(0, 1)),
)
SIZES = st.fixed_dictionaries(
    {
        "num_pages": st.integers(9, 24),
        "page_size": st.sampled_from([8, 8, 16, 4]),
        "max_slots": st.integers(1, 6),
        "tokens_per_step": st.integers(6, 40),
        "max_context": st.just(64),
    }
)


class Watched(Scheduler):
    """Checks who is admitted and who is preempted."""

    def preempt(self, sequence: Sequence) -> None:
        assert sequence.order == max(s.order for s in self.running), "another gives up its pages first"
        super().preempt(sequence)

    def _start(self, sequence: Sequence, match: Match, lacking: int) -> None:
        for early in self.waiting:
            assert early.order > sequence.order, "another was to be asked first"
        super()._start(sequence, match, lacking)

    def _admit(self) -> None:
        before = set(self.running)
        super()._admit()
        started = [s.order for s in self.running if s not in before]
        for passed in (s for s in self.waiting if started and s.order < max(started)):
            of_its_adapter = (s for s in self.running if s.request.adapter == passed.request.adapter)
            assert any(common(passed.ids[:-1], s.ids) >= min(SHORTEST_TAIL, self.page_size) for s in of_its_adapter)


class Schedule:
    """Carries out random actions."""

    def __init__(self, sizes: dict[str, Any]):
        self.books = Watched(**sizes)
        self.device = Device(self.books)
        self.sequences: list[Sequence] = []

    def add(self, ids: Items[int], options: dict[str, Any], stop_after: int) -> None:
        ids = ids[: self.books.max_context - 1]
        request = asked(str(len(self.sequences)), ids, **options)
        most = min(len(ids) + request.params.max_tokens, self.books.max_context)
        if -(-most // self.books.page_size) < self.books.pool.num_pages:
            self.sequences.append(self.device.add(request, stop_after))
        else:
            with pytest.raises(ValueError, match="max_tokens: .* raise engine.num_pages"):
                self.books.add(request)

    def act(self, action: str, *values: Any) -> None:
        if action == "step":
            self.device.step(*values)
        elif action == "add":
            (stream, length, own), *how = values
            shared = [(i * (stream + 2)) // 3 % 2 for i in range(length)]
            self.add(shared + [10 + len(self.sequences)] * own, *how)
        elif not self.sequences:
            return
        elif action == "follow":  # a next turn
            which, *how = values
            self.add([*self.sequences[which % len(self.sequences)].ids, 5, 6], *how)
        elif action == "cancel":
            self.device.cancel(self.sequences[values[0] % len(self.sequences)])
        else:
            self.device.pause(values[0], self.books.version + values[1])


@settings(max_examples=250)
@given(SIZES, st.lists(ACTION, min_size=30, max_size=70))
def test_random_schedules(sizes: dict[str, int], actions: list[tuple[Any, ...]]) -> None:
    """Small pools, chunks, shared prefixes, stops found late, cancels, updates: every row reads its own keys, the tree never
    lies, the books reconcile, and everything finishes."""
    schedule = Schedule(sizes)
    books, device = schedule.books, schedule.device
    for action in actions:
        schedule.act(*action)
    device.drain(3)
    assert sorted(device.finished) == sorted(s.request.id for s in schedule.sequences)
    assert books.pool.num_free + books.tree.num_pages == books.pool.num_pages - 1
    books.tree.evict(books.pool.num_pages, books.version)
    assert books.pool.num_free == books.pool.num_pages - 1


# ---- The rules one by one: admission


def test_first_come_first_served() -> None:
    """Without shared prefixes requests start in order of arrival, even if a later one would fit."""
    books = scheduler(num_pages=9, max_slots=3)
    device = Device(books)
    for i in range(8):
        device.add(asked(str(i), [i] * (50 if i % 2 == 0 else 3), 4))
    device.drain()
    assert device.started == [str(i) for i in range(8)]


def test_lower_priority_numbers_go_first() -> None:
    books = scheduler(max_slots=1)
    device = Device(books)
    device.add(asked("running", [1], 8, priority=9))
    device.step()
    for name, priority in (("d", 5), ("a", -1), ("e", 5), ("b", 0), ("c", 0)):
        device.add(asked(name, [2], 1, priority=priority))
    assert "".join(s.request.id for s in books.waiting) == "abcde"
    device.drain()
    assert device.started == ["running", *"abcde"], "nobody who runs makes room for a better priority"


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    books = scheduler(num_pages=9, max_slots=3)
    device = Device(books)
    device.add(asked("first", [1] * 10, 12))
    device.step()
    device.add(asked("large", [2] * 56, 4))
    for i in range(30):
        device.add(asked(f"small {i}", [3, i], 1))
        device.step()
    assert "large" in device.finished
    small = [name for name in device.started if name.startswith("small")]
    assert device.started.index("large") == 1 and small == [f"small {i}" for i in range(len(small))]


@pytest.fixture
def scarcity(monkeypatch: pytest.MonkeyPatch) -> None:
    """Admission leaves nothing for those who run."""
    monkeypatch.setattr("inference.scheduler.RESERVE", -1)


@pytest.mark.usefixtures("scarcity")
def test_admission_takes_pages_for_the_whole_prompt() -> None:
    books = scheduler(num_pages=9)
    first, second, third = (books.add(asked(str(n), [n] * n)) for n in (33, 20, 8))
    plan = books.schedule(1, drained=True)
    assert plan is not None and plan.chunks == [(first, 16)]
    assert [len(s.pages) for s in (first, second, third)] == [5, 3, 0] and books.running == [first, second]


def test_requests_that_can_never_run_are_refused() -> None:
    books = scheduler(num_pages=5)
    for request, message in (
        (asked("a", []), "prompt_ids: .* empty prompt"),
        (
            asked("a", range(64)),
            "prompt_ids: request 'a' has 64 prompt tokens.* raise engine.max_context",
        ),
        (
            asked("a", range(30), 3),
            "max_tokens: request 'a' may need 5 pages of 8 tokens.* lower max_tokens",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            books.add(request)
    assert books.waiting == [] and books.schedule(1, drained=True) is None
    books.add(asked("a", range(30), 2))


# ---- Shared prefixes


@pytest.mark.parametrize("length", [4, 6, 8, 9, 31, 32, 33, 36, 37, 38, 48])
@pytest.mark.parametrize("tokens_per_step", [8, 16, 64])
def test_a_group_prefills_its_prompt_once(length: int, tokens_per_step: int) -> None:
    """The first of n requests computes it, the others the last token alone, with a tail before it that is not worth a copy;
    whatever the chunks, a last chunk of one token included. They start as soon as they find that much."""
    books = scheduler(max_slots=8, num_pages=200, tokens_per_step=tokens_per_step)
    device = Device(books)
    sequences = [device.add(asked(str(i), range(length), 9)) for i in range(6)]
    device.drain(4)
    tail = (length - 1) % SIZE
    cached = length - 1 - (tail if tail < SHORTEST_TAIL else 0)
    assert [s.cached for s in sequences] == [0] + [cached] * 5
    assert [s.prefilled for s in sequences] == [length] + [length - cached] * 5
    assert sum(len(plan.copies) for plan in device.plans) == (5 if tail >= SHORTEST_TAIL else 0)
    starts = [next(i for i, plan in enumerate(device.plans) if s in plan.fresh) for s in sequences]
    assert starts == [0] + [-(-(length - SHORTEST_TAIL) // tokens_per_step)] * 5


def test_others_pass_those_who_wait_for_a_prefill() -> None:
    books = scheduler(tokens_per_step=16)
    device = Device(books)
    for name in "abc":
        device.add(asked(name, range(40)))
    device.add(asked("other", [9] * 3, 1))
    device.step()
    assert [s.request.id for s in books.running] == ["a", "other"] and [s.request.id for s in books.waiting] == ["b", "c"]
    device.drain()
    assert device.started == ["a", "other", "b", "c"]


def test_a_group_goes_on_when_its_first_is_cancelled() -> None:
    """What it has computed is not computed again."""
    books = scheduler(tokens_per_step=16)
    device = Device(books)
    first, second, third = (device.add(asked(name, range(40))) for name in "abc")
    device.step()
    device.step()
    device.cancel(first)
    device.drain()
    assert [s.cached for s in (first, second, third)] == [0, 32, 39] and first.prefilled == 32


def test_adapters_share_nothing() -> None:
    books = scheduler(tokens_per_step=64)
    device = Device(books)
    sequences = [device.add(asked(f"{i} {adapter}", range(20), 1, adapter=adapter)) for i in (0, 1) for adapter in ("", "lora")]
    device.step()
    assert books.running == sequences[:2], "each computes its own, and neither waits for the other"
    device.drain()
    assert [s.cached for s in sequences] == [0, 0, 16, 16]


def test_prompt_logprobs_skip_the_cache_until_they_are_known() -> None:
    books = scheduler(num_pages=9)
    device = Device(books)
    device.add(asked("cached", range(20), 1))
    device.drain()
    sequence = device.add(asked("a", range(20), 20, prompt_logprobs=True))
    device.step()
    device.pause("retract", 0)
    assert sequence.wants_prompt and sequence.computed == 0
    for _ in range(4):
        device.step()
    device.pause("retract", 0)
    assert not sequence.wants_prompt and sequence.num_sampled == 3
    device.step()
    device.pause("retract", 0)
    assert (sequence.cached, sequence.prefilled) == (0, 16 + 20), "computed anew until they were known, then found"
    books.tree.clear()
    device.step()
    assert sequence.computed == 16 and not sequence.wants_prompt, "they are known once and for all"
    device.drain()
    assert device.read_prompt["a"] == set(range(20))


def test_pages_of_two_versions_are_private() -> None:
    """Pause mode keep: nobody waits for them or finds them, until all is computed anew."""
    books = scheduler()
    device = Device(books)
    first = device.add(asked("first", range(40)))
    device.step()
    device.pause("keep", 1)
    second = device.add(asked("second", range(40)))
    device.step()
    assert books.running == [first, second]
    device.cancel(second)
    while first.num_sampled == 0:
        assert device.step() is not None
    assert books.tree.match(1, "", range(40)).pages == []
    device.pause("retract", 1)
    device.drain()
    assert first.prefilled == 40 + 40 + 1
    third = device.add(asked("third", range(40)))
    device.drain()
    assert third.cached == 39


# ---- Steps


@pytest.mark.parametrize("priority", [0, -1])
def test_decoding_is_not_stalled_by_a_prefill(priority: int) -> None:
    books = scheduler(tokens_per_step=8)
    device = Device(books)
    first = device.add(asked("first", [1] * 4, 20))
    device.step()
    device.add(asked("long", range(40), 2, priority=priority))
    for sampled in range(2, 7):
        plan = device.step()
        assert plan is not None and plan.chunks[0] == (first, 1) and plan.chunks[1][1] == 7
        assert first.num_sampled == sampled


@pytest.mark.parametrize(
    ("budgets", "params", "waiting", "steps"),
    [
        ((20, 30), {}, False, 8),
        ((3, 6), {}, False, 6),  # ends with the last
        ((20, 30), {}, True, 8),
        ((3, 6), {}, True, 3),  # with the first
        ((20, 30), {"stop_ids": (STOP,)}, True, 2),  # and soon, where one may stop
        ((20, 30), {"stop": ("x",)}, True, 2),
        ((1, 30), {"stop": ("x",)}, True, 1),
        ((20, 30), {"stop_ids": (STOP,), "ignore_eos": True}, True, 8),
        ((20, 30), {"stop_ids": (STOP,)}, False, 8),
    ],
)
def test_decode_steps(budgets: tuple[int, ...], params: dict[str, Any], waiting: bool, steps: int) -> None:
    books = scheduler(max_slots=2)
    device = Device(books)
    for i in range(2 + waiting):
        device.add(asked(str(i), [i], (*budgets, 1)[i], **params))
    plan = device.step(8)
    assert plan is not None and plan.steps == steps


def test_a_budget_counts_a_whole_life() -> None:
    """Tokens in flight, and those from before a preemption or an update."""
    books = scheduler()
    device = Device(books)
    sequence = device.add(asked("a", range(9), 12))
    for mode in ("retract", "keep", "retract"):
        device.step(2)
        device.step(2)
        device.pause(mode, books.version + 1)
    device.drain(5)
    assert sequence.num_sampled == 12 and sequence.finish_reason is FinishReason.LENGTH
    full = device.add(asked("b", range(60), 12))
    device.drain(8)
    assert len(full.ids) == 64, "the context's end"


# ---- Preemption


@pytest.mark.usefixtures("scarcity")
def test_nobody_is_preempted_while_a_step_is_in_flight() -> None:
    books = scheduler(num_pages=4)
    first, second = (books.add(asked(name, [i] * 8, 9)) for i, name in enumerate("ab"))
    plan = books.schedule(9, drained=True)
    assert plan is not None and plan.chunks == [(first, 8), (second, 8)]
    books.dispatched(plan)
    assert books.schedule(9, drained=False) is None and books.running == [first, second]
    for sequence in books.running:
        sequence.ids.append(5)
        sequence.pending = 0
    plan = books.schedule(9, drained=True)
    assert plan is not None and plan.chunks == [(first, 1)] and books.waiting == [second] and books.num_preemptions == 1


@pytest.mark.usefixtures("scarcity")
@pytest.mark.parametrize("priorities", [(0, 0, 0), (2, 1, 0)])
def test_the_last_in_order_is_preempted_and_it_goes_on(priorities: tuple[int, ...]) -> None:
    books = scheduler(num_pages=8, max_slots=3, tokens_per_step=32)
    device = Device(books)
    sequences = [device.add(asked(name, [i] * 9, 20, priority=priorities[i])) for i, name in enumerate("abc")]
    while not books.num_preemptions:
        assert device.step() is not None
    *others, last = sorted(sequences, key=lambda s: s.order)
    assert books.running == others and books.waiting == [last]
    assert last.pages == [] and last.computed == 0 and last.num_sampled > 0
    late = device.add(asked("d", [7] * 3, 1, priority=2))
    assert books.waiting == [last, late], "it keeps its place in the queue"
    device.drain()
    assert last.num_sampled == 20 and last.prefilled > 9 and device.started[-1] == "d"


@pytest.mark.usefixtures("scarcity")
def test_what_was_not_copied_yet_is_not_remembered() -> None:
    """`second` is admitted with a tail to be copied, `third` takes the page of that tail, and then both give up their pages
    before any step."""
    books = scheduler(num_pages=6)
    device = Device(books)
    device.add(asked("cached", range(5), 1))
    device.drain()
    for i in (6, 7):
        device.add(asked(f"first {i}", [i] * 8, 4))
    device.step()
    second = device.add(asked("second", [*range(5), *[9] * 4], 1))
    device.add(asked("third", [8] * 3, 1))
    plan = device.step()
    assert plan is not None and plan.copies == [] and plan.fresh == []
    assert second.cached == 5 and books.num_preemptions == 2 and books.waiting[0] is second
    assert books.tree.match(0, "", range(5)).tail == 0
    device.drain()


def test_slots_are_given_back_and_made_anew() -> None:
    """Whoever gets a slot is in the plan's `fresh`, so that no tables of the one before it count."""
    books = scheduler(max_slots=2)
    device = Device(books)
    sequences = [device.add(asked(str(i), [i] * 3, 3)) for i in range(5)]
    device.step()
    device.cancel(sequences[0])
    device.drain()
    assert [s.slot for s in sequences] == [-1] * 5
    assert sorted(s.request.id for plan in device.plans for s in plan.fresh) == list("01234")


# ---- The check of the books


def test_check_finds_a_lost_and_a_doubled_page_and_a_lost_slot() -> None:
    books = scheduler()
    books.check()
    page = books.pool.take()
    with pytest.raises(AssertionError, match="do not reconcile"):
        books.check()
    books.pool.drop(page)
    sequence = books.add(asked("a", range(9)))
    books.schedule(1, drained=True)
    books.check()
    sequence.pages.append(sequence.pages[0])
    with pytest.raises(AssertionError, match="do not reconcile"):
        books.check()
    sequence.pages.pop()
    sequence.slot += 1
    with pytest.raises(AssertionError):
        books.check()
