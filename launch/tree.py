"""`launch.bench tree`: training on a trie of branches next to training on the same branches without sharing.

The trie is agent-like: one system prompt, turns that branch four times; 36 branches of 528 tokens, 2,024 of them different, so
tree training computes 9.4 times fewer tokens. Both sides pack rows of the same size with the same programs; dense packing
fills its rows to the last token. The model is small and random: nothing here depends on what it says.

    compression         tokens of all branches / tokens of the trie
    flops_ratio         compiled FLOPs of all micro-batches, dense / tree
    wall_ratio          seconds of a gradient, dense / tree; each the faster of its rounds, in turns
    grad_rel_err_f64    largest |tree - dense| / |dense| over weights (norms), all in float64; likewise _f32
    bf16_noise_ratio    |tree - dense| / |dense - dense with its branches in another order|, in bfloat16
    bf16_error_ratio    |tree - float64| / |dense - float64|, in bfloat16: 1 means that sharing adds no error
    peak_bytes_by_depth depth-first walks: the most bytes of arrays and of a program's temporaries alive at once, beyond weights
                        and gradients, by depth of the path and number of leaves
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from launch.quiet import Others, warn
from models.config import ModelConfig
from models.transformer import Definition
from rl.batch import Sample
from rl.branches import Branch, sort_branches
from rl.forest import Layout, pack
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.trainer import Trainer
from rl.tries import Plan, make_trie
from sharding.mesh import make_mesh
from sharding.reshard import init
from sharding.rules import Rules

V = 4096
SHAPE: dict[str, Any] = {"family": "llama", "vocab_size": V, "max_positions": 8192, "tied_head": True}
MODELS = {
    "full": ModelConfig(**SHAPE, model_dim=256, ffn_dim=768, num_layers=6, num_heads=8, num_kv_heads=4, head_dim=32),
    "small": ModelConfig(**SHAPE, model_dim=64, ffn_dim=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16),
}
TURNS = ((392, 1), (48, 2), (40, 3), (24, 3), (24, 2))
"""tokens of each turn, and how many there are after each turn before: the last 24 of 48, 40, 24 and 24 are sampled"""
ROW = 2112
"""four whole branches, or the whole trie"""
ROUNDS = 3
WALKS = {"full": ((512, 4), (512, 16), (1024, 4), (1024, 16), (2048, 4), (2048, 16)), "small": ((128, 2), (128, 8), (256, 2))}
"""depth of the path, and leaves"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", choices=MODELS, default="full", help="small: to see that it works")


def tree(arguments: argparse.Namespace) -> dict[str, Any]:
    model = MODELS[arguments.scale]
    samples = agent_samples(np.random.default_rng(0))
    shuffled = [samples[n] for n in np.random.default_rng(1).permutation(len(samples))]
    trainer = make_trainer(model, jnp.bfloat16)
    plans = {name: rows_of(trainer, batch, share) for name, batch, share in
             (("tree", samples, True), ("dense", samples, False))}  # fmt: skip
    with Others() as others:
        seconds = wall(trainer, samples, plans)
    warn(others.cpus, "during the gradients")
    flops = trainer.programs.lower("grpo", two_passes=False)["grpo"].compile().cost_analysis()["flops"]
    exact = {share: gradient(make_trainer(model, jnp.float64), samples, share) for share in (True, False)}
    single = {share: gradient(make_trainer(model, jnp.float32), samples, share) for share in (True, False)}
    half = {share: gradient(trainer, samples, share) for share in (True, False)}
    permuted = gradient(trainer, shuffled, False)
    distances = {
        "tree_dense": distance(half[True], half[False]),
        "dense_permuted": distance(permuted, half[False]),
        "tree_exact": distance(half[True], exact[False]),
        "dense_exact": distance(half[False], exact[False]),
    }
    stats = plans["tree"].stats
    return {
        "branches": len(samples),
        "compression": stats.compression,
        "padding_tree": 1 - stats.tokens_kept / stats.slots,
        "padding_dense": 1 - plans["dense"].stats.tokens_kept / plans["dense"].stats.slots,
        "flops_ratio": flops * len(plans["dense"].micro_batches) / (flops * len(plans["tree"].micro_batches)),
        "wall_ratio": seconds["dense"] / seconds["tree"],
        "seconds": seconds,
        "other_cpus": others.cpus,
        "grad_rel_err_f64": largest_error(exact[True], exact[False]),
        "grad_rel_err_f32": largest_error(single[True], single[False]),
        "bf16_noise_ratio": distances["tree_dense"] / distances["dense_permuted"],
        "bf16_error_ratio": distances["tree_exact"] / distances["dense_exact"],
        "bf16_distances": distances,
        "peak_bytes_by_depth": {
            f"{depth} tokens, {leaves} leaves": peak_bytes(model, depth, leaves) for depth, leaves in WALKS[arguments.scale]
        },
    }


def agent_samples(rng: np.random.Generator) -> list[Sample]:
    """Every root-to-leaf path of the trie of TURNS; half of each turn was sampled, but nothing of the prompt."""
    paths: list[tuple[list[int], list[bool]]] = [([], [])]
    for length, count in TURNS:
        paths = [
            (ids + rng.integers(0, V, length).tolist(), mask + [bool(mask) and at >= length // 2 for at in range(length)])
            for ids, mask in paths
            for _ in range(count)
        ]
    return [sample(ids, mask, rng, episode) for episode, (ids, mask) in enumerate(paths)]


def sample(ids: Sequence[int], mask: Sequence[bool], rng: np.random.Generator, episode: int) -> Sample:
    weights = np.asarray(mask, np.float32)
    return Sample(
        ids=np.asarray(ids, np.int32),
        weights=weights,
        logprobs=(weights * (-np.log(V) + 0.1 * rng.standard_normal(len(ids)))).astype(np.float32),
        advantages=weights * np.float32(rng.standard_normal()),
        episode=episode,
    )


def make_trainer(model: ModelConfig, dtype: Any, path: int = 0, branches: int = 36) -> Trainer:
    """One device, nothing rematerialised."""
    mesh, rules = make_mesh({"data": 1}, jax.devices()[:1]), Rules()
    definition = Definition(model, dtype, stacked=True)
    masters = init(definition.weights, jax.random.key(0), jnp.float32, rules.shardings(mesh, definition.weights))
    row, context = (512, 512) if path else (ROW, 640)
    with jax.enable_x64(dtype == jnp.float64):
        trainer = Trainer(
            model,
            {name: x.astype(jnp.float64) if dtype == jnp.float64 else x for name, x in masters.items()},
            layout=Layout(rows=1, tokens=row, context=context, branches=branches, length=256, path=path),
            optimizer=OptimizerConfig(learning_rate=1e-5),
            objective=Objective(loss="grpo"),
            dtype=dtype,
            remat="none",
            mesh=mesh,
            rules=rules,
        )
        trainer.warm_up()
    return trainer


def rows_of(trainer: Trainer, samples: Sequence[Sample], share: bool) -> Plan:
    branches = [Branch(each.ids, each.weights > 0) for each in samples]
    micro_batches, stats = pack(branches, trainer.layout, share)
    return Plan(micro_batches=micro_batches, tries=[], stats=stats)


def gradient(trainer: Trainer, samples: Sequence[Sample], share: bool) -> dict[str, np.ndarray]:
    with jax.enable_x64(trainer.definition.dtype == jnp.float64):
        grads, _ = trainer.gradients(samples, rows_of(trainer, samples, share), 1.0, "grpo")
        return {name: np.asarray(x, np.float64) for name, x in grads.items()}


def wall(trainer: Trainer, samples: Sequence[Sample], plans: Mapping[str, Plan]) -> dict[str, float]:
    seconds: dict[str, list[float]] = {name: [] for name in plans}
    for _ in range(ROUNDS + 1):  # the first warms up
        for name, planned in plans.items():
            started = time.perf_counter()
            jax.block_until_ready(trainer.gradients(samples, planned, 1.0, "grpo"))
            seconds[name].append(time.perf_counter() - started)
    return {name: min(values[1:]) for name, values in seconds.items()}


def largest_error(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    return max(float(np.linalg.norm(a[name] - b[name]) / np.linalg.norm(b[name])) for name in a)


def distance(a: Mapping[str, np.ndarray], b: Mapping[str, np.ndarray]) -> float:
    """|a - b| / |b| of all weights as one vector."""
    return float(np.sqrt(sum(np.sum((a[n] - b[n]) ** 2) for n in a) / sum(np.sum(b[n] ** 2) for n in a)))


def peak_bytes(model: ModelConfig, depth: int, leaves: int) -> int:
    """Of a walk over a stem of half the depth, and so many leaves: bytes beyond weights and their gradients."""
    rng = np.random.default_rng(depth)
    stem = rng.integers(0, V, depth // 2).tolist()
    paths = [stem + rng.integers(0, V, depth // 2).tolist() for _ in range(leaves)]
    samples = [sample(ids, [at >= depth - 200 and at > 0 for at in range(depth)], rng, n) for n, ids in enumerate(paths)]
    trainer = make_trainer(model, jnp.bfloat16, path=depth, branches=leaves)
    assert trainer.walk is not None
    branches = [Branch(each.ids, each.weights > 0) for each in samples]
    trie = make_trie(branches, sort_branches(branches), trainer.layout)
    before = _live_bytes() + sum(x.nbytes for x in trainer.programs.zeros().values())
    most = 0

    def watched(program: Any) -> Any:
        temporary = program.memory_analysis().temp_size_in_bytes

        def call(*arguments: Any) -> Any:
            nonlocal most
            most = max(most, _live_bytes() + temporary - before)
            return program(*arguments)

        return call

    for key, program in trainer.walk.compiled.items():
        trainer.walk.compiled[key] = watched(program)
    planned = Plan(micro_batches=[], tries=[trie], stats=pack([], trainer.layout)[1])
    jax.block_until_ready(trainer.gradients(samples, planned, 1.0, "grpo"))
    return most


def _live_bytes() -> int:
    return sum(x.nbytes for x in jax.live_arrays())
