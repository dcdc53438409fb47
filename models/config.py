"""Shape and constants of a decoder.

Legend: D model, H query heads, K kv heads, h head dim, F ffn, V vocab, E experts, k experts per token.
"""

from dataclasses import dataclass

import numpy as np

FAMILIES = {
    "llama": "LlamaForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen2_moe": "Qwen2MoeForCausalLM",
}


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
