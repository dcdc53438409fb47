"""How agent programs ask for sampling, as fields of SamplingParams."""

import re
from collections.abc import Iterable, Iterator
from typing import Any

from inference.protocol import MAX_STOP_LENGTH, MAX_STOPS
from rl.wire_body import Field

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
"""fields that SamplingParams and clients call the same"""


SAMPLING = {*NUMBERS, "top_k", "seed", "ignore_eos", "stop_token_ids", "allowed_token_ids", "logit_bias"}
"""fields that all dialects know; most are vLLM's"""


def sampling(body: Field, most: Iterable[str], stop: str) -> dict[str, Any]:
    """Fields of SamplingParams that a body sets; what they may be, SamplingParams says.

    Args:
        most: fields that may bound the sampled tokens; the first that is there counts.
        stop: the field with stop strings.
    """
    given: dict[str, Any] = {name: body[name].number() for name in NUMBERS if body[name]}
    if body["seed"]:
        given["seed"] = body["seed"].integer(0, 2**32 - 1)
    if body["ignore_eos"].flag():
        given["ignore_eos"] = True
    if body["top_k"]:
        given["top_k"] = max(body["top_k"].integer(-1), 0)  # -1 is vLLM's way to switch it off
    bound = next((body[name] for name in most if body[name]), None)
    if bound is not None:
        given["max_tokens"] = bound.integer(1)
    if body["allowed_token_ids"]:
        given["allowed_ids"] = tuple(item.integer() for item in body["allowed_token_ids"].items())
    if body["stop_token_ids"].value:
        raise body["stop_token_ids"].error(f"the chat format's own tokens end a turn; use {stop}, which takes strings")
    if body["logit_bias"]:
        given["logit_bias"] = tuple(_biases(body["logit_bias"]))
    if strings := tuple(_stops(body[stop])):
        given["stop"] = strings
    return given


def _biases(field: Field) -> Iterator[tuple[int, float]]:
    for name in field.object():
        if not re.fullmatch("[0-9]{1,9}", name):
            raise field.error("its keys are token ids")
        yield int(name), field[name].number()


def _stops(field: Field) -> list[str]:
    one = isinstance(field.value, str)
    strings = [field.text()] if one else [item.text() for item in field.items()]
    if len(strings) > MAX_STOPS or not all(0 < len(text) <= MAX_STOP_LENGTH for text in strings):
        raise field.error(f"takes at most {MAX_STOPS} strings of 1 to {MAX_STOP_LENGTH} characters")
    return strings
