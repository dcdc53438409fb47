"""Answers as the unmodified openai client reads them: whole, as a stream, and through its strict stream helpers."""

from typing import Any

import openai
import pytest
from openai import OpenAI

from rl.messages import Piece, meaning, message_of
from rl.wires import PromptTooLong, Turn
from tests.wire_clients import NAME
from tests.wire_server import WireServer, serving

FIRST = [
    Piece("thinking", "let me look\n"),
    Piece("text", "I look: "),
    Piece("call", '{"x": false, "s": "\\"é\\""}', "look"),
    Piece("call", "{}", "agents__spawn"),
]
LAST = [Piece("text", "done, ✓\n")]
SCHEMA: Any = {"type": "object", "properties": {"x": {"type": "boolean"}}}
HI: Any = {"role": "user", "content": "hi"}


def script(turn: Turn) -> list[Piece]:
    return LAST if turn.messages[-1]["role"] == "tool" else FIRST


def client_of(server: WireServer) -> OpenAI:
    return OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=20)


def check_turns(server: WireServer) -> None:
    """The second request has the first answer in it, with the record's name and the calls' results."""
    first, second = server.turns
    assert second.messages[:1] == first.messages
    assert meaning(second.messages[1]) == meaning(message_of(FIRST, NAME)) and second.messages[1].get("id") == NAME
    results = [(message["role"], message["content"], message.get("name")) for message in second.messages[2:]]
    assert results == [("tool", "ok", "look"), ("tool", "ok", "agents__spawn")]


@pytest.mark.parametrize("how", ["whole", "stream", "helper"])
def test_chat(how: str) -> None:
    tools: Any = [{"type": "function", "function": {"name": name, "parameters": SCHEMA}} for name in ("look", "agents__spawn")]

    def ask(client: OpenAI, messages: Any) -> Any:
        same: Any = {"model": "m", "messages": messages, "tools": tools}
        if how == "whole":
            return client.chat.completions.create(**same).choices[0].message.model_dump(exclude_none=True)
        if how == "helper":
            with client.chat.completions.stream(**same, stream_options={"include_usage": True}) as stream:
                done = stream.get_final_completion()
            assert done.usage is not None and done.usage.total_tokens == 12
            message = done.choices[0].message.model_dump(exclude_none=True)
            for call in message.get("tool_calls", ()):
                assert call["function"].pop("parsed_arguments", {}) is not None
            return message
        text, thinking, calls, reason = "", "", [], None
        for chunk in client.chat.completions.create(**same, stream=True):
            delta = chunk.choices[0].delta
            text, thinking = text + (delta.content or ""), thinking + getattr(delta, "reasoning_content", "")
            for call in delta.tool_calls or ():
                if call.id:
                    calls.append(call.model_dump(exclude={"index"}))
                else:
                    assert call.function is not None
                    calls[call.index]["function"]["arguments"] += call.function.arguments
            reason = chunk.choices[0].finish_reason or reason
        assert reason == ("tool_calls" if calls else "stop")
        return {"role": "assistant", "content": text, "reasoning_content": thinking, "tool_calls": calls or None}

    with serving(script) as server, client_of(server) as client:
        answer = ask(client, [HI])
        results = [{"role": "tool", "tool_call_id": call["id"], "content": "ok"} for call in answer["tool_calls"]]
        assert ask(client, [HI, answer, *results])["content"] == LAST[0].text
        check_turns(server)


@pytest.mark.parametrize("how", ["whole", "stream", "helper"])
def test_responses(how: str) -> None:
    inner = {"type": "function", "name": "spawn", "parameters": SCHEMA}
    tools: Any = [
        {"type": "function", "name": "look", "parameters": SCHEMA},
        {"type": "namespace", "name": "agents", "tools": [inner]},
        {"type": "web_search"},
    ]

    def ask(client: OpenAI, history: Any) -> Any:
        same: Any = {"model": "m", "input": history, "tools": tools, "include": ["reasoning.encrypted_content"]}
        same["reasoning"] = {"summary": "auto"}
        if how == "whole":
            return client.responses.create(**same)
        if how == "helper":
            with client.responses.stream(**same) as stream:
                return stream.get_final_response()
        *_, last = client.responses.create(**same, stream=True)
        assert last.type == "response.completed"
        return last.response

    with serving(script) as server, client_of(server) as client:
        answer = ask(client, [HI])
        items = [item.model_dump(exclude_none=True, exclude={"parsed_arguments"}) for item in answer.output]
        assert [item["type"] for item in items] == ["reasoning", "message", "function_call", "function_call"]
        assert (items[0]["encrypted_content"], items[3]["namespace"], items[3]["name"]) == (NAME, "agents", "spawn")
        for part in items[1]["content"]:
            part.pop("parsed", None)
        results = [{"type": "function_call_output", "call_id": item["call_id"], "output": "ok"} for item in items[2:]]
        last = ask(client, [HI, *items, *results])
        assert last.output_text == LAST[0].text and last.usage.total_tokens == 12
        check_turns(server)


def test_cut_answers() -> None:
    with serving(script, cut=True) as server, client_of(server) as client:
        done = client.chat.completions.create(model="m", messages=[HI])
        assert done.choices[0].finish_reason == "length"
        with client.responses.stream(model="m", input="hi") as stream:
            kinds = [event.type for event in stream]
        assert kinds[-1] == "response.incomplete"


def overflows(turn: Turn) -> list[Piece]:
    raise PromptTooLong(300, 256)


def test_a_prompt_that_does_not_fit() -> None:
    with serving(overflows) as server, client_of(server) as client:
        for ask in (
            lambda: client.chat.completions.create(model="m", messages=[HI]),
            lambda: client.responses.create(model="m", input="hi"),
        ):
            with pytest.raises(openai.BadRequestError) as caught:
                ask()
            assert caught.value.code == "context_length_exceeded"
