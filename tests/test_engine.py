"""The engine on a tiny random model: one request's tokens and log-probs have the same bits however it is scheduled, and
the trainer finds the same log-probs; updates; refusals; the asyncio front."""

import asyncio
import dataclasses
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.config import EngineConfig
from inference.engine import Engine
from inference.front import AsyncEngine
from inference.runner import Runner
from inference.scheduler import Scheduler
from inference.types import Completion, FinishReason, Request, SamplingParams
from models.config import ModelConfig, MoEConfig
from models.routes import not_recorded
from models.tokenizer import ByteTokenizer
from models.transformer import Definition
from rl.branches import Branch
from rl.forest import Layout, pack
from rl.forward import read_rows
from sharding.mesh import make_mesh
from sharding.reshard import init, reshard
from sharding.rules import Rules

V = 96
MODELS = {
    "llama": ModelConfig(
        family="llama",
        vocab_size=V,
        model_dim=64,
        ffn_dim=128,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        max_positions=256,
        tied_head=True,
    )
}
MODELS["qwen3"] = dataclasses.replace(MODELS["llama"], family="qwen3", tied_head=False, num_kv_heads=4)
MODELS["qwen2_moe"] = dataclasses.replace(
    MODELS["llama"],
    family="qwen2_moe",
    moe=MoEConfig(num_experts=8, experts_per_token=3, ffn_dim=48, renormalise=False, shared_ffn_dim=64, shared_gate=True),
)
SCHEDULED = ("llama", "qwen2_moe")
"""what schedules may treat differently: rows of routing, or none"""
CONFIG = EngineConfig(max_context=256, context_buckets=(128, 256), max_slots=8, num_pages=64, page_size=16, tokens_per_step=64)
RULES = Rules()
MESH = make_mesh({"data": 1}, jax.devices()[:1])

Params = dict[str, jax.Array]


@cache
def masters(family: str, version: int) -> Params:
    """The trainer's float32 weights; other weights for each version."""
    weights = Definition(MODELS[family], jnp.float32, stacked=True).weights
    return init(weights, jax.random.key(version), jnp.float32, RULES.shardings(MESH, weights))


@cache
def published(family: str, version: int, dtype: Any = jnp.bfloat16) -> Params:
    source = Definition(MODELS[family], dtype, stacked=True).weights
    target = Definition(MODELS[family], dtype, stacked=False).weights
    return reshard(masters(family, version), source, target, RULES.shardings(MESH, target), dtype)


@cache
def programs(family: str, config: EngineConfig) -> dict[tuple, Any]:
    runner = Runner(MODELS[family], config, jnp.bfloat16, MESH, RULES)
    runner.compile()
    return runner._programs


def make_engine(family: str = "llama", version: int = 0, decode_steps: int = 8, **limits: Any) -> Engine:
    """A cold engine with the shared programs. Its pool, slots and chunks may be made smaller: nothing compiles."""
    engine = Engine(
        MODELS[family],
        CONFIG,
        published(family, version),
        version=version,
        dtype=jnp.bfloat16,
        mesh=MESH,
        rules=RULES,
        tokenizer=ByteTokenizer(),
    )
    engine.runner._programs = programs(family, CONFIG)
    engine.config = dataclasses.replace(CONFIG, decode_steps=decode_steps)
    names = ("num_pages", "page_size", "max_slots", "max_context", "tokens_per_step")
    sizes: dict[str, Any] = {name: getattr(CONFIG, name) for name in names} | limits
    engine.scheduler = Scheduler(**sizes, routes=engine.routes)
    engine.scheduler.version = version
    return engine


@pytest.fixture
def engine() -> Iterator[Engine]:
    engine = make_engine()
    yield engine
    reconcile(engine)


def reconcile(engine: Engine) -> None:
    """Nothing runs, so every page is free or held by the prefix tree alone, and all of those can be had."""
    scheduler = engine.scheduler
    scheduler.check()
    assert engine.num_in_flight == 0 and not scheduler.running and not scheduler.waiting
    assert scheduler.pool.num_free + scheduler.tree.num_pages == scheduler.pool.num_pages - 1
    assert scheduler.tree.evict(scheduler.pool.num_pages, engine.version) + scheduler.pool.num_free > 0
    assert scheduler.pool.num_free == scheduler.pool.num_pages - 1


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, V, length).tolist())


def request(name: str, prompt_ids: Sequence[int], max_tokens: int = 20, **params: Any) -> Request:
    return Request(id=name, prompt_ids=tuple(prompt_ids), params=SamplingParams(max_tokens=max_tokens, **params))


def mixture() -> list[Request]:
    """Shared and own prefixes, short and long, greedy, plain and truncated; two ask the very same."""
    shared = prompt(0, 100)
    return [
        request("plain", shared, seed=1),
        request("twin", shared, seed=1),
        request("sibling", (*shared, *prompt(1, 30)), seed=2),
        request("cousin", (*shared[:70], *prompt(2, 60)), seed=3, temperature=0.7),
        request("greedy", prompt(3, 33), temperature=0),
        request("short", prompt(4, 1), 40, seed=4),
        request("truncated", prompt(5, 65), seed=5, temperature=1.2, top_k=20, top_p=0.9, min_p=0.01),
        request("across", prompt(6, 120), 30, seed=6),
        request("page", prompt(7, 48), seed=7, stop_ids=tuple(range(8))),
        request("long", prompt(8, 200), seed=8),
    ]


RECORDED = ("ids", "logprobs", "logprobs_full", "top_ids", "top_logprobs")


def differ(a: Completion, b: Completion, first: int = 0) -> str:
    """What the completions do not share bit for bit, from token `first` of `a` on; empty if nothing."""
    pairs = [(name, getattr(a, name)[first:], getattr(b, name)) for name in RECORDED]
    if first == 0 and a.prompt_logprobs is not None and b.prompt_logprobs is not None:
        names = ("logprobs", "top_ids", "top_logprobs")
        pairs += [(f"prompt {name}", getattr(a.prompt_logprobs, name), getattr(b.prompt_logprobs, name)) for name in names]
    return "; ".join(
        f"{a.request_id}.{name}: {x} / {y}" for name, x, y in pairs if x.dtype != y.dtype or x.tobytes() != y.tobytes()
    )


@cache
def alone(family: str, asked: Request, version: int = 0) -> Completion:
    """The request run by itself in a cold engine, one decode step a call."""
    [completion] = make_engine(family, version, decode_steps=1).run([asked])
    assert completion.cached_tokens == 0 and completion.prefilled_tokens == len(asked.prompt_ids)
    return completion


def assert_as_alone(family: str, completions: Sequence[Completion], asked: Sequence[Request]) -> None:
    for a, b in zip(completions, asked, strict=True):
        assert a.request_id == b.id and a.prompt_ids == b.prompt_ids
        assert not differ(a, alone(family, b))
        assert a.finish_reason == alone(family, b).finish_reason


# ---- One request, many schedules


@pytest.mark.parametrize("family", SCHEDULED)
def test_batched_chunked_and_many_steps_equal_alone(family: str) -> None:
    for limits in ({}, {"tokens_per_step": 8}, {"tokens_per_step": 17, "max_slots": 3}, {"decode_steps": 1}):
        engine = make_engine(family, **limits)
        assert_as_alone(family, engine.run(mixture()), mixture())
        reconcile(engine)


@pytest.mark.parametrize("family", SCHEDULED)
def test_preempted_equals_not_preempted(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inference.scheduler.RESERVE", -1)  # admission leaves nothing for those who run
    for limits in ({"num_pages": 17}, {"num_pages": 20, "tokens_per_step": 16}, {"num_pages": 17, "decode_steps": 1}):
        engine = make_engine(family, **limits)
        assert_as_alone(family, engine.run(mixture()), mixture())
        assert engine.scheduler.num_preemptions > 0
        reconcile(engine)


@pytest.mark.parametrize("family", SCHEDULED)
def test_prefix_hit_equals_cold(family: str) -> None:
    engine = make_engine(family)
    cold = engine.run([request("cold", prompt(0, 100), 30, seed=1)])[0]
    hit = engine.run([request("hit", prompt(0, 100), 30, seed=1)])[0]
    assert (cold.cached_tokens, cold.prefilled_tokens) == (0, 100)
    assert (hit.cached_tokens, hit.prefilled_tokens) == (96, 4)
    assert not differ(hit, cold)
    # A second turn finds what was sampled, too: pages that decode steps wrote serve as well as prefilled ones.
    turn = (*cold.prompt_ids, *cold.ids.tolist(), *prompt(9, 20))
    second = request("second", turn, seed=2)
    [completion] = engine.run([second])
    assert completion.cached_tokens == 128  # 129 of the 130 have keys: the last sampled token was never computed
    assert not differ(completion, alone(family, second))
    reconcile(engine)


def test_engine_with_a_small_configuration_of_its_own(assert_no_compiles) -> None:
    """No shared programs: another page size, one bucket of everything; after warm-up nothing compiles."""
    config = EngineConfig(max_context=128, max_slots=4, num_pages=17, page_size=8, tokens_per_step=8, decode_steps=3)
    params = published("llama", 0)
    engine = Engine(MODELS["llama"], config, params, version=0, dtype=jnp.bfloat16, mesh=MESH, rules=RULES)
    assert engine.warm_up() == 4 and engine.warm_up() == 0  # extend, decode, copy, set_row
    asked = [r for r in mixture() if len(r.prompt_ids) + r.params.max_tokens <= 128]
    with assert_no_compiles():
        completions = engine.run(asked)
    assert_as_alone("llama", completions, asked)
    assert len(asked) > 4 and engine.scheduler.num_preemptions > 0
    reconcile(engine)


def test_a_decode_that_stops_early_leaves_pages_past_the_next_width(engine: Engine) -> None:
    """8 steps from position 122 need a ninth page of 16; a request finishes first, and the next extend is 128 wide."""
    asked = [request("long", prompt(1, 118), 60)]
    asked += [request(f"other {i}", prompt(2 + i, 20), 60) for i in range(6)]
    asked += [request("first", prompt(20, 20), 4), request("waiting", prompt(21, 20), 4)]
    assert_as_alone("llama", engine.run(asked), asked)


SCHEDULE = st.fixed_dictionaries(
    {
        "num_pages": st.integers(17, 40),
        "tokens_per_step": st.sampled_from([8, 13, 32, 64]),
        "max_slots": st.integers(1, 8),
        "decode_steps": st.integers(1, 8),
        "preempt_every": st.none() | st.integers(2, 9),
        "read_at_once": st.booleans(),
    }
)
ARRIVAL = st.fixed_dictionaries(
    {
        "priority": st.integers(0, 1),
        "shared": st.integers(0, 2),
        "length": st.sampled_from([1, 16, 17, 40, 90, 125, 200]),
        "own": st.integers(0, 20),
        "max_tokens": st.integers(1, 24),
        "seed": st.integers(0, 1),
        "kind": st.sampled_from(
            [
                {},
                {"temperature": 0},
                {"top_p": 0.9, "top_logprobs": 3},
                {"stop_ids": tuple(range(8))},
                {"stop": ("\x00", "\x10\x11")},
                {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": ((3, 2.0),)},
                {"allowed_ids": tuple(range(0, V, 3)), "presence_penalty": 0.5},
                {"prompt_logprobs": True, "top_logprobs": 2},
            ]
        ),
        "at": st.integers(0, 12),
        "cancel": st.none() | st.integers(0, 30),
    }
)


@partial(jax.jit, donate_argnums=0)
def poisoned(pool: Any, free: jax.Array) -> Any:
    """NaN in all free pages, the trash page too."""
    nan = jax.lax.bitcast_convert_type(jnp.bfloat16(jnp.nan), jnp.uint16)
    return jax.tree.map(lambda pages: jnp.where(free[:, None, None, None], nan, pages), pool)


def poison(engine: Engine) -> None:
    free = np.ones(CONFIG.num_pages, bool)
    free[: engine.scheduler.pool.num_pages] = np.asarray(engine.scheduler.pool.refs) == 0
    free[0] = True
    state = engine.runner.state
    engine.runner._state = dataclasses.replace(state, pool=poisoned(state.pool, free))


@settings(max_examples=40)
@given(SCHEDULE, st.lists(ARRIVAL, min_size=1, max_size=8))
def test_random_schedules_equal_alone(limits: dict[str, Any], arrivals: list[dict[str, Any]]) -> None:
    """Arrivals between steps, cancels, priorities, small pools, small chunks, forced preemptions; after every step the books
    are checked, and free pages are poisoned."""
    preempt_every, read_at_once = limits.pop("preempt_every"), limits.pop("read_at_once")
    engine = make_engine(**limits)
    asked = []
    for i, a in enumerate(arrivals):
        ids = prompt(a["shared"], 230)[: a["length"]] + prompt(100 + i, a["own"])
        one = request(str(i), ids, a["max_tokens"], seed=a["seed"], **a["kind"])
        asked.append(dataclasses.replace(one, priority=a["priority"]))
    done: dict[str, Completion] = {}
    cancelled = set()
    for now in range(2000):
        for a, r in zip(arrivals, asked, strict=True):
            if a["at"] == now:
                engine.submit(r)
            if a["cancel"] is not None and a["at"] + a["cancel"] == now and r.id not in done:
                done[r.id] = engine.cancel(r.id)
                cancelled.add(r.id)
        done |= {c.request_id: c for c in engine.step()}
        if read_at_once:  # J1: no step is dispatched before the last one is read
            engine._drain()
        engine.scheduler.check()
        poison(engine)
        if len(done) == len(asked):
            break
        if preempt_every and now % preempt_every == 0 and now < 100:
            engine.pause("retract")
            engine.resume()
    for r in asked:
        completion, whole = done[r.id], alone("llama", dataclasses.replace(r, id="alone", priority=0))
        if r.id in cancelled:
            assert completion.finish_reason == FinishReason.ABORT
            n = len(completion.ids)
            cut: dict[str, Any] = {name: getattr(whole, name)[:n] for name in RECORDED}
            whole = dataclasses.replace(whole, **cut, prompt_logprobs=completion.prompt_logprobs)
        else:
            assert completion.finish_reason == whole.finish_reason and completion.stop_reason == whole.stop_reason
        assert not differ(completion, whole)
    reconcile(engine)


# ---- The trainer, and an oracle


def trainer_log_probs(
    family: str, completions: Sequence[Completion], temperature: float, version: int = 0, replay: bool = True
) -> list:
    """What the trainer computes for the sampled tokens, from its own float32 masters and forest."""
    definition = Definition(MODELS[family], jnp.bfloat16, stacked=True, remat="block")
    layout = Layout(rows=1, tokens=1024, context=256, branches=16, length=64)
    branches = []
    for c in completions:
        ids = np.concatenate([np.asarray(c.prompt_ids, np.int32), c.ids])
        rows_of = None
        if c.routing is not None:
            rows_of = np.concatenate([c.routing, not_recorded(1, MODELS[family])])
            rows_of = rows_of if replay else np.full_like(rows_of, rows_of[-1, 0, 0])
        branches.append(Branch(ids, np.arange(len(ids)) >= len(c.prompt_ids), rows_of))

    compute = jax.jit(lambda *arguments: read_rows(definition, *arguments).out)
    rows: dict[int, np.ndarray] = {}
    for batch in pack(branches, layout)[0]:
        out = compute(masters(family, version), batch.forest, np.float32(temperature))
        rows |= dict(zip(batch.order.tolist(), np.asarray(out), strict=False))
    return [rows[n][: len(c.ids)] for n, c in enumerate(completions)]


CELLS: dict[str, dict[str, Any]] = {
    "batched": {},
    "chunked": {"tokens_per_step": 8},
    "preempted": {"num_pages": 17},
    "prefix hit": {},
    "retracted": {"decode_steps": 1},
    "temperature 0.7": {},
}


@pytest.mark.parametrize("family", MODELS)
def test_sampler_log_prob_is_the_trainers(family: str, report: Callable[[str], None]) -> None:
    """1e-5 is what is promised; these bfloat16 cells are equal bit for bit."""
    gaps = {}
    for cell, limits in CELLS.items():
        temperature = 0.7 if cell == "temperature 0.7" else 1.0
        engine = make_engine(family, **limits)
        asked = [
            dataclasses.replace(r, params=dataclasses.replace(r.params, temperature=temperature, top_k=0, top_p=1, min_p=0))
            for r in mixture()
        ]
        if cell == "prefix hit":
            engine.run(asked[:4])  # the pool cannot keep all of them
        for r in asked:
            engine.submit(r)
        done: dict[str, Completion] = {}
        for step in range(1000):
            done |= {c.request_id: c for c in engine.step()}
            if cell == "retracted" and step % 20 == 19:
                engine.pause("retract")
                engine.load(published(family, 0), engine.version + 1)
                engine.resume()
        completions = [done[r.id] for r in asked]
        assert cell != "retracted" or max(len(set(c.versions.tolist())) for c in completions) > 1
        if cell == "prefix hit":
            assert all(c.cached_tokens >= len(c.prompt_ids) - 16 for c in completions[:4])
        for replay in (True, False) if MODELS[family].moe else ():
            trained = trainer_log_probs(family, completions, temperature, replay=replay)
            assert all((a == c.logprobs).all() for a, c in zip(trained, completions, strict=True)), (cell, replay)
        trained = trainer_log_probs(family, completions, temperature)
        gaps[cell] = max(abs(a - c.logprobs).max() for a, c in zip(trained, completions, strict=True))
        reconcile(engine)
    report(f"tiny {family}, sampler log-prob against trainer: " + ", ".join(f"{k} {v:g}" for k, v in gaps.items()))
    assert all(gap == 0 for gap in gaps.values()), gaps


def dense_mlp(y: np.ndarray, gate: np.ndarray, up: np.ndarray, down: np.ndarray) -> np.ndarray:
    return (y @ gate / (1 + np.exp(-(y @ gate))) * (y @ up)) @ down


def dense_experts(config: MoEConfig, w: dict[str, np.ndarray], y: np.ndarray) -> np.ndarray:
    """Softmax over all experts, of which the best are taken as they are; and the shared one, weighed by its own sigmoid."""
    scores = np.exp(y @ w["moe.router"])
    scores /= scores.sum(-1, keepdims=True)
    out = dense_mlp(y, w["moe.shared_gate"], w["moe.shared_up"], w["moe.shared_down"])
    out = out / (1 + np.exp(-(y @ w["moe.shared_router"])))
    for t, best in enumerate(np.argsort(-scores, axis=-1)[:, : config.experts_per_token]):
        for e in best:
            out[t] += scores[t, e] * dense_mlp(y[t], w["moe.gate"][e], w["moe.up"][e], w["moe.down"][e])
    return out


def dense_logits(config: ModelConfig, params: Params, ids: Sequence[int]) -> np.ndarray:
    """The model written again in float64 numpy, from the papers: no cache, no blocks. Logits after the last token."""
    p = {name: np.asarray(x, np.float64) for name, x in params.items()}
    T, h = len(ids), config.head_dim
    angle = np.arange(T)[:, None] / config.rope_theta ** (np.arange(0, h, 2) / h)
    turn = np.exp(1j * angle)[:, None, :]

    def norm(x: np.ndarray, scale: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x * x).mean(-1, keepdims=True) + config.norm_eps) * scale

    def rotated(x: np.ndarray) -> np.ndarray:
        z = (x[..., : h // 2] + 1j * x[..., h // 2 :]) * turn
        return np.concatenate([z.real, z.imag], -1)

    x = p["embed"][list(ids)]
    for layer in range(config.num_layers):
        start = f"blocks.{layer}."
        w = {name.removeprefix(start): value for name, value in p.items() if name.startswith(start)}
        y = norm(x, w["attn_norm"])
        q, k, v = (np.einsum("td,dnh->tnh", y, w[name]) for name in "qkv")
        if config.qkv_bias:
            q, k, v = q + w["q_bias"], k + w["k_bias"], v + w["v_bias"]
        if config.qk_norm:
            q, k = norm(q, w["q_norm"]), norm(k, w["k_norm"])
        k, v = (np.repeat(a, config.num_heads // config.num_kv_heads, axis=1) for a in (rotated(k), v))
        scores = np.einsum("tnh,snh->nts", rotated(q), k) / np.sqrt(h)
        scores = np.where(np.tril(np.ones((T, T), bool)), scores, -np.inf)
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        out = np.einsum("nts,snh->tnh", weights / weights.sum(-1, keepdims=True), v)
        x = x + np.einsum("tnh,nhd->td", out, w["o"])
        y = norm(x, w["mlp_norm"])
        x = x + (dense_experts(config.moe, w, y) if config.moe else dense_mlp(y, w["gate"], w["up"], w["down"]))
    return norm(x[-1], p["norm"]) @ (p["embed"].T if config.tied_head else p["head"])


@pytest.mark.parametrize("family", MODELS)
def test_greedy_tokens_are_the_dense_oracles(family: str) -> None:
    config = EngineConfig(max_context=128, max_slots=8, num_pages=64, page_size=16, tokens_per_step=16)
    params = published(family, 0, jnp.float32)
    engine = Engine(MODELS[family], config, params, version=0, dtype=jnp.float32, mesh=MESH, rules=RULES)
    engine.warm_up()
    completions = engine.run([request(str(n), prompt(n, n), 8, temperature=0) for n in (1, 17, 40, 90)])
    for c in completions:
        ids = list(c.prompt_ids)
        for token, log_prob in zip(c.ids, c.logprobs_full, strict=True):
            logits = dense_logits(MODELS[family], params, ids)
            want = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            assert token == logits.argmax()
            assert abs(log_prob - want[token]) < 1e-4
            ids.append(int(token))
        assert (c.logprobs == 0).all()
    reconcile(engine)


# ---- The device's side


def test_nothing_compiles_after_warm_up(assert_no_compiles) -> None:
    engine = make_engine(num_pages=24)
    with assert_no_compiles():
        completions = engine.run(mixture())
        engine.pause("retract")
        engine.load(published("llama", 1), 1)
        engine.resume()
        engine.run(mixture())
    assert len(completions) == len(mixture())


def test_the_device_state_is_donated(engine: Engine) -> None:
    before = jax.tree.leaves(engine.runner.state)
    engine.run([request("one", prompt(0, 10), 4)])
    assert all(array.is_deleted() for array in before)
    for bucket in (("extend", 16), ("decode", 8, 8), ("copy",), ("set_row",)):
        text = engine.runner.lower(bucket).compile().as_text()
        aliases = re.search(r"input_output_alias=\{(.*?)\}, entry", text)
        assert aliases and aliases[1].count("alias)") == len(before), "all of the device state is written in place"


def test_no_weight_is_a_constant(engine: Engine) -> None:
    """J16: weights are arguments, or an update would not reach a tied head."""
    runner = engine.runner
    for function, batch in ((runner.extend, runner.shapes.extend(64)), (runner.decode, runner.shapes.decode(8, 16))):
        closed = jax.make_jaxpr(function)(engine.params, runner.state, batch)
        seen = list(constants(closed))
        assert sum(np.asarray(c).nbytes for c in seen) < 4096, [np.shape(c) for c in seen]


def constants(value: Any) -> Iterator[Any]:
    """Every constant of a closed jaxpr and of those inside it."""
    if isinstance(value, (tuple, list)):
        for item in value:
            yield from constants(item)
    elif hasattr(value, "jaxpr") and value.jaxpr is not value:  # in jax 0.12 an open jaxpr is its own
        yield from value.consts
        yield from constants(value.jaxpr)
    elif hasattr(value, "eqns"):
        for equation in value.eqns:
            yield from constants(list(equation.params.values()))
            yield from (v.val for v in equation.invars if hasattr(v, "val"))


# ---- Updates


def update(engine: Engine, mode: str, version: int, weights: int | None = None) -> None:
    engine.pause(mode)
    engine.load(published("llama", version if weights is None else weights), version)
    engine.resume()


def drain(engine: Engine) -> dict[str, Completion]:
    done: dict[str, Completion] = {}
    while engine.num_in_flight:
        done |= {c.request_id: c for c in engine.step()}
        engine.scheduler.check()
    return done


def step_until_sampled(engine: Engine, tokens: int) -> None:
    wanted = engine.stats.sampled_tokens + tokens
    while engine.stats.sampled_tokens < wanted:
        assert not engine.step()


@pytest.mark.parametrize("mode", ["retract", "keep"])
@pytest.mark.parametrize("limits", [{"tokens_per_step": 16}, {"num_pages": 18}, {"decode_steps": 2}], ids=str)
def test_updates_to_equal_weights_change_nothing(mode: str, limits: dict[str, Any]) -> None:
    """J2: retract every 3 steps with small chunks; the undisturbed run's tokens and log-probs, to the bit."""
    engine = make_engine(**limits)
    for r in mixture():
        engine.submit(r)
    done: dict[str, Completion] = {}
    # Prefills of 200 tokens take more than 3 steps of 16: let updates come faster than that only for a while.
    for step in range(5000):
        done |= {c.request_id: c for c in engine.step()}
        engine.scheduler.check()
        if not engine.num_in_flight:
            break
        if step % 3 == 2 and (step < 60 or step % 30 == 29):
            update(engine, mode, engine.version + 1, weights=0)
    assert_as_alone("llama", [done[r.id] for r in mixture()], mixture())
    assert engine.version > 3 and max(len(set(c.versions.tolist())) for c in done.values()) > 1
    reconcile(engine)


@pytest.mark.parametrize("mode", ["retract", "keep"])
def test_versions_per_token_and_budget_over_the_whole_life(mode: str) -> None:
    """C9: an update after token 3 of 5. C28: max_tokens counts what was sampled before it."""
    engine = make_engine(version=7, decode_steps=1)
    asked = request("one", prompt(0, 40), 5, seed=3)
    engine.submit(asked)
    step_until_sampled(engine, 2)  # and one more is in flight
    update(engine, mode, 8)
    completion = drain(engine)["one"]
    assert completion.versions.tolist() == [7, 7, 7, 8, 8]
    assert len(completion.versions) == len(completion.ids) == len(completion.logprobs) == 5
    assert completion.finish_reason == FinishReason.LENGTH
    old = alone("llama", asked, 7)
    for name in ("ids", "logprobs", "logprobs_full"):
        assert getattr(completion, name)[:3].tobytes() == getattr(old, name)[:3].tobytes(), "a record was changed"
    # The rest of a retracted request is what a cold engine at v8 makes of prompt and sampled tokens (C8).
    rest = alone("llama", request("rest", (*asked.prompt_ids, *old.ids[:3].tolist()), 2, seed=3), 8)
    assert bool(differ(completion, rest, first=3)) == (mode == "keep")
    reconcile(engine)


def test_no_page_serves_another_version(engine: Engine) -> None:
    """C7: a warm prompt at v0, the same prompt at v1."""
    asked = request("again", prompt(0, 100), seed=1)
    engine.run([asked])
    assert engine.run([asked])[0].cached_tokens == 96
    update(engine, "retract", 1)
    completion = engine.run([asked])[0]
    assert completion.cached_tokens == 0
    assert not differ(completion, alone("llama", asked, 1))
    assert differ(completion, alone("llama", asked, 0)), "the weights of the two versions differ"
    hit = engine.run([asked])[0]
    assert hit.cached_tokens == 96 and not differ(hit, completion)


def test_retract_gives_up_every_page(engine: Engine) -> None:
    """J3: after it free + evictable == total; C8: all running requests are prefilled again under the new weights."""
    asked = [request(str(i), prompt(i, 50), 30, seed=i) for i in range(4)]
    for r in asked:
        engine.submit(r)
    step_until_sampled(engine, 12)
    engine.pause("retract")
    scheduler = engine.scheduler
    assert not scheduler.running and len(scheduler.waiting) == 4
    assert scheduler.pool.num_free + scheduler.tree.num_pages == scheduler.pool.num_pages - 1
    engine.load(published("llama", 1), 1)
    assert not scheduler.tree.match(1, "", asked[0].prompt_ids).pages, "the old version's prefix cannot be hit"
    engine.resume()
    done = drain(engine)
    for r in asked:
        sampled = (done[r.id].versions == 0).sum()
        assert sampled and done[r.id].prefilled_tokens == 50 + 50 + sampled
        rest = request("rest", (*r.prompt_ids, *done[r.id].ids[:sampled].tolist()), int(30 - sampled), seed=r.params.seed)
        assert not differ(done[r.id], alone("llama", rest, 1), first=int(sampled))


def test_keep_keeps_pages_private(engine: Engine) -> None:
    asked = request("kept", prompt(0, 40), 60, seed=1)
    engine.submit(asked)
    step_until_sampled(engine, 3)
    old_pages = engine.scheduler.tree.num_pages
    update(engine, "keep", 1)
    sharing = request("sharing", prompt(0, 40), 4, seed=1)
    engine.submit(sharing)
    done = drain(engine)
    assert done["kept"].prefilled_tokens == 40, "nothing was computed again"
    assert done["sharing"].cached_tokens == 0
    assert not differ(done["sharing"], alone("llama", sharing, 1))
    assert engine.scheduler.tree.num_pages == old_pages + 3, "40 + 3 tokens of the new request lie in three pages"
    turn = (*asked.prompt_ids, *done["kept"].ids.tolist())
    assert engine.run([request("turn", turn, 1)])[0].cached_tokens == 40


def test_abort_returns_what_was_sampled(engine: Engine) -> None:
    asked = [request(str(i), prompt(i, 20), 40, seed=i) for i in range(12)]
    for r in asked:
        engine.submit(r)
    step_until_sampled(engine, 20)
    engine.pause("abort")
    assert engine.num_in_flight == 0
    done = {c.request_id: c for c in engine.step()}
    assert engine.step() == [] and done.keys() == {r.id for r in asked}
    for r in asked:
        n = len(done[r.id].ids)
        assert done[r.id].finish_reason == FinishReason.ABORT
        assert done[r.id].ids.tolist() == alone("llama", r).ids[:n].tolist()
    assert any(len(c.ids) for c in done.values()) and any(not len(c.ids) for c in done.values())


def test_paused_engine_waits_and_takes_requests(engine: Engine) -> None:
    engine.pause()
    engine.submit(request("late", prompt(0, 10), 4))
    assert engine.step() == [] and engine.stats.sampled_tokens == 0
    engine.resume()
    assert not differ(drain(engine)["late"], alone("llama", request("late", prompt(0, 10), 4)))


def test_refused_loads_change_nothing(engine: Engine) -> None:
    asked = request("one", prompt(0, 10), 4)
    good = published("llama", 1)
    with pytest.raises(ValueError, match="load: pause the engine first"):
        engine.load(good, 1)
    with pytest.raises(ValueError, match="mode: 'stop' is unknown; use one of"):
        engine.pause("stop")
    assert not engine.paused
    engine.pause()
    for version in (0, -1):
        with pytest.raises(ValueError, match=f"version: {version} is not newer than the loaded 0"):
            engine.load(good, version)
    wrong = {
        "missing blocks.1.q": {k: v for k, v in good.items() if k != "blocks.1.q"},
        "unknown head": good | {"head": good["embed"]},
        "norm is float32\\[64\\], not bfloat16\\[64\\]": good | {"norm": good["norm"].astype(jnp.float32)},
        "embed is bfloat16\\[64, 96\\], not bfloat16\\[96, 64\\]": good | {"embed": good["embed"].T},
    }
    for message, params in wrong.items():
        with pytest.raises(ValueError, match=f"params: {message}"):
            engine.load(params, 1)
    with pytest.raises(ValueError, match="missing norm; unknown norms"):
        engine.load({k.replace("norm", "norms") if k == "norm" else k: v for k, v in good.items()}, 1)
    assert engine.version == 0
    engine.resume()
    assert not differ(engine.run([asked])[0], alone("llama", asked))


# ---- Refusals


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (request("a", ()), "prompt_ids: request 'a' has an empty prompt"),
        (
            request("a", prompt(0, 256)),
            "prompt_ids: request 'a' has 256 prompt tokens, but the engine's context is 256",
        ),
        (request("a", (1, V)), f"prompt_ids: {V} is outside the model's vocabulary of {V}"),
        (request("a", (-1,)), "prompt_ids: -1 is outside"),
        (
            request("a", prompt(0, 100), 100),
            "max_tokens: request 'a' may need 13 pages of 16 tokens, but the pool has 9",
        ),
        (dataclasses.replace(request("a", (1,)), adapter="lora"), "adapter: 'lora' is not loaded"),
    ],
)
def test_requests_that_can_never_run_are_refused(asked: Request, message: str) -> None:
    engine = make_engine(num_pages=10)
    with pytest.raises(ValueError, match=re.escape(message)):
        engine.submit(asked)
    assert engine.num_in_flight == 0 and engine.step() == []
    reconcile(engine)


def test_ids_are_unique_in_flight_only(engine: Engine) -> None:
    asked = request("same", prompt(0, 255), 9)
    engine.submit(asked)
    with pytest.raises(ValueError, match="id: a request 'same' is in flight already"):
        engine.submit(asked)
    assert len(drain(engine)["same"].ids) == 1, "the context is full"
    assert len(engine.run([asked])) == 1
    with pytest.raises(ValueError, match="id: no request 'same' is in flight"):
        engine.cancel("same")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"max_slots": 0}, "engine.max_slots: must be at least 1"),
        ({"page_size": 24}, "engine.page_size: must divide 128"),
        ({"max_context": 200}, "200 is not a multiple of 128"),
        ({"tokens_per_step": 4}, "engine.tokens_per_step: 4 is less than max_slots"),
        ({"context_buckets": (128,)}, "engine.context_buckets: (128,) must start at 8 or more, increase and end at 256"),
        ({"slot_buckets": (16, 8)}, "engine.slot_buckets: (16, 8) must start at 8 or more, increase and end at 8"),
        ({"slot_buckets": (4, 8)}, "engine.slot_buckets: (4, 8) must start at 8 or more"),
        ({"token_buckets": (32,)}, "engine.token_buckets: (32,) must start at 8 or more, increase and end at 64"),
    ],
)
def test_sizes_that_cannot_serve_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        dataclasses.replace(CONFIG, **values)


def test_context_beyond_the_models_positions_is_refused() -> None:
    config = dataclasses.replace(CONFIG, max_context=512, context_buckets=())
    with pytest.raises(ValueError, match="engine.max_context: 512 exceeds the model's 256 positions"):
        Engine(MODELS["llama"], config, {}, version=0, dtype=jnp.bfloat16, mesh=MESH, rules=RULES)


# ---- The asyncio front


def test_concurrent_callers_get_what_run_gives(engine: Engine) -> None:
    asked = [request(str(i), prompt(i % 5, 10 + 9 * i), 12, seed=i) for i in range(20)]
    busy = threading.Event()
    step, submit, pause = engine.step, engine.submit, engine.pause

    def watched_step(max_steps: int | None = None) -> list[Completion]:
        busy.set()
        try:
            return step(max_steps)
        finally:
            busy.clear()

    def at_a_boundary(function: Any) -> Any:
        def checked(*args: Any) -> None:
            assert not busy.is_set(), "the engine was touched while it stepped"
            function(*args)

        return checked

    engine.step = watched_step
    engine.submit, engine.pause = at_a_boundary(submit), at_a_boundary(pause)
    front = AsyncEngine(engine)

    async def late(i: int, r: Request) -> Completion:
        await asyncio.sleep(0.002 * (i % 7))
        return await front.generate(r)

    async def updates() -> None:
        for version in range(1, 4):
            await asyncio.sleep(0.01)
            await front.pause("retract")
            await front.load(published("llama", 0), version)
            await front.resume()

    async def main() -> list[Completion]:
        callers = [late(i, r) for i, r in enumerate(asked)]
        updating = asyncio.create_task(updates())
        completions = await asyncio.wait_for(asyncio.gather(*callers), 60)
        await updating
        return completions

    assert_as_alone("llama", asyncio.run(main()), asked)
    assert engine.version == 3


def test_a_cancelled_caller_frees_its_pages(engine: Engine) -> None:
    front = AsyncEngine(engine)
    staying = request("staying", prompt(0, 30), 30, seed=1)

    async def main() -> Completion:
        stay = asyncio.create_task(front.generate(staying))
        leaving = [asyncio.create_task(front.generate(request(str(i), prompt(i, 40), 200))) for i in range(5)]
        while engine.stats.sampled_tokens < 10:
            await asyncio.sleep(0.001)
        for task in leaving:
            task.cancel()
        results = await asyncio.gather(*leaving, return_exceptions=True)
        assert all(isinstance(result, asyncio.CancelledError) for result in results)
        completion = await stay
        for _ in range(1000):
            if engine.num_in_flight == 0:
                break
            await asyncio.sleep(0.001)
        return completion

    assert not differ(asyncio.run(main()), alone("llama", staying))


def test_a_caller_cancelled_before_an_abort_does_not_stop_the_others(engine: Engine) -> None:
    front = AsyncEngine(engine)

    async def main() -> tuple[Completion, Completion]:
        leaving = asyncio.create_task(front.generate(request("leaving", prompt(0, 40), 200)))
        staying = asyncio.create_task(front.generate(request("staying", prompt(1, 40), 200)))
        while engine.stats.sampled_tokens < 4:
            await asyncio.sleep(0.001)
        leaving.cancel()
        await front.pause("abort")
        aborted = await asyncio.wait_for(staying, 30)
        await front.resume()
        return aborted, await asyncio.wait_for(front.generate(request("after", prompt(2, 20), 4)), 30)

    aborted, after = asyncio.run(main())
    assert aborted.finish_reason == "abort" and len(after.ids) == 4 and engine.num_in_flight == 0


def test_an_exception_reaches_every_caller_and_leaves_nothing_behind(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    front = AsyncEngine(engine)
    dispatch = engine._dispatch
    asked = [request(str(i), prompt(i, 20), 9, seed=i) for i in range(12)]

    def broken(plan: Any) -> list[Completion]:
        raise RuntimeError("the device is gone")

    async def main() -> list[Completion]:
        monkeypatch.setattr(engine, "_dispatch", broken)
        results = await asyncio.gather(*map(front.generate, asked), return_exceptions=True)
        assert [str(result) for result in results] == ["the device is gone"] * 12
        assert engine.num_in_flight == 0
        monkeypatch.setattr(engine, "_dispatch", dispatch)
        return list(await asyncio.gather(*map(front.generate, asked)))

    assert_as_alone("llama", asyncio.run(main()), asked)


def test_a_failed_step_loses_nothing_that_was_read(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever goes on with an engine whose step failed, in dispatch or while it was read, gets the same tokens."""
    dispatch, read = engine._dispatch, engine._read
    for name, number in (("_dispatch", 3), ("_read", 3), ("_read", 1)):
        calls = 0

        def once(step: Any, of: Any = dispatch if name == "_dispatch" else read, at: int = number) -> Any:
            nonlocal calls
            calls += 1
            if calls == at:
                raise RuntimeError("the device hiccupped")
            return of(step)

        monkeypatch.setattr(engine, name, once)
        for r in mixture():
            engine.submit(r)
        with pytest.raises(RuntimeError, match="hiccupped"):
            drain(engine)
        engine.scheduler.check()
        monkeypatch.undo()
        done = drain(engine)
        finished = [r for r in mixture() if r.id in done]
        assert len(finished) > 5, "those that had finished before are with the caller that failed"
        assert_as_alone("llama", [done[r.id] for r in finished], finished)


def test_an_id_may_come_again_after_its_caller_left(engine: Engine) -> None:
    """The caller is cancelled when its completion is there already but unread."""
    front = AsyncEngine(engine)
    asked = request("same", prompt(0, 20), 4)

    async def main() -> Completion:
        first = asyncio.create_task(front.generate(asked))
        while engine.stats.finished["length"] < 1:
            await asyncio.sleep(0)
        first.cancel()
        await asyncio.gather(first, return_exceptions=True)
        return await asyncio.wait_for(front.generate(asked), 60)

    assert not differ(asyncio.run(main()), alone("llama", asked))


def test_a_refused_request_disturbs_nobody(engine: Engine) -> None:
    front = AsyncEngine(engine)
    good = request("good", prompt(0, 20), 9)

    async def main() -> list[Any]:
        calls = (good, request("bad", ()), good)
        return await asyncio.gather(*map(front.generate, calls), return_exceptions=True)

    completion, empty, duplicate = asyncio.run(main())
    assert "empty prompt" in str(empty) and "in flight already" in str(duplicate)
    assert not differ(completion, alone("llama", good))
