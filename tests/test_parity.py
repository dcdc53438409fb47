"""`launch.bench parity` at its smallest: every promised cell is 0, and one that is not is found."""

import os
import subprocess
import sys

import numpy as np
import pytest

from inference.types import Completion, FinishReason
from launch.parity import MODELS, NOT_PROMISED, SIZES, compared, failures, gap, row, tiny_case


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_every_promised_cell_is_0(name: str) -> None:
    cells, _ = row(name, tiny_case(MODELS[name], SIZES["small"]))
    assert failures({name: cells}) == []
    assert len(cells) == (18 if MODELS[name].moe else 17) and all(cell["values"] > 10 for cell in cells.values())


def completion(ids: list[int], logprobs: list[float]) -> Completion:
    n = len(ids)
    return Completion(
        ids=np.asarray(ids, np.int32),
        logprobs=np.asarray(logprobs, np.float32),
        logprobs_full=np.asarray(logprobs, np.float32),
        versions=np.zeros(n, np.int32),
        top_ids=np.zeros((n, 0), np.int32),
        top_logprobs=np.zeros((n, 0), np.float32),
        request_id="0",
        prompt_ids=(1,),
        finish_reason=FinishReason.LENGTH,
        stop_reason=None,
        cached_tokens=0,
        prefilled_tokens=1,
        prompt_logprobs=None,
    )


def test_what_is_not_0_is_found() -> None:
    """One bit, another token, a NaN, and nothing at all; a cell that is not promised may be anything."""
    one = completion([1, 2, 3], [-1, -2, -3])
    near = completion([1, 2, 3], [-1, -2, float(np.nextafter(np.float32(-3), np.float32(0)))])
    other = completion([1, 4, 3], [-1, -5, -3])
    lost = completion([1, 2, 3], [-1, float("nan"), -3])
    same = compared([one, one], [one, one])
    assert same == {"max_abs_gap": 0, "values": 6, "parted": 0}
    assert compared([one], [other]) == {"max_abs_gap": 0, "values": 1, "parted": 1}
    cells = {"same": same, "near": compared([one, one], [one, near]), "other": compared([one], [other])}
    cells |= {"lost": compared([lost], [one]), "nothing": gap([(one.logprobs[:0], one.logprobs[:0])])}
    cells |= dict.fromkeys(NOT_PROMISED, cells["near"])
    found = failures({"model": cells})
    assert [text.split(":")[0] for text in found] == [f"model, {name}" for name in ("near", "other", "lost", "nothing")]
    assert "2.384185791015625e-07" in found[0]


def test_fewer_devices_are_refused() -> None:
    environment = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2", "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-m", "launch.bench", "parity"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 2 and done.stderr.startswith("error: parity: needs 8 virtual devices of a CPU, not 2 of cpu")
