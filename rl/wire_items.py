"""Answers in OpenAI's Responses dialect: items, and the events that make them up."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from inference.errors import ApiError
from rl.wires import Block, BlockWriter, Event, Json, Turn, Usage


@dataclass(frozen=True, kw_only=True)
class ResponsesTurn(Turn):
    namespaces: Mapping[str, tuple[str, str]] = field(default_factory=dict)
    """of tools in a namespace, by the name that the model knows: its name and the tool's in it"""
    encrypted: bool = False
    """whether reasoning items have `encrypted_content`, which is the record's name: some clients send back no others"""
    summaries: bool = False
    """whether reasoning items have their text as a summary too, as clients want it that know no other"""


class ItemWriter(BlockWriter):
    def __init__(self, turn: ResponsesTurn, name: str, created: int) -> None:
        super().__init__()
        self._turn, self._name, self._created = turn, name, created
        self._number = 0
        self._state, self._usage = "in_progress", Usage(prompt=0)

    def begin(self, usage: Usage) -> list[Event]:
        self._usage = usage
        return [self._event(f"response.{kind}", response=self._response([])) for kind in ("created", "in_progress")]

    def end(self, cut: bool, usage: Usage, stop: str | None = None) -> list[Event]:
        self._state, self._usage = "incomplete" if cut else "completed", usage
        return [*self.close_last(), self._event(f"response.{self._state}", response=self.whole())]

    def whole(self) -> Json:
        return self._response([self._item(block) for block in self.blocks])

    def fail(self, error: ApiError) -> list[Event]:
        self._state = "failed"
        code = error.code or ("rate_limit_exceeded" if error.status == 429 else "server_error")
        failed = self.whole() | {"error": {"code": code, "message": error.message}}
        return [self._event("response.failed", response=failed)]

    def open(self, block: Block) -> list[Event]:
        events = [self._event("response.output_item.added", output_index=block.index, item=self._item(block, "in_progress"))]
        if block.kind != "call":
            events.append(self._about(block, "response.content_part.added", part=self._part(block), content_index=0))
        if block.kind == "thinking" and self._turn.summaries:
            part = {"type": "summary_text", "text": ""}
            events.append(self._about(block, "response.reasoning_summary_part.added", part=part, summary_index=0))
        return events

    def grow(self, block: Block, text: str) -> list[Event]:
        return self._text(block, "delta", delta=text)

    def close(self, block: Block) -> list[Event]:
        more = {"arguments": block.text, "name": self._called(block)["name"]} if block.kind == "call" else {"text": block.text}
        events = self._text(block, "done", **more)
        if block.kind != "call":
            events.append(self._about(block, "response.content_part.done", part=self._part(block), content_index=0))
        if block.kind == "thinking" and self._turn.summaries:
            part = {"type": "summary_text", "text": block.text}
            events.append(self._about(block, "response.reasoning_summary_part.done", part=part, summary_index=0))
        return [*events, self._event("response.output_item.done", output_index=block.index, item=self._item(block))]

    def _text(self, block: Block, stage: str, **more: str) -> list[Event]:
        if block.kind == "call":
            return [self._about(block, f"response.function_call_arguments.{stage}", **more)]
        if block.kind == "text":
            return [self._about(block, f"response.output_text.{stage}", content_index=0, logprobs=[], **more)]
        events = [self._about(block, f"response.reasoning_text.{stage}", content_index=0, **more)]
        if self._turn.summaries:
            events.append(self._about(block, f"response.reasoning_summary_text.{stage}", summary_index=0, **more))
        return events

    def _about(self, block: Block, kind: str, **more: object) -> Event:
        return self._event(kind, item_id=self._id(block), output_index=block.index, **more)

    def _event(self, kind: str, **data: object) -> Event:
        self._number += 1
        return kind, {"type": kind, "sequence_number": self._number - 1, **data}

    def _id(self, block: Block) -> str:
        return f"{ {'thinking': 'rs', 'text': 'msg', 'call': 'fc'}[block.kind] }_{self._name}_{block.nth}"

    def _part(self, block: Block) -> Json:
        if block.kind == "thinking":
            return {"type": "reasoning_text", "text": block.text}
        return {"type": "output_text", "text": block.text, "annotations": [], "logprobs": []}

    def _called(self, block: Block) -> Json:
        space, name = self._turn.namespaces.get(block.name, (None, block.name))
        return {"name": name, **({"namespace": space} if space is not None else {})}

    def _item(self, block: Block, status: str | None = None) -> Json:
        """The item as far as it is written.

        Args:
            status: None: as the answer is, which cuts its last item only.
        """
        if status is None:
            cut = block is self.blocks[-1] and self._state in ("incomplete", "failed")
            status = "incomplete" if cut else "completed"
        item: Json = {"id": self._id(block), "type": "message", "status": status}
        parts = [self._part(block)] if block.parts else []
        if block.kind == "text":
            return {**item, "role": "assistant", "content": parts}
        if block.kind == "call":
            call = {"call_id": f"call_{self._name}_{block.nth}", **self._called(block), "arguments": block.text}
            return {**item, "type": "function_call", **call}
        summary = [{"type": "summary_text", "text": block.text}] if self._turn.summaries and block.parts else []
        item |= {"type": "reasoning", "summary": summary, "content": parts}
        return item | ({"encrypted_content": self._name} if self._turn.encrypted else {})

    def _response(self, output: list[Json]) -> Json:
        sampling = self._turn.sampling
        cut = {"reason": "max_output_tokens"} if self._state == "incomplete" else None
        return {
            "id": f"resp_{self._name}",
            "object": "response",
            "created_at": self._created,
            "status": self._state,
            "error": None,
            "incomplete_details": cut,
            "instructions": None,
            "max_output_tokens": sampling.get("max_tokens"),
            "metadata": {},
            "model": self._turn.model,
            "output": output,
            "parallel_tool_calls": True,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "store": False,
            "temperature": sampling.get("temperature", 1.0),
            "text": {"format": {"type": "text"}},
            "tool_choice": "auto",
            "tools": [],  # tens of kilobytes that the client has sent
            "top_p": sampling.get("top_p", 1.0),
            "truncation": "disabled",
            "usage": None if self._state == "in_progress" else _counts(self._usage),
        }


def _counts(usage: Usage) -> Json:
    return {
        "input_tokens": usage.prompt,
        "input_tokens_details": {"cached_tokens": usage.cached},
        "output_tokens": usage.sampled,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt + usage.sampled,
    }
