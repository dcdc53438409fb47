"""Page pool and prefix tree, without a device: random use against slow models, and the rules one by one."""

from collections.abc import Sequence as Items
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.pages import PagePool
from inference.prefix import EVICT_AT_ONCE, SHORTEST_TAIL, Match, PrefixTree, common

SIZE = 8
"""tokens of a page"""
NUM_PAGES = 70
"""so that an eviction takes at least two pages"""


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


# ---- The tree against a slow model


def slow_common(a: Items[int], b: Items[int]) -> int:
    return max(n for n in range(min(len(a), len(b)) + 1) if a[:n] == b[:n])


@given(st.lists(st.integers(0, 1), max_size=9), st.lists(st.integers(0, 1), max_size=9), st.integers(0, 300))
def test_common(a: list[int], b: list[int], before: int) -> None:
    alike = list(range(before))
    assert common(alike + a, alike + b) == before + slow_common(a, b)


Root = tuple[int, str]
Tokens = tuple[int, ...]


@dataclass
class Entry:
    """A page that the tree knows."""

    root: Root
    path: Tokens
    """tokens of the full pages before it"""
    tokens: Tokens
    used: tuple[int, int]
    """no earlier and no later than that; where several pages would have done, any may have been used"""


class SlowTree:
    """All entries by page, searched one by one."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.now = 0

    def children(self, root: Root, path: Tokens) -> dict[int, Entry]:
        return {page: entry for page, entry in self.entries.items() if (entry.root, entry.path) == (root, path)}

    def _use(self, pages: Items[int]) -> None:
        for page in pages:
            earliest = self.now if len(pages) == 1 else self.entries[page].used[0]
            self.entries[page].used = earliest, self.now

    def match(self, root: Root, ids: Tokens) -> tuple[list[int], int, list[int]]:
        """Full pages, the length of a tail, and the pages it may be found in."""
        self.now += 1
        found: list[int] = []
        for at in range(0, len(ids), SIZE):
            rest = ids[at : at + SIZE]
            alike = {page: slow_common(e.tokens, rest) for page, e in self.children(root, ids[:at]).items()}
            most = max(alike.values(), default=0)
            if most < SHORTEST_TAIL:
                break
            best = [page for page in alike if alike[page] == most]
            self._use(best)
            if most < SIZE:
                return found, most, best
            found += best
        return found, 0, []

    def insert(self, root: Root, ids: Tokens, pages: Items[int], used: set[int]) -> set[int]:
        """Returns pages that may be forgotten or not: their tokens are covered by a page that was known before."""
        self.now += 1
        covered: set[int] = set()
        for page, at in zip(pages, range(0, len(ids), SIZE), strict=True):
            tokens, here = ids[at : at + SIZE], self.children(root, ids[:at])
            if known := [other for other, e in here.items() if e.tokens[: len(tokens)] == tokens]:
                self._use(known)
                continue
            shorter = {other for other, e in here.items() if tokens[: len(e.tokens)] == e.tokens}
            if page in shorter:
                self.entries[page].tokens = tokens
                covered |= shorter - used
            else:
                for other in shorter - used:
                    del self.entries[other]
                self.entries[page] = Entry(root, ids[:at], tokens, (0, 0))
            self._use([page])
        return covered

    def evictable(self, used: set[int]) -> set[int]:
        """Pages that nobody uses, and none below them."""

        def below(page: int) -> set[int]:
            entry = self.entries[page]
            return {page}.union(*(below(child) for child in self.children(entry.root, entry.path + entry.tokens)))

        return {page for page in self.entries if not below(page) & used}


@dataclass
class User:
    root: Root
    ids: Tokens
    pages: list[int]


class Both:
    """A tree and its model, the users of both, and what stands in the pages."""

    def __init__(self) -> None:
        self.pool = PagePool(NUM_PAGES)
        self.tree, self.slow = PrefixTree(self.pool, SIZE), SlowTree()
        self.users: list[User] = []
        self.contents: dict[int, tuple[Root, Tokens]] = {}

    def in_use(self) -> set[int]:
        return {page for user in self.users for page in user.pages}

    def match(self, root: Root, ids: Tokens) -> Match:
        found, (pages, tail, tails) = self.tree.match(*root, ids), self.slow.match(root, ids)
        assert (found.pages, found.tail) == (pages, tail)
        assert found.tail_page in tails or (tail, found.tail_page) == (0, 0)
        if tail:
            (of, before), start = self.contents[found.tail_page], len(pages) * SIZE
            assert of == root and before[: start + tail] == ids[: start + tail], "the tail is another's"
        for at, page in enumerate(pages, 1):
            assert self.contents[page] == (root, ids[: at * SIZE]), "the page is another's"
        return found

    def use(self, root: Root, ids: Tokens) -> None:
        found = self.match(root, ids)
        user = User(root, (), found.pages)
        self.users.append(user)
        self.grow(user, ids)

    def grow(self, user: User, more: Tokens) -> None:
        ids = user.ids + more
        lacking = -(-len(ids) // SIZE) - len(user.pages)
        if lacking > self.pool.num_free:
            return
        fresh = [self.pool.take() for _ in range(lacking)]
        assert not set(fresh) & set(self.slow.entries), "a page that the tree holds was free"
        user.ids, first = ids, len(user.ids) // SIZE
        user.pages += fresh
        for at in range(first, len(user.pages)):
            self.contents[user.pages[at]] = user.root, ids[: (at + 1) * SIZE]
        self.tree.insert(*user.root, ids, user.pages)
        covered = self.slow.insert(user.root, ids, user.pages, self.in_use())
        for page in covered - set(self.tree.held()):
            del self.slow.entries[page]

    def stop(self, user: User) -> None:
        self.users.remove(user)
        for page in user.pages:
            self.pool.drop(page)

    def evict(self, wanted: int, version: int) -> None:
        candidates, entries = self.slow.evictable(self.in_use()), self.slow.entries
        freed = self.tree.evict(wanted, version)
        gone = entries.keys() - set(self.tree.held())
        assert gone <= candidates, "a page that somebody uses was evicted"
        assert len(gone) == freed == min(max(wanted, NUM_PAGES // EVICT_AT_ONCE), len(candidates))
        for page in gone:
            for kept in candidates - gone:
                ours, theirs = entries[page], entries[kept]
                assert (ours.root[0] == version, ours.used[0]) <= (theirs.root[0] == version, theirs.used[1])
        self.slow.entries = {page: entry for page, entry in entries.items() if page not in gone}

    def clear(self) -> None:
        self.tree.clear()
        self.slow.entries = {}

    def check(self) -> None:
        assert sorted(self.tree.held()) == sorted(self.slow.entries) and self.tree.num_pages == len(self.slow.entries)
        for page in range(1, NUM_PAGES):
            users = sum(page in user.pages for user in self.users)
            assert self.pool.refs[page] == users + (page in self.slow.entries)


IDS = st.lists(st.integers(0, 1), max_size=28).map(tuple)
ROOT = st.tuples(st.integers(0, 2), st.sampled_from(["", "lora"]))
ACTION = st.one_of(
    st.tuples(st.just("use"), ROOT, IDS),
    st.tuples(st.just("use"), st.just((0, "")), IDS),
    st.tuples(st.just("grow"), st.integers(0, 9), IDS),
    st.tuples(st.just("stop"), st.integers(0, 9)),
    st.tuples(st.just("evict"), st.integers(1, 4), st.integers(0, 2)),
    st.just(("clear",)),
)


@settings(max_examples=300)
@given(st.lists(ACTION, min_size=25, max_size=60))
def test_tree_against_a_slow_model(actions: list[tuple[Any, ...]]) -> None:
    both = Both()
    for action, *values in actions:
        if action == "use":
            both.use(*values)
        elif action == "grow" and both.users:
            both.grow(both.users[values[0] % len(both.users)], values[1])
        elif action == "stop" and both.users:
            both.stop(both.users[values[0] % len(both.users)])
        elif action == "evict":
            both.evict(*values)
        elif action == "clear":
            both.clear()
        both.check()
    for user in list(both.users):
        both.stop(user)
    both.evict(NUM_PAGES, 0)
    assert both.pool.num_free == NUM_PAGES - 1 and both.tree.held() == []


# ---- The tree's rules one by one


def fill(tree: PrefixTree, version: int, adapter: str, ids: Items[int]) -> list[int]:
    """Caches `ids` with nobody using its pages."""
    pages = [tree.pool.take() for _ in range(-(-len(ids) // SIZE))]
    tree.insert(version, adapter, ids, pages)
    for page in pages:
        tree.pool.drop(page)
    return pages


def test_full_pages_are_shared_and_tails_found() -> None:
    tree = PrefixTree(PagePool(10), SIZE)
    first, second, third = fill(tree, 0, "", range(21))
    assert tree.match(0, "", range(21)) == Match([first, second], 5, third)
    assert tree.match(0, "", range(30)) == Match([first, second], 5, third), "no more than was inserted"
    assert tree.match(0, "", [*range(20), 9]) == Match([first, second], 4, third)
    assert tree.match(0, "", [*range(19), 9, 9]) == Match([first, second]), "three tokens are not worth a copy"
    assert tree.match(0, "", range(14)) == Match([first], 6, second), "a full page serves as a tail, too"
    assert tree.match(0, "", [*range(13), *[9] * 9]) == Match([first], 5, second)
    assert tree.match(0, "", [9, *range(21)]) == Match([])
    assert tree.match(0, "", []) == Match([])
    assert [tree.pool.refs[page] for page in (first, second, third)] == [7, 5, 1], "a tail is not held"


def test_the_longest_tail_is_found() -> None:
    tree = PrefixTree(PagePool(10), SIZE)
    ends = [fill(tree, 0, "", [*range(n), *range(90, 98 - n)])[0] for n in (4, 7, 6, 5)]
    assert tree.match(0, "", range(8)) == Match([], 7, ends[1])


@pytest.mark.parametrize("size", [1, 2, 4])
def test_small_pages_are_shared_whole(size: int) -> None:
    """A tail of a page that is no longer than SHORTEST_TAIL is never worth a copy."""
    tree = PrefixTree(PagePool(10), size)
    pages = [tree.pool.take() for _ in range(2)]
    tree.insert(0, "", range(2 * size), pages)
    assert tree.match(0, "", [*range(2 * size), 9]) == Match(pages)
    assert tree.match(0, "", range(2 * size - 1)) == Match(pages[:1])


def test_version_and_adapter_are_part_of_the_identity() -> None:
    tree = PrefixTree(PagePool(20), SIZE)
    ids = range(20)
    pages = fill(tree, 1, "", ids)
    for version, adapter in ((0, ""), (2, ""), (1, "lora")):
        assert tree.match(version, adapter, ids) == Match([])
    others = fill(tree, 1, "lora", ids)
    assert not set(pages) & set(others), "two adapters with one prompt share nothing"
    assert tree.match(1, "", ids) == Match(pages[:2], 4, pages[2])
    assert tree.match(1, "lora", ids) == Match(others[:2], 4, others[2])


def test_an_owner_fills_its_page_further() -> None:
    """Chunk by chunk the same page holds more; it is in the tree once."""
    pool = PagePool(10)
    tree = PrefixTree(pool, SIZE)
    page = pool.take()
    for n in (3, 5, 8):
        tree.insert(0, "", range(n), [page])
        assert tree.held() == [page] and pool.refs[page] == 2
    assert tree.match(0, "", range(8)).pages == [page]
    tree.insert(0, "", range(6), [pool.take()])
    assert tree.held() == [page], "what is known already stays where it is"


def test_a_covered_page_is_dropped_unless_it_is_used() -> None:
    pool = PagePool(10)
    tree = PrefixTree(pool, SIZE)
    [unused], [other] = fill(tree, 0, "", range(5)), fill(tree, 0, "", [0, 1, 9, 9, 9])
    used = pool.take()
    tree.insert(0, "", range(6), [used])
    assert sorted(tree.held()) == sorted([other, used]) and pool.refs[unused] == 0
    longer = pool.take()
    tree.insert(0, "", range(7), [longer])
    assert sorted(tree.held()) == sorted([other, used, longer]), "its owner may fill it further"
    tree.insert(0, "", [*range(6), 9, 9], [used])
    assert tree.match(0, "", [*range(6), 9, 9]).pages == [used]


def test_known_pages_stay_the_known_ones() -> None:
    """Two requests computed the same tokens: the tree keeps the first's page, the second's goes with its user."""
    pool = PagePool(6)
    tree = PrefixTree(pool, SIZE)
    [known] = fill(tree, 0, "", range(8))
    double = [pool.take(), pool.take()]
    tree.insert(0, "", range(16), double)
    assert sorted(tree.held()) == sorted([known, double[1]])
    for page in double:
        pool.drop(page)
    assert pool.num_free == 3


def test_eviction_order() -> None:
    """Other versions first, newer ones too; then the least recently used; leaves before parents; never what is held."""
    pool = PagePool(20)
    tree = PrefixTree(pool, SIZE)
    old = fill(tree, 0, "", range(12))
    often = fill(tree, 1, "lora", range(40, 53))
    again = fill(tree, 1, "", range(90, 94))
    rare = fill(tree, 1, "", range(20, 36))
    held = fill(tree, 0, "", range(60, 76))
    newer = fill(tree, 2, "", range(80, 88))
    for page in tree.match(1, "lora", range(40, 53)).pages:
        pool.drop(page)
    tree.insert(1, "", range(90, 94), [0])  # known already
    assert tree.match(0, "", range(60, 68)).pages == held[:1]  # and holds it

    def evicted() -> int | None:
        before = set(tree.held())
        tree.evict(1, 1)
        gone = before - set(tree.held())
        return gone.pop() if gone else None

    order = [evicted() for _ in range(10)]
    assert order == [old[1], old[0], held[1], *newer, rare[1], rare[0], often[1], often[0], *again, None]
    assert tree.held() == held[:1]


def test_eviction_takes_more_than_is_asked() -> None:
    """A share of the pool at once, so that a full pool does not walk the tree at every step."""
    pool = PagePool(3 * EVICT_AT_ONCE)
    tree = PrefixTree(pool, SIZE)
    for i in range(20):
        fill(tree, 0, "", [i] * 5)
    assert tree.evict(1, 0) == 3 and tree.evict(5, 0) == 5 and tree.num_pages == 12


def test_clear_forgets_pages_in_use_too() -> None:
    pool = PagePool(10)
    tree = PrefixTree(pool, SIZE)
    fill(tree, 0, "", range(20))
    users = tree.match(0, "", range(20)).pages
    tree.clear()
    assert tree.held() == [] and tree.num_pages == 0 and pool.num_free == 9 - len(users)
    assert tree.match(0, "", range(20)) == Match([])
    for page in users:
        pool.drop(page)
    assert pool.num_free == 9
