"""Routing that the engine records and replays: aligned under every schedule, the bits of a cold run, nobody else's.

Legend: V vocab, L layers, E experts, k experts per token.
"""

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.config import EngineConfig
from inference.engine import Engine
from inference.runner import Runner
from inference.scheduler import Scheduler
from inference.types import Completion, FinishReason, Request, SamplingParams
from models.config import ModelConfig, MoEConfig
from models.routes import not_recorded, recorded
from models.transformer import Definition
from sharding.mesh import make_mesh
from sharding.reshard import init, reshard
from sharding.rules import Rules

V, L, E, K = 96, 4, 16, 4
MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=V,
    model_dim=64,
    ffn_dim=64,
    num_layers=L,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=1024,
    moe=MoEConfig(num_experts=E, experts_per_token=K, ffn_dim=32),
)
CONFIG = EngineConfig(
    max_context=640,
    context_buckets=(640,),
    max_slots=8,
    num_pages=96,
    page_size=16,
    tokens_per_step=64,
    token_buckets=(16, 64),
)
RULES = Rules()
MESH = make_mesh({"data": 1}, jax.devices()[:1])
GARBAGE = 7
"""in rows of free pages; no token has an expert twice"""


# ---- Two models: one whose router is a known function, one that is random


@cache
def random_params(version: int) -> dict[str, jax.Array]:
    weights = Definition(MODEL, jnp.bfloat16, stacked=False).weights
    return init(weights, jax.random.key(version), jnp.bfloat16, RULES.shardings(MESH, weights))


def signs(token_seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(token_seed).choice([-1.0, 1.0], shape)


def router(version: int, layer: int) -> np.ndarray:
    return np.random.default_rng(100 * version + layer).integers(-3, 4, (MODEL.model_dim, E)).astype(np.float64)


@cache
def known_params(version: int) -> dict[str, jax.Array]:
    """Attention and experts add 0, and embeddings are signs: every layer's router sees the token's signs, to the bit."""
    params = dict(random_params(0))

    def put(name: str, value: np.ndarray) -> None:
        params[name] = jax.device_put(jnp.asarray(value, jnp.bfloat16), params[name].sharding)

    put("embed", signs(0, V, MODEL.model_dim))
    for layer in range(L):
        for name in ("o", "moe.down"):
            put(f"blocks.{layer}.{name}", np.zeros(params[f"blocks.{layer}.{name}"].shape))
        put(f"blocks.{layer}.moe.router", router(version, layer))
    return params


@cache
def known_rows(version: int) -> np.ndarray:
    """[V, L, k]: that function. Logits are whole numbers; of equal ones the lowest id goes first."""
    logits = np.stack([signs(0, V, MODEL.model_dim) @ router(version, layer) for layer in range(L)], axis=1)
    return np.argsort(-logits, axis=-1, kind="stable")[..., :K].astype(np.uint8)


@cache
def programs() -> dict[tuple, Any]:
    runner = Runner(MODEL, CONFIG, jnp.bfloat16, MESH, RULES)
    runner.compile()
    return runner._programs


def make_engine(params: Callable[[int], Any] = random_params, version: int = 0, decode_steps: int = 8, **limits: Any) -> Engine:
    """A cold engine with the shared programs. Its pool, slots and chunks may be made smaller: nothing compiles."""
    engine = Engine(MODEL, CONFIG, params(version), version=version, dtype=jnp.bfloat16, mesh=MESH, rules=RULES)
    engine.runner._programs = programs()
    engine.config = dataclasses.replace(CONFIG, decode_steps=decode_steps)
    names = ("num_pages", "page_size", "max_slots", "max_context", "tokens_per_step")
    sizes: dict[str, Any] = {name: getattr(CONFIG, name) for name in names} | limits
    engine.scheduler = Scheduler(**sizes, routes=engine.routes)
    engine.scheduler.version = version
    return engine


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, V, length).tolist())


def request(name: str, ids: Sequence[int], max_tokens: int = 12, routing: np.ndarray | None = None, **params: Any) -> Request:
    return Request(id=name, prompt_ids=tuple(ids), params=SamplingParams(max_tokens=max_tokens, **params), routing=routing)


def all_ids(c: Completion) -> list[int]:
    return [*c.prompt_ids, *c.ids.tolist()]


def rows_of(c: Completion) -> np.ndarray:
    assert c.routing is not None and len(c.routing) == len(all_ids(c)) - 1 - c.routing_start
    return c.routing


def update(engine: Engine, params: Callable[[int], Any], mode: str = "retract") -> None:
    engine.pause(mode)
    engine.load(params(engine.version + 1), engine.version + 1)
    engine.resume()


def settle(engine: Engine) -> None:
    """Books that hold, and garbage in the rows of free pages, but for those that a copy is still to take."""
    engine.scheduler.check()
    assert engine.routes is not None
    free = [page for page, refs in enumerate(engine.scheduler.pool.refs) if refs == 0 or page == 0]
    taken = {source for places in engine.routes._coming for source, _ in places.copies}
    engine.routes.rows[[page for page in free if page not in taken]] = GARBAGE


def drain(engine: Engine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while engine.num_in_flight:
        done |= {c.request_id: c for c in engine.step()}
        settle(engine)
    return done


def sample_some(engine: Engine, tokens: int) -> None:
    wanted = engine.stats.sampled_tokens + tokens
    while engine.stats.sampled_tokens < wanted:
        assert not engine.step()
        settle(engine)


def assert_known(c: Completion, submitted: int) -> None:
    """J25: every row is the function of its own token, at the version that made the logits after it; prompt tokens may have
    been computed at any version between submitting and the first sampled token, but not in turns."""
    rows, ids, first = rows_of(c), all_ids(c), c.routing_start
    made = np.zeros(len(rows), int)
    for i, row in enumerate(rows):
        if not len(c.ids) and not recorded(row[None]).any():  # cancelled before it was computed
            made[i] = made[i - 1] if i else submitted
            continue
        fits = [v for v in range(submitted, 12) if (known_rows(v)[ids[first + i]] == row).all()]
        assert len(fits) == 1, f"{c.request_id}: row {first + i} is {row.tolist()}"
        made[i] = fits[0]
    assert (np.diff(made) >= 0).all(), made
    after = made[max(len(c.prompt_ids) - 1 - first, 0) :]
    assert after.tolist() == c.versions.tolist()[len(c.versions) - len(after) :]


SCHEDULE = st.fixed_dictionaries(
    {
        "num_pages": st.integers(17, 40),
        "tokens_per_step": st.sampled_from([8, 9, 13, 16, 64]),
        "max_slots": st.integers(1, 8),
        "decode_steps": st.integers(1, 8),
        "preempt_every": st.none() | st.integers(2, 9),
        "update_every": st.none() | st.integers(3, 12),
        "mode": st.sampled_from(["retract", "retract", "keep", "abort"]),
        "read_at_once": st.booleans(),
    }
)
TALK = st.fixed_dictionaries(
    {
        "priority": st.integers(0, 1),
        "shared": st.integers(0, 1),
        "length": st.sampled_from([1, 16, 17, 40, 90]),
        "own": st.integers(0, 9),
        "max_tokens": st.integers(1, 14),
        "turns": st.integers(1, 3),
        "rows": st.booleans(),
        "kind": st.sampled_from([{}, {"temperature": 0}, {"stop_ids": tuple(range(8))}, {"prompt_logprobs": True}]),
        "at": st.integers(0, 12),
        "cancel": st.none() | st.integers(0, 30),
    }
)


class Talks:
    """Conversations on one engine: turns follow one another, with or without the rows of those before."""

    def __init__(self, engine: Engine, talks: list[dict[str, Any]]):
        self.engine, self.talks = engine, talks
        self.turn = [0] * len(talks)
        self.over = [False] * len(talks)
        self.ids = [[*prompt(t["shared"], 100)[: t["length"]], *prompt(50 + n, t["own"])] for n, t in enumerate(talks)]
        self.rows: list[np.ndarray | None] = [None] * len(talks)
        self.submitted: dict[str, int] = {}
        self.asked: dict[str, Request] = {}
        self.completions: list[Completion] = []

    def submit(self, n: int) -> None:
        talk, name = self.talks[n], f"{n}.{self.turn[n]}"
        one = request(name, self.ids[n], talk["max_tokens"], self.rows[n], seed=talk["shared"], **talk["kind"])
        self.submitted[name], self.asked[name] = self.engine.version, one
        self.engine.submit(dataclasses.replace(one, priority=talk["priority"]))

    def take(self, completions: Sequence[Completion]) -> None:
        for c in completions:
            n = int(c.request_id.split(".")[0])
            given = self.asked[c.request_id].routing
            assert c.routing_start == (0 if given is None else len(given))
            rows = rows_of(c)
            self.completions.append(c)
            self.turn[n] += 1
            if c.finish_reason == FinishReason.ABORT or self.turn[n] == self.talks[n]["turns"]:
                self.over[n] = True
                continue
            self.ids[n] = [*all_ids(c), *prompt(70 + self.turn[n], self.talks[n]["own"] + 1)]
            if self.talks[n]["rows"]:
                self.rows[n] = rows if given is None else np.concatenate([given, rows])
            self.submit(n)

    def run(self, limits: dict[str, Any], params: Callable[[int], Any], most: int) -> None:
        engine = self.engine
        for now in range(3000):
            for n, talk in enumerate(self.talks):
                name = f"{n}.{self.turn[n]}"
                if talk["at"] == now:
                    self.submit(n)
                if talk["cancel"] is not None and talk["at"] + talk["cancel"] == now and name in engine._in_flight:
                    self.take([engine.cancel(name)])
            self.take(engine.step())
            if limits["read_at_once"]:
                engine._drain()
            settle(engine)
            if all(self.over):
                break
            if limits["preempt_every"] and now % limits["preempt_every"] == 0 and now < 60:
                engine.pause("retract")
                engine.resume()
            if limits["update_every"] and now % limits["update_every"] == 2 and engine.version < most:
                update(engine, params, limits["mode"])
        assert all(self.over)
        assert engine.num_in_flight == 0
        assert engine.scheduler.tree.evict(1000, engine.version) + engine.scheduler.pool.num_free >= limits["num_pages"] - 1


def run_talks(limits: dict[str, Any], talks: list[dict[str, Any]], params: Callable[[int], Any], most: int) -> Talks:
    names = ("num_pages", "tokens_per_step", "max_slots", "decode_steps")
    all_talks = Talks(make_engine(params, **{name: limits[name] for name in names}), talks)
    all_talks.run(limits, params, most)
    return all_talks


@settings(max_examples=40)
@given(SCHEDULE, st.lists(TALK, min_size=1, max_size=7))
def test_rows_are_the_known_routers(limits: dict[str, Any], talks: list[dict[str, Any]]) -> None:
    """Arrivals, cancels, priorities, small pools and chunks, forced retracts, updates in all modes, turns with and without the
    rows of those before."""
    done = run_talks(limits, talks, known_params, most=8)
    for c in done.completions:
        assert_known(c, done.submitted[c.request_id])


# ---- A random model: the bits of a cold run


@cache
def cold_engine() -> Engine:
    return make_engine(decode_steps=1)


def cold(version: int, asked: Request) -> Completion:
    """The request run by itself, in one chunk where it fits, from nothing, one decode step a call."""
    engine = cold_engine()
    engine.scheduler.tree.clear()
    engine.params, engine.scheduler.version = random_params(version), version
    [c] = engine.run([asked])
    assert c.cached_tokens == 0
    return c


def assert_cold(c: Completion, asked: Request, submitted: int, newest: int) -> None:
    """Each stretch of tokens of one version equals a cold run at that version, with the rows before it replayed, bit for bit.
    Prompt tokens: some at one version, those after them at the next."""
    ids, prompt_length = all_ids(c), len(c.prompt_ids)
    rows = rows_of(c) if asked.routing is None else np.concatenate([asked.routing, rows_of(c)])
    first = int(c.versions[0]) if len(c.versions) else newest
    at = c.routing_start
    if not len(c.ids):
        rows = rows[: int(recorded(rows).all(axis=1).sum())]
    end = min(prompt_length - 1, len(rows))
    for version in range(submitted, first + 1):
        if at < end:
            fresh = rows_of(cold(version, request("cold", c.prompt_ids, 1, rows[:at])))[: end - at]
            same = (fresh == rows[at:end]).all(axis=(1, 2))
            at = end if same.all() else at + int(same.argmin())
    assert at >= end, f"{c.request_id}: prompt row {at} is that of no version"
    done = 0
    while done < len(c.ids):
        version, n = int(c.versions[done]), int((c.versions == c.versions[done]).sum())
        start = prompt_length + done
        params = dataclasses.replace(asked.params, max_tokens=n, prompt_logprobs=False)
        again = cold(version, Request(id="cold", prompt_ids=tuple(ids[:start]), params=params, routing=rows[: start - 1]))
        for name in ("ids", "logprobs", "logprobs_full"):
            assert getattr(again, name).tobytes() == getattr(c, name)[done : done + n].tobytes(), (c.request_id, name, done)
        assert rows_of(again).tobytes() == rows[start - 1 : start - 1 + n].tobytes(), (c.request_id, done)
        done += n


@settings(max_examples=15)
@given(SCHEDULE.filter(lambda limits: limits["mode"] != "keep"), st.lists(TALK, min_size=1, max_size=5))
def test_completions_are_a_cold_runs(limits: dict[str, Any], talks: list[dict[str, Any]]) -> None:
    done = run_talks(limits, talks, random_params, most=4)
    for c in done.completions:
        assert_cold(c, done.asked[c.request_id], done.submitted[c.request_id], done.engine.version)
