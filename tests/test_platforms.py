"""What `launch.bench kv` and `launch.bench aot` say about hardware that is not here."""

import argparse
import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

from launch.aot import aot
from launch.hlo import collectives, moved, product_flops
from launch.platforms import SHAPES, kv, model_shape
from models.transformer import describe
from sharding.mesh import make_mesh

ROOT = Path(__file__).parent.parent
PRESET = str(ROOT / "configs/qwen3_8b_v6e8.py")
SMALL = (
    "--config.engine.tokens_per_step=512",
    "--config.engine.max_slots=64",
    "--config.engine.slot_buckets=(64,)",
    "--config.engine.max_context=4096",
    "--config.engine.context_buckets=(4096,)",
)
"""one extend of 512 tokens, one decode of 64 rows of 4096 tokens"""


def arguments(**changes: Any) -> argparse.Namespace:
    given = {"model": "llama-3-8b", "config": "", "batch": 64, "context": 32768, "overrides": []}
    return argparse.Namespace(**given | changes)


@pytest.mark.parametrize(
    ("model", "gib"), [("llama-3-8b", 256), ("meta-llama/Llama-3-8B", 256), ("llama-3-70b", 640), ("Qwen/Qwen3-8B", 288)]
)
def test_kv_of_known_models(model: str, gib: int) -> None:
    """2 x layers x kv heads x head dim x 2 bytes x 64 x 32768, by hand: 8B has 32 layers, 70B 80, Qwen3-8B 36; all 8 x 128."""
    result = kv(arguments(model=model))
    assert (result["bytes"], result["amount"]) == (gib * 2**30, f"{gib} GiB")
    assert result["bytes_per_token"] * 64 * 32768 == result["bytes"]


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("llama-3-8b", 8_030_261_248),
        ("llama-3-70b", 70_553_706_496),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("qwen3-30b-a3b", 30_532_122_624),
    ],
)
def test_known_shapes_have_the_published_number_of_parameters(name: str, parameters: int) -> None:
    assert sum(weight.size for weight in describe(SHAPES[name]).values()) == parameters


def test_kv_of_a_directory() -> None:
    directory = ROOT / "tests/golden/tiny_qwen3"
    shape = json.loads((directory / "config.json").read_text())
    each = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * shape["head_dim"] * 2
    assert kv(arguments(model=str(directory)))["bytes_per_token"] == each


def test_kv_of_a_config_plans_its_engine() -> None:
    """By hand: 18 KiB a token and chip x 32 x 8192 pages; 31 x 256 of the 8191 pages that are not trash."""
    result = kv(arguments(config=PRESET, batch=1, context=1))
    assert (result["bytes"], result["dtype"]) == (147456, "bfloat16")
    assert result["engine"]["token_bytes"] == 147456 / 8
    assert "+ pages 4.5 GiB +" in result["engine"]["summary"]
    assert result["engine"]["summary"].splitlines()[-1] == "longest sequence: 8,192 tokens; 31 of max_context (8,192) at once"
    smaller = kv(arguments(config=PRESET, overrides=["--config.engine.num_pages=4096", "--config.model.dtype=float32"]))
    assert smaller["engine"]["num_pages"] == 4096
    assert smaller["engine"]["token_bytes"] == 147456 / 8 * 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch": 0}, "--batch: must be at least 1"),
        ({"context": -1}, "--context: must be at least 1"),
        ({"model": "llama-9"}, "'llama-9' is neither"),
        ({"overrides": ["--config.engine.num_pages=1"]}, "overrides need --config"),
        ({"config": PRESET, "overrides": ["--config.engine.mesh={'tensor': 3}"]}, "which 3 devices on 'tensor' do not divide"),
    ],
    ids=str,
)
def test_kv_refuses(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        kv(arguments(**changes))


def test_random_models_have_the_shape_that_the_config_gives() -> None:
    assert model_shape("random", asdict(SHAPES["qwen3-8b"])) == SHAPES["qwen3-8b"]


def test_aot_needs_the_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"needs libtpu.*install -c constraints\.txt -e '\.\[tpu\]'"):
        aot(arguments(config=PRESET, topology="v5e:2x4", tensor=8, train=False))


def test_collectives_are_read_with_their_loops_and_groups() -> None:
    """A scan of 5 steps, each with a gather over 4 devices; and a reduce-scatter, whose operand counts."""
    mesh = make_mesh({"fsdp": 4})

    def here(x: jax.Array) -> jax.Array:
        def body(total: jax.Array, _: None) -> tuple[jax.Array, None]:
            whole = jax.lax.all_gather(jnp.sin(total), "fsdp", axis=0, tiled=True)
            return jax.lax.psum_scatter(whole @ whole.T, "fsdp", scatter_dimension=0, tiled=True)[:, :16], None

        return jax.lax.scan(body, x, None, length=5)[0]

    split = PartitionSpec("fsdp")
    function = jax.jit(jax.shard_map(here, mesh=mesh, in_specs=split, out_specs=split, check_vma=False))
    traced = function.trace(jax.ShapeDtypeStruct((32, 16), jnp.float32))
    text: Any = traced.lower().compile().as_text()
    found = moved(collectives(text))
    assert found == {
        "all-gather": {"count": 5, "bytes": 5 * 32 * 16 * 4},
        "reduce-scatter": {"count": 5, "bytes": 5 * 32 * 32 * 4},
    }
    assert product_flops(traced.jaxpr) == 5 * 2 * 32 * 32 * 16
    with pytest.raises(ValueError, match=r"no ENTRY computation; .* compiled\.as_text"):
        collectives("")


# With the TPU's compiler. A process of its own: jax must not have looked for devices before.


def compile_for(topology: str, tensor: int, *overrides: str, preset: str = PRESET) -> subprocess.CompletedProcess[str]:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the tpu extra is not installed")
    command = [sys.executable, "-m", "launch.bench", "aot", "--config", preset, "--topology", topology, "--tensor", str(tensor)]
    return subprocess.run([*command, "--json", *SMALL, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=900)


@pytest.mark.tpu
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "tensor", "layers", "hbm"),
    [("v5e:2x4", 8, 36, 16 * 10**9), ("v5p:2x2x1", 4, 2, 95 * 10**9)],
    ids=["v5e-8", "v5p-4"],
)
def test_qwen3_8b_compiles_for_tpus(topology: str, tensor: int, layers: int, hbm: int, report: Callable[[str], None]) -> None:
    """The real engine's programs: with jax's kernel, in place, with two sums a layer over the chips."""
    shape = asdict(replace(SHAPES["qwen3-8b"], num_layers=layers))
    overrides = ["--config.model.source=random", f"--config.model.shape={shape}"] if layers != 36 else []
    done = compile_for(topology, tensor, *overrides)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["attention"] == "ragged"
    for kind, program in result["programs"].items():
        size, found = program["bytes"], program["collectives"]
        report(f"{topology} {kind} {program['sizes']}: {program['total']}, {program['flops']:.3g} FLOPs, {found}")
        assert size["arguments"] == pytest.approx(result["plan"]["total_bytes"], rel=0.01)
        assert size["total"] < hbm
        # The state is donated: nothing of its size is made besides.
        assert -size["reused"] >= result["plan"]["total_bytes"] - result["plan"]["weight_bytes"]
        assert size["temporary"] < 2**29
        # besides, those of embedding, logits and sampler, as often as their loops run
        assert 2 * layers <= found["all-reduce"]["count"] <= 2 * layers + 40
    matrices = 2 * 4096 * (12288 * 3 + 4096 * 2 + 1024 * 2) * layers / tensor
    assert result["programs"]["extend"]["flops"] > 512 * matrices
    assert result["programs"]["decode"]["flops"] > 64 * matrices


TRAIN = str(ROOT / "configs/qwen3_8b_v5p16.py")
WEIGHTS = 8_190_735_360 - 2 * 151936 * 4096 - 36 * (2 * 4096 + 2 * 128) - 4096
"""of the layers of Qwen3-8B, without their norms, which are on every chip"""


def compile_step(topology: str, *overrides: str, preset: str = TRAIN) -> dict[str, Any]:
    if importlib.util.find_spec("libtpu") is None:
        pytest.skip("the tpu extra is not installed")
    command = [sys.executable, "-m", "launch.bench", "aot", "--train", "--config", preset, "--topology", topology, "--json"]
    done = subprocess.run([*command, *overrides], cwd=ROOT, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stderr[-2000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.tpu
@pytest.mark.slow
def test_the_training_step_of_qwen3_8b_fits_v5p(report: Callable[[str], None]) -> None:
    """fsdp 16, a row of 8,192 tokens a chip: HBM, and weights gathered twice in 16 bits, gradients reduced once in 32."""
    result = compile_step("v5p:2x2x4")
    step, found = result["programs"]["gradients"], result["programs"]["gradients"]["collectives"]
    temporary, products = step["bytes"]["temporary"], step["product_flops"] / step["model_flops"]
    report(
        f"v5p:2x2x4 train, remat {result['remat']}: {result['hbm_bytes'] / 1e9:.1f} GB a chip, of which temporary "
        f"{temporary / 1e9:.1f}; products {step['product_flops']:.3g} FLOPs, {products:.2f} of 6N; {found}"
    )
    assert result["parameters"] == 8_190_735_360 and result["hbm_bytes"] < 95e9
    assert temporary < 30e9 and 1.2 < products < 4 / 3
    assert 4 * WEIGHTS <= found["all-gather"]["bytes"] < 4.5 * WEIGHTS
    # this compiler makes a sum and a slice of a reduce-scatter over these 16 chips
    reduced = found.get("reduce-scatter", found["all-reduce"])["bytes"]
    assert 4 * WEIGHTS <= reduced < 4.5 * WEIGHTS
    # the state is donated
    assert -result["programs"]["update"]["bytes"]["reused"] >= 12 * result["parameters"] // 16


@pytest.mark.tpu
@pytest.mark.slow
def test_gradients_are_reduced_and_cut_in_one_go_where_the_compiler_can() -> None:
    overrides = "--config.trainer.mesh={'fsdp': 4}", "--config.trainer.rows=4", "--config.trainer.tokens_per_row=1024"
    found = compile_step("v5p:2x2x1", *overrides)["programs"]["gradients"]["collectives"]
    assert 4 * WEIGHTS <= found["reduce-scatter"]["bytes"] < 4.5 * WEIGHTS
    assert found["all-reduce"]["bytes"] < 0.01 * 4 * WEIGHTS


EXPERTS = str(ROOT / "configs/qwen3_30b_a3b_v5p16.py")


@pytest.mark.tpu
@pytest.mark.slow
def test_the_training_step_of_qwen3_30b_a3b_fits_v5p(report: Callable[[str], None]) -> None:
    """fsdp 4 x expert 4, a row of 8,192 tokens a chip. Tokens travel to their experts in bfloat16 and come back in float32,
    with a fourth of room to spare, forward and backward; what a skewed routing would take besides is counted apart."""
    result = compile_step("v5p:2x2x4", preset=EXPERTS)
    step, found = result["programs"]["gradients"], result["programs"]["gradients"]["collectives"]
    products = step["product_flops"] / step["model_flops"]
    report(
        f"v5p:2x2x4 train of Qwen3-30B-A3B: {result['hbm_bytes'] / 1e9:.1f} GB a chip; products {step['product_flops']:.3g} "
        f"FLOPs, {products:.2f} of 6N of what a token passes; {found}"
    )
    assert result["parameters"] == 30_532_122_624 and result["hbm_bytes"] < 95e9
    assert 1 < products < 1.25 * 4 / 3
    sent = 48 * 1.25 * 8 * 8192 * 2048  # numbers of one exchange in all layers
    assert 6 * sent <= found["all-to-all"]["bytes"] < 20 * sent
    assert found["all-to-all, conditional"]["bytes"] == pytest.approx(3 * found["all-to-all"]["bytes"], rel=0.1)
    # weights are gathered over fsdp only: a chip never has another's experts
    of_chip = (result["parameters"] - 151936 * 2048 * 2) // 4
    assert found["all-gather"]["bytes"] < 2 * 2 * (of_chip + 48 * 3 * 20e6) * 1.2


@pytest.mark.tpu
@pytest.mark.slow
def test_the_engine_of_qwen3_30b_a3b_compiles_for_v5p(report: Callable[[str], None]) -> None:
    """2 of its 48 layers, experts over the 4 chips of a host; of a decode's products, no more than its tokens' experts."""
    shape = asdict(replace(SHAPES["qwen3-30b-a3b"], num_layers=2))
    overrides = "--config.model.source=random", f"--config.model.shape={shape}"
    done = compile_for("v5p:2x2x1", 0, *overrides, preset=EXPERTS)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["attention"] == "ragged"
    for kind, program in result["programs"].items():
        report(f"v5p:2x2x1 {kind} {program['sizes']}, Qwen3-30B-A3B, 2 layers: {program['total']}, {program['collectives']}")
        assert program["bytes"]["arguments"] == pytest.approx(result["plan"]["total_bytes"], rel=0.01)
        assert -program["bytes"]["reused"] >= result["plan"]["total_bytes"] - result["plan"]["weight_bytes"]
        assert program["bytes"]["temporary"] < 2**30
        assert not any(
            kind.startswith("all-to-all") for kind in program["collectives"]
        )  # every chip has all tokens: partial sums travel


@pytest.mark.tpu
def test_a_topology_that_does_not_exist() -> None:
    done = compile_for("v9:1x1", 1)
    assert done.returncode == 2
    assert "error: --topology: 'v9:1x1' is unknown to libtpu" in done.stderr


@pytest.mark.tpu
def test_a_mesh_larger_than_the_topology() -> None:
    done = compile_for("v5e:2x2", 8)
    assert done.returncode == 2
    assert "tensor=8 needs 8 devices, but there are 4" in done.stderr


@pytest.mark.tpu
def test_a_pool_that_does_not_fit() -> None:
    shape = asdict(replace(SHAPES["qwen3-8b"], num_layers=1))
    overrides = "--config.model.source=random", f"--config.model.shape={shape}", "--config.engine.num_pages=9000000"
    done = compile_for("v5e:2x4", 8, *overrides)
    assert done.returncode == 2
    assert "error: engine.num_pages: extend does not fit a chip; lower it" in done.stderr
    assert "exceeds available HBM (15.75G)" in done.stderr
