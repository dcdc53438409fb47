"""Trees of calls and compacted histories in training: shared prefixes are computed once and change no gradient; tiny models
learn as tools, compaction and sub-agents have it."""

from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.types import FinishReason, Request
from models.config import ModelConfig
from models.transformer import Definition
from rl.batch import branches_of
from rl.build import build
from rl.compacting import Tally
from rl.config import RunConfig
from rl.credit import AdvantageConfig, assign
from rl.forest import Layout, pack
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.recursive import Halves
from rl.replay import replay, values_of
from rl.trainer import Trainer
from sharding.mesh import make_mesh
from sharding.reshard import init
from sharding.rules import Rules
from tests.scripted import END, TOKENIZER, Scripted
from tests.test_agents import Nobody, Wandering, numbered, play
from tests.test_loop import finished, lines_of, start

MODEL = ModelConfig(
    family="llama", vocab_size=264, model_dim=32, ffn_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_positions=512, tied_head=True,
)  # fmt: skip


def make_trainer() -> Trainer:
    mesh, rules = make_mesh({"data": 1}), Rules({})
    weights = Definition(MODEL, jnp.float32, stacked=True).weights
    return Trainer(
        MODEL,
        init(weights, jax.random.key(0), jnp.float32, rules.shardings(mesh, weights)),
        layout=Layout(rows=1, tokens=512, context=512, branches=32, length=64),
        optimizer=OptimizerConfig(learning_rate=1e-3),
        objective=Objective(loss="grpo"),
        dtype=jnp.float32,
        remat="block",
        mesh=mesh,
        rules=rules,
    )


def test_the_gradient_is_that_of_unshared_training() -> None:
    """Float32, 1e-5 of the largest entry. Each branch alone in its tokens, with its prefix repeated, against the forest."""
    rng = np.random.default_rng(0)

    def answers(request: Request) -> tuple[list[int], FinishReason]:
        return [*TOKENIZER.encode(str(rng.integers(0, 30))), END], FinishReason.STOP

    dense = {"exact": 1.0, "right": 1.0, "digits": 0.5}
    trainer = make_trainer()
    trainer.warm_up()
    trees = play(Scripted(answers), Halves(9, terms=8, depth=2, weights=dense), tasks=2, samples=3)
    tallies = play(Scripted(answers), Tally(9, numbers=4, turns=2, weights=dense), tasks=2, samples=3)
    forks = play(numbered(), Wandering(3), tasks=2, samples=2, max_turns=400)  # with sampled tokens on several branches
    own, whole, passed = AdvantageConfig(calls="own"), AdvantageConfig(), AdvantageConfig(calls="passed", call_discount=0.5)
    for rollouts, config in ((trees, own), (tallies, whole), (forks, passed)):
        samples, _ = assign(rollouts, config, longest=100, temperature=1.0, policy=Nobody())
        planned = trainer.plan(samples)
        unshared, stats = pack(branches_of(samples, MODEL, trainer.programs.router), trainer.layout, share=False)
        assert planned.stats.compression > 1.25 and stats.compression == 1
        ours, _ = trainer.gradients(samples, planned, 1.0, "grpo")
        theirs, _ = trainer.gradients(samples, replace(planned, micro_batches=unshared), 1.0, "grpo")
        for name, ours_, theirs_ in zip(ours, jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
            a, b = np.asarray(ours_), np.asarray(theirs_)
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5 * np.abs(b).max(), err_msg=str(name))


@pytest.mark.slow
@pytest.mark.parametrize(("config", "calls"), [("tiny_tools", 1), ("tiny_compact", 1), ("tiny_tree", 3)])
def test_tiny_agents_learn(config: str, calls: int, tmp_path: Path) -> None:
    """Reward rises, trainer and sampler agree to the bit, nothing is compiled, and the last step is replayed bit for bit."""
    result = finished(start(tmp_path, config=config))
    assert result["eval_after"] > result["eval_before"] + 0.2
    assert result["reward_last"] > result["reward_first"] + 0.2
    assert result["forest_compression"] > 1.2
    assert result["max_abs_logprob_gap"] == 0 and result["mean_k3"] == 0 and result["compiles_after_warmup"] == 0
    lines = lines_of(tmp_path / config / "metrics.jsonl")
    assert all(line["calls_mean"] == calls for line in lines) and max(line["turns_mean"] for line in lines) > 1.5
    directory = tmp_path / config
    again: RunConfig = build(RunConfig, values_of(directory))
    assert replay(directory, len(lines), again, lambda text: None)["equal"]
