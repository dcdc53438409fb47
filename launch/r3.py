"""`launch.bench r3`: routing replay (Ma et al., arXiv 2510.11370) on a small mixture of experts with close choices.

A real engine samples in bfloat16 and records its routing; the trainer reads the same tokens in float32 from the same published
weights, once routing itself and once replaying. The router is scaled down until the gaps between the last chosen expert and
the next are near bfloat16's eps times the logits, as `gap_histogram` shows. `same_numerics` is a trainer in bfloat16 too.

    expert_mismatch_off   share of (token, layer) in which the trainer uses other experts than the sampler did
    token_mismatch_off    share of tokens in which it does in any layer
    expert_mismatch_on    the same with replay: 0
    k3_off, k3_on         mean k3 estimator of KL(sampler || trainer) over sampled tokens
    f2_off, f2_on         share of sampled tokens whose probability differs by more than a factor of 2
    capture_overhead      tokens/s with capture over without: median of paired rounds, in turns
    bytes_per_token       of recorded routing

With --plot FILE: two runs of configs/tiny_moe.py, bfloat16 sampler and float32 trainer, with and without replay; k3 by step.
"""

import argparse
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inference.config import EngineConfig
from inference.engine import Engine
from inference.types import Completion, Request, SamplingParams
from launch.cli import read_config
from launch.plot import line_plot
from launch.quiet import Others, warn
from models.attention import ForestContext
from models.config import ModelConfig, MoEConfig
from models.routes import not_recorded
from models.transformer import describe
from rl.batch import Sample, Totals, loss_batch
from rl.build import build
from rl.config import RunConfig
from rl.forest import Layout
from rl.measures import add_up, finish, mismatch
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.routes import RouterConfig, Routes
from rl.run import make_run
from rl.sides import plain_step
from rl.trainer import Trainer
from sharding.mesh import make_mesh
from sharding.reshard import init, reshard
from sharding.rules import Rules

MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=512,
    model_dim=128,
    ffn_dim=128,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    head_dim=32,
    max_positions=512,
    moe=MoEConfig(num_experts=16, experts_per_token=4, ffn_dim=64),
)
ROUTER_SCALE = 0.02
"""of a router whose logits would have a variance of 1"""
SIZES = {
    "full": {"prompts": 16, "samples": 4, "prompt": 64, "sampled": 128, "rounds": 7},
    "small": {"prompts": 4, "samples": 2, "prompt": 32, "sampled": 32, "rounds": 2},
}
EPS = float(jnp.finfo(jnp.bfloat16).eps)
PLOT_STEPS = {"full": 60, "small": 2}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--scale", choices=SIZES, default="full", help="small: to see that it works")
    parser.add_argument("--plot", metavar="FILE", default="", help="also train twice, and write this SVG of k3 by step")


def r3(arguments: argparse.Namespace) -> dict[str, Any]:
    """Samples, reads both ways, times the engine with and without capture."""
    sizes, mesh, rules = SIZES[arguments.scale], make_mesh({"data": 1}), Rules()
    weights = describe(MODEL)
    masters = init(weights, jax.random.key(0), jnp.float32, rules.shardings(mesh, weights))
    masters["blocks.moe.router"] = masters["blocks.moe.router"] * ROUTER_SCALE
    published = {name: value.astype(jnp.bfloat16).astype(jnp.float32) for name, value in masters.items()}
    engine = make_engine(published, sizes, capture=True)
    completions = engine.run(requests_of(sizes))
    samples = [sample_of(number, completion) for number, completion in enumerate(completions)]
    result: dict[str, Any] = {**sizes, "layers": MODEL.num_layers}
    result |= compare(published, samples, jnp.float32)
    result["same_numerics"] = compare(published, samples, jnp.bfloat16)
    rows = [completion.routing for completion in completions if completion.routing is not None]
    result["bytes_per_token"] = sum(row.nbytes for row in rows) / sum(len(row) for row in rows)
    result |= overhead(engine, make_engine(published, sizes, capture=False), sizes)
    if arguments.plot:
        result["plot"] = plot(Path(arguments.plot), PLOT_STEPS[arguments.scale])
    return result


def make_engine(masters: Mapping[str, jax.Array], sizes: Mapping[str, int], capture: bool) -> Engine:
    mesh, rules, weights = make_mesh({"data": 1}), Rules(), describe(MODEL, stacked=False)
    params = reshard(masters, describe(MODEL), weights, rules.shardings(mesh, weights), jnp.bfloat16)
    slots = sizes["prompts"] * sizes["samples"]
    config = EngineConfig(
        max_context=256,
        max_slots=slots,
        num_pages=2 * slots + 2,
        slot_buckets=(slots,),
        context_buckets=(256,),
        capture_routing=capture,
    )
    engine = Engine(MODEL, config, params, version=0, dtype=jnp.bfloat16, mesh=mesh, rules=rules)
    engine.warm_up()
    return engine


def requests_of(sizes: Mapping[str, int]) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(
            id=f"{number}/{sample}",
            prompt_ids=ids,
            params=SamplingParams(max_tokens=sizes["sampled"], seed=number * sizes["samples"] + sample),
        )
        for number in range(sizes["prompts"])
        for ids in [tuple(rng.integers(0, MODEL.vocab_size, sizes["prompt"]).tolist())]
        for sample in range(sizes["samples"])
    ]


def sample_of(number: int, completion: Completion) -> Sample:
    """The completion as the trainer is given it."""
    assert completion.routing is not None
    n = len(completion.prompt_ids)
    sampled = np.concatenate([np.zeros(n, np.float32), np.ones(len(completion.ids), np.float32)])
    return Sample(
        ids=np.concatenate([np.asarray(completion.prompt_ids, np.int32), completion.ids]),
        weights=sampled,
        logprobs=np.concatenate([np.zeros(n, np.float32), completion.logprobs]),
        advantages=sampled,
        episode=number,
        routing=np.concatenate([completion.routing, not_recorded(1, MODEL)]),
    )


def compare(masters: Mapping[str, jax.Array], samples: Sequence[Sample], dtype: Any) -> dict[str, Any]:
    """How far a trainer in this dtype is from the sampler, routing itself and replaying."""
    most = max(len(sample.ids) for sample in samples)
    layout = Layout(rows=1, tokens=512, context=256, branches=8, length=most - 1)
    trainer = Trainer(
        MODEL,
        {name: value.copy() for name, value in masters.items()},
        layout=layout,
        optimizer=OptimizerConfig(learning_rate=1e-3),
        objective=Objective(loss="grpo"),
        dtype=dtype,
        remat="block",
        mesh=make_mesh({"data": 1}),
        rules=Rules(),
        router=RouterConfig(router_replay="R3"),
    )
    trainer.warm_up()
    programs, totals, temperature = trainer.programs, Totals.of(samples), trainer.programs.put(np.float32(1))
    sums: dict[str, list[Any]] = {"off": [], "on": []}
    other: dict[str, list[np.ndarray]] = {"off": [], "on": []}
    for micro in trainer.plan(samples).micro_batches:
        batch = loss_batch(samples, micro.order, totals, layout, 0, ())
        replayed = micro.forest.routes
        assert replayed is not None
        routed_alone = replace(replayed, rows=Routes.empty(replayed.weight.shape, replayed.rows[0]).rows)
        for mode, routes in (("off", routed_alone), ("on", replayed)):
            forest = programs.put_forest(replace(micro.forest, routes=routes))
            reading = programs["score"](trainer.state.masters, forest, temperature)
            sums[mode].append(jax.device_get(mismatch(reading.out, batch)))
            used, known = np.asarray(reading.routed.rows), np.asarray(replayed.weight) > 0
            other[mode].append((np.sort(used, axis=-1) != np.sort(replayed.rows, axis=-1)).any(axis=-1)[known])
    means = {mode: finish(add_up(parts)) for mode, parts in sums.items()}
    wrong = {mode: np.concatenate(parts) for mode, parts in other.items()}
    result = {"gap_histogram": gap_histogram(trainer, samples)} if dtype == jnp.float32 else {}
    return result | {
        "expert_mismatch_off": float(wrong["off"].mean()),
        "token_mismatch_off": float(wrong["off"].any(axis=1).mean()),
        "expert_mismatch_on": float(wrong["on"].mean()),
        **{f"{ours}_{mode}": means[mode][name] for ours, name in (("k3", "k3"), ("f2", "f_2")) for mode in ("off", "on")},
    }


def gap_histogram(trainer: Trainer, samples: Sequence[Sample]) -> dict[str, float]:
    """Share of choices whose gap is below so many bfloat16 eps of the logits' scale."""

    def gaps(params: Any, forest: Any) -> jax.Array:
        context = ForestContext(forest.blocks, trainer.definition.numerics)
        _, routing = trainer.definition.bind(params).forward(forest.tokens, forest.positions, context)
        assert routing is not None
        return routing.gap

    [micro, *_] = trainer.plan(samples).micro_batches
    assert micro.forest.routes is not None
    used = np.asarray(micro.forest.routes.weight) > 0
    gap = np.asarray(jax.jit(gaps)(trainer.state.masters, micro.forest))[:, used] / (EPS * ROUTER_SCALE)
    return {f"<{bound:g}": float((gap < bound).mean()) for bound in (0.25, 0.5, 1, 2, 4, 8, 16, 32, 64)}


def overhead(with_capture: Engine, without: Engine, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Tokens per second with capture over without; both engines are warm, and nothing is cached at the start of a round."""
    ratios, speeds = [], []

    def speed(engine: Engine) -> float:
        engine.forget()
        started = time.perf_counter()
        tokens = sum(len(completion.ids) for completion in engine.run(requests_of(sizes)))
        return tokens / (time.perf_counter() - started)

    with Others() as others:
        for number in range(sizes["rounds"]):
            order = (with_capture, without) if number % 2 else (without, with_capture)
            both = {id(engine): speed(engine) for engine in order}
            ratios.append(both[id(with_capture)] / both[id(without)])
            speeds.append(both[id(with_capture)])
    warn(others.cpus, "while capture was timed")
    return {
        "tokens_per_s": median(speeds),
        "capture_overhead": median(ratios),
        "capture_overhead_rounds": [min(ratios), max(ratios)],
        "other_cpus": others.cpus,
    }


def plot(file: Path, steps: int) -> dict[str, Any]:
    """Trains twice and writes the plot; returns the mean k3 of each run, and its rewards at both ends."""
    lines, result = {}, {}
    for name, replay in (("without replay", "off"), ("R3", "R3")):
        overrides = [
            f"--config.steps={steps}",
            f"--config.trainer.router_replay={replay}",
            "--config.trainer.balance_coef=0",
            "--config.model.dtype=float32",
            "--config.engine.dtype=bfloat16",
        ]
        run = make_run(build(RunConfig, read_config("configs/tiny_moe.py", overrides)))
        run.warm_up()
        metrics = [plain_step(run, number) for number in range(steps)]
        lines[name] = [line["k3"] for line in metrics]
        ends = [line["reward"] for line in metrics]
        result[replay] = {"k3": float(np.mean(lines[name])), "reward_first": ends[0], "reward_last": float(np.mean(ends[-5:]))}
    file.write_text(line_plot("bfloat16 sampler, float32 trainer", "step", "k3 of KL(sampler || trainer)", lines))
    return result | {"file": str(file)}
