"""Updates of an engine's weights: 16 running requests in each mode, failures at every state, followers of a store, and a
trainer that went back. A pool that knows who wrote each token watches every step."""

import dataclasses
import itertools
from collections.abc import Iterator
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tensorstore as ts

from inference.config import EngineConfig
from inference.engine import Engine
from inference.follower import Follower, newest
from inference.runner import Runner
from inference.scheduler import Plan
from inference.types import Completion, FinishReason, Request, SamplingParams
from inference.updates import State, Update, UpdateFailed, WeightsLost, update
from models.config import ModelConfig, MoEConfig
from models.transformer import Definition
from sharding.deltas import checksums, manifest
from sharding.mesh import make_mesh
from sharding.reshard import init, reshard
from sharding.rules import Rules
from sharding.store import CONTEXT, WeightStore

pytestmark = pytest.mark.plain_code

V, TOKENS, NUM = 96, 12, 16
MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=V,
    model_dim=64,
    ffn_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=256,
    moe=MoEConfig(num_experts=8, experts_per_token=2, ffn_dim=32),
)
CONFIG = EngineConfig(
    max_context=128,
    context_buckets=(128,),
    max_slots=NUM,
    slot_buckets=(NUM,),
    num_pages=120,
    page_size=16,
    tokens_per_step=128,
    token_buckets=(128,),
    decode_steps=1,
)
RULES, MESH = Rules(), make_mesh({"data": 1}, jax.devices()[:1])
FIRST = 7
_FOLDERS = itertools.count()

Params = dict[str, jax.Array]


@cache
def tree(version: int, timeline: int = 0) -> Params:
    """The published weights of a version. Each moves a tenth of the one before; timelines part after `FIRST`."""
    if version == FIRST:
        stacked, unrolled = (Definition(MODEL, jnp.bfloat16, stacked=each).weights for each in (True, False))
        masters = init(stacked, jax.random.key(0), jnp.float32, RULES.shardings(MESH, stacked))
        return reshard(masters, stacked, unrolled, RULES.shardings(MESH, unrolled), jnp.bfloat16)
    rng = np.random.default_rng([version, timeline])
    moved = {}
    for name, array in tree(version - 1, timeline).items():
        bits = np.asarray(array).view(np.uint16) + 3 * (rng.random(array.shape) < 0.1).astype(np.uint16)
        moved[name] = jax.device_put(bits.view(jnp.bfloat16), array.sharding)
    return moved


def copied(params: Params) -> Params:
    """An engine's own: a delta is applied in the place of its arrays."""
    return {name: jnp.copy(array) for name, array in params.items()}


def publish(store: WeightStore, version: int, timeline: int = 0) -> None:
    base = None if version == FIRST else version - 1
    store.publish(tree(version, timeline), version, base, None if base is None else tree(base, timeline))


@pytest.fixture
def store() -> WeightStore:
    """Versions 7 to 10, of which only 7 is an anchor."""
    made = WeightStore(f"memory://updates{next(_FOLDERS)}/", anchor_every=100)
    for version in range(FIRST, FIRST + 4):
        publish(made, version)
    return made


def url(store: WeightStore) -> str:
    return store._kv.url


@cache
def programs() -> dict[tuple, Any]:
    runner = Runner(MODEL, CONFIG, jnp.bfloat16, MESH, RULES)
    runner.compile()
    return runner._programs


def make_engine(version: int = FIRST, timeline: int = 0) -> Engine:
    own = copied(tree(version, timeline))
    engine = Engine(MODEL, CONFIG, own, version=version, dtype=jnp.bfloat16, mesh=MESH, rules=RULES)
    engine.runner._programs = programs()
    return engine


class Watched:
    """An engine whose pool knows by which weights each token was written; every step's reads and the whole tree are checked."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.loaded: list[Params] = []
        """all weights so far; a token is stamped with their place here, as version numbers may come again"""
        self.stamp = np.full((CONFIG.num_pages, CONFIG.page_size), -1)
        self.of_version: dict[int, int] = {}
        self.old_reads = 0
        """tokens of other weights that private sequences read"""
        self._dispatch = engine._dispatch
        engine._dispatch = self.dispatch

    def dispatch(self, plan: Plan) -> Any:
        engine = self.engine
        if not self.loaded or self.loaded[-1] is not engine.params:
            self.loaded.append(engine.params)
        now = self.of_version[engine.version] = len(self.loaded) - 1
        for source, target in plan.copies:
            self.stamp[target] = self.stamp[source]
        step = self._dispatch(plan)
        places = step.batch.places([], CONFIG.page_size)
        self.stamp[places.page, places.offset] = now
        for (sequence, n), first, left in zip(plan.chunks, step.firsts, plan.left, strict=True):
            end = first + (min(plan.steps, left) if plan.steps else n)
            read = self.stamp[sequence.pages].reshape(-1)[:end]
            assert (read >= 0).all(), "a token is read that nobody wrote"
            if sequence.private:
                self.old_reads += int((read != now).sum())
            else:
                assert (read == now).all(), f"{sequence.request.id} reads a page of other weights"
        for (version, _), root in engine.scheduler.tree._roots.items():
            for node in root.below():
                if node.parent is not None:
                    stamps = self.stamp[node.page, : len(node.tokens)]
                    assert (stamps == self.of_version[version]).all(), "the tree has a page under another version"
        return step


@pytest.fixture
def watched() -> Iterator[Watched]:
    made = Watched(make_engine())
    yield made
    engine = made.engine
    engine.scheduler.check()
    assert engine.num_in_flight == 0 and not engine.paused
    engine.forget()
    assert engine.scheduler.pool.num_free == CONFIG.num_pages - 1


def requests() -> list[Request]:
    """16 of them: prefixes that are shared within and between pages, lengths that end anywhere in a page."""
    rng = np.random.default_rng(1)
    shared = rng.integers(0, V, 40).tolist()
    asked = []
    for i in range(NUM):
        own = rng.integers(0, V, 3 + i).tolist()
        ids = (*shared[: (0, 16, 25, 40)[i % 4]], *own)
        asked.append(Request(id=str(i), prompt_ids=ids, params=SamplingParams(max_tokens=TOKENS, seed=i, temperature=0.9)))
    return asked


def until_running(engine: Engine) -> None:
    """All 16 run, and each has sampled something."""
    for asked in requests():
        engine.submit(asked)
    while len(engine.scheduler.running) < NUM or any(s.num_sampled < 3 for s in engine.scheduler.running):
        assert not engine.step()


def drain(engine: Engine) -> dict[str, Completion]:
    done = {c.request_id: c for c in engine.step()}
    while engine.num_in_flight:
        done |= {c.request_id: c for c in engine.step()}
    return done


@cache
def undisturbed() -> dict[str, Completion]:
    return {c.request_id: c for c in make_engine().run(requests())}


def assert_same(a: Completion, b: Completion, tokens: int) -> None:
    """What is recorded of the first tokens, and how those before them were routed."""
    for name in ("ids", "logprobs", "logprobs_full"):
        assert getattr(a, name)[:tokens].tobytes() == getattr(b, name)[:tokens].tobytes(), (a.request_id, name)
    assert a.routing is not None and b.routing is not None
    rows = len(a.prompt_ids) + tokens - 1
    assert a.routing_start == 0
    np.testing.assert_array_equal(a.routing[b.routing_start : rows], b.routing[: rows - b.routing_start])


def fresh(completion: Completion, sampled: int, version: int, timeline: int = 0) -> Completion:
    """The rest of it from an engine that has never had other weights."""
    ids = (*completion.prompt_ids, *completion.ids[:sampled].tolist())
    params = dataclasses.replace(requests()[int(completion.request_id)].params, max_tokens=TOKENS - sampled)
    assert completion.routing is not None
    rows = completion.routing[: len(ids) - 1] if sampled else None
    return make_engine(version, timeline).run([Request(id="rest", prompt_ids=ids, params=params, routing=rows)])[0]


# ---- 16 running requests


@pytest.mark.parametrize("mode", ["retract", "keep", "abort"])
def test_an_update_among_16_running_requests(mode: str, watched: Watched, store: WeightStore, report: Any) -> None:
    """C7, C8, C9, C28, C35, J3, J10."""
    engine = watched.engine
    until_running(engine)
    made = Follower(engine, url(store), "reader").update(8, mode)
    assert (made.version, made.base, engine.version) == (8, 7, 8)
    assert made.retracted == (NUM if mode == "retract" else 0) and made.fetch_ms > 0 and made.pause_ms > 0
    assert checksums(engine.params) == checksums(tree(8))
    done, gap, differ = drain(engine), 0.0, 0
    assert len(done) == NUM
    for name, completion in done.items():
        sampled = int((completion.versions == 7).sum())
        assert sampled >= 3
        assert_same(completion, undisturbed()[name], sampled)
        if mode == "abort":
            assert completion.finish_reason == FinishReason.ABORT and len(completion.ids) == sampled
            continue
        assert completion.finish_reason == FinishReason.LENGTH and len(completion.ids) == TOKENS
        assert completion.versions.tolist() == [7] * sampled + [8] * (TOKENS - sampled)
        rest = fresh(completion, sampled, 8)
        if mode == "retract":
            assert completion.ids[sampled:].tolist() == rest.ids.tolist()
            gap = max(gap, float(np.abs(completion.logprobs[sampled:] - rest.logprobs).max()))
            gap = max(gap, float(np.abs(completion.logprobs_full[sampled:] - rest.logprobs_full).max()))
        else:
            differ += completion.logprobs[sampled:].tobytes() != rest.logprobs.tobytes()
    if mode == "retract":
        assert gap <= 1e-5
        report(f"16 retracted requests against a fresh engine: largest difference of a log-prob {gap:g}")
    if mode == "keep":
        assert differ > NUM // 2 and watched.old_reads > 0, "the kept keys are the old weights'"
    again = engine.run(requests())
    assert [c.versions.tolist() for c in again] == [[8] * TOKENS] * NUM
    assert_same(again[3], fresh(dataclasses.replace(again[3]), 0, 8), TOKENS)


@pytest.mark.parametrize("mode", ["retract", "keep"])
def test_a_version_of_equal_bits_changes_no_token(mode: str, watched: Watched) -> None:
    """J2, with a delta in which nothing changes."""
    store = WeightStore(f"memory://updates{next(_FOLDERS)}/")
    publish(store, 7)
    store.publish(copied(tree(7)), 8, 7, tree(7))
    until_running(watched.engine)
    Follower(watched.engine, url(store), "reader").update(8, mode)
    for name, completion in drain(watched.engine).items():
        assert_same(completion, undisturbed()[name], TOKENS)
        assert set(completion.versions.tolist()) == {7, 8}


# ---- The protocol


def test_a_swap_compiles_nothing(watched: Watched, store: WeightStore, assert_no_compiles: Any) -> None:
    prepared = Follower(watched.engine, url(store), "reader").prepare(8)
    with assert_no_compiles():
        prepared.swap()
    assert prepared.state == State.SWAPPED and prepared.acknowledge().version == 8
    assert prepared.state == State.ACKNOWLEDGED


def test_the_same_version_again(watched: Watched, store: WeightStore) -> None:
    engine, follower = watched.engine, Follower(watched.engine, url(store), "reader")
    until_running(engine)
    for made in (follower.update(7), update(engine, copied(tree(7)), 7), follower.update(7, restart=True)):
        assert (made.version, made.base, made.pause_ms, made.retracted) == (7, 7, 0, 0)
    with pytest.raises(ValueError, match="version: 7 is loaded with other bits; set restart if the trainer went back"):
        update(engine, tree(8), 7)
    for name, completion in drain(engine).items():
        assert_same(completion, undisturbed()[name], TOKENS)


def corrupt(store: WeightStore, version: int) -> None:
    key = f"{store.head().versions[version].key}/delta"
    kv = ts.KvStore.open(url(store), context=CONTEXT).result()
    data = kv.read(key).result().value
    kv.write(key, data[:-1] + bytes([data[-1] ^ 1])).result()


def test_a_failure_at_any_state_leaves_the_old_version(
    watched: Watched, store: WeightStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C35: requests run on, under the old weights; then the update succeeds."""
    engine, follower = watched.engine, Follower(watched.engine, url(store), "reader")
    until_running(engine)

    def broken(*arguments: Any, **options: Any) -> Any:
        raise RuntimeError("broken")

    with pytest.raises(ValueError, match="version: the store does not hold 99; it holds 7, 8, 9, 10"):
        follower.update(99)
    made = Update(engine, 8)
    with pytest.raises(ValueError, match="(?s)version 8: the trees differ.*norm is missing"):
        made.check({name: leaf for name, leaf in manifest(tree(8)).items() if name != "norm"}, dict)
    assert made.state == State.FAILED
    made = Update(engine, 8)
    made.check(manifest(tree(8)), dict)
    with pytest.raises(ValueError, match="params: missing norm"):
        made.stage({name: array for name, array in tree(8).items() if name != "norm"})
    assert made.state == State.FAILED
    corrupt(store, 9)
    with pytest.raises(ValueError, match="version 9"):
        follower.update(9)
    with monkeypatch.context() as patch:
        patch.setattr("inference.engine.apply", broken)
        made = follower.prepare(8)
        with pytest.raises(UpdateFailed, match=r"version 8: the swap failed, 7 serves on \(broken\)"):
            made.swap()
    assert made.state == State.FAILED
    with monkeypatch.context() as patch:
        patch.setattr(engine, "pause", broken)
        with pytest.raises(UpdateFailed):
            update(engine, tree(8), 8)
    late = follower.prepare(8)
    assert engine.version == 7 and not engine.paused and not store.head().pins
    update(engine, tree(7), 8)  # somebody else was first
    with pytest.raises(ValueError, match="base: 8 was staged for 7, but 8 is loaded; update anew"):
        late.swap()
    for name, completion in drain(engine).items():
        assert_same(completion, undisturbed()[name], TOKENS)


def test_weights_that_are_lost_in_a_swap_serve_nothing(store: WeightStore, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = make_engine()
    made = Follower(engine, url(store), "reader").prepare(8)

    def torn(params: Params, staged: Any) -> None:
        params["norm"].delete()
        raise RuntimeError("out of memory")

    monkeypatch.setattr("inference.engine.apply", torn)
    with pytest.raises(WeightsLost, match="start the engine again"):
        made.swap()
    assert engine.paused


def test_mistakes(store: WeightStore) -> None:
    engine = make_engine(8)
    follower = Follower(engine, url(store), "reader")
    with pytest.raises(ValueError, match="version: 7 is older than the loaded 8; set restart"):
        follower.update(7)
    with pytest.raises(ValueError, match="mode: 'keep' would read pages of weights that are gone"):
        follower.update(7, "keep", restart=True)
    with pytest.raises(ValueError, match="mode: 'stop' is unknown"):
        follower.update(9, "stop")
    with pytest.raises(ValueError, match="base: 9 follows 7, but 8 is loaded"):
        Update(engine, 9, base=7)
    engine.pause()
    with pytest.raises(ValueError, match="base: 9 follows 7, but 8 is loaded"):
        engine.load(tree(9), 9, base=7)
    follower.update(9)
    assert engine.paused and engine.version == 9, "who paused it resumes it"


# ---- Following a store


@pytest.mark.parametrize("version", [8, 9, 10])
def test_catching_up(version: int, watched: Watched, store: WeightStore) -> None:
    engine = watched.engine
    until_running(engine)
    before = engine.params
    Follower(engine, url(store), "reader").update(version)
    assert checksums(engine.params) == checksums(tree(version)) and engine.version == version
    assert any(array.is_deleted() for array in before.values()) == (version == 8), "one delta is applied in place"
    assert not store.head().pins
    drain(engine)


def test_an_engine_that_starts_late(store: WeightStore) -> None:
    shardings = {name: array.sharding for name, array in tree(7).items()}
    found = newest(url(store), "late", shardings)
    assert found is not None and found[0] == 10 and checksums(found[1]) == checksums(tree(10))
    assert newest(f"memory://updates{next(_FOLDERS)}/", "late", shardings) is None


def test_asleep_it_is_updated_too(store: WeightStore) -> None:
    """J31: it wakes with the version and the log-probs of what was loaded last."""
    engine = make_engine()
    engine.run(requests()[:4])
    engine.sleep()
    engine.pause()
    prepared = Follower(engine, url(store), "reader").update(8)
    assert prepared.version == 8 and engine.paused
    engine.wake()
    for completion in engine.run(requests()[:4]):
        assert_same(completion, fresh(completion, 0, 8), TOKENS)


# ---- A trainer that went back


@pytest.mark.parametrize("version", [7, 8, 9])
@pytest.mark.parametrize("mode", ["retract", "abort"])
def test_nothing_of_a_dead_timeline_is_read(mode: str, version: int, watched: Watched, store: WeightStore) -> None:
    """The engine has 8 and pages of 7 and 8; the trainer resumes from 7 and publishes 8 and 9 with other bits."""
    engine, follower = watched.engine, Follower(watched.engine, url(store), "reader")
    engine.run(requests())
    follower.update(8)
    until_running(engine)
    assert store.rewind(7) == [8, 9, 10]
    for number in (8, 9):
        publish(store, number, timeline=1)
    if version == 8:
        with pytest.raises(ValueError, match="version: 8 is loaded with other bits"):
            follower.update(8)
    made = follower.update(version, mode, restart=True)
    assert (made.version, made.base) == (version, 8) and checksums(engine.params) == checksums(tree(version, 1))
    assert not engine.scheduler.tree.num_pages
    done = drain(engine)
    for completion in list(done.values())[::5]:
        if mode == "retract":
            sampled = int(np.flatnonzero(completion.logprobs != undisturbed_8()[completion.request_id].logprobs)[0])
            rest = fresh(completion, sampled, version, timeline=1)
            assert completion.ids[sampled:].tolist() == rest.ids.tolist()
            assert completion.logprobs[sampled:].tobytes() == rest.logprobs.tobytes()
    for completion in engine.run(requests())[::5]:
        assert_same(completion, fresh(completion, 0, version, timeline=1), TOKENS)


@cache
def undisturbed_8() -> dict[str, Completion]:
    return {c.request_id: c for c in make_engine(8).run(requests())}
