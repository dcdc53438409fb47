"""Rows of routing as records: what cannot be this model's, or is not what was written, is refused with the field named."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from models.config import ModelConfig, MoEConfig
from models.routes import check_rows, from_json, from_record, not_recorded, recorded, to_json, to_record

MOE = MoEConfig(num_experts=8, experts_per_token=3, ffn_dim=8)
MODEL = ModelConfig(
    family="qwen3_moe",
    vocab_size=8,
    model_dim=8,
    ffn_dim=8,
    num_layers=2,
    num_heads=1,
    num_kv_heads=1,
    head_dim=8,
    max_positions=8,
    moe=MOE,
)


def rows_of(n: int, dtype: Any = np.uint8) -> np.ndarray:
    rng = np.random.default_rng(0)
    return np.array([[rng.permutation(8)[:3] for _ in range(2)] for _ in range(n)]).astype(dtype)


@pytest.mark.parametrize(
    ("experts", "k", "dtype"), [(8, 3, "uint8"), (256, 8, "uint8"), (256, 1, "uint16"), (257, 2, "uint16")]
)
def test_a_byte_an_id_up_to_256_experts(experts: int, k: int, dtype: str) -> None:
    """And no routing looks like the sentinel: with 256 experts, expert 255 alone would."""
    assert MoEConfig(num_experts=experts, experts_per_token=k, ffn_dim=1).route_dtype == dtype


def test_rows_come_back_as_they_were() -> None:
    for rows in (rows_of(5), rows_of(1)[:0], not_recorded(2, MODEL), np.full((1, 2, 3), 300, np.uint16)):
        assert np.array_equal(from_json(json.loads(json.dumps(to_json(rows))), "routing"), rows)
        again = from_record(to_record(rows), "routing")
        assert again.dtype == rows.dtype and (again == rows).all() and again.shape == rows.shape
    assert len(to_record(rows_of(600))["data"]) == 600 * 6


def test_good_rows_pass() -> None:
    rows = rows_of(4)
    rows[1] = not_recorded(1, MODEL)[0]
    check_rows(rows, MODEL, "routing", least=4, most=4)
    assert recorded(rows).tolist() == [[True] * 2, [False] * 2, [True] * 2, [True] * 2]


def changed(**to: Any) -> dict[str, Any]:
    return {**to_record(rows_of(4)), **to}


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        (rows_of(3), "3 rows are fewer than the 4"),
        (rows_of(5), "5 rows are more than the 4"),
        (np.full((4, 2, 3), [0, 1, 8], np.uint8), "expert 8, but the model has 8"),
        (np.full((4, 2, 3), [0, 255, 1], np.uint8), "expert 255, but the model has 8"),
        (np.full((4, 2, 3), [0, 1, 0], np.uint8), "twice"),
        (rows_of(4, np.uint16), "another model"),
        (rows_of(4)[:, :1], "another model"),
        (rows_of(4)[:, :, :2], "another model"),
        (rows_of(4).reshape(4, -1), "another model"),
        ([[[0, 1, 2]] * 2] * 4, "another model"),
    ],
)
def test_wrong_rows_are_refused(rows: np.ndarray, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^node 7: .*{problem}"):
        check_rows(rows, MODEL, "node 7", least=4, most=4)


def test_rows_for_a_model_without_experts_are_refused() -> None:
    with pytest.raises(ValueError, match="routing: the model has no experts"):
        check_rows(rows_of(1), dataclasses.replace(MODEL, family="qwen3", moe=None), "routing")


@pytest.mark.parametrize(
    ("record", "problem"),
    [
        ({}, "no record of routing"),
        (changed(data="?"), "no record of routing"),
        (changed(shape=None), "no record of routing"),
        (changed(crc32=1), "checksum"),
        (changed(shape=[float("inf"), 2, 3]), "no record of routing"),
        (changed(data=to_record(rows_of(3))["data"]), "checksum"),
        (changed(shape=[4, 2, 4]), "bytes are not"),
        (changed(shape=[4, 6]), "cannot be rows"),
        (changed(dtype="float32"), "cannot be rows"),
        (changed(dtype="object"), "cannot be rows"),
    ],
)
def test_records_that_are_not_what_was_written_are_refused(record: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=f"^node 7: .*{problem}"):
        from_record(record, "node 7")
