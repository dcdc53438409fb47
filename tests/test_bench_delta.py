"""The benchmark of deltas: its arithmetic, and the synthetic case at a small size. `.ci/run` takes real steps too."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from launch.delta import measure, predicted_share, scale_for, synthetic, ulp
from sharding.mesh import make_mesh
from sharding.rules import Rules, Weight

SIZES = {"rows": 512, "columns": 512, "rounds": 1}
KEYS = {
    "step", "parameters", "changed_share", "predicted_share", "bytes", "entropy_bound_bytes", "ratio_to_bound", "encode_GBps",
    "decode_GBps", "swap_ms",
}  # fmt: skip


def test_ulp_is_the_distance_of_neighbours() -> None:
    """bfloat16 has 8 significant bits: 1 and 1 + 2^-7 are neighbours, and so are 2 - 2^-7 and 2."""
    np.testing.assert_array_equal(ulp(np.asarray([1, 1.99, 2, -0.75, 0.02], np.float32)), [2**-7, 2**-7, 2**-6, 2**-8, 2**-13])
    old, new = {"a": np.ones(2, np.float32)}, {"a": np.asarray([1 + 2**-9, 5], np.float32)}
    assert predicted_share(old, new) == pytest.approx((0.25 + 1) / 2)


@pytest.mark.parametrize("share", [0.005, 0.03])
def test_synthetic_weights_change_as_predicted(share: float) -> None:
    case = synthetic(share, SIZES)
    assert case.keys() == KEYS
    assert case["parameters"] == 512 * 512
    deviation = (share / (512 * 512)) ** 0.5  # of a count that is as good as Poisson
    assert case["predicted_share"] == pytest.approx(share, rel=0.01)
    assert abs(case["changed_share"] - case["predicted_share"]) < 5 * deviation
    assert 0.5 < case["ratio_to_bound"] < 1
    assert case["encode_GBps"] > 0 and case["decode_GBps"] > 0


def test_the_bound_is_the_entropy_of_the_differences() -> None:
    """A quarter of the elements rise by one and a quarter fall: 1.5 bits each."""
    shardings = Rules().shardings(make_mesh({"data": 1}), {"w": Weight((64, 256), ("rows", "columns"), 1)})
    old = np.full((64, 256), 0x3C00, np.uint16)
    new = old + np.tile(np.asarray([0, 0, 1, -1], np.int16).astype(np.uint16), 64)[None]
    trees = [{"w": jax.device_put(bits.view(jnp.bfloat16), shardings["w"])} for bits in (old, new)]
    result = measure(trees[0], trees[1], 0.5, rounds=1)
    assert result["changed_share"] == 0.5
    assert result["entropy_bound_bytes"] == pytest.approx(1.5 * 64 * 256 / 8)


def test_scale_for_is_monotone() -> None:
    rng = np.random.default_rng(0)
    old, step = 0.025 * rng.standard_normal(2**16, np.float32), rng.standard_normal(2**16, np.float32)
    scales = [scale_for(share, old, step) for share in (0.002, 0.01, 0.03)]
    assert scales == sorted(scales) and scales[0] > 1e-9
