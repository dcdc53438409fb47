"""Renderers: messages to token ids and back, so that a conversation only ever grows, token for token.

The law, for a sampled turn `ids` (with its end token, or cut without it) and new messages m2 (or none):

    render(m1 + [assistant] + m2) == render(m1) + ids + bridge(render(m1) + ids, m2)

whenever the sampled ids are the assistant text's own encoding; when they are not (another split of the same string),
the right-hand side is the truth and nothing is encoded again. Turn separators are appended exactly once, never sampled.

Text of messages is encoded with control tokens off: "<|im_end|>" typed by a user is ten ordinary characters. Only the
renderer places control ids. An assistant's text is encoded apart from its header, as sampling does; the text of other
turns together with its header, as the models' own templates do.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Protocol

from rl.messages import Message

ROLES = ("system", "user", "assistant", "tool")
SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


class TokenizerLike(Protocol):
    """What renderers need of a tokenizer (models.tokenizer has two)."""

    @property
    def eos_ids(self) -> tuple[int, ...]: ...

    def encode(self, text: str, allow_special: bool = False) -> list[int]: ...

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str: ...

    def special_id(self, token: str) -> int: ...


class Renderer(Protocol):
    """Messages <-> ids for one chat format. `name` and `version` go into run.json."""

    @property
    def name(self) -> str: ...

    @property
    def version(self) -> int: ...

    @property
    def extends(self) -> bool:
        """Whether the law above holds; otherwise each turn is rendered anew and its record forks."""
        ...

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """Any of these, sampled, ends the assistant's turn."""
        ...

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]: ...

    def parse(self, ids: Sequence[int]) -> Message:
        """The assistant message in sampled ids: up to the first stop id, or whole when the turn was cut."""
        ...

    def bridge(self, prior_ids: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        """What to append to `prior_ids` (which end in a sampled turn): separators, new messages, the next header."""
        ...


class ChatML:
    """<|im_start|>role, newline, text<|im_end|>, newline. `system` opens conversations that have no system message."""

    name = "chatml"
    version = 1
    extends = True

    def __init__(self, tokenizer: TokenizerLike, *, system: str | None = None) -> None:
        self.tokenizer = tokenizer
        self.system = system
        self._start = tokenizer.special_id("<|im_start|>")
        self._end = tokenizer.special_id("<|im_end|>")
        self._newline = tokenizer.encode("\n")
        self._header = [self._start, *tokenizer.encode("assistant\n")]
        self.stop_ids = tuple(dict.fromkeys((self._end, *tokenizer.eos_ids)))

    def render(self, messages: Sequence[Message], add_generation_prompt: bool = True) -> list[int]:
        """ids of the whole conversation. ValueError when there is no message or an unknown role."""
        if not messages:
            raise ValueError("messages: nothing to render; give at least one message")
        if self.system is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system}, *messages]
        return self._turns(messages) + (self._header if add_generation_prompt else [])

    def bridge(self, prior_ids: Sequence[int], new_messages: Sequence[Message]) -> list[int]:
        """See Renderer. Closes a turn that was cut; ValueError when an assistant message is among the new ones."""
        if any(message["role"] == "assistant" for message in new_messages):
            raise ValueError("new_messages: an assistant's turn is sampled, not bridged; pass what follows it only")
        closing = [] if prior_ids and prior_ids[-1] == self._end else [self._end]
        return closing + self._newline + self._turns(new_messages) + self._header

    def parse(self, ids: Sequence[int]) -> Message:
        return {"role": "assistant", "content": self.tokenizer.decode(self._before_stop(ids))}

    def _before_stop(self, ids: Sequence[int]) -> list[int]:
        stop = next((i for i, token in enumerate(ids) if token in self.stop_ids), len(ids))
        return list(ids[:stop])

    def _turns(self, messages: Sequence[Message]) -> list[int]:
        ids: list[int] = []
        for role, group in groupby(messages, key=lambda message: message["role"]):
            if role not in ROLES:
                raise ValueError(f"messages: unknown role {role!r}; use one of {ROLES}")
            for opened in self._opened(role, list(group)):
                ids += [*opened, self._end, *self._newline]
        return ids

    def _opened(self, role: str, messages: Sequence[Message]) -> list[list[int]]:
        """ids of each turn of a run of messages of one role, without the turn's end."""
        if role == "assistant":
            return [self._header + self._assistant(message) for message in messages]
        return [[self._start, *self.tokenizer.encode(f"{role}\n{message['content']}")] for message in messages]

    def _assistant(self, message: Message) -> list[int]:
        """ids that sampling this message would have given, without the end token."""
        if "thinking" in message:
            raise ValueError(f"thinking: {self.name!r} has no form for it; put it in content, or use Qwen3")
        return self.tokenizer.encode(message["content"])


class SmolLM2(ChatML):
    """SmolLM2's template: ChatML with its own system message, which `default_system=False` leaves out."""

    name = "smollm2"

    def __init__(self, tokenizer: TokenizerLike, *, default_system: bool = True) -> None:
        super().__init__(tokenizer, system=SMOLLM2_SYSTEM if default_system else None)


class Qwen3(ChatML):
    """Qwen3 with the thinking of every turn kept, so that the history extends (its own template strips old thinking).

    thinking=True: the model opens <think> itself. thinking=False: every assistant turn starts with an empty, unsampled
    thinking block. Tool results are user turns with <tool_response> blocks, neighbours in one turn.
    """

    name = "qwen3"

    def __init__(self, tokenizer: TokenizerLike, *, thinking: bool = True) -> None:
        super().__init__(tokenizer)
        self.thinking = thinking
        self._think, self._unthink = (tokenizer.special_id(token) for token in ("<think>", "</think>"))
        self._blank = tokenizer.encode("\n\n")
        if not thinking:
            self._header = [*self._header, self._think, *self._blank, self._unthink, *self._blank]

    def parse(self, ids: Sequence[int]) -> Message:
        ids = self._before_stop(ids)
        if not self.thinking or (self._unthink not in ids and ids[:1] != [self._think]):
            return {"role": "assistant", "content": self.tokenizer.decode(ids)}
        begin = 1 if ids[:1] == [self._think] else 0
        end = ids.index(self._unthink) if self._unthink in ids else len(ids)
        thinking = self.tokenizer.decode(ids[begin:end]).removeprefix("\n").removesuffix("\n")
        content = self.tokenizer.decode(ids[end + 1 :]).removeprefix("\n\n")
        return {"role": "assistant", "content": content, "thinking": thinking}

    def _opened(self, role: str, messages: Sequence[Message]) -> list[list[int]]:
        if role != "tool":
            return super()._opened(role, messages)
        opening, closing = (self.tokenizer.special_id(token) for token in ("<tool_response>", "</tool_response>"))
        turn = [self._start, *self.tokenizer.encode("user\n")]
        for i, message in enumerate(messages):
            text = self.tokenizer.encode(f"\n{message['content']}\n")
            turn += [*(self._newline if i else []), opening, *text, closing]
        return [turn]

    def _assistant(self, message: Message) -> list[int]:
        if "thinking" not in message:
            return self.tokenizer.encode(message["content"])
        if not self.thinking:
            raise ValueError("thinking: this renderer has thinking off; remove the field or use Qwen3(thinking=True)")
        text = self.tokenizer.encode(f"\n{message['thinking']}\n")
        return [self._think, *text, self._unthink, *self.tokenizer.encode(f"\n\n{message['content']}")]


RENDERERS = {renderer.name: renderer for renderer in (ChatML, SmolLM2, Qwen3)}
