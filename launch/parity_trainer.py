"""The trainer's side of `launch.bench parity`: log-probs of what the engine sampled, in every layout, and gradients."""

from collections.abc import Callable, Sequence
from functools import partial

import jax.numpy as jnp
import numpy as np

from inference.types import Completion
from launch.parity_engine import DEVICES, Case
from models.attention import KEY_BLOCK
from models.routes import not_recorded
from rl.batch import Sample
from rl.forest import QUERY_BLOCK, Layout
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.trainer import Trainer
from sharding.shards import ROWS

PACKED = "engine vs trainer packed"
Gradient = tuple[float, dict[str, np.ndarray]]
"""the loss, and the gradient of each weight"""


def samples_of(case: Case, completions: Sequence[Completion]) -> list[Sample]:
    """The completions as a trainer is given them, with an advantage for each."""
    advantages = np.random.default_rng(0).standard_normal(len(completions))
    samples = []
    for number, c in enumerate(completions):
        n, m = len(c.prompt_ids), len(c.ids)
        sampled = np.repeat(np.array([0, 1], np.float32), (n, m))
        samples.append(
            Sample(
                ids=np.concatenate([np.asarray(c.prompt_ids, np.int32), c.ids]),
                weights=sampled,
                logprobs=np.concatenate([np.zeros(n, np.float32), c.logprobs]),
                advantages=sampled * np.float32(advantages[number]),
                episode=number,
                routing=None if c.routing is None else np.concatenate([c.routing, not_recorded(1, case.model)]),
            )
        )
    return samples


def make_trainer(case: Case, axis: str = "", rows: int = 1, walks: bool = False) -> Trainer:
    """Cold. Its rows hold the longest branch; or, if it walks, almost none, so that all others are walked depth first."""
    sizes, (mesh, rules) = case.sizes, case.mesh(axis)
    longest = -(-(max(shared + own for shared, own in sizes.prompts) + sizes.sampled) // KEY_BLOCK) * KEY_BLOCK
    return Trainer(
        case.model,
        case.placed(mesh, rules),
        layout=Layout(
            rows=rows,
            tokens=QUERY_BLOCK if walks else longest,
            context=longest,
            branches=-(-len(sizes.prompts) // 8) * 8,
            length=sizes.sampled,
            path=longest if walks else 0,
            shards=DEVICES[axis] if axis == "context" else 1,
        ),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        objective=Objective(loss="grpo"),
        dtype=jnp.bfloat16,
        remat="block",
        mesh=mesh,
        rules=rules,
        exact=case.exact,
    )


def read(trainer: Trainer, samples: Sequence[Sample]) -> list[np.ndarray]:
    trainer.warm_up(reading_only=True)
    planned = trainer.plan(samples)
    if trainer.walk is not None:
        assert sum(len(trie.order) for trie in planned.tries) > len(samples) // 2, "most are walked"
    else:
        assert planned.stats.tokens_kept < planned.stats.tokens_in, "rows hold tries"
    return trainer.read(samples)


def gradient(trainer: Trainer, samples: Sequence[Sample]) -> Gradient:
    trainer.warm_up()
    grads, shares = trainer.gradients(samples, trainer.plan(samples), 1.0, "grpo")
    return sum(float(share["loss"]) for share in shares), {name: np.asarray(x, np.float64) for name, x in grads.items()}


def distance(a: Gradient, b: Gradient) -> dict[str, float]:
    """How far losses are from each other, and |a - b| / |b| of all gradients as one vector."""
    norms = [np.sqrt(sum(np.sum(np.square(x)) for x in each)) for each in ([a[1][n] - b[1][n] for n in b[1]], b[1].values())]
    return {"loss": abs(a[0] - b[0]), "gradient": float(norms[0] / norms[1])}


def layouts(case: Case) -> dict[str, Callable[[], Trainer]]:
    """Column -> makes a trainer."""
    make = partial(make_trainer, case)
    made: dict[str, Callable[[], Trainer]] = {PACKED: make, "trainer depth-first": partial(make, walks=True)}
    made |= {f"micro-batch of {rows} rows": partial(make, rows=rows) for rows in case.sizes.rows}
    for axis in case.sizes.trainer_axes:
        if axis != "expert" or case.model.moe is not None:
            rows = DEVICES[axis] if axis in ROWS else 1
            made[f"trainer, {axis} {DEVICES[axis]}"] = partial(make, axis, rows=rows)
    return made
