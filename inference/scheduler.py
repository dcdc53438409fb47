"""Who runs next, and on which pages. Plain Python; it never sees an array of the device.

A sequence is its token ids and how many of them have keys and values in its pages (`computed`). One uncomputed token is a
decode step, several are a prefill; a preempted sequence is simply one with nothing computed.
"""

import itertools
from dataclasses import dataclass, field

from inference.pages import PagePool
from inference.prefix import PrefixTree
from inference.types import FinishReason, Request


@dataclass(eq=False)
class Sequence:
    request: Request
    arrival: int
    ids: list[int]
    """prompt, then what was sampled"""
    computed: int = 0
    pages: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    logprobs_full: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    cached: int | None = None
    """prompt tokens found cached at the first admission"""
    prefilled: int = 0
    private: bool = False
    """its pages hold keys of more than one version (pause mode keep): they never enter the prefix tree"""
    finish_reason: FinishReason | None = None

    @property
    def uncomputed(self) -> int:
        return len(self.ids) - self.computed

    @property
    def num_sampled(self) -> int:
        return len(self.ids) - len(self.request.prompt_ids)


@dataclass(frozen=True)
class Plan:
    """One step of the device."""

    chunks: list[tuple[Sequence, int]]
    """sequences and how many tokens of each are computed"""
    steps: int
    """0: an extend; otherwise at most this many decode steps, one token of each sequence at a time"""


class Scheduler:
    """Admission, chunking, page allocation and preemption.

    Args:
        max_context: most tokens of a sequence.
    """

    def __init__(self, *, num_pages: int, page_size: int, max_slots: int, max_context: int, tokens_per_step: int):
        self.page_size, self.max_slots, self.max_context = page_size, max_slots, max_context
        self.tokens_per_step = tokens_per_step
        self.pool = PagePool(num_pages)
        self.tree = PrefixTree(self.pool, page_size)
        self.version = 0
        self.waiting: list[Sequence] = []
        self.running: list[Sequence] = []
        self.num_preemptions = 0
        self._arrivals = itertools.count()

    def add(self, request: Request) -> Sequence:
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
        sequence = Sequence(request, next(self._arrivals), list(request.prompt_ids))
        self.waiting.append(sequence)
        return sequence

    def _pages_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.page_size)

    def _shared_key(self, sequence: Sequence, page: int) -> tuple[str, tuple[int, ...]]:
        return sequence.request.adapter, tuple(sequence.ids[: (page + 1) * self.page_size])

    def _admit(self) -> None:
        """Moves waiting sequences into free slots, oldest first.

        One whose next page is being prefilled by another waits for that page instead of computing it a second time.
        """
        if not self.waiting or len(self.running) >= self.max_slots:
            return
        size = self.page_size
        pending = {
            self._shared_key(s, page)
            for s in self.running
            if s.uncomputed > 1 and not s.private
            for page in range(s.computed // size, (len(s.ids) - 1) // size)
        }
        held: list[Sequence] = []
        while self.waiting and len(self.running) < self.max_slots:
            sequence = self.waiting.pop(0)
            # The last token is always computed: its logits are what is wanted.
            pages = self.tree.match(self.version, sequence.request.adapter, sequence.ids[:-1])
            lacking = self._pages_for(len(sequence.ids)) - len(pages)
            shared = len(pages) < (len(sequence.ids) - 1) // size and self._shared_key(sequence, len(pages)) in pending
            if shared or not self._make_room(lacking):
                for page in pages:
                    self.pool.drop(page)
                held.append(sequence)
                if not shared:
                    break
                continue
            sequence.pages, sequence.computed = pages, len(pages) * size
            if sequence.cached is None:
                sequence.cached = min(sequence.computed, len(sequence.request.prompt_ids))
            self.running.append(sequence)
            pending |= {self._shared_key(sequence, p) for p in range(len(pages), (len(sequence.ids) - 1) // size)}
        self.waiting = sorted(held + self.waiting, key=lambda s: s.arrival)

    def _make_room(self, pages: int) -> bool:
        """Whether so many pages are free, after evicting what only the prefix tree holds."""
        if pages > self.pool.num_free:
            self.tree.evict(pages - self.pool.num_free, self.version)
        return pages <= self.pool.num_free

    def preempt(self, sequence: Sequence) -> None:
        """Takes a running sequence's pages away; it waits, and is prefilled again with all it has sampled."""
        self._release(sequence)
        self.running.remove(sequence)
        self.waiting = sorted([sequence, *self.waiting], key=lambda s: s.arrival)
        self.num_preemptions += 1

    def _release(self, sequence: Sequence) -> None:
        for page in sequence.pages:
            self.pool.drop(page)
        sequence.pages, sequence.computed, sequence.private = [], 0, False

    def _grow(self, sequence: Sequence, num_tokens: int) -> bool:
        """Pages for the sequence's first `num_tokens`, preempting the youngest others; False if it had to go itself."""
        while sequence in self.running:
            lacking = self._pages_for(num_tokens) - len(sequence.pages)
            if lacking <= 0 or self._make_room(lacking):
                sequence.pages.extend(self.pool.take() for _ in range(max(0, lacking)))
                return True
            self.preempt(max(self.running, key=lambda s: s.arrival))
        return False

    def schedule(self, max_steps: int) -> Plan | None:
        """The next step of the device; None when there is nothing to do."""
        self._admit()
        oldest_first = sorted(self.running, key=lambda s: s.arrival)
        if any(s.uncomputed > 1 for s in oldest_first):
            # Decoding sequences first, so that no prefill stalls them.
            budget, steps = self.tokens_per_step, 0
            chunks: list[tuple[Sequence, int]] = []
            for sequence in sorted(oldest_first, key=lambda s: s.uncomputed > 1):
                n = min(sequence.uncomputed, budget)
                if n and self._grow(sequence, sequence.computed + n):
                    chunks.append((sequence, n))
                    budget -= n
        else:
            steps = max_steps
            chunks = []
            for sequence in oldest_first:
                ahead = min(steps, self.budget_left(sequence))
                if self._grow(sequence, sequence.computed + ahead):
                    chunks.append((sequence, 1))
        chunks = [(sequence, n) for sequence, n in chunks if sequence in self.running]
        return Plan(chunks, steps) if chunks else None

    def budget_left(self, sequence: Sequence) -> int:
        """Tokens it may still sample."""
        return min(sequence.request.params.max_tokens - sequence.num_sampled, self.max_context - len(sequence.ids))

    def computed(self, sequence: Sequence, num_tokens: int) -> None:
        """Records that the next `num_tokens` now have keys and values."""
        was_prefill = sequence.uncomputed > 1 or sequence.num_sampled == 0
        sequence.computed += num_tokens
        if was_prefill:
            sequence.prefilled += num_tokens
            self._remember(sequence)  # chunk by chunk: whoever waits for a page finds those before it cached

    def _remember(self, sequence: Sequence) -> None:
        if not sequence.private:
            ids = sequence.ids[: sequence.computed]
            self.tree.insert(self.version, sequence.request.adapter, ids, sequence.pages)

    def finish(self, sequence: Sequence, reason: FinishReason) -> None:
        """Takes a sequence out; its full pages stay cached until the room is needed."""
        sequence.finish_reason = reason
        if sequence in self.running:
            self._remember(sequence)
            self._release(sequence)
            self.running.remove(sequence)
        else:
            self.waiting.remove(sequence)

    def check(self) -> None:
        """Asserts that every page is free, or held by exactly those who say so."""
        held = [0] * self.pool.num_pages
        held[0] = 1
        for sequence in self.running:
            for page in sequence.pages:
                held[page] += 1
        for page in self.tree.held():
            held[page] += 1
        assert held == self.pool.refs, "page books do not reconcile"
        assert self.pool.num_free == sum(1 for refs in held if refs == 0)
