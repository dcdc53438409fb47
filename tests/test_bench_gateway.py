"""The benchmark of the gateway at its smallest: the counts that it must give, and that it measures something."""

from argparse import Namespace

import pytest

from launch.gateway_bench import gateway

pytestmark = pytest.mark.plain_code


@pytest.mark.slow
def test_nothing_is_mixed_up_and_nothing_breaks() -> None:
    result = gateway(Namespace(scale="small"))
    together = result["sessions"]
    assert together["requests"] == together["count"] * 3 and together["samples"] == together["count"]
    assert [together[name] for name in ("foreign", "strangers", "unlike", "breaks")] == [0, 0, 0, 0]
    for name, found in result["histories"].items():
        assert (found["breaks"], found["samples"]) == (found["breaks_expected"], found["samples_expected"]), name
    assert -1e3 < result["added_ms_p50"] < 1e3 and result["prompt_tokens_max"] > 3000
