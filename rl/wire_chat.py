"""OpenAI's Chat Completions, as agent programs speak it. `WIRE` is the dialect (rl/wires.py)."""

from collections.abc import Mapping
from dataclasses import dataclass

from inference.errors import ApiError
from rl.identity import identity, kind_of_call
from rl.messages import Message, Tool, ToolCall
from rl.wire_body import (
    Field,
    arguments,
    assistant,
    check_form,
    function,
    hosted,
    load,
    may_call,
    note_effort,
    note_unknown,
    parts,
    unique,
    with_names,
)
from rl.wire_sampling import SAMPLING, sampling
from rl.wires import Block, BlockWriter, Event, Json, Turn, Usage

BODY = SAMPLING | {
    *("model", "messages", "tools", "tool_choice", "parallel_tool_calls", "stream", "stream_options", "n", "max_tokens"),
    *("max_completion_tokens", "response_format", "reasoning_effort", "logprobs", "top_logprobs", "functions", "function_call"),
    *("modalities", "audio", "stop"),
    # change no token
    *("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention"),
    *("verbosity", "prediction", "priority", "client_metadata"),
}
MESSAGE = {
    *("role", "content", "name", "tool_calls", "tool_call_id", "reasoning_content", "reasoning", "function_call"),
    # what clients send back of an answer, or mark parts with
    *("refusal", "annotations", "audio", "reasoning_details", "cache_control", "provider_specific_fields", "id", "phase"),
}
ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "assistant": "assistant",
    "tool": "tool",
    "function": "tool",
}
TEXTS = {"text": "text", "refusal": "refusal", "input_text": "text", "output_text": "text"}
"""kinds of parts that are read, and where their text is"""


@dataclass(frozen=True, kw_only=True)
class ChatTurn(Turn):
    include_usage: bool = False
    """whether a stream ends with counts"""


class Chat:
    path = "/v1/chat/completions"
    done = True

    def parse(self, raw: bytes, headers: Mapping[str, str]) -> ChatTurn:
        body, notes = load(raw), []
        note_unknown(body, BODY, notes)
        _refuse(body)
        note_effort(body["reasoning_effort"], notes)
        messages = with_names(_message(item, notes) for item in body["messages"].items())
        if not messages:
            raise body["messages"].error("there must be at least one")
        tools = _tools(body, notes)
        return ChatTurn(
            model=body["model"].text(),
            messages=messages,
            tools=tools,
            sampling=sampling(body, ("max_completion_tokens", "max_tokens"), "stop"),
            stream=body["stream"].flag(),
            kind=kind_of_call(headers, body.value, messages, tools),
            notes=tuple(notes),
            identity=identity(headers, body.value),
            include_usage=bool(body["stream_options"]) and body["stream_options"]["include_usage"].flag(),
        )

    def writer(self, turn: Turn, name: str, created: int) -> "ChatWriter":
        assert isinstance(turn, ChatTurn), "the turn is of another dialect"
        return ChatWriter(turn, name, created)

    def error(self, error: ApiError) -> Json:
        return error.body()


WIRE = Chat()


def _refuse(body: Field) -> None:
    """What would change the answer and cannot be had."""
    if body["n"] and body["n"].integer() != 1:
        raise body["n"].error("one turn has one answer; ask in other sessions for others")
    if body["logprobs"].flag() or body["top_logprobs"]:
        name = "logprobs" if body["logprobs"].flag() else "top_logprobs"
        raise body[name].error("an agent's turn has none; they are in the record, and `launch.serve` gives them")
    for name in ("functions", "function_call"):
        if body[name]:
            raise body[name].error("this form is old; use tools and tool_choice")
    check_form(body["response_format"])
    if body["audio"] or any(item.text() != "text" for item in body["modalities"].items()):
        raise body["audio" if body["audio"] else "modalities"].error("only text can be had; leave it out")


def _tools(body: Field, notes: list[str]) -> tuple[Tool, ...]:
    tools: list[tuple[Field, Tool]] = []
    for item in body["tools"].items():
        if item["type"].text("function") != "function":
            hosted(item, notes)
            continue
        tools.append((item, function(item, "parameters", notes)))
    found = unique(tools)
    return found if may_call(body, notes) else ()


def _message(item: Field, notes: list[str]) -> Message:
    note_unknown(item, MESSAGE, notes)
    role = item["role"].text()
    if role not in ROLES:
        raise item["role"].error(f"{role[:40]!r} is unknown; use one of {', '.join(ROLES)}")
    if ROLES[role] == "assistant":
        return _assistant(item)
    message: Message = {"role": ROLES[role], "content": parts(item["content"], TEXTS)}
    if ROLES[role] == "tool":
        message["tool_call_id"] = item["tool_call_id"].text("")
        if name := item["name"].text(""):
            message["name"] = name
    return message


def _assistant(item: Field) -> Message:
    if item["function_call"]:
        raise item["function_call"].error("this form is old; use tool_calls")
    calls = [_call(call) for call in item["tool_calls"].items()]
    thinking = item["reasoning_content"].text("") or item["reasoning"].text("")
    return assistant(parts(item["content"], TEXTS, joint=""), thinking, calls, [call["id"] for call in calls])


def _call(call: Field) -> ToolCall:
    if call["type"].text("function") != "function":
        raise call["type"].error("only calls of type 'function' can be read; leave others out")
    called = call["function"]
    return {"id": call["id"].text(""), "name": called["name"].text(), "arguments": arguments(called["arguments"])}


class ChatWriter(BlockWriter):
    """Reasoning is in `reasoning_content`, where all clients look that know any."""

    def __init__(self, turn: ChatTurn, name: str, created: int) -> None:
        super().__init__()
        self._turn, self._name = turn, name
        self._head = {"id": f"chatcmpl-{name}", "created": created, "model": turn.model}
        self._reason, self._usage = "stop", Usage(prompt=0)

    def begin(self, usage: Usage) -> list[Event]:
        return [self._chunk({"role": "assistant", "content": ""})]

    def end(self, cut: bool, usage: Usage, stop: str | None = None) -> list[Event]:
        self._usage = usage
        self._reason = "length" if cut else "tool_calls" if self.calls else "stop"
        events = [*self.close_last(), self._chunk({}, self._reason)]
        if self._turn.include_usage:
            data = {**self._head, "object": "chat.completion.chunk", "choices": [], "usage": _counts(usage)}
            events.append(("", data))
        return events

    def whole(self) -> Json:
        text, thinking, calls = self.joined("text"), self.joined("thinking"), self.calls
        message: Json = {"role": "assistant", "content": text if text or not calls else None, "refusal": None}
        if thinking:
            message["reasoning_content"] = thinking
        if calls:
            message["tool_calls"] = [self._call(call, call.text) for call in calls]
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": self._reason}
        return {**self._head, "object": "chat.completion", "choices": [choice], "usage": _counts(self._usage)}

    def fail(self, error: ApiError) -> list[Event]:
        return [("", error.body())]

    def open(self, block: Block) -> list[Event]:
        if block.kind != "call":
            return []
        return [self._chunk({"tool_calls": [{"index": block.nth, **self._call(block, "")}]})]

    def grow(self, block: Block, text: str) -> list[Event]:
        if block.kind == "call":
            return [self._chunk({"tool_calls": [{"index": block.nth, "function": {"arguments": text}}]})]
        return [self._chunk({"content" if block.kind == "text" else "reasoning_content": text})]

    def close(self, block: Block) -> list[Event]:
        return []

    def _call(self, block: Block, text: str) -> Json:
        called = {"name": block.name, "arguments": text}
        return {"id": f"call_{self._name}_{block.nth}", "type": "function", "function": called}

    def _chunk(self, delta: Json, reason: str | None = None) -> Event:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
        data: Json = {**self._head, "object": "chat.completion.chunk", "choices": [choice]}
        return "", data | ({"usage": None} if self._turn.include_usage else {})


def _counts(usage: Usage) -> Json:
    return {
        "prompt_tokens": usage.prompt,
        "completion_tokens": usage.sampled,
        "total_tokens": usage.prompt + usage.sampled,
        "prompt_tokens_details": {"cached_tokens": usage.cached},
    }
