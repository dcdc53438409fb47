"""Hugging Face's `config.json`, read and written. Where a field may be left out, transformers has a default: ours is the same.

Legend: D model, H query heads, F ffn, E experts.
"""

import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

from models.config import FAMILIES, ModelConfig, MoEConfig, RopeScaling

_UNSUPPORTED = ("attention_bias", "mlp_bias", "use_sliding_window", "quantization_config", "mlp_only_layers")
_LLAMA3_FIELDS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


class _Fields:
    """The file's fields, and what is wrong with them."""

    def __init__(self, config: Mapping[str, Any]):
        self.config = config
        self.problems: list[str] = []

    def number(self, name: str, kind: type = int) -> Any:
        value = self.config.get(name)
        if value is None:
            self.problems.append(f"{name}: missing")
        elif isinstance(value, bool) or not isinstance(value, int if kind is int else int | float):
            self.problems.append(f"{name}: must be a number of type {kind.__name__}, got {value!r}")
        else:
            return kind(value)
        return kind(1)

    def flag(self, name: str, default: bool) -> bool:
        value = self.config.get(name, default)
        if not isinstance(value, bool):
            self.problems.append(f"{name}: must be true or false, got {value!r}")
        return bool(value)

    def fixed(self, name: str, default: Any, supported: Any) -> None:
        value = self.config.get(name, default)
        if value != supported:
            self.problems.append(f"{name}: {value!r} is not supported, only {supported!r}")


def from_hf(config: Mapping[str, Any]) -> ModelConfig:
    """Reads a Hugging Face `config.json` of one of FAMILIES.

    Raises:
        ValueError: fields are missing, or say something that the model does not do; all of them are named at once.
    """
    family = _family(config)
    given = _Fields(config)
    number, problems = given.number, given.problems
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
    # Defaults that do not follow from other fields: Qwen's kv heads, and the head dim of a dense Qwen3.
    values["num_kv_heads"] = values["num_heads"]
    if family != "llama" or config.get("num_key_value_heads") is not None:
        values["num_kv_heads"] = number("num_key_value_heads")
    values["head_dim"] = values["model_dim"] // heads
    if family == "qwen3" or config.get("head_dim") is not None:
        values["head_dim"] = number("head_dim")
    elif values["model_dim"] % heads:
        problems.append(f"head_dim: missing, and hidden_size is no multiple of num_attention_heads ({heads})")
    moe = _experts(family, given) if family.endswith("_moe") else None

    problems += [f"{name}: {config[name]!r} is not supported" for name in _UNSUPPORTED if config.get(name)]
    given.fixed("hidden_act", "silu", "silu")
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
        moe=MoEConfig(**moe) if moe else None,
        **values,
    )


def to_hf(model: ModelConfig) -> dict[str, Any]:
    """The fields of a `config.json` that Hugging Face's loader reads, without the dtype.

    Raises:
        ValueError: no `config.json` of the family can say what the experts do; all fields are named at once.
    """
    eos: int | list[int] | None = list(model.eos_ids) or None
    if eos and len(eos) == 1:
        eos = eos[0]
    scaling = None
    if model.rope_scaling:
        names = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position")
        scaling = {"rope_type": "llama3"}
        scaling |= {hf: getattr(model.rope_scaling, name) for hf, name in zip(_LLAMA3_FIELDS, names, strict=True)}
    return {
        "architectures": [FAMILIES[model.family]],
        "model_type": model.family,
        "vocab_size": model.vocab_size,
        "hidden_size": model.model_dim,
        "intermediate_size": model.ffn_dim,
        "num_hidden_layers": model.num_layers,
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.max_positions,
        "rope_theta": model.rope_theta,
        "rope_scaling": scaling,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tied_head,
        "bos_token_id": model.bos_id,
        "eos_token_id": eos,
        "pad_token_id": model.pad_id,
        "hidden_act": "silu",
        "attention_bias": False,
        **(_experts_to_hf(model.family, model.moe) if model.moe else {}),
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
        return from_hf(raw)
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


def _experts(family: str, given: _Fields) -> dict[str, Any]:
    """Fields of MoEConfig."""
    # transformers 5 writes the second for Qwen3, older files and the hub the first
    names = ("num_experts", "num_local_experts") if family == "qwen3_moe" else ("num_experts",)
    counts = {name: given.config[name] for name in names if given.config.get(name) is not None}
    if len(set(counts.values())) > 1:
        given.problems.append(f"num_experts, num_local_experts: {list(counts.values())} differ; remove one of the two")
    given.fixed("decoder_sparse_step", 1, 1)
    values = {
        "num_experts": given.number(next(iter(counts), "num_experts")),
        "experts_per_token": given.number("num_experts_per_tok"),
        "ffn_dim": given.number("moe_intermediate_size"),
        "renormalise": given.flag("norm_topk_prob", False),
    }
    if family == "qwen2_moe":
        given.fixed("qkv_bias", True, True)
        values |= {"shared_ffn_dim": given.number("shared_expert_intermediate_size"), "shared_gate": True}
    return values


def _experts_to_hf(family: str, moe: MoEConfig) -> dict[str, Any]:
    shared = family == "qwen2_moe"
    said = {"num_experts", "experts_per_token", "ffn_dim", "renormalise"} | ({"shared_ffn_dim"} if shared else set())
    wanted = {field.name: field.default for field in fields(MoEConfig) if field.name not in said} | {"shared_gate": shared}
    problems = [
        f"moe.{name}: is {getattr(moe, name)!r}, and there it is {value!r}"
        for name, value in wanted.items()
        if getattr(moe, name) != value
    ]
    if problems:
        raise ValueError(f"a {FAMILIES[family]} config.json cannot say what the experts do: " + "; ".join(problems))
    return {
        "num_experts": moe.num_experts,
        "num_experts_per_tok": moe.experts_per_token,
        "moe_intermediate_size": moe.ffn_dim,
        "norm_topk_prob": moe.renormalise,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
        **({"shared_expert_intermediate_size": moe.shared_ffn_dim, "qkv_bias": True} if shared else {}),
    }


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
