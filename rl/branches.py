"""Branches: paths from a root to a leaf, and how much of one another has.

Legend: n tokens, L layers, k experts per token.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Branch:
    """One root-to-leaf path, as one flat aligned stream."""

    ids: np.ndarray
    """int32 [n]"""
    mask: np.ndarray
    """bool [n]: tokens that are trained; the first token of a branch cannot be"""
    routing: np.ndarray | None = None
    """unsigned [n, L, k]: how each token is routed (`models.routes`); of all branches of a step, or of none"""


def sort_branches(branches: Sequence[Branch]) -> list[int]:
    """Their numbers in the order of a pre-order walk: bytes of token and row by turns, prefixes first; big-endian ids sort as
    the ids do."""

    width = next((math.prod(branch.routing.shape[1:]) for branch in branches if branch.routing is not None), 0)
    weights = np.random.default_rng(0).integers(0, 2**63, width, np.uint64) * 2 + 1

    def key(number: int) -> bytes:
        branch = branches[number]
        ids = branch.ids.astype(">u4")
        if branch.routing is None:
            return ids.tobytes()
        rows = branch.routing.reshape(len(ids), -1)
        digests = rows.astype(np.uint64) @ weights  # equal rows stand together; different ones with equal digests share less
        return np.concatenate([ids[:, None].view(np.uint8), digests[:, None].view(np.uint8)], axis=1).tobytes()

    return sorted(range(len(branches)), key=key)


def in_common(a: Branch, b: Branch) -> int:
    """How many tokens both begin with: equal ids, routed alike."""
    n = min(len(a.ids), len(b.ids))
    differ = a.ids[:n] != b.ids[:n]
    if a.routing is not None and b.routing is not None:
        differ = differ | (a.routing[:n] != b.routing[:n]).any(axis=(1, 2))
    return int(differ.argmax()) if differ.any() else n
