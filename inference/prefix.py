"""The prefix tree: pages of tokens whose keys and values are in the pool.

A root per (weight version, adapter): an update never flushes anything. Pages of another version are simply never found, and are
the first to go when room is needed.

A token stands in the tree as its id, or, where its routing was given (replayed) and not the router's own, as a number for both.
So an id alone means "routed freely after what stands above", which has one outcome; and no path holds pages that differ.

Full pages are shared. The last page of a path may be filled in part, or a path may part from another inside a page: such a
page is found too, as a tail to be copied.
"""

import bisect
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from inference.pages import PagePool

SHORTEST_TAIL = 4
"""tokens that are worth the copy of a page"""
EVICT_AT_ONCE = 32
"""at least one page in so many goes when one must, so that a full pool does not walk the tree at every step"""


@dataclass(eq=False, slots=True)
class _Node:
    tokens: tuple[int, ...]
    page: int
    parent: "_Node | None"
    children: dict[tuple[int, ...], "_Node"] = field(default_factory=dict)
    """by their tokens"""
    order: list[tuple[int, ...]] = field(default_factory=list)
    """the children's tokens, sorted: those that begin most alike are neighbours"""
    stamp: int = 0

    def add(self, child: "_Node") -> None:
        self.children[child.tokens] = child
        bisect.insort(self.order, child.tokens)

    def remove(self, child: "_Node") -> None:
        del self.children[child.tokens]
        del self.order[bisect.bisect_left(self.order, child.tokens)]

    def nearest(self, tokens: tuple[int, ...]) -> tuple["_Node | None", int]:
        """The child that begins most like `tokens`, and how many tokens are alike."""
        if child := self.children.get(tokens):
            return child, len(tokens)
        at = bisect.bisect_left(self.order, tokens)
        near = ((common(other, tokens), other) for other in self.order[max(at - 1, 0) : at + 1])
        alike, best = max(near, default=(0, ()))
        return self.children.get(best), alike

    def holding(self, tokens: tuple[int, ...]) -> "_Node | None":
        """A child that begins with all of `tokens`."""
        at = bisect.bisect_left(self.order, tokens)
        found = at < len(self.order) and self.order[at][: len(tokens)] == tokens
        return self.children[self.order[at]] if found else None

    def below(self) -> Iterator["_Node"]:
        """Itself and all nodes below."""
        stack: list[_Node] = [self]
        while stack:
            node = stack.pop()
            yield node
            stack.extend(node.children.values())


def common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens the two begin with alike."""
    at, most = 0, min(len(a), len(b))
    while at < most and a[at : at + 64] == b[at : at + 64]:  # fast where they are long and alike
        at += 64
    return next((i for i in range(at, most) if a[i] != b[i]), most)


@dataclass(frozen=True)
class Replayed:
    """What else there is to know of a sequence whose routing is given."""

    ids: Sequence[int]
    """its tokens' ids alone"""
    alike: Callable[[int, int, range], int]
    """(page, at, offsets): up to which offset the page, which begins with token `at`, is known to be routed as is given"""


@dataclass(frozen=True)
class Match:
    """What is cached of a sequence."""

    pages: list[int]
    """full pages, each held once more for the caller"""
    tail: int = 0
    """tokens after them that stand at the beginning of `tail_page`; 0 for none"""
    tail_page: int = 0
    """not held: to be copied before anything else happens to the pool"""
    keys: list[int] = field(default_factory=list)
    """what the tokens of a replayed sequence stand in the tree as"""


class PrefixTree:
    """Token pages -> pool pages. The tree holds each of its pages once; users hold them besides."""

    def __init__(self, pool: PagePool, page_size: int):
        self.pool, self.page_size = pool, page_size
        self._roots: dict[tuple[int, str], _Node] = {}
        self._clock = itertools.count(1)
        self.num_pages = 0

    def match(self, version: int, adapter: str, ids: Sequence[int], replayed: Replayed | None = None) -> Match:
        """The longest cached prefix of `ids`. Tokens that were routed freely, but exactly as replayed, serve as well."""
        node, pages, keys, stamp = self._roots.get((version, adapter)), [], [], next(self._clock)
        while node is not None:
            at = len(pages) * self.page_size
            tokens = tuple(ids[at : at + self.page_size])
            node, alike = node.nearest(tokens) if replayed is None else self._nearest(node, at, tokens, replayed)
            if node is None or alike < min(SHORTEST_TAIL, self.page_size):
                break
            node.stamp = stamp
            if replayed is not None:
                keys.extend(node.tokens[:alike])
            if alike < self.page_size:
                return Match(pages, alike, node.page, keys)
            self.pool.hold(node.page)
            pages.append(node.page)
        return Match(pages, keys=keys)

    def _nearest(self, node: _Node, at: int, tokens: tuple[int, ...], replayed: Replayed) -> tuple[_Node | None, int]:
        """`node.nearest`, where tokens may also stand alone, or some of them: what one request was given, another chose."""
        free = tuple(replayed.ids[at : at + len(tokens)])
        best: tuple[_Node | None, int] = None, 0
        for kinds in ((free, tokens, free), (tokens, free, tokens)):
            path, alike = (), 0
            for kind in kinds:
                child, n = node.nearest((*path, *kind[alike:]))
                if child is not None and kind is free:
                    n = replayed.alike(child.page, at, range(alike, n))
                if child is not None and n > alike:
                    path, alike = child.tokens[:n], n
                    best = max(best, (child, n), key=lambda found: found[1])
            if best[1] == len(tokens):
                break
        return best

    def insert(self, version: int, adapter: str, ids: Sequence[int], pages: Sequence[int]) -> None:
        """Remembers `ids`, which stand in `pages`. What is known already stays where it is known to be."""
        node, stamp = self._roots.setdefault((version, adapter), _Node((), 0, None)), next(self._clock)
        for at, page in zip(range(0, len(ids), self.page_size), pages, strict=False):
            tokens = tuple(ids[at : at + self.page_size])
            node = node.holding(tokens) or self._add(node, tokens, page)
            node.stamp = stamp

    def _add(self, parent: _Node, tokens: tuple[int, ...], page: int) -> _Node:
        """A new page, or one that its owner has filled further. Those that hold less of the same go, unless they are used."""
        self.pool.hold(page)
        self.num_pages += 1
        shorter = (tokens[:n] for n in range(1, len(tokens) if parent.children else 0))
        for other in [parent.children[s] for s in shorter if s in parent.children]:
            if other.page == page or self.pool.refs[other.page] == 1:
                self._drop(other)
        child = _Node(tokens, page, parent)
        parent.add(child)
        return child

    def _drop(self, node: _Node) -> None:
        assert node.parent is not None
        node.parent.remove(node)
        self.pool.drop(node.page)
        self.num_pages -= 1

    def evict(self, wanted: int, version: int) -> int:
        """Frees pages that only the tree holds, `wanted` or some more: leaves, other versions first, then least recently
        used. Returns how many."""
        wanted = max(wanted, self.pool.num_pages // EVICT_AT_ONCE)
        heap: list[tuple[bool, int, int, _Node]] = []
        order = itertools.count()

        def offer(of_version: bool, node: _Node) -> None:
            if not node.children and node.parent is not None and self.pool.refs[node.page] == 1:
                heapq.heappush(heap, (of_version, node.stamp, next(order), node))

        for (of, _), root in self._roots.items():
            for node in root.below():
                offer(of == version, node)
        freed = 0
        while heap and freed < wanted:
            current, _, _, node = heapq.heappop(heap)
            self._drop(node)
            freed += 1
            assert node.parent is not None
            offer(current, node.parent)
        self._roots = {key: root for key, root in self._roots.items() if root.children or key[0] == version}
        return freed

    def clear(self) -> None:
        """Forgets everything, pages in use too: what is in the pool is lost."""
        for page in self.held():
            self.pool.drop(page)
        self._roots, self.num_pages = {}, 0

    def held(self) -> list[int]:
        """Every page the tree holds."""
        return [node.page for root in self._roots.values() for node in root.below() if node.parent is not None]
