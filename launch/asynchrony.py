"""`launch.bench async`: what it gains to sample beside training, by lag, on a virtual clock (`launch/virtual.py`).

The loop, buffer and schedulers are the real ones; devices are a cost model of H100s. The laws, fixed before any result:

math    AReaL's published setting (Fu et al., arXiv 2505.24298) of its 2.77x: DeepSeek-R1-Distill-Qwen-1.5B, 16 samples a task,
        64 a chip and step (512 tasks on 128 chips there), answers up to 27,648 tokens; log-normal, median 4,000, sigma 1
agent   Qwen3-8B, 8 samples a task, 32 a chip and step, a log-normal number of turns (median 8, sigma 0.6, at most 40), tokens
        of a turn (300, 0.8), outputs of tools (400, 1.0) and their seconds (2, 1.2, at most 300), a context of 32,768

Half of the variance of lengths is the task's and half the sample's. 8 chips, an engine on each that samples. `colocated`: lag
0, all chips sample, then all train. `split`: some sample, the others train, lag 0 too. Chosen by trying: the split (math 6 +
2, agent 5 + 3) and how many conversations an engine has at once.

    speedup_over_sync    over `colocated`, after lag + 2 steps: the smaller of the ratio of samples trained and that of tokens
                         sampled in the time, so that a queue that fills, or empties, gains nothing
    speedup_over_split   the same over lag 0 of `split`: what a disjoint trainer gains by not waiting
    idle_share           of the chips' time: of those that sample, of those that train (of `colocated` both are all), of all
    again_share          tokens computed again, as an update or a full pool took their keys, of all that are computed
    host_us_per_group    real time in the loop itself, outside the simulated sides
"""

import argparse
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from launch.costs import Chip, Model
from launch.virtual import Clock, Engine, Sampler, Trainer, Turn
from rl.buffer import Buffer
from rl.orchestrator import Orchestrator

LAGS = (0, 1, 2, 4, 8)
TARGET = 2.77
"""AReaL's own over its synchronous baseline"""

DISTILL_1_5B = Model(parameters=1.78e9, kv_bytes=2 * 28 * 2 * 128 * 2, attention_flops=4 * 28 * 12 * 128)
"""L 28, 12 heads, 2 kv heads, head dim 128, untied head"""
QWEN3_8B = Model(parameters=8.19e9, kv_bytes=2 * 36 * 8 * 128 * 2, attention_flops=4 * 36 * 32 * 128)
"""L 36, 32 heads, 8 kv heads, head dim 128"""


@dataclass(frozen=True, kw_only=True)
class Law:
    """Log-normal quantities are (median, sigma, most)."""

    model: Model
    samples: int
    """of a task"""
    per_chip: int
    """samples of a step, over chips"""
    context: int
    prompt: tuple[float, float, int]
    sampled: tuple[float, float, int]
    """tokens of a turn"""
    decode_steps: int
    at_once: int
    """conversations on an engine; more than its pages hold would only be preempted"""
    sampling: float
    """share of the chips"""
    turns: tuple[float, float, int] = (1, 0, 1)
    output: tuple[float, float, int] = (0, 0, 0)
    """tokens of a tool's output"""
    wait_s: tuple[float, float, int] = (0, 0, 0)

    def draw(self, seed: int, number: int) -> list[list[Turn]]:
        """The samples of a task; the same for every lag."""
        rng = np.random.default_rng((seed, number))
        prompt = int(lognormal(rng, self.prompt))
        task = rng.standard_normal(2)
        return [self._sample(rng, prompt, task) for _ in range(self.samples)]

    def _sample(self, rng: np.random.Generator, prompt: int, task: np.ndarray) -> list[Turn]:
        own = (task + rng.standard_normal(2)) / 2**0.5
        count = int(lognormal(rng, self.turns, own[0]))
        turns, length = [], 0
        for number in range(count):
            single = own[1] if count == 1 else None
            added = int(lognormal(rng, self.output)) if number else prompt
            sampled = int(lognormal(rng, self.sampled, single))
            wait = float(lognormal(rng, self.wait_s)) if number else 0.0
            if length + added + sampled >= self.context and turns:
                break
            length += added + sampled
            turns.append(Turn(added, sampled, wait))
        return turns


def lognormal(rng: np.random.Generator, law: tuple[float, float, int], normal: float | None = None) -> float:
    median, sigma, most = law
    if not median:
        return 0.0
    drawn = rng.standard_normal() if normal is None else normal
    return min(max(median * float(np.exp(sigma * drawn)), 1.0), most)


LAWS = {
    "math": Law(
        model=DISTILL_1_5B,
        samples=16,
        per_chip=64,
        context=1024 + 27648 + 1,
        prompt=(150, 0.6, 1024),
        sampled=(4000, 1.0, 27648),
        decode_steps=256,
        at_once=256,
        sampling=6 / 8,
    ),
    "agent": Law(
        model=QWEN3_8B,
        samples=8,
        per_chip=32,
        context=32768,
        prompt=(1500, 0.5, 4096),
        sampled=(300, 0.8, 4096),
        turns=(8, 0.6, 40),
        output=(400, 1.0, 8192),
        wait_s=(2, 1.2, 300),
        decode_steps=64,
        at_once=32,
        sampling=5 / 8,
    ),
}
SIZES = {"full": {"chips": 8, "steps": 6, "shrink": 1}, "small": {"chips": 4, "steps": 6, "shrink": 8}}
"""chips; steps that are measured, after lag + 2; by what a chip's samples are divided"""


class Books:
    """The ledger: what each task became."""

    def __init__(self) -> None:
        self.lags: Counter[int] = Counter()
        self.trained: list[int] = []
        self.given_up = 0

    def retry(self, number: int, reason: str) -> None:
        self.given_up += 1

    def drop(self, number: int, reason: str, step: int) -> None:
        self.given_up += 1

    def train(self, step: int, lags: Mapping[int, int]) -> None:
        self.lags.update(lags.values())
        self.trained += lags


class World:
    """One run: real loop, buffer and schedulers, virtual chips."""

    def __init__(self, law: Law, *, lag: int, chips: int, colocated: bool, batch: int, last: int, seed: int):
        self.clock, self.chips, self.lag, self.colocated = Clock(), chips, lag, colocated
        sampling = chips if colocated else round(chips * law.sampling)
        options = {"max_slots": law.at_once, "max_context": law.context, "decode_steps": law.decode_steps}
        self.engines = [Engine(law.model, Chip(), self.clock, **options) for _ in range(sampling)]
        self.trainer = Trainer(law.model, Chip(), self.clock, chips if colocated else chips - sampling, self.engines)
        self.books = Books()
        self.buffer = Buffer(lag=lag, batch=batch, last=last)
        sampler = Sampler(self.engines, self.trainer, lambda number: law.draw(seed, number), law.sampled[2], law.at_once)
        self.loop = Orchestrator(self.buffer, sampler, self.trainer, self.books, 0, clock=lambda: self.clock.now)

    def counts(self) -> dict[str, float]:
        times = [engine.times() for engine in self.engines]
        return {
            "wall": self.clock.now,
            "rollout_busy": sum(busy for busy, _ in times),
            "rollout_idle": sum(idle for _, idle in times),
            "trainer_busy": self.trainer.time() * self.trainer.chips,
            "samples": self.trainer.samples,
            "tokens": self.trainer.tokens,
            "sampled": sum(engine.sampled for engine in self.engines),
            "extended": sum(engine.extended for engine in self.engines),
            "again": sum(engine.again for engine in self.engines),
            "paused": sum(engine.pause_s for engine in self.engines),
            "preempted": sum(engine.scheduler.num_preemptions for engine in self.engines),
        }


def play(law: Law, sizes: Mapping[str, int], lag: int, colocated: bool, seed: int = 0) -> tuple[dict[str, Any], World]:
    chips = sizes["chips"]
    batch = max(law.per_chip * chips // (law.samples * sizes["shrink"]), 1)
    warm = lag + 2
    end = warm + sizes["steps"]
    world = World(law, lag=lag, chips=chips, colocated=colocated, batch=batch, last=end + lag + 1, seed=seed)
    started, before = time.perf_counter(), world.counts()
    for version, _ in world.loop.steps():
        if version == warm:
            before = world.counts()
        if version == end:
            break
    took = time.perf_counter() - started
    spent = {name: value - before[name] for name, value in world.counts().items()}
    return summary(world, spent, sizes["steps"], took), world


def summary(world: World, spent: Mapping[str, float], steps: int, took: float) -> dict[str, Any]:
    wall, lags, engines = spent["wall"], world.books.lags, len(world.engines)
    busy = spent["rollout_busy"] + spent["trainer_busy"]
    count = lags.total()
    return {
        "lag": world.lag,
        "steps_per_hour": 3600 * steps / wall,
        "samples_per_s": spent["samples"] / wall,
        "tokens_per_s": spent["sampled"] / wall,
        "max_lag": max(lags),
        "mean_lag": sum(lag * n for lag, n in lags.items()) / count,
        "lags": {str(lag): lags[lag] / count for lag in sorted(lags)},
        "idle_share": {
            "rollout": spent["rollout_idle"] / (wall * engines),
            "trainer": 1 - spent["trainer_busy"] / (wall * world.trainer.chips),
            "chips": 1 - busy / (wall * world.chips),
        },
        "pause_share": spent["paused"] / (wall * engines),
        "again_share": spent["again"] / (spent["sampled"] + spent["extended"]),
        "tokens_per_sample": spent["tokens"] / spent["samples"],
        "preemptions_per_step": spent["preempted"] / steps,
        "given_up": world.books.given_up,
        "virtual_s": world.clock.now,
        "wall_s": took,
        "host_us_per_group": 1e6 * (took - world.clock.host_s) / count,
    }


def compare(law: Law, sizes: Mapping[str, int]) -> dict[str, Any]:
    """Every lag of one law next to synchronous training."""
    sync, _ = play(law, sizes, 0, colocated=True)
    runs = [play(law, sizes, lag, colocated=False)[0] for lag in LAGS]
    for run in (sync, *runs):
        for name, other in (("sync", sync), ("split", runs[0])):
            run[f"speedup_over_{name}"] = min(run[rate] / other[rate] for rate in ("samples_per_s", "tokens_per_s"))
    best = max(runs, key=lambda run: run["speedup_over_sync"])
    return {
        "speedup_over_sync": best["speedup_over_sync"],
        "best_lag": best["lag"],
        "max_lag_ok": all(run["max_lag"] <= run["lag"] for run in (sync, *runs)),
        "colocated": sync,
        "split": {str(run["lag"]): run for run in runs},
    }


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--law", choices=LAWS, help="only this one")
    parser.add_argument("--scale", choices=SIZES, default="full", help="small: to see that it works")


def asynchrony(arguments: argparse.Namespace) -> dict[str, Any]:
    names: Sequence[str] = [arguments.law] if arguments.law else list(LAWS)
    laws = {name: compare(LAWS[name], SIZES[arguments.scale]) for name in names}
    first = laws[names[0]]
    return {
        "speedup_over_sync": first["speedup_over_sync"],
        "best_lag": first["best_lag"],
        "target": TARGET,
        "max_lag_ok": all(law["max_lag_ok"] for law in laws.values()),
        "laws": laws,
    }
