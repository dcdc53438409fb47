"""The one training layout: rows of token tries.

Legend: B rows, T tokens of a row, N query blocks, Q queries of a block, C keys of a block, R reads of a row,
S branches of a batch, L trained tokens of the longest branch.

Branches are sorted, so that a row is a pre-order walk over the tries of its branches: each token whose prefix the branch
before it already had is not repeated. `end[v]` is where the subtree of v ends; u sees v iff v <= u < end[v]; position is
depth; the log-prob of a token is read at its parent. A chain is causal attention, several chains are packing, shared
prefixes are tree training: there is no other layout.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import numpy as np

from models.attention import KEY_BLOCK, Array, ForestBlocks
from rl.branches import Branch, in_common, sort_branches
from rl.routes import Routes

QUERY_BLOCK = 64


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The fixed shape of a micro-batch, so that every step runs one compiled program."""

    rows: int
    """B"""
    tokens: int
    """T; a multiple of 64"""
    context: int
    """C: the longest branch, rounded up to a multiple of 128"""
    branches: int
    """S: the most branches one micro-batch can hold"""
    length: int
    """L: the most trained tokens one branch can have"""
    path: int = 0
    """the longest branch that may be walked depth first (`rl.tries`), a multiple of 128; 0: all stand in rows"""
    shards: int = 1
    """devices that share the tokens of a row: neither a query block nor a read crosses from one to the next"""

    def __post_init__(self) -> None:
        if self.tokens % (QUERY_BLOCK * self.shards):
            raise ValueError(
                f"layout: tokens ({self.tokens}) must be a multiple of {QUERY_BLOCK} x {self.shards} devices on the axis "
                f"'context'; change trainer.tokens_per_row"
            )
        if self.tokens % QUERY_BLOCK or self.context % KEY_BLOCK or self.path % KEY_BLOCK:
            raise ValueError(
                f"layout: tokens ({self.tokens}) must be a multiple of {QUERY_BLOCK}, context ({self.context}) and path "
                f"({self.path}) multiples of {KEY_BLOCK}"
            )

    @property
    def query_blocks(self) -> int:
        """N: four times what full blocks need; siblings near a key block's end fill theirs badly, empty ones are free."""
        return 4 * self.tokens // QUERY_BLOCK

    @property
    def shard(self) -> int:
        """Tokens, and reads, of a device's part of a row."""
        return self.tokens // self.shards


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Forest:
    """One micro-batch on the device."""

    tokens: Array
    """int32 [B, T]"""
    positions: Array
    """int32 [B, T]: depth in the trie"""
    blocks: ForestBlocks
    read: Array
    """int32 [B, R]: row place (the parent) at which the log-prob of `target` is read; R = T"""
    target: Array
    """int32 [B, R]"""
    index: Array
    """int32 [S, L]: place in the flattened [B * R] of each branch's trained tokens"""
    mask: Array
    """bool [S, L]"""
    routes: Routes | None = None
    """of models with experts"""


@dataclass(frozen=True)
class MicroBatch:
    forest: Forest
    """numpy arrays"""
    order: np.ndarray
    """int [number of branches held]: which of the caller's branches stand in the rows 0.. of `index` and `mask`"""


@dataclass(frozen=True, kw_only=True)
class PackStats:
    tokens_in: int
    """tokens of all branches, before sharing"""
    tokens_kept: int
    """tokens in rows"""
    slots: int
    """row places, padding included"""
    key_sum: int = 0
    """keys that the tokens in rows see, in sum"""
    reads: int = 0
    """log-probs that are read, shared ones once"""

    @property
    def compression(self) -> float:
        return self.tokens_in / max(1, self.tokens_kept)


class _Row:
    """A row being filled, branch by branch in sorted order."""

    def __init__(self, layout: Layout, share: bool):
        self.layout, self.share = layout, share
        self.tokens: list[int] = []
        self.depth: list[int] = []
        self.end: list[int] = []
        self.path: list[int] = []
        """row places of the current branch"""
        self.reads: dict[int, int] = {}
        """row place of a trained token -> its entry in `read`"""
        self.read: list[int] = []
        self.target: list[int] = []
        self.branches: list[tuple[int, list[int], int]] = []
        """number, entries in `read`, and the place of the last token"""
        self.routing: list[np.ndarray] = []
        """[new tokens, L, k] of each branch"""
        self.last: Branch | None = None
        self.blocks: list[tuple[int, int, np.ndarray]] = []

    def shared(self, branch: Branch) -> int:
        return in_common(branch, self.last) if self.share and self.last is not None else 0

    def fits(self, branch: Branch) -> bool:
        if len(self.branches) == self.layout.branches:
            return False
        return len(self.tokens) + len(branch.ids) - self.shared(branch) <= self.layout.tokens

    def add(self, number: int, branch: Branch) -> None:
        keep = self.shared(branch)
        place = len(self.tokens)
        for closed in self.path[keep:]:
            self.end[closed] = place
        del self.path[keep:]
        for depth in range(keep, len(branch.ids)):
            self.path.append(len(self.tokens))
            self.tokens.append(int(branch.ids[depth]))
            self.depth.append(depth)
            self.end.append(-1)
        entries = []
        for depth in np.nonzero(branch.mask)[0]:
            at = self.path[depth]
            if at not in self.reads:
                self.reads[at] = len(self.read)
                self.read.append(self.path[depth - 1])
                self.target.append(self.tokens[at])
            entries.append(self.reads[at])
        self.branches.append((number, entries, self.path[-1]))
        if branch.routing is not None:
            self.routing.append(branch.routing[keep:])
        self.last = branch

    def closed(self, branches: Sequence[Branch]) -> list["_Row"]:
        """This row, finished; or two halves of it where a part of it would need too many query blocks or reads."""
        for open_place in self.path:
            self.end[open_place] = len(self.tokens)
        self.blocks = self._blocks()
        layout = self.layout
        blocks = np.bincount([first // layout.shard for first, _, _ in self.blocks], minlength=1)
        reads = np.bincount(np.asarray(self.read, np.int64) // layout.shard, minlength=1)
        if blocks.max() <= layout.query_blocks // layout.shards and reads.max() <= layout.shard:
            return [self]
        numbers = [number for number, _, _ in self.branches]
        assert len(numbers) > 1, "a chain fills its query blocks"
        halves = (_Row(self.layout, self.share), _Row(self.layout, self.share))
        for at, number in enumerate(numbers):
            halves[at >= len(numbers) // 2].add(number, branches[number])
        return [piece for half in halves for piece in half.closed(branches)]

    def go_on(self) -> np.ndarray:
        """float [n]: branches that go on after each token."""
        ends = np.cumsum(np.bincount([last for _, _, last in self.branches], minlength=len(self.tokens)))
        return ends[np.asarray(self.end) - 1] - ends

    def _blocks(self) -> list[tuple[int, int, np.ndarray]]:
        """(first query, one past the last, keys [C]) of each query block: consecutive tokens, as many as their keys allow.

        Keys of one depth block that stand in one key block may belong to several siblings; what a query does not see adds
        exact zeros to its sum.
        """
        T, C = self.layout.tokens, self.layout.context
        depth_block = np.asarray(self.depth, np.int64) // KEY_BLOCK
        end = np.asarray(self.end)
        blocks, first = [], 0
        while first < len(self.tokens):
            ancestors = np.nonzero(end[:first] > first)[0]
            count = np.bincount(depth_block[ancestors], minlength=C // KEY_BLOCK)
            last, shard = first, self.layout.shard
            most = min(first + QUERY_BLOCK, len(self.tokens), (first // shard + 1) * shard)
            while last < most and count[depth_block[last]] < KEY_BLOCK:
                count[depth_block[last]] += 1
                last += 1
            keys = np.full(C, T, np.int32)
            listed = np.concatenate([ancestors, np.arange(first, last)])
            for block in np.nonzero(count)[0]:
                here = listed[depth_block[listed] == block]
                keys[block * KEY_BLOCK : block * KEY_BLOCK + len(here)] = here
            blocks.append((first, last, keys))
            first = last
        return blocks


def check_branch(number: int, branch: Branch, layout: Layout) -> None:
    """Refuses what fits neither a row nor the path buffer."""
    n = len(branch.ids)
    if n == 0 or len(branch.mask) != n:
        raise ValueError(f"branch {number}: ids ({n}) and mask ({len(branch.mask)}) must have one equal, positive length")
    if n > max(min(layout.context, layout.tokens), layout.path):
        raise ValueError(
            f"branch {number}: {n} tokens do not fit context {layout.context} and tokens per row {layout.tokens}; "
            f"raise trainer.tokens_per_row and the context, set trainer.depth_first, or cut the episode"
        )
    if branch.mask[0]:
        raise ValueError(f"branch {number}: its first token has no parent to read a log-prob at; mask[0] must be False")
    if branch.mask.sum() > layout.length:
        raise ValueError(f"branch {number}: {int(branch.mask.sum())} trained tokens exceed the layout's {layout.length}")


def pack(branches: Sequence[Branch], layout: Layout, share: bool = True) -> tuple[list[MicroBatch], PackStats]:
    """Branches -> micro-batches of rows of tries, each branch whole in one row.

    Args:
        share: False repeats every prefix, and packs in the order given: dense packing, for comparison.

    Raises:
        ValueError: a branch that cannot fit, or whose first token is to be trained.
    """
    for number, branch in enumerate(branches):
        check_branch(number, branch, layout)
    order = sort_branches(branches) if share else range(len(branches))
    rows: list[_Row] = []
    for number in order:
        if not rows or not rows[-1].fits(branches[number]):
            rows.append(_Row(layout, share))
        rows[-1].add(number, branches[number])
    rows = [piece for row in rows for piece in row.closed(branches)]
    batches = []
    at = 0
    while at < len(rows):
        taken = rows[at : at + layout.rows]
        while sum(len(row.branches) for row in taken) > layout.branches:
            taken.pop()
        batches.append(_assemble(taken, layout))
        at += len(taken)
    stats = PackStats(
        tokens_in=sum(len(branch.ids) for branch in branches),
        tokens_kept=sum(len(row.tokens) for row in rows),
        slots=len(batches) * layout.rows * layout.tokens,
        key_sum=sum(sum(row.depth) + len(row.depth) for row in rows),
        reads=sum(len(row.read) for row in rows),
    )
    return batches, stats


def _slots(places: Sequence[int], shard: int, room: int) -> np.ndarray:
    """Where things at these row places stand: in order, each in its device's part of `room` slots."""
    device = np.asarray(places, np.int64) // shard
    order = np.argsort(device, kind="stable")
    before = np.empty(len(device), np.int64)
    before[order] = np.arange(len(device)) - np.searchsorted(device[order], device[order])
    return device * room + before


def _assemble(rows: list[_Row], layout: Layout) -> MicroBatch:
    B, T, N, Q, C = layout.rows, layout.tokens, layout.query_blocks, QUERY_BLOCK, layout.context
    tokens, positions = (np.zeros((B, T), np.int32) for _ in range(2))
    read = np.broadcast_to(np.arange(T, dtype=np.int32) // layout.shard * layout.shard, (B, T)).copy()
    target = np.zeros((B, T), np.int32)
    end = np.broadcast_to(np.arange(1, T + 1, dtype=np.int32), (B, T)).copy()  # padding sees itself only
    query, key = np.full((B, N, Q), T, np.int32), np.full((B, N, C), T, np.int32)
    index, mask = np.zeros((layout.branches, layout.length), np.int32), np.zeros((layout.branches, layout.length), bool)
    order: list[int] = []
    for b, row in enumerate(rows):
        n = len(row.tokens)
        tokens[b, :n], positions[b, :n], end[b, :n] = row.tokens, row.depth, row.end
        slots = _slots(row.read, layout.shard, layout.shard)
        read[b, slots], target[b, slots] = row.read, row.target
        numbers = _slots([first for first, _, _ in row.blocks], layout.shard, N // layout.shards)
        for number, (first, last, keys) in zip(numbers, row.blocks, strict=True):
            query[b, number, : last - first] = np.arange(first, last)
            key[b, number] = keys
        for branch, entries, _ in row.branches:
            index[len(order), : len(entries)] = b * T + slots[entries]
            mask[len(order), : len(entries)] = True
            order.append(branch)
    blocks = ForestBlocks(end=end, query=query, key=key)
    forest = Forest(
        tokens=tokens,
        positions=positions,
        blocks=blocks,
        read=read,
        target=target,
        index=index,
        mask=mask,
        routes=_routes(rows, (B, T)),
    )
    return MicroBatch(forest, np.asarray(order))


def _routes(rows: list[_Row], shape: tuple[int, int]) -> Routes | None:
    if not rows[0].routing:
        return None
    routes = Routes.empty(shape, rows[0].routing[0])
    for b, row in enumerate(rows):
        n = len(row.tokens)
        routes.rows[b, :n], routes.weight[b, :n] = np.concatenate(row.routing), row.go_on()
    return routes
