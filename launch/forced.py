"""An engine's front where answers can be given beforehand, token by token: what a tiny model would never say.

The engine samples each token under the constraint that it is the one given, so that prompts, pages and log-probs are real ones.
"""

from collections import deque
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
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
        return self._say(request, self.answers.popleft()) if self.answers else super().stream(request)

    async def _say(self, request: Request, answer: Sequence[int]) -> AsyncGenerator[Tokens | Completion, None]:
        said: list[Completion] = []
        for number, token in enumerate(answer[: request.params.max_tokens]):
            ids = (*request.prompt_ids, *answer[:number])
            params = replace(request.params, allowed_ids=(token,), max_tokens=1, stop=())
            async with aclosing(
                super().stream(replace(request, id=f"{request.id}.{number}", prompt_ids=ids, params=params))
            ) as parts:
                async for part in parts:
                    if isinstance(part, Completion):
                        said.append(part)
                        yield Tokens(**{item.name: getattr(part, item.name) for item in fields(Tokens)})
        stopped = said[-1].finish_reason == FinishReason.STOP
        arrays: dict[str, Any] = {
            item.name: np.concatenate([getattr(part, item.name) for part in said]) for item in fields(Tokens)
        }
        yield Completion(
            **arrays,
            request_id=request.id,
            prompt_ids=request.prompt_ids,
            finish_reason=FinishReason.STOP if stopped else FinishReason.LENGTH,
            stop_reason=said[-1].stop_reason,
            cached_tokens=said[0].cached_tokens,
            prefilled_tokens=sum(part.prefilled_tokens for part in said),
            prompt_logprobs=None,
        )
