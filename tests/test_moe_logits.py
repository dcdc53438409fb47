"""The experts of whole models against transformers: which are chosen, and logits wherever the experts are.

Legend: B rows, T tokens, D model, V vocab, L layers, E experts, k experts per token.
"""

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec

from models.attention import ForestContext
from models.config import ModelConfig, MoEConfig
from models.hf import load_hf
from models.hf_config import read_config
from models.numerics import Numerics
from models.transformer import ALONE, Block, Definition
from rl.forest import Branch, Forest, Layout, pack
from rl.forward import forest_specs
from sharding.mesh import make_mesh
from sharding.reshard import reshard
from sharding.rules import Axes, Rules
from sharding.shards import Shards

GOLDEN = Path(__file__).parent / "golden"
FAMILIES = pytest.mark.parametrize("name", ["tiny_qwen3_moe", "tiny_qwen2_moe"])
ROWS = 8
EXPERT: dict[str, Axes] = {"experts": "expert"}
TENSOR: dict[str, Axes] = EXPERT | {"expert_ffn": "tensor"}
PLACES = pytest.mark.parametrize(
    ("name", "axes", "rules"),
    [
        ("tiny_qwen3_moe", {"expert": 1}, EXPERT),
        ("tiny_qwen3_moe", {"expert": 2}, EXPERT),
        ("tiny_qwen3_moe", {"expert": 4}, EXPERT),
        ("tiny_qwen3_moe", {"expert": 8}, EXPERT),
        ("tiny_qwen3_moe", {"expert": 2, "tensor": 2}, TENSOR),
        ("tiny_qwen2_moe", {"expert": 2, "tensor": 2}, TENSOR | {"ffn": "tensor"}),
    ],
    ids=str,
)


def row(ids: np.ndarray) -> Forest:
    """One sequence as a row of 64 tokens."""
    layout = Layout(rows=1, tokens=64, context=128, branches=1, length=1)
    (batch,), _ = pack([Branch(ids.astype(np.int32), np.zeros(len(ids), bool))], layout)
    return batch.forest


def rows(*texts: np.ndarray) -> Forest:
    """The texts in turn, in ROWS rows."""
    forests = [row(texts[i % len(texts)]) for i in range(ROWS)]
    return jax.tree.map(lambda *parts: np.concatenate(parts), *forests)


def forward(definition: Definition, shards: Shards = ALONE, outer: Shards = ALONE) -> Any:
    """(params, forest) -> logits [B, T, V] and the experts' ids [L, B, T, k], jitted."""

    def here(params: Any, forest: Forest) -> tuple[jax.Array, jax.Array]:
        model = definition.bind(params, shards, outer)
        context = ForestContext(forest.blocks, definition.numerics, shards)
        hidden, routing = model.forward(jnp.asarray(forest.tokens), jnp.asarray(forest.positions), context)
        assert routing is not None
        return model.logits(hidden.reshape(-1, hidden.shape[-1])).reshape(*hidden.shape[:-1], -1), routing.ids

    tokens = shards.spec("B", "T")
    places = shards.weight_specs(definition.weights), forest_specs(shards, None)
    return jax.jit(shards.run(here, places, (tokens, PartitionSpec(None, *tokens))))


def check(name: str, run: Any, params: Any) -> None:
    """Logits and experts of all rows: those that transformers gave."""
    golden = np.load(GOLDEN / f"{name}.npz")
    logits, ids = map(np.asarray, run(params, rows(golden["ids_0"], golden["ids_1"])))
    for b in range(ROWS):
        expected, experts = golden[f"logits_{b % 2}"], golden[f"experts_{b % 2}"]
        np.testing.assert_allclose(logits[b, : len(expected)], expected, rtol=0, atol=1e-4)
        np.testing.assert_array_equal(np.sort(ids[:, b, : len(expected)]), np.sort(experts))


@PLACES
def test_trainers_logits_wherever_experts_are(name: str, axes: dict[str, int], rules: dict[str, Axes]) -> None:
    """Tokens are split over the experts' axis, and travel to their experts."""
    config = read_config(GOLDEN / name)
    mesh, table = make_mesh(axes), Rules(rules)
    definition = Definition(config, jnp.float32, stacked=True)
    shards = Shards.of(mesh, table, definition.weights)
    params = jax.device_put(load_hf(GOLDEN / name, config), table.shardings(mesh, definition.weights))
    assert params["blocks.moe.up"].addressable_shards[0].data.shape[1] * axes["expert"] == 8
    check(name, forward(definition, shards), params)


@PLACES
def test_engines_logits_wherever_experts_are(name: str, axes: dict[str, int], rules: dict[str, Axes]) -> None:
    """Every device has all tokens, and adds what its own experts give."""
    config = read_config(GOLDEN / name)
    mesh, table = make_mesh(axes), Rules(rules)
    stacked, definition = Definition(config, jnp.float32, stacked=True), Definition(config, jnp.float32, stacked=False)
    params: Any = load_hf(GOLDEN / name, config)
    params = reshard(
        jax.device_put(params), stacked.weights, definition.weights, table.shardings(mesh, definition.weights), jnp.float32
    )
    outer = Shards.of(mesh, table, definition.weights).replicated()
    check(name, forward(definition, outer=outer), params)


@pytest.mark.oracle
@FAMILIES
def test_live_choices(name: str) -> None:
    """The sets of experts of texts that nobody recorded, each token in each layer."""
    torch: Any = pytest.importorskip("torch", reason="make oracle has not been run")
    transformers: Any = pytest.importorskip("transformers", reason="make oracle has not been run")
    config = read_config(GOLDEN / name)
    assert config.moe
    model = transformers.AutoModelForCausalLM.from_pretrained(GOLDEN / name, dtype=torch.float32).eval()
    run, params = forward(Definition(config, jnp.float32, stacked=True)), load_hf(GOLDEN / name, config)
    texts = np.random.default_rng(7).integers(0, config.vocab_size, (4, 64))
    with torch.no_grad():
        theirs = torch.stack(model(torch.tensor(texts), output_router_logits=True).router_logits)
    chosen = theirs.topk(config.moe.experts_per_token).indices.numpy().reshape(config.num_layers, 4, 64, -1)
    assert len(np.unique(chosen)) == 8  # every expert is somebody's
    _, ids = run(params, rows(*texts))
    np.testing.assert_array_equal(np.sort(np.asarray(ids)[:, :4]), np.sort(chosen))


@pytest.mark.oracle
@pytest.mark.parametrize(
    ("groups", "per_token", "renormalise"), [(1, 1, True), (4, 2, True), (4, 1, False)], ids=["one group", "2 of 4", "1 of 4"]
)
def test_deepseeks_experts(groups: int, per_token: int, renormalise: bool) -> None:
    """Sigmoid scores, a bias of the selection, groups, scaled gates, a shared expert: float32, outputs of about 1, to 1e-5."""
    torch: Any = pytest.importorskip("torch", reason="make oracle has not been run")
    pytest.importorskip("transformers", reason="make oracle has not been run")
    from transformers import DeepseekV3Config  # pyright: ignore[reportMissingImports]
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE  # pyright: ignore[reportMissingImports]

    D, E, F, k = 32, 16, 24, 4
    theirs = DeepseekV3MoE(
        DeepseekV3Config(
            hidden_size=D, moe_intermediate_size=F, n_routed_experts=E, num_experts_per_tok=k, n_shared_experts=2,
            n_group=groups, topk_group=per_token, norm_topk_prob=renormalise, routed_scaling_factor=2.5,
        )
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for array in theirs.state_dict().values():
            array.copy_(torch.randn(array.shape, generator=generator) * (0.3 if array.ndim == 1 else array.shape[-1] ** -0.5))
    x = np.random.default_rng(0).standard_normal((200, D), np.float32)
    with torch.no_grad():
        expected = theirs(torch.tensor(x)[None])[0].numpy()
        ids = theirs.gate(torch.tensor(x))[2].numpy()
    stored = {name: value.numpy() for name, value in theirs.state_dict().items()}
    gate, up = np.split(stored["experts.gate_up_proj"].swapaxes(1, 2), 2, axis=2)
    params = {
        "router": stored["gate.weight"].T,
        "bias": stored["gate.e_score_correction_bias"],
        "gate": gate,
        "up": up,
        "down": stored["experts.down_proj"].swapaxes(1, 2),
        **{f"shared_{part}": stored[f"shared_experts.{part}_proj.weight"].T for part in ("gate", "up", "down")},
    }
    experts = MoEConfig(
        num_experts=E, experts_per_token=k, ffn_dim=F, scoring="sigmoid", renormalise=renormalise, scaling=2.5,
        selection_bias=True, groups=groups, groups_per_token=per_token, shared_ffn_dim=2 * F,
    )  # fmt: skip
    model = dataclasses.replace(read_config(GOLDEN / "tiny_qwen3_moe"), model_dim=D, moe=experts)
    y, routing = experts_of(model, params)(x)
    np.testing.assert_array_equal(np.sort(np.asarray(routing.ids)), np.sort(ids))
    np.testing.assert_allclose(np.asarray(y), expected, rtol=0, atol=1e-5)


def experts_of(model: ModelConfig, params: dict[str, np.ndarray]) -> Any:
    """The layer over these weights; every weight must be given."""
    module = Block(model, Numerics(jnp.float32)).moe
    assert {path[0] for path in nnx.to_flat_state(nnx.state(module)).paths} == params.keys()
    nnx.update(module, nnx.from_flat_state([((name,), nnx.Param(jnp.asarray(value))) for name, value in params.items()]))
    return lambda x: module(x, None, None, ALONE, ALONE)
