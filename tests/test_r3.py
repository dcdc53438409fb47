"""`launch.bench r3` at its smallest size: what replay must mend it mends, and a row has the bytes it must have."""

import argparse
from pathlib import Path

import pytest

from launch.plot import line_plot
from launch.r3 import MODEL, r3

pytestmark = pytest.mark.plain_code


@pytest.mark.slow
def test_replay_leaves_no_expert_to_differ() -> None:
    """bfloat16 sampler, float32 trainer: choices differ without replay, none with it, and k3 falls. Of a bfloat16 trainer,
    nothing differs."""
    result = r3(argparse.Namespace(scale="small", plot=""))
    assert result["expert_mismatch_on"] == 0 < result["expert_mismatch_off"] < result["token_mismatch_off"]
    assert 0 < 10 * result["k3_on"] < result["k3_off"] and result["f2_on"] <= result["f2_off"]
    assert set(result["same_numerics"].values()) == {0.0}
    assert MODEL.moe and result["bytes_per_token"] == MODEL.num_layers * MODEL.moe.experts_per_token
    assert result["capture_overhead"] > 0
    shares = list(result["gap_histogram"].values())
    assert shares == sorted(shares) and shares[0] > 0


def test_plots_are_svg(tmp_path: Path) -> None:
    svg = line_plot("a < b", "step", "k3", {"one": [1e-3, 0.0, 1e-5], "two": [2e-4]})
    assert svg.count("<polyline") == 2 and "a &lt; b" in svg and svg.count("1e-") >= 3
    with pytest.raises(ValueError, match="no value is positive"):
        line_plot("", "", "", {"none": [0.0]})
