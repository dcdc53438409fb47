"""`launch.bench pause`: what an update of a serving engine costs, in each mode, along real deltas and as a whole tree.

16 requests run on one device. The weights come from a store of files; each version moves the one before by a normal step of the
size that changes 1 % of the elements, as a step of training does. The first update is not timed: it compiles.

    fetch_ms           reading, decoding, checking and staging, while the engine has nothing else to do: outside the pause
    pause_ms           from the pause to the resume: the step in flight is read, requests are sent back, the delta is scattered
    tokens_recomputed  tokens whose keys were in pages and that go through the model again
    tokens_lost        sampled tokens that the pause, and the recomputing, took the time of
    tokens_per_s       sampled, without an update

Top level: mode retract. `load`: the pause of mode retract with a whole tree that is on the device already.
"""

import argparse
import tempfile
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inference.config import EngineConfig
from inference.engine import PAUSE_MODES, Engine
from inference.follower import Follower
from inference.types import Request, SamplingParams
from inference.updates import Acknowledgement, update
from launch.delta import HEADLINE, scale_for, ulp
from launch.quiet import Others, warn
from launch.serving import make_engine
from models.attention import KEY_BLOCK
from models.hf import resolve
from models.hf_config import read_config
from sharding.store import WeightStore

NUM = 16
SIZES = {"full": {"prompt": 256, "tokens": 96, "rounds": 3}, "small": {"prompt": 64, "tokens": 16, "rounds": 1}}
"""tokens of a prompt; tokens that are sampled before the update, and again after it; updates that are timed"""
Params = dict[str, jax.Array]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    model = "runs/models/smollm2-135m-instruct"
    parser.add_argument("--model", metavar="DIR", default=model, help="a Hugging Face directory or hub id")
    parser.add_argument("--scale", choices=SIZES, default="full", help="small: to see that it works")


def pause(arguments: argparse.Namespace) -> dict[str, Any]:
    sizes, directory = SIZES[arguments.scale], resolve(arguments.model)
    context = -(-(sizes["prompt"] + 3 * sizes["tokens"]) // KEY_BLOCK) * KEY_BLOCK
    config = EngineConfig(
        max_context=context,
        max_slots=NUM,
        slot_buckets=(NUM,),
        num_pages=NUM * (context // KEY_BLOCK + 1) + 1,
        page_size=KEY_BLOCK,
        tokens_per_step=512,
        token_buckets=(64, 512),
    )
    engine = make_engine(directory, read_config(directory), config)
    engine.warm_up()
    with tempfile.TemporaryDirectory() as folder, Others() as others:
        source = Source(engine, f"file://{folder}/")
        one(engine, source, "retract", sizes, whole=False)
        cases = {mode: measure(engine, source, mode, sizes) for mode in PAUSE_MODES}
        cases["load"] = measure(engine, source, "retract", sizes, whole=True)
    warn(others.cpus, "during the updates")
    return {**cases["retract"], "other_cpus": others.cpus, "model": str(directory), "requests": NUM, "modes": cases}


class Source:
    """A trainer's side: publishes the next version, moved from the one before."""

    def __init__(self, engine: Engine, url: str) -> None:
        self.store = WeightStore(url, anchor_every=1000)
        self.params: Params = {name: jnp.copy(array) for name, array in engine.params.items()}
        self.store.publish(self.params, 0)
        self.follower = Follower(engine, url, "bench")
        self.version = 0
        self.scales: dict[int, np.float32] = {}
        """of each leaf's steps"""

    def publish(self) -> None:
        moved = {name: self._moved(number, array) for number, (name, array) in enumerate(self.params.items())}
        self.store.publish(moved, self.version + 1, self.version, self.params)
        self.params, self.version = moved, self.version + 1

    def _moved(self, number: int, array: jax.Array) -> jax.Array:
        """The published weights of masters that lie anywhere around the ones before, half an ulp to either side."""
        old = np.asarray(array, np.float32)
        rng = np.random.default_rng([self.version, number])
        step = rng.standard_normal(old.shape, np.float32)
        if number not in self.scales:
            some = slice(2**16)
            self.scales[number] = np.float32(scale_for(HEADLINE, old.reshape(-1)[some], step.reshape(-1)[some]))
        spread = np.where(old == 0, 0, rng.random(old.shape, np.float32) - np.float32(0.5))
        masters = old + spread * ulp(old)
        return jax.device_put((masters + self.scales[number] * step).astype(array.dtype), array.sharding)


def measure(engine: Engine, source: Source, mode: str, sizes: dict[str, int], whole: bool = False) -> dict[str, float]:
    """The fastest of several updates in this mode."""
    found = [one(engine, source, mode, sizes, whole) for _ in range(sizes["rounds"])]
    return min(found, key=lambda each: each["pause_ms"])


def one(engine: Engine, source: Source, mode: str, sizes: dict[str, int], whole: bool) -> dict[str, float]:
    """An update in the middle of 16 requests, and the same number of tokens before and after it."""
    source.publish()
    submit(engine, sizes)
    while len(engine.scheduler.running) < NUM or any(sequence.num_sampled < 1 for sequence in engine.scheduler.running):
        engine.step()
    seconds = until_sampled(engine, sizes["tokens"] * NUM)
    computed = engine.stats.computed_tokens - engine.stats.sampled_tokens
    begun = time.perf_counter()
    made = swapped(engine, source, mode, whole)
    stopped = time.perf_counter() - begun - made.fetch_ms / 1e3
    again = seconds if mode == "abort" else until_sampled(engine, sizes["tokens"] * NUM)
    recomputed = engine.stats.computed_tokens - engine.stats.sampled_tokens - computed
    for request in list(engine._in_flight):
        engine.cancel(request)
    engine.step()
    rate = sizes["tokens"] * NUM / seconds
    return {
        "pause_ms": made.pause_ms,
        "fetch_ms": made.fetch_ms,
        "tokens_recomputed": recomputed,
        "retracted": made.retracted,
        "tokens_per_s": rate,
        "tokens_lost": rate * max(0.0, stopped + again - seconds),
        "delta_bytes": source.store.head().versions[source.version].delta_bytes,
    }


def swapped(engine: Engine, source: Source, mode: str, whole: bool) -> Acknowledgement:
    if not whole:
        return source.follower.update(source.version, mode)
    return update(engine, {name: jnp.copy(array) for name, array in source.params.items()}, source.version, mode=mode)


def submit(engine: Engine, sizes: dict[str, int]) -> None:
    rng = np.random.default_rng(engine.version)
    budget = 3 * sizes["tokens"] - 1
    for number in range(NUM):
        ids = tuple(rng.integers(0, engine.model.vocab_size, sizes["prompt"]).tolist())
        params = SamplingParams(max_tokens=budget, seed=number, ignore_eos=True)
        engine.submit(Request(id=str(number), prompt_ids=ids, params=params))


def until_sampled(engine: Engine, tokens: int) -> float:
    """Seconds until so many more tokens were sampled."""
    wanted, begun = engine.stats.sampled_tokens + tokens, time.perf_counter()
    while engine.stats.sampled_tokens < wanted:
        engine.step()
    return time.perf_counter() - begun
