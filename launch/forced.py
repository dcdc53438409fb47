"""An engine's front where answers can be given beforehand, token by token: what a tiny model would never say.

The engine samples each token as the one that may be sampled after all before it: prompts, pages and log-probs are real. The
log-probs are those under the full vocabulary at temperature 1, which are the sampler's where it cuts nothing.
"""

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from inference.engine import Engine
from inference.front import AsyncEngine
from inference.types import Completion, FinishReason, Request, Tokens


class Forced(AsyncEngine):
    """Args:
    keep: remember every request in `requests`.
    """

    def __init__(self, engine: Engine, keep: bool = False) -> None:
        super().__init__(engine)
        self.answers: deque[Sequence[int]] = deque()
        """of the next requests; those after them are sampled freely"""
        self.requests: dict[str, Request] | None = {} if keep else None

    def stream(self, request: Request) -> AsyncGenerator[Tokens | Completion, None]:
        if self.requests is not None:
            self.requests[request.id] = request
        return self.say(request, self.answers.popleft()) if self.answers else super().stream(request)

    async def say(self, request: Request, answer: Sequence[int]) -> AsyncGenerator[Tokens | Completion, None]:
        """The request's tokens and completion as if the model had sampled this answer."""
        said: list[Completion] = []
        for number, token in enumerate(answer[: request.params.max_tokens]):
            ids = (*request.prompt_ids, *answer[:number])
            params = replace(request.params, allowed_ids=(token,), max_tokens=1, stop=())
            one = await self.generate(replace(request, id=f"{request.id}.{number}", prompt_ids=ids, params=params))
            assert one.ids.tolist() == [token]
            said.append(one)
            yield Tokens(**_arrays(said[-1:]))
        stopped = said[-1].finish_reason == FinishReason.STOP
        yield Completion(
            **_arrays(said),
            request_id=request.id,
            prompt_ids=request.prompt_ids,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            stop_reason=said[-1].stop_reason,
            cached_tokens=said[0].cached_tokens,
            prefilled_tokens=sum(part.prefilled_tokens for part in said),
            prompt_logprobs=None,
        )


def _arrays(parts: Sequence[Completion]) -> dict[str, Any]:
    whole = {item.name: np.concatenate([getattr(part, item.name) for part in parts]) for item in fields(Tokens)}
    return whole | {"logprobs": whole["logprobs_full"]}
