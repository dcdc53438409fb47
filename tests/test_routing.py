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
from inference.routing import Places, Routes
from inference.runner import Runner
from inference.scheduler import Scheduler
from inference.types import Completion, FinishReason, Request, SamplingParams
from models.config import ModelConfig, MoEConfig
from models.routes import recorded
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
    tokens_per_step=256,
    token_buckets=(64, 256),
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
    sizes: dict[str, Any] = {name: getattr(CONFIG, name) for name in names} | {"tokens_per_step": 64} | limits
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
        "tokens_per_step": st.sampled_from([1, 3, 8, 13, 16, 64]),
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
    sizes = {name: limits[name] for name in names}
    sizes["max_slots"] = min(sizes["max_slots"], sizes["tokens_per_step"])
    all_talks = Talks(make_engine(params, **sizes), talks)
    all_talks.run(limits, params, most)
    return all_talks


@pytest.mark.slow
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
    return make_engine(decode_steps=1, tokens_per_step=256)


def cold(version: int, asked: Request) -> Completion:
    """The request run by itself, in one chunk, from nothing, one decode step a call."""
    engine = cold_engine()
    engine.scheduler.tree.clear()
    engine.params, engine.scheduler.version = random_params(version), version
    assert len(asked.prompt_ids) <= 256
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


@pytest.mark.slow
@settings(max_examples=15)
@given(SCHEDULE.filter(lambda limits: limits["mode"] != "keep"), st.lists(TALK, min_size=1, max_size=5))
def test_completions_are_a_cold_runs(limits: dict[str, Any], talks: list[dict[str, Any]]) -> None:
    done = run_talks(limits, talks, random_params, most=4)
    for c in done.completions:
        assert_cold(c, done.asked[c.request_id], done.submitted[c.request_id], done.engine.version)


# ---- What is found in the cache


def test_a_prefix_hit_brings_its_rows_and_only_new_ones_return() -> None:
    """C22, C23: a turn of 600 cached tokens and 10 new ones."""
    engine = make_engine(known_params)
    [first] = engine.run([request("first", prompt(0, 560), 40)])
    assert len(rows_of(first)) == 599
    second = request("second", (*all_ids(first), *prompt(1, 10)), 5, rows_of(first))
    [c] = engine.run([second])
    assert c.routing_start == 599 and len(rows_of(c)) == 610 + 5 - 1 - 599
    assert c.cached_tokens >= 592 and c.prefilled_tokens <= 18
    assert_known(c, 0)
    [again] = engine.run([dataclasses.replace(second, id="again", routing=None)])
    assert again.routing_start == 0 and again.cached_tokens == 608, "the second turn's rows were found to be the version's own"
    assert rows_of(again).tobytes() == np.concatenate([rows_of(first), rows_of(c)]).tobytes()
    assert c.routing is not None and c.routing.nbytes == 15 * L * K, "a byte for each layer and expert of a token"


def test_a_prefix_that_is_still_on_its_way_brings_its_rows() -> None:
    """The group is admitted while the step that computes its prompt was not read."""
    engine = make_engine(known_params)
    for n in range(6):
        engine.submit(request(str(n), prompt(0, 61), 6, seed=n))
    done = drain(engine)
    assert sum(c.prefilled_tokens for c in done.values()) < 2 * 61
    for c in done.values():
        assert_known(c, 0)


@pytest.mark.parametrize("mode", ["retract", "keep"])
def test_replayed_pages_are_found_by_those_who_replay_the_same(mode: str) -> None:
    """A group is computed again at version 1 with the rows of version 0: once for all, and for nobody else. `keep`: rows that
    version 1 made after keys of version 0 are not its own either."""
    engine = make_engine()
    group = [request(str(n), prompt(0, 61), 40, seed=n) for n in range(3)]
    for r in group:
        engine.submit(r)
    sample_some(engine, 12)
    update(engine, random_params, mode)
    if mode == "keep":
        sample_some(engine, 12)
        engine.pause("retract")
        engine.resume()
    computed = engine.stats.computed_tokens
    [fresh] = engine.run([request("fresh", prompt(0, 61), 8)])
    done = {c.request_id: c for c in engine._done} | drain(engine)
    assert engine.stats.computed_tokens - computed < 3 * 61 + 3 * 40, "the group's prompt is computed once"
    assert_cold(fresh, request("fresh", prompt(0, 61), 8), 1, 1)
    [hit] = engine.run([request("hit", prompt(0, 61), 8)])
    assert hit.cached_tokens >= 60 and hit.ids.tolist() == fresh.ids.tolist()
    for r in group if mode == "retract" else ():
        assert_cold(done[r.id], r, 0, 1)


def test_a_kept_sequence_that_is_preempted_goes_on_with_its_rows() -> None:
    engine = make_engine(decode_steps=1)
    asked = request("kept", prompt(0, 40), 30, seed=1)
    engine.submit(asked)
    sample_some(engine, 5)
    update(engine, random_params, "keep")
    sample_some(engine, 5)
    engine.pause("retract")
    [sequence] = engine.scheduler.waiting
    n = len(sequence.ids)
    engine.resume()
    c = drain(engine)["kept"]
    rest = request("cold", all_ids(c)[:n], 40 + 30 - n, rows_of(c)[: n - 1], seed=1)
    again = cold(1, rest)
    assert again.ids.tobytes() == c.ids[n - 40 :].tobytes() and rows_of(again).tobytes() == rows_of(c)[n - 1 :].tobytes()
    assert again.logprobs.tobytes() == c.logprobs[n - 40 :].tobytes()
    [fresh] = engine.run([request("fresh", prompt(0, 40), 8)])
    assert_cold(fresh, request("fresh", prompt(0, 40), 8), 1, 1)


def test_turns_after_an_update_find_one_another() -> None:
    """Turn 1 at version 0, the others at version 1: what one routed freely, the next replays, and finds."""
    engine = make_engine()
    [c] = engine.run([request("1", prompt(0, 60), 20)])
    update(engine, random_params)
    rows, computed = rows_of(c), 0
    for turn in range(2, 5):
        asked = request(str(turn), (*all_ids(c), *prompt(turn, 21)), 20, rows)
        computed = len(all_ids(c)) - 1
        [c] = engine.run([asked])
        assert_cold(c, asked, 1, 1)
        assert c.cached_tokens >= (computed - 3 if turn > 2 else 0)
        rows = np.concatenate([rows, rows_of(c)])
    assert not engine.scheduler.running
    assert engine.scheduler.tree.evict(1000, 1) + engine.scheduler.pool.num_free >= CONFIG.num_pages - 1


def other_rows(seed: int, n: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.argsort(rng.random((n, L, E)), axis=-1)[..., :K].astype(np.uint8)


def test_equal_tokens_with_other_rows_are_other_pages() -> None:
    """Requests of one prompt with different rows, whole, in part, and none: each as from nothing, and found again."""
    engine, ids = make_engine(), prompt(0, 90)
    partly = other_rows(2, 89)
    partly[3::7] = 255
    partly[5::9, 2] = 255
    kinds = [None, other_rows(1, 89), partly, other_rows(1, 89)[:50], np.concatenate([other_rows(1, 40), other_rows(3, 49)])]
    seen = set()
    for turn in range(2):
        for n, rows in enumerate(kinds):
            asked = request(f"{turn}.{n}", ids, 8, rows)
            engine.submit(asked)
        for name, c in drain(engine).items():
            asked = request(name, ids, 8, kinds[int(name[-1])])
            want = cold(0, asked)
            assert c.ids.tobytes() == want.ids.tobytes() and c.logprobs.tobytes() == want.logprobs.tobytes(), name
            assert rows_of(c).tobytes() == rows_of(want).tobytes()
            assert turn == 0 or c.cached_tokens >= 80, name
            seen.add(c.logprobs_full.tobytes())
    assert len(seen) == len(kinds)


def test_rows_that_were_not_read_are_nobodys() -> None:
    """What stands in the store is an earlier owner's until the step is read that computes the page, or copies it."""
    routes = Routes(MODEL, num_pages=4, page_size=16)
    known = other_rows(0, 40)
    routes.rows[1], routes.rows[2] = known[:16], known[16:32]
    assert routes.alike(known, 2, 16, range(0, 16)) == 16
    assert routes.alike(known, 2, 16, range(7, 9)) == 9
    page, offset = np.array([1, 1, 2, 2, 0]), np.array([14, 15, 5, 6, 0])
    routes.dispatched(Places(page, offset, copies=[]))
    routes.dispatched(Places(np.array([3]), np.array([9]), copies=[(1, 3)]))
    assert [routes.alike(known, 2, 16, range(0, n)) for n in (5, 6, 16)] == [5, 5, 5]
    assert routes.alike(known, 3, 0, range(0, 16)) == 0
    routes.read(np.concatenate([known[14:16], known[[21]], known[[3]], known[[0]]]))
    assert routes.alike(known, 2, 16, range(0, 16)) == 6, "another row"
    assert routes.alike(known, 3, 0, range(0, 16)) == 0
    routes.read(known[9:10])
    assert routes.alike(known, 3, 0, range(0, 16)) == 16
    partly = known.copy()
    partly[22] = 255
    assert routes.alike(partly, 2, 16, range(0, 16)) == 16, "a row that is not known agrees with any"


def test_calls_that_only_read_leave_nothing_behind() -> None:
    """C22: a request for prompt log-probs, one that is cancelled before it runs, one while it runs."""
    engine = make_engine(known_params, decode_steps=2)
    [read] = engine.run([request("read", prompt(0, 70), 1, prompt_logprobs=True)])
    assert_known(read, 0)
    assert len(rows_of(read)) == 70
    engine.submit(request("never", prompt(2, 30)))
    never = engine.cancel("never")
    assert len(rows_of(never)) == 29 and not recorded(rows_of(never)).any()
    engine.submit(request("cut", prompt(1, 50), 40))
    sample_some(engine, 3)
    cut = engine.cancel("cut")
    assert_known(cut, 0)
    assert len(cut.ids) >= 3
    for c in engine.run([request("next", prompt(3, 40)), request("same", prompt(0, 70)), request("after", all_ids(cut))]):
        assert_known(c, 0)


def test_a_failed_step_loses_no_row_that_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine(known_params, decode_steps=1)
    engine.submit(request("one", prompt(0, 100), 20))
    sample_some(engine, 4)
    with monkeypatch.context() as patch:
        patch.setattr(engine.runner, "run", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            engine.step()
    c = drain(engine)["one"]
    assert len(c.ids) == 20
    assert_known(c, 0)


# ---- Refusals


def changed(rows: np.ndarray, value: int) -> np.ndarray:
    rows = rows.copy()
    rows[2, 1, 0] = value
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (other_rows(0, 10), "routing: 10 rows are more than the 9 tokens"),
        (changed(other_rows(0, 9), E), f"routing: row 2, layer 1 has expert {E}, but the model has {E}"),
        (changed(other_rows(0, 9), int(other_rows(0, 9)[2, 1, 1])), "routing: row 2, layer 1 has an expert twice"),
        (other_rows(0, 9)[:, :2], "routing: rows are uint8 .*another model"),
        (other_rows(0, 9)[..., :2], "routing: rows are uint8 .*another model"),
        (other_rows(0, 9).astype(np.uint16), "routing: rows are uint16 .*another model"),
    ],
)
def test_rows_that_cannot_be_are_refused(rows: np.ndarray, message: str) -> None:
    engine = make_engine()
    with pytest.raises(ValueError, match=message):
        engine.submit(request("bad", prompt(0, 10), 4, rows))
    assert engine.num_in_flight == 0


def test_an_engine_that_records_nothing() -> None:
    """Its programs have no row in them, and completions none."""
    config = dataclasses.replace(CONFIG, capture_routing=False, max_context=128, context_buckets=(), token_buckets=(64, 256))
    engine = Engine(MODEL, config, random_params(0), version=0, dtype=jnp.bfloat16, mesh=MESH, rules=RULES)
    with pytest.raises(ValueError, match=r"^routing: this engine does not record it; set engine\.capture_routing"):
        engine.submit(request("bad", prompt(0, 10), 4, other_rows(0, 9)))
    batch = engine.shapes.extend(64)
    out, _ = jax.eval_shape(engine.runner.extend, engine.params, engine.runner.state, batch)
    assert batch.replay is None and out[0].ndim == 2 and engine.routes is None


# ---- Several devices


SMALL = dataclasses.replace(MODEL, model_dim=32, num_layers=1, vocab_size=64, head_dim=8)
TENSOR = Rules({"heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "expert_ffn": "tensor", "vocab": "tensor"})
MESHES = {
    "one": ({"data": 1}, RULES),
    "expert=3": ({"expert": 3}, Rules({"experts": "expert"})),
    "tensor=2": ({"tensor": 2}, TENSOR),
}


@pytest.mark.slow
def test_experts_on_several_devices_are_those_of_one(report: Callable[[str], None]) -> None:
    """float32, 1e-5. J12, J19: the weights come, twice, from a trainer at expert=2, which does not divide the experts."""
    moe = MoEConfig(num_experts=15, experts_per_token=K, ffn_dim=32, shared_ffn_dim=16)
    model = dataclasses.replace(SMALL, moe=moe)
    config = EngineConfig(max_context=128, max_slots=8, num_pages=17, page_size=16, tokens_per_step=16, token_buckets=(16,))
    source, target = (Definition(model, jnp.float32, stacked=stacked).weights for stacked in (True, False))
    trained = Rules({"experts": "expert"}).shardings(make_mesh({"expert": 2}, jax.devices()[:2]), source)
    given = np.argsort(np.random.default_rng(0).random((19, 1, 15)), axis=-1)[..., :K].astype(np.uint8)
    asked = [request(str(n), [i * (3 + n) % 64 for i in range(20 + n)], 8, temperature=0) for n in range(3)]
    asked += [request("given", range(20), 8, given, temperature=0)]
    results = {}
    for name, (axes, rules) in MESHES.items():
        mesh = make_mesh(axes, jax.devices()[: np.prod(list(axes.values()))])

        def weights(seed: int, mesh: Any = mesh, rules: Rules = rules) -> Any:
            masters = init(source, jax.random.key(seed), jnp.float32, trained)
            return reshard(masters, source, target, rules.shardings(mesh, target), jnp.float32)

        engine = Engine(model, config, weights(0), version=0, dtype=jnp.float32, mesh=mesh, rules=rules)
        engine.runner.compile()
        results[name] = engine.run(asked)
        engine.pause()
        engine.load(weights(1), 1)
        engine.resume()
        results[name] += engine.run(asked)
    assert rows_of(results["one"][0]).tobytes() != rows_of(results["one"][4]).tobytes()
    for name in ("expert=3", "tensor=2"):
        gaps = []
        for a, b in zip(results[name], results["one"], strict=True):
            assert a.ids.tolist() == b.ids.tolist()
            assert rows_of(a).tolist() == rows_of(b).tolist()
            gaps.append(abs(a.logprobs_full - b.logprobs_full).max())
        report(f"engine, experts at {name} against one device: {max(gaps):g}")
        assert max(gaps) < 1e-5
