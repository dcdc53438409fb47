"""Preset for a TPU slice: Qwen3-8B on v6e-8, one host with 8 chips: every chip trains (fsdp 8) and samples (tensor 8).

    python -m launch.train --config configs/qwen3_8b_v6e8.py

Hardware: one v6e-8 host (8 x 32 GB). Masters, AdamW and gradients take 16 GB a chip, the engine's weights 2, its pages 5;
several hosts come with a later change. Time and the number to expect: not measured; no TPU was at hand.

Data parallel first, tensor parallel last: the trainer splits rows and weights over `fsdp`; the engine splits kv heads
(Qwen3-8B has 8), heads, ffn and vocabulary over `tensor`.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.name = "qwen3_8b_v6e8"
    config.seed = 0
    config.steps = 500
    config.model = {"source": "Qwen/Qwen3-8B", "dtype": "bfloat16"}
    config.environment = {
        "kind": "reasoning_gym",
        "renderer": "qwen3",
        "options": {"dataset": "countdown", "answer_rule": "whole"},
    }
    config.rollout = {"prompts": 32, "samples": 16, "max_tokens": 4096}
    config.engine = {
        "max_context": 8192,
        "max_slots": 256,
        "num_pages": 2048,
        "page_size": 128,
        "tokens_per_step": 4096,
        "decode_steps": 16,
        "slot_buckets": (64, 256),
        "context_buckets": (2048, 8192),
        "mesh": {"tensor": 8},
        "rules": {"heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "vocab": "tensor"},
    }
    config.trainer = {
        "tokens_per_row": 8192,
        "rows": 8,
        "remat": "block",
        "loss": "dapo",
        "learning_rate": 1e-6,
        "warmup_steps": 10,
        "mesh": {"fsdp": 8},
        "rules": {"embed": "fsdp"},
    }
    config.evaluation = {"tasks": 256, "samples": 1, "every": 50}
    config.checkpoint = {"every": 50, "keep": 3}
    return config
