"""What is sent to open and to finish a session, and what may be its name."""

import json
import re
from typing import Any

from inference.errors import ApiError
from rl.environments import Reward

NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
MOST_OF_NAME = 150
"""of a file: file systems have names of up to 255 bytes"""


def open_body(raw: bytes) -> dict[str, Any]:
    """Fields of an Episode from the body of POST /sessions: {"name", "env", "key", "group", "seed"}, all optional."""
    body = _object(raw)
    fields: dict[str, Any] = {}
    for name, field, kind in (
        ("name", "id", str),
        ("env", "env", str),
        ("key", "key", int),
        ("group", "group_id", str),
        ("seed", "seed", int),
    ):
        if name in body:
            value = body.pop(name)
            if not isinstance(value, kind) or isinstance(value, bool):
                raise ApiError(f"{name}: must be {'text' if kind is str else 'a whole number'}, got {value!r}", param=name)
            if isinstance(value, str):
                _check_text(name, value)
            if isinstance(value, int) and not 0 <= value < 2**32:
                raise ApiError(f"{name}: must be in [0, 2^32), got {value}", param=name)
            fields[field] = value
    if "id" in fields and not NAME.fullmatch(fields["id"]):
        raise ApiError(f"name: {fields['id']!r} must match {NAME.pattern}", param="name")
    if body:
        raise ApiError(f"{min(body)}: this field is not supported; leave it out", param=min(body))
    return fields


def finish_body(raw: bytes) -> list[Reward]:
    """Rewards from the body of POST /sessions/NAME/finish: {"rewards": [{"name", "score", "weight"}, ...]}."""
    body = _object(raw)
    given = body.pop("rewards", [])
    if body:
        raise ApiError(f"{min(body)}: this field is not supported; leave it out", param=min(body))
    rewards = []
    for i, item in enumerate(given if isinstance(given, list) else [None]):
        param = f"rewards.{i}"
        if not isinstance(item, dict) or not isinstance(item.get("name"), str) or set(item) - {"name", "score", "weight"}:
            raise ApiError(f'{param}: must be {{"name": text, "score": number or null, "weight": number}}', param=param)
        _check_text(f"{param}.name", item["name"])
        numbers = [item.get("score"), item.get("weight", 1.0)]
        if any(isinstance(x, bool) or not isinstance(x, int | float | None) for x in numbers) or numbers[1] is None:
            raise ApiError(f"{param}: score and weight are numbers", param=param)
        try:
            rewards.append(Reward(item["name"], numbers[0] if numbers[0] is None else float(numbers[0]), float(numbers[1])))
        except (ValueError, OverflowError) as error:
            raise ApiError(f"{param}.{error}", param=param) from None
    return rewards


def _check_text(name: str, value: str) -> None:
    if len(value) > MOST_OF_NAME or not value.isprintable():  # half of a surrogate pair cannot be printed, nor written down
        raise ApiError(f"{name}: has at most {MOST_OF_NAME} characters, and none that cannot be printed", param=name)


def _object(raw: bytes) -> dict[str, Any]:
    try:
        body = json.loads(raw or b"{}")
    except (ValueError, RecursionError) as error:
        raise ApiError(f"body: is no JSON ({error})") from None
    if not isinstance(body, dict):
        raise ApiError("body: must be an object")
    return body
