"""The trainer replays routing: in rows and walks, on meshes, through remat and micro-batches; losses of the routers.

Legend: B rows, T tokens of a row, L layers, E experts, k experts per token.
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from models.config import ModelConfig, MoEConfig
from models.routes import not_recorded
from models.transformer import Definition
from rl.batch import Sample, Totals, branches_of, loss_batch
from rl.branches import sort_branches
from rl.forest import Layout, pack
from rl.measures import add_up, finish
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.routes import RouterConfig
from rl.trainer import Trainer
from rl.tries import Plan, make_trie, plan
from sharding.mesh import make_mesh
from sharding.reshard import init
from sharding.rules import Axes, Rules

V, E, K, LAYERS, LONGEST, MOST = 12, 4, 2, 2, 24, 5
MODEL = ModelConfig(
    family="qwen3_moe", vocab_size=V, model_dim=8, ffn_dim=12, num_layers=LAYERS, num_heads=4, num_kv_heads=2, head_dim=4,
    max_positions=512, moe=MoEConfig(num_experts=E, experts_per_token=K, ffn_dim=6, shared_ffn_dim=4),
)  # fmt: skip
DENSE = replace(MODEL, family="qwen3", moe=None)
LAYOUT = Layout(rows=2, tokens=64, context=128, branches=MOST, length=LONGEST - 1, path=128)
LOSSES = {"grpo": Objective(loss="grpo"), "sft": Objective(loss="sft")}
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


@cache
def trainer(
    dtype: Any = jnp.float64,
    router: RouterConfig = COEFS,
    layout: Layout = LAYOUT,
    axes: tuple[tuple[str, int], ...] = (("data", 1),),
    rules: tuple[tuple[str, Axes], ...] = (),
    remat: str = "none",
    model: ModelConfig = MODEL,
) -> Trainer:
    mesh, table = make_mesh(dict(axes)), Rules(dict(rules))
    definition = Definition(model, dtype, stacked=True)
    masters = init(definition.weights, jax.random.key(0), jnp.float32, table.shardings(mesh, definition.weights))
    with jax.enable_x64(dtype == jnp.float64):
        made = Trainer(
            model,
            {name: x.astype(dtype if dtype == jnp.float64 else jnp.float32) for name, x in masters.items()},
            layout=layout,
            optimizer=OptimizerConfig(learning_rate=1e-2),
            objective=LOSSES["grpo"],
            others=LOSSES,
            dtype=dtype,
            remat=remat,
            mesh=mesh,
            rules=table,
            router=router,
        )
        made.warm_up()
    return made


class Causal:
    """Plain causal softmax attention over one sequence, from the definition."""

    def attend(self, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        T, H, h = q.shape
        k, v = (jnp.repeat(x, H // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / jnp.sqrt(jnp.asarray(h, q.dtype))
        seen = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), scores.shape)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), v).reshape(T, -1)


@cache
def alone(router: RouterConfig) -> Any:
    """Loss and gradient from unshared sequences in plain arrays: the definition. `real` `[N, L]`: tokens with a row."""
    definition = Definition(MODEL, jnp.float64, stacked=True)

    def value(params: Any, ids_NL: jax.Array, rows: jax.Array, real: jax.Array, place_NL: jax.Array, load: Any, batch: Any):
        model = definition.bind(params)

        def one(ids: jax.Array, rows: jax.Array):
            n, layers = len(ids), jnp.arange(LAYERS)
            hidden, _, routing = model.scan(ids, jnp.arange(n), layers, lambda layer: (Causal(), layer), rows, load)
            logp = jnp.take_along_axis(jax.nn.log_softmax(model.logits(hidden[:-1]), axis=-1), ids[1:, None], axis=-1)[:, 0]
            return logp, routing.balance.mean(axis=0), routing.z.mean(axis=0), routing.differs

        logp, balance, z, differs = jax.vmap(one)(ids_NL, rows)
        main = LOSSES["grpo"](jnp.take_along_axis(logp, place_NL - 1, axis=1), batch)[0]
        count = jnp.maximum(1, real.sum())
        terms = router.balance_coef * (balance * real).sum() + router.z_coef * (z * real).sum()
        mismatch = (differs * real[:, None]).sum() / count / LAYERS
        return main + terms / count, mismatch

    return jax.jit(jax.value_and_grad(value, has_aux=True))


def expected(samples: Sequence[Sample], params: Any, router: RouterConfig) -> tuple[float, float, dict[str, np.ndarray]]:
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
        (value, mismatch), gradient = alone(router)(params, ids, rows, real, place, load, batch)
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
@hypothesis.settings(max_examples=10)
@hypothesis.given(samples=episodes())
def test_gradients_are_those_of_each_branch_alone(way: str, samples: list[Sample]) -> None:
    """With losses for balance and z; 1e-9 in float64. Branches that share tokens but not rows stand apart."""
    made = trainer()
    metrics, gradient = gradients(made, samples, way)
    value, mismatch, want = expected(samples, made.state.masters, COEFS)
    assert metrics["loss"] == pytest.approx(value, rel=1e-9, abs=1e-9)
    assert metrics["router/mismatch"] == pytest.approx(mismatch, abs=1e-6)
    for name, x in want.items():
        np.testing.assert_allclose(gradient[name], x, rtol=1e-9, atol=1e-9, err_msg=name)
