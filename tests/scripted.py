"""An engine that answers from a script, for tests of episodes."""

from collections.abc import Callable, Sequence

import numpy as np

from inference.types import Completion, FinishReason, Request
from models.tokenizer import ByteTokenizer
from rl.renderers import ChatML

TOKENIZER = ByteTokenizer()
RENDERER = ChatML(TOKENIZER)
END = RENDERER.stop_ids[0]


def rows_of(ids: Sequence[int]) -> np.ndarray:
    """Routing of two layers, two experts each, that says whose it is."""
    token = np.asarray(ids, np.int64).reshape(-1, 1, 1)
    return (token // np.array([[1, 7], [49, 343]]) % 200).astype(np.uint8)


class Scripted:
    """A SamplerEngine that answers from a table, newest request first, and remembers what it was given."""

    version = 7

    def __init__(self, answers: Callable[[Request], tuple[list[int], FinishReason]]):
        self.answers = answers
        self.requests: list[Request] = []
        self.completions: list[Completion] = []
        self._waiting: list[Request] = []

    def submit(self, request: Request) -> None:
        self.requests.append(request)
        self._waiting.append(request)

    def step(self) -> list[Completion]:
        request = self._waiting.pop()
        ids, reason = self.answers(request)
        n, start = len(ids), 0 if request.routing is None else len(request.routing)
        rows = rows_of([*request.prompt_ids, *ids][:-1])
        if request.routing is not None:
            np.testing.assert_array_equal(request.routing, rows[:start])
        done = Completion(
            request_id=request.id,
            prompt_ids=request.prompt_ids,
            ids=np.asarray(ids, np.int32),
            logprobs=-np.arange(1, n + 1, dtype=np.float32) / 3,
            logprobs_full=-np.arange(1, n + 1, dtype=np.float32) / 5,
            versions=np.full(n, self.version, np.int32),
            top_ids=np.zeros((n, 0), np.int32),
            top_logprobs=np.zeros((n, 0), np.float32),
            finish_reason=reason,
            stop_reason=None,
            prompt_logprobs=None,
            cached_tokens=len(request.prompt_ids) // 2,
            prefilled_tokens=len(request.prompt_ids),
            routing=rows[start:],
            routing_start=start,
        )
        self.completions.append(done)
        return [done]

    def cancel(self, request_id: str) -> Completion:
        raise AssertionError("nobody cancels")
