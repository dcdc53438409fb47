"""What a checkpoint's config.json says about a dense decoder, under our names.

Legend: D model, H query heads, K kv heads, h head dim, F ffn, V vocab.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

FAMILIES = {"llama": "LlamaForCausalLM", "qwen3": "Qwen3ForCausalLM"}
_UNSUPPORTED = ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config")
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (Llama 3.1 model card; Hugging Face `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of one dense decoder. Frozen and hashable: it may be a static jit argument."""

    family: str
    """`llama` or `qwen3`; they differ in q/k-norm and in names on disk."""
    vocab_size: int
    """V"""
    model_dim: int
    """D"""
    ffn_dim: int
    """F"""
    num_layers: int
    num_heads: int
    """H"""
    num_kv_heads: int
    """K; divides H"""
    head_dim: int
    """h"""
    max_positions: int
    """longest context the position encoding was trained for, in tokens"""
    rope_theta: float = 10000.0
    rope_scaling: RopeScaling | None = None
    norm_eps: float = 1e-5
    tied_head: bool = False
    """the output head is the embedding"""
    bos_id: int | None = None
    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family: {self.family!r} is unknown; use one of {sorted(FAMILIES)}")
        for name in ("vocab_size", "model_dim", "ffn_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: {self.num_kv_heads} must divide num_heads ({self.num_heads})")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: rotary positions need an even head dim, got {self.head_dim}")

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head before rotation (Qwen3)."""
        return self.family == "qwen3"

    @staticmethod
    def from_hf(config: Mapping[str, Any]) -> "ModelConfig":
        """Reads a Hugging Face `config.json` of a Llama or dense Qwen3 model.

        Raises:
            ValueError: fields are missing, or say something that the model does not do; all of them are named at once.
        """
        family = _family(config)
        problems: list[str] = []

        def number(name: str, kind: type = int) -> Any:
            value = config.get(name)
            if value is None:
                problems.append(f"{name}: missing")
            elif isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
                problems.append(f"{name}: must be a number of type {kind.__name__}, got {value!r}")
            else:
                return kind(value)
            return kind(1)

        values = {
            "vocab_size": number("vocab_size"),
            "model_dim": number("hidden_size"),
            "ffn_dim": number("intermediate_size"),
            "num_layers": number("num_hidden_layers"),
            "num_heads": number("num_attention_heads"),
            "max_positions": number("max_position_embeddings"),
            "norm_eps": number("rms_norm_eps", float),
        }
        heads = max(values["num_heads"], 1)
        # Where a field may be left out, transformers has a default; Qwen3's do not follow from its other fields.
        values["num_kv_heads"] = values["num_heads"]
        if family == "qwen3" or config.get("num_key_value_heads") is not None:
            values["num_kv_heads"] = number("num_key_value_heads")
        values["head_dim"] = values["model_dim"] // heads
        if family == "qwen3" or config.get("head_dim") is not None:
            values["head_dim"] = number("head_dim")
        elif values["model_dim"] % heads:
            problems.append(f"head_dim: missing, and hidden_size is no multiple of num_attention_heads ({heads})")

        problems += [f"{name}: {config[name]!r} is not supported" for name in _UNSUPPORTED if config.get(name)]
        if config.get("hidden_act", "silu") != "silu":
            problems.append(f"hidden_act: {config['hidden_act']!r} is not supported, only 'silu'")
        if set(config.get("layer_types") or ()) - {"full_attention"}:
            problems.append(f"layer_types: {sorted(set(config['layer_types']))} are not all 'full_attention'")
        theta, scaling = _rope(config, problems)
        if problems:
            raise ValueError(f"config.json ({FAMILIES[family]}): " + "; ".join(problems))
        return ModelConfig(
            family=family,
            rope_theta=theta,
            rope_scaling=scaling,
            tied_head=bool(config.get("tie_word_embeddings", False)),
            bos_id=config.get("bos_token_id"),
            eos_ids=id_list(config.get("eos_token_id")),
            pad_id=config.get("pad_token_id"),
            **values,
        )

    def to_hf(self) -> dict[str, Any]:
        """The fields of a `config.json` that Hugging Face's loader reads, without the dtype."""
        eos: int | list[int] | None = list(self.eos_ids) or None
        if eos and len(eos) == 1:
            eos = eos[0]
        scaling = None
        if self.rope_scaling:
            names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position")
            scaling = {"rope_type": "llama3"}
            scaling |= {hf: getattr(self.rope_scaling, name) for hf, name in zip(_LLAMA3_FIELDS, names, strict=True)}
        return {
            "architectures": [FAMILIES[self.family]],
            "model_type": self.family,
            "vocab_size": self.vocab_size,
            "hidden_size": self.model_dim,
            "intermediate_size": self.ffn_dim,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "head_dim": self.head_dim,
            "max_position_embeddings": self.max_positions,
            "rope_theta": self.rope_theta,
            "rope_scaling": scaling,
            "rms_norm_eps": self.norm_eps,
            "tie_word_embeddings": self.tied_head,
            "bos_token_id": self.bos_id,
            "eos_token_id": eos,
            "pad_token_id": self.pad_id,
            "hidden_act": "silu",
            "attention_bias": False,
        }


def id_list(value: int | list[int] | None) -> tuple[int, ...]:
    """Token ids as Hugging Face files write them: one, several, or none."""
    if value is None:
        return ()
    return tuple(value) if isinstance(value, list | tuple) else (value,)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object.

    Raises:
        ValueError: the file is missing, or is no JSON object.
    """
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path}: cannot be read ({error.strerror}); is {path.parent} a model directory?") from error
    except ValueError as error:
        raise ValueError(f"{path}: is not valid JSON ({error}); copy the file again") from error
    if isinstance(value, dict):
        return value
    raise ValueError(f"{path}: must hold a JSON object, got {type(value).__name__}")


def read_config(directory: Path) -> ModelConfig:
    """Configuration of a model directory. Stop ids that only generation_config.json lists are added to `eos_ids`.

    Raises:
        ValueError: config.json is missing or unsupported.
    """
    raw = read_json(directory / "config.json")
    generation = directory / "generation_config.json"
    if generation.exists():
        stops = id_list(raw.get("eos_token_id")) + id_list(read_json(generation).get("eos_token_id"))
        raw["eos_token_id"] = list(dict.fromkeys(stops))
    try:
        return ModelConfig.from_hf(raw)
    except ValueError as error:
        raise ValueError(f"{directory}: {error}") from error


def _family(config: Mapping[str, Any]) -> str:
    architectures = config.get("architectures") or []
    for family, architecture in FAMILIES.items():
        if architectures == [architecture] or (not architectures and config.get("model_type") == family):
            return family
    raise ValueError(
        f"architectures: {architectures or config.get('model_type')!r} is not supported; "
        f"use a checkpoint of one of {sorted(FAMILIES.values())}"
    )


def _rope(config: Mapping[str, Any], problems: list[str]) -> tuple[float, RopeScaling | None]:
    """Base and scaling of the rotary embedding, from the older two fields or the newer `rope_parameters`."""
    field = "rope_parameters" if config.get("rope_parameters") else "rope_scaling"
    rope = config.get(field) or {}
    if not isinstance(rope, Mapping):
        problems.append(f"{field}: must be an object, got {rope!r}")
        return 1.0, None
    theta = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    if (rope.get("partial_rotary_factor") or config.get("partial_rotary_factor") or 1) != 1:
        problems.append("partial_rotary_factor: only 1 is supported")
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if kind == "llama3":
        missing = [name for name in _LLAMA3_FIELDS if rope.get(name) is None]
        if not missing:
            factor, low, high, original = (rope[name] for name in _LLAMA3_FIELDS)
            return float(theta), RopeScaling(float(factor), float(low), float(high), int(original))
        problems.append(f"{field}: llama3 scaling lacks {missing}")
    elif kind != "default" or any(isinstance(value, Mapping) for value in rope.values()):
        problems.append(f"{field}: kind {kind!r} is not supported, only 'default' and 'llama3'")
    return float(theta), None
