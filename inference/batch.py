"""What a step tells the device: numpy arrays of fixed shapes, filled from the sequences that take part.

Legend: T tokens, S rows (sequences of a step), M key blocks, X chunks, N query blocks, Q queries of a block, W key blocks of
the longest sequence.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import jax
import numpy as np

from inference.config import MIN_ROWS, EngineConfig, captures
from inference.routing import Places
from inference.sampler import Warp, empty_warp, warp_row
from inference.sequence import Sequence
from inference.types import MAX_STOP_IDS
from models.attention import KEY_BLOCK, SCORES_PER_CHUNK, Array, Ragged
from models.config import ModelConfig
from models.gather import PagedBlocks, Reads
from models.routes import not_recorded

QUERY_BLOCK = 16
BLOCKS_PER_CHUNK = 32
"""most query blocks of a chunk, and key blocks of one of single queries, if no sequence has more"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Extend:
    tokens: Array
    """int32 [T]; -1 takes the newest token of the row's slot"""
    row: Array
    """int32 [T]"""
    positions: Array
    """int32 [T]"""
    blocks: PagedBlocks
    sampled: Array
    """int32 [S]: the token after which each row samples one"""
    slot: Array
    """int32 [S]: the row's slot; the one after the last for rows that sample nothing"""
    host_token: Array
    """bool [S]: the host knows the row's newest token, so it was not its last"""
    stop_ids: Array
    """int32 [S, MAX_STOP_IDS], padded with -1"""
    warp: Warp
    next_ids: Array
    """int32 [T]: the token after each, for prompt log-probs"""
    prompt_wanted: Array
    """bool [T]"""
    prompt_top: Array
    """bool []"""
    replay: Array | None
    """`[T, L, k]`: experts to use; None for a model without, or where routing is not recorded"""

    @property
    def bucket(self) -> tuple:
        return ("extend", self.tokens.shape[0])

    def places(self, copies: list[tuple[int, int]], page_size: int) -> Places:
        """Which tokens of which pages it computes."""
        return Places(np.asarray(self.blocks.page), np.asarray(self.blocks.offset), copies)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Decode:
    tokens: Array
    """int32 [S]: each row's newest token; -1 takes its slot's"""
    positions: Array
    """int32 [S]: its position"""
    slot: Array
    """int32 [S]; the one after the last for an empty row"""
    table: Array
    """int32 [S, pages]"""
    block_row: Array
    """int32 [M]: the row of each key block"""
    block_number: Array
    """int32 [M]: its place in the row"""
    index: Array
    """int32 [S, W]: the key blocks of each row; M for none"""
    left: Array
    """int32 [S]: tokens it may still sample; 0 for an empty row"""
    stop_ids: Array
    """int32 [S, MAX_STOP_IDS], padded with -1"""
    warp: Warp
    steps: Array
    """int32 []: most steps"""

    @property
    def bucket(self) -> tuple:
        return ("decode", self.tokens.shape[0], self.block_row.shape[0])

    def places(self, copies: list[tuple[int, int]], page_size: int) -> Places:
        """Which tokens of which pages it computes, at most."""
        step = np.arange(int(self.steps), dtype=np.int32)[:, None]
        live = step < np.asarray(self.left)[None]
        at = np.where(live, np.asarray(self.positions)[None] + step, 0)
        page = np.take_along_axis(np.asarray(self.table).T, at // page_size, axis=0)
        return Places(np.where(live, page, 0), at % page_size, copies)

    def reads(self, position_S: jax.Array) -> Reads:
        """As the attention backend wants them."""
        return Reads(
            query=None,
            position=position_S[None, :, None],
            row=self.block_row[None],
            number=self.block_number[None],
            lists=Ragged(self.block_row[None], self.index[None]),
            num_chunks=np.ones((), np.int32),
        )


class Shapes:
    """Makes batches of padding, and fills them."""

    def __init__(self, config: EngineConfig, model: ModelConfig, platform: str):
        self.config, self.model = config, model
        self.captures = captures(model, config)
        self.width = config.max_context // KEY_BLOCK
        scores = SCORES_PER_CHUNK.get(platform, 1 << 27) // 2
        self._chunk = scores // (QUERY_BLOCK * model.num_heads * KEY_BLOCK)

    def rows(self, n: int) -> np.ndarray | None:
        """Rows that record no routing; None where none is captured."""
        return not_recorded(n, self.model) if self.captures else None

    def extend(self, T: int) -> Extend:
        config = self.config
        S = min(T, max(MIN_ROWS, config.max_slots))
        zeros = np.zeros(T, np.int32)
        blocks = PagedBlocks(
            page=zeros.copy(),
            offset=zeros.copy(),
            table=np.zeros((S, config.max_context // config.page_size), np.int32),
            starts=np.zeros(S + 1, np.int32),
            lengths=np.zeros(S, np.int32),
            num_rows=np.zeros(1, np.int32),
            # Decoding sequences apart: a block of queries for one token each would cost 16 times what it needs.
            reads=(self._reads(T, -(-T // QUERY_BLOCK) + S, QUERY_BLOCK, self._chunk), self._reads(T, S, 1, BLOCKS_PER_CHUNK)),
        )
        return Extend(
            tokens=zeros.copy(),
            row=zeros.copy(),
            positions=zeros.copy(),
            blocks=blocks,
            sampled=np.zeros(S, np.int32),
            slot=np.full(S, config.max_slots, np.int32),
            host_token=np.zeros(S, bool),
            stop_ids=np.full((S, MAX_STOP_IDS), -1, np.int32),
            warp=empty_warp(S),
            next_ids=zeros.copy(),
            prompt_wanted=np.zeros(T, bool),
            prompt_top=np.zeros((), bool),
            replay=self.rows(T),
        )

    def _reads(self, T: int, query_blocks: int, Q: int, chunk: int) -> Reads:
        """Room for so many blocks of Q queries, in chunks of so many key blocks, or of what one sequence may have."""
        M = min(max(chunk, self.width), query_blocks * self.width)
        N = min(M, BLOCKS_PER_CHUNK)
        # Two chunks in a row hold more than M key blocks or N query blocks, or the second would not have been begun.
        X = 2 * -(-query_blocks * self.width // M) + 2 * -(-query_blocks // N) + 1
        return Reads(
            query=np.full((X, N, Q), T, np.int32),
            position=np.full((X, N, Q), -1, np.int32),
            row=np.zeros((X, M), np.int32),
            number=np.zeros((X, M), np.int32),
            lists=Ragged(np.full((X, M), N - 1, np.int32), np.full((X, N, self.width), M, np.int32)),
            num_chunks=np.zeros((), np.int32),
        )

    def decode(self, S: int, M: int) -> Decode:
        config = self.config
        return Decode(
            tokens=np.zeros(S, np.int32),
            positions=np.zeros(S, np.int32),
            slot=np.full(S, config.max_slots, np.int32),
            table=np.zeros((S, config.max_context // config.page_size), np.int32),
            block_row=np.full(M, S - 1, np.int32),
            block_number=np.zeros(M, np.int32),
            index=np.full((S, self.width), M, np.int32),
            left=np.zeros(S, np.int32),
            stop_ids=np.full((S, MAX_STOP_IDS), -1, np.int32),
            warp=empty_warp(S),
            steps=np.zeros((), np.int32),
        )

    def fill_extend(self, chunks: Many[tuple[Sequence, int]]) -> Extend:
        """The next n tokens of each sequence; those of whom no token is left uncomputed sample one."""
        total = sum(n for _, n in chunks)
        batch = self.extend(next(T for T in self.config.tokens if total <= T))
        blocks, size, at = batch.blocks, self.config.page_size, 0
        for row, (sequence, n) in enumerate(chunks):
            first, here = sequence.computed, slice(at, at + n)
            positions = np.arange(first, first + n)
            pages = np.asarray(sequence.pages, np.int32)
            batch.row[here], batch.positions[here] = row, positions
            known = sequence.ids[first : first + n]
            batch.tokens[here] = known or -1  # a token that is sampled but not read stands alone
            blocks.page[here], blocks.offset[here] = pages[positions // size], positions % size
            blocks.table[row, : len(pages)] = pages
            blocks.starts[row + 1], blocks.lengths[row] = at + n, first + n
            batch.sampled[row] = at + n - 1
            if sequence.uncomputed == n:
                batch.slot[row], batch.host_token[row] = sequence.slot, bool(known)
                _fill_sampling(batch.warp, batch.stop_ids, row, sequence)
            if batch.replay is not None and sequence.known is not None:
                rows = sequence.known[first : first + n]
                batch.replay[at : at + len(rows)] = rows
            if sequence.wants_prompt:
                after = sequence.request.prompt_ids[first + 1 : first + n + 1]
                batch.next_ids[at : at + len(after)], batch.prompt_wanted[at : at + len(after)] = after, True
                batch.prompt_top[()] |= sequence.request.params.top_logprobs > 0
            at += n
        blocks.starts[len(chunks) + 1 :] = at
        blocks.num_rows[0] = len(chunks)
        blocks_of_queries = list(_query_blocks([(s.computed, n) for s, n in chunks]))
        many, single = blocks.reads
        _fill_reads(many, [block for block in blocks_of_queries if block[3] > 1])
        _fill_reads(single, [block for block in blocks_of_queries if block[3] == 1])
        return batch

    def fill_decode(self, sequences: Many[Sequence], left: Many[int], steps: int) -> Decode:
        """Up to `steps` tokens more of each sequence, but no more than its `left`."""
        S = next(S for S in self.config.slots if len(sequences) <= S)
        counts = [blocks_of(s.computed + min(steps, n)) for s, n in zip(sequences, left, strict=True)]
        batch = self.decode(S, next(M for M in self.config.key_blocks(S) if sum(counts) <= M))
        at = 0
        for row, (sequence, n) in enumerate(zip(sequences, counts, strict=True)):
            batch.tokens[row] = sequence.ids[-1] if sequence.pending == 0 else -1
            batch.positions[row], batch.slot[row], batch.left[row] = sequence.computed, sequence.slot, left[row]
            batch.table[row, : len(sequence.pages)] = sequence.pages
            batch.block_row[at : at + n], batch.block_number[at : at + n] = row, np.arange(n)
            batch.index[row, :n] = np.arange(at, at + n)
            _fill_sampling(batch.warp, batch.stop_ids, row, sequence)
            at += n
        batch.steps[()] = steps
        return batch


def blocks_of(num_tokens: int) -> int:
    return -(-num_tokens // KEY_BLOCK)


def _fill_sampling(warp: Warp, stop_ids: np.ndarray, row: int, sequence: Sequence) -> None:
    params = sequence.request.params
    warp_row(warp, row, params)
    if not params.ignore_eos:
        stop_ids[row, : len(params.stop_ids)] = params.stop_ids


def _query_blocks(spans: Many[tuple[int, int]]) -> Iterator[tuple[int, int, int, int]]:
    """(row, flat place, first position, queries) of each query block of rows with (first position, tokens)."""
    at = 0
    for row, (first, n) in enumerate(spans):
        for start in range(0, n, QUERY_BLOCK):
            yield row, at + start, first + start, min(QUERY_BLOCK, n - start)
        at += n


def _fill_reads(reads: Reads, query_blocks: Many[tuple[int, int, int, int]]) -> None:
    """Puts query blocks with all their key blocks into chunks, first come first served."""
    _, N, _ = reads.position.shape
    M = reads.row.shape[1]
    chunk, block, key = 0, 0, 0
    for row, place, position, n in query_blocks:
        needs = blocks_of(position + n)
        if block == N or key + needs > M:
            chunk, block, key = chunk + 1, 0, 0
        assert reads.query is not None
        reads.query[chunk, block, :n] = np.arange(place, place + n)
        reads.position[chunk, block, :n] = np.arange(position, position + n)
        keys = slice(key, key + needs)
        reads.row[chunk, keys], reads.number[chunk, keys] = row, np.arange(needs)
        reads.lists.owner[chunk, keys] = block
        reads.lists.index[chunk, block, :needs] = np.arange(key, key + needs)
        block, key = block + 1, key + needs
    reads.num_chunks[()] = chunk + (block > 0)
