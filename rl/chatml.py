"""Chat formats of turns: what they have in common, ChatML and SmolLM2.

Text of messages is encoded with control tokens off: "<|im_end|>" typed by a user is ten ordinary characters, and so it is in
what tools answer, in tools' schemas and in an assistant's own text. Only the renderer places control ids. An assistant's text
is encoded apart from its header, as sampling does; the text of other turns together with its header, as the models' own
templates do.
"""

import json
import re
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby

from inference.calls import CLOSE, OPEN
from rl.messages import Message, Tool, ToolCall
from rl.readers import MARKERS, Reader, TokenizerLike, TurnReader, hermes, marker, read

ROLES = ("system", "user", "assistant", "tool")
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"
HERMES = (
    "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
    "You are provided with function signatures within <tools></tools> XML tags:\n<tools>",
    "\n</tools>\n\nFor each function call, return a json object with function name and arguments within "
    '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n</tool_call>',
)
"""what Qwen's models are told, before and after the list of tools"""

Part = int | str
"""of what is to be encoded: a control token, or ordinary text"""


def tool_json(tool: Tool) -> dict[str, object]:
    """A tool as models read it: these fields in this order, whatever form a client has sent."""
    about = {"name": tool["name"], "description": tool["description"], "parameters": tool["parameters"]}
    return {"type": "function", "function": about}


def arguments_json(call: ToolCall) -> str:
    """Arguments as `tojson` writes them; text that is no JSON as it stands."""
    try:
        return json.dumps(json.loads(call["arguments"]), ensure_ascii=False, allow_nan=False)
    except (ValueError, RecursionError):
        return call["arguments"]


class ChatML:
    """<|im_start|>role, newline, text<|im_end|>, newline. `system` opens conversations that have no system message.

    Tools are listed in the system turn and called as in the Hermes format, which Qwen's models know.
    """

    name = "chatml"
    version = 1
    start, end, separator = "<|im_start|>", "<|im_end|>", "\n"

    def __init__(self, tokenizer: TokenizerLike, *, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.system = system
        self._start = tokenizer.special_id(self.start)
        self._end = tokenizer.special_id(self.end)
        self._markers = {text: marker(tokenizer, text) for text in (*MARKERS, "<tool_response>", "</tool_response>")}
        self._separator = self._encode([self.separator])
        self._header = self._encode(self._opening("assistant"))
        """of a turn that is sampled"""
        self._ends = frozenset({self._end})
        """what a turn may have been ended with, so that it needs no end"""
        self.stop_ids = tuple(dict.fromkeys((self._end, *tokenizer.eos_ids)))

    @property
    def extends(self) -> bool:
        return True

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = True) -> list[int]:
        """ids of the whole conversation. ValueError when there is no message, an unknown role or no form for something."""
        if not messages:
            raise ValueError("messages: nothing to render; give at least one message")
        given = messages[0]["role"] == "system"
        system, rest = (self._text(messages[0]), messages[1:]) if given else (self.system, messages)
        ids = self._system(system, tools) + self._turns(rest)
        return ids + (self._header if add_generation_prompt else [])

    def bridge(self, prior_ids: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int] | None:
        """See Renderer. Closes a turn that was cut; ValueError when an assistant message is among the new ones."""
        if any(message["role"] == "assistant" for message in new_messages):
            raise ValueError("new_messages: an assistant's turn is sampled, not bridged; pass what follows it only")
        if self._rewrites(prior_ids, new_messages):
            return None
        closing = [] if prior_ids and prior_ids[-1] in self._ends else [self._end]
        return closing + self._separator + self._turns(new_messages) + self._header

    def reader(self, tools: Sequence[Tool] = ()) -> Reader:
        return TurnReader(self.tokenizer, self.stop_ids, hermes)

    def parse(self, ids: Sequence[int], name: str = "", tools: Sequence[Tool] = ()) -> Message:
        return read(self.reader(tools), ids, name)

    # What formats differ in.

    def _opening(self, role: str) -> list[Part]:
        return [self._start, f"{role}\n"]

    def _system(self, system: str | None, tools: Sequence[Tool]) -> list[int]:
        """The conversation's beginning."""
        if not tools:
            return [] if system is None else self._turn([*self._opening("system"), system])
        said = [] if system is None else [system, "\n\n"]
        return self._turn([*self._opening("system"), *said, *self._manual(HERMES, tools)])

    def _manual(self, about: tuple[str, str], tools: Sequence[Tool]) -> list[Part]:
        """What the model is told of tools, and the list of them."""
        listed = [f"\n{json.dumps(tool_json(tool), ensure_ascii=False)}" for tool in tools]
        return [*self._own(about[0]), *listed, *self._own(about[1])]

    def _rewrites(self, prior_ids: Sequence[int], new_messages: Sequence[Message]) -> bool:
        """Whether what comes before the new messages is rendered in another way once they are there."""
        return False

    def _turns(self, messages: Sequence[Message]) -> list[int]:
        return self._each(messages, self._spoken)

    def _each(self, messages: Sequence[Message], spoken: Callable[[Message], list[int]]) -> list[int]:
        """Turns, the assistant's by `spoken`."""
        ids: list[int] = []
        for role, group in groupby(messages, key=lambda message: message["role"]):
            run = list(group)
            if role == "assistant":
                ids += [i for message in run for i in spoken(message)]
            elif role == "tool":
                ids += self._results(run)
            elif role in ROLES:
                ids += [i for message in run for i in self._turn([*self._opening(role), self._text(message)])]
            else:
                raise ValueError(f"messages: unknown role {role!r}; use one of {ROLES}")
        return ids

    def _text(self, message: Message) -> str:
        """What a message of anybody but the assistant says."""
        return message["content"]

    def _spoken(self, message: Message) -> list[int]:
        """An assistant's turn: the header, what sampling this message would have given, the separator."""
        if "thinking" in message:
            raise ValueError(f"thinking: {self.name!r} has no form for it; put it in content, or use Qwen3")
        return self._header + self._turn([message["content"], *self._calls(message)])

    def _calls(self, message: Message) -> list[Part]:
        parts: list[Part] = []
        for i, call in enumerate(message.get("tool_calls", ())):
            name = json.dumps(call["name"], ensure_ascii=False)
            written = f'\n{{"name": {name}, "arguments": {arguments_json(call)}}}\n'
            parts += ["\n" if i or message["content"] else "", self._markers[OPEN], written, self._markers[CLOSE]]
        return parts

    def _results(self, messages: Sequence[Message]) -> list[int]:
        """What tools answered, in neighbouring messages."""
        return [i for message in messages for i in self._turn([*self._opening("tool"), self._text(message)])]

    # What they share.

    def _turn(self, parts: Iterable[Part]) -> list[int]:
        return [*self._encode(parts), self._end, *self._separator]

    def _encode(self, parts: Iterable[Part]) -> list[int]:
        """Texts that stand side by side are encoded as one, so that it does not matter how they were put together."""
        ids: list[int] = []
        text = ""
        for part in parts:
            if isinstance(part, str):
                text += part
            else:
                ids += [*self.tokenizer.encode(text), part]
                text = ""
        return ids + self.tokenizer.encode(text)

    def _own(self, text: str) -> list[Part]:
        """Text of the format's own: the markers in it are control tokens where the tokenizer has such."""
        return [self._markers.get(part, part) for part in re.split(f"({'|'.join(map(re.escape, self._markers))})", text)]


class SmolLM2(ChatML):
    """SmolLM2's template: ChatML with its own system message, which `default_system=False` leaves out."""

    name = "smollm2"

    def __init__(self, tokenizer: TokenizerLike, *, default_system: bool = True) -> None:
        super().__init__(tokenizer, system=SMOLLM2_SYSTEM if default_system else None)
