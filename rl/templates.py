"""Any model's chat format, by its own Jinja template: the fallback where there is no renderer for the format."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from inference.calls import OPEN
from inference.chat import ChatTemplate
from models.tokenizer import Tokenizer
from rl.chatml import tool_json
from rl.messages import Message, Tool, ToolCall
from rl.readers import THINK, UNTHINK, NoCalls, Reader, TurnReader, hermes, read

HELLO: Message = {"role": "user", "content": "Hello"}
REPLY = "Yes"
THOUGHT = "Well"
NAME = "look"
CALLING: Message = {"role": "assistant", "content": "", "tool_calls": [{"id": "0", "name": NAME, "arguments": "{}"}]}
THINKING: Message = {"role": "assistant", "content": REPLY, "thinking": THOUGHT}


class Template:
    """Renders by the tokenizer's chat template; reads thinking in <think> and calls in the Hermes format.

    Templates are programs: what one does to old turns shows only when it runs. `bridge` runs it on small conversations of a
    user, an assistant and the new messages, the assistant with and without thinking. Where each of them begins with
    what was before, and goes on in the same way behind the assistant's turn, this is what follows a sampled turn too; elsewhere
    it is None.

    Args:
        variables: more of the template's variables, such as `enable_thinking`.

    Raises:
        ValueError: the tokenizer has no chat template or no token that ends a turn.
    """

    name = "template"
    version = 1

    def __init__(self, tokenizer: Tokenizer, *, variables: Mapping[str, Any] | None = None) -> None:
        self.tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, markup=False)
        self._variables = dict(variables or {})
        if unknown := sorted(self._variables.keys() - self._template.settable):
            raise ValueError(f"variables: the template has no {unknown[0]!r}; it has {sorted(self._template.settable)}")
        if not tokenizer.eos_ids:
            raise ValueError("template: the tokenizer names no token that ends a turn; add eos_token to tokenizer_config.json")
        self.stop_ids = tuple(tokenizer.eos_ids)
        prompt = tokenizer.decode(self.render([HELLO]))
        self._opens = prompt.rfind(THINK) > prompt.rfind(UNTHINK)
        self._thinks, self._calls = self._has(THINKING, THOUGHT), self._has(CALLING, NAME)
        """whether the template has a place for thinking, and for calls; without one, they are content"""
        thought = tokenizer.encode(THINK, allow_special=True) if self._opens or self._thinks else []
        self.extends = self.bridge([*thought, self.stop_ids[0]], [HELLO]) is not None

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = True) -> list[int]:
        """See Renderer."""
        if not messages:
            raise ValueError("messages: nothing to render; give at least one message")
        return list(
            self._template.render(
                [sent(message) for message in messages],
                [tool_json(tool) for tool in tools],
                add_generation_prompt=add_generation_prompt,
                **self._variables,
            )
        )

    def reader(self, tools: Sequence[Tool] = ()) -> Reader:
        calls = hermes if self._calls else NoCalls
        return TurnReader(self.tokenizer, self.stop_ids, calls, "open" if self._opens else "free" if self._thinks else "none")

    def parse(self, ids: Sequence[int], name: str = "", tools: Sequence[Tool] = ()) -> Message:
        return read(self.reader(tools), ids, name)

    def bridge(self, prior_ids: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int] | None:
        """See Renderer."""
        if any(message["role"] == "assistant" for message in new_messages):
            raise ValueError("new_messages: an assistant's turn is sampled, not bridged; pass what follows it only")
        try:
            found = {self._behind(probe, new_messages, tools) for probe in self._probes(prior_ids, new_messages)}
        except ValueError:  # the template refuses one of the conversations
            return None
        behind = found.pop()
        if found or behind is None:
            return None
        end, *rest = behind
        return rest if prior_ids and prior_ids[-1] in self.stop_ids else [end, *rest]

    def _has(self, said: Message, what: str) -> bool:
        """Whether the template writes a part of an assistant's message."""
        try:
            return what in self.tokenizer.decode(self.render([HELLO, said], add_generation_prompt=False))
        except ValueError:  # it refuses such messages
            return False

    def _probes(self, prior_ids: Sequence[int], new_messages: Sequence[Message]) -> list[Message]:
        """Turns of the assistant that differ in what templates treat apart, as far as there was such a thing before."""
        probes: list[Message] = [{"role": "assistant", "content": REPLY}]
        before = self.tokenizer.decode(prior_ids)
        if THINK in before or UNTHINK in before:
            inside: Message = {"role": "assistant", "content": f"{THINK}\n{THOUGHT}\n{UNTHINK}\n\n{REPLY}"}
            probes.append(THINKING if self._opens or self._thinks else inside)
        answered = [message for message in new_messages if message["role"] == "tool"]
        if answered and self._calls and OPEN in before:
            calls: list[ToolCall] = [
                {"id": message.get("tool_call_id", "0"), "name": message.get("name", NAME), "arguments": "{}"}
                for message in answered
            ]
            probes = [{**probe, "tool_calls": calls} for probe in probes]
        return probes

    def _behind(self, said: Message, new_messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[int, ...] | None:
        """The end of the turn and what follows it; None where the turn or what is before it does not stay as it was."""
        before = self.render([HELLO], tools)
        whole = self.render([HELLO, said, *new_messages], tools)
        if whole[: len(before)] != before:
            return None
        rest = whole[len(before) :]
        end = next((i for i, token in enumerate(rest) if token in self.stop_ids), None)
        if end is None:
            return None
        text = self.tokenizer.decode(rest[:end])
        parts = [said.get("thinking", ""), *(call["name"] for call in said.get("tool_calls", ()))]
        kept = text == said["content"] if not any(parts) else all(part in text for part in [said["content"], *parts])
        return tuple(rest[end:]) if kept else None


def sent(message: Message) -> dict[str, Any]:
    """A message as templates know it."""
    sent: dict[str, Any] = {key: message.get(key) for key in ("role", "content", "name", "tool_call_id") if key in message}
    if "thinking" in message:
        sent["reasoning_content"] = message["thinking"]
    if "tool_calls" in message:
        sent["tool_calls"] = [
            {"id": call["id"], "function": {"name": call["name"], "arguments": _given(call["arguments"])}}
            for call in message["tool_calls"]
        ]
    return sent


def _given(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except (ValueError, RecursionError):
        return arguments
