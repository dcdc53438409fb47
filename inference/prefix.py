"""The prefix tree: full pages of tokens whose keys and values are in the pool.

A root per (weight version, adapter): cached state has no other identity, so an update never flushes anything. Pages of
another version are simply never found, and are the first to go when room is needed.
"""

import heapq
import itertools
from collections.abc import Sequence

from inference.pages import PagePool


class _Node:
    __slots__ = ("children", "page", "parent", "stamp", "tokens")

    def __init__(self, tokens: tuple[int, ...], page: int, parent: "_Node | None"):
        self.tokens, self.page, self.parent = tokens, page, parent
        self.children: dict[tuple[int, ...], _Node] = {}
        self.stamp = 0


class PrefixTree:
    """Token pages -> pool pages. The tree holds each of its pages once; users hold them besides."""

    def __init__(self, pool: PagePool, page_size: int):
        self.pool, self.page_size = pool, page_size
        self._roots: dict[tuple[int, str], _Node] = {}
        self._clock = itertools.count(1)
        self.num_pages = 0

    def _pages(self, ids: Sequence[int]):
        size = self.page_size
        return (tuple(ids[at : at + size]) for at in range(0, len(ids) - size + 1, size))

    def match(self, version: int, adapter: str, ids: Sequence[int]) -> list[int]:
        """Pages of the longest cached prefix of `ids`, each now held once more for the caller."""
        node, found, stamp = self._roots.get((version, adapter)), [], next(self._clock)
        for tokens in self._pages(ids):
            node = node.children.get(tokens) if node is not None else None
            if node is None:
                break
            node.stamp = stamp
            self.pool.hold(node.page)
            found.append(node.page)
        return found

    def insert(self, version: int, adapter: str, ids: Sequence[int], pages: Sequence[int]) -> None:
        """Remembers full pages of `ids`, which stand in `pages`. Pages that are known already stay the known ones."""
        node = self._roots.setdefault((version, adapter), _Node((), 0, None))
        stamp = next(self._clock)
        for tokens, page in zip(self._pages(ids), pages, strict=False):
            child = node.children.get(tokens)
            if child is None:
                child = node.children[tokens] = _Node(tokens, page, node)
                self.pool.hold(page)
                self.num_pages += 1
            child.stamp = stamp
            node = child

    def evict(self, wanted: int, version: int) -> int:
        """Frees up to `wanted` pages that only the tree holds: leaves, other versions first, then least recently used."""
        heap: list[tuple[bool, int, int, _Node]] = []
        order = itertools.count()
        for (of, _), root in self._roots.items():
            stack = [root]
            while stack:
                node = stack.pop()
                stack.extend(node.children.values())
                if not node.children and node.parent is not None and self.pool.refs[node.page] == 1:
                    heap.append((of == version, node.stamp, next(order), node))
        heapq.heapify(heap)
        freed = 0
        while heap and freed < wanted:
            current, _, _, node = heapq.heappop(heap)
            self.pool.drop(node.page)
            self.num_pages -= 1
            freed += 1
            parent = node.parent
            assert parent is not None
            del parent.children[node.tokens]
            if not parent.children and parent.parent is not None and self.pool.refs[parent.page] == 1:
                heapq.heappush(heap, (current, parent.stamp, next(order), parent))
        self._roots = {key: root for key, root in self._roots.items() if root.children or key[0] == version}
        return freed

    def held(self) -> list[int]:
        """Every page the tree holds."""
        stack, pages = list(self._roots.values()), []
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            if node.parent is not None:
                pages.append(node.page)
        return pages
