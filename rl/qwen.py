"""Qwen's chat formats: Qwen2.5, Qwen3 (thinking), Qwen3.5 (calls in tags, prompts that open the thinking)."""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from inference.calls import CLOSE, DECODER, OPEN, FoundCall, ToolCalls, members
from rl.chatml import ChatML, Part, arguments_json
from rl.messages import Message, Tool
from rl.readers import THINK, UNTHINK, Reader, TokenizerLike, TurnReader, hermes, spelled

QWEN25_SYSTEM = "You are Qwen, created by Alibaba Cloud. You are a helpful assistant."
TAGS = (
    "# Tools\n\nYou have access to the following functions:\n\n<tools>",
    "\n</tools>\n\nIf you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
    "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
    "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n</parameter>\n"
    "</function>\n</tool_call>\n\n<IMPORTANT>\nReminder:\n"
    "- Function calls MUST follow the specified format: an inner <function=...></function> block must be nested within "
    "<tool_call></tool_call> XML tags\n"
    "- Required parameters MUST be specified\n"
    "- You may provide optional reasoning for your function call in natural language BEFORE the function call, but NOT after\n"
    "- If there is no function call available, answer the question like normal with your current knowledge and do not tell "
    "the user about function calls\n</IMPORTANT>",
)
"""what Qwen3.5 is told, before and after the list of tools"""
FUNCTION = re.compile(r"\s*<function=([^>\n]+)>(.*)</function>\s*", re.DOTALL)
PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>", re.DOTALL)
PYTHON = {"True": "true", "False": "false", "None": "null"}
"""how Qwen3.5's own template writes values that JSON spells otherwise"""


class Qwen25(ChatML):
    """Qwen2.5's template. Tool results are user turns with <tool_response> blocks, neighbours in one turn."""

    name = "qwen2.5"

    def __init__(self, tokenizer: TokenizerLike, *, default_system: bool = True) -> None:
        super().__init__(tokenizer, system=QWEN25_SYSTEM if default_system else None)

    def _results(self, messages: Sequence[Message]) -> list[int]:
        opening, closing = self._markers["<tool_response>"], self._markers["</tool_response>"]
        turn = self._opening("user")
        for i, message in enumerate(messages):
            turn += ["\n" if i else "", opening, f"\n{self._text(message)}\n", closing]
        return self._turn(turn)


class Qwen3(Qwen25):
    """Qwen3. An assistant's message with thinking, in a history that keeps it, is <think>, the thinking, </think>, the content.

    Args:
        thinking: the model opens <think> itself. False: every assistant turn starts with an empty, unsampled thinking block.
        keep_thinking: the thinking of every turn stays, so that histories extend. False: as in the model's own template,
            that of turns before the last message of the user is left out, so that a history forks at the user's messages.
    """

    name = "qwen3"

    def __init__(self, tokenizer: TokenizerLike, *, thinking: bool = True, keep_thinking: bool = True) -> None:
        super().__init__(tokenizer, default_system=False)
        self.thinking = thinking
        self.keep_thinking = keep_thinking or not thinking
        self._think, self._unthink = (tokenizer.special_id(token) for token in (THINK, UNTHINK))
        self._bare = self._header
        """the header of turns whose thinking is left out"""
        if not thinking:
            self._header = self._encode([*self._opening("assistant"), self._think, "\n\n", self._unthink, "\n\n"])

    @property
    def extends(self) -> bool:
        return self.keep_thinking

    def reader(self, tools: Sequence[Tool] = ()) -> Reader:
        return TurnReader(self.tokenizer, self.stop_ids, hermes, "free" if self.thinking else "none")

    def _rewrites(self, prior_ids: Sequence[int], new_messages: Sequence[Message]) -> bool:
        return not self.keep_thinking and self._think in prior_ids and any(map(asks, new_messages))

    def _turns(self, messages: Sequence[Message]) -> list[int]:
        asked = [i for i, message in enumerate(messages) if asks(message)]
        old = asked[-1] if asked and not self.keep_thinking else 0
        return self._each(messages[:old], self._stripped) + self._each(messages[old:], self._spoken)

    def _stripped(self, message: Message) -> list[int]:
        return self._bare + self._turn([message["content"], *self._calls(message)])

    def _spoken(self, message: Message) -> list[int]:
        return self._header + self._turn([*self._thought(message), message["content"], *self._calls(message)])

    def _thought(self, message: Message) -> list[Part]:
        """What comes before the content."""
        if "thinking" not in message:
            return []
        if not self.thinking:
            raise ValueError(f"thinking: this renderer has it off; remove the field or use {self.name!r} with thinking=True")
        return [self._think, f"\n{message['thinking']}\n", self._unthink, "\n\n"]


class Qwen35(Qwen3):
    """Qwen3.5. The prompt opens the thinking, so that a turn begins inside of it; calls are tags with a parameter each.

    Values that are no text are written as JSON (Qwen3.5's own template writes Python's True). To tell a text that looks like
    JSON from a value, readers need the tools' schemas.
    """

    name = "qwen3.5"

    def __init__(self, tokenizer: TokenizerLike, *, thinking: bool = True, keep_thinking: bool = True) -> None:
        super().__init__(tokenizer, thinking=thinking, keep_thinking=keep_thinking)
        if thinking:
            self._header = self._encode([*self._opening("assistant"), self._think, "\n"])

    def reader(self, tools: Sequence[Tool] = ()) -> Reader:
        def calls(looks: Mapping[str, str]) -> ToolCalls:
            return ToolCalls(lambda body: tags_call(spelled(body), tools), looks[OPEN], looks[CLOSE], ("\n\n", "\n"))

        return TurnReader(self.tokenizer, self.stop_ids, calls, "open" if self.thinking else "none")

    def _system(self, system: str | None, tools: Sequence[Tool]) -> list[int]:
        if not tools:
            return super()._system(system, tools)
        said = ["\n\n", system] if system else []
        return self._turn([*self._opening("system"), *self._manual(TAGS, tools), *said])

    def _text(self, message: Message) -> str:
        return message["content"].strip()

    def _thought(self, message: Message) -> list[Part]:
        if not self.thinking:
            return super()._thought(message)
        return [f"{message.get('thinking', '')}\n", self._unthink, "\n\n"]

    def _calls(self, message: Message) -> list[Part]:
        parts: list[Part] = []
        for i, call in enumerate(message.get("tool_calls", ())):
            before = "\n" if i else "\n\n" if message["content"] else ""
            parts += [before, self._markers[OPEN], tags_text(call["name"], arguments_json(call)), self._markers[CLOSE]]
        return parts


def asks(message: Message) -> bool:
    """Whether a message is the user's own, and not a tool's result in the user's name."""
    text = message["content"].strip()
    return message["role"] == "user" and not (text.startswith("<tool_response>") and text.endswith("</tool_response>"))


def tags_text(name: str, arguments: str) -> str:
    """A call in tags. ValueError when its arguments are no JSON object: there is no form for them."""
    try:
        given = members(arguments)
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"tool_calls: the arguments of {name!r} are no JSON object ({error}); write the call as text"
        ) from error
    values = ((key, value if isinstance(value, str) else text) for key, (value, text) in given.items())
    inner = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in values)
    return f"\n<function={name}>\n{inner}</function>\n"


def tags_call(body: str, tools: Sequence[Tool]) -> FoundCall | None:
    """The call in `<function=NAME><parameter=KEY>VALUE</parameter>...</function>`; None where it is none."""
    function = FUNCTION.fullmatch(body)
    if function is None:
        return None
    name, inner = function.groups()
    schema = next((tool["parameters"] for tool in tools if tool["name"] == name), {})
    given: dict[str, str] = {}
    at = 0
    while parameter := PARAMETER.match(inner, at):
        key, value = parameter.groups()
        given[key] = _value(value.removeprefix("\n").removesuffix("\n"), schema, key)
        at = parameter.end()
    if inner[at:].strip():
        return None
    return FoundCall(name, "{" + ", ".join(f"{json.dumps(key, ensure_ascii=False)}: {given[key]}" for key in given) + "}")


def _value(text: str, schema: Mapping[str, Any], key: str) -> str:
    """A parameter's value as JSON text, as it is written where it is JSON and not declared to be a text."""
    declared = schema.get("properties", {})
    about = declared.get(key, {}) if isinstance(declared, Mapping) else {}
    kind = about.get("type") if isinstance(about, Mapping) else None
    if kind != "string":
        try:
            if DECODER.raw_decode(text)[1] == len(text):
                return text
        except (ValueError, RecursionError):
            if kind is not None and text in PYTHON:
                return PYTHON[text]
    return json.dumps(text, ensure_ascii=False)
