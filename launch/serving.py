"""`launch.bench serve`: the engine under a load, next to what the machine could do and to what another engine does.

Both sides play the whole load twice, ours before and after the peer's process, and the faster round of each counts; both are
warm, and our prefix cache is empty at the start of each round. All of a load's conversations are there from the start, so the
time to the first token holds the wait for a slot. Timings need a quiet machine: `other_cpus` is how many CPUs other processes
kept busy during our round, and a warning comes where that is too much.
"""

import argparse
import copy
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np

from inference.config import MIN_ROWS, EngineConfig
from inference.engine import Engine
from inference.types import Request, SamplingParams, Tokens
from launch.loads import LOADS, Answered, Asked, Load, Trace, ideal_hit_rate, ideal_hits, make_load, num_tokens, questions
from launch.peers import PEERS, check_installed, run_peer
from launch.quiet import Others, warn
from models.attention import KEY_BLOCK
from models.compiles import CompileCounter
from models.config import ModelConfig
from models.flops import forward_flops
from models.hf import load_hf, resolve
from models.hf_config import read_config
from models.layers import dot
from models.transformer import Definition, describe
from sharding.mesh import make_mesh
from sharding.reshard import reshard
from sharding.rules import Rules

DTYPE = jnp.bfloat16
FAST = "fast"
"""not a peer: our own with fast numerics, so that the ratio is what exact ones cost"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--load", choices=LOADS, required=True)
    parser.add_argument("--model", metavar="DIR", required=True, help="a Hugging Face directory or hub id")
    parser.add_argument("--against", choices=(FAST, *PEERS["serve"]), help="play the same load with this engine too")
    parser.add_argument("--requests-scale", choices=("full", "small"), default="full", help="small: to see that it works")


def serve(arguments: argparse.Namespace) -> dict[str, Any]:
    """Plays the load; keys are explained where they are computed."""
    against = arguments.against
    if against in PEERS["serve"]:
        check_installed(against)
    directory = resolve(arguments.model)
    model = read_config(directory)
    load = make_load(arguments.load, arguments.requests_scale, model.vocab_size)
    with Others() as others:
        time.sleep(0.5)
    warn(others.cpus, "at the start")
    engine = make_engine(directory, model, engine_sizes(load))
    with CompileCounter() as warm_up:
        engine.warm_up()
    fast = make_engine(directory, model, engine_sizes(load), exact=False) if against == FAST else None
    if fast:
        fast.warm_up()
    with CompileCounter() as compiles:
        rounds, peer = [play(engine, load)], None
        if fast:
            theirs = []
            for _ in range(3):  # in turns: the difference is small
                theirs.append(play(fast, load))
                rounds.append(play(engine, load))
            peer = numbers(min(theirs, key=lambda played: played.wall_s), load)
        elif against:
            peer = run_peer("serve", against, directory, load=arguments.load, scale=arguments.requests_scale)
        rounds.append(play(engine, load))
    best = min(rounds, key=lambda played: played.wall_s)
    warn(best.other_cpus, "during our round")
    sizes = LOADS[arguments.load][arguments.requests_scale]
    result = {"load": arguments.load, **sizes, "model": str(directory), "dtype": np.dtype(DTYPE).name}
    result |= numbers(best, load) | ceilings(engine, best)
    result |= {"compiles_after_warmup": compiles.count, "warm_up_compile_s": warm_up.seconds}
    if peer is not None:
        warn(peer["other_cpus"], f"during {against}'s rounds")
        result |= {f"{against}_{key}": value for key, value in peer.items()}
        result["ratio"] = result["tokens_per_s"] / peer["tokens_per_s"]
    return result


def engine_sizes(load: Load) -> EngineConfig:
    """Sizes that fit the load: no context wider than needed, and pages for all of it, so that nothing is ever evicted."""
    size = KEY_BLOCK
    pages = sum(-(-num_tokens(turns) // size) + 1 for turns in load.conversations)
    context = -(-load.longest // KEY_BLOCK) * KEY_BLOCK
    return EngineConfig(
        max_context=context,
        context_buckets=(*range(KEY_BLOCK, context, KEY_BLOCK // 2), context),
        max_slots=load.at_once,
        num_pages=-(-pages // 64) * 64,
        page_size=size,
        tokens_per_step=min(512, context),
        token_buckets=tuple(T for T in (64, 128, 192, 256, 384, 512) if context >= T),
    )


def make_engine(directory: Path, model: ModelConfig, config: EngineConfig, exact: bool = True) -> Engine:
    """A cold engine on one device, with the weights of a Hugging Face directory."""
    mesh, rules = make_mesh({"data": 1}, jax.devices()[:1]), Rules()
    source, target = describe(model), describe(model, stacked=False)
    shardings = rules.shardings(mesh, source)
    loaded = load_hf(directory, model, ml_dtypes.bfloat16)
    params = {name: jax.device_put(loaded.pop(name), shardings[name]) for name in source}
    params = reshard(params, source, target, rules.shardings(mesh, target), DTYPE)
    return Engine(model, config, params, version=0, dtype=DTYPE, mesh=mesh, rules=rules, exact=exact)


@dataclass(frozen=True)
class Played:
    """One round of a load."""

    wall_s: float
    other_cpus: float | None
    trace: Trace
    to_first_s: list[float]
    """of each request: from submitting it to its first token"""
    between_s: list[float]
    """of each later token: since the one before; tokens that come together share the time equally"""
    stats: dict[str, Any]
    """EngineStats of this round alone, and `preemptions`"""


def play(engine: Engine, load: Load) -> Played:
    """Plays a load on an engine that has nothing in flight, from an empty prefix cache."""
    engine.forget()
    before, preempted = copy.deepcopy(engine.stats), engine.scheduler.num_preemptions
    trace: list[Asked | Answered] = []
    to_first_s: list[float] = []
    between_s: list[float] = []
    turns = [iter(conversation) for conversation in load.conversations]

    def ask(number: int, history: tuple[int, ...]) -> None:
        """Submits the conversation's next turn, if there is one."""
        if (turn := next(turns[number], None)) is None:
            return
        trace.append(Asked(history + turn.added, turn.sampled))
        params = SamplingParams(max_tokens=turn.sampled, seed=len(trace), ignore_eos=True)
        request = Request(id=str(number), prompt_ids=history + turn.added, params=params)
        engine.submit(request, clock(to_first_s, between_s))

    with Others() as others:
        started = time.perf_counter()
        for number in range(len(turns)):
            ask(number, ())
        while engine.num_in_flight:
            for completion in engine.step():
                history = (*completion.prompt_ids, *completion.ids.tolist())
                trace.append(Answered(history))
                ask(int(completion.request_id), history)
        wall_s = time.perf_counter() - started
    after = {field.name: getattr(engine.stats, field.name) for field in fields(engine.stats)}
    stats = {name: value - getattr(before, name) for name, value in after.items()}
    stats["preemptions"] = engine.scheduler.num_preemptions - preempted
    return Played(wall_s, others.cpus, trace, to_first_s, between_s, stats)


def clock(to_first_s: list[float], between_s: list[float]) -> Callable[[Tokens], None]:
    """What a request's tokens are timed with, from now on."""
    times = [time.perf_counter()]

    def on_tokens(tokens: Tokens) -> None:
        times.append(time.perf_counter())
        took = times[-1] - times[-2]
        if len(times) == 2:
            to_first_s.append(took)
        else:
            between_s.extend([took / len(tokens.ids)] * len(tokens.ids))

    return on_tokens


def numbers(played: Played, load: Load) -> dict[str, Any]:
    """What was measured. Hit rates are shares of all prompt tokens."""
    stats = played.stats
    assert stats["sampled_tokens"] == load.num_sampled, "each request samples exactly what the load says"
    return {
        "tokens_per_s": stats["sampled_tokens"] / played.wall_s,
        "ttft_p50_ms": 1e3 * median(played.to_first_s),
        "itl_p50_ms": 1e3 * median(played.between_s),
        "prefix_hit_rate": stats["cached_tokens"] / stats["prompt_tokens"],
        "ideal_hit_rate": ideal_hit_rate(played.trace),
        "wall_s": played.wall_s,
        "other_cpus": played.other_cpus,
        "requests": len(questions(played.trace)),
        "sampled_tokens": stats["sampled_tokens"],
        "computed_tokens": stats["computed_tokens"],
        "prompt_tokens": stats["prompt_tokens"],
        "steps": stats["extends"] + stats["decodes"],
        "preemptions": stats["preemptions"],
    }


def ceilings(engine: Engine, played: Played) -> dict[str, float]:
    """Shares of the round that the model's products alone would take.

    dot_fraction: just its products with weights, run as the model runs them, as often and with as many rows as it did.
    roofline_fraction: all products that no engine could leave out (an ideal prefix cache, no padding, the head only where a
    token is sampled), at the best rate that this machine reaches in any product.
    """
    best = best_flops_per_s()
    return {
        "dot_fraction": dot_seconds(engine, played.stats["passes"]) / played.wall_s,
        "roofline_fraction": useful_flops(engine.model, played.trace) / best / played.wall_s,
        "best_gflops_per_s": best / 1e9,
    }


def useful_flops(model: ModelConfig, trace: Trace) -> float:
    """Of every product, two for each multiplication with its addition."""
    total = 0.0
    for asked, first in zip(questions(trace), ideal_hits(trace), strict=True):
        last = len(asked.prompt) + asked.sampled - 1  # what is sampled last never goes through the model
        total += forward_flops(model, last - first, sum(range(first + 1, last + 1)), asked.sampled)
    return total


def best_flops_per_s(size: int = 2048) -> float:
    """What this machine reaches in a big product of the model's kind."""
    x = jnp.ones((size, size), DTYPE)
    product = jax.jit(lambda x: dot("td,df->tf", x, x, DTYPE)).lower(x).compile()
    return 2 * size**3 / best_seconds(product, x, repeats=10)


def best_seconds(call: Callable[..., jax.Array], *arguments: Any, repeats: int) -> float:
    jax.block_until_ready(call(*arguments))
    times = []
    for _ in range(repeats):
        started = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - started)
    return min(times)


def dot_seconds(engine: Engine, passes: Mapping[tuple[str, int], int]) -> float:
    """Seconds of all passes through the model if they were products with weights only.

    Args:
        passes: how many there were of each kind and number of rows.
    """
    definition = Definition(engine.model, DTYPE, stacked=False)
    total = 0.0
    for (kind, rows), times in passes.items():
        heads = rows if kind == "decode" else min(rows, max(MIN_ROWS, engine.config.max_slots))
        x = jax.random.normal(jax.random.key(0), (rows, engine.model.model_dim), jnp.float32)
        compiled = jax.jit(partial(products, definition, heads)).lower(engine.params, x).compile()
        total += times * best_seconds(compiled, engine.params, x, repeats=3)
    return total


def products(definition: Definition, heads: int, params: Mapping[str, jax.Array], x_TD: jax.Array) -> jax.Array:
    """Every product with weights of one pass, called as the model calls it and each after those before it; between them is
    only what keeps that order and the numbers finite. The head takes the first `heads` rows."""
    model = definition.bind(params)
    blocks: Any = model.blocks
    x = x_TD
    for block in blocks:
        q, k, v = block.project(x, block.q, block.k, block.v)
        mixed = q + jnp.repeat(k + v, q.shape[1] // k.shape[1], axis=1)
        w = block.o[...]
        x = x_TD + 1e-6 * dot("te,ed->td", mixed.reshape(len(x), -1), w.reshape(-1, w.shape[-1]), DTYPE)
        x = x_TD + 1e-6 * block.project(sum(block.project(x, block.gate, block.up)), block.down)[0]
    return model.logits(x[:heads])
