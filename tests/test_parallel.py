"""Meshes of eight virtual devices: a step equals that of one device, and no device ever holds a whole parameter.

Tolerances: float32, 1e-5 absolute between meshes, where partial sums cross devices.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from launch.hlo import collectives, moved
from models.config import ModelConfig
from models.transformer import Definition
from rl.batch import Sample
from rl.forest import Layout
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.programs import Programs
from rl.trainer import Trainer
from sharding.mesh import make_mesh
from sharding.reshard import init
from sharding.rules import Axes, Rules
from sharding.shards import Shards
from sharding.vocabulary import Head, lookup

pytestmark = pytest.mark.plain_code

V = 90
"""not a multiple of eight devices: the head pads its parts"""
MODEL = ModelConfig(
    family="qwen3", vocab_size=V, model_dim=16, ffn_dim=24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_positions=256,
)  # fmt: skip
FSDP: dict[str, Axes] = {"embed": "fsdp"}
TENSOR: dict[str, Axes] = {"heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "vocab": "tensor"}
LAYOUT_METRICS = ("flops", "tokens_kept", "compression", "padding", "micro_batches")
MESHES: dict[str, tuple[dict[str, int], dict[str, Axes], tuple[str, ...]]] = {
    "fsdp": ({"fsdp": 8}, FSDP, ("grpo",)),
    "context": ({"context": 4}, {}, ("grpo",)),
    "data x tensor x context": ({"data": 2, "tensor": 2, "context": 2}, TENSOR, ("grpo", "dpo")),
    "data x fsdp x tensor": ({"data": 2, "fsdp": 2, "tensor": 2}, FSDP | TENSOR, ("grpo", "gspo")),
    "fsdp x tensor x context": ({"fsdp": 2, "tensor": 2, "context": 2}, {"embed": ("fsdp", "context")} | TENSOR, ("grpo",)),
    "odd rules": ({"fsdp": 2, "tensor": 2}, {"vocab": "fsdp", "ffn": "fsdp", "embed": "tensor"}, ("grpo",)),
}


def trainer(axes: dict[str, int], rules: dict[str, Axes], model: ModelConfig, losses: tuple[str, ...]) -> Trainer:
    mesh, table = make_mesh(axes), Rules(rules)
    definition = Definition(model, jnp.float32, stacked=True)
    masters = init(definition.weights, jax.random.key(0), jnp.float32, table.shardings(mesh, definition.weights))
    parts = axes.get("context", 1)
    rows = 8 if parts == 1 else 2
    layout = Layout(rows=rows, tokens=64 * parts, context=128, branches=16, length=12, shards=parts)
    made = Trainer(
        model,
        masters,
        layout=layout,
        optimizer=OptimizerConfig(learning_rate=1e-2, eps=1e-3),
        objective=Objective(loss=losses[0]),
        others={loss: Objective(loss=loss) for loss in losses[1:]},
        dtype=jnp.float32,
        remat="block",
        mesh=mesh,
        rules=table,
    )
    for loss in losses:
        made.warm_up(loss)
    return made


def batch() -> list[Sample]:
    """Four groups of four episodes with one prompt each."""
    rng = np.random.default_rng(0)
    samples = []
    for _ in range(4):
        prompt = rng.integers(0, V, int(rng.integers(12, 18)))
        for _ in range(4):
            count = int(rng.integers(5, 10))
            n = len(prompt) + count
            weights = np.zeros(n, np.float32)
            weights[len(prompt) :] = 1
            samples.append(
                Sample(
                    ids=np.concatenate([prompt, rng.integers(0, V, count)]).astype(np.int32),
                    weights=weights,
                    logprobs=(weights * (-np.log(V) + 0.3 * rng.standard_normal(n))).astype(np.float32),
                    advantages=(weights * rng.standard_normal()).astype(np.float32),
                    episode=len(samples),
                    reference_logprobs=(weights * (-np.log(V) + 0.3 * rng.standard_normal(n))).astype(np.float32),
                    pair=len(samples) // 2,
                    chosen=len(samples) % 2 == 0,
                )
            )
    return samples


def results(made: Trainer, losses: Sequence[str]) -> dict[str, Any]:
    """Gradients by loss, and metrics and masters after one step of the first one."""
    samples = batch()
    planned = made.plan(samples)
    grads = {loss: jax.device_get(made.gradients(samples, planned, 1.0, loss)[0]) for loss in losses}
    metrics = made.train(samples, loss=losses[0])
    return {"grads": grads, "metrics": metrics, "masters": jax.device_get(made.state.masters)}


@cache
def one_device(tied: bool) -> dict[str, Any]:
    losses = ("grpo",) if tied else ("grpo", "gspo", "dpo")
    return results(trainer({"data": 1}, {}, replace(MODEL, tied_head=tied), losses), losses)


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_equals_one_device(name: str, report: Callable[[str], None]) -> None:
    axes, rules, losses = MESHES[name]
    tied = name == "odd rules"
    got, want = results(trainer(axes, rules, replace(MODEL, tied_head=tied), losses), losses), one_device(tied)
    gap = 0.0
    for loss in losses:
        for weight, gradient in want["grads"][loss].items():
            assert np.abs(gradient).max() > 1e-4
            np.testing.assert_allclose(got["grads"][loss][weight], gradient, rtol=0, atol=1e-5, err_msg=f"{loss} {weight}")
            gap = max(gap, float(np.abs(got["grads"][loss][weight] - gradient).max()))
    for weight, value in want["masters"].items():
        np.testing.assert_allclose(got["masters"][weight], value, rtol=0, atol=1e-5, err_msg=weight)
    for metric, value in want["metrics"].items():
        if not metric.startswith("time/") and metric not in LAYOUT_METRICS:
            assert got["metrics"][metric] == pytest.approx(value, rel=1e-5, abs=1e-5), metric
    report(f"{name} against one device: gradients differ by {gap:.1e} at most")


# ---- what a compiled step holds and moves

LAYERS, D, F, VOCAB = 8, 64, 96, 1152
WIDE = ModelConfig(
    family="qwen3", vocab_size=VOCAB, model_dim=D, ffn_dim=F, num_layers=LAYERS, num_heads=8, num_kv_heads=4, head_dim=8,
    max_positions=256,
)  # fmt: skip
ROWS, TOKENS = 8, 256


def compiled(axes: dict[str, int], rules: dict[str, Axes], remat: str) -> str:
    definition = Definition(WIDE, jnp.bfloat16, stacked=True, remat=remat)
    programs = Programs(
        definition,
        Layout(rows=ROWS, tokens=TOKENS, context=256, branches=16, length=12),
        OptimizerConfig(learning_rate=1e-2),
        {"grpo": Objective(loss="grpo")},
        make_mesh(axes),
        Rules(rules),
    )
    return programs.lower("grpo", two_passes=False)["grpo"].compile().as_text()


@pytest.mark.slow
@pytest.mark.parametrize(("remat", "tensor"), [("block", 1), ("none", 1), ("block", 4)])
def test_no_device_holds_a_whole_parameter(remat: str, tensor: int, report: Callable[[str], None]) -> None:
    """Sizes tell a stack (8 layers) from a slice, the embedding and the head from their parts, and logits from a part of them.

    Gathered are one layer's weights at a time; every gradient leaves its layer through a reduce-scatter.
    """
    fsdp = 8 // tensor
    text = compiled({"fsdp": fsdp, "tensor": tensor}, FSDP | TENSOR, remat)
    found = collectives(text)
    report(f"fsdp {fsdp} tensor {tensor} {remat}: {moved(found)}")
    weights = Definition(WIDE, jnp.bfloat16, stacked=True).weights
    layer = {
        name: weight.shape[1:] for name, weight in weights.items() if name.startswith("blocks.") and weight.size > LAYERS * D
    }
    shapes = {shape for line in text.splitlines() for shape in dims_of(line)}
    for name, weight in weights.items():
        if len(weight.dims) > 1 and weight.size > LAYERS * D:
            assert weight.shape not in shapes, f"{name} is whole somewhere"
            if name in layer:
                kept = tuple(n // (tensor if dim in TENSOR else 1) for n, dim in zip(weight.shape, weight.dims, strict=True))
                assert kept not in shapes, f"all layers of {name} are gathered somewhere"
    # logits: all tokens of a device, or a chunk of them, by all of V
    assert not any(VOCAB in shape and math.prod(shape) >= 128 * VOCAB for shape in shapes)
    gathers = [each for each in found if each.kind == "all-gather" and len(each.shapes[0]) > 1 and each.times == LAYERS]
    largest = max(math.prod(shape) // tensor for shape in layer.values())
    assert gathers and max(math.prod(each.shapes[0]) for each in gathers) == largest
    reduced = [each for each in found if each.kind == "reduce-scatter" and each.times == LAYERS]
    assert len(reduced) == len(layer)
    assert sum(each.bytes for each in reduced) == 4 * sum(math.prod(shape) // tensor for shape in layer.values())


def dims_of(line: str) -> list[tuple[int, ...]]:
    return [tuple(int(n) for n in part.split("]")[0].split(",") if n.isdigit()) for part in line.split("[")[1:]]


@pytest.mark.slow
def test_activations_are_split_with_the_tokens_of_a_row(report: Callable[[str], None]) -> None:
    """Without remat, a row of 4,096 tokens: a device of four needs less than half the memory."""

    def temporary(parts: int) -> int:
        definition = Definition(WIDE, jnp.bfloat16, stacked=True, remat="none")
        layout = Layout(rows=1, tokens=4096, context=256, branches=16, length=12, shards=parts)
        objectives = {"grpo": Objective(loss="grpo")}
        optimizer = OptimizerConfig(learning_rate=1e-2)
        programs = Programs(definition, layout, optimizer, objectives, make_mesh({"context": parts}), Rules())
        return programs.lower("grpo", two_passes=False)["grpo"].compile().memory_analysis().temp_size_in_bytes

    one, four = temporary(1), temporary(4)
    report(f"context 4: {four / 1e6:.0f} MB of temporaries a device, alone {one / 1e6:.0f}")
    assert four < one / 2


# ---- the pieces


def test_lookup_and_head_of_parts() -> None:
    """On fsdp 2 x tensor 2, V odd for the head's parts: what one device computes; and vjp's of both, exactly."""
    mesh = make_mesh({"fsdp": 2, "tensor": 2})
    shards = Shards.of(mesh, Rules({"embed": "fsdp", "vocab": "tensor"}), {})
    rng = np.random.default_rng(0)
    table = rng.integers(-4, 5, (6, 8)).astype(np.float32)
    tokens = rng.integers(0, 6, (4, 5)).astype(np.int32)
    cotangent = rng.integers(-4, 5, (4, 5, 8)).astype(np.float32)
    split = PartitionSpec("tensor", "fsdp")

    def taken(table: Any, tokens: Any) -> Any:
        return shards.run(lambda table, tokens: lookup(shards, table, tokens), (split, shards.spec("B")), shards.spec("B"))(
            table, tokens
        )

    x, transpose = jax.vjp(lambda table: jax.jit(taken)(table, tokens), table)
    np.testing.assert_array_equal(x, table[tokens])
    want = np.zeros_like(table)
    np.add.at(want, tokens, cotangent)
    np.testing.assert_array_equal(transpose(jnp.asarray(cotangent))[0], want)

    def head(table: Any) -> Any:
        def part(table: jax.Array) -> Any:
            mine = Head.of(shards, table, ("vocab", "embed"), jnp.float32)
            assert mine.axes == ("tensor", "fsdp") and mine.weight.shape == (2, 8)
            ids = mine.first + jnp.arange(2)
            return mine.weight, jnp.where(jnp.arange(2) < mine.count, ids, -1)

        return shards.run(part, (split,), PartitionSpec(("tensor", "fsdp")))(table)

    weight, ids = jax.jit(head)(table)
    np.testing.assert_array_equal(ids, [0, 1, 2, -1, 3, 4, 5, -1])
    np.testing.assert_array_equal(np.asarray(weight)[np.asarray(ids) >= 0], table)


def test_rules_that_no_step_can_follow() -> None:
    mesh = make_mesh({"tensor": 2})
    with pytest.raises(ValueError, match="heads are on .'tensor',., kv_heads on ..; .* map both to one axis"):
        Shards.of(mesh, Rules({"heads": "tensor"}), {})
    with pytest.raises(ValueError, match="'layer' is mapped to 'tensor'; .* map it to None"):
        Shards.of(mesh, Rules({"layer": "tensor"}), {})
    for axes in (("expert", "tensor"), ("fsdp", "expert")):
        with pytest.raises(ValueError, match="'experts' is on .*; map it to one axis"):
            Shards.of(make_mesh({"fsdp": 2, "expert": 2, "tensor": 2}), Rules({"experts": axes}), {})
    assert Shards.of(make_mesh({"fsdp": 1, "tensor": 1}), Rules({"heads": "tensor"}), {}) == Shards(
        table=(("heads", ()),), platform="cpu"
    )
