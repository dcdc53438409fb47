"""Two turns, the first with calls, through an unmodified SDK: SDK:DIALECT[:stream] URL. Run by the SDKs' own environment.

Prints one JSON object: the texts, and what was said of usage at each request, as [prompt, sampled].
"""

import json
import sys
from collections.abc import Callable
from typing import Any

SCHEMA = {"type": "object", "properties": {"at": {"type": "number"}}}
PROMPTS = ("please look around", "and now?")
Turn = tuple[str, list[str], list[int]]
"""text, ids of calls, usage"""


class Chat:
    """Chat Completions, as the openai SDK or litellm sends them."""

    tools = ({"type": "function", "function": {"name": "look", "description": "", "parameters": SCHEMA}},)

    def __init__(self, ask: Callable[..., Any]) -> None:
        self.ask = ask
        self.messages: list[Any] = []

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def results(self, calls: list[str]) -> None:
        self.messages += [{"role": "tool", "tool_call_id": call, "content": f"ok {i}"} for i, call in enumerate(calls, 1)]

    def turn(self) -> Turn:
        done = self.ask(messages=self.messages, tools=[*self.tools])
        message = done.choices[0].message
        self.messages.append(message.model_dump(exclude_none=True))
        for call in self.messages[-1].get("tool_calls", ()):
            call["function"].pop("parsed_arguments", None)
        usage = [done.usage.prompt_tokens, done.usage.completion_tokens]
        return message.content, [call.id for call in message.tool_calls or ()], usage


class Responses:
    def __init__(self, ask: Callable[..., Any]) -> None:
        self.ask = ask
        self.items: list[Any] = []

    def user(self, text: str) -> None:
        self.items.append({"role": "user", "content": text})

    def results(self, calls: list[str]) -> None:
        self.items += [
            {"type": "function_call_output", "call_id": call, "output": f"ok {i}"} for i, call in enumerate(calls, 1)
        ]

    def turn(self) -> Turn:
        tools = [{"type": "function", "name": "look", "description": "", "parameters": SCHEMA, "strict": False}]
        done = self.ask(input=self.items, tools=tools)
        for item in done.output:
            self.items.append(item.model_dump(exclude_none=True, exclude={"parsed_arguments"}))
            for part in self.items[-1].get("content", ()):
                part.pop("parsed", None)
        calls = [item.call_id for item in done.output if item.type == "function_call"]
        return done.output_text, calls, [done.usage.input_tokens, done.usage.output_tokens]


class Messages:
    def __init__(self, ask: Callable[..., Any]) -> None:
        self.ask = ask
        self.messages: list[Any] = []

    def user(self, text: str) -> None:
        self.messages.append({"role": "user", "content": text})

    def results(self, calls: list[str]) -> None:
        content = [{"type": "tool_result", "tool_use_id": call, "content": f"ok {i}"} for i, call in enumerate(calls, 1)]
        self.messages.append({"role": "user", "content": content})

    def turn(self) -> Turn:
        tools = [{"name": "look", "description": "", "input_schema": SCHEMA}]
        done = self.ask(messages=self.messages, tools=tools)
        self.messages.append({"role": "assistant", "content": [block.to_dict() for block in done.content]})
        text = "".join(block.text for block in done.content if block.type == "text")
        usage = [done.usage.input_tokens + done.usage.cache_read_input_tokens, done.usage.output_tokens]
        return text, [block.id for block in done.content if block.type == "tool_use"], usage


def make(sdk: str, dialect: str, stream: bool, url: str) -> Any:
    if sdk == "litellm":
        import litellm

        base = url if dialect == "anthropic" else f"{url}/v1"
        return Chat(lambda **what: litellm.completion(model=f"{dialect}/tiny", api_base=base, api_key="none", **what))
    if sdk == "anthropic":
        from anthropic import Anthropic

        client = Anthropic(base_url=url, api_key="none", max_retries=0)
        api: Any = client.messages
        return Messages(lambda **what: whole(api, stream, "get_final_message", max_tokens=1000, **what))
    from openai import OpenAI

    openai = OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    if dialect == "responses":
        return Responses(lambda **what: whole(openai.responses, stream, "get_final_response", **what))
    more = {"stream_options": {"include_usage": True}} if stream else {}
    return Chat(lambda **what: whole(openai.chat.completions, stream, "get_final_completion", **more, **what))


def whole(api: Any, stream: bool, final: str, **what: Any) -> Any:
    """The answer, at once or by the SDK's own helper for streams."""
    if not stream:
        return api.create(model="tiny", **what)
    with api.stream(model="tiny", **what) as answer:
        return getattr(answer, final)()


def main() -> None:
    sdk, dialect, *more = sys.argv[1].split(":")
    conversation = make(sdk, dialect, more == ["stream"], sys.argv[2])
    texts, usages = [], []
    for prompt in PROMPTS:
        conversation.user(prompt)
        calls = None
        while calls or calls is None:
            text, calls, usage = conversation.turn()
            texts.append(text)
            usages.append(usage)
            if calls:
                conversation.results(calls)
    print(json.dumps({"texts": texts, "usage": usages}))


if __name__ == "__main__":
    main()
