"""Page pool, prefix tree and scheduler, without a device: random use against slow models, and the rules one by one."""

from collections.abc import Sequence as Items
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.pages import PagePool
from inference.prefix import PrefixTree
from inference.scheduler import Plan, Scheduler, Sequence
from inference.types import FinishReason, Request, SamplingParams

SIZE = 4
"""tokens of a page"""


# ---- Pages


@given(st.lists(st.tuples(st.sampled_from(["take", "hold", "drop"]), st.integers(0, 7))), st.integers(2, 8))
def test_pool_against_a_dictionary(actions: list[tuple[str, int]], num_pages: int) -> None:
    pool, held = PagePool(num_pages), dict.fromkeys(range(1, num_pages), 0)
    for action, which in actions:
        used = [page for page in held if held[page]]
        if action == "take" and len(used) < len(held):
            page = pool.take()
            assert page != 0 and held[page] == 0
            held[page] = 1
        elif used and action == "hold":
            pool.hold(used[which % len(used)])
            held[used[which % len(used)]] += 1
        elif used and action == "drop":
            pool.drop(used[which % len(used)])
            held[used[which % len(used)]] -= 1
        assert pool.refs == [1, *held.values()]
        assert pool.num_free == sum(not n for n in held.values())


def test_pool_refuses_what_nobody_holds() -> None:
    pool = PagePool(3)
    for page in (0, 1):
        with pytest.raises(AssertionError):
            pool.drop(page)
    with pytest.raises(AssertionError):
        pool.hold(2)


# ---- Prefix tree


Path = tuple[int, str, tuple[int, ...]]


class SlowTree:
    """(version, adapter, all tokens up to a page's end) -> page, and when it was last used."""

    def __init__(self) -> None:
        self.pages: dict[Path, int] = {}
        self.used: dict[Path, int] = {}
        self.now = 0

    def _paths(self, version: int, adapter: str, ids: Items[int]) -> list[Path]:
        return [(version, adapter, tuple(ids[:end])) for end in range(SIZE, len(ids) + 1, SIZE)]

    def match(self, version: int, adapter: str, ids: Items[int]) -> list[int]:
        self.now += 1
        found = []
        for path in self._paths(version, adapter, ids):
            if path not in self.pages:
                break
            self.used[path] = self.now
            found.append(self.pages[path])
        return found

    def insert(self, version: int, adapter: str, ids: Items[int], pages: Items[int]) -> None:
        self.now += 1
        for path, page in zip(self._paths(version, adapter, ids), pages, strict=False):
            self.pages.setdefault(path, page)
            self.used[path] = self.now

    def evict(self, wanted: int, version: int, users: dict[int, int]) -> list[set[int]]:
        """Forgets up to `wanted` pages; per page, those that could equally well have gone in its place."""
        gone = []
        for _ in range(wanted):
            leaves = [
                path
                for path in self.pages
                if not users.get(self.pages[path]) and not any(self._above(path, other) for other in self.pages)
            ]
            if not leaves:
                break
            first = min((path[0] == version, self.used[path]) for path in leaves)
            worst = [path for path in leaves if (path[0] == version, self.used[path]) == first]
            gone.append({self.pages[path] for path in worst})
            for path in worst[:1]:
                del self.pages[path]
        return gone

    def _above(self, path: Path, other: Path) -> bool:
        return path != other and path[:2] == other[:2] and other[2][: len(path[2])] == path[2]


IDS = st.lists(st.integers(0, 1), max_size=14)
WHOSE = st.tuples(st.integers(0, 2), st.sampled_from(["", "lora"]))
ACTION = st.one_of(
    st.tuples(st.just("use"), WHOSE, IDS),
    st.tuples(st.just("stop using"), st.integers(0, 9)),
    st.tuples(st.just("evict"), st.integers(1, 4), st.integers(0, 2)),
)


@settings(max_examples=300)
@given(st.lists(ACTION, max_size=40))
def test_tree_against_a_dictionary(actions: list[tuple[Any, ...]]) -> None:
    """Use: match a sequence, take pages for the rest of it, insert it, and hold its pages until it stops."""
    pool = PagePool(24)
    tree, slow = PrefixTree(pool, SIZE), SlowTree()
    users: list[list[int]] = []
    for action, *values in actions:
        if action == "use":
            (version, adapter), ids = values
            pages = tree.match(version, adapter, ids)
            assert pages == slow.match(version, adapter, ids)
            lacking = len(ids) // SIZE - len(pages)
            if lacking > pool.num_free:
                for page in pages:
                    pool.drop(page)
                continue
            pages = pages + [pool.take() for _ in range(lacking)]
            tree.insert(version, adapter, ids, pages)
            slow.insert(version, adapter, ids, pages)
            users.append(pages)
        elif action == "stop using" and users:
            for page in users.pop(values[0] % len(users)):
                pool.drop(page)
        elif action == "evict":
            before = {page for page in range(1, 24) if pool.refs[page]}
            counts = {page: sum(page in pages for pages in users) for page in before}
            freed = tree.evict(*values)
            now_free = {page for page in before if not pool.refs[page]}
            expected = slow.evict(values[0], values[1], counts)
            assert freed == len(now_free) == len(expected)
            assert not any(counts[page] for page in now_free), "a page somebody holds was evicted"
            assert sorted(slow.pages.values()) == sorted(tree.held()), "others were evicted than the oldest"
        assert sorted(tree.held()) == sorted(slow.pages.values()) and tree.num_pages == len(slow.pages)
        for page in range(1, 24):
            assert pool.refs[page] == (page in slow.pages.values()) + sum(page in pages for pages in users)
    for pages in users:
        for page in pages:
            pool.drop(page)
    tree.evict(24, 0)
    assert pool.num_free == 23 and tree.num_pages == 0 and tree.held() == []


def fill(tree: PrefixTree, version: int, adapter: str, ids: Items[int]) -> list[int]:
    """Caches `ids` with nobody using its pages."""
    pages = [tree.pool.take() for _ in range(len(ids) // SIZE)]
    tree.insert(version, adapter, ids, pages)
    for page in pages:
        tree.pool.drop(page)
    return pages


def test_version_and_adapter_are_part_of_the_identity() -> None:
    tree = PrefixTree(PagePool(10), SIZE)
    ids = list(range(8))
    pages = fill(tree, 1, "", ids)
    for version, adapter in ((0, ""), (2, ""), (1, "lora")):
        assert tree.match(version, adapter, ids) == []
    assert tree.match(1, "", [*ids, 9]) == pages
    assert tree.match(1, "", ids[:7]) == pages[:1], "whole pages only"
    assert tree.match(1, "", [9, *ids]) == []


def test_eviction_order() -> None:
    """Other versions first, newer ones too; then the least recently used; leaves before parents; never what is held."""
    pool = PagePool(20)
    tree = PrefixTree(pool, SIZE)
    old = fill(tree, 0, "", range(8))
    rare = fill(tree, 1, "", range(10, 18))
    often = fill(tree, 1, "", range(20, 28))
    held = fill(tree, 0, "", range(30, 38))
    newer = fill(tree, 2, "", range(40, 44))
    for page in tree.match(1, "", range(20, 28)):
        pool.drop(page)
    tree.match(0, "", range(30, 34))  # holds the first page only

    def evicted() -> int | None:
        before = set(tree.held())
        tree.evict(1, 1)
        gone = before - set(tree.held())
        return gone.pop() if gone else None

    order = [evicted() for _ in range(9)]
    assert order == [old[1], old[0], held[1], *newer, rare[1], rare[0], often[1], often[0], None]
    assert tree.held() == held[:1]


def test_known_pages_stay_the_known_ones() -> None:
    """Two requests computed the same tokens: the tree keeps the first's page, the second's goes with its user."""
    pool = PagePool(6)
    tree = PrefixTree(pool, SIZE)
    [known] = fill(tree, 0, "", range(4))
    double = [pool.take(), pool.take()]
    tree.insert(0, "", range(8), double)
    assert sorted(tree.held()) == sorted([known, double[1]])
    for page in double:
        pool.drop(page)
    assert pool.num_free == 3


# ---- Scheduler


def asked(name: str, ids: Items[int], max_tokens: int = 4) -> Request:
    return Request(id=name, prompt_ids=tuple(ids), params=SamplingParams(max_tokens=max_tokens))


def scheduler(**sizes: int) -> Scheduler:
    return Scheduler(**({"num_pages": 33, "page_size": SIZE, "max_slots": 4, "max_context": 64, "tokens_per_step": 16} | sizes))


class Device:
    """Carries out plans: every token sampled is 99, and what is cached must have been computed."""

    def __init__(self, books: Scheduler):
        self.books, self.finished, self.tokens = books, [], 0
        self.started: list[str] = []

    def step(self, max_steps: int = 1) -> Plan | None:
        plan = self.books.schedule(max_steps)
        self.books.check()
        if plan is None:
            return None
        total = sum(n for _, n in plan.chunks)
        assert 0 < total <= self.books.tokens_per_step and len(plan.chunks) <= self.books.max_slots
        assert len({s.request.id for s, _ in plan.chunks}) == len(plan.chunks)
        for sequence, n in plan.chunks:
            if sequence.request.id not in self.started:
                self.started.append(sequence.request.id)
            for _ in range(max(1, plan.steps)):
                assert 1 <= n <= sequence.uncomputed
                assert len(sequence.pages) * SIZE >= sequence.computed + n, "tokens without a page"
                self.books.computed(sequence, n)
                self.tokens += n
                if sequence.uncomputed == 0:
                    sequence.ids.append(99)
                    if self.books.budget_left(sequence) == 0:
                        self.books.finish(sequence, FinishReason.LENGTH)
                        self.finished.append(sequence.request.id)
                        break
        self.books.check()
        return plan

    def drain(self, max_steps: int = 1) -> None:
        for _ in range(10_000):
            if not (self.books.running or self.books.waiting):
                return
            self.step(max_steps)
        raise AssertionError("the scheduler does not finish")


REQUEST = st.tuples(st.integers(0, 1), st.integers(1, 40), st.integers(0, 6), st.integers(1, 20), st.integers(0, 8))


@settings(max_examples=200)
@given(
    st.lists(REQUEST, min_size=1, max_size=12),
    st.integers(16, 40),
    st.integers(1, 6),
    st.integers(6, 30),
    st.integers(1, 4),
    st.lists(st.integers(0, 30), max_size=3),
)
def test_everything_finishes_and_pages_reconcile(
    requests: list[tuple[int, int, int, int, int]],
    num_pages: int,
    max_slots: int,
    tokens_per_step: int,
    max_steps: int,
    interrupted: list[int],
) -> None:
    """Small pools, chunks, shared prefixes, retracts: no deadlock, and the youngest is preempted, never the oldest."""
    books = scheduler(num_pages=num_pages, max_slots=max_slots, tokens_per_step=tokens_per_step, max_context=60)
    device = Device(books)
    preempt = books.preempt

    def youngest(sequence: Sequence) -> None:
        assert sequence.arrival == max(s.arrival for s in books.running)
        preempt(sequence)

    for now in range(2000):
        for i, (shared, length, own, max_tokens, at) in enumerate(requests):
            if at == now:
                books.add(asked(str(i), [shared] * length + [10 + i] * own, max_tokens))
        if now in interrupted:
            books.preempt = preempt
            for sequence in list(books.running):
                books.preempt(sequence)
            books.version += 1
            books.check()
        books.preempt = youngest
        device.step(max_steps)
        if len(device.finished) == len(requests):
            break
    assert sorted(device.finished) == sorted(str(i) for i in range(len(requests)))
    assert books.pool.num_free + books.tree.num_pages == num_pages - 1
    books.tree.evict(num_pages, books.version)
    assert books.pool.num_free == num_pages - 1


@pytest.mark.parametrize("length", [31, 32, 33, 34, 48])
@pytest.mark.parametrize("tokens_per_step", [8, 16, 64])
def test_a_group_prefills_its_prompt_once(length: int, tokens_per_step: int) -> None:
    """The first of n requests computes it, the others only what fills no page; whatever the chunks, a last chunk of one
    token included."""
    books = scheduler(max_slots=8, num_pages=200, tokens_per_step=tokens_per_step)
    device = Device(books)
    sequences = [books.add(asked(str(i), range(length), 1)) for i in range(6)]
    device.drain()
    shared = (length - 1) // SIZE * SIZE
    assert [s.cached for s in sequences] == [0] + [shared] * 5
    assert [s.prefilled for s in sequences] == [length] + [length - shared] * 5
    assert device.tokens == length + 5 * (length - shared)


def test_first_come_first_served() -> None:
    """Without shared prefixes requests start in order of arrival, even if a later one would fit."""
    books = scheduler(num_pages=13, max_slots=3)
    device = Device(books)
    for i in range(8):
        books.add(asked(str(i), [i] * (30 if i % 2 == 0 else 3), 4))
    device.drain()
    assert device.started == [str(i) for i in range(8)]


def test_a_large_request_is_not_starved_by_small_ones() -> None:
    books = scheduler(num_pages=13, max_slots=3)
    device = Device(books)
    books.add(asked("first", [1] * 10, 12))
    device.step()
    books.add(asked("large", [2] * 40, 4))
    for i in range(30):
        books.add(asked(f"small {i}", [3, i], 1))
        device.step()
    assert "large" in device.finished
    small = [name for name in device.started if name.startswith("small")]
    assert device.started.index("large") == 1 and small == [f"small {i}" for i in range(len(small))]


def test_preemption_takes_the_youngest_and_it_goes_on() -> None:
    books = scheduler(num_pages=11, max_slots=3)
    device = Device(books)
    oldest, middle, youngest = (books.add(asked(name, [i] * 9, 12)) for i, name in enumerate("abc"))
    while not books.num_preemptions:
        device.step()
    assert books.running == [oldest, middle] and books.waiting == [youngest]
    assert youngest.pages == [] and youngest.computed == 0 and youngest.num_sampled > 0
    late = books.add(asked("d", [7] * 3, 1))
    assert books.waiting == [youngest, late], "it keeps its place in the queue"
    device.drain()
    assert youngest.num_sampled == 12 and youngest.prefilled > 9
    assert device.started == ["a", "b", "c", "d"]


def test_decoding_is_not_stalled_by_a_prefill() -> None:
    books = scheduler(tokens_per_step=8)
    device = Device(books)
    first = books.add(asked("first", [1] * 4, 20))
    device.step()
    books.add(asked("long", range(40), 2))
    for sampled in range(2, 7):
        plan = device.step()
        assert plan is not None and plan.chunks[0] == (first, 1) and plan.chunks[1][1] == 7
        assert first.num_sampled == sampled


def test_requests_that_can_never_run_are_refused() -> None:
    books = scheduler(num_pages=9)
    for request, message in (
        (asked("a", []), "prompt_ids: request 'a' has an empty prompt"),
        (asked("a", range(64)), "prompt_ids: request 'a' has 64 prompt tokens"),
        (asked("a", range(30), 3), "max_tokens: request 'a' may need 9 pages"),
    ):
        with pytest.raises(ValueError, match=message):
            books.add(request)
    assert books.waiting == [] and books.schedule(1) is None
    books.add(asked("a", range(30), 2))


def test_check_finds_a_lost_and_a_doubled_page() -> None:
    books = scheduler()
    books.check()
    page = books.pool.take()
    with pytest.raises(AssertionError, match="do not reconcile"):
        books.check()
    books.pool.drop(page)
    sequence = books.add(asked("a", range(9)))
    books.schedule(1)
    books.check()
    sequence.pages.append(sequence.pages[0])
    with pytest.raises(AssertionError, match="do not reconcile"):
        books.check()
