"""POST /inference/v1/generate: token ids in and out, in vLLM's words, as the `renderers` and `verifiers` libraries speak.

Stateless: nothing of it is recorded in a session. Log-probs are those under the sampling distribution.
"""

import base64
import math
from typing import Annotated, Any, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from inference.answers import Answer, Json, Served, check_length, new_id
from inference.errors import ApiError
from inference.protocol import Strict, check_stops, fresh_seed
from inference.types import MAX_TOP_LOGPROBS, Completion, FinishReason, Request, SamplingParams

Ids = Annotated[tuple[int, ...], BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)]
SAME = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos")
"""fields that SamplingParams calls the same"""


class IdsSampling(Strict):
    """vLLM's sampling parameters. A field that is not listed here is refused."""

    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    """the sampled token's is always given; no others are"""
    routed_experts_prompt_start: Annotated[int, Field(ge=0)] = 0
    """the first token whose routing is wanted"""
    # without effect: one sequence of ids is the answer, and it holds all that was sampled
    n: Literal[1] | None = None
    min_tokens: Literal[0] | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    include_stop_str_in_output: bool | None = None
    detokenize: bool | None = None


class IdsBody(Strict):
    token_ids: Ids
    sampling_params: IdsSampling = Field(default_factory=IdsSampling)
    model: str | None = None
    priority: Annotated[int, Field(ge=0)] | None = None
    stream: Literal[False] | None = None
    cache_salt: str | None = None
    """without effect: what is cached is known by the weights that made it, so it changes no token"""

    def check(self) -> None:
        check_stops(self.sampling_params.stop or ())


class IdsAnswer(Answer):
    def __init__(self, body: IdsBody, served: Served) -> None:
        if body.model not in (None, served.name):
            message = f"model: {body.model!r} does not exist; {served.name!r} does"
            raise ApiError(message, status=404, param="model", code="model_not_found")
        wanted = body.sampling_params
        check_length(len(body.token_ids), wanted.max_tokens, served, "token_ids")
        given: dict[str, Any] = {name: value for name in SAME if (value := getattr(wanted, name)) is not None}
        params = SamplingParams(
            **given,
            max_tokens=wanted.max_tokens or served.max_context - len(body.token_ids),
            top_k=max(wanted.top_k or 0, 0),
            seed=fresh_seed() if wanted.seed is None else wanted.seed,
            stop=tuple(wanted.stop or ()),
            stop_ids=tuple(dict.fromkeys((*served.eos_ids, *(wanted.stop_token_ids or ())))),
        )
        super().__init__([Request(id=new_id("gen"), prompt_ids=body.token_ids, params=params, priority=body.priority or 0)])
        self._start = wanted.routed_experts_prompt_start

    def whole(self) -> Json:
        done = self.done[0]
        if done.finish_reason == FinishReason.ABORT:
            raise ApiError("the request was aborted by an update of the weights; send it again", status=503)
        choice: Json = {
            "index": 0,
            "token_ids": done.ids.tolist(),
            "finish_reason": done.finish_reason.value,
            "logprobs": {"content": [_entry(token, value) for token, value in zip(done.ids, done.logprobs, strict=True)]},
        }
        if done.routing is not None:
            choice["routed_experts"] = _rows(done, self._start)
        usage = {
            "prompt_tokens": len(done.prompt_ids),
            "completion_tokens": len(done.ids),
            "total_tokens": len(done.prompt_ids) + len(done.ids),
            "prompt_tokens_details": {"cached_tokens": done.cached_tokens},
        }
        return {"request_id": done.request_id, "choices": [choice], "usage": usage}


def _entry(token: int, value: float) -> Json:
    assert math.isfinite(value), "a sampled token has a log-prob"
    return {"token": f"token_id:{token}", "logprob": float(value)}


def _rows(done: Completion, start: int) -> Json:
    """How the tokens from `start` on were routed, all but the last, in raw little-endian bytes. `data` stands first."""
    assert done.routing is not None and not done.routing_start, "no rows came with the request"
    rows = np.ascontiguousarray(done.routing[start:])
    data = base64.b64encode(rows.astype(rows.dtype.newbyteorder("<")).tobytes()).decode()
    return {"data": data, "shape": list(rows.shape), "dtype": rows.dtype.name, "start": start}
