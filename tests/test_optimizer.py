"""AdamW by hand, the learning rate's schedules, and which weights are decayed."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ModelConfig
from models.transformer import describe
from rl.batch import Sample
from rl.forest import Layout
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.trainer import Trainer
from sharding.mesh import make_mesh
from sharding.reshard import init
from sharding.rules import Rules


def test_optimizer_is_clipped_adamw() -> None:
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=4, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.5, clip_norm=1.0)
    optimizer = config.build()
    rng = np.random.default_rng(0)
    x = rng.standard_normal(5)
    params: Any = {"x": jnp.asarray(x, jnp.float32)}
    state = optimizer.init(params)
    m, v = np.zeros(5), np.zeros(5)
    for t in range(1, 8):
        gradient = rng.standard_normal(5) * (3 if t % 2 else 0.1)
        updates: Any
        updates, state = optimizer.update({"x": jnp.asarray(gradient, jnp.float32)}, state, params)
        params = {"x": params["x"] + updates["x"]}
        clipped = gradient * min(1, 1 / np.linalg.norm(gradient))
        m, v = 0.8 * m + 0.2 * clipped, 0.9 * v + 0.1 * clipped**2
        rate = 0.1 * (0.25 + 0.75 * min(1, (t - 1) / 4))
        x = x - rate * ((m / (1 - 0.8**t)) / (np.sqrt(v / (1 - 0.9**t)) + 1e-6) + 0.5 * x)
        np.testing.assert_allclose(params["x"], x, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.05, 0.075, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1]),
        ("linear", [0.05, 0.075, 0.1, 0.08, 0.06, 0.04, 0.02, 0.02, 0.02]),
        (
            "cosine",
            [0.05, 0.075, 0.1, 0.1 * (0.2 + 0.4 * (1 + 2**-0.5)), 0.06, 0.1 * (0.2 + 0.4 * (1 - 2**-0.5)), 0.02, 0.02, 0.02],
        ),
    ],
)
def test_schedules(schedule: Any, rates: list[float]) -> None:
    """Two steps of warm-up, then four from 0.1 to a fifth of it."""
    config = OptimizerConfig(learning_rate=0.1, warmup_steps=2, schedule=schedule, decay_steps=4, final_rate=0.2)
    rate: Any = config.rate()
    np.testing.assert_allclose([rate(step) for step in range(9)], rates, rtol=1e-6)


def test_norms_are_not_decayed() -> None:
    optimizer = OptimizerConfig(learning_rate=0.1, weight_decay=0.5).build()
    params: Any = {name: jnp.ones(3) for name in ("blocks.attn_norm", "norm", "embed")}
    updates: Any
    updates, _ = optimizer.update({name: jnp.zeros(3) for name in params}, optimizer.init(params), params)
    assert [float(updates[name][0]) for name in params] == [0, 0, pytest.approx(-0.05)]


def test_patterns_name_weights() -> None:
    names = ["embed", "blocks.q", "blocks.attn_norm"]
    assert OptimizerConfig(learning_rate=1, frozen=("blocks.*",)).trained(names) == ["embed"]
    assert OptimizerConfig(learning_rate=1).trained(names) == names


def test_a_state_in_the_hosts_memory_changes_no_bit() -> None:
    """Two devices, three steps; between them nothing of the state is on a device."""
    model = ModelConfig(
        family="llama", vocab_size=64, model_dim=32, ffn_dim=64, num_layers=1, num_heads=2, num_kv_heads=2, head_dim=16,
        max_positions=128, tied_head=True,
    )  # fmt: skip
    mesh, rules, rng = make_mesh({"fsdp": 2}, jax.devices()[:2]), Rules({"embed": "fsdp"}), np.random.default_rng(0)
    weights = (np.arange(40) > 9).astype(np.float32)
    samples = [
        Sample(ids=rng.integers(0, 64, 40).astype(np.int32), weights=weights, logprobs=-weights, advantages=weights, episode=n)
        for n in range(4)
    ]
    states = []
    for offload in (False, True):
        trainer = Trainer(
            model,
            init(describe(model), jax.random.key(0), jnp.float32, rules.shardings(mesh, describe(model))),
            layout=Layout(rows=2, tokens=128, context=128, branches=4, length=30),
            optimizer=OptimizerConfig(learning_rate=1e-2, offload=offload),
            objective=Objective(loss="sft"),
            dtype=jnp.bfloat16,
            remat="block",
            mesh=mesh,
            rules=rules,
        )
        trainer.warm_up()
        for _ in range(3):
            trainer.train(samples)
        kinds = {leaf.sharding.memory_kind for leaf in jax.tree.leaves(trainer.state.optimizer)}
        assert kinds == {"pinned_host" if offload else jax.devices()[0].default_memory().kind}
        states.append(jax.device_get(trainer.state))
    jax.tree.map(np.testing.assert_array_equal, *(state.masters for state in states))
    jax.tree.map(np.testing.assert_array_equal, *(state.optimizer for state in states))
