"""The layer of experts against one written out token by token, its routing, its gradients, and its parts on several devices.

Legend: T tokens, D model, E experts, k experts per token.
"""

import dataclasses
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st

from models.config import ModelConfig, MoEConfig
from models.grouped import grouped
from models.numerics import Numerics
from models.router import gates_of, select
from models.transformer import ALONE, Block, describe
from sharding.mesh import make_mesh
from sharding.rules import Rules
from sharding.shards import Shards

MOE = MoEConfig(num_experts=8, experts_per_token=3, ffn_dim=24)
MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=64,
    model_dim=32,
    ffn_dim=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_positions=256,
    moe=MOE,
)
VARIANTS = {
    "softmax over the selected": MOE,
    "softmax over all": dataclasses.replace(MOE, renormalise=False),
    "sigmoid, bias": dataclasses.replace(MOE, scoring="sigmoid", selection_bias=True, scaling=2.5),
    "sigmoid, not renormalised": dataclasses.replace(MOE, scoring="sigmoid", renormalise=False),
    "groups": dataclasses.replace(MOE, groups=4, groups_per_token=2),
    "groups, bias": dataclasses.replace(
        MOE, scoring="sigmoid", selection_bias=True, groups=4, groups_per_token=2, experts_per_token=4
    ),
    "shared": dataclasses.replace(MOE, shared_ffn_dim=40),
    "shared, gated": dataclasses.replace(MOE, renormalise=False, shared_ffn_dim=40, shared_gate=True),
}


def weights_of(config: MoEConfig, seed: int = 0) -> dict[str, np.ndarray]:
    model = dataclasses.replace(MODEL, moe=config)
    rng = np.random.default_rng(seed)
    params = {}
    for name, weight in describe(model, stacked=False).items():
        if name.startswith("blocks.0.moe."):
            params[name.removeprefix("blocks.0.moe.")] = rng.normal(size=weight.shape) * (weight.init or 1)
    params["router"] *= 3
    if "bias" in params:
        params["bias"] *= 20
    return params


def layer(config: MoEConfig, params: Any, x: Any, replay: Any = None, load: Any = None, dtype: Any = jnp.float64, shards=ALONE):
    """The module, bound to these weights."""
    moe = Block(dataclasses.replace(MODEL, moe=config), Numerics(dtype)).moe
    nnx.update(moe, nnx.from_flat_state([((name,), nnx.Param(jnp.asarray(value))) for name, value in params.items()]))
    return moe(x, replay, load, shards, ALONE)


def slow_scores(config: MoEConfig, logits: np.ndarray) -> np.ndarray:
    if config.scoring == "sigmoid":
        return 1 / (1 + np.exp(-logits))
    e = np.exp(logits - logits.max())
    return e / e.sum()


def slow_ids(config: MoEConfig, scores: np.ndarray, bias: Any) -> list[int]:
    """Best first; of equals the lowest id."""
    for_choice = scores + (0 if bias is None else bias)
    size = config.num_experts // config.groups
    groups = [sorted(for_choice[g * size : (g + 1) * size])[::-1] for g in range(config.groups)]
    value = [sum(group[: 2 if config.selection_bias else 1]) for group in groups]
    best = sorted(range(config.groups), key=lambda g: (-value[g], g))[: config.groups_per_token if config.groups > 1 else 1]
    allowed = [e for e in range(config.num_experts) if e // size in best]
    return sorted(allowed, key=lambda e: (-for_choice[e], e))[: config.experts_per_token]


def slow(config: MoEConfig, params: dict[str, np.ndarray], x: np.ndarray, replay: np.ndarray | None = None):
    """One token, one expert at a time: y and ids."""

    def silu(v):
        return v / (1 + np.exp(-v))

    ys, all_ids = [], []
    for t, row in enumerate(x):
        scores = slow_scores(config, row @ params["router"])
        ids = slow_ids(config, scores, params.get("bias")) if replay is None else replay[t].tolist()
        gates = scores[ids]
        gates = config.scaling * (gates / gates.sum() if config.renormalise else gates)
        y = sum(
            g * ((silu(row @ params["gate"][e]) * (row @ params["up"][e])) @ params["down"][e])
            for g, e in zip(gates, ids, strict=True)
        )
        if config.shared_ffn_dim:
            shared = (silu(row @ params["shared_gate"]) * (row @ params["shared_up"])) @ params["shared_down"]
            y = y + (shared / (1 + np.exp(-(row @ params["shared_router"]))) if config.shared_gate else shared)
        ys.append(y)
        all_ids.append(ids)
    return np.array(ys), np.array(all_ids)


@pytest.fixture(autouse=True)
def _float64():
    with jax.enable_x64(True):
        yield


@pytest.mark.parametrize("name", VARIANTS)
def test_against_one_token_at_a_time(name: str) -> None:
    config = VARIANTS[name]
    params, x = weights_of(config), np.random.default_rng(1).normal(size=(37, 32))
    y, routing = jax.jit(lambda p, x: layer(config, p, x))(params, x)
    want, ids = slow(config, params, x)
    assert (np.asarray(routing.ids) == ids).all()
    np.testing.assert_allclose(y, want, atol=1e-12)
    assert not np.asarray(routing.differs).any()
    assert (np.asarray(routing.gap) > 0).all()

    # Replay: other experts in another order; a row of the largest value routes itself.
    replay = np.array([np.random.default_rng(t).permutation(8)[: ids.shape[1]] for t in range(len(x))])
    replay[5] = ids[5]
    recorded = replay.astype(np.uint8)
    recorded[5] = 255
    y, routing = jax.jit(lambda p, x: layer(config, p, x, recorded))(params, x)
    np.testing.assert_allclose(y, slow(config, params, x, replay)[0], atol=1e-12)
    assert (np.asarray(routing.ids) == replay).all()
    assert (np.asarray(routing.differs) == [set(a) != set(b) for a, b in zip(replay, ids, strict=True)]).all()


def test_ties_go_to_the_lowest_id() -> None:
    assert select(MOE, jnp.zeros((2, 8))).tolist() == [[0, 1, 2]] * 2


def test_gates_have_the_jacobian_of_a_softmax_over_the_selected() -> None:
    """d g_i / d s_j = g_i (delta_ij - g_j) on the selected and 0 elsewhere (shared/reference/methods.md, 1.1), also where the
    replayed experts are not the router's own: zero-filled scores would give zeros there."""
    logits = np.random.default_rng(0).normal(size=(1, 8)) * 2
    ids = np.argsort(logits[0])[[0, 5, 2]][None]
    gates = np.asarray(gates_of(MOE, jnp.asarray(logits), jnp.asarray(ids)))[0]
    jacobian = jax.jacobian(lambda s: gates_of(MOE, s, jnp.asarray(ids))[0])(jnp.asarray(logits))[:, 0]
    want = np.zeros((3, 8))
    want[:, ids[0]] = np.diag(gates) - np.outer(gates, gates)
    np.testing.assert_allclose(jacobian, want, atol=1e-12)
    assert np.abs(want[:, ids[0]]).min() > 1e-4


@pytest.mark.parametrize("name", VARIANTS)
def test_gradients_under_replay_equal_finite_differences(name: str) -> None:
    config = VARIANTS[name]
    rng = np.random.default_rng(2)
    params, x, g = weights_of(config), rng.normal(size=(11, 32)), rng.normal(size=(11, 32))
    replay = np.array([rng.permutation(8)[: config.experts_per_token] for _ in x]).astype(np.uint8)

    def loss(params: Any, x: Any) -> jax.Array:
        y, routing = layer(config, params, x, replay, np.arange(8) / 28)
        return (y * g).sum() + 0.1 * routing.balance.sum() + 0.01 * routing.z.sum()

    value = jax.jit(loss)
    grads, dx = jax.jit(jax.grad(loss, argnums=(0, 1)))(params, x)
    for name, grad in {**grads, "x": dx}.items():
        direction = rng.normal(size=grad.shape)

        def moved(step: float, name: str = name, direction: np.ndarray = direction) -> float:
            arrays = {**params, "x": x}
            arrays[name] = arrays[name] + step * direction
            at = arrays.pop("x")
            return float(value(arrays, at))

        numeric = (8 * (moved(1e-4) - moved(-1e-4)) - (moved(2e-4) - moved(-2e-4))) / 12e-4
        np.testing.assert_allclose((np.asarray(grad) * direction).sum(), numeric, rtol=1e-6, atol=1e-8, err_msg=name)
    assert np.abs(grads["router"]).max() > 1e-3
    if "bias" in grads:
        assert not np.asarray(grads["bias"]).any()


def test_load_balance_and_z_have_their_published_values() -> None:
    """Uniform load or uniform probabilities give 1; logits of 0 give z = log(E)^2."""
    params, x = weights_of(MOE), np.random.default_rng(1).normal(size=(5, 32))
    _, routing = layer(MOE, params, x, load=np.full(8, 1 / 8))
    np.testing.assert_allclose(routing.balance, 1)
    params["router"] *= 0
    _, routing = layer(MOE, params, x, load=np.eye(8)[0])
    np.testing.assert_allclose(routing.balance, 1)
    np.testing.assert_allclose(routing.z, np.log(8) ** 2)


@partial(jax.jit, static_argnums=4)
def grouped_and_gradients(x: Any, w: Any, g: Any, sizes: Any, platform: str) -> Any:
    def loss(x: Any, w: Any) -> tuple[jax.Array, jax.Array]:
        (y,) = grouped(x, (w,), sizes, jnp.float64, platform)
        return (y * g).sum(), y

    (_, y), grads = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(x, w)
    return y, *grads


@given(st.lists(st.integers(0, 40), min_size=5, max_size=5), st.sampled_from(["cpu", "ragged"]))
def test_grouped_products_equal_one_expert_at_a_time(sizes: list[int], platform: str) -> None:
    """Both ways, with empty experts and rows of no expert; values, and the gradients of both operands."""
    rng = np.random.default_rng(sum(sizes))
    E, N, D, F = 5, 200, 24, 10
    x, w, g = rng.normal(size=(N, D)), rng.normal(size=(E, D, F)), rng.normal(size=(N, F))
    with jax.enable_x64(True):
        got = grouped_and_gradients(x, w, g, jnp.asarray(sizes, jnp.int32), platform)
    want, want_dx, want_dw = np.zeros((N, F)), np.zeros((N, D)), np.zeros((E, D, F))
    at = 0
    for e, size in enumerate(sizes):
        here = slice(at, at + size)
        want[here], want_dx[here], want_dw[e] = x[here] @ w[e], g[here] @ w[e].T, x[here].T @ g[here]
        at += size
    for value, wanted in zip(got, (want, want_dx, want_dw), strict=True):
        np.testing.assert_allclose(value, wanted, atol=1e-12)


def test_a_token_has_the_same_bits_in_any_company() -> None:
    """bfloat16: alone, among 8, 64 or 700 others whose routing is skewed, in any place, jitted or inside a loop."""
    config = dataclasses.replace(VARIANTS["shared, gated"], num_experts=16, experts_per_token=4)
    params = {name: value.astype(np.float32) for name, value in weights_of(config).items()}
    rng = np.random.default_rng(0)
    x = rng.normal(size=(700, 32)).astype(np.float32)
    x[100:400] = x[3] + 0.01 * x[100:400]
    run = jax.jit(lambda x: layer(config, params, x, dtype=jnp.bfloat16)[0])
    whole = np.asarray(run(x))
    for n in (8, 9, 64, 333):
        at = rng.choice(700, n, replace=False)
        assert (np.asarray(run(x[at])) == whole[at]).all(), n
    looped = jax.jit(lambda xs: jax.lax.map(lambda x: layer(config, params, x, dtype=jnp.bfloat16)[0], xs))
    assert (np.asarray(looped(x.reshape(7, 100, 32))).reshape(700, 32) == whole).all()


@pytest.mark.parametrize(
    "rules", [{"experts": "expert"}, {"experts": "expert", "expert_ffn": "tensor"}, {"expert_ffn": "tensor"}]
)
@pytest.mark.parametrize(("experts", "skew"), [(8, "even"), (8, "one expert"), (8, "two empty devices"), (6, "even")])
def test_shared_by_devices_equals_alone(rules: dict[str, str], skew: str, experts: int) -> None:
    """Tokens split over the experts' axis (exchanged), and whole on every device (summed); 6 experts on 4 devices stay whole.
    Values and all gradients to 1e-12, also where one expert or one device gets everything."""
    config = dataclasses.replace(MOE, num_experts=experts, ffn_dim=24 if experts == 8 else 25)
    mesh = make_mesh({"data": 1, "expert": 4, "tensor": 2}, jax.devices()[:8])
    model = dataclasses.replace(MODEL, moe=config)
    weights = {n.removeprefix("blocks.0.moe."): w for n, w in describe(model, stacked=False).items() if ".0.moe." in n}
    shards = Shards.of(mesh, Rules(rules), weights)
    params, rng = weights_of(config), np.random.default_rng(5)
    x, g = rng.normal(size=(48, 32)), rng.normal(size=(48, 32))
    replay = np.array([rng.permutation(experts)[:3] for _ in x]).astype(np.uint8)
    if skew == "one expert":
        replay[:, 0] = 1
        replay[:, 1:] = [[2, 3]]
    if skew == "two empty devices":
        replay[:] = np.array([rng.permutation(4)[:3] for _ in x])

    def total(params: Any, x: Any, shards: Shards = ALONE, tokens: Any = None) -> tuple[jax.Array, jax.Array]:
        run = lambda p, x, r: layer(config, p, x, r, shards=shards)[0]  # noqa: E731
        specs = shards.weight_specs(weights), shards.spec(tokens), shards.spec(tokens)
        y = shards.run(run, specs, shards.spec(tokens))(params, x, replay)
        return (y * g).sum(), y

    (_, y), grads = jax.jit(jax.value_and_grad(total, argnums=(0, 1), has_aux=True))(params, x)
    for view, tokens in ((shards, "B"), (shards.replicated(), None)):
        split = partial(total, shards=view, tokens=tokens)
        (_, other_y), other = jax.jit(jax.value_and_grad(split, argnums=(0, 1), has_aux=True))(params, x)
        np.testing.assert_allclose(other_y, y, atol=1e-12)
        jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-12), other, grads)


@pytest.mark.parametrize(
    ("fields", "fix"),
    [
        ({"experts_per_token": 9}, "experts_per_token"),
        ({"groups": 3}, "groups"),
        ({"groups": 4, "groups_per_token": 5}, "groups"),
        ({"scoring": "tanh"}, "scoring"),
        ({"num_experts": 0}, "num_experts"),
        ({"shared_gate": True}, "shared_gate"),
    ],
)
def test_bad_configs_are_refused(fields: dict[str, Any], fix: str) -> None:
    with pytest.raises(ValueError, match=rf"moe\.{fix}"):
        dataclasses.replace(MOE, **fields)


def test_family_and_experts_belong_together() -> None:
    with pytest.raises(ValueError, match="moe"):
        dataclasses.replace(MODEL, family="qwen3")
    with pytest.raises(ValueError, match="moe"):
        dataclasses.replace(MODEL, moe=None)
