"""What a step is given: samples; and the arrays that a loss reads of them.

Legend: S branches of a micro-batch, L trained tokens of the longest branch (of routing: layers), k experts per token.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from models.config import ModelConfig
from models.routes import check_rows, not_recorded
from rl.branches import Branch
from rl.forest import Layout
from rl.loss_batch import LossBatch
from rl.routes import RouterConfig


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One branch with what the loss needs; arrays are aligned with `ids`."""

    ids: np.ndarray
    """int32 [n]"""
    weights: np.ndarray
    """float32 [n]: 0 on tokens that are not trained, 1/branches on sampled tokens of several branches"""
    logprobs: np.ndarray
    """float32 [n]: the sampler's, under its sampling distribution; 0 where not sampled"""
    advantages: np.ndarray
    """float32 [n]"""
    episode: int
    """samples with one number are one sequence to the loss: an episode's branches, or those of one call of it"""
    versions: np.ndarray | None = None
    """int32 [n]: weight version that sampled the id; None: the trainer's own"""
    reference_logprobs: np.ndarray | None = None
    """float32 [n]: the frozen reference policy's"""
    values: np.ndarray | None = None
    """float32 [n]: the critic's value of the state in which the token was sampled, before the step"""
    returns: np.ndarray | None = None
    """float32 [n]: what the critic learns"""
    routing: np.ndarray | None = None
    """unsigned [n, L, k]: the sampler's choice of experts, see `models.routes`; None: not recorded, or there are none"""
    pair: int = -1
    """samples with one number are the two of a preference pair"""
    chosen: bool = False
    """the preferred one of its pair"""

    @property
    def trained(self) -> np.ndarray:
        """Places of the trained tokens."""
        return np.nonzero(self.weights > 0)[0]


def on_tokens(sample: Sample, values: np.ndarray) -> np.ndarray:
    """float32 [n], aligned with the ids: what was read of the trained tokens, in order; 0 elsewhere."""
    aligned = np.zeros(len(sample.ids), np.float32)
    aligned[sample.trained] = values
    return aligned


OPTIONAL = {"reference_logp": "reference_logprobs", "old_values": "values", "returns": "returns"}
"""fields of LossBatch that only some losses read -> where a sample has them"""


def branches_of(samples: Sequence[Sample], model: ModelConfig, router: RouterConfig) -> list[Branch]:
    """What is planned: with experts, each branch has rows, which may say "not recorded".

    Raises:
        ValueError: the rows of a sample are not as many as its ids, or cannot be this model's.
    """
    branches = []
    for number, sample in enumerate(samples):
        n, rows = len(sample.ids), None
        if model.moe is not None:
            rows = not_recorded(n, model)
            if router.router_replay == "R3" and sample.routing is not None:
                rows = sample.routing
                check_rows(rows, model, f"sample {number}: routing", least=n, most=n)
        branches.append(Branch(sample.ids, sample.weights > 0, rows))
    return branches


@dataclass(frozen=True)
class Totals:
    """Counts of a whole batch, which the loss divides by."""

    tokens: Mapping[int, float]
    """`Sample.episode` -> sum of its weights"""
    pairs: int

    @staticmethod
    def of(samples: Sequence[Sample]) -> "Totals":
        tokens: dict[int, float] = {}
        for sample in samples:
            tokens[sample.episode] = tokens.get(sample.episode, 0.0) + float(sample.weights.sum())
        return Totals(tokens, len({sample.pair for sample in samples if sample.pair >= 0}))


def loss_batch(
    samples: Sequence[Sample], numbers: Iterable[int], totals: Totals, layout: Layout, step: int, needs: Collection[str]
) -> LossBatch:
    """Arrays of the samples with these numbers, in rows of the fixed shape `[S, L]`.

    Args:
        step: the version that consumes the samples.
        needs: optional fields of LossBatch that the loss reads.

    Raises:
        ValueError: a sample lacks what the loss needs.
    """
    shape = (layout.branches, layout.length)
    fields = ["weights", "sampler_logp", "advantages", *(name for name in OPTIONAL if name in needs)]
    arrays = {name: np.zeros(shape, np.float32) for name in fields}
    lag, sequence_tokens = np.zeros(shape, np.int32), np.zeros(shape[0], np.float32)
    pair, chosen = np.full(shape[0], -1, np.int32), np.zeros(shape[0], bool)
    for row, number in enumerate(numbers):
        sample = samples[number]
        at = sample.trained
        here = slice(0, len(at))
        for name in fields:
            source = {"sampler_logp": "logprobs"}.get(name) or OPTIONAL.get(name) or name
            values = getattr(sample, source)
            if values is None:
                raise ValueError(f"sample {number}: the loss reads {source}, which it does not have; fill them in")
            arrays[name][row, here] = values[at]
        if sample.versions is not None:
            lag[row, here] = step - sample.versions[at]
        sequence_tokens[row] = totals.tokens[sample.episode]
        pair[row], chosen[row] = sample.pair, sample.chosen
    pairs = {"pair": pair, "chosen": chosen, "num_pairs": np.float32(totals.pairs)}
    others: dict[str, Any] = {
        "lag": lag,
        "sequence_tokens": sequence_tokens,
        "num_sequences": np.float32(sum(count > 0 for count in totals.tokens.values())),
        "num_tokens": np.float32(sum(totals.tokens.values())),
        **{name: value for name, value in pairs.items() if name in needs},
    }
    return LossBatch(**arrays, **others)
