"""`launch.bench delta`: bitwise deltas of realistic weights: how small, and how fast on one core.

Synthetic: one tensor of float32 masters from N(0, 0.025), each moved by a normal step of a size that changes the wanted share
of the bfloat16 elements. An element changes with probability min(1, |step| / ulp), so which ones do is as after a real step.
SmolLM2: real weights, GRPO on the text of this repository's notes with random advantages, AdamW at lr 1e-6. Its masters begin
on bfloat16's grid, so a step below half an ulp changes nothing at first: fewer change than predicted until they have spread.

    changed_share        share of elements whose bits changed
    predicted_share      mean of min(1, |step| / ulp) over the masters
    bytes                of the whole delta: header, checksums and all
    entropy_bound_bytes  of the differences (0 among them) if nothing is known of an element: N (H2(p) + p h_v) / 8
    ratio_to_bound       bytes over that
    encode_GBps          weights over the seconds from two trees on the device to a delta's bytes, all checksums included
    decode_GBps          weights over the seconds from bytes to the new tree in the place of the old, all checks included
    swap_ms              of those, what is left once the delta is staged: the scatter, inside an engine's pause

Top level: the synthetic case of 1 %. `per_1e12`: bytes for 10^12 parameters at each synthetic share. The process has one core
and XLA one thread (`one_core`); each time is the best of several.
"""

import argparse
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.quiet import Others, warn
from models.hf import load_hf, resolve
from models.hf_config import read_config
from models.tokenizer import Tokenizer
from models.transformer import describe
from rl.batch import Sample, on_tokens
from rl.fleet import published_params
from rl.forest import Layout
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.trainer import Trainer
from sharding.delta_file import Delta
from sharding.deltas import apply, diff, stage
from sharding.mesh import make_mesh
from sharding.rules import Rules, Weight

STD = 0.025
SHARES = (0.002, 0.005, 0.01, 0.02, 0.03)
HEADLINE = 0.01
LEARNING_RATE = 1e-6
SIZES = {
    "full": {"rows": 12288, "columns": 8192, "rounds": 5, "steps": 3, "samples": 8, "length": 128},
    "small": {"rows": 1536, "columns": 1024, "rounds": 2, "steps": 1, "samples": 2, "length": 64},
}
"""of the synthetic tensor; rounds that are timed; steps of GRPO, its samples and their tokens"""
Params = dict[str, jax.Array]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "runs/models/smollm2-135m-instruct"
    parser.add_argument("--model", metavar="DIR", default=model, help="a Hugging Face directory or hub id")
    parser.add_argument("--scale", choices=SIZES, default="full", help="small: to see that it works")


def one_core() -> None:
    """For this process and the threads that XLA will make, so before JAX looks at its devices."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false".strip()


def delta(arguments: argparse.Namespace) -> dict[str, Any]:
    sizes = SIZES[arguments.scale]
    directory = resolve(arguments.model)
    with Others() as others:
        cases = {f"{share:g}": synthetic(share, sizes) for share in SHARES}
    warn(others.cpus, "during the synthetic cases")
    count = sizes["rows"] * sizes["columns"]
    return {
        **cases[f"{HEADLINE:g}"],
        "other_cpus": others.cpus,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "synthetic": cases,
        "per_1e12": {share: round(case["bytes"] / count * 1e12) for share, case in cases.items()},
        "model": str(directory),
        "steps": grpo(directory, sizes),
    }


def synthetic(share: float, sizes: Mapping[str, int]) -> dict[str, Any]:
    """One tensor, moved so that about this share changes."""
    rng = np.random.default_rng(0)
    shape = sizes["rows"], sizes["columns"]
    old = np.float32(STD) * rng.standard_normal(shape, np.float32)
    step = rng.standard_normal(shape, np.float32)
    step *= np.float32(scale_for(share, old, step))
    new = old + step
    mesh = make_mesh({"data": 1})
    shardings = Rules().shardings(mesh, {"w": Weight(shape, ("rows", "columns"), STD)})

    def published(masters: np.ndarray) -> Params:
        return {"w": jax.device_put(masters, shardings["w"]).astype(jnp.bfloat16)}

    predicted = predicted_share({"w": old}, {"w": new})
    return {"step": float(np.abs(step).mean())} | measure(published(old), published(new), predicted, sizes["rounds"])


def scale_for(share: float, old: np.ndarray, step: np.ndarray) -> float:
    """The factor of `step` that changes this share, by halving, on some of the elements."""
    some, moves = old.reshape(-1)[: 2**20], step.reshape(-1)[: 2**20]
    low, high = 1e-10, 1e-2
    for _ in range(60):
        middle = (low * high) ** 0.5
        if np.minimum(1, np.abs(moves) * middle / ulp(some)).mean() < share:
            low = middle
        else:
            high = middle
    return low


def ulp(masters: np.ndarray) -> np.ndarray:
    """Of the bfloat16 (8 significant bits) nearest to each."""
    return np.ldexp(np.float32(1), np.frexp(masters)[1] - 8)


def predicted_share(old: Mapping[str, np.ndarray], new: Mapping[str, np.ndarray]) -> float:
    """Mean of min(1, |step| / ulp): masters lie anywhere between two neighbours, so the step crosses a border that often."""
    sums = [np.minimum(1, np.abs(new[name] - x) / ulp(x)).sum(dtype=np.float64) for name, x in old.items()]
    return float(sum(sums) / sum(x.size for x in old.values()))


def measure(old: Params, new: Params, predicted: float, rounds: int) -> dict[str, Any]:
    """Size and speed of the delta between two published trees. What comes out is compared bit for bit."""
    weight_bytes = sum(array.nbytes for array in old.values())
    encode, decode, swap, whole = [], [], [], b""
    for _ in range(rounds + 1):  # the first compiles
        started = time.perf_counter()
        whole = diff(old, new, 0, 1).to_bytes()
        encode.append(time.perf_counter() - started)
        params = jax.block_until_ready({name: jnp.copy(array) for name, array in old.items()})
        started = time.perf_counter()
        staged = jax.block_until_ready(stage(params, 0, Delta.from_bytes(whole)))
        ready = time.perf_counter()
        params = jax.block_until_ready(apply(params, staged))
        decode.append(time.perf_counter() - started)
        swap.append(time.perf_counter() - ready)
    for name, array in params.items():
        assert np.array_equal(np.asarray(array).view(np.uint16), np.asarray(new[name]).view(np.uint16)), name
    counts = np.zeros(2**16, np.int64)
    for name in old:
        counts += np.bincount(difference(old[name], new[name]), minlength=2**16)
    elements = int(counts.sum())
    bound = -float((counts[counts > 0] * np.log2(counts[counts > 0] / elements)).sum()) / 8
    return {
        "parameters": elements,
        "changed_share": 1 - float(counts[0]) / elements,
        "predicted_share": predicted,
        "bytes": len(whole),
        "entropy_bound_bytes": bound,
        "ratio_to_bound": len(whole) / bound,
        "encode_GBps": weight_bytes / min(encode) / 1e9,
        "decode_GBps": weight_bytes / min(decode) / 1e9,
        "swap_ms": 1e3 * min(swap),
    }


def difference(old: jax.Array, new: jax.Array) -> np.ndarray:
    return (np.asarray(new).view(np.uint16) - np.asarray(old).view(np.uint16)).reshape(-1)


def grpo(directory: Path, sizes: Mapping[str, int]) -> list[dict[str, Any]]:
    """Real steps, and the delta of each. The first of Adam is of full size everywhere; then gradients begin to cancel."""
    model = read_config(directory)
    mesh, rules, unrolled = make_mesh({"data": 1}), Rules(), describe(model, stacked=False)
    shardings, length = rules.shardings(mesh, describe(model)), sizes["length"]
    loaded = load_hf(directory, model)
    trainer = Trainer(
        model,
        {name: jax.device_put(loaded.pop(name), sharding) for name, sharding in shardings.items()},
        layout=Layout(rows=1, tokens=2 * length, context=max(length, 128), branches=2, length=length - 1),
        optimizer=OptimizerConfig(learning_rate=LEARNING_RATE),
        objective=Objective(loss="grpo"),
        dtype=jnp.bfloat16,
        remat="none",
        mesh=mesh,
        rules=rules,
    )
    trainer.warm_up()

    def published() -> Params:
        return published_params(trainer, unrolled, rules.shardings(mesh, unrolled), jnp.bfloat16)

    cases, old = [], published()
    for number in range(sizes["steps"]):
        before = {name: np.array(array) for name, array in trainer.state.masters.items()}
        trainer.train(make_samples(trainer, directory, number, sizes))
        predicted = predicted_share(before, {name: np.asarray(array) for name, array in trainer.state.masters.items()})
        del before
        new = published()
        cases.append(measure(old, new, predicted, rounds=2))
        old = new
    return cases


def make_samples(trainer: Trainer, directory: Path, number: int, sizes: Mapping[str, int]) -> list[Sample]:
    """Pieces of text with the trainer's own log-probs and advantages that are drawn, one for a piece."""
    length, count = sizes["length"], sizes["samples"]
    text = "".join(path.read_text() for path in sorted(Path(__file__).parents[1].glob("*/README.md")))
    ids = np.asarray(Tokenizer.load(directory).encode(text), np.int32)
    rng = np.random.default_rng(number)
    advantages = rng.standard_normal(count).astype(np.float32)
    weights = np.concatenate([np.zeros(1, np.float32), np.ones(length - 1, np.float32)])
    samples = []
    for episode, start in enumerate(rng.integers(0, len(ids) - length, count).tolist()):
        own = {"ids": ids[start : start + length], "weights": weights, "advantages": advantages[episode] * weights}
        samples.append(Sample(**own, logprobs=np.zeros(length, np.float32), episode=episode))
    read = trainer.read(samples)
    return [Sample(**{**vars(sample), "logprobs": on_tokens(sample, x)}) for sample, x in zip(samples, read, strict=True)]
