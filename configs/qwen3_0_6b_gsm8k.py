"""Qwen3-0.6B on grade-school arithmetic word problems, thinking kept in the history.

    python -m launch.train --config configs/qwen3_0_6b_gsm8k.py

The tasks are reasoning_gym's `gsm_symbolic` (problems in the form of GSM8K, made by template, with their own scorer), so no
data set is downloaded; the model comes from the hub by its id.

Hardware: one GPU or TPU chip with 40 GB or more (pages 15 GB, weights, AdamW and gradients 11 GB). Time and the number to
expect: not measured; no such machine was at hand.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.name = "qwen3_0_6b_gsm8k"
    config.seed = 0
    config.steps = 200
    config.model = {"source": "Qwen/Qwen3-0.6B", "dtype": "bfloat16"}
    config.environment = {
        "kind": "reasoning_gym",
        "renderer": "qwen3",
        "options": {
            "dataset": "gsm_symbolic",
            "answer_rule": "whole",
            "question": "{question}\nThink first. Then answer with the number alone.",
        },
    }
    config.rollout = {"prompts": 16, "samples": 8, "max_tokens": 1024}
    config.engine = {
        "max_context": 2048,
        "max_slots": 128,
        "num_pages": 1024,
        "page_size": 128,
        "tokens_per_step": 2048,
        "decode_steps": 8,
        "slot_buckets": (32, 128),
        "context_buckets": (1024, 2048),
        "mesh": {"data": 1},
    }
    config.trainer = {
        "tokens_per_row": 8192,
        "remat": "block",
        "loss": "dapo",
        "loss_options": {"clip_low": 0.2, "clip_high": 0.28},
        "learning_rate": 1e-6,
        "warmup_steps": 5,
        "mesh": {"data": 1},
    }
    config.evaluation = {"tasks": 128, "samples": 2, "every": 25}
    config.checkpoint = {"every": 25, "keep": 2}
    return config
