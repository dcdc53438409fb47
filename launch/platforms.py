"""What a model and its engine need on hardware that is not at hand: shapes of known models, bytes by arithmetic.

kv     what the keys and values of a batch take; with --config also what each chip of its engine holds
       [--model NAME_OR_DIR | --config configs/NAME.py] [--batch 64] [--context 32768]
"""

import argparse
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any

from jax.sharding import AbstractMesh, AxisType

from inference.config import EngineConfig
from inference.memory import amount, plan, token_bytes
from launch.cli import read_config
from models.config import ModelConfig, MoEConfig
from models.hf import resolve
from models.hf_config import read_config as read_model
from rl.build import build, pick
from rl.config import RunConfig
from sharding.rules import Rules

_LLAMA3: dict[str, Any] = {
    "family": "llama",
    "vocab_size": 128256,
    "head_dim": 128,
    "max_positions": 8192,
    "rope_theta": 500000.0,
}
_QWEN3: dict[str, Any] = {
    "family": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "max_positions": 40960,
    "rope_theta": 1e6,
    "norm_eps": 1e-6,
}


def _sizes(D: int, F: int, L: int, H: int, K: int) -> dict[str, Any]:
    return {"model_dim": D, "ffn_dim": F, "num_layers": L, "num_heads": H, "num_kv_heads": K}


SHAPES = {
    "llama-3-8b": ModelConfig(**_LLAMA3, **_sizes(4096, 14336, 32, 32, 8)),
    "llama-3-70b": ModelConfig(**_LLAMA3, **_sizes(8192, 28672, 80, 64, 8)),
    "qwen3-0.6b": ModelConfig(**_QWEN3, **_sizes(1024, 3072, 28, 16, 8), tied_head=True),
    "qwen3-8b": ModelConfig(**_QWEN3, **_sizes(4096, 12288, 36, 32, 8)),
    "qwen3-30b-a3b": ModelConfig(
        **_QWEN3 | {"family": "qwen3_moe"},
        **_sizes(2048, 6144, 48, 32, 4),
        moe=MoEConfig(num_experts=128, experts_per_token=8, ffn_dim=768),
    ),
    "qwen3-32b": ModelConfig(**_QWEN3, **_sizes(5120, 25600, 64, 64, 8)),
}
"""models whose shape is known without their files; names as on the hub, in lower case and without the owner"""


def model_shape(source: str, shape: Mapping[str, Any] | None = None) -> ModelConfig:
    """Shape of a known model by its name, of a model directory or hub id, or (`random`) as given.

    Raises:
        ValueError: there is no such model.
    """
    if source == "random":
        return build(ModelConfig, shape or {}, "config.model.shape")
    known = SHAPES.get(source.rpartition("/")[2].lower())
    return known or read_model(resolve(source))


def run_config(arguments: argparse.Namespace) -> RunConfig:
    return build(RunConfig, read_config(arguments.config, arguments.overrides))


def engine_config(config: RunConfig) -> EngineConfig:
    return pick(EngineConfig, config.engine)


def kv(arguments: argparse.Namespace) -> dict[str, Any]:
    """Arithmetic only: no device, no weights."""
    for name in ("batch", "context"):
        if getattr(arguments, name) < 1:
            raise ValueError(f"--{name}: must be at least 1, got {getattr(arguments, name)}")
    config = run_config(arguments) if arguments.config else None
    if config is None and arguments.overrides:
        raise ValueError(f"{arguments.overrides[0]}: unknown argument; overrides need --config")
    source, dtype = (config.model.source, config.model.dtype) if config else (arguments.model, "bfloat16")
    model = model_shape(source, config.model.shape if config else None)
    each = token_bytes(model, dtype)
    result: dict[str, Any] = {
        "model": source,
        "dtype": dtype,
        "batch": arguments.batch,
        "context": arguments.context,
        "bytes_per_token": each,
        "bytes": each * arguments.batch * arguments.context,
        "amount": amount(each * arguments.batch * arguments.context),
    }
    if config:
        axes = config.engine.mesh
        mesh = AbstractMesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
        engine = plan(model, engine_config(config), dtype, mesh, Rules(dict(config.engine.rules)))
        result["engine"] = asdict(engine) | {"total_bytes": engine.total_bytes, "summary": str(engine)}
    return result


def add_commands(commands: Any) -> dict[str, Callable[[argparse.Namespace], dict[str, Any]]]:
    """Adds the parsers of this file's benchmarks to the sub-commands of `launch.bench`; returns the functions by name."""
    command = commands.add_parser("kv")
    command.add_argument("--model", default="llama-3-8b")
    command.add_argument("--config", default="")
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--context", type=int, default=32768)
    return {"kv": kv}
