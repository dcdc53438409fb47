"""The trainer: one step is the same however the batch is cut, wherever it runs; shared tokens count once; nothing compiles
twice; what must not change a step does not.

Tolerances: float32 model and masters. 1e-6 between cuts of one batch on one device, 1e-5 between meshes, where partial sums
cross devices. Adam's eps is 1e-3, so that an update is a smooth function of its gradient.
"""

import re
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.config import EngineConfig
from inference.engine import Engine
from inference.types import Request, SamplingParams
from models.compiles import CompileCounter
from models.config import ModelConfig
from models.transformer import Definition
from rl.batch import Sample, Totals, loss_batch
from rl.forest import Layout
from rl.graph import Graph
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.records import Episode
from rl.trainer import Trainer
from sharding.mesh import make_mesh
from sharding.reshard import init, reshard
from sharding.rules import Rules

pytestmark = pytest.mark.plain_code

V = 96
MODEL = ModelConfig(
    family="llama", vocab_size=V, model_dim=32, ffn_dim=64, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8,
    max_positions=256, tied_head=True,
)  # fmt: skip
OPTIMIZER = OptimizerConfig(learning_rate=1e-2, eps=1e-3, weight_decay=0.1, clip_norm=1.0)
RULES = Rules({"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "vocab": "tensor"})
ONE = {"fsdp": 1, "tensor": 1}
LAYOUTS = {
    "one": Layout(rows=1, tokens=256, context=128, branches=16, length=12),
    "four": Layout(rows=1, tokens=64, context=128, branches=16, length=12),
    "two rows": Layout(rows=2, tokens=64, context=128, branches=16, length=12),
    "mesh": Layout(rows=4, tokens=64, context=128, branches=16, length=12),
}
Masters = dict[str, np.ndarray]


def build(layout: Layout, *, model: ModelConfig = MODEL, axes: dict[str, int] = ONE, **changes: Any) -> Trainer:
    mesh = make_mesh(axes)
    options: dict[str, Any] = {
        "objective": Objective(loss="grpo"),
        "others": {"sft": Objective(loss="sft")},
        "dtype": jnp.float32,
        "remat": "block",
        "optimizer": OPTIMIZER,
    } | changes
    definition = Definition(model, jnp.float32, stacked=True)
    masters = init(definition.weights, jax.random.key(0), jnp.float32, RULES.shardings(mesh, definition.weights))
    return Trainer(model, masters, layout=layout, mesh=mesh, rules=RULES, **options)


@cache
def trainer_and_start(name: str, axes: tuple[tuple[str, int], ...] = tuple(ONE.items())) -> tuple[Trainer, Any]:
    trainer = build(LAYOUTS[name], axes=dict(axes))
    return trainer, jax.device_get(trainer.state)


def fresh(name: str, loss: str = "grpo", **axes: int) -> Trainer:
    """The shared trainer of a layout, compiled, in its first state."""
    trainer, state = trainer_and_start(name, tuple((axes or ONE).items()))
    trainer.warm_up(loss)
    trainer.state = jax.tree.map(
        lambda x, sharding: jax.device_put(np.array(x), sharding), state, trainer.programs.state_shardings()
    )
    return trainer


def batch(seed: int = 0, groups: int = 4, size: int = 4) -> list[Sample]:
    """Groups of episodes with one prompt each; old log-probs lie so far off that some tokens are clipped."""
    rng = np.random.default_rng(seed)
    samples = []
    for _ in range(groups):
        prompt = rng.integers(0, V, int(rng.integers(12, 18)))
        for _ in range(size):
            count = int(rng.integers(5, 10))
            n = len(prompt) + count
            weights = np.zeros(n, np.float32)
            weights[len(prompt) :] = 1
            samples.append(
                Sample(
                    ids=np.concatenate([prompt, rng.integers(0, V, count)]).astype(np.int32),
                    weights=weights,
                    logprobs=(weights * (-np.log(V) + 0.3 * rng.standard_normal(n))).astype(np.float32),
                    advantages=(weights * rng.standard_normal()).astype(np.float32),
                    episode=len(samples),
                )
            )
    return samples


def step(trainer: Trainer, samples: Sequence[Sample], loss: str = "grpo", **options: Any) -> tuple[dict[str, float], Masters]:
    """One step: its metrics without the times, and the masters after it."""
    metrics = trainer.train(samples, loss=loss, **options)
    masters = {name: np.array(value) for name, value in trainer.state.masters.items()}
    return {name: value for name, value in metrics.items() if not name.startswith("time/")}, masters


LAYOUT_METRICS = {"flops", "tokens_kept", "compression", "padding", "micro_batches"}


def compare(ours: tuple[dict[str, float], Masters], theirs: tuple[dict[str, float], Masters], tolerance: float) -> None:
    assert ours[0].keys() == theirs[0].keys()
    for name in ours[0].keys() - LAYOUT_METRICS:
        assert ours[0][name] == pytest.approx(theirs[0][name], rel=tolerance, abs=tolerance), name
    assert ours[1].keys() == theirs[1].keys()
    for name, value in theirs[1].items():
        np.testing.assert_allclose(ours[1][name], value, rtol=0, atol=tolerance, err_msg=name)


# ---- one step, however it is cut


@cache
def whole(loss: str) -> tuple[dict[str, float], Masters]:
    return step(fresh("one", loss), batch(), loss)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "loss", "micro_batches"),
    [
        ("four", "grpo", 4),
        ("two rows", "grpo", 2),
        ("four", "sft", 4),
    ],
)
def test_cutting_the_batch_changes_nothing(name: str, loss: str, micro_batches: int) -> None:
    start = {k: np.array(v) for k, v in fresh("one", loss).state.masters.items()}
    one = whole(loss)
    assert one[0]["micro_batches"] == 1
    assert all(np.abs(one[1][k] - start[k]).max() > 1e-4 for k in start)  # the step moved every weight
    if loss == "grpo":
        assert 0 < one[0]["clipped"] < 1 and abs(one[0]["loss"]) > 1e-3
    cut = step(fresh(name, loss), batch(), loss)
    assert cut[0]["micro_batches"] == micro_batches
    compare(cut, one, 1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["grpo", "sft"])
def test_a_mesh_changes_nothing(loss: str) -> None:
    """data 2 x fsdp 2 x tensor 2, over three steps, so that optimizer states meet too."""
    assert jax.device_count() >= 8
    many, one = fresh("mesh", loss, data=2, fsdp=2, tensor=2), fresh("one", loss)
    assert len(many.state.masters["blocks.gate"].sharding.device_set) == 8
    assert not many.state.masters["blocks.gate"].sharding.is_fully_replicated
    for seed in range(3):
        compare(step(many, batch(seed), loss), step(one, batch(seed), loss), 1e-5)
    assert many.step == one.step == 3


def test_one_program_for_every_batch(assert_no_compiles: Callable[[], AbstractContextManager[CompileCounter]]) -> None:
    trainer = fresh("two rows")
    with assert_no_compiles():
        counts = [trainer.train(batch(seed, groups, size))["micro_batches"] for seed, groups, size in
                  ((0, 4, 4), (1, 4, 4), (2, 3, 2), (3, 1, 1))]  # fmt: skip
        trainer.train(batch(4), temperature=0.7)
    assert len(set(counts)) > 1 and trainer.step == 5
    with CompileCounter() as compiles:
        trainer.warm_up()
    assert compiles.count == 0


# ---- shared tokens


class Causal:
    """Plain causal softmax attention over one sequence, from the definition."""

    def attend(self, layer: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        T, H, h = q.shape
        k, v = (jnp.repeat(x, H // x.shape[1], axis=1) for x in (k, v))
        scores = jnp.einsum("qhd,khd->hqk", q, k) / np.float32(np.sqrt(h))
        seen = jnp.broadcast_to(jnp.tril(jnp.ones((T, T), bool)), scores.shape)
        return jnp.einsum("hqk,khd->qhd", jax.nn.softmax(jnp.where(seen, scores, -jnp.inf), axis=-1), v).reshape(T, -1)


def alone(trainer: Trainer, params: Any, ids: np.ndarray) -> jax.Array:
    """Log-probs of ids[1:], without sharing."""
    model = trainer.definition.bind(params)
    logits = model.logits(model(jnp.asarray(ids), jnp.arange(len(ids)), Causal()))
    return jnp.take_along_axis(jax.nn.log_softmax(logits[:-1], axis=-1), jnp.asarray(ids)[1:, None], axis=-1)[:, 0]


def forked_episode(rng: np.random.Generator) -> Graph:
    """prompt, sampled turn, and then two tool results with a sampled turn each: two branches share the first turn."""
    graph = Graph(Episode(id="e", env="x", key=0, content_hash="", group_id="g", seed=0))
    lengths = {"prompt": 6, "s": 4, "t1": 3, "t2": 2, "a": 3, "b": 5}
    ids = {name: rng.integers(0, V, n).tolist() for name, n in lengths.items()}

    def sample(parent: int, name: str) -> int:
        logp = (-np.log(V) + 0.1 * rng.standard_normal(len(ids[name]))).tolist()
        return graph.add_completion(
            parent,
            request_id=name,
            prompt_ids=graph.path_ids(parent),
            ids=ids[name],
            logprobs=logp,
            logprobs_full=logp,
            versions=[0] * len(logp),
            temperature=1.0,
            finish_reason="stop",
            message={"role": "assistant", "content": ""},
        )

    first = sample(graph.extend(ids["prompt"]), "s")
    for tool, answer in (("t1", "a"), ("t2", "b")):
        sample(graph.extend([*graph.path_ids(first), *ids[tool]], kind="tool"), answer)
    return graph


def samples_of(graph: Graph, advantage: float, episode: int) -> list[Sample]:
    return [
        Sample(ids=b.ids, weights=b.weights, logprobs=b.logprobs, advantages=b.advantages, episode=episode)
        for b in graph.branches(advantage)
    ]


def test_a_shared_turn_is_trained_once() -> None:
    """Two branches through one sampled turn: loss and gradient of GRPO over the episode's 12 sampled tokens, each once."""
    trainer = fresh("one")
    graph = forked_episode(np.random.default_rng(0))
    other = batch(5, 1, 1)[0]
    advantage = 0.8
    samples = [*samples_of(graph, advantage, 0), replace(other, episode=1)]
    assert len(samples) == 3
    np.testing.assert_array_equal(samples[0].weights[6:10], 0.5)
    np.testing.assert_array_equal(samples[1].weights[6:10], 0.5)
    assert sum(sample.weights.sum() for sample in samples[:2]) == 12
    # every sampled turn of both branches holds the advantage, on its own tokens alone
    for sample in samples[:2]:
        np.testing.assert_array_equal(sample.advantages, np.where(sample.weights > 0, np.float32(advantage), 0))

    # (branch, place) of each sampled token, once
    once = [[(0, t) for t in range(6, 10)] + [(0, t) for t in range(13, 16)] + [(1, t) for t in range(12, 17)]]
    once += [[(2, int(t)) for t in np.nonzero(other.weights)[0]]]
    assert len(once[0]) == 12

    def formula(params: Any) -> jax.Array:
        logp = [alone(trainer, params, sample.ids) for sample in samples]
        total = jnp.float32(0)
        for episode in once:
            for branch, t in episode:
                ratio = jnp.exp(logp[branch][t - 1] - samples[branch].logprobs[t])
                a = samples[branch].advantages[t]
                total += jnp.minimum(ratio * a, jnp.clip(ratio, 0.8, 1.2) * a) / len(episode)
        return -total / len(once)

    masters = jax.device_get(trainer.state.masters)
    value, expected = jax.jit(jax.value_and_grad(formula))(masters)
    grads, [sums] = trainer.gradients(samples, trainer.plan(samples), 1.0, "grpo")
    assert float(sums["loss"]) == pytest.approx(float(value), abs=1e-6)
    assert float(sums["tokens"]) == 12 + other.weights.sum()
    for name, want in expected.items():
        assert np.abs(want).max() > 1e-4
        np.testing.assert_allclose(grads[name], want, rtol=1e-4, atol=1e-6, err_msg=name)


def test_advantages_stand_on_their_own_tokens() -> None:
    """What the loss gets, against each sample: log-prob, advantage and weight at every trained token, in order."""
    trainer = fresh("two rows")
    samples = batch(1)
    samples = [replace(s, advantages=s.weights * np.arange(1, len(s.ids) + 1, dtype=np.float32) * (n + 1)) for n, s in
               enumerate(samples)]  # fmt: skip
    seen, totals = 0, Totals.of(samples)
    for micro in trainer.plan(samples).micro_batches:
        forest, inputs = micro.forest, loss_batch(samples, micro.order, totals, trainer.layout, 0, set())
        for row in np.nonzero(np.asarray(forest.mask).any(1))[0]:
            mask = np.asarray(forest.mask)[row]
            advantages = np.asarray(inputs.advantages)[row][mask]
            [number] = [n for n, s in enumerate(samples) if np.array_equal(s.advantages[s.weights > 0], advantages)]
            sample = samples[number]
            trained = sample.weights > 0
            ids = np.asarray(forest.target).reshape(-1)[np.asarray(forest.index)[row][mask]]
            np.testing.assert_array_equal(ids, sample.ids[trained])
            np.testing.assert_array_equal(np.asarray(inputs.sampler_logp)[row][mask], sample.logprobs[trained])
            np.testing.assert_array_equal(np.asarray(inputs.weights)[row][mask], sample.weights[trained])
            assert float(np.asarray(inputs.sequence_tokens)[row]) == sample.weights.sum()
            assert not np.asarray(inputs.weights)[row][~mask].any()
            seen += 1
        assert float(inputs.num_sequences) == len(samples)
        assert float(inputs.num_tokens) == sum(s.weights.sum() for s in samples)
    assert seen == len(samples)


# ---- what must not change a step


def test_masked_places_do_not_matter() -> None:
    """NaN and infinity at masked places give the same bits; an episode without a sampled token gives the same step."""
    clean = step(fresh("one"), batch())

    def soiled(values: np.ndarray, weights: np.ndarray, with_: float) -> np.ndarray:
        return np.where(weights > 0, values, np.float32(with_)).astype(np.float32)

    dirty = [
        replace(s, logprobs=soiled(s.logprobs, s.weights, np.nan), advantages=soiled(s.advantages, s.weights, np.inf))
        for s in batch()
    ]
    metrics, masters = step(fresh("one"), dirty)
    assert metrics == clean[0]
    for name, value in clean[1].items():
        np.testing.assert_array_equal(masters[name], value)

    trainer = fresh("two rows")
    masked = replace(dirty[0], ids=dirty[0].ids[::-1].copy(), weights=np.zeros_like(dirty[0].weights), episode=99)
    metrics, masters = step(trainer, [masked, *dirty])
    assert metrics["tokens_in"] == clean[0]["tokens_in"] + len(masked.ids)
    compare(({**metrics, "tokens_in": clean[0]["tokens_in"]}, masters), clean, 1e-6)

    metrics, masters = step(fresh("two rows"), [masked])
    assert metrics["loss"] == 0 and metrics["grad_norm"] == 0 and all(np.isfinite(x).all() for x in masters.values())
    assert all(np.isfinite(value) for value in metrics.values())


def test_a_loss_that_is_not_finite_leaves_the_state() -> None:
    trainer = fresh("two rows")
    trainer.train(batch(1))
    before, held = jax.device_get(trainer.state), trainer.state
    bad = batch(2)
    bad[3] = replace(bad[3], logprobs=np.where(bad[3].weights > 0, np.nan, 0).astype(np.float32))
    with pytest.raises(FloatingPointError, match="loss is nan at step 1: not finite; lower the learning rate"):
        trainer.train(bad)
    assert trainer.state is held and trainer.step == 1
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(trainer.state), before)
    trainer.train(batch(2))
    assert trainer.step == 2


def test_a_gradient_that_is_not_finite_leaves_the_state() -> None:
    trainer = fresh("two rows")
    before = jax.device_get(trainer.state)
    grads = {name: jnp.full(value.shape, jnp.nan) for name, value in before.masters.items()}
    state, norms = jax.jit(trainer.programs.update)(before, grads)
    assert np.isnan(norms["grad_norm"])
    jax.tree.map(np.testing.assert_array_equal, jax.device_get(state), before)


def test_a_sample_that_does_not_fit_leaves_the_state() -> None:
    trainer = fresh("two rows")
    held = trainer.state
    long = replace(batch()[0], ids=np.zeros(200, np.int32), weights=np.zeros(200, np.float32))
    with pytest.raises(ValueError, match="200 tokens do not fit context 128 and tokens per row 64; raise"):
        trainer.train([long])
    assert trainer.state is held and trainer.step == 0


# ---- memory


def test_the_old_state_is_donated() -> None:
    trainer = fresh("two rows")
    old = jax.tree.leaves(trainer.state)
    trainer.train(batch())
    assert all(array.is_deleted() for array in old if array.size > 1)
    assert not any(array.is_deleted() for array in jax.tree.leaves(trainer.state))


def constant_bytes(lowered: Any) -> int:
    """Bytes of the largest constant of a lowered program that is not one value repeated."""
    sizes = [0]
    for line in lowered.as_text().splitlines():
        if "constant" in line and re.search(r"dense(_resource)?<(\"|\[|__)", line):
            shape = re.findall(r"tensor<([0-9x]+)x[a-z0-9]+>", line)
            sizes += [4 * int(np.prod([int(n) for n in text.split("x")])) for text in shape[-1:]]
    return max(sizes)


def test_no_weight_is_a_constant() -> None:
    """The embedding has 2 MiB here; the programs hold no constant of 1 MB, in the jaxpr or after lowering."""
    big = replace(MODEL, vocab_size=16384)
    trainer = build(LAYOUTS["two rows"], model=big)
    embed = trainer.state.masters["embed"]
    assert embed.nbytes == 2**21
    control = jax.jit(lambda x: x + np.arange(2**19, dtype=np.float32).reshape(16384, 32) ** 1.5).lower(embed)
    assert constant_bytes(control) == 2**21  # this test sees them
    lowered = trainer.programs.lower("grpo", two_passes=True) | trainer.programs.lower("sft", two_passes=False)
    assert lowered.keys() == {"grpo", "grpo of readings", "pull", "score", "sft", "update"}
    for name, program in lowered.items():
        assert constant_bytes(program) < 1e6, name

    samples, programs = batch(0, 1, 2), trainer.programs
    [micro] = trainer.plan(samples).micro_batches
    inputs = loss_batch(samples, micro.order, Totals.of(samples), trainer.layout, 0, set())
    grads = programs.zeros()
    for function, arguments in (
        (partial(programs.accumulate, "grpo"), (trainer.state.masters, grads, micro.forest, inputs, np.float32(1))),
        (programs.update, (trainer.state, grads)),
    ):
        consts = jax.make_jaxpr(function)(*arguments).consts
        assert all(np.asarray(const).nbytes < 1e6 for const in consts)


# ---- the sampler


@pytest.mark.slow
def test_the_sampler_agrees_at_a_temperature() -> None:
    """Sampled at temperature 0.7 by the engine, scored at 0.7 by the trainer, float32: less than 1e-5 apart."""
    trainer = fresh("one")
    config = EngineConfig(max_context=128, context_buckets=(128,), max_slots=8, num_pages=64, tokens_per_step=32)
    mesh = make_mesh({"data": 1})
    target = Definition(MODEL, jnp.float32, stacked=False).weights
    shardings = Rules().shardings(mesh, target)
    params = reshard(trainer.state.masters, trainer.definition.weights, target, shardings, jnp.float32)
    engine = Engine(MODEL, config, params, version=0, dtype=jnp.float32, mesh=mesh, rules=Rules())
    engine.warm_up()
    rng = np.random.default_rng(0)
    prompts = [tuple(rng.integers(0, V, n).tolist()) for n in (3, 17, 30)]
    requests = [
        Request(id=f"{n}-{k}", prompt_ids=prompt, params=SamplingParams(max_tokens=12, temperature=0.7, seed=4 * n + k))
        for n, prompt in enumerate(prompts)
        for k in range(4)
    ]
    samples = []
    for number, done in enumerate(engine.run(requests)):
        ids, n = np.asarray([*done.prompt_ids, *done.ids], np.int32), len(done.prompt_ids)
        weights, logp = np.zeros(len(ids), np.float32), np.zeros(len(ids), np.float32)
        weights[n:], logp[n:] = 1, done.logprobs
        samples.append(Sample(ids=ids, weights=weights, logprobs=logp, advantages=weights, episode=number))
    metrics = trainer.train(samples, temperature=0.7)
    assert metrics["tokens"] == 12 * 12 and metrics["max_abs_gap"] < 1e-5 and metrics["k3"] < 1e-9
    assert fresh("one").train(samples, temperature=1.0)["max_abs_gap"] > 0.1


# ---- frozen weights, and mistakes


def test_frozen_weights_keep_their_bits_and_need_no_optimizer() -> None:
    trainer = build(LAYOUTS["two rows"], optimizer=replace(OPTIMIZER, frozen=("embed", "blocks.*norm")))
    trainer.warm_up()
    before = jax.device_get(trainer.state.masters)
    trainer.train(batch())
    after = jax.device_get(trainer.state.masters)
    frozen = {"embed", "blocks.attn_norm", "blocks.mlp_norm"}
    assert {name for name in before if np.array_equal(before[name], after[name])} == frozen
    sizes = [x.size for x in jax.tree.leaves(trainer.state.optimizer) if x.size > 1]
    assert sum(sizes) == 2 * sum(x.size for name, x in before.items() if name not in frozen)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"remat": "all"}, r"remat: 'all' is unknown; use one of \['block', 'dots', 'none'\]"),
        (
            {"axes": {"data": 2, "fsdp": 2, "tensor": 1}},
            "trainer.rows: 2 rows .* over 4 devices .* use a multiple",
        ),
        (
            {"optimizer": replace(OPTIMIZER, frozen=("blocks.x",))},
            "trainer.frozen: no weight is called 'blocks.x'; they are .*embed",
        ),
        ({"optimizer": replace(OPTIMIZER, frozen=("*",))}, "trainer.frozen: .* freezes every weight; leave some"),
        ({"optimizer": replace(OPTIMIZER, schedule="cosine")}, "trainer.decay_steps: schedule 'cosine' needs the steps"),
    ],
)
def test_mistakes(changes: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"remat": "block", "axes": ONE, "optimizer": OPTIMIZER} | changes
    mesh = make_mesh(options.pop("axes"))
    objective = Objective(loss="grpo")
    with pytest.raises(ValueError, match=message):
        Trainer(
            MODEL, {}, layout=LAYOUTS["two rows"], mesh=mesh, rules=RULES, objective=objective, dtype=jnp.float32, **options
        )


def test_a_step_needs_its_program() -> None:
    trainer = build(LAYOUTS["two rows"])
    with pytest.raises(AssertionError, match="warm_up"):
        trainer.train(batch())
