"""Conversations to token ids by the model's own chat template.

A template's output is text in which control tokens are spelled out. So that nobody opens or ends a turn by writing one, a
mark goes into every place of a caller's text that could be part of a control token, before the template runs. What is then
a control token in the output was written by the template, and nothing else becomes a control id; marks are taken out again.
"""

import json
import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from itertools import pairwise
from typing import Any, NoReturn

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.meta import find_undeclared_variables
from jinja2.nodes import Node
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from models.tokenizer import Tokenizer

PROVIDED = {"messages", "tools", "add_generation_prompt", "bos_token", "eos_token", "pad_token", "reasoning_effort"}
"""the template's variables that are not for `chat_template_kwargs`"""
MARKS = [chr(code) for code in range(0xFDD0, 0xFDF0)]
"""Unicode's noncharacters; one that the conversation does not have is the mark"""
NEVER = "(?!)"
"""a pattern that matches nothing"""

Message = Mapping[str, Any]


class _Generation(Extension):
    """`{% generation %}` encloses an assistant's turn in some templates; here it does nothing."""

    def __init__(self, environment: jinja2.Environment) -> None:
        super().__init__(environment)
        self.tags = {"generation"}

    def parse(self, parser: Parser) -> Node | list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def _refuse(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _to_json(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
    """As Hugging Face's libraries have it: jinja's own escapes HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, **options)


def _now(form: str) -> str:
    return datetime.now().strftime(form)


class _Guard:
    """Puts a mark into texts, so that none of `tokens` is in them, nor comes of them together with what stands beside them."""

    def __init__(self, tokens: Collection[str]) -> None:
        self._tokens = tuple(tokens)
        self._heads = {token[:n] for token in tokens for n in range(1, len(token))}
        self._tails = {token[n:] for token in tokens for n in range(1, len(token))}
        self._within = re.compile(f"(?=(?:{'|'.join(map(re.escape, tokens)) or NEVER}))")

    def text(self, text: str, mark: str, part: bool = True) -> str:
        """The text with a mark in each token in it, in a beginning of one at its end, and in an end of one at its beginning.

        Args:
            part: also if the whole text is a part of a token.
        """
        cuts = {found.start() + 1 for found in self._within.finditer(text)}
        for n in range(1, 1 + min(len(text), max(map(len, self._heads), default=0))):
            if text[-n:] in self._heads:
                cuts.add(len(text) - n + 1)
            if text[:n] in self._tails:
                cuts.add(n - 1)
        if part and text and any(text in token for token in self._tokens):
            cuts.add(1)
        edges = [0, *sorted(cuts), len(text)]
        return mark.join(text[low:high] for low, high in pairwise(edges))

    def all(self, value: Any, mark: str, part: bool = True) -> Any:
        """The same for every text in a JSON value; names of fields are never marked for being a part."""
        if isinstance(value, str):
            return self.text(value, mark, part)
        if isinstance(value, list | tuple):
            return [self.all(item, mark, part) for item in value]
        if isinstance(value, Mapping):
            return {self.text(name, mark, part=False): self.all(item, mark, part) for name, item in value.items()}
        return value


class Control:
    """The control tokens of a tokenizer, and how they are kept apart from texts that spell them (module docstring)."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        texts = {token: tokenizer.decode([token]) for token in tokenizer.special_ids}
        self.special = {text: token for token, text in texts.items() if len(text) > 1}
        """one character cannot be marked"""
        longest = sorted(self.special, key=len, reverse=True)
        self._split = re.compile(f"({'|'.join(map(re.escape, longest)) or NEVER})")
        self.guard = _Guard(self.special.keys())

    def mark(self, *values: Any) -> str:
        """A mark for these JSON values. ValueError when they have every character that could be one."""
        everything = json.dumps(values, ensure_ascii=False)
        mark = next((mark for mark in MARKS if mark not in everything), None)
        if mark is None:
            raise ValueError("messages: they have every noncharacter of Unicode (U+FDD0 to U+FDEF); leave one out")
        return mark

    def encode(self, text: str, mark: str) -> list[int]:
        """ids of a text in which what comes from a caller is marked (`guard`): control tokens only where nobody marked them."""
        pieces = self._split.split(text)
        control = [self.special[piece] for piece in pieces[1::2]]
        if mark not in text:
            ids = self._tokenizer.encode(text, allow_special=True)
            if [token for token in ids if token in self._tokenizer.special_ids] == control:
                return ids
        # A caller spelled a control token, or something that the tokenizer's normaliser makes one: what the template wrote
        # as one, and the texts between, each for itself.
        ids = []
        for i, piece in enumerate(pieces):
            ids += [self.special[piece]] if i % 2 else self._tokenizer.encode(piece.replace(mark, ""))
        return ids


class ChatTemplate:
    """The Jinja template of a tokenizer, run as Hugging Face's libraries run it, in a sandbox.

    Args:
        markup: whether an assistant's own content may hold markup (`render`); otherwise what it spells is text.

    Raises:
        ValueError: the tokenizer has no template, or one that cannot be read.
    """

    def __init__(self, tokenizer: Tokenizer, markup: bool = True) -> None:
        source = tokenizer.chat_template
        if source is None:
            raise ValueError("chat_template: the model has none; use /v1/completions, or put chat_template.jinja in its folder")
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.add_extension(_Generation)
        environment.add_extension(loopcontrols)
        environment.filters["tojson"] = _to_json
        environment.globals |= {"raise_exception": _refuse, "strftime_now": _now}
        try:
            self._template = environment.from_string(source)
            names = find_undeclared_variables(environment.parse(source)) - environment.globals.keys()
        except jinja2.TemplateError as error:
            raise ValueError(f"chat_template: cannot be read ({error}); copy the model's again") from error
        self.settable = names - PROVIDED
        """variables of the template's own, such as `enable_thinking`"""
        self._knows_tools = "tools" in names
        ids = {"bos_token": tokenizer.bos_id, "eos_token": next(iter(tokenizer.eos_ids), None), "pad_token": tokenizer.pad_id}
        self._tokens = {name: tokenizer.decode([token]) for name, token in ids.items() if token is not None}
        self._control = Control(tokenizer)
        # Those that the library does not call special are markup (<think>) that the model itself writes in its turns.
        special = self._control.special
        own = {text for text, token in special.items() if markup and tokenizer.decode([token], skip_special=True)}
        self._turn_guard = _Guard(special.keys() - own)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Message] = (),
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> tuple[int, ...]:
        """ids of the conversation, up to where the assistant's next turn begins.

        Control tokens are the template's alone. Those that a caller writes are ordinary text, but for markup
        (`<think>`, where the tokenizer does not call it special) in an assistant's own content.

        Args:
            add_generation_prompt: whether the header of the assistant's next turn is at the end.
            variables: more of the template's variables.

        Raises:
            ValueError: the template refuses the conversation or knows no tools, or a text is no valid Unicode.
        """
        if tools and not self._knows_tools:
            raise ValueError(
                "tools: the model's chat template has no place for them; leave them out, or give launch.gateway a --renderer"
            )
        mark = self._control.mark(messages, tools, variables)
        guard = self._control.guard
        try:
            text = self._template.render(
                messages=[self._message(message, mark) for message in messages],
                tools=[guard.all(tool, mark, part=False) for tool in tools] or None,
                add_generation_prompt=add_generation_prompt,
                **self._tokens,
                **guard.all(variables, mark),
            )
        except Exception as error:  # a template is a program: whatever it raises is about these messages
            raise ValueError(f"messages: the chat template refuses them: {error or type(error).__name__}") from error
        return tuple(self._control.encode(text, mark))

    def _message(self, message: Message, mark: str) -> Message:
        guard = self._turn_guard if message["role"] == "assistant" else self._control.guard
        marked = {name: self._control.guard.all(value, mark) for name, value in message.items()}
        marked |= {"role": message["role"], "content": guard.text(message["content"], mark)}
        if "tool_calls" in marked:
            marked["tool_calls"] = [{**call, "type": "function"} for call in marked["tool_calls"]]
        return marked
