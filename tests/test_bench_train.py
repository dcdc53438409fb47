"""The training benchmark: its arithmetic, and a step at small scale on a tiny random model."""

import argparse
import importlib.util
from dataclasses import replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch import quiet, training
from launch.cli import Parser
from models.config import ModelConfig, MoEConfig
from models.flops import forward_flops
from models.hf import save_hf
from models.transformer import describe
from sharding.mesh import make_mesh
from sharding.reshard import init
from sharding.rules import Rules

MODEL = ModelConfig(
    family="llama",
    vocab_size=256,
    model_dim=64,
    ffn_dim=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=256,
    tied_head=True,
)
KEYS = {
    "rows", "length", "rows_at_once", "model", "dtype", "tokens_per_s", "step_flops_share", "best_gflops_per_s", "peak_bytes",
    "program_bytes", "wall_s", "other_cpus", "loss", "compiles_after_warmup", "warm_up_compile_s",
}  # fmt: skip


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("training") / "model"
    weights = describe(MODEL)
    shardings = Rules().shardings(make_mesh({"data": 1}, jax.devices()[:1]), weights)
    params = init(weights, jax.random.key(0), jnp.float32, shardings)
    save_hf(path, MODEL, {name: np.asarray(array) for name, array in params.items()}, dtype=jnp.bfloat16)
    return path


def parse(*arguments: str) -> argparse.Namespace:
    parser = Parser()
    training.add_arguments(parser)
    return parser.parse_args(arguments)


def test_step_flops() -> None:
    """Counted by hand: weights of q, k and v, o and the MLP, the head where a next token is, and attention."""
    layers = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
    forward = 2 * layers * 5 + 2 * 64 * 256 * 4 + sum(2 * 2 * 2 * 64 * (position + 1) for position in range(5))
    assert training.step_flops(MODEL, {"rows": 3, "length": 5}) == 3 * 3 * forward


def test_flops_of_experts() -> None:
    """A token passes its own experts and the shared one; biases are no products."""
    moe = MoEConfig(num_experts=8, experts_per_token=3, ffn_dim=24, shared_ffn_dim=40, shared_gate=True)
    model = replace(MODEL, family="qwen2_moe", moe=moe)
    layer = 64 * 64 + 2 * 64 * 32 + 64 * 64 + 64 * 8 + 3 * (3 * 64 * 24) + 3 * 64 * 40 + 64
    assert forward_flops(model, tokens=5, keys=0, logits=4) == 2 * (2 * layer * 5 + 64 * 256 * 4)


def test_peak_bytes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(quiet, "STATUS", tmp_path / "status")
    assert quiet.peak_bytes() is None
    quiet.STATUS.write_text("Name:\tpython\nVmPeak:\t    9 kB\nVmHWM:\t    3 kB\n")
    assert quiet.peak_bytes() == 3072


def test_a_step(directory: Path) -> None:
    """All tokens are trained: at first the loss is about that of guessing. Nothing compiles after warm-up."""
    result = training.train(parse("--model", str(directory), "--scale", "small"))
    assert result.keys() == KEYS
    assert result["tokens_per_s"] == pytest.approx(4 * 128 / result["wall_s"])
    assert 0 < result["step_flops_share"] < 1 and result["compiles_after_warmup"] == 0
    assert abs(result["loss"] - np.log(256)) < 1
    assert 0 < result["program_bytes"] < 1 << 30


def test_a_peer_that_is_not_there(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--against: torch is not installed; install it, or leave --against out"):
        training.train(parse("--model", str(directory), "--against", "transformers"))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.oracle
@pytest.mark.slow
def test_against_transformers(directory: Path) -> None:
    """The same ids: equal losses, to bfloat16's precision."""
    result = training.train(parse("--model", str(directory), "--scale", "small", "--against", "transformers"))
    assert result["ratio"] == pytest.approx(result["tokens_per_s"] / result["transformers_tokens_per_s"])
    assert result["transformers_precision"] in ("autocast", "bfloat16") and result["transformers_peak_bytes"] > 0
    assert result["transformers_loss"] == pytest.approx(result["loss"], abs=0.03)
