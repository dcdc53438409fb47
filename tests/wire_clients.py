"""What clients do with an answer: put its events together, and send it back in their next request."""

import json
from collections.abc import Callable, Sequence
from typing import Any

from rl.messages import Piece
from rl.wire_chat import WIRE as CHAT
from rl.wire_messages import WIRE as MESSAGES
from rl.wire_responses import WIRE as RESPONSES
from rl.wires import Event, Json, Turn, Usage, Wire

NAME = "tx" + "0123456789abcdef" * 1 + "0123"
TOOL = {"name": "look", "description": "", "parameters": {"type": "object"}}
WIRES: dict[str, Wire] = {"chat": CHAT, "responses": RESPONSES, "messages": MESSAGES}
FIRST: dict[str, Json] = {
    "chat": {"model": "m", "messages": [{"role": "user", "content": "hi"}], "stream_options": {"include_usage": True}},
    "responses": {"model": "m", "input": "hi", "include": ["reasoning.encrypted_content"]},
    "messages": {"model": "m", "max_tokens": 9, "messages": [{"role": "user", "content": "hi"}]},
}
USAGE = Usage(prompt=7, cached=3, sampled=5)


def read(wire: str, body: Any, **headers: str) -> Any:
    return WIRES[wire].parse(json.dumps(body).encode(), headers)


def answer(wire: str, pieces: Sequence[Piece], cut: bool = False, turn: Turn | None = None) -> tuple[list[Event], Json]:
    """The events of an answer, and it as one object."""
    writer = WIRES[wire].writer(turn or read(wire, FIRST[wire]), NAME, created=1)
    events = writer.begin(USAGE)
    for piece in pieces:
        events += writer.add([piece])
    events += writer.end(cut, USAGE)
    return events, writer.whole()


# ---- events put together


def put_together(wire: str, events: Sequence[Event]) -> Json:
    return {"chat": _chat, "responses": _responses, "messages": _messages}[wire]([data for _, data in events])


def _chat(chunks: list[Json]) -> Json:
    message: Json = {"role": "", "content": "", "refusal": None}
    reason = None
    for chunk in chunks[:-1]:
        (choice,) = chunk["choices"]
        for name, value in choice["delta"].items():
            if name == "tool_calls":
                (call,) = value
                calls = message.setdefault("tool_calls", [])
                if call["index"] == len(calls):
                    calls.append({"id": call["id"], "type": call["type"], "function": call["function"]})
                else:
                    calls[call["index"]]["function"]["arguments"] += call["function"]["arguments"]
            else:
                message[name] = message.get(name, "") + value
        reason = choice["finish_reason"]
    if "tool_calls" in message:
        message["content"] = message["content"] or None
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
    head = {name: chunks[0][name] for name in ("id", "created", "model")}
    assert chunks[-1]["choices"] == []
    return {**head, "object": "chat.completion", "choices": [choice], "usage": chunks[-1]["usage"]}


def _responses(events: list[Json]) -> Json:
    assert [event["sequence_number"] for event in events] == list(range(len(events)))
    output: list[Json] = []
    for event in events:
        kind = event["type"]
        if kind == "response.output_item.added":
            assert event["output_index"] == len(output)
            output.append(event["item"])
        elif kind == "response.content_part.added":
            output[event["output_index"]]["content"].append(event["part"])
        elif kind in ("response.output_text.delta", "response.reasoning_text.delta"):
            output[event["output_index"]]["content"][event["content_index"]]["text"] += event["delta"]
        elif kind == "response.reasoning_summary_part.added":
            output[event["output_index"]]["summary"].append(event["part"])
        elif kind == "response.reasoning_summary_text.delta":
            output[event["output_index"]]["summary"][event["summary_index"]]["text"] += event["delta"]
        elif kind == "response.function_call_arguments.delta":
            output[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "response.output_item.done":
            mine = output[event["output_index"]]
            mine["status"] = event["item"]["status"]
            assert event["item"] == mine
    assert events[-1]["response"]["output"] == output
    return events[-1]["response"]


def _messages(events: list[Json]) -> Json:
    message = events[0]["message"]
    arguments = ""
    for event in events:
        if event["type"] == "content_block_start":
            assert event["index"] == len(message["content"])
            message["content"].append(event["content_block"])
            arguments = ""
        elif event["type"] == "content_block_delta":
            kind, block = event["delta"]["type"], message["content"][event["index"]]
            if kind == "input_json_delta":
                arguments += event["delta"]["partial_json"]
            else:
                name = kind.removesuffix("_delta")
                block[name] += event["delta"][name]
        elif event["type"] == "content_block_stop" and message["content"][event["index"]]["type"] == "tool_use":
            message["content"][event["index"]]["input"] = json.loads(arguments)
        elif event["type"] == "message_delta":
            message |= event["delta"] | {"usage": event["usage"]}
    assert events[-1] == {"type": "message_stop"}
    return message


# ---- the next request


def again(arguments: str) -> str:
    """Arguments as a client writes them that has parsed them."""
    return json.dumps(json.loads(arguments), ensure_ascii=False, separators=(",", ":"), sort_keys=True)


def _same(message: Any) -> Any:
    return message


def _chat_rewritten(message: Json) -> Json:
    """Compact arguments, content as marked parts, reasoning under its other name."""
    message = json.loads(json.dumps(message))
    for call in message.get("tool_calls", ()):
        call["function"]["arguments"] = again(call["function"]["arguments"])
    text = message["content"]
    message["content"] = [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}] if text else text or ""
    if "reasoning_content" in message:
        message["reasoning"] = message.pop("reasoning_content")
    return {name: value for name, value in message.items() if name != "refusal"}


def _items_rewritten(items: list[Json]) -> list[Json]:
    """Without ids of items and with reasoning in its summary only, as opencode has them; compact arguments, content
    as a string."""
    items = json.loads(json.dumps(items))
    for item in items:
        del item["id"], item["status"]
        if item["type"] == "reasoning":
            del item["content"]
        if item["type"] == "message":
            item["content"] = item["content"][0]["text"]
            del item["type"]
        if item["type" if "type" in item else "role"] == "function_call":
            item["arguments"] = again(item["arguments"])
    return items


def _blocks_marked(blocks: list[Json]) -> Any:
    """Keys in another order and marks, as Claude Code has them; one text alone is a string."""
    if len(blocks) == 1 and blocks[0]["type"] == "text":
        return blocks[0]["text"]
    blocks = json.loads(json.dumps(blocks, sort_keys=True))
    return [{**dict(reversed(block.items())), "cache_control": {"type": "ephemeral"}} for block in blocks]


REWRITTEN: dict[str, tuple[Callable[[Any], Any], ...]] = {
    "chat": (_same, _chat_rewritten),
    "responses": (_same, _items_rewritten),
    "messages": (_same, _blocks_marked),
}


def next_body(wire: str, whole: Json, rewrite: Callable[[Any], Any] = _same) -> Json:
    """The next request of a client, with a result for each call and a word of the user's."""
    body = json.loads(json.dumps(FIRST[wire]))
    user = {"role": "user", "content": "go on"}
    if wire == "chat":
        message = rewrite(whole["choices"][0]["message"])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in message.get("tool_calls", ())]
        body["messages"] += [message, *results, user]
    elif wire == "responses":
        calls = [item["call_id"] for item in whole["output"] if item["type"] == "function_call"]
        results = [{"type": "function_call_output", "call_id": call, "output": "ok"} for call in calls]
        body["input"] = [{"role": "user", "content": "hi"}, *rewrite(whole["output"]), *results, user]
    else:
        calls = [block["id"] for block in whole["content"] if block["type"] == "tool_use"]
        results = [{"type": "tool_result", "tool_use_id": call, "content": "ok"} for call in calls]
        told = {"role": "user", "content": [*results, {"type": "text", "text": "go on"}]}
        body["messages"] += [{"role": "assistant", "content": rewrite(whole["content"])}, told]
    return body
