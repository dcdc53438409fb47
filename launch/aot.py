"""Programs for a TPU that is not at hand, compiled by its own compiler: memory, FLOPs and collectives of one chip.

aot           the engine's largest extend and decode
aot --train   the training step: one micro-batch's gradients, and the optimizer's update
              [--config configs/NAME.py] [--config.key=value ...] [--topology v6e:2x4] [--tensor CHIPS]
"""

import argparse
import importlib.util
import os
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import topologies

from inference.memory import amount, plan
from inference.runner import Runner
from launch.hlo import collectives, moved, product_flops
from launch.platforms import engine_config, model_shape, run_config
from models.exact import is_exact
from models.flops import layer_weights
from models.transformer import Definition
from rl.build import pick
from rl.config import RunConfig
from rl.optimizer import OptimizerConfig
from rl.programs import Programs
from rl.routes import RouterConfig
from rl.run import layout_of
from sharding.mesh import make_mesh
from sharding.rules import Rules

TPU_COMPILER = {
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",  # compiling locks no chip: another process may be doing the same
}
"""environment in which libtpu does not look for chips; the topology that it compiles for is another"""


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
    """Compiles for a TPU topology from shapes alone.

    All numbers are of one chip. `flops` is the compiler's count: of one pass through each loop, and nothing inside a kernel.
    """
    if arguments.train and arguments.tensor:
        raise ValueError("--tensor: is for the engine; set --config.trainer.mesh and --config.trainer.rules")
    config = run_config(arguments)
    devices = tpu_devices(arguments.topology)
    # Compile times would mean nothing, and programs of a compile-only device are no use to a later run.
    jax.config.update("jax_enable_compilation_cache", False)
    of_chip = {"model": config.model.source, "topology": arguments.topology, "chip": devices[0].device_kind}
    return of_chip | (train(config, devices) if arguments.train else engine(config, arguments.tensor, devices))


def engine(config: RunConfig, tensor: int, devices: list[Any]) -> dict[str, Any]:
    section = engine_config(config)
    model = model_shape(config.model.source, config.model.shape)
    axes = {"tensor": tensor} if tensor else config.engine.mesh
    mesh, rules = make_mesh(axes, devices), Rules(dict(config.engine.rules))
    dtype = jnp.dtype(config.model.dtype)
    exact = is_exact(config.model.numerics, model, dtype, mesh, rules, "engine")
    runner = Runner(model, section, dtype, mesh, rules, exact)
    needs = plan(model, section, config.model.dtype, mesh, rules)
    slots = section.slots[-1]
    buckets = ("extend", section.tokens[-1]), ("decode", slots, section.key_blocks(slots)[-1])
    return {
        "mesh": dict(axes),
        "attention": runner.backend.name,
        "plan": asdict(needs) | {"total_bytes": needs.total_bytes},
        # sizes are the tokens of an extend, the rows and key blocks of a decode
        "programs": {
            kind: {"sizes": sizes} | compiled(kind, lambda bucket=(kind, *sizes): runner.lower(bucket), "engine.num_pages")
            for kind, *sizes in buckets
        },
    }


def train(config: RunConfig, devices: list[Any]) -> dict[str, Any]:
    """The step that `trainer` describes. `product_flops` are of its weight products, in all layers: attention, whose loops are
    as long as the rows of the day, is not in them. `model_flops` are 6 x parameters that a token passes x tokens (Kaplan
    et al., 2001.08361)."""
    section, layout = config.trainer, layout_of(config)
    model = model_shape(config.model.source, config.model.shape)
    objective = section.objective()
    mesh, rules, dtype = make_mesh(section.mesh, devices), Rules(dict(section.rules)), jnp.dtype(config.model.dtype)
    exact = is_exact(config.model.numerics, model, dtype, mesh, rules, "trainer", section.depth_first)
    value_head = objective.readout == "value"
    definition = Definition(model, dtype, stacked=True, remat=section.remat, value_head=value_head, exact=exact)
    optimizer = pick(OptimizerConfig, section)
    router = pick(RouterConfig, section)
    programs = Programs(definition, layout, optimizer, {section.loss: objective}, mesh, rules, router)
    traced = programs.trace(section.loss, two_passes=False)
    weights = layer_weights(model) + model.model_dim * model.vocab_size
    result = {"gradients": compiled("gradients", traced[section.loss].lower, "trainer.tokens_per_row")}
    result["gradients"] |= {
        "product_flops": product_flops(traced[section.loss].jaxpr),
        "model_flops": 6 * weights * layout.rows * layout.tokens // mesh.size,
    }
    result["update"] = compiled("update", traced["update"].lower, "trainer.mesh")
    return {
        "mesh": dict(section.mesh),
        "remat": section.remat,
        "rows": layout.rows,
        "tokens_per_row": layout.tokens,
        "parameters": sum(weight.size for weight in definition.weights.values()),
        "hbm_bytes": max(_resident(programs, name, program) for name, program in result.items()),
        "programs": result,
    }


def _resident(programs: Programs, name: str, program: dict[str, Any]) -> int:
    """Bytes on a chip while a program runs: its own, and the optimizer's state that lies beside it."""
    beside = 0
    if name == "gradients" and not programs.offload:
        trained = sum(programs.definition.weights[weight].size for weight in programs.trained)
        beside = 2 * programs.accum.itemsize * trained // programs.replicated.mesh.size
    return program["bytes"]["total"] + beside


def compiled(name: str, lower: Callable[[], Any], key: str) -> dict[str, Any]:
    """What a program needs.

    Raises:
        ValueError: it does not fit a chip; `key` is what to change.
    """
    started = time.perf_counter()
    lowered = lower()
    lower_s = time.perf_counter() - started
    try:
        program = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        why = next(line for line in str(error).splitlines() if "RESOURCE_EXHAUSTED" in line)
        raise ValueError(f"{key}: {name} does not fit a chip; lower it, or use more chips ({why[:200]})") from error
    memory, cost = program.memory_analysis(), program.cost_analysis()
    parts = {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "temporary": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "reused": -memory.alias_size_in_bytes,
    }
    return {
        "bytes": parts | {"total": sum(parts.values())},
        "total": amount(sum(parts.values())),
        "flops": cost["flops"],
        "bytes_accessed": cost["bytes accessed"],
        "collectives": moved(collectives(program.as_text())),
        "lower_s": lower_s,
        "compile_s": time.perf_counter() - started - lower_s,
    }


def add_commands(commands: Any) -> dict[str, Callable[[argparse.Namespace], dict[str, Any]]]:
    """Adds the parser of this file's benchmark to the sub-commands of `launch.bench`; returns the function by name."""
    command = commands.add_parser("aot")
    command.add_argument("--config", default="configs/qwen3_8b_v6e8.py")
    command.add_argument("--topology", default="v6e:2x4")
    command.add_argument("--tensor", type=int, default=0, help="chips of a tensor-parallel engine (default: the config's mesh)")
    command.add_argument("--train", action="store_true", help="the training step instead of the engine's programs")
    return {"aot": aot}
