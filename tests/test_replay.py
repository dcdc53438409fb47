"""The trainer replays routing: in rows and walks, on meshes, through remat and micro-batches; losses of the routers.

Legend: B rows, T tokens of a row, L layers, E experts, k experts per token.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from configs import tiny_moe
from inference.config import EngineConfig
from inference.engine import Engine
from inference.types import Request, SamplingParams
from models.compiles import CompileCounter
from models.config import ModelConfig, MoEConfig
from models.routes import not_recorded, recorded
from models.transformer import REMAT, Definition
from rl.batch import Sample, Totals, branches_of, loss_batch
from rl.branches import Branch, sort_branches
from rl.config import RunConfig, build
from rl.forest import Layout, pack
from rl.measures import add_up, finish
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.routes import REPLAYS, Replay, RouterConfig
from rl.run import make_model
from rl.trainer import Trainer
from rl.tries import Plan, make_trie, plan
from sharding.mesh import make_mesh
from sharding.reshard import init, reshard
from sharding.rules import Axes, Rules

pytestmark = pytest.mark.plain_code

V, E, K, LAYERS, LONGEST, MOST = 12, 4, 2, 2, 24, 5
MODEL = ModelConfig(
    family="qwen3_moe", vocab_size=V, model_dim=8, ffn_dim=12, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=4,
    max_positions=512, moe=MoEConfig(num_experts=E, experts_per_token=K, ffn_dim=6, shared_ffn_dim=4),
)  # fmt: skip
BROAD = replace(MODEL, model_dim=64, head_dim=16, vocab_size=128)
"""where bits are compared: a few columns have bits of their own (models/README.md)"""
DENSE = replace(MODEL, family="qwen3", moe=None)
LAYOUT = Layout(rows=2, tokens=64, context=128, branches=MOST, length=LONGEST - 1, path=128)
OBJECTIVE = Objective(loss="grpo")
COEFS = RouterConfig(balance_coef=0.3, z_coef=0.02)


def rows_of(ids: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Any k different experts a token and layer."""
    return np.array([[rng.permutation(E)[:K] for _ in range(LAYERS)] for _ in ids], np.uint8).reshape(-1, LAYERS, K)


def sample(ids: Sequence[int], mask: np.ndarray, rng: np.random.Generator, routing: np.ndarray | None, **fields: Any) -> Sample:
    n = len(ids)
    return Sample(
        ids=np.asarray(ids, np.int32),
        weights=np.where(mask, rng.choice([1, 0.5], n), 0).astype(np.float32),
        logprobs=(-np.log(V) + 0.3 * rng.standard_normal(n)).astype(np.float32),
        advantages=np.full(n, rng.standard_normal(), np.float32),
        routing=routing,
        **fields,
    )


def last_unrecorded(rows: np.ndarray) -> np.ndarray:
    return np.concatenate([rows[:-1], not_recorded(1, MODEL)])


@st.composite
def episodes(draw: Any) -> list[Sample]:
    """Branches that grow out of each other, of which some take another row for a token that they have in common."""
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    paths: list[tuple[list[int], np.ndarray]] = []
    samples = []
    for number in range(draw(st.integers(1, MOST))):
        ids, rows = [], rows_of([], rng)
        if paths:
            ids, rows = draw(st.sampled_from(paths))
            keep = draw(st.integers(0, len(ids)))
            ids, rows = ids[:keep], rows[:keep].copy()
            if keep and draw(st.booleans()):
                at = draw(st.integers(0, keep - 1))
                rows[at:] = rows_of(ids[at:], rng)  # the same tokens, routed in another way from here on
        more = draw(st.lists(st.integers(0, 2), min_size=0 if ids else 1, max_size=LONGEST - len(ids)))
        ids, rows = ids + more, np.concatenate([rows, rows_of(more, rng)])
        paths.append((ids, rows))
        mask = np.array([False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))])
        samples.append(sample(ids, mask, rng, last_unrecorded(rows), episode=number))
    return samples


MODES = Layout(rows=1, tokens=64, context=128, branches=MOST, length=80)
PATH = Layout(rows=1, tokens=64, context=128, branches=MOST, length=80, path=128)
"""one row a micro-batch"""


@cache
def trainer(
    dtype: Any = jnp.float64,
    layout: Layout = LAYOUT,
    axes: tuple[tuple[str, int], ...] = (("data", 1),),
    rules: tuple[tuple[str, Axes], ...] = (),
    remat: str = "none",
    programs: tuple[str, ...] = (),
    router: RouterConfig = COEFS,
    model: ModelConfig = MODEL,
) -> Trainer:
    """Compiled: all it may need, or these programs alone. Its mode is R3; `mode` gives others, with the same programs."""
    mesh, table = make_mesh(dict(axes)), Rules(dict(rules))
    definition = Definition(model, dtype, stacked=True)
    masters = init(definition.weights, jax.random.key(0), jnp.float32, table.shardings(mesh, definition.weights))
    with jax.enable_x64(dtype == jnp.float64):
        made = Trainer(
            model,
            {name: x.astype(dtype if dtype == jnp.float64 else jnp.float32) for name, x in masters.items()},
            layout=layout,
            optimizer=OptimizerConfig(learning_rate=1e-2),
            objective=OBJECTIVE,
            dtype=dtype,
            remat=remat,
            mesh=mesh,
            rules=table,
            router=router,
        )
        if not programs:
            made.warm_up()
        for name in programs:
            made.programs._compiled[name] = made.programs.lower("grpo", two_passes=False)[name].compile()
    return made


@contextmanager
def mode(made: Trainer, router_replay: Replay) -> Iterator[Trainer]:
    """Only the host knows the mode."""
    before = made.programs.router
    made.programs.router = replace(before, router_replay=router_replay)
    yield made
    made.programs.router = before


class Causal:
    """Plain causal softmax attention over one sequence, from the definition."""

    def attend(self, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        T, H, h = q.shape
        k, v = (jnp.repeat(x, H // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / jnp.sqrt(jnp.asarray(h, q.dtype))
        seen = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), scores.shape)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), v).reshape(T, -1)


@cache
def alone() -> Any:
    """Loss and gradient from unshared sequences in plain arrays: the definition. `real` `[N, L]`: tokens with a row."""
    definition = Definition(MODEL, jnp.float64, stacked=True)

    def value(params: Any, ids_NL: jax.Array, rows: jax.Array, real: jax.Array, place_NL: jax.Array, load: Any, batch: Any):
        model = definition.bind(params)

        def one(ids: jax.Array, rows: jax.Array):
            n, layers = len(ids), jnp.arange(LAYERS)
            hidden, _, routing = model.scan(ids, jnp.arange(n), layers, lambda layer: (Causal(), layer), rows, load)
            assert routing is not None
            logp = jnp.take_along_axis(jax.nn.log_softmax(model.logits(hidden[:-1]), axis=-1), ids[1:, None], axis=-1)[:, 0]
            return logp, routing.balance.mean(axis=0), routing.z.mean(axis=0), routing.differs

        logp, balance, z, differs = jax.vmap(one)(ids_NL, rows)
        main = OBJECTIVE(jnp.take_along_axis(logp, place_NL - 1, axis=1), batch)[0]
        count = jnp.maximum(1, real.sum())
        terms = COEFS.balance_coef * (balance * real).sum() + COEFS.z_coef * (z * real).sum()
        mismatch = (differs * real[:, None]).sum() / count / LAYERS
        return main + terms / count, mismatch

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def expected(samples: Sequence[Sample], params: Any) -> tuple[float, float, dict[str, np.ndarray]]:
    """Loss, share of (token, layer) that differ, gradients."""
    ids, place = np.zeros((MOST, LONGEST), np.int32), np.ones((MOST, LONGEST - 1), np.int32)
    rows, real = not_recorded(MOST * LONGEST, MODEL).reshape(MOST, LONGEST, LAYERS, K), np.zeros((MOST, LONGEST))
    load = np.zeros((LAYERS, E))
    for number, s in enumerate(samples):
        n = len(s.ids)
        assert s.routing is not None
        ids[number, :n], rows[number, :n], real[number, : n - 1] = s.ids, s.routing, 1
        place[number, : len(s.trained)] = s.trained
        for layer in range(LAYERS):
            for row in s.routing[:-1, layer]:
                load[layer, row] += 1
    batch = loss_batch(samples, range(len(samples)), Totals.of(samples), LAYOUT, 0, set())
    with jax.enable_x64(True):
        load = (load / max(1, load[0].sum())).astype(np.float32)
        (value, mismatch), gradient = alone()(params, ids, rows, real, place, load, batch)
    return float(value), float(mismatch), jax.device_get(gradient)


def planned_as(made: Trainer, samples: Sequence[Sample], way: str) -> Plan:
    branches = branches_of(samples, MODEL, made.programs.router)
    if way == "walked":
        trie = make_trie(branches, sort_branches(branches), made.layout)
        return replace(plan([], made.layout, 3), tries=[trie])
    if way == "dense":
        return replace(plan([], made.layout, 3), micro_batches=pack(branches, made.layout, share=False)[0])
    return made.plan(samples)


def gradients(made: Trainer, samples: Sequence[Sample], way: str = "rows") -> tuple[dict[str, float], dict[str, np.ndarray]]:
    """Metrics and gradients."""
    with jax.enable_x64(made.definition.dtype == jnp.float64):
        grads, shares = made.gradients(samples, planned_as(made, samples, way), 1.0, "grpo")
    return finish(add_up(jax.device_get(shares))), jax.device_get(grads)


@pytest.mark.parametrize("way", ["rows", "dense", "walked"])
@pytest.mark.slow
@hypothesis.settings(max_examples=10)
@hypothesis.given(samples=episodes())
def test_gradients_are_those_of_each_branch_alone(way: str, samples: list[Sample]) -> None:
    """With losses for balance and z; 1e-9 in float64. Branches that share tokens but not rows stand apart."""
    made = trainer()
    metrics, gradient = gradients(made, samples, way)
    value, mismatch, want = expected(samples, made.state.masters)
    assert metrics["loss"] == pytest.approx(value, rel=1e-9, abs=1e-9)
    assert metrics.get("router/mismatch", 0.0) == pytest.approx(mismatch, abs=1e-6)
    for name, x in want.items():
        np.testing.assert_allclose(gradient[name], x, rtol=1e-9, atol=1e-9, err_msg=name)


@pytest.mark.slow
def test_router_gradients_equal_finite_differences() -> None:
    """Through the whole model, with the experts frozen; replayed are others than the routers would choose. 1e-6 in float64."""
    made, rng = trainer(), np.random.default_rng(0)
    samples = full(4, rng)
    metrics, gradient = gradients(made, samples)
    assert metrics["router/mismatch"] > 0.3
    start = made.state
    for name in ("blocks.moe.router", "blocks.moe.gate", "blocks.moe.shared_up", "blocks.q", "embed"):
        direction = rng.standard_normal(gradient[name].shape)

        def moved(step: float, name: str = name, direction: np.ndarray = direction) -> float:
            masters = start.masters | {name: np.asarray(start.masters[name]) + step * direction}
            made.state = replace(start, masters=masters)
            return gradients(made, samples)[0]["loss"]

        numeric = (8 * (moved(1e-4) - moved(-1e-4)) - (moved(2e-4) - moved(-2e-4))) / 12e-4
        made.state = start
        analytic = float((gradient[name] * direction).sum())
        assert abs(analytic) > 1e-4
        assert analytic == pytest.approx(numeric, rel=1e-6), name


def full(count: int, rng: np.random.Generator, rows: Any = rows_of, length: int = LONGEST, stem: int = 6) -> list[Sample]:
    """Branches of one length, trained behind a stem that all share, its rows too."""
    ids, routing = rng.integers(0, V, stem).tolist(), rows(range(stem), rng)
    samples = []
    for number in range(count):
        more = rng.integers(0, V, length - stem).tolist()
        mine = np.concatenate([routing, rows(more, rng)])
        samples.append(sample([*ids, *more], np.arange(length) >= stem, rng, last_unrecorded(mine), episode=number))
    return samples


# ---- layout


def test_a_row_carries_routing_and_who_goes_on() -> None:
    """Three branches of tokens 5 6 7 ..: two that share rows too, one that is routed otherwise from the second token on."""
    rng = np.random.default_rng(0)
    rows = rows_of(range(4), rng)
    other = np.concatenate([rows[:1], 3 - rows[1:]])
    mask = np.array([False, False, True, True])
    a = Branch(np.array([5, 6, 7, 8], np.int32), mask, last_unrecorded(rows))
    b = Branch(np.array([5, 6, 9], np.int32), mask[:3], last_unrecorded(rows[:3]))
    c = Branch(np.array([5, 6, 7, 8], np.int32), mask, last_unrecorded(other))
    layout = Layout(rows=1, tokens=64, context=128, branches=4, length=3, path=128)
    [micro], stats = pack([a, b, c, a], layout)
    routes = micro.forest.routes
    assert routes is not None and stats.tokens_kept == 8
    tokens, weight = micro.forest.tokens[0, :8].tolist(), routes.weight[0, :8].tolist()
    paths = {
        True: ([5, 6, 7, 8, 9, 6, 7, 8], [4, 3, 2, 0, 0, 1, 1, 0]),
        False: ([5, 6, 7, 8, 6, 7, 8, 9], [4, 1, 1, 0, 3, 2, 0, 0]),
    }
    first = bool((routes.rows[0, 1] == rows[1]).all())
    assert (tokens, weight) == paths[first]
    assert not routes.weight[0, 8:].any() and not recorded(routes.rows[0, 8:]).any()
    trie = make_trie([a, b, c, a], sort_branches([a, b, c, a]), layout)
    segments = [segment.routes for segment in trie.segments if segment.routes is not None]
    np.testing.assert_array_equal(np.concatenate([each.rows for each in segments]), routes.rows[0, :8])
    np.testing.assert_array_equal(np.concatenate([each.weight for each in segments]), routes.weight[0, :8])
    assert trie.num_tokens == 8
    dense = pack([replace(each, routing=None) for each in (a, b, c, a)], layout)[0][0].forest
    assert dense.routes is None and len(jax.tree.leaves(dense)) == len(jax.tree.leaves(micro.forest)) - 3


@pytest.mark.slow
def test_micro_batches_change_nothing() -> None:
    """In rows that share, in dense ones (more of them) and walked: 1e-9 in float64, the metrics too."""
    made, samples = trainer(), full(3 * MOST, np.random.default_rng(1))
    counts = [len(planned_as(made, samples, way).micro_batches) for way in ("rows", "dense", "walked")]
    assert counts[0] != counts[1] and min(counts[:2]) > 1 and counts[2] == 0
    want_metrics, want = gradients(made, samples)
    for way in ("dense", "walked"):
        metrics, got = gradients(made, samples, way)
        for name, x in want.items():
            np.testing.assert_allclose(got[name], x, rtol=1e-9, atol=1e-9, err_msg=f"{way} {name}")
        for name, value in want_metrics.items():
            assert metrics[name] == pytest.approx(value, rel=1e-6), name
    assert want_metrics["router/loss"] > 0.01 and want_metrics["router/balance"] > 0.5


@pytest.mark.slow
def test_remat_replays_the_same() -> None:
    """bfloat16: every policy has the same bits."""
    samples = full(MOST, np.random.default_rng(1), length=40)
    all_metrics, grads = {}, {}
    for remat in REMAT:
        made = trainer(jnp.bfloat16, MODES, remat=remat, programs=("grpo",), model=BROAD)
        all_metrics[remat], grads[remat] = gradients(made, samples)
    assert all_metrics["none"]["router/mismatch"] > 0.3
    for remat in REMAT:
        assert all_metrics[remat] == all_metrics["none"]
        for name, x in grads["none"].items():
            np.testing.assert_array_equal(grads[remat][name], x, err_msg=f"{remat} {name}")


# ---- meshes

WIDE = Layout(rows=8, tokens=64, context=128, branches=16, length=LONGEST)
TENSOR: tuple[tuple[str, Axes], ...] = tuple((dim, "tensor") for dim in ("heads", "kv_heads", "vocab", "ffn", "expert_ffn"))
FSDP_EXPERT: tuple[tuple[str, Axes], ...] = (("embed", "fsdp"), ("experts", "expert"))
MESHES: dict[str, tuple[dict[str, int], tuple[tuple[str, Axes], ...], Layout]] = {
    "fsdp 2 x expert 2": ({"fsdp": 2, "expert": 2}, FSDP_EXPERT, replace(WIDE, path=128)),
    "expert 2 x tensor 2": ({"expert": 2, "tensor": 2}, (("experts", "expert"), *TENSOR), WIDE),
    "data 2 x expert 4": ({"data": 2, "expert": 4}, (("experts", "expert"),), WIDE),
    "expert 2 x context 2": (
        {"expert": 2, "context": 2}, (("experts", "expert"),), replace(WIDE, rows=4, tokens=128, shards=2),
    ),
}  # fmt: skip


def skewed(ids: Sequence[int], rng: np.random.Generator) -> np.ndarray:
    """Layer 0 has one expert in nearly every place, and layer 1 leaves half of them empty."""
    rows = rows_of(ids, rng)
    rows[:, 0] = [[1, 3] if rng.random() < 0.9 else [2, 1] for _ in ids]
    rows[:, 1] = [rng.permutation(2) for _ in ids]
    return rows


@pytest.mark.slow
@pytest.mark.parametrize("name", MESHES)
def test_a_mesh_equals_one_device(name: str) -> None:
    """Loss, metrics, every gradient: 1e-5 in float32; in walks too, and values, where the layout has them."""
    axes, rules, layout = MESHES[name]
    rng = np.random.default_rng(2)
    samples = [each for _ in range(8) for each in full(2, rng, skewed)]
    samples = [replace(each, episode=number) for number, each in enumerate(samples)]
    one = trainer(jnp.float32, WIDE, programs=("grpo", "score"))
    programs = () if layout.path else ("grpo",)
    many = trainer(jnp.float32, layout, tuple(axes.items()), rules, remat="block", programs=programs)
    want_metrics, want = gradients(one, samples)
    assert want_metrics["router/max_load"] == E / 2
    for way in ("rows", "walked") if layout.path else ("rows",):
        metrics, got = gradients(many, samples, way)
        for metric, value in want_metrics.items():
            assert metrics[metric] == pytest.approx(value, rel=1e-5, abs=1e-5), metric
        for weight, x in want.items():
            assert np.abs(x).max() > 1e-6
            np.testing.assert_allclose(got[weight], x, rtol=0, atol=1e-5, err_msg=f"{way} {weight}")
    if layout.path:
        for a, b in zip(many.read(samples), one.read(samples), strict=True):
            np.testing.assert_allclose(a, b, rtol=0, atol=1e-5)


# ---- the sampler

ENGINE = EngineConfig(
    max_context=128, context_buckets=(128,), max_slots=8, num_pages=64, page_size=8, tokens_per_step=32, token_buckets=(32,)
)


def sampled(dtype: Any, made: Trainer) -> list[Sample]:
    """By an engine with the trainer's weights: two prompts, several answers of each, and one whole second turn."""
    mesh = make_mesh({"data": 1})
    model = made.definition.config
    target = Definition(model, dtype, stacked=False).weights
    shardings = Rules().shardings(mesh, target)
    params = reshard(made.state.masters, made.definition.weights, target, shardings, dtype)
    engine = Engine(model, ENGINE, params, version=0, dtype=dtype, mesh=mesh, rules=Rules())
    engine.warm_up()
    rng = np.random.default_rng(0)

    def ask(name: str, prompt: Sequence[int], routing: np.ndarray | None = None) -> Request:
        params = SamplingParams(max_tokens=12, temperature=1.0, seed=len(name) + len(prompt))
        return Request(id=name, prompt_ids=tuple(prompt), params=params, routing=routing)

    prompts = [rng.integers(0, V, n).tolist() for n in (9, 30)]
    done = engine.run([ask(f"{n}{'x' * k}", prompt) for n, prompt in enumerate(prompts) for k in range(2)])
    first = done[0]
    more = [*first.prompt_ids, *first.ids.tolist(), *rng.integers(0, V, 5).tolist()]
    done += engine.run([ask("again", more, first.routing)])
    samples = []
    for number, each in enumerate(done):
        ids, n = np.asarray([*each.prompt_ids, *each.ids], np.int32), len(each.prompt_ids)
        assert first.routing is not None and each.routing is not None
        before = first.routing[: each.routing_start]
        routing = np.concatenate([before, each.routing, not_recorded(1, MODEL)])
        logprobs, weights = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
        logprobs[n:], weights[n:] = each.logprobs, 1
        samples.append(Sample(ids=ids, weights=weights, logprobs=logprobs, advantages=weights, episode=number, routing=routing))
    return samples


@pytest.mark.slow
@pytest.mark.parametrize(("dtype", "model", "tolerance"), [(jnp.bfloat16, BROAD, 0), (jnp.float32, MODEL, 1e-5)])
def test_the_sampler_agrees(dtype: Any, model: ModelConfig, tolerance: float) -> None:
    """In rows with shared prefixes, alone, walked, and on a mesh; nothing is routed in another way than it would be."""
    made = trainer(dtype, PATH, model=model)
    restart(made)
    samples = sampled(dtype, made)
    assert all(recorded(s.routing[:-1]).all() for s in samples if s.routing is not None)
    assert made.plan(samples).stats.compression > 1.3
    readings = {"rows": made.read(samples), "alone": [made.read([s])[0] for s in samples]}
    with jax.enable_x64(False):
        walked = made._readings(samples, planned_as(made, samples, "walked"), made.state.masters, jnp.float32(1))
    layout, axes = replace(PATH, rows=4), (("fsdp", 2), ("expert", 2))
    mesh = trainer(dtype, layout, axes, FSDP_EXPERT, programs=("score",), model=model)
    readings |= {"walked": walked.out, "mesh": mesh.read(samples)}
    for way, read in readings.items():
        for got, s in zip(read, samples, strict=True):
            np.testing.assert_allclose(got, s.logprobs[s.trained], rtol=0, atol=tolerance, err_msg=way)
    assert gradients(made, samples)[0]["router/mismatch"] == 0


# ---- modes


@pytest.mark.slow
def test_r2_replays_the_trainers_own_rows() -> None:
    made = trainer()
    model_forward = jax.jit(lambda params, ids: own_rows(made.definition, params, ids))
    for s in full(3, np.random.default_rng(3)):
        for way in ("rows", "walked"):
            with jax.enable_x64(True), mode(made, "R2"):
                planned = made._own_routes(planned_as(made, [s], way), made.programs.put(np.float32(1)))
                want = model_forward(made.state.masters, s.ids)
            rows = np.concatenate([part.rows.reshape(-1, LAYERS, K) for part in planned.routes])[: len(s.ids)]
            np.testing.assert_array_equal(rows, want)


def own_rows(definition: Definition, params: Any, ids: jax.Array) -> jax.Array:
    """[n, L, k]: what the model chooses on a sequence alone."""
    _, routing = definition.bind(params).forward(ids, jnp.arange(len(ids)), Causal())
    assert routing is not None
    return jnp.moveaxis(routing.ids, 0, 1)


@pytest.mark.slow
def test_modes_do_what_they_say() -> None:
    """bfloat16, several micro-batches. The trainer's own rows differ from themselves in nothing, and replaying them is routing
    oneself, bit for bit; the sampler's rows are used by R3 alone, and those that were not recorded by nobody."""
    made = trainer(jnp.bfloat16, MODES, programs=("grpo", "score"), router=RouterConfig(z_coef=0.1))
    samples = full(MOST, np.random.default_rng(4), length=40)
    empty = [replace(s, routing=None) for s in samples]
    got, read = {}, {}
    assert len(made.plan(samples).micro_batches) > 2
    for replay in REPLAYS:
        with mode(made, replay):
            got[replay], read[replay] = gradients(made, samples), made.read(samples)
    with mode(made, "R3"):
        got["empty"], read["empty"] = gradients(made, empty), made.read(empty)
    for name in ("off", "R2", "empty"):
        assert got[name][0]["router/replayed"] == (name == "R2")
        assert got[name][0].get("router/mismatch") == (0 if name == "R2" else None)
        for weight, x in got["off"][1].items():
            np.testing.assert_array_equal(got[name][1][weight], x, err_msg=f"{name} {weight}")
        np.testing.assert_array_equal(read[name], read["off"])  # a frozen model reads with the sampler's rows, or its own
    assert 0.5 < got["R3"][0]["router/mismatch"] < got["R3"][0]["router/mismatch_tokens"] <= 1
    assert np.abs(got["R3"][1]["blocks.moe.router"] - got["off"][1]["blocks.moe.router"]).max() > 1e-4
    assert np.abs(np.asarray(read["R3"]) - read["off"]).max() > 1e-4


def restart(made: Trainer) -> None:
    """In its first state."""
    masters = init(made.definition.weights, jax.random.key(0), jnp.float32, made.programs.shardings)
    made.state = made.programs.init(masters)


@pytest.mark.slow
def test_r2_fixes_the_rows_of_the_step_before_it() -> None:
    """Its rows are those of the weights before the step, step after step; the balance loss evens them out."""
    made, samples = trainer(jnp.float32, PATH), full(MOST, np.random.default_rng(5))
    restart(made)
    loads = []
    with mode(made, "R2"):
        for _ in range(8):
            metrics = made.train(samples)
            assert metrics["router/mismatch"] == 0
            loads.append(metrics["router/balance"])
    assert min(loads) < loads[0] and len(set(loads)) > 4


@pytest.mark.slow
def test_a_forward_only_call_leaves_nothing_behind() -> None:
    made, samples = trainer(jnp.float32, PATH), full(MOST, np.random.default_rng(6))
    after = []
    for read in (False, True):
        restart(made)
        if read:
            made.read([replace(s, routing=None) for s in samples])
            made.read(full(2, np.random.default_rng(7)))
        metrics = made.train(samples)
        after.append(({k: v for k, v in metrics.items() if "time/" not in k}, jax.device_get(made.state)))
    assert after[0][0].keys() == after[1][0].keys()
    jax.tree.map(np.testing.assert_array_equal, after[0], after[1])


@pytest.mark.slow
@pytest.mark.parametrize("replay", ["R2", "R3"])
def test_nothing_compiles_after_warm_up(replay: Replay) -> None:
    made = trainer(jnp.float32, PATH)
    restart(made)
    rng = np.random.default_rng(8)
    deep, flat = full(3, rng, length=100, stem=60), full(2, rng)
    with mode(made, replay):
        made.train(flat)
        with CompileCounter() as compiles:
            metrics = made.train([*deep, *(replace(s, episode=9) for s in flat)])
            made.read(deep)
            made.train(flat)
    assert compiles.count == 0 and (metrics["walked_tries"], metrics["micro_batches"]) == (1, 1)


# ---- mistakes


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda rows: rows[:-1], "sample 1: routing: 23 rows are fewer than the 24 tokens"),
        (lambda rows: np.concatenate([rows, rows[:1]]), "sample 1: routing: 25 rows are more than the 24 tokens"),
        (lambda rows: np.where(rows == 3, 7, rows), "sample 1: routing: row .* has expert 7, but the model has 4"),
        (lambda rows: np.concatenate([rows, rows], axis=1), "sample 1: routing: .* this model's are uint8 .* another model"),
        (lambda rows: rows.astype(np.uint16), "sample 1: routing: rows are uint16 .* another model"),
    ],
)
def test_rows_that_cannot_be_the_models_are_refused(change: Any, message: str) -> None:
    good, bad = full(2, np.random.default_rng(9))
    made = trainer()
    with pytest.raises(ValueError, match=message):
        made.train([good, replace(bad, routing=change(bad.routing))])
    dense = [Sample(**{**good.__dict__, "routing": None})]
    branches = branches_of([good, *dense], DENSE, RouterConfig())
    assert all(branch.routing is None for branch in branches)


def test_balance_needs_every_row() -> None:
    samples = full(2, np.random.default_rng(10))
    holes = samples[1].routing
    assert holes is not None
    holes[3] = 255
    with pytest.raises(ValueError, match="balance_coef: some tokens have no recorded .* set trainer.router_replay to 'R2', or"):
        trainer().train(samples)


@pytest.mark.parametrize(
    ("router", "model", "message"),
    [
        (RouterConfig(router_replay="R2"), DENSE, "trainer.router_replay: 'qwen3' has no experts to route to; leave it out"),
        (RouterConfig(z_coef=0.1), DENSE, "trainer.z_coef: 'qwen3' has no experts"),
        (RouterConfig(router_replay="off", balance_coef=0.1), MODEL, "trainer.balance_coef: .* 'off' .* to 'R2', or"),
        (RouterConfig(z_coef=-1), MODEL, "trainer.z_coef: must be a number from 0 up, got -1"),
        (RouterConfig(router_replay="R4"), MODEL, "trainer.router_replay: use one of .*'R3'"),  # pyright: ignore
    ],
)
def test_options_that_make_no_sense_are_refused(router: RouterConfig, model: ModelConfig, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        router.check(model)
    for mode in ("R3", "off"):
        RouterConfig(router_replay=mode).check(DENSE)


def test_a_config_names_experts_and_options() -> None:
    given = tiny_moe.get_config().to_dict()
    config = build(RunConfig, given)
    model, _, _ = make_model(config.model)
    assert model.moe == MoEConfig(num_experts=8, experts_per_token=2, ffn_dim=64)
    assert config.trainer.router_replay == "R3"
    given["model"]["shape"]["moe"]["experts"] = 8
    with pytest.raises(ValueError, match=r"config.model.shape.moe.experts: unknown key; did you mean"):
        make_model(build(RunConfig, given).model)
    given["trainer"]["router_replay"] = "R1"
    with pytest.raises(ValueError, match=r"config.trainer.router_replay: expected one of \('off', 'R2', 'R3'\), got 'R1'"):
        build(RunConfig, given)
