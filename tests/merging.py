"""A tokenizer whose merges can straddle any boundary, as a trained BPE's do, with the control tokens of a family of models."""

import re

from models.tokenizer import Tokenizer

CHATML = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN = (*CHATML, "<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA = ("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "<|eom_id|>")
MERGES = (
    *("json", "jsonp", "renderer", "user", "assistant", "user\n", "\n\n", "\n\n\n", " the", "<|", "|>", "im_end"),
    *('{"', '": ', '"}', "}\n", ">\n", "\n<", "think", "tool_call"),
)


class _Merging:
    """Longest match over bytes and a few merges: the same string has several splits."""

    def __init__(self, specials: tuple[str, ...], texts: tuple[str, ...]) -> None:
        merges = [text.encode() for text in texts]
        self._pieces = [bytes([i]) for i in range(256)] + [text.encode() for text in specials] + merges
        self._split = re.compile(f"({'|'.join(map(re.escape, specials))})")
        self.special = {token: 256 + i for i, token in enumerate(specials)}
        self.vocab_size = len(self._pieces)
        self._merges = sorted(((text, 256 + len(specials) + i) for i, text in enumerate(merges)), key=lambda m: -len(m[0]))

    def encode(self, text: str, allow_special: bool) -> list[int]:
        if not allow_special:
            return self._plain(text)
        parts = self._split.split(text)
        return [i for part in parts for i in ([self.special[part]] if part in self.special else self._plain(part))]

    def _plain(self, text: str) -> list[int]:
        data, ids, at = text.encode(), [], 0
        while at < len(data):
            single = (data[at : at + 1], data[at])
            piece, token = next((m for m in self._merges if data.startswith(m[0], at)), single)
            ids.append(token)
            at += len(piece)
        return ids

    def decode(self, ids: list[int], skip_special: bool) -> str:
        kept = (i for i in ids if not (skip_special and i in self.special.values()))
        return b"".join(self._pieces[i] for i in kept).decode(errors="replace")

    def token_id(self, token: str) -> int | None:
        return self.special.get(token)


def merging(specials: tuple[str, ...] = QWEN, template: str | None = None, merges: tuple[str, ...] = MERGES) -> Tokenizer:
    """Ids 0-255 are bytes, from 256 on control tokens, then merges; the last control token but the first one ends a turn."""
    backend = _Merging(specials, merges)
    end = backend.special["<|eot_id|>" if "<|eot_id|>" in specials else "<|im_end|>"]
    return Tokenizer(backend, None, (end, 256), None, template)
