"""What a checkpoint's config.json says about a decoder, under our names.

Legend: D model, H query heads, K kv heads, h head dim, F ffn, V vocab, E experts, k experts per token.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
}
_UNSUPPORTED = ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config")
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


@dataclass(frozen=True)
class RopeScaling:
    """Llama 3's frequency scaling (Llama 3.1 model card; Hugging Face `rope_type: llama3`)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_position: int


SCORINGS = ("softmax", "sigmoid")


@dataclass(frozen=True, kw_only=True)
class MoEConfig:
    """The mixture of experts of every layer. How gates are made of the router's logits, and of which experts:

    softmax, renormalised       softmax over the selected (Qwen3-MoE)
    softmax                     softmax over all, of the selected (Qwen2-MoE)
    sigmoid, renormalised       sigmoids of the selected over their sum (DeepSeek-V3, arXiv 2412.19437)
    """

    num_experts: int
    """E"""
    experts_per_token: int
    """k"""
    ffn_dim: int
    """F of one expert"""
    scoring: str = "softmax"
    renormalise: bool = True
    """the gates of a token sum to `scaling`"""
    scaling: float = 1.0
    """what gates are multiplied by"""
    selection_bias: bool = False
    """a bias of each expert takes part in the selection, not in the gates; no gradient reaches it"""
    groups: int = 1
    """experts stand in so many equal groups, and a token's are of its `groups_per_token` best: those whose two best scores
    (with a selection bias; else the best one) add up to most"""
    groups_per_token: int = 1
    shared_ffn_dim: int = 0
    """F of the expert that every token passes; 0: none"""
    shared_gate: bool = False
    """the shared expert is weighed by a sigmoid of its own (Qwen2-MoE)"""

    def __post_init__(self) -> None:
        for name in ("num_experts", "experts_per_token", "ffn_dim", "groups", "groups_per_token"):
            if getattr(self, name) < 1:
                raise ValueError(f"moe.{name}: must be at least 1, got {getattr(self, name)}")
        if self.scoring not in SCORINGS:
            raise ValueError(f"moe.scoring: {self.scoring!r} is unknown; use one of {SCORINGS}")
        if self.num_experts % self.groups or self.groups_per_token > self.groups:
            raise ValueError(
                f"moe.groups: {self.groups} groups must divide num_experts ({self.num_experts}), and be at least "
                f"groups_per_token ({self.groups_per_token})"
            )
        if self.experts_per_token > self.num_experts // self.groups * self.groups_per_token:
            raise ValueError(
                f"moe.experts_per_token: {self.experts_per_token} experts cannot be chosen from {self.groups_per_token} groups "
                f"of {self.num_experts // self.groups}; lower it"
            )
        if self.shared_gate and not self.shared_ffn_dim:
            raise ValueError("moe.shared_gate: there is no shared expert to weigh; set shared_ffn_dim")

    @property
    def route_dtype(self) -> np.dtype:
        """Of recorded rows: one byte an expert id up to 256 experts, then two. Its largest value, in all k places of a layer,
        stands for "not recorded", so it may be no routing."""
        wide = self.num_experts > 256 or (self.num_experts == 256 and self.experts_per_token == 1)
        return np.dtype(np.uint16 if wide else np.uint8)


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape and constants of one decoder. Frozen and hashable: it may be a static jit argument."""

    family: str
    """key of FAMILIES; they differ in q/k-norm, in biases of q, k and v, and in names on disk"""
    vocab_size: int
    """V"""
    model_dim: int
    """D"""
    ffn_dim: int
    """F of a dense layer; with `moe` no layer has it"""
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
    moe: MoEConfig | None = None
    """the experts that stand for the dense feed-forward"""

    def __post_init__(self) -> None:
        if self.family not in FAMILIES:
            raise ValueError(f"family: {self.family!r} is unknown; use one of {sorted(FAMILIES)}")
        for name in ("vocab_size", "model_dim", "ffn_dim", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_kv_heads: {self.num_kv_heads} must divide num_heads ({self.num_heads})")
        if (self.moe is not None) != self.family.endswith("_moe"):
            raise ValueError(f"moe: family {self.family!r} {'has no' if self.moe else 'needs'} experts; change one of the two")
        if self.head_dim % 2:
            raise ValueError(f"head_dim: rotary positions need an even head dim, got {self.head_dim}")

    @property
    def qk_norm(self) -> bool:
        """Whether queries and keys are normalised per head before rotation (Qwen3)."""
        return self.family in ("qwen3", "qwen3_moe")

    @property
    def qkv_bias(self) -> bool:
        """Whether q, k and v have biases (Qwen2)."""
        return self.family == "qwen2_moe"

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
