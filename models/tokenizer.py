"""Text <-> token ids: `tokenizer.json`, SentencePiece's `tokenizer.model`, and plain bytes, behind one class.

Control tokens never come out of ordinary text: `encode("<|im_end|>")` spells the characters, unless the caller says
`allow_special=True`. So what a user or a tool writes cannot end a turn or open one.
"""

import importlib
import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer as JsonTokenizer

from models.config import ModelConfig
from models.hf_config import id_list, read_json

CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


class _Backend(Protocol):
    """What the file formats differ in."""

    special: dict[str, int]
    """control tokens and their ids"""
    vocab_size: int
    """largest id + 1"""

    def encode(self, text: str, allow_special: bool) -> list[int]: ...

    def decode(self, ids: list[int], skip_special: bool) -> str: ...

    def token_id(self, token: str) -> int | None: ...


class Tokenizer:
    """Encodes and decodes; holds the special ids and the chat template that came with the model."""

    def __init__(
        self,
        backend: _Backend,
        bos_id: int | None = None,
        eos_ids: tuple[int, ...] = (),
        pad_id: int | None = None,
        chat_template: str | None = None,
    ) -> None:
        self._backend = backend
        self.bos_id = bos_id
        self.eos_ids = eos_ids
        """ids that end a turn; the tokenizer's own first, then generation_config.json's"""
        self.pad_id = pad_id
        self.chat_template = chat_template

    @staticmethod
    def load(directory: Path) -> "Tokenizer":
        """Reads `tokenizer.json`, or else `tokenizer.model`, and the settings beside it.

        Raises:
            ValueError: there is neither, a file is unreadable, or the settings name a token that does not exist.
        """
        settings: dict[str, Any] = {}
        for file in ("special_tokens_map.json", "tokenizer_config.json"):
            if (directory / file).is_file():
                settings |= read_json(directory / file)
        backend: _Backend
        if (directory / "tokenizer.json").is_file():
            backend = _Json(directory / "tokenizer.json")
        elif (directory / "tokenizer.model").is_file():
            backend = _SentencePiece(directory / "tokenizer.model", settings.get("added_tokens_decoder") or {})
        else:
            raise ValueError(f"{directory}: has no tokenizer.json or tokenizer.model; copy the model's there")

        def role(name: str) -> int | None:
            token = settings.get(f"{name}_token")
            if token is None:
                return None
            token = token["content"] if isinstance(token, dict) else token
            found = backend.token_id(token)
            if found is None:
                raise ValueError(
                    f"{directory}: tokenizer_config.json: {name}_token {token!r} is not in the vocabulary; correct it"
                )
            return found

        eos = role("eos")
        stops = () if eos is None else (eos,)
        if (directory / "generation_config.json").is_file():
            stops += id_list(read_json(directory / "generation_config.json").get("eos_token_id"))
        template = settings.get("chat_template")
        if isinstance(template, list):
            template = {entry["name"]: entry["template"] for entry in template}.get("default")
        if (directory / "chat_template.jinja").is_file():
            template = (directory / "chat_template.jinja").read_text(encoding="utf-8")
        return Tokenizer(backend, role("bos"), tuple(dict.fromkeys(stops)), role("pad"), template)

    @property
    def vocab_size(self) -> int:
        """Largest id + 1. The model may have more rows (padding), never fewer."""
        return self._backend.vocab_size

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids that `encode` yields only with `allow_special`."""
        return frozenset(self._backend.special.values())

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of a text. Nothing is added: no start token, no template.

        Args:
            allow_special: control tokens written out in the text become their ids; otherwise they are ordinary text.

        Raises:
            ValueError: the text holds a lone surrogate, so it is not valid Unicode.
        """
        text.encode("utf-8")
        return self._backend.encode(text, allow_special)

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of ids; incomplete UTF-8 becomes U+FFFD, ids past the vocabulary (padding rows of a model) nothing."""
        return self._backend.decode([int(i) for i in ids if 0 <= i < self.vocab_size], skip_special)

    def special_id(self, token: str) -> int:
        """Id of a control token.

        Raises:
            ValueError: there is no such control token.
        """
        if token not in self._backend.special:
            known = sorted(self._backend.special)[:12]
            raise ValueError(f"special token {token!r} is unknown to this tokenizer; it has {known}")
        return self._backend.special[token]

    def check_vocab(self, config: ModelConfig) -> None:
        """Refuses a tokenizer whose ids the model has no rows for.

        Raises:
            ValueError: naming both sizes.
        """
        if self.vocab_size > config.vocab_size:
            raise ValueError(
                f"vocab_size: the tokenizer has ids up to {self.vocab_size - 1}, the model only {config.vocab_size} "
                f"embedding rows; use the tokenizer that came with the model, or enlarge its embedding"
            )


class ByteTokenizer(Tokenizer):
    """Ids 0-255 are UTF-8 bytes, 256-263 control tokens. For tests and the tiny model; needs no file."""

    def __init__(self) -> None:
        backend = _Bytes()
        end, pad = backend.special["<|im_end|>"], backend.special["<|pad|>"]
        super().__init__(backend, None, (end, backend.special["<|endoftext|>"]), pad, CHATML)


_BYTE_SPECIALS = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|pad|>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>"),
)


class _Bytes:
    def __init__(self) -> None:
        self.special = {token: 256 + i for i, token in enumerate(_BYTE_SPECIALS)}
        self.vocab_size = 256 + len(_BYTE_SPECIALS)
        self._names = {i: token for token, i in self.special.items()}

    def encode(self, text: str, allow_special: bool) -> list[int]:
        if not allow_special:
            return list(text.encode("utf-8"))
        return [i for token, part in _split(text, self.special) for i in ([token] if part is None else part.encode())]

    def decode(self, ids: list[int], skip_special: bool) -> str:
        names = {} if skip_special else self._names
        parts = (bytes([i]) if i < 256 else names.get(i, "").encode() for i in ids)
        return b"".join(parts).decode("utf-8", errors="replace")

    def token_id(self, token: str) -> int | None:
        return self.special.get(token)


class _Json:
    """The `tokenizers` library. Every added token that is not mere white space counts as control token."""

    def __init__(self, path: Path) -> None:
        content = read_json(path)
        try:
            added = [token for token in content.get("added_tokens") or [] if token["content"].strip()]
            self.special: dict[str, int] = {token["content"]: token["id"] for token in added}
            self._whole = JsonTokenizer.from_str(json.dumps(content))
            for token in added:
                token["special"] = True
            self._plain = JsonTokenizer.from_str(json.dumps(content))
        except Exception as error:  # the library raises no narrower type
            raise ValueError(f"{path}: is no tokenizer of the tokenizers library ({error}); copy it again") from error
        # The library's name for "spell special tokens out as ordinary text".
        self._plain.encode_special_tokens = True
        for tokenizer in (self._whole, self._plain):
            tokenizer.no_truncation()
            tokenizer.no_padding()
        self.vocab_size = max(self._whole.get_vocab(with_added_tokens=True).values(), default=-1) + 1
        unknown = (content.get("model") or {}).get("unk_token")
        self._control = {i: token for token, i in self.special.items() if token != unknown}

    def encode(self, text: str, allow_special: bool) -> list[int]:
        if allow_special:
            return self._whole.encode(text, add_special_tokens=False).ids
        ids = self._plain.encode(text, add_special_tokens=False).ids
        if self._control.keys().isdisjoint(ids):
            return ids
        # A model whose ordinary vocabulary lists a control token too (say with `ignore_merges`): spell it.
        spelled = ([i] if i not in self._control else self._spell(self._control[i]) for i in ids)
        return [i for part in spelled for i in part]

    def _spell(self, token: str) -> list[int]:
        return [i for char in token for i in self._plain.encode(char, add_special_tokens=False).ids]

    def decode(self, ids: list[int], skip_special: bool) -> str:
        return self._whole.decode(ids, skip_special_tokens=skip_special)

    def token_id(self, token: str) -> int | None:
        return self._whole.token_to_id(token)


class _SentencePiece:
    """SentencePiece, with the tokens that tokenizer_config.json adds. User-defined pieces count as control tokens."""

    def __init__(self, path: Path, added: dict[str, dict[str, Any]]) -> None:
        from sentencepiece import SentencePieceProcessor

        model = importlib.import_module("sentencepiece.sentencepiece_model_pb2").ModelProto()
        try:
            model.ParseFromString(path.read_bytes())
            SentencePieceProcessor(model_proto=model.SerializeToString())
            kinds = type(model.pieces[0])
        except Exception as error:  # protobuf's and the library's own types
            raise ValueError(f"{path}: is truncated or no SentencePiece model ({error}); copy it again") from error
        for piece in model.pieces:
            if piece.type == kinds.USER_DEFINED and piece.piece.strip("▁ \n\t"):
                piece.type = kinds.CONTROL  # the library would match it in ordinary text
        self.special = {piece.piece: i for i, piece in enumerate(model.pieces) if piece.type == kinds.CONTROL}
        self.special |= {entry["content"]: int(i) for i, entry in added.items() if int(i) >= len(model.pieces)}
        self._names = {i: token for token, i in self.special.items()}
        self.vocab_size = max(len(model.pieces), *(i + 1 for i in self._names), 1)
        self._prefixed = model.normalizer_spec.add_dummy_prefix
        self._first = SentencePieceProcessor(model_proto=model.SerializeToString())
        # After a control token there is no space to make up, and none to take away.
        model.normalizer_spec.add_dummy_prefix = False
        self._rest = SentencePieceProcessor(model_proto=model.SerializeToString())
        model.normalizer_spec.remove_extra_whitespaces = False
        self._decoder = SentencePieceProcessor(model_proto=model.SerializeToString())

    def encode(self, text: str, allow_special: bool) -> list[int]:
        if not allow_special:
            return self._first.encode(text)
        ids: list[int] = []
        for token, part in _split(text, self.special):
            ids += [token] if part is None else (self._rest if ids else self._first).encode(part)
        return ids

    def decode(self, ids: list[int], skip_special: bool) -> str:
        if skip_special:
            ids = [i for i in ids if i not in self._names]
        parts: list[str] = []
        run: list[int] = []
        for i in [*ids, None]:
            if i is not None and i not in self._names:
                run.append(i)
                continue
            text = self._decoder.decode(run)
            parts.append(text.removeprefix(" ") if self._prefixed and not parts else text)
            run = []
            if i is not None:
                parts.append(self._names[i])
        return "".join(parts)

    def token_id(self, token: str) -> int | None:
        if token in self.special:
            return self.special[token]
        found = self._first.piece_to_id(token)
        return found if self._first.id_to_piece(found) == token else None


def _split(text: str, special: dict[str, int]) -> Iterator[tuple[int, str | None]]:
    """Cuts a text at control tokens, the longest first: (id, None) for one, (-1, text) between them."""
    pattern = "|".join(map(re.escape, sorted(special, key=len, reverse=True)))
    parts: Iterable[str] = re.split(f"({pattern})", text) if pattern else [text]
    for part in parts:
        if part in special:
            yield special[part], None
        elif part:
            yield -1, part
