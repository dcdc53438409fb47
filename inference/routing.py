"""How tokens were routed, beside the pages that hold their keys: rows in host memory.

Legend: P pages, T tokens, S rows (sequences of a step), L layers, k experts per token.

The store is the page pool as of the last step that was read. What a step does to pages (copies, then rows of its own) is done
here when it is read, in the order of dispatch; so a page has rows where it has keys, and a prefix hit brings them along.

Keys and values depend on how all tokens before them were routed. A sequence that is computed with rows which the loaded weights
would not choose is therefore known by its tokens *and* those rows (`marks`), so that nobody else finds what it computes.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from models.config import ModelConfig
from models.routes import not_recorded, recorded


@dataclass(frozen=True)
class Places:
    """What a step that was not read yet does to pages."""

    page: np.ndarray
    """[T] of an extend, [steps, S] of decode steps; the trash page where nothing is computed"""
    offset: np.ndarray
    """token of the page"""
    copies: list[tuple[int, int]]
    """(source, target), done first, one after the other"""

    def first(self, page: int, n: int) -> int:
        """The first of a page's n tokens that the step writes; n if it writes none."""
        if any(target == page for _, target in self.copies):
            return 0
        return min([n, *self.offset[self.page == page].tolist()])


class Routes:
    """The rows of all pages."""

    def __init__(self, model: ModelConfig, num_pages: int, page_size: int):
        self.model = model
        rows = not_recorded(1, model)
        self.rows = np.zeros((num_pages, page_size, *rows.shape[1:]), rows.dtype)
        """[P, page_size, L, k]"""
        self._coming: deque[Places] = deque()

    def dispatched(self, places: Places) -> None:
        self._coming.append(places)

    def read(self, rows: np.ndarray) -> None:
        """Rows `[T, L, k]` or `[steps, S, L, k]` of the oldest step that was not read."""
        places = self._coming.popleft()
        for source, target in places.copies:
            self.rows[target] = self.rows[source]
        self.rows[places.page, places.offset] = rows

    def lost(self) -> None:
        """The steps that were not read never will be."""
        self._coming.clear()

    def first(self, pages: Sequence[int], n: int) -> np.ndarray:
        """The rows `[n, L, k]` of the first n tokens in these pages."""
        pages = pages[: -(-n // self.rows.shape[1])]
        return self.rows[pages].reshape(-1, *self.rows.shape[2:])[:n]

    def alike(self, known: np.ndarray, page: int, at: int, offsets: range) -> int:
        """Up to which of these offsets a page, which begins with token `at`, was routed as `known` has it. Rows that were not
        read yet do not count; one that is not known agrees with any."""
        start, stop = offsets.start, offsets.stop
        stop = min([stop, *(places.first(page, stop) for places in self._coming)])
        mine = known[at + start : at + max(stop, start)]
        same = ((self.rows[page, start : start + len(mine)] == mine).all(axis=2) | ~recorded(mine)).all(axis=1)
        return stop if same.all() else start + int(same.argmin())


def marks(ids: Sequence[int], known: np.ndarray) -> list[int]:
    """What tokens with such rows are known by: a number for id and row, the id alone where the row says nothing."""
    flat, says = known.tobytes(), [bool(row.any()) for row in recorded(known)]
    width = len(flat) // max(len(known), 1)
    digests = [hash(flat[i * width : (i + 1) * width]) % 2**64 + 2**64 if says[i] else 0 for i in range(len(known))]
    return [int(token) + (digest << 32) for token, digest in zip(ids, digests, strict=False)]


def merged(known: np.ndarray | None, rows: np.ndarray) -> np.ndarray:
    """What is known after these first rows were made."""
    return rows if known is None or len(known) <= len(rows) else np.concatenate([rows, known[len(rows) :]])
