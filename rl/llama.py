"""Llama 3's chat format (3.1 and 3.2)."""

import json
from collections.abc import Mapping, Sequence

from inference.calls import FoundCall, hermes_call
from rl.chatml import ChatML, Part, arguments_json, tool_json
from rl.messages import Message, Tool
from rl.readers import Reader, TokenizerLike, TurnReader, marker, spelled

CALLS = (
    "Given the following functions, please respond with a JSON for a function call with its proper arguments that best "
    'answers the given prompt.\n\nRespond in the format {"name": function name, "parameters": dictionary of argument name and '
    "its value}.Do not use variables.\n\n"
)
"""what the model is told of tools, before their list"""


class Llama3(ChatML):
    """Llama 3: <|start_header_id|>role<|end_header_id|>, two newlines, text<|eot_id|>. Texts lose the white space around them.

    Tools are listed in front of the first message, a user's; a turn that is nothing but {"name": ..., "parameters": {...}} is
    a call, so a turn has one call or a text; results have the role ipython.

    Args:
        date: of the day, as the system turn has it; the template's own fallback, so that renders do not change overnight.
    """

    name = "llama3"
    start, end, separator = "<|start_header_id|>", "<|eot_id|>", ""

    def __init__(self, tokenizer: TokenizerLike, *, date: str = "26 Jul 2024") -> None:
        self.date = date
        self._begin, self._close = (tokenizer.special_id(token) for token in ("<|begin_of_text|>", "<|end_header_id|>"))
        super().__init__(tokenizer, system="")
        eom = marker(tokenizer, "<|eom_id|>")
        if isinstance(eom, int):
            self._ends |= {eom}
            self.stop_ids = (*self.stop_ids, *({eom} - {*self.stop_ids}))

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = True) -> list[int]:
        """See ChatML; ValueError also when there are tools, but the conversation does not begin with the user."""
        if tools:
            first = 1 if messages and messages[0]["role"] == "system" else 0
            if len(messages) <= first or messages[first]["role"] != "user":
                raise ValueError(
                    f"tools: {self.name!r} lists them in the user's first message; begin with one, or leave them out"
                )
            listed = "".join(json.dumps(tool_json(tool), ensure_ascii=False, indent=4) + "\n\n" for tool in tools)
            asked: Message = {**messages[first], "content": CALLS + listed + self._text(messages[first])}
            messages = [*messages[:first], asked, *messages[first + 1 :]]
        return super().render(messages, tools, add_generation_prompt)

    def reader(self, tools: Sequence[Tool] = ()) -> Reader:
        return TurnReader(self.tokenizer, self.stop_ids, WholeCall)

    def _opening(self, role: str) -> list[Part]:
        return [self._start, role, self._close, "\n\n"]

    def _system(self, system: str | None, tools: Sequence[Tool]) -> list[int]:
        place = "Environment: ipython\n" if tools else ""
        day = f"{place}Cutting Knowledge Date: December 2023\nToday Date: {self.date}\n\n{system}"
        return [self._begin, *self._turn([*self._opening("system"), day])]

    def _text(self, message: Message) -> str:
        return message["content"].strip()

    def _calls(self, message: Message) -> list[Part]:
        calls = message.get("tool_calls", [])
        if not calls:
            return []
        if len(calls) > 1 or message["content"]:
            raise ValueError(f"tool_calls: {self.name!r} has one call in a turn, and no text beside it; write the rest as text")
        name = json.dumps(calls[0]["name"], ensure_ascii=False)
        return [f'{{"name": {name}, "parameters": {arguments_json(calls[0])}}}']

    def _results(self, messages: Sequence[Message]) -> list[int]:
        texts = (json.dumps(message["content"], ensure_ascii=False) for message in messages)  # as `tojson` in the template does
        return [i for text in texts for i in self._turn([*self._opening("ipython"), text])]


class WholeCall:
    """Finds a call that is the whole of a turn. A turn that begins with a brace is held back until its end."""

    def __init__(self, looks: Mapping[str, str]) -> None:
        self._held = ""
        self._text = False

    def parts(self, text: str) -> list[str | FoundCall]:
        """What is certain to be no call."""
        held, self._held = self._held + text, ""
        begins = held.lstrip()
        if self._text or (begins and not begins.startswith("{")):
            self._text = True
            return [held]
        self._held = held
        return []

    def flush(self) -> str | FoundCall:
        """At the end of the turn: the call, or what was held back."""
        held, self._held = spelled(self._held), ""
        return hermes_call(held, "parameters") or held
