"""Tries that are trained depth first, and the planner that says which.

Legend: T tokens of a segment (padded), R reads of a segment, C places of the path buffer.

A trie is cut into segments: chains without a fork inside, each padded to a size of a short table, so that few programs run
all of them. Segments stand in pre-order. Whoever walks them keeps the keys and values of one path: entering a segment writes
its places of the path buffer, which its elder siblings held before.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from models.path import QUERY_BLOCK
from rl.branches import Branch, in_common, sort_branches
from rl.forest import Layout, MicroBatch, PackStats, check_branch, pack
from rl.routes import Routes

SMALL_PREFIX = 8
"""tries are cut where neighbours share less than 1 / SMALL_PREFIX of a row: repeating so little costs less than a walk"""
LEAF_PASSES, INNER_PASSES = 4, 5
"""forward-equivalents of a token, depth first: scored once, then forward and backward; inner ones are entered once more"""


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A chain of a trie. Its reads include the first tokens of its children, whose log-probs are read at its last token."""

    tokens: np.ndarray
    """int32 [n]"""
    start: int
    """position of the first token"""
    parent: int
    """index of the segment above, -1 for none"""
    inner: bool
    """has segments below"""
    read: np.ndarray
    """int32 [r]: place in the segment at which the log-prob of `target` is read"""
    target: np.ndarray
    """int32 [r]"""
    first_entry: int
    """entry of the trie that its first read is; the others follow"""
    size: int
    """T: least size of the table that has room for the tokens, and half of it for the reads"""
    routes: Routes | None = None
    """of its n tokens; of models with experts"""


@dataclass(frozen=True, kw_only=True)
class Trie:
    segments: list[Segment]
    """in pre-order"""
    order: list[int]
    """which of the caller's branches it holds"""
    index: list[np.ndarray]
    """int64 [trained tokens] of each of them: its entries, that is places in the reads of all segments, one after the other"""
    num_tokens: int
    key_sum: int
    """keys that its tokens see, in sum"""

    @property
    def num_entries(self) -> int:
        return self.segments[-1].first_entry + len(self.segments[-1].read)

    @property
    def cost(self) -> int:
        """In tokens' forwards."""
        return sum(s.size * (INNER_PASSES if s.inner else LEAF_PASSES) for s in self.segments)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """What becomes of the branches of a step."""

    micro_batches: list[MicroBatch]
    """rows; `order` counts in the caller's branches"""
    tries: list[Trie]
    """walked depth first"""
    stats: PackStats

    @property
    def routes(self) -> list[Routes]:
        """Of all rows and segments; empty for models without experts."""
        segments = [segment.routes for trie in self.tries for segment in trie.segments]
        return [each for each in (*(micro.forest.routes for micro in self.micro_batches), *segments) if each is not None]

    def routed(self, routes: Iterable[Routes]) -> "Plan":
        """The same with others, in the order of `routes`; without any, as it is."""
        new = iter(routes)
        if not self.routes:
            return self
        micro_batches = [replace(micro, forest=replace(micro.forest, routes=next(new))) for micro in self.micro_batches]
        tries = [
            replace(trie, segments=[replace(segment, routes=next(new)) for segment in trie.segments]) for trie in self.tries
        ]
        return replace(self, micro_batches=micro_batches, tries=tries)


def segment_sizes(layout: Layout) -> tuple[int, ...]:
    """T: from QUERY_BLOCK in steps of 4 times up to a row."""
    sizes = [QUERY_BLOCK]
    while sizes[-1] * 4 <= layout.tokens:
        sizes.append(sizes[-1] * 4)
    return tuple(sizes)


def plan(branches: Sequence[Branch], layout: Layout, row_passes: int) -> Plan:
    """Packs what fits rows; tries that do not are walked where that costs less than repeated prefixes, or no row holds them.

    Args:
        row_passes: forward-equivalents of a token in a row: 3, or 4 where its forward is computed again.

    Raises:
        ValueError: a branch that cannot fit, or whose first token is to be trained.
    """
    for number, branch in enumerate(branches):
        check_branch(number, branch, layout)
    order = sort_branches(branches)
    rows: list[int] = []
    tries: list[Trie] = []
    for run in _runs(branches, order, layout) if layout.path else [order]:
        trie = make_trie(branches, run, layout) if layout.path and not _fits_a_row(branches, run, layout) else None
        if trie is None or not _walk(branches, run, layout, trie.cost, row_passes):
            rows += run
        else:
            tries.append(trie)
    packed, stats = pack([branches[number] for number in rows], layout)
    micro_batches = [MicroBatch(micro.forest, np.asarray(rows)[micro.order]) for micro in packed]
    walked = sum(trie.num_tokens for trie in tries)
    stats = PackStats(
        tokens_in=sum(len(branch.ids) for branch in branches),
        tokens_kept=stats.tokens_kept + walked,
        slots=stats.slots + sum(s.size for trie in tries for s in trie.segments),
        key_sum=stats.key_sum + sum(trie.key_sum for trie in tries),
        reads=stats.reads + sum(trie.num_entries for trie in tries),
    )
    return Plan(micro_batches=micro_batches, tries=tries, stats=stats)


def shared_lengths(branches: Sequence[Branch], order: Sequence[int]) -> list[int]:
    """Of each branch in order: how many tokens it begins with that its predecessor begins with too (0 for the first)."""
    return [0] * min(1, len(order)) + [in_common(branches[before], branches[after]) for before, after in pairwise(order)]


def _runs(branches: Sequence[Branch], order: list[int], layout: Layout) -> list[list[int]]:
    """Neighbours that share much."""
    runs: list[list[int]] = []
    for number, shared in zip(order, shared_lengths(branches, order), strict=True):
        if not runs or shared * SMALL_PREFIX <= layout.tokens:
            runs.append([])
        runs[-1].append(number)
    return runs


def _fits_a_row(branches: Sequence[Branch], run: list[int], layout: Layout) -> bool:
    return _row_tokens(branches, run, layout.path * len(run)) <= layout.tokens


def _row_tokens(branches: Sequence[Branch], run: list[int], row: int) -> int:
    """Tokens of the run in rows of so many, prefixes repeated where a row begins."""
    total = used = 0
    for number, shared in zip(run, shared_lengths(branches, run), strict=True):
        new = len(branches[number].ids) - (shared if used else 0)
        if used + new > row:
            used, new = 0, len(branches[number].ids)
        used += new
        total += new
    return total


def _walk(branches: Sequence[Branch], run: list[int], layout: Layout, cost: int, row_passes: int) -> bool:
    if max(len(branches[number].ids) for number in run) > layout.tokens:
        return True
    return cost < row_passes * _row_tokens(branches, run, layout.tokens)


def make_trie(branches: Sequence[Branch], order: Sequence[int], layout: Layout) -> Trie:
    """The trie of sorted branches, cut into segments."""
    tokens, depth, parent, places = _unrolled(branches, order)
    routes = _routes(branches, order, places, len(tokens))
    trained = np.zeros(len(tokens), bool)
    for number, path in zip(order, places, strict=True):
        trained[path[branches[number].mask]] = True
    children = np.bincount(parent[parent >= 0], minlength=len(tokens))
    sizes = segment_sizes(layout)
    begins = _begins(parent, children, sizes)
    owner = np.searchsorted(begins, np.arange(len(tokens)), side="right") - 1

    read_at = parent[np.nonzero(trained)[0]]
    by_segment = np.argsort(owner[read_at], kind="stable")
    wanted, read_at = np.nonzero(trained)[0][by_segment], read_at[by_segment]
    entry = np.full(len(tokens), -1)
    entry[wanted] = np.arange(len(wanted))
    segments = []
    for number, (begin, end) in enumerate(zip(begins, [*begins[1:], len(tokens)], strict=True)):
        first, last = np.searchsorted(owner[read_at], [number, number + 1])
        fitting = (size for size in sizes if end - begin <= size and last - first <= 2 * size)
        above = parent[begin]
        segments.append(
            Segment(
                tokens=tokens[begin:end],
                start=int(depth[begin]),
                parent=int(owner[above]) if above >= 0 else -1,
                inner=bool(children[end - 1]),
                read=(read_at[first:last] - begin).astype(np.int32),
                target=tokens[wanted[first:last]],
                first_entry=int(first),
                size=next(fitting),
                routes=replace(routes, rows=routes.rows[begin:end], weight=routes.weight[begin:end]) if routes else None,
            )
        )
    index = [entry[path[branches[number].mask]] for number, path in zip(order, places, strict=True)]
    return Trie(segments=segments, order=list(order), index=index, num_tokens=len(tokens), key_sum=int((depth + 1).sum()))


def _unrolled(branches: Sequence[Branch], order: Sequence[int]):
    """tokens, depth and parent (-1: none) of a trie's tokens in pre-order, and the places of each branch's path."""
    tokens: list[int] = []
    depth: list[int] = []
    parent: list[int] = []
    path: list[int] = []
    places = []
    for number, shared in zip(order, shared_lengths(branches, order), strict=True):
        del path[shared:]
        for token in branches[number].ids[shared:].tolist():
            parent.append(path[-1] if path else -1)
            depth.append(len(path))
            path.append(len(tokens))
            tokens.append(token)
        places.append(np.asarray(path))
    return np.asarray(tokens, np.int32), np.asarray(depth), np.asarray(parent), places


def _routes(branches: Sequence[Branch], order: Sequence[int], places: list[np.ndarray], count: int) -> Routes | None:
    """Of all tokens of a trie."""
    if (like := branches[order[0]].routing) is None:
        return None
    routes = Routes.empty((count,), like)
    for number, path in zip(order, places, strict=True):
        routes.rows[path] = branches[number].routing
        routes.weight[path[:-1]] += 1
    return routes


def _begins(parent: np.ndarray, children: np.ndarray, sizes: Sequence[int]) -> list[int]:
    """Where segments begin: after forks and ends, and where a chain has filled its size.

    A long chain is cut into the largest sizes; what is left takes the least that holds it.
    """
    chains = [v for v in range(len(parent)) if v == 0 or parent[v] != v - 1 or children[v - 1] > 1]
    begins = []
    for begin, end in zip(chains, [*chains[1:], len(parent)], strict=True):
        begins += range(begin, end, sizes[-1])
    return begins
