"""Recorded routing on the host: rows of expert ids, checked, and as they stand in records.

Legend: n tokens, L layers, k experts per token.

A *row* is how one token was routed in all layers, `[L, k]` of `MoEConfig.route_dtype`, in the order in which its experts were
used. Row i of a sequence is that of token i, made when the logits for token i + 1 were: a sequence of n tokens that was sampled
has n - 1 of them. A row full of the dtype's largest value says "not recorded": the token routes itself.
"""

import base64
import zlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from models.config import ModelConfig


def row_shape(model: ModelConfig) -> tuple[int, int]:
    """(L, k) of a model with experts."""
    assert model.moe is not None
    return model.num_layers, model.moe.experts_per_token


def not_recorded(n: int, model: ModelConfig) -> np.ndarray:
    """n rows that say so."""
    assert model.moe is not None
    dtype = model.moe.route_dtype
    return np.full((n, *row_shape(model)), np.iinfo(dtype).max, dtype)


def blank(n: int, like: np.ndarray) -> np.ndarray:
    """n rows of the same model that say so."""
    return np.full((n, *like.shape[1:]), np.iinfo(like.dtype).max, like.dtype)


def recorded(rows: np.ndarray) -> np.ndarray:
    """bool [n, L]: where rows say something."""
    return (rows != np.iinfo(rows.dtype).max).any(axis=-1)


def check_rows(rows: np.ndarray, model: ModelConfig, what: str, *, least: int | None = None, most: int | None = None) -> None:
    """Refuses rows that cannot be this model's.

    Args:
        what: the field, for the error.
        least, most: how many rows there may be.

    Raises:
        ValueError: names the field and what is wrong: no experts, another dtype or shape, too few or many, ids out of range or
            twice in a row.
    """
    if model.moe is None:
        raise ValueError(f"{what}: the model has no experts; leave it out")
    E, dtype = model.moe.num_experts, model.moe.route_dtype
    if not isinstance(rows, np.ndarray) or rows.dtype != dtype or rows.ndim != 3 or rows.shape[1:] != row_shape(model):
        layers, k = row_shape(model)
        kind = getattr(rows, "dtype", type(rows).__name__)
        raise ValueError(
            f"{what}: rows are {kind} {list(np.shape(rows))}, but this model's are {dtype} [tokens, {layers}, {k}] (layers, "
            f"experts of a token): they are of another model"
        )
    if least is not None and len(rows) < least:
        raise ValueError(
            f"{what}: {len(rows)} rows are fewer than the {least} tokens that have one; fill up with `not_recorded`"
        )
    if most is not None and len(rows) > most:
        raise ValueError(f"{what}: {len(rows)} rows are more than the {most} tokens that can have one; cut them")
    if not rows.size:
        return
    if rows.max() >= E:  # rows that say "not recorded" are, too
        wrong = recorded(rows)[..., None] & (rows >= E)
        if wrong.any():
            token, layer, _ = np.argwhere(wrong)[0]
            raise ValueError(
                f"{what}: row {token}, layer {layer} has expert {rows[wrong][0]}, but the model has {E}; it was recorded with "
                f"another model, or is corrupted: leave it out, and the tokens route themselves"
            )
    columns = np.ascontiguousarray(rows.reshape(-1, rows.shape[-1]).T)  # faster than sorting each row (measured: 7 times)
    twice = np.zeros(columns.shape[1], bool)
    for i, column in enumerate(columns):
        for other in columns[:i]:
            twice |= column == other
    twice = twice.reshape(rows.shape[:-1]) & recorded(rows)
    if twice.any():
        token, layer = np.argwhere(twice)[0]
        raise ValueError(
            f"{what}: row {token}, layer {layer} has an expert twice, {rows[token, layer].tolist()}; it is corrupted: leave it "
            f"out, and the tokens route themselves"
        )


def to_record(rows: np.ndarray) -> dict[str, Any]:
    """Rows as a column of records can hold them: raw bytes, with a checksum."""
    data = np.ascontiguousarray(rows).astype(rows.dtype.newbyteorder("<")).tobytes()
    return {
        "dtype": rows.dtype.name,
        "shape": list(rows.shape),
        "crc32": zlib.crc32(data),
        "data": data,
    }


def from_record(record: Mapping[str, Any], what: str) -> np.ndarray:
    """What `to_record` was given.

    Raises:
        ValueError: names the field: the bytes are not those that were written, or not as many as the shape says.
    """
    try:
        dtype, shape = np.dtype(str(record["dtype"])), tuple(int(size) for size in record["shape"])
        data, crc32 = memoryview(record["data"]).tobytes(), record["crc32"]
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{what}: is no record of routing ({type(error).__name__}: {error}); it is corrupted") from error
    if dtype not in (np.uint8, np.uint16) or len(shape) != 3 or min(shape) < 0:
        raise ValueError(f"{what}: {dtype} {list(shape)} cannot be rows of routing; it is corrupted")
    if zlib.crc32(data) != crc32:
        raise ValueError(f"{what}: its bytes do not have the checksum {crc32}; it is corrupted")
    if len(data) != int(np.prod(shape)) * dtype.itemsize:
        raise ValueError(f"{what}: {len(data)} bytes are not the {list(shape)} of {dtype} that it says; it is corrupted")
    return np.frombuffer(data, dtype.newbyteorder("<")).astype(dtype).reshape(shape)


def to_json(rows: np.ndarray) -> dict[str, Any]:
    """The record as JSON can hold it: its bytes in base64."""
    record = to_record(rows)
    return record | {"data": base64.b64encode(record["data"]).decode()}


def from_json(record: Mapping[str, Any], what: str) -> np.ndarray:
    """What `to_json` was given.

    Raises:
        ValueError: as `from_record`.
    """
    try:
        data = base64.b64decode(record["data"], validate=True)
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(f"{what}: is no record of routing ({type(error).__name__}: {error}); it is corrupted") from error
    return from_record({**record, "data": data}, what)
