"""`model.numerics`: what exact refuses and why; and fast numerics, which are other bits of the same numbers."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.attention import ForestContext
from models.config import ModelConfig, MoEConfig
from models.exact import is_exact
from models.logprobs import token_log_probs
from models.transformer import Definition
from rl.config import ModelSection
from rl.forest import Branch, Layout, pack
from sharding.mesh import make_mesh
from sharding.reshard import init
from sharding.rules import Axes, Rules

MODEL = ModelConfig(
    family="qwen3", vocab_size=264, model_dim=64, ffn_dim=128, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_positions=512,
)  # fmt: skip
BF16 = np.dtype(jnp.bfloat16)


EXPERTS = ModelConfig(
    **{**vars(MODEL), "family": "qwen3_moe", "moe": MoEConfig(num_experts=6, experts_per_token=2, ffn_dim=32)}
)


def asked(mode: str, mesh: dict[str, int], side: str, dtype: Any = BF16, walks: Any = False, **rules: Any) -> bool:
    model = EXPERTS if "experts" in rules else MODEL
    return is_exact(mode, model, dtype, make_mesh(mesh), Rules(rules), side, walks)


def test_modes() -> None:
    for side in ("engine", "trainer"):
        assert asked("exact", {"data": 1}, side)
        assert asked("auto", {"data": 1}, side) and asked("auto", {"data": 1}, side, np.float32)
        assert asked("auto", {"tensor": 2}, side, heads="tensor", kv_heads="tensor")
        assert not asked("fast", {"data": 1}, side)
    assert asked("auto", {"tensor": 2}, "engine", heads="tensor")  # an engine's kv heads may stay whole
    with pytest.raises(ValueError, match=r"model\.numerics: 'precise' is unknown; use one of \('auto', 'exact', 'fast'\)"):
        ModelSection(source="random", numerics="precise")


@pytest.mark.parametrize(
    ("mesh", "side", "rules", "promised"),
    [
        ({"fsdp": 8}, "trainer", {"embed": "fsdp"}, True),
        ({"data": 2, "fsdp": 4}, "trainer", {"embed": "fsdp", "ffn": "fsdp"}, True),
        ({"expert": 2}, "trainer", {"experts": "expert"}, True),
        ({"context": 2}, "trainer", {}, True),
        ({"data": 8}, "engine", {}, True),
        ({"tensor": 4}, "engine", {"experts": "tensor"}, True),  # 6 experts stay whole
        ({"tensor": 1}, "engine", {"heads": "tensor", "kv_heads": "tensor"}, True),
        ({"fsdp": 2}, "trainer", {"vocab": "fsdp"}, False),
        ({"tensor": 2}, "trainer", {"heads": "tensor", "kv_heads": "tensor"}, False),
        ({"tensor": 2}, "trainer", {"ffn": "tensor"}, False),
        ({"tensor": 2}, "engine", {"ffn": "tensor"}, False),
        ({"expert": 2}, "engine", {"experts": "expert"}, False),
        ({"tensor": 2}, "trainer", {"experts": "tensor"}, False),
    ],
    ids=str,
)
def test_meshes(mesh: dict[str, int], side: str, rules: dict[str, Axes], promised: bool) -> None:
    if promised:
        assert asked("exact", mesh, side, **rules)
        return
    with pytest.raises(ValueError, match=rf"model.numerics: exact .*: {side}.rules split {', '.join(rules)} .* or use auto"):
        asked("exact", mesh, side, **rules)


def test_other_dtypes_are_refused() -> None:
    with pytest.raises(ValueError, match=r"exact cannot be promised here: the engine computes in float32, .* use bfloat16"):
        asked("exact", {"data": 1}, "engine", np.float32)


def test_walks_with_split_experts_are_refused() -> None:
    """Every device has all tokens there, so what experts give is summed over devices."""
    with pytest.raises(ValueError, match=r"trainer.rules split experts"):
        asked("exact", {"expert": 2}, "trainer", walks=True, experts="expert")
    assert asked("exact", {"fsdp": 2}, "trainer", walks=True, embed="fsdp")


@pytest.mark.parametrize("moe", [None, MoEConfig(num_experts=4, experts_per_token=2, ffn_dim=32)], ids=["dense", "moe"])
def test_fast_numerics_are_the_same_numbers(moe: MoEConfig | None) -> None:
    """In float32 to 1e-5; that they are other programs shows in their bits."""
    model = ModelConfig(**{**vars(MODEL), "moe": moe, "family": "qwen3_moe" if moe else "qwen3"})
    branches = [Branch(np.random.default_rng(n).integers(0, 264, 150).astype(np.int32), np.arange(150) > 20) for n in range(2)]
    [batch], _ = pack(branches, Layout(rows=1, tokens=320, context=256, branches=2, length=149))
    forest, found = batch.forest, []
    for exact in (True, False):
        definition = Definition(model, jnp.float32, stacked=True, exact=exact)
        masters = init(
            definition.weights, jax.random.key(0), jnp.float32, Rules().shardings(make_mesh({"data": 1}), definition.weights)
        )

        @jax.jit
        def log_probs(masters: Any, definition: Definition = definition) -> jax.Array:
            bound = definition.bind(masters)
            hidden = bound(forest.tokens, forest.positions, ForestContext(forest.blocks, definition.numerics))
            used = jnp.asarray(forest.tokens) >= 0
            return token_log_probs(bound, hidden, jnp.asarray(forest.tokens), jnp.float32(0.7), used, 64)[0]

        found.append((np.asarray(log_probs(masters)), jax.grad(lambda masters: log_probs(masters).sum())(masters)))
    (exact, exact_grads), (fast, fast_grads) = found
    assert (exact != fast).any()
    np.testing.assert_allclose(fast, exact, rtol=0, atol=1e-5)
    for name, grad in exact_grads.items():
        np.testing.assert_allclose(fast_grads[name], grad, rtol=0, atol=1e-4 * float(abs(grad).max()), err_msg=name)
