"""models.invariance: nothing found on a machine that keeps its bits, with the names of what moved on one that does not.

The other machine is XLA-CPU without YNNPACK, whose products of bfloat16 are then Eigen's, as on processors that YNNPACK has no
kernels for: their sums are cut by the number of rows.
"""

import json
import os
import subprocess
import sys
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.config import ModelConfig, MoEConfig
from models.invariance import check, moved_in_attention
from models.numerics import ROWS, Numerics, least_rows, tile_rows

BF16 = jnp.bfloat16
REAL = ModelConfig(
    family="llama", vocab_size=49152, model_dim=576, ffn_dim=1536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64,
    max_positions=8192,
)  # fmt: skip
EXPERTS = ModelConfig(
    family="qwen3_moe", vocab_size=264, model_dim=64, ffn_dim=48, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=16,
    max_positions=256, moe=MoEConfig(num_experts=8, experts_per_token=3, ffn_dim=24),
)  # fmt: skip
OTHER = """
import json
import jax.numpy as jnp
from models.invariance import check
from models.numerics import Numerics, tile_rows
from tests.test_invariance import REAL
rows = tile_rows(jnp.bfloat16)
plain, tiles = (check(REAL, Numerics(jnp.bfloat16, rows=n)) for n in (0, rows))
print(json.dumps({"rows": rows, "plain": plain, "tiles": tiles}))
"""


@pytest.mark.parametrize("config", [REAL, EXPERTS], ids=["SmolLM2", "experts"])
def test_this_machine_keeps_all_bits(config: ModelConfig) -> None:
    assert check(config, Numerics(BF16, rows=tile_rows(BF16))) == []


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(2, 2, 64), (4, 2, 128), (6, 2, 80), (2, 2, 8)])
def test_attention_of_few_queries_keeps_its_bits(heads: int, kv_heads: int, head_dim: int) -> None:
    """Products of few rows with keys have bits of their own: how few depends on the processor and on the head dim."""
    config = replace(EXPERTS, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)
    assert moved_in_attention(config, Numerics(BF16)) == []


def test_fast_numerics_are_found_out() -> None:
    """Plain sums keep their bits in no norm, and in no attention with keys in between."""
    found = check(REAL, Numerics(BF16, exact=False, rows=tile_rows(BF16)))
    assert any(text.startswith("rms_norm 576: ") for text in found), found
    assert "attention, head dim 64: keys in between move it" in found


@pytest.mark.slow
def test_another_machine_is_found_out_and_tiles_mend_it() -> None:
    flags = f"{os.environ['XLA_FLAGS']} --xla_cpu_experimental_ynn_fusion_type="
    done = subprocess.run(
        [sys.executable, "-c", OTHER], env={**os.environ, "XLA_FLAGS": flags, "PYTHONPATH": "."}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["rows"] == 16
    some = {f"product 1536 x 576: {n} rows are not those of 256" for n in ROWS}  # the first that moves is the processor's own
    assert len(some.intersection(found["plain"])) == 1, found
    assert all(text.startswith(("product", "head")) for text in found["plain"]), found
    assert found["tiles"] == []


@pytest.mark.parametrize("spec", ["td,df->tf", "td,fd->tf"])
def test_tiles_of_rows_are_the_product(spec: str) -> None:
    """To float32's rounding, whatever the number of rows; the gradient has the same bits."""
    rng = np.random.default_rng(0)
    w = jnp.asarray(rng.standard_normal((96, 96), np.float32))
    for n in (1, 8, 16, 37):
        x, g = (jnp.asarray(rng.standard_normal((n, 96), np.float32)) for _ in range(2))
        (plain, back), (tiles, back_of_tiles) = (
            jax.vjp(lambda x, w, rows=rows: Numerics(BF16, rows=rows).dot(spec, x, w), x, w) for rows in (0, 16)
        )
        np.testing.assert_allclose(tiles, plain, rtol=0, atol=1e-5)
        for ours, theirs in zip(back_of_tiles(g), back(g), strict=True):
            if n < least_rows(96):  # the plain product is filled up, and so is its gradient
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5)
            else:
                np.testing.assert_array_equal(ours, theirs)
