"""The decoder against transformers, stored and live; and one function of tokens and weights, however it is run."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from models.attention import ForestContext
from models.config import ModelConfig
from models.hf import load_hf, save_hf
from models.hf_config import read_config
from models.numerics import Numerics
from models.transformer import REMAT, Definition, describe
from rl.branches import Branch
from rl.forest import Layout, pack

GOLDEN = Path(__file__).parent / "golden"
REAL = Path(__file__).parents[1] / "runs/models/smollm2-135m-instruct"
TINY = ["tiny_llama3", "tiny_qwen3", "tiny_qwen3_moe", "tiny_qwen2_moe"]
needs_real = pytest.mark.skipif(not REAL.exists(), reason="make model has not been run")
SMALL = ModelConfig(
    family="qwen3", vocab_size=72, model_dim=64, ffn_dim=128, num_layers=3, num_heads=4, num_kv_heads=2, head_dim=16,
    max_positions=256,
)  # fmt: skip


def chain(ids: np.ndarray, tokens: int = 64) -> Any:
    """One sequence as a row."""
    layout = Layout(rows=1, tokens=tokens, context=max(128, tokens), branches=1, length=1)
    (batch,), _ = pack([Branch(ids.astype(np.int32), np.zeros(len(ids), bool))], layout)
    return batch.forest


def random_params(config: ModelConfig, stacked: bool = True) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    params = {}
    for name, weight in describe(config, stacked).items():
        noise = rng.standard_normal(weight.shape, np.float32)
        params[name] = noise * np.float32(weight.init) if weight.init else 1 + np.float32(0.1) * noise
    return params


def forward(definition: Definition):
    """Jitted (params, forest of one row) -> logits [T, V]."""

    @jax.jit
    def logits(params: Any, forest: Any) -> jax.Array:
        model = definition.bind(params)
        hidden = model(forest.tokens, forest.positions, ForestContext(forest.blocks, definition.numerics))
        return model.logits(hidden[0])

    return logits


def our_logits(config: ModelConfig, params: dict[str, np.ndarray], *texts: np.ndarray) -> list[np.ndarray]:
    """float32 logits of each text, [n, V]; one program for all of them."""
    function = forward(Definition(config, jnp.float32, True))
    tokens = max(len(ids) + -len(ids) % 64 for ids in texts)
    return [np.asarray(function(params, chain(ids, tokens)))[: len(ids)] for ids in texts]


# ---- against transformers


@pytest.mark.parametrize("name", TINY)
def test_stored_logits(name: str) -> None:
    golden = np.load(GOLDEN / f"{name}.npz")
    config = read_config(GOLDEN / name)
    params = load_hf(GOLDEN / name, config)
    ours = our_logits(config, params, golden["ids_0"], golden["ids_1"])
    for i, logits in enumerate(ours):
        np.testing.assert_allclose(logits, golden[f"logits_{i}"], rtol=0, atol=1e-4)


@pytest.mark.real
@needs_real
def test_stored_logits_of_the_real_model() -> None:
    golden = np.load(GOLDEN / "smollm2_logits.npz")
    config = read_config(REAL)
    (logits,) = our_logits(config, load_hf(REAL, config), golden["ids"])
    some = logits[golden["positions"]][:, golden["vocab_ids"]]
    np.testing.assert_allclose(some, golden["logits"], rtol=0, atol=1e-4)
    top = logits.max(-1, keepdims=True)
    logsumexp = np.log(np.exp((logits - top).astype(np.float64)).sum(-1)) + top[:, 0]
    np.testing.assert_allclose(logsumexp, golden["logsumexp"], rtol=0, atol=1e-4)


def their_logits(directory: Path, *texts: np.ndarray, dtype: str = "float32") -> list[np.ndarray]:
    """What transformers computes in `dtype` from the weights in a directory."""
    torch: Any = pytest.importorskip("torch", reason="make oracle has not been run")
    transformers: Any = pytest.importorskip("transformers", reason="make oracle has not been run")
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype, attn_implementation="eager").eval()
    with torch.no_grad():
        return [model(torch.tensor(ids[None].astype(np.int64))).logits[0].numpy() for ids in texts]


@pytest.mark.oracle
@pytest.mark.parametrize("name", TINY)
def test_live_logits(name: str) -> None:
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 128, length) for length in (1, 40, 64)]
    theirs = their_logits(GOLDEN / name, *texts)
    config = read_config(GOLDEN / name)
    for ours, expected in zip(our_logits(config, load_hf(GOLDEN / name, config), *texts), theirs, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.oracle
@pytest.mark.real
@needs_real
def test_live_logits_of_the_real_model() -> None:
    """Every logit, of sizes up to 30 behind 30 layers. Theirs in float32 are up to 1.5e-4 off on some processors."""
    rows = json.loads((GOLDEN / "smollm2_greedy.json").read_text())[:2]
    texts = [np.asarray((row["prompt_ids"] + row["ids"])[:64]) for row in rows]
    theirs = their_logits(REAL, *texts, dtype="float64")
    config = read_config(REAL)
    for ours, expected in zip(our_logits(config, load_hf(REAL, config), *texts), theirs, strict=True):
        np.testing.assert_allclose(ours, expected, rtol=0, atol=1e-4)


@pytest.mark.oracle
@pytest.mark.parametrize("name", TINY)
def test_export_loads_in_transformers(name: str, tmp_path: Path) -> None:
    """float32 masters, moved as an optimizer moves them, leave as bfloat16 and mean the same there."""
    config = read_config(GOLDEN / name)
    rng = np.random.default_rng(1)
    masters = {
        weight: value + 0.05 * rng.standard_normal(value.shape, np.float32)
        for weight, value in load_hf(GOLDEN / name, config).items()
    }
    save_hf(tmp_path / "export", config, masters)
    ids = rng.integers(0, 128, 50)
    (theirs,) = their_logits(tmp_path / "export", ids)
    if config.moe:
        save_hf(tmp_path / "fused", config, masters, fused=True)
        np.testing.assert_array_equal(their_logits(tmp_path / "fused", ids)[0], theirs)
    rounded = {weight: value.astype(ml_dtypes.bfloat16).astype(np.float32) for weight, value in masters.items()}
    (ours,) = our_logits(config, rounded, ids)
    np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)
    (unrounded,) = our_logits(config, masters, ids)
    assert abs(unrounded - theirs).max() > 1e-3  # so the comparison above can tell


# ---- one function


def test_scanned_is_unrolled() -> None:
    """Every remat policy, bit for bit in bfloat16; gradients of the policies agree to 1e-6 of the largest."""
    params = random_params(SMALL)
    unrolled = {}
    for name, value in params.items():
        if name.startswith("blocks."):
            unrolled |= {name.replace("blocks.", f"blocks.{layer}."): value[layer] for layer in range(3)}
        else:
            unrolled[name] = value
    forest = chain(np.arange(60))
    whole = np.asarray(forward(Definition(SMALL, jnp.bfloat16, False))(unrolled, forest))[:60]
    assert np.isfinite(whole).all()
    gradients = []
    for remat in REMAT:
        function = forward(Definition(SMALL, jnp.bfloat16, True, remat))
        np.testing.assert_array_equal(np.asarray(function(params, forest))[:60], whole)
        gradients.append(jax.jit(jax.grad(lambda p, function=function: (function(p, forest)[:60] ** 2).mean()))(params))
    for name, gradient in gradients[0].items():
        for other in gradients[1:]:
            np.testing.assert_allclose(other[name], gradient, rtol=0, atol=1e-6 * float(abs(gradient).max()))


def test_gradients_know_the_past_only() -> None:
    """A hidden state depends on a token's embedding iff the token is an ancestor or itself: two chains and a fork."""
    layout = Layout(rows=1, tokens=64, context=128, branches=3, length=1)
    texts = [np.arange(0, 12), np.concatenate([np.arange(0, 5), np.arange(12, 20)]), np.arange(20, 30)]
    (batch,), _ = pack([Branch(ids.astype(np.int32), np.zeros(len(ids), bool)) for ids in texts], layout)
    forest: Any = batch.forest
    definition = Definition(SMALL, jnp.float32, True)
    params: Any = random_params(SMALL)  # its head is not tied: the embedding is read as input only

    def hidden(embed: jax.Array) -> jax.Array:
        states = definition.bind({**params, "embed": embed})(
            forest.tokens, forest.positions, ForestContext(forest.blocks, Numerics(jnp.float32))
        )
        return states[0, :30] @ jnp.asarray(params["head"][:, 0])

    sizes = np.abs(np.asarray(jax.jit(jax.jacrev(hidden))(params["embed"]))).max(-1)  # [place, id]
    seen = np.zeros((30, 72), bool)
    ids = forest.tokens[0]
    for text in texts:
        for depth, token in enumerate(text):
            seen[np.nonzero(ids[:30] == token)[0][0], text[: depth + 1]] = True
    np.testing.assert_array_equal(sizes > 0, seen)
    assert sizes[seen].min() > 1e-6


def large_constants(jaxpr: Any, limit: int) -> list[int]:
    """Bytes of arrays that a jaxpr, or one inside it, holds as constants."""
    closed = [jaxpr] if hasattr(jaxpr, "consts") else []
    found = [const.nbytes for one in closed for const in one.consts if getattr(const, "nbytes", 0) > limit]
    for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
        sizes = (getattr(getattr(atom, "val", None), "nbytes", 0) for atom in equation.invars)
        found += [size for size in sizes if size > limit]
        for value in jax.tree.leaves(
            list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns") or hasattr(leaf, "jaxpr")
        ):
            if hasattr(value, "eqns") or hasattr(value, "jaxpr"):
                found += large_constants(value, limit)
    return found


@pytest.mark.parametrize("stacked", [True, False])
def test_no_weight_is_a_constant(stacked: bool) -> None:
    config = ModelConfig(**{**vars(SMALL), "vocab_size": 8192, "tied_head": True})  # an embedding of 2 MB
    params, forest = random_params(config, stacked), chain(np.arange(60))
    function = forward(Definition(config, jnp.bfloat16, stacked))
    assert large_constants(jax.make_jaxpr(function)(params, forest), 1 << 20) == []
    embed = jnp.asarray(params["embed"])
    closed = jax.make_jaxpr(lambda rest: function({**rest, "embed": embed}, forest))(
        {name: value for name, value in params.items() if name != "embed"}
    )
    assert large_constants(closed, 1 << 20)  # the walk can see one


@pytest.mark.parametrize("tied", [True, False])
def test_every_weight_is_used(tied: bool) -> None:
    """Other weights through the same program are other logits; the same ones are the same."""
    config = ModelConfig(**{**vars(SMALL), "tied_head": tied})
    params, forest = random_params(config), chain(np.arange(12, 72))
    function = forward(Definition(config, jnp.bfloat16, True, "block"))
    before = np.asarray(function(params, forest))[:60]
    for name, value in params.items():
        changed = value.copy()
        changed[-1] *= -1.5  # the last layer of a stacked one
        assert (np.asarray(function({**params, name: changed}, forest))[:60] != before).any(), name
    np.testing.assert_array_equal(np.asarray(function(params, forest))[:60], before)


def test_wrong_names_are_refused() -> None:
    definition = Definition(SMALL, jnp.bfloat16, True)
    params = random_params(SMALL)
    with pytest.raises(AssertionError, match="head"):
        definition.bind({name: jnp.asarray(value) for name, value in params.items() if name != "head"})
