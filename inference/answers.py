"""What HTTP clients get: the engine requests that a body stands for, and the JSON of what comes back, whole or in pieces.

Log-probs are those under the full vocabulary at temperature 1, whatever the sampling parameters.
"""

import json
import math
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from inference.calls import FoundCall, ToolCalls
from inference.chat import ChatTemplate
from inference.errors import ApiError
from inference.protocol import Common, GenerateBody, Limits, fresh_seed
from inference.text import Detokenizer, StopStrings, token_text
from inference.types import Completion, FinishReason, PromptLogprobs, Request, SamplingParams, Tokens
from models.routes import from_json, to_json
from models.tokenizer import Tokenizer

Json = dict[str, Any]
DONE = b"data: [DONE]\n\n"
ENCODER = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))
"""made once: `json.dumps` makes one for each value"""
LEAST_LOGPROB = -9999.0
"""stands for minus infinity, which JSON has not"""


@dataclass(frozen=True, kw_only=True)
class Served:
    """The model behind the door."""

    name: str
    """what clients call it"""
    tokenizer: Tokenizer
    max_context: int
    eos_ids: tuple[int, ...]
    limits: Limits
    chat: ChatTemplate | None
    """None: the model has no chat template"""


def to_bytes(value: Json) -> bytes:
    # a lone surrogate, which an escape in a tool call may be, has no UTF-8
    return ENCODER.encode(value).encode("utf-8", "replace")


class Answer(ABC):
    """One HTTP request: the sequences it asks for, and what the client gets of them."""

    stream = False
    end = DONE
    """bytes that a stream ends with"""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.requests = tuple(requests)
        self.done: dict[int, Completion] = {}
        """completions by place in `requests`"""

    async def ready(self) -> None:
        """Waits for what the answer needs before its sequences begin."""
        return None

    def event(self, item: Any) -> bytes:
        """A piece of a stream, as it is sent."""
        return b"data: " + to_bytes(item) + b"\n\n"

    def error(self, error: ApiError) -> Json:
        """The body of an answer that is this error."""
        return error.body()

    def failing(self, error: ApiError) -> list[Any]:
        """What ends a stream with this error."""
        return [error.body()]

    def close(self) -> None:
        """Always called, in the end: with the answer, without it, or when its client has gone."""
        return None

    def add(self, index: int, part: Tokens) -> list[Json]:
        """A part of sequence `index`, the last one its Completion. Returns what a client that streams gets of it."""
        if isinstance(part, Completion):
            self.done[index] = part
        return []

    def closing(self) -> list[Json]:
        """What a client that streams gets in the end."""
        return []

    @abstractmethod
    def whole(self) -> Json:
        """What a client that does not stream gets, once all is done."""


class GenerateAnswer(Answer):
    """Tokens, and all that is recorded of them."""

    def __init__(self, body: GenerateBody, served: Served) -> None:
        check_length(len(body.prompt_ids), body.sampling.max_tokens, served, "prompt_ids")
        name = new_id("gen")
        rows = None if body.routing is None else from_json(body.routing, "routing")
        asked = Request(id=name, prompt_ids=body.prompt_ids, params=body.sampling, priority=body.priority, routing=rows)
        super().__init__([asked])

    def whole(self) -> Json:
        done = self.done[0]
        arrays = ["ids", "logprobs", "logprobs_full", "versions"]
        if self.requests[0].params.top_logprobs:
            arrays += ["top_ids", "top_logprobs"]
        answer = {"id": done.request_id} | {name: numbers(getattr(done, name)) for name in arrays}
        if done.prompt_logprobs is not None:
            prompt = done.prompt_logprobs
            answer["prompt_logprobs"] = {item.name: numbers(getattr(prompt, item.name)) for item in fields(prompt)}
        answer["routing"] = None if done.routing is None else to_json(done.routing)
        plain = ("routing_start", "finish_reason", "stop_reason", "cached_tokens", "prefilled_tokens")
        return answer | {name: getattr(done, name) for name in plain}


def numbers(array: np.ndarray) -> Any:
    """As nested lists, with null where there is no number."""
    if array.ndim > 1:
        return [numbers(row) for row in array]
    return [value if math.isfinite(value) else None for value in array.tolist()]


def new_id(kind: str) -> str:
    return f"{kind}-{uuid.uuid4().hex}"


def check_length(length: int, max_tokens: int | None, served: Served, prompt_name: str) -> None:
    """Refuses, with an ApiError, an empty prompt and one that does not fit the context together with `max_tokens`."""
    if not length:
        raise ApiError(f"{prompt_name}: has no tokens; give at least one", param=prompt_name)
    if length + (max_tokens or 1) > served.max_context:
        raise ApiError(
            f"This model's maximum context length is {served.max_context} tokens, but {length} of the prompt and "
            f"{max_tokens or 'at least 1'} to sample are asked for; shorten the prompt, or lower max_tokens",
            param=prompt_name if max_tokens is None else "max_tokens",
            code="context_length_exceeded",
        )


class Choice:
    """One sequence as text: decoded, cut at a stop string, tool calls taken out. The pieces of a stream make up the whole."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams, tools: bool) -> None:
        # with tools, control tokens are shown: some tokenizers call <tool_call> one
        self._detokenizer = Detokenizer(tokenizer, skip_special=not tools)
        self._stop_ids = params.stop_ids
        self._stops = StopStrings(params.stop)
        self._parser = ToolCalls() if tools else None
        self._seen = 0
        self.started = False
        """whether the client got something of it"""
        self.text = ""
        self.calls: list[FoundCall] = []

    def fresh(self, part: Tokens) -> Tokens:
        """The tokens that earlier parts did not have: a Completion has all."""
        if isinstance(part, Completion):
            part = Tokens(**{item.name: getattr(part, item.name)[self._seen :] for item in fields(Tokens)})
        self._seen += len(part.ids)
        return part

    def add(self, ids: Sequence[int], last: bool) -> tuple[str, list[FoundCall]]:
        """New text and calls."""
        if ids and ids[-1] in self._stop_ids:
            ids = ids[:-1]
        text, _ = self._stops.add(self._detokenizer.add(ids))
        if last:
            text += self._stops.add(self._detokenizer.flush())[0] + self._stops.flush()
        calls: list[FoundCall] = []
        if self._parser is not None:
            text, calls = self._parser.add(text)
            text += self._parser.flush() if last else ""
        self.text += text
        self.calls += calls
        return text, calls

    def finish_reason(self, completion: Completion) -> str:
        stopped = completion.finish_reason == FinishReason.STOP or self._stops.found is not None
        return "tool_calls" if stopped and self.calls else "stop" if stopped else "length"


class TextAnswer(Answer):
    """What both routes of the OpenAI API have in common."""

    kind: str
    """of the whole answer"""
    chunk_kind: str
    """of a streamed piece"""

    def __init__(
        self,
        body: Common,
        served: Served,
        prompts: Sequence[tuple[int, ...]],
        *,
        max_tokens: int | None,
        default_max_tokens: int,
        num_logprobs: int | None,
        num_prompt_logprobs: int | None,
        tools: bool = False,
    ) -> None:
        self.n, limits = body.n or 1, served.limits
        if len(prompts) * self.n > limits.max_choices:
            raise ApiError(f"n: at most {limits.max_choices} sequences a request, got {len(prompts) * self.n}", param="n")
        self.tokenizer, self.model = served.tokenizer, served.name
        self.id, self.created = new_id("chatcmpl" if self.kind.startswith("chat") else "cmpl"), int(time.time())
        self.stream = bool(body.stream)
        self._usage_wanted = self.stream and body.stream_options is not None and bool(body.stream_options.include_usage)
        self.num_logprobs, self.num_prompt_logprobs = num_logprobs, num_prompt_logprobs
        shared = body.sampling() | {
            "stop_ids": stop_ids(body, served),
            "top_logprobs": max(num_logprobs or 0, num_prompt_logprobs or 0),
        }
        seed = fresh_seed() if body.seed is None else body.seed
        requests = []
        for index in range(len(prompts) * self.n):
            prompt, sample = prompts[index // self.n], index % self.n
            check_length(len(prompt), max_tokens, served, body.prompt_name)
            params = SamplingParams(
                **shared,
                max_tokens=max_tokens or min(default_max_tokens, served.max_context - len(prompt)),
                seed=(seed + sample) % 2**32,
                prompt_logprobs=num_prompt_logprobs is not None and sample == 0,
            )
            requests.append(Request(id=f"{self.id}-{index}", prompt_ids=prompt, params=params, priority=body.priority or 0))
        super().__init__(requests)
        self.choices = [Choice(served.tokenizer, request.params, tools) for request in requests]

    def add(self, index: int, part: Tokens) -> list[Json]:
        super().add(index, part)
        done = self.done.get(index)
        if done is not None and done.finish_reason == FinishReason.ABORT:
            raise ApiError("the request was aborted by an update of the weights; send it again", status=503)
        choice = self.choices[index]
        fresh = choice.fresh(part)
        text, calls = choice.add(fresh.ids.tolist(), done is not None)
        if not self.stream:
            return []
        pieces = self.pieces(index, text, calls, fresh, None if done is None else choice.finish_reason(done))
        choice.started = True
        return [self._object(self.chunk_kind, [piece]) | ({"usage": None} if self._usage_wanted else {}) for piece in pieces]

    def closing(self) -> list[Json]:
        return [self._object(self.chunk_kind, []) | {"usage": self.usage()}] if self._usage_wanted else []

    def whole(self) -> Json:
        return self._object(self.kind, [self.finished(i) for i in range(len(self.requests))]) | {"usage": self.usage()}

    def _object(self, kind: str, choices: list[Json]) -> Json:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices}

    def usage(self) -> Json:
        """A prompt counts once, however many samples it has."""
        firsts = [self.done[i] for i in range(0, len(self.requests), self.n)]
        prompt = sum(len(done.prompt_ids) for done in firsts)
        sampled = sum(len(done.ids) for done in self.done.values())
        return {
            "prompt_tokens": prompt,
            "completion_tokens": sampled,
            "total_tokens": prompt + sampled,
            "prompt_tokens_details": {"cached_tokens": sum(done.cached_tokens for done in firsts)},
        }

    def prompt_logprobs(self, index: int) -> tuple[tuple[int, ...], PromptLogprobs] | None:
        """ids of the prompt of sequence `index`, and their log-probs if the client wants them."""
        first = self.done[index - index % self.n]
        return None if first.prompt_logprobs is None else (first.prompt_ids, first.prompt_logprobs)

    @abstractmethod
    def pieces(self, index: int, text: str, calls: list[FoundCall], fresh: Tokens, reason: str | None) -> list[Json]:
        """Entries of `choices` for a new piece; with a finish reason, the last one."""

    @abstractmethod
    def finished(self, index: int) -> Json:
        """The entry of `choices` for the whole sequence."""


def stop_ids(body: Common, served: Served) -> tuple[int, ...]:
    """What ends a sequence: the model's end tokens, the client's, and stop strings that are control tokens."""
    ids = [] if body.ignore_eos else [*served.eos_ids]
    ids += body.stop_token_ids or []
    for stop in body.stop or ():
        found = served.tokenizer.encode(stop, allow_special=True)
        ids += [token for token in found if len(found) == 1 and token in served.tokenizer.special_ids]
    return tuple(dict.fromkeys(ids))


def logprob(value: float) -> float:
    return float(value) if math.isfinite(value) else LEAST_LOGPROB


def prompt_entries(tokenizer: Tokenizer, ids: Sequence[int], prompt: PromptLogprobs, most: int) -> list[Json | None]:
    """vLLM's `prompt_logprobs`: for each token but the first, by token id, its own log-prob and those of the likeliest."""
    entries: list[Json | None] = [None]
    for row in range(1, len(ids)):
        top = prompt.top_ids[row, :most].tolist()
        values: Mapping[int, float] = {ids[row]: prompt.logprobs[row]} | dict(zip(top, prompt.top_logprobs[row], strict=False))
        ranks = {token: rank for rank, token in enumerate(top, 1)}
        entries.append(
            {
                str(token): {
                    "logprob": logprob(value),
                    "rank": ranks.get(token),
                    "decoded_token": token_text(tokenizer, token),
                }
                for token, value in values.items()
            }
        )
    return entries
