"""Rematerialisation: what each policy saves by the compiler's account, what it costs in FLOPs; gradients keep their bits."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ModelConfig
from models.transformer import REMAT, Definition
from rl.batch import Sample, Totals, loss_batch
from rl.branches import Branch
from rl.forest import Layout, pack
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.programs import Programs
from sharding.mesh import make_mesh
from sharding.reshard import init
from sharding.rules import Rules

MODEL = ModelConfig(
    family="llama", vocab_size=128, model_dim=64, ffn_dim=192, num_layers=8, num_heads=4, num_kv_heads=2, head_dim=16,
    max_positions=1024, tied_head=True,
)  # fmt: skip
LAYOUT = Layout(rows=1, tokens=1024, context=256, branches=4, length=255)


@pytest.mark.slow
def test_policies_trade_memory_for_flops_and_keep_gradients(report: Callable[[str], None]) -> None:
    """bfloat16 products, as in training. The loop over layers is counted once by the compiler, in all alike."""
    mesh, rules, rng = make_mesh({"data": 1}), Rules(), np.random.default_rng(0)
    weights = (np.arange(256) > 0).astype(np.float32)
    samples = [
        Sample(
            ids=rng.integers(0, 128, 256).astype(np.int32), weights=weights, logprobs=-weights, advantages=weights, episode=n
        )
        for n in range(4)
    ]
    [micro], _ = pack([Branch(sample.ids, sample.weights > 0) for sample in samples], LAYOUT)
    temporary, flops, gradients = {}, {}, {}
    for remat in REMAT:
        definition = Definition(MODEL, jnp.bfloat16, stacked=True, remat=remat)
        objectives = {"sft": Objective(loss="sft")}
        programs = Programs(definition, LAYOUT, OptimizerConfig(learning_rate=1), objectives, mesh, rules)
        program: Any = programs.lower("sft", two_passes=False)["sft"].compile()
        temporary[remat] = program.memory_analysis().temp_size_in_bytes
        flops[remat] = program.cost_analysis()["flops"]
        masters = init(definition.weights, jax.random.key(0), jnp.float32, programs.shardings)
        batch = programs.put(loss_batch(samples, micro.order, Totals.of(samples), LAYOUT, 0, set()))
        grads, _ = program(masters, programs.zeros(), programs.put_forest(micro.forest), batch, programs.put(np.float32(1)))
        gradients[remat] = jax.device_get(grads)
    for remat in REMAT:
        report(
            f"remat {remat}: temporaries {temporary[remat] / temporary['none']:.2f} of none's, "
            f"FLOPs {flops[remat] / flops['none']:.3f}"
        )
        for name, want in gradients["none"].items():
            np.testing.assert_array_equal(gradients[remat][name], want, err_msg=f"{remat} {name}")
    assert temporary["block"] < temporary["dots"] < temporary["none"]
    assert temporary["block"] < 0.5 * temporary["none"]
    assert 1.15 < flops["block"] / flops["none"] < 1.4
    assert flops["none"] <= flops["dots"] < flops["block"]
