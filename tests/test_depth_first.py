"""Tries walked depth first: segments, the planner, and gradients equal to each branch alone (float64), both ways.

Legend: N branches, L longest branch, T tokens of a segment.
"""

from collections.abc import Sequence
from functools import cache
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from models.compiles import CompileCounter
from models.config import ModelConfig
from models.transformer import Definition
from rl.batch import Sample, Totals, loss_batch
from rl.branches import Branch, sort_branches
from rl.depth_first import contexts, walk
from rl.forest import Layout
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.trainer import Trainer
from rl.tries import make_trie, plan, segment_sizes
from sharding.mesh import make_mesh
from sharding.reshard import init
from sharding.rules import Rules

pytestmark = pytest.mark.plain_code

V, LONGEST, MOST = 12, 30, 6
MODEL = ModelConfig(
    family="qwen3", vocab_size=V, model_dim=8, ffn_dim=12, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=4,
    max_positions=512,
)  # fmt: skip
RULES = Rules({"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "vocab": "tensor"})
LOSSES = {
    "grpo": Objective(loss="grpo"),
    "gspo": Objective(loss="gspo"),
    "dpo": Objective(loss="dpo"),
    "sft": Objective(loss="sft"),
}
LAYOUT = Layout(rows=2, tokens=64, context=128, branches=MOST, length=LONGEST - 1, path=128)


@st.composite
def episodes(draw: Any) -> list[Sample]:
    """Branches that grow out of each other, up to six forks deep: at any depth (the first token too), prefixes, duplicates,
    masked observations, one or several branches of an episode."""
    paths: list[list[int]] = []
    samples = []
    rng = np.random.default_rng(draw(st.integers(0, 1000)))
    for number in range(draw(st.integers(1, MOST))):
        ids: list[int] = []
        if paths:
            parent = draw(st.sampled_from(paths))
            ids = parent[: draw(st.integers(0, len(parent)))]
        ids = ids + draw(st.lists(st.integers(0, 2), min_size=0 if ids else 1, max_size=LONGEST - len(ids)))
        paths.append(ids)
        mask = np.array([False, *draw(st.lists(st.booleans(), min_size=len(ids) - 1, max_size=len(ids) - 1))])
        samples.append(sample(ids, mask, rng, episode=draw(st.integers(0, number)), pair=number // 2, chosen=number % 2 == 0))
    return samples


def sample(ids: Any, mask: np.ndarray, rng: np.random.Generator, **fields: Any) -> Sample:
    n = len(ids)
    weights = np.where(mask, rng.choice([1, 0.5, 1 / 3], n), 0).astype(np.float32)
    near = (-np.log(V) + 0.3 * rng.standard_normal((2, n))).astype(np.float32)
    return Sample(
        ids=np.asarray(ids, np.int32),
        weights=weights,
        logprobs=near[0],
        reference_logprobs=near[1],
        advantages=np.full(n, rng.standard_normal(), np.float32),
        **fields,
    )


class Causal:
    """Plain causal softmax attention over one sequence, from the definition."""

    def attend(self, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        T, H, h = q.shape
        k, v = (jnp.repeat(x, H // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / jnp.sqrt(jnp.asarray(h, q.dtype))
        seen = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), scores.shape)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), v).reshape(T, -1)


@cache
def trainer(dtype: Any, layout: Layout = LAYOUT, axes: tuple[tuple[str, int], ...] = (("fsdp", 1), ("tensor", 1))) -> Trainer:
    """Compiled for one and for two passes and for the walk: in float64 for all of LOSSES, else for the first."""
    mesh = make_mesh(dict(axes))
    definition = Definition(MODEL, dtype, stacked=True)
    masters = init(definition.weights, jax.random.key(0), jnp.float32, RULES.shardings(mesh, definition.weights))
    with jax.enable_x64(dtype == jnp.float64):
        made = Trainer(
            MODEL,
            {name: x.astype(dtype if dtype == jnp.float64 else jnp.float32) for name, x in masters.items()},
            layout=layout,
            optimizer=OptimizerConfig(learning_rate=1e-2),
            objective=LOSSES["grpo"],
            others=LOSSES,
            dtype=dtype,
            remat="none",
            mesh=mesh,
            rules=RULES,
        )
        for loss in LOSSES if dtype == jnp.float64 else ["grpo"]:
            made.warm_up(loss)
    return made


@cache
def alone(loss: str) -> Any:
    """Loss and gradient from unshared sequences in plain arrays: the definition."""
    definition = Definition(MODEL, jnp.float64, stacked=True)

    def value(params: Any, ids_NL: jax.Array, place_NL: jax.Array, batch: Any) -> jax.Array:
        model = definition.bind(params)

        def one(ids: jax.Array) -> jax.Array:
            logits = model.logits(model(ids, jnp.arange(len(ids)), Causal()))
            return jnp.take_along_axis(jax.nn.log_softmax(logits[:-1], axis=-1), ids[1:, None], axis=-1)[:, 0]

        logp = jnp.take_along_axis(jax.vmap(one)(ids_NL), place_NL - 1, axis=1)
        return LOSSES[loss](logp, batch)[0]

    return jax.jit(jax.value_and_grad(value))


def expected(loss: str, samples: Sequence[Sample], params: Any) -> tuple[float, dict[str, np.ndarray]]:
    ids, place = np.zeros((MOST, LONGEST), np.int32), np.ones((MOST, LONGEST - 1), np.int32)
    for row, s in enumerate(samples):
        ids[row, : len(s.ids)] = s.ids
        place[row, : len(s.trained)] = s.trained
    batch = loss_batch(samples, range(len(samples)), Totals.of(samples), LAYOUT, 0, LOSSES[loss].needs)
    with jax.enable_x64(True):
        value, gradient = alone(loss)(params, ids, place, batch)
    return float(value), jax.device_get(gradient)


def gradients(made: Trainer, samples: Sequence[Sample], loss: str, way: str) -> tuple[float, dict[str, np.ndarray]]:
    """The trainer's, all in rows or all walked."""
    branches = [Branch(s.ids, s.weights > 0) for s in samples]
    if way == "walked":
        trie = make_trie(branches, sort_branches(branches), made.layout)
        planned = plan([], made.layout, 3)
        planned = type(planned)(micro_batches=[], tries=[trie], stats=planned.stats)
    else:
        planned = made.plan(samples)
        assert not planned.tries
    with jax.enable_x64(made.definition.dtype == jnp.float64):
        grads, shares = made.gradients(samples, planned, 1.0, loss)
    return sum(float(share["loss"]) for share in shares), jax.device_get(grads)


@pytest.mark.parametrize("way", ["rows", "walked"])
@pytest.mark.parametrize("loss", LOSSES)
@hypothesis.settings(max_examples=12)
@hypothesis.given(samples=episodes())
def test_gradients_are_those_of_each_branch_alone(way: str, loss: str, samples: list[Sample]) -> None:
    """Sequence-level losses and pairs too; 1e-9 in float64."""
    if loss == "dpo":
        hypothesis.assume(len(samples) > 1)
        samples = samples[: len(samples) // 2 * 2]
    made = trainer(jnp.float64)
    value, gradient = gradients(made, samples, loss, way)
    want_value, want = expected(loss, samples, made.state.masters)
    assert value == pytest.approx(want_value, abs=1e-9)
    for name, x in want.items():
        assert x.dtype == np.float64
        np.testing.assert_allclose(gradient[name], x, rtol=1e-9, atol=1e-9, err_msg=name)


def deep(rng: np.random.Generator) -> list[Sample]:
    """A trie that is deeper than a row: forks at 100, 130 and 300, chains that are cut, over several contexts."""
    stem = rng.integers(0, V, 400)
    samples = []
    for number, (keep, more) in enumerate([(400, 0), (300, 90), (300, 1), (130, 260), (130, 20), (100, 70), (100, 70)]):
        ids = [*stem[:keep], *rng.integers(0, V, more)]
        mask = np.arange(len(ids)) % 7 == 3
        samples.append(sample(ids, mask, rng, episode=number))
    return samples


LONG = Layout(rows=1, tokens=1600, context=512, branches=7, length=64)
SHORT = Layout(rows=1, tokens=64, context=128, branches=7, length=64, path=512)


def test_deep_tries_in_short_segments_equal_one_row_each() -> None:
    """float32: 1e-5 of the largest gradient of each weight."""
    samples = deep(np.random.default_rng(0))
    one, many = trainer(jnp.float32, LONG), trainer(jnp.float32, SHORT)
    want_value, want = gradients(one, samples, "grpo", "rows")
    planned = many.plan(samples)
    assert len(planned.tries) == 1 and not planned.micro_batches
    assert {s.size for s in planned.tries[0].segments} == {64} and len(planned.tries[0].segments) > 12
    value, gradient = gradients(many, samples, "grpo", "walked")
    assert value == pytest.approx(want_value, abs=1e-6)
    for name, x in want.items():
        np.testing.assert_allclose(gradient[name], x, rtol=0, atol=1e-5 * np.abs(x).max(), err_msg=name)


def test_a_walk_reads_the_bits_that_rows_read() -> None:
    """bfloat16: what the trainer computes depth first is what it computes in rows, which is what the sampler computed."""
    samples = deep(np.random.default_rng(1))
    rows, walked = trainer(jnp.bfloat16, LONG), trainer(jnp.bfloat16, SHORT)
    for a, b in zip(rows.read(samples), walked.read(samples), strict=True):
        np.testing.assert_array_equal(a, b)


def test_a_mesh_changes_nothing() -> None:
    samples = deep(np.random.default_rng(2))
    one = trainer(jnp.float32, SHORT)
    many = trainer(jnp.float32, Layout(**{**SHORT.__dict__, "rows": 2}), (("fsdp", 2), ("tensor", 2)))
    want_value, want = gradients(one, samples, "grpo", "walked")
    value, gradient = gradients(many, samples, "grpo", "walked")
    assert value == pytest.approx(want_value, abs=1e-5)
    for name, x in want.items():
        np.testing.assert_allclose(gradient[name], x, rtol=0, atol=1e-5, err_msg=name)


def test_a_step_compiles_nothing_and_says_what_it_did() -> None:
    made = trainer(jnp.float32, SHORT)
    rng = np.random.default_rng(3)
    short = [sample(rng.integers(0, V, 20), np.arange(20) > 15, rng, episode=10 + n) for n in range(3)]
    with CompileCounter() as compiles:
        metrics = made.train([*deep(rng), *short], loss="grpo")
        mixed = made.train(short, loss="grpo")
    assert compiles.count == 0
    assert (metrics["walked_tries"], metrics["micro_batches"]) == (1, 1) and mixed["walked_tries"] == 0
    assert metrics["tokens_kept"] < metrics["tokens_in"] and 0 <= metrics["padding"] < 1


# ---- tries and the planner


@hypothesis.settings(max_examples=40)
@hypothesis.given(samples=episodes(), tokens=st.sampled_from([64, 256]))
def test_segments_are_the_trie(samples: list[Sample], tokens: int) -> None:
    branches = [Branch(s.ids, s.weights > 0) for s in samples]
    layout = Layout(rows=1, tokens=tokens, context=128, branches=MOST, length=LONGEST - 1, path=128)
    trie = make_trie(branches, sort_branches(branches), layout)
    paths: list[tuple[int, ...]] = []
    reads: list[tuple[tuple[int, ...], int]] = []
    for number, segment in enumerate(trie.segments):
        above = paths[segment.parent] if segment.parent >= 0 else ()
        assert segment.parent < number and segment.start == len(above)
        assert len(segment.tokens) <= segment.size and len(segment.read) <= 2 * segment.size
        assert segment.size in segment_sizes(layout)
        assert segment.inner == any(other.parent == number for other in trie.segments)
        paths.append((*above, *segment.tokens.tolist()))
        reads += [
            (paths[-1][: len(above) + r + 1], t) for r, t in zip(segment.read.tolist(), segment.target.tolist(), strict=True)
        ]
        assert segment.first_entry + len(segment.read) == len(reads)
    prefixes = {tuple(b.ids[: n + 1].tolist()) for b in branches for n in range(len(b.ids))}
    assert trie.num_tokens == len(prefixes) == sum(len(s.tokens) for s in trie.segments)
    assert trie.key_sum == sum(map(len, prefixes))
    for number, index in zip(trie.order, trie.index, strict=True):
        branch = branches[number]
        assert [reads[e] for e in index] == [
            (tuple(branch.ids[:t].tolist()), branch.ids[t]) for t in np.nonzero(branch.mask)[0]
        ]
    steps = list(walk(trie))
    assert sorted(n for what, n in steps if what == "leave") == list(range(len(trie.segments)))
    assert {n for what, n in steps if what == "enter"} == {n for n, s in enumerate(trie.segments) if s.inner}
    for number, segment in enumerate(trie.segments):
        if segment.parent >= 0:
            below, parent = steps.index(("leave", number)), segment.parent
            assert steps.index(("enter", parent)) < below < steps.index(("leave", parent))


def test_the_planner_walks_where_that_costs_less() -> None:
    rng = np.random.default_rng(0)

    def group(shared: int, own: int, count: int) -> list[Branch]:
        stem = rng.integers(0, V, shared)
        ids = [np.concatenate([stem, rng.integers(0, V, own)]).astype(np.int32) for _ in range(count)]
        return [Branch(x, np.arange(len(x)) >= shared) for x in ids]

    layout = Layout(rows=1, tokens=256, context=256, branches=8, length=60, path=384)
    small, flat, tall, long = group(64, 8, 8), group(8, 60, 8), group(200, 50, 8), group(300, 20, 2)
    planned = plan([*small, *flat, *tall, *long], layout, 4)
    assert sorted(sorted(t.order) for t in planned.tries) == [list(range(16, 24)), [24, 25]]
    in_rows = sorted(np.concatenate([m.order for m in planned.micro_batches]).tolist())
    assert in_rows == list(range(16))
    assert planned.stats.tokens_in == sum(len(b.ids) for b in (*small, *flat, *tall, *long))
    unshared = Layout(rows=1, tokens=256, context=256, branches=8, length=60)
    assert not plan([*small, *flat, *tall], unshared, 4).tries
    with pytest.raises(ValueError, match="320 tokens do not fit .* set trainer.depth_first, or cut"):
        plan(long, unshared, 4)
    with pytest.raises(ValueError, match="path .100. multiples of 128"):
        Layout(rows=1, tokens=64, context=128, branches=1, length=1, path=100)
    assert contexts(layout)[-1] == 384 + 256
