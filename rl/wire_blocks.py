"""Answers in Anthropic's Messages dialect: blocks, and the events that make them up."""

import json
from typing import Any

from inference.errors import ApiError
from rl.wires import Block, BlockWriter, Event, Json, PromptTooLong, Turn, Usage

ERRORS = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
    529: "overloaded_error",
}


def error_body(error: ApiError) -> Json:
    kind = ERRORS.get(error.status, "invalid_request_error" if error.status < 500 else "api_error")
    message = error.message
    if isinstance(error, PromptTooLong):
        message = f"prompt is too long: {error.prompt_tokens} tokens > {error.most} maximum"
    return {"type": "error", "error": {"type": kind, "message": message}}


class MessageWriter(BlockWriter):
    """Thinking is signed with the record's name, which clients send back."""

    def __init__(self, turn: Turn, name: str) -> None:
        super().__init__()
        self._turn, self._name = turn, name
        self._reason: str | None = None
        self._stop: str | None = None
        self._usage = Usage(prompt=0)

    def begin(self, usage: Usage) -> list[Event]:
        self._usage = usage
        return [self._event("message_start", message=self.whole() | {"content": []})]

    def end(self, cut: bool, usage: Usage, stop: str | None = None) -> list[Event]:
        self._usage = usage
        if cut:
            self._reason = "max_tokens"
        elif self.calls:
            self._reason = "tool_use"
        else:
            self._reason, self._stop = "end_turn" if stop is None else "stop_sequence", stop
        delta = {"stop_reason": self._reason, "stop_sequence": self._stop}
        ends = [self._event("message_delta", delta=delta, usage=_counts(usage)), self._event("message_stop")]
        return [*self.close_last(), *ends]

    def whole(self) -> Json:
        return {
            "id": f"msg_{self._name}",
            "type": "message",
            "role": "assistant",
            "model": self._turn.model,
            "content": [self._content(block, written=True) for block in self.blocks],
            "stop_reason": self._reason,
            "stop_sequence": self._stop,
            "usage": _counts(self._usage),
        }

    def fail(self, error: ApiError) -> list[Event]:
        return [("error", error_body(error))]

    def open(self, block: Block) -> list[Event]:
        content = self._content(block, written=False)
        return [self._event("content_block_start", index=block.index, content_block=content)]

    def grow(self, block: Block, text: str) -> list[Event]:
        if block.kind == "call":
            return [self._delta(block, "input_json_delta", partial_json=text)]
        return [self._delta(block, f"{block.kind}_delta", **{block.kind: text})]

    def close(self, block: Block) -> list[Event]:
        signed = [self._delta(block, "signature_delta", signature=self._name)] if block.kind == "thinking" else []
        return [*signed, self._event("content_block_stop", index=block.index)]

    def _content(self, block: Block, written: bool) -> Json:
        """A block as it is, or as it starts."""
        text = block.text if written else ""
        if block.kind == "text":
            return {"type": "text", "text": text}
        if block.kind == "thinking":
            return {"type": "thinking", "thinking": text, "signature": self._name if written else ""}
        called = {"id": f"toolu_{self._name}_{block.nth}", "name": block.name}
        return {"type": "tool_use", **called, "input": _object(text) if written else {}}

    def _delta(self, block: Block, kind: str, **data: str) -> Event:
        return self._event("content_block_delta", index=block.index, delta={"type": kind, **data})

    @staticmethod
    def _event(kind: str, **data: Any) -> Event:
        return kind, {"type": kind, **data}


def _object(arguments: str) -> Json:
    """A call's arguments. A number that JSON has no value for is null, as JavaScript writes it."""
    value = json.loads(arguments, parse_constant=lambda _: None, parse_float=_finite)
    assert isinstance(value, dict), "a call's arguments are an object: others stay text"
    return value


def _finite(text: str) -> float | None:
    value = float(text)
    return value if abs(value) != float("inf") else None


def _counts(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.sampled,
    }
