"""`launch.bench train`: one training step, next to what the machine could do and to what another trainer does.

The step is supervised: rows of random ids, every token but a row's first is trained, AdamW, nothing rematerialised. Both
sides take it twice, ours before and after the peer's process, and the faster one of each counts; both are warm. Timings
need a quiet machine: `other_cpus` is how many CPUs other processes kept busy during our step.
"""

import argparse
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np

from launch.loads import make_rows
from launch.peers import LEARNING_RATE, PEERS, check_installed, run_peer
from launch.quiet import Others, peak_bytes, warn
from launch.serving import DTYPE, FAST, best_flops_per_s
from models.compiles import CompileCounter
from models.config import ModelConfig
from models.flops import forward_flops
from models.hf import load_hf, resolve
from models.hf_config import read_config
from models.transformer import describe
from rl.batch import Sample
from rl.forest import Layout
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.trainer import Trainer
from sharding.mesh import make_mesh
from sharding.rules import Rules

SIZES = {
    "full": {"rows": 16, "length": 512, "rows_at_once": 4},
    "small": {"rows": 4, "length": 128, "rows_at_once": 2},
}
"""rows of a step, tokens of a row, and rows of a micro-batch"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "runs/models/smollm2-135m-instruct"
    parser.add_argument("--model", metavar="DIR", default=model, help="a Hugging Face directory or hub id")
    parser.add_argument("--against", choices=(FAST, *PEERS["train"]), help="take the same step with this trainer too")
    parser.add_argument("--scale", choices=SIZES, default="full", help="small: to see that it works")


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """Takes the steps. Peak bytes are each process's largest resident size; `program_bytes` is what the compiler says of ours.

    step_flops_share: the step's useful FLOPs (6 a weight and token, and attention) over those that the machine's fastest
    product makes in the same time. loss: of the first step, before anything was learned; the peer's is of the same ids.
    """
    against = arguments.against
    if against in PEERS["train"]:
        check_installed(against)
    directory, sizes = resolve(arguments.model), SIZES[arguments.scale]
    model = read_config(directory)
    with Others() as others:
        time.sleep(0.5)
    warn(others.cpus, "at the start")
    trainer = make_trainer(directory, model, sizes)
    samples = make_samples(model, sizes)
    with CompileCounter() as warm_up:
        trainer.warm_up()
    loss = trainer.train(samples)["loss"]
    fast = make_trainer(directory, model, sizes, exact=False) if against == FAST else None
    if fast:
        fast.warm_up()
        fast.train(samples)
    with CompileCounter() as compiles:
        steps = [step(trainer, samples)]
        most, peer = peak_bytes(), None
        if fast:
            theirs = []
            for _ in range(3):  # in turns: the difference is small
                theirs.append(step(fast, samples))
                steps.append(step(trainer, samples))
            fast_s, fast_others = min(theirs, key=lambda timed: timed[0])
            peer = {"tokens_per_s": sizes["rows"] * sizes["length"] / fast_s, "other_cpus": fast_others}
        elif against:
            peer = run_peer("train", against, directory, **sizes)
        steps.append(step(trainer, samples))
    wall_s, other_cpus = min(steps, key=lambda timed: timed[0])
    warn(other_cpus, "during our step")
    best = best_flops_per_s()
    result = {
        **sizes,
        "model": str(directory),
        "dtype": np.dtype(DTYPE).name,
        "tokens_per_s": sizes["rows"] * sizes["length"] / wall_s,
        "step_flops_share": step_flops(model, sizes) / best / wall_s,
        "best_gflops_per_s": best / 1e9,
        "peak_bytes": most,
        "program_bytes": program_bytes(trainer),
        "wall_s": wall_s,
        "other_cpus": other_cpus,
        "loss": loss,
        "compiles_after_warmup": compiles.count,
        "warm_up_compile_s": warm_up.seconds,
    }
    if peer is not None:
        warn(peer["other_cpus"], f"during {against}'s steps")
        result |= {f"{against}_{key}": value for key, value in peer.items()}
        result["ratio"] = result["tokens_per_s"] / peer["tokens_per_s"]
    return result


def make_trainer(directory: Path, model: ModelConfig, sizes: Mapping[str, int], exact: bool = True) -> Trainer:
    """A trainer on one device, with float32 masters of a Hugging Face directory's weights."""
    length, packed = sizes["length"], sizes["rows_at_once"]
    mesh, rules = make_mesh({"data": 1}, jax.devices()[:1]), Rules()
    shardings = rules.shardings(mesh, describe(model))
    loaded = load_hf(directory, model)
    return Trainer(
        model,
        {name: jax.device_put(loaded.pop(name), sharding) for name, sharding in shardings.items()},
        layout=Layout(rows=1, tokens=packed * length, context=length, branches=packed, length=length - 1),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
        objective=Objective(loss="sft"),
        dtype=DTYPE,
        remat="none",
        mesh=mesh,
        rules=rules,
        exact=exact,
    )


def make_samples(model: ModelConfig, sizes: Mapping[str, int]) -> list[Sample]:
    """Rows of random ids, all trained but the first of each, which nothing comes before."""
    zeros = np.zeros(sizes["length"], np.float32)
    weights = np.ones_like(zeros)
    weights[0] = 0
    rows = make_rows(model.vocab_size, sizes["rows"], sizes["length"])
    return [
        Sample(ids=np.asarray(ids, np.int32), weights=weights, logprobs=zeros, advantages=zeros, episode=number)
        for number, ids in enumerate(rows)
    ]


def step(trainer: Trainer, samples: list[Sample]) -> tuple[float, float | None]:
    """Seconds of one step, and how many CPUs others kept busy meanwhile."""
    with Others() as others:
        started = time.perf_counter()
        trainer.train(samples)
        wall_s = time.perf_counter() - started
    return wall_s, others.cpus


def step_flops(model: ModelConfig, sizes: Mapping[str, int]) -> float:
    """Of the products of forward and backward, two for each multiplication with its addition."""
    rows, length = sizes["rows"], sizes["length"]
    return 3 * forward_flops(model, rows * length, rows * length * (length + 1) // 2, rows * (length - 1))


def program_bytes(trainer: Trainer) -> int:
    """The most that one of the step's programs takes: arguments, results and temporaries, what is donated counted once."""

    def size(lowered: Any) -> int:
        memory = lowered.compile().memory_analysis()
        held = memory.argument_size_in_bytes + memory.output_size_in_bytes - memory.alias_size_in_bytes
        return held + memory.temp_size_in_bytes

    return max(map(size, trainer.programs.lower("sft", two_passes=False).values()))
