"""Who runs next, and on which pages. Plain Python; it never sees an array of the device.

A sequence is its token ids and how many of them have keys and values in its pages (`computed`). One uncomputed token is a
decode step, several are a prefill; a preempted sequence is simply one with nothing computed. The books are one step ahead of
what has been read: `pending` tokens are sampled on the device, and the host does not know them yet.
"""

import bisect
import itertools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from inference.pages import PagePool
from inference.prefix import SHORTEST_TAIL, Match, PrefixTree, Replayed, common
from inference.routing import Routes, marks, merged
from inference.sequence import Sequence
from inference.types import FinishReason, Request, Tokens


@dataclass(frozen=True)
class Plan:
    """One step of the device, and what must be done just before it."""

    chunks: list[tuple[Sequence, int]]
    """sequences and how many tokens of each are computed"""
    steps: int
    """0: an extend; otherwise at most this many decode steps, one token of each sequence at a time"""
    left: list[int]
    """tokens that each may still sample"""
    copies: list[tuple[int, int]]
    """pages to copy: (source, target)"""
    fresh: list[Sequence]
    """sequences whose slot has changed hands"""


RESERVE = 64
"""tokens that each running sequence may still sample and that admission leaves room for: with fewer, many of those let in are
sent away again (simulated, tight pool: 1.5 times the tokens computed that are needed; with 64, 1.07)"""


def _order(sequence: Sequence) -> tuple[int, int]:
    return sequence.order


class Scheduler:
    """Admission, chunking, page allocation and preemption.

    Args:
        max_context: most tokens of a sequence.
        routes: where routing is recorded.
        reserve: tokens that each running sequence may still sample and that admission leaves room for (default: RESERVE).
    """

    def __init__(
        self,
        *,
        num_pages: int,
        page_size: int,
        max_slots: int,
        max_context: int,
        tokens_per_step: int,
        routes: Routes | None = None,
        reserve: int | None = None,
    ):
        self.page_size, self.max_slots, self.max_context = page_size, max_slots, max_context
        self.tokens_per_step, self.routes = tokens_per_step, routes
        self.reserve = RESERVE if reserve is None else reserve
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(self.pool, page_size)
        self.version = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._arrivals = itertools.count()
        self._slots = list(range(max_slots - 1, -1, -1))
        self._copies: list[tuple[int, int]] = []
        self._fresh: list[Sequence] = []

    def add(self, request: Request, on_tokens: Callable[[Tokens], None] | None = None) -> Sequence:
        """Queues a request.

        Raises:
            ValueError: it can never run: an empty prompt, one that leaves no room in the context, or more pages than exist.
        """
        n, params = len(request.prompt_ids), request.params
        if n == 0:
            raise ValueError(f"prompt_ids: request {request.id!r} has an empty prompt")
        if n >= self.max_context:
            raise ValueError(
                f"prompt_ids: request {request.id!r} has {n} prompt tokens, but the engine's context is "
                f"{self.max_context}, with room for one sampled token; shorten the prompt or raise engine.max_context"
            )
        most = min(n + params.max_tokens, self.max_context)
        if self._pages_for(most) > self.pool.num_pages - 1:
            raise ValueError(
                f"max_tokens: request {request.id!r} may need {self._pages_for(most)} pages of {self.page_size} tokens, but "
                f"the pool has {self.pool.num_pages - 1}; lower max_tokens or raise engine.num_pages"
            )
        sequence = Sequence(request, next(self._arrivals), list(request.prompt_ids), on_tokens)
        if request.routing is not None:
            sequence.known, sequence.given = request.routing, len(request.routing)
        bisect.insort(self.waiting, sequence, key=_order)
        return sequence

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    # ---- admission

    def _admit(self) -> None:
        """Moves waiting sequences into free slots, by priority and age, with pages for all they have to compute.

        One that has much in common with a running prefill waits for it instead of computing the same a second time.
        """
        if not self.waiting or not self._slots:
            return
        prefills: dict[tuple[str, tuple[int, ...]], list[Sequence]] = {}
        for sequence in self.running:
            self._note_prefill(prefills, sequence)
        held: list[Sequence] = []
        while self.waiting and self._slots and len(held) < self.max_slots:
            sequence = self.waiting.pop(0)
            self._set_path(sequence)
            if self._still_waits(sequence):
                held.append(sequence)
                continue
            # The last token is always computed: its logits are what is wanted.
            known = [] if sequence.wants_prompt else sequence.keys[:-1]
            match = self.tree.match(self.version, sequence.request.adapter, known, self._replayed(sequence))
            shared = self._is_being_computed(prefills, sequence, known, match)
            lacking = self._pages_for(len(sequence.ids)) - len(match.pages)
            if shared or not self._make_room(lacking + self._growth()):
                for page in match.pages:
                    self.pool.drop(page)
                held.append(sequence)
                if not shared:
                    break
                continue
            self._start(sequence, match, lacking)
            self._note_prefill(prefills, sequence)
        self.waiting[:0] = held

    def _head(self, sequence: Sequence) -> tuple[str, tuple[int, ...]]:
        return sequence.request.adapter, tuple(sequence.keys[: min(SHORTEST_TAIL, self.page_size)])

    def _replayed(self, sequence: Sequence) -> Replayed | None:
        if self.routes is None or sequence.known is None or not sequence.path:
            return None
        return Replayed(sequence.ids, partial(self.routes.alike, sequence.known))

    def _set_path(self, sequence: Sequence) -> None:
        """By its ids alone, if its routing is what the loaded weights chose, or will choose."""
        if sequence.known is None or sequence.origin == self.version:
            sequence.path = []
            return
        if sequence.marks is None:
            sequence.marks = marks(sequence.ids, sequence.known)
        sequence.path = sequence.marks

    def _note_prefill(self, prefills: dict[tuple[str, tuple[int, ...]], list[Sequence]], sequence: Sequence) -> None:
        if sequence.uncomputed > 1 and not sequence.private:
            prefills.setdefault(self._head(sequence), []).append(sequence)

    def _is_being_computed(
        self,
        prefills: dict[tuple[str, tuple[int, ...]], list[Sequence]],
        sequence: Sequence,
        known: list[int],
        match: Match,
    ) -> bool:
        cached = len(match.pages) * self.page_size + match.tail
        least = min(SHORTEST_TAIL, self.page_size)
        for other in prefills.get(self._head(sequence), ()):
            alike = common(known, other.keys)
            if alike - cached >= least:
                sequence.behind = other, alike - least
                return True
        return False

    def _still_waits(self, sequence: Sequence) -> bool:
        """Whether the prefill that it waits for has not come far enough yet."""
        if sequence.behind is not None:
            other, until = sequence.behind
            if other.slot >= 0 and not other.private and other.computed <= until:
                return True
            sequence.behind = None
        return False

    def _start(self, sequence: Sequence, match: Match, lacking: int) -> None:
        sequence.pages = [*match.pages, *(self.pool.take() for _ in range(lacking))]
        sequence.computed = len(match.pages) * self.page_size + match.tail
        if match.tail:
            self._copies.append((match.tail_page, sequence.pages[len(match.pages)]))
        if sequence.cached is None:
            sequence.cached = min(sequence.computed, len(sequence.request.prompt_ids))
        path = [*match.keys, *sequence.path[len(match.keys) :]]
        own = path == sequence.ids[: len(path)]  # so it is, too, what these weights chose: their pages were found
        sequence.path = [] if own else path
        if own:
            sequence.origin = self.version
        sequence.slot = self._slots.pop()
        self.running.append(sequence)
        self._fresh.append(sequence)

    # ---- pages

    def _growth(self) -> int:
        """Pages that those who run will need soon."""
        soon = ((s, len(s.ids) + s.pending + min(self.reserve, self.budget_left(s))) for s in self.running)
        return sum(max(0, self._pages_for(n) - len(s.pages)) for s, n in soon)

    def _make_room(self, pages: int) -> bool:
        """Whether so many pages are free, after evicting what only the prefix tree holds."""
        lacking = pages - self.pool.num_free
        # At least those that are shared are used: nothing is forgotten, nor looked at, for a room that cannot be made.
        if 0 < lacking <= self.tree.num_pages - self.pool.num_shared:
            self.tree.evict(lacking, self.version)
        return pages <= self.pool.num_free

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's pages away; it waits, and is prefilled again with all it has sampled."""
        assert sequence.pending == 0, "read the step in flight first"
        self._remember(sequence)
        self._leave(sequence)
        bisect.insort(self.waiting, sequence, key=_order)
        self.num_preemptions += 1

    def start_over(self) -> None:
        """Forgets the pool: all running sequences wait, with what was read of them."""
        self.tree.clear()
        for sequence in list(self.running):
            sequence.pending = 0
            if sequence.num_sampled == 0:
                sequence.prompt_done = 1
            self._leave(sequence)
            bisect.insort(self.waiting, sequence, key=_order)
        if self.routes is not None:
            self.routes.lost()

    def restart(self) -> None:
        """Version numbers mean other weights from now on: nothing of before is found, and nobody is known by ids alone."""
        for sequence in list(self.running):
            self.preempt(sequence)
        self.tree.clear()
        for sequence in self.waiting:
            sequence.origin = None

    def _leave(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self._slots.append(sequence.slot)
        self._copies = [pair for pair in self._copies if pair[1] not in sequence.pages]
        self._fresh = [other for other in self._fresh if other is not sequence]
        if self.routes is not None:
            rows = self.routes.first(sequence.pages, min(sequence.routed, len(sequence.ids) - 1))
            sequence.known, sequence.marks, sequence.routed = merged(sequence.known, rows), None, 0
        for page in sequence.pages:
            self.pool.drop(page)
        sequence.pages, sequence.computed, sequence.slot, sequence.private = [], 0, -1, False

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for the sequence's first `num_tokens`; False if there is no room."""
        lacking = self._pages_for(num_tokens) - len(sequence.pages)
        if lacking > 0:
            if not self._make_room(lacking):
                return False
            sequence.pages.extend(self.pool.take() for _ in range(lacking))
        return True

    # ---- the next step

    def schedule(self, max_steps: int, drained: bool) -> Plan | None:
        """The next step of the device; None when there is nothing to do, or none until the step in flight is read.

        Args:
            drained: nothing is in flight. Only then may sequences be preempted, the last in order first.
        """
        self._admit()
        while (plan := self._plan(max_steps)) is None and self.running and drained:
            self.preempt(max(self.running, key=lambda s: s.order))
        return plan

    def _plan(self, max_steps: int) -> Plan | None:
        """None when nobody has anything to do, or someone cannot get the pages for it."""
        ready = sorted((s for s in self.running if self.budget_left(s) > 0), key=lambda s: s.order)
        if any(s.uncomputed > 1 for s in ready):
            # Decoding sequences first, so that no prefill stalls them.
            steps, chunks, budget = 0, [], self.tokens_per_step
            for sequence in sorted(ready, key=lambda s: s.uncomputed > 1):
                if n := min(sequence.uncomputed, budget):
                    chunks.append((sequence, n))
                    budget -= n
        else:
            steps, chunks = self._steps(ready, max_steps), [(sequence, 1) for sequence in ready]
        left = [self.budget_left(sequence) for sequence, _ in chunks]
        ahead = [min(steps, n) if steps else tokens for (_, tokens), n in zip(chunks, left, strict=True)]
        if not chunks or not all(self._grow(s, s.computed + n) for (s, _), n in zip(chunks, ahead, strict=True)):
            return None
        copies, fresh = self._copies, self._fresh
        self._copies, self._fresh = [], []
        return Plan(chunks, steps, left, copies, fresh)

    def _steps(self, ready: list[Sequence], max_steps: int) -> int:
        """Decode steps of one call. While others wait for a slot, it ends as soon as one may be free."""
        left = [self.budget_left(sequence) for sequence in ready]
        if not left:
            return 0
        if not self.waiting:
            return min(max_steps, max(left))
        if any(sequence.may_stop for sequence in ready):
            max_steps = max(1, max_steps // 4)
        return min(max_steps, *left)

    def budget_left(self, sequence: Sequence) -> int:
        """Tokens it may still sample, those in flight counted as sampled."""
        room = self.max_context - len(sequence.ids) - sequence.pending
        return min(sequence.request.params.max_tokens - sequence.num_sampled, room)

    def dispatched(self, plan: Plan) -> None:
        """Brings the books to where the device will be after the plan's step."""
        for (sequence, tokens), left in zip(plan.chunks, plan.left, strict=True):
            prefill = sequence.uncomputed > 1 or sequence.num_sampled == 0
            n = min(plan.steps, left) if plan.steps else tokens
            if plan.steps:
                sequence.pending += n
            elif n == sequence.uncomputed:
                sequence.pending += 1
            sequence.computed += n
            if sequence.prompt_logprobs is not None:
                most = min(sequence.computed + 1, len(sequence.request.prompt_ids))
                sequence.prompt_done = max(sequence.prompt_done, most)
            if prefill:
                sequence.prefilled += tokens  # what the other decode steps compute they have sampled
                if tokens > 1:
                    self._remember(sequence)  # chunk by chunk: whoever waits for it finds it cached

    def read(self, plan: Plan, firsts: list[int], rows: np.ndarray) -> None:
        """Puts the routing of a plan's step, `[T, L, k]` or `[steps, S, L, k]`, beside the pages.

        Args:
            firsts: tokens of each sequence that were computed before.
        """
        assert self.routes is not None
        self.routes.read(rows[: plan.steps] if plan.steps else rows)
        for (sequence, n), first, left in zip(plan.chunks, firsts, plan.left, strict=True):
            sequence.routed = first + (min(plan.steps, left) if plan.steps else n)

    def _remember(self, sequence: Sequence) -> None:
        # Of a fresh one nothing was computed, and a page that was to be copied for it is empty.
        if not sequence.private and sequence not in self._fresh:
            keys = sequence.keys[: sequence.computed]
            self.tree.insert(self.version, sequence.request.adapter, keys, sequence.pages)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Takes a sequence out; its pages stay cached until the room is needed."""
        sequence.finish_reason = reason
        if sequence in self.running:
            # Of its last token the device may or may not have keys.
            sequence.computed = min(sequence.computed, len(sequence.ids) - 1)
            self._remember(sequence)
            self._leave(sequence)
        else:
            self.waiting.remove(sequence)

    def check(self) -> None:
        """Asserts that every page is free, or held by exactly those who say so; the same of slots."""
        held = [0] * self.pool.num_pages
        held[0] = 1
        for sequence in self.running:
            for page in sequence.pages:
                held[page] += 1
        for page in self.tree.held():
            held[page] += 1
        assert held == self.pool.refs, "page books do not reconcile"
        assert self.pool.num_free == sum(1 for refs in held if refs == 0)
        assert sorted([*self._slots, *(s.slot for s in self.running)]) == list(range(self.max_slots))
