"""Chat formats of the `renderers` library (the extra `renderers`), for models that twinax has no renderer of its own for."""

import importlib
import json
from collections.abc import Sequence
from typing import Any

from inference.calls import hermes_call
from inference.chat import Control
from models.tokenizer import Tokenizer
from rl.chatml import tool_json
from rl.messages import Message, Piece, Tool
from rl.readers import Reader, read
from rl.templates import HELLO, sent


class Library:
    """A renderer of the library behind our Protocol.

    Messages are marked before the library sees them (`inference.chat`), so that what they spell becomes no control token. Where
    the library does not bridge, or not token for token, `bridge` is None. Its parser reads whole turns: nothing is streamed.

    Args:
        family: the library's name of the format, such as "glm-4.5".
        options: of the library's configuration for this family, such as `thinking_retention`.

    Raises:
        ValueError: the library is not installed, or does not know the family or an option, or the tokenizer lacks its tokens.
    """

    name = "library"
    version = 1

    def __init__(self, tokenizer: Tokenizer, *, family: str, **options: Any) -> None:
        try:
            library = importlib.import_module("renderers")
        except ImportError as error:
            raise ValueError(
                "renderer: 'library' needs the extra renderers; install it (pip install '.[renderers]')"
            ) from error
        if family in ("auto", "default"):
            raise ValueError(f"family: {family!r} is no format; name one, or use renderer 'template' for the model's own")
        self._tokens = _Tokens(tokenizer)
        try:
            config = type(library.config_from_name(family))(**options)
            self._renderer = library.create_renderer(self._tokens, config)
        except (ValueError, TypeError, AssertionError) as error:
            raise ValueError(f"family: {family!r} does not work with these options and this tokenizer: {error}") from error
        self.name = f"library {library.__version__} {family}"
        self.stop_ids: tuple[int, ...] = tuple(self._renderer.get_stop_token_ids())
        self._prompt = self.render([HELLO])
        self._header = self._prompt[len(self.render([HELLO], add_generation_prompt=False)) :]
        self.extends = self.bridge([*self._prompt, self.stop_ids[0]], [HELLO]) is not None

    def render(self, messages: Sequence[Message], tools: Sequence[Tool] = (), add_generation_prompt: bool = True) -> list[int]:
        """See Renderer."""
        if not messages:
            raise ValueError("messages: nothing to render; give at least one message")
        given, listed = self._tokens.marked(messages, tools)
        return list(self._renderer.render_ids(given, tools=listed, add_generation_prompt=add_generation_prompt))

    def reader(self, tools: Sequence[Tool] = ()) -> Reader:
        return _WholeTurn(self, tools)

    def parse(self, ids: Sequence[int], name: str = "", tools: Sequence[Tool] = ()) -> Message:
        return read(self.reader(tools), ids, name)

    def bridge(self, prior_ids: Sequence[int], new_messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[int] | None:
        """See Renderer."""
        if any(message["role"] == "assistant" for message in new_messages):
            raise ValueError("new_messages: an assistant's turn is sampled, not bridged; pass what follows it only")
        prior, width = list(prior_ids), len(self._header)
        begin = next((i for i in range(len(prior), width - 1, -1) if prior[i - width : i] == self._header), None)
        if begin is None:
            return None
        given, listed = self._tokens.marked(new_messages, tools)
        found = self._renderer.bridge_to_next_turn(prior[:begin], prior[begin:], given, tools=listed)
        if found is None or list(found.token_ids[: len(prior)]) != prior:
            return None
        return list(found.token_ids[len(prior) :])

    def pieces(self, ids: Sequence[int], tools: Sequence[Tool]) -> list[Piece]:
        """All pieces of a turn. What the library takes for a call that went wrong is text."""
        _, listed = self._tokens.marked((), tools)
        found = self._renderer.parse_response(list(ids), tools=listed, prompt_ids=self._prompt)
        calls: list[Piece] = []
        text = found.content
        for call in found.tool_calls:
            arguments = _arguments(call.raw, call.arguments)
            if call.status == "ok" and call.name and arguments is not None:
                calls.append(Piece("call", arguments, call.name))
            else:
                text += call.raw
        thinking = Piece("thinking", found.reasoning_content or "")
        return [piece for piece in (thinking, Piece("text", text)) if piece.text] + calls


class _WholeTurn:
    """Reads a turn once all of it is there."""

    def __init__(self, library: Library, tools: Sequence[Tool]) -> None:
        self._library, self._tools = library, tools
        self._ids: list[int] = []
        self._over = False

    def add(self, ids: Sequence[int]) -> list[Piece]:
        for token in map(int, ids):
            self._over = self._over or token in self._library.stop_ids
            if not self._over:
                self._ids.append(token)
        return []

    def flush(self) -> list[Piece]:
        ids, self._ids = self._ids, []
        return self._library.pieces(ids, self._tools)


class _Tokens:
    """A tokenizer as the library knows them; control tokens that messages spell stay text."""

    name_or_path = ""
    unk_token_id = None

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self._control = tokenizer, Control(tokenizer)
        self.eos_token_id = next(iter(tokenizer.eos_ids), None)
        self._mark = ""

    def marked(self, messages: Sequence[Message], tools: Sequence[Tool]) -> tuple[list[dict[str, Any]], list[Any] | None]:
        """Messages and tools for the library, which encodes them next."""
        given, listed = [sent(message) for message in messages], [tool_json(tool) for tool in tools]
        self._mark = self._control.mark(given, listed)
        guard = self._control.guard
        marked = [{**guard.all(message, self._mark), "role": message["role"]} for message in given]
        return marked, [{**guard.all(tool, self._mark, part=False), "type": "function"} for tool in listed] or None

    def encode(self, text: str, *_: Any, **__: Any) -> list[int]:
        escaped = json.dumps(self._mark)[1:-1] if self._mark else ""
        return self._control.encode(text.replace(escaped, self._mark) if escaped else text, self._mark)

    def decode(self, token_ids: Any, *_: Any, skip_special_tokens: bool = False, **__: Any) -> str:
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        return self._tokenizer.decode(ids, skip_special=skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        return self._control.special.get(tokens)


def _arguments(raw: str, given: Any) -> str | None:
    """A call's arguments as they are written, where they are JSON in `raw`."""
    written = hermes_call(raw)
    if written is not None:
        return written.arguments
    return json.dumps(given, ensure_ascii=False) if isinstance(given, dict) else None
