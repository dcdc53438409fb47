"""What a model and its engine need on hardware that is not at hand: bytes by arithmetic, programs by a TPU's own compiler.

kv     what the keys and values of a batch take; with --config also what each chip of its engine holds
       [--model NAME_OR_DIR | --config configs/NAME.py] [--batch 64] [--context 32768]
aot    the engine's largest extend and decode, compiled for a TPU topology: memory, FLOPs and collectives of a chip
       [--config configs/qwen3_8b_v6e8.py] [--topology v6e:2x4] [--tensor CHIPS]
"""

import argparse
import importlib.util
import os
import re
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import asdict, fields
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import AbstractMesh, AxisType

from inference.config import EngineConfig
from inference.memory import amount, plan, token_bytes
from inference.runner import Runner
from launch.cli import read_config
from models.config import ModelConfig
from models.config import read_config as read_model
from models.hf import resolve
from rl.config import RunConfig, build
from sharding.mesh import make_mesh
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
    "qwen3-32b": ModelConfig(**_QWEN3, **_sizes(5120, 25600, 64, 64, 8)),
}
"""models whose shape is known without their files; names as on the hub, in lower case and without the owner"""

TPU_COMPILER = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling locks no chip: another process may be doing the same
}
"""environment in which libtpu does not look for chips; the topology that it compiles for is another"""
COLLECTIVE = re.compile(r"\b(all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute)(?:-start)?\(")


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
    return EngineConfig(**{item.name: getattr(config.engine, item.name) for item in fields(EngineConfig)})


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


def tpu_devices(topology: str) -> list[Any]:
    """Devices of a topology that can be compiled for, not run on; no TPU is touched.

    Raises:
        ValueError: libtpu is not installed, or knows no such topology.
    """
    if importlib.util.find_spec("libtpu") is None:
        raise ValueError("aot: needs libtpu, the TPU's compiler; install the extra: pip install -c constraints.txt -e '.[tpu]'")
    os.environ.update(TPU_COMPILER)
    jax.config.update("jax_platforms", "cpu")
    try:
        return list(topologies.get_topology_desc(topology, "tpu").devices)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(f"--topology: {topology!r} is unknown to libtpu; write v5e:2x4 or v5p:2x2x1 ({error})") from error


def aot(arguments: argparse.Namespace) -> dict[str, Any]:
    """Compiles the engine's largest programs for a TPU topology from shapes alone.

    All numbers are of one chip, and of one pass through the loop of decode; the compiler counts nothing inside a kernel.
    """
    config = run_config(arguments)
    section = engine_config(config)
    model = model_shape(config.model.source, config.model.shape)
    axes = {"tensor": arguments.tensor} if arguments.tensor else config.engine.mesh
    devices = tpu_devices(arguments.topology)
    mesh, rules = make_mesh(axes, devices), Rules(dict(config.engine.rules))
    # Compile times would mean nothing, and programs of a compile-only device are no use to a later run.
    jax.config.update("jax_enable_compilation_cache", False)
    runner = Runner(model, section, jnp.dtype(config.model.dtype), mesh, rules)
    needs = plan(model, section, config.model.dtype, mesh, rules)
    slots = section.slots[-1]
    buckets = ("extend", section.tokens[-1]), ("decode", slots, section.key_blocks(slots)[-1])
    return {
        "model": config.model.source,
        "topology": arguments.topology,
        "chip": devices[0].device_kind,
        "mesh": dict(axes),
        "attention": runner.backend.name,
        "plan": asdict(needs) | {"total_bytes": needs.total_bytes},
        "programs": {bucket[0]: _compile(runner, bucket) for bucket in buckets},
    }


def _compile(runner: Runner, bucket: tuple) -> dict[str, Any]:
    """One program, largest of its kind; `sizes` are the tokens of an extend, the rows and key blocks of a decode."""
    kind, *sizes = bucket
    started = time.perf_counter()
    lowered = runner.lower(bucket)
    lower_s = time.perf_counter() - started
    try:
        compiled = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        why = next(line for line in str(error).splitlines() if "RESOURCE_EXHAUSTED" in line)
        raise ValueError(f"engine.num_pages: {kind} does not fit a chip; lower it, or use more chips ({why[:200]})") from error
    memory, cost = compiled.memory_analysis(), compiled.cost_analysis()
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "reused": -memory.alias_size_in_bytes,
    }
    return {
        "sizes": sizes,
        "bytes": parts | {"total": sum(parts.values())},
        "total": amount(sum(parts.values())),
        "flops": cost["flops"],
        "bytes_accessed": cost["bytes accessed"],
        "collectives": dict(sorted(Counter(COLLECTIVE.findall(compiled.as_text())).items())),
        "lower_s": lower_s,
        "compile_s": time.perf_counter() - started - lower_s,
    }


def add_commands(commands: Any) -> dict[str, Callable[[argparse.Namespace], dict[str, Any]]]:
    """Adds the parsers of this file's benchmarks to the sub-commands of `launch.bench`; returns the functions by name."""
    command = commands.add_parser("kv")
    command.add_argument("--model", default="llama-3-8b")
    command.add_argument("--config", default="")
    command.add_argument("--batch", type=int, default=64)
    command.add_argument("--context", type=int, default=32768)
    command = commands.add_parser("aot")
    command.add_argument("--config", default="configs/qwen3_8b_v6e8.py")
    command.add_argument("--topology", default="v6e:2x4")
    command.add_argument("--tensor", type=int, default=0, help="chips of a tensor-parallel engine (default: the config's mesh)")
    return {"kv": kv, "aot": aot}
