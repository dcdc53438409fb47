"""The two text routes of the OpenAI API: /v1/completions and /v1/chat/completions."""

import json
from typing import Any

from inference.answers import Json, Served, TextAnswer, logprob, prompt_entries
from inference.calls import FoundCall
from inference.errors import ApiError
from inference.protocol import ChatBody, CompletionBody, Message
from inference.text import UNKNOWN, token_text
from inference.types import Tokens
from models.tokenizer import Tokenizer

DEFAULT_MAX_TOKENS = 16
"""of a completion; a chat's default is all the room there is"""


class CompletionAnswer(TextAnswer):
    """A prompt's continuation. Control tokens written out in a prompt become their ids, and nothing is added to it."""

    kind = chunk_kind = "text_completion"

    def __init__(self, body: CompletionBody, served: Served) -> None:
        encode, decode = served.tokenizer.encode, served.tokenizer.decode
        prompts = [encode(prompt, allow_special=True) if isinstance(prompt, str) else prompt for prompt in body.prompt]
        texts = [prompt if isinstance(prompt, str) else decode(prompt) for prompt in body.prompt]
        self._echoed = texts if body.echo else [""] * len(prompts)
        wanted = [n for n in (body.prompt_logprobs, body.logprobs if body.echo else None) if n is not None]
        self._show_prompt_logprobs = body.prompt_logprobs
        super().__init__(
            body,
            served,
            [tuple(prompt) for prompt in prompts],
            max_tokens=body.max_tokens,
            default_max_tokens=DEFAULT_MAX_TOKENS,
            num_logprobs=body.logprobs,
            num_prompt_logprobs=max(wanted, default=None),
        )
        self._echo_logprobs = bool(body.echo) and body.logprobs is not None
        self._offsets = [len(self._echoed[i // self.n]) for i in range(len(self.requests))]

    def pieces(self, index: int, text: str, calls: list[FoundCall], fresh: Tokens, reason: str | None) -> list[Json]:
        if not self.choices[index].started:
            text = self._echoed[index // self.n] + text
        logprobs = self._logprobs(index, fresh)
        if not text and reason is None and not (logprobs and logprobs["tokens"]):
            return []
        return [{"index": index, "text": text, "logprobs": logprobs, "finish_reason": reason}]

    def finished(self, index: int) -> Json:
        done, choice = self.done[index], self.choices[index]
        prompt = self.prompt_logprobs(index)
        logprobs = self._logprobs(index, done)
        if self._echo_logprobs:
            assert prompt is not None and logprobs is not None
            ids, recorded = prompt
            before = self._entries(ids, recorded.logprobs, recorded.top_ids, recorded.top_logprobs, 0)
            before["token_logprobs"][0] = before["top_logprobs"][0] = None
            logprobs = {name: before[name] + logprobs[name] for name in logprobs}
        entry = {"index": index, "text": self._echoed[index // self.n] + choice.text, "logprobs": logprobs}
        entry["finish_reason"] = choice.finish_reason(done)
        if self._show_prompt_logprobs is not None:
            assert prompt is not None
            entry["prompt_logprobs"] = prompt_entries(self.tokenizer, *prompt, self._show_prompt_logprobs)
        return entry

    def _logprobs(self, index: int, part: Tokens) -> Json | None:
        if self.num_logprobs is None:
            return None
        ids = part.ids.tolist()
        entries = self._entries(ids, part.logprobs_full, part.top_ids, part.top_logprobs, self._offsets[index])
        self._offsets[index] += sum(map(len, entries["tokens"]))
        return entries

    def _entries(self, ids: Any, values: Any, top_ids: Any, top_values: Any, offset: int) -> Json:
        """Texts, log-probs, likeliest tokens and places of tokens. The likeliest include the token itself."""
        texts = [token_text(self.tokenizer, token) for token in ids]
        offsets, tops = [], []
        for text, value, top, top_value in zip(texts, values, top_ids, top_values, strict=True):
            offsets.append(offset)
            offset += len(text)
            likeliest: dict[str, float] = {}
            for token, one in zip(top[: self.num_logprobs].tolist(), top_value.tolist(), strict=False):
                likeliest.setdefault(token_text(self.tokenizer, token), logprob(one))
            tops.append({**likeliest, text: logprob(value)})
        return {
            "tokens": texts,
            "token_logprobs": [logprob(value) for value in values],
            "top_logprobs": tops,
            "text_offset": offsets,
        }


class ChatAnswer(TextAnswer):
    """The assistant's next turn, with its tool calls."""

    kind, chunk_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, body: ChatBody, served: Served) -> None:
        if served.chat is None:
            raise ApiError("messages: the model has no chat template; use /v1/completions", param="messages")
        tools = body.tools if body.tools and body.tool_choice != "none" else []
        variables = dict(body.chat_template_kwargs or {})
        if unknown := sorted(variables.keys() - served.chat.settable):
            raise ApiError(
                f"chat_template_kwargs.{unknown[0]}: the model's chat template has no such variable for a caller to set; "
                f"it has {sorted(served.chat.settable)}",
                param="chat_template_kwargs",
            )
        if body.reasoning_effort is not None:
            variables["reasoning_effort"] = body.reasoning_effort
        prompt = served.chat.render([_plain(message) for message in body.messages], tools, **variables)
        super().__init__(
            body,
            served,
            [prompt],
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            default_max_tokens=served.max_context,
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            num_prompt_logprobs=body.prompt_logprobs,
            tools=bool(tools),
        )

    def pieces(self, index: int, text: str, calls: list[FoundCall], fresh: Tokens, reason: str | None) -> list[Json]:
        choice = self.choices[index]
        deltas: list[Json] = [] if choice.started else [{"role": "assistant", "content": ""}]
        delta: Json = {"content": text} if text else {}
        if calls:
            first = len(choice.calls) - len(calls)
            delta["tool_calls"] = [{"index": first + i, **_call(call)} for i, call in enumerate(calls)]
        logprobs = self._logprobs(fresh)
        if delta or reason is not None or (logprobs and logprobs["content"]):
            deltas.append(delta)
        entries: list[Json] = [{"index": index, "delta": d, "logprobs": None, "finish_reason": None} for d in deltas]
        if delta or reason is not None or logprobs:
            entries[-1] |= {"logprobs": logprobs, "finish_reason": reason}
        return entries

    def finished(self, index: int) -> Json:
        choice, done = self.choices[index], self.done[index]
        message: Json = {"role": "assistant", "content": choice.text, "refusal": None}
        if choice.calls:
            message |= {"content": choice.text or None, "tool_calls": [_call(call) for call in choice.calls]}
        reason = choice.finish_reason(done)
        return {"index": index, "message": message, "logprobs": self._logprobs(done), "finish_reason": reason}

    def whole(self) -> Json:
        prompt = self.prompt_logprobs(0)
        if prompt is None:
            return super().whole()
        return super().whole() | {"prompt_logprobs": prompt_entries(self.tokenizer, *prompt, self.num_prompt_logprobs or 0)}

    def _logprobs(self, part: Tokens) -> Json | None:
        if self.num_logprobs is None:
            return None
        content = []
        rows = zip(part.ids.tolist(), part.logprobs_full, part.top_ids, part.top_logprobs, strict=True)
        for token, value, top_ids, top_values in rows:
            top = zip(top_ids[: self.num_logprobs].tolist(), top_values.tolist(), strict=False)
            content.append(
                _entry(self.tokenizer, token, value) | {"top_logprobs": [_entry(self.tokenizer, *one) for one in top]}
            )
        return {"content": content, "refusal": None}


def _entry(tokenizer: Tokenizer, token: int, value: float) -> Json:
    text = token_text(tokenizer, token)
    # of a part of a character, the bytes are not known
    return {"token": text, "bytes": None if UNKNOWN in text else list(text.encode()), "logprob": logprob(value)}


def _call(call: FoundCall) -> Json:
    return {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}


def _plain(message: Message) -> Json:
    """A message as chat templates read it: no nulls, `developer` is `system`, arguments are parsed."""
    plain: Json = {"role": "system" if message.role == "developer" else message.role, "content": message.content or ""}
    for name in ("name", "tool_call_id", "reasoning_content"):
        if getattr(message, name) is not None:
            plain[name] = getattr(message, name)
    if message.tool_calls:
        plain["tool_calls"] = [
            {"id": call.id, "function": {"name": call.function.name, "arguments": _arguments(call.function.arguments)}}
            for call in message.tool_calls
        ]
    return plain


def _arguments(text: str) -> Any:
    """An object, or the text where it is none."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return text
    return value if isinstance(value, dict) else text
