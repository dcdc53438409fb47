"""A tiny random model learns one-digit sums' shape: the whole loop in seconds, for CI and for trying things.

    python -m launch.train --config configs/tiny.py

Hardware: any CPU. Time: about 20 seconds, most of it compiling. Expect: mean held-out reward (of at most 2.5) from 0.02 to 0.5.
"""

from ml_collections import ConfigDict


def get_config() -> ConfigDict:
    config = ConfigDict()
    config.name = "tiny"
    config.seed = 0
    config.steps = 20
    config.model = {
        "source": "random",
        "dtype": "bfloat16",
        "shape": {
            "family": "llama",
            "vocab_size": 264,
            "model_dim": 64,
            "ffn_dim": 128,
            "num_layers": 2,
            "num_heads": 4,
            "num_kv_heads": 2,
            "head_dim": 16,
            "max_positions": 512,
            "tied_head": True,
        },
    }
    config.environment = {
        "kind": "arithmetic",
        "renderer": "chatml",
        "options": {"max_value": 9, "weights": {"exact": 1.0, "right": 1.0, "digits": 0.5}},
    }
    config.rollout = {"prompts": 4, "samples": 8, "max_tokens": 4}
    config.engine = {
        "max_context": 128,
        "max_slots": 32,
        "num_pages": 256,
        "page_size": 8,
        "tokens_per_step": 128,
        "decode_steps": 4,
        "context_buckets": (128,),
        "slot_buckets": (32,),
        "mesh": {"tensor": 1},
        "rules": {"heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "vocab": "tensor"},
        "first_device": 0,
    }
    config.trainer = {
        "tokens_per_row": 512,
        "rows": 1,
        "remat": "block",
        "loss": "grpo",
        "learning_rate": 3e-3,
        "mesh": {"fsdp": 1, "tensor": 1},
        "rules": {"embed": "fsdp", "heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "vocab": "tensor"},
    }
    config.evaluation = {"tasks": 16, "samples": 4}
    config.checkpoint = {"every": 5, "keep": 2}
    config.export = False
    config.transcripts_every = 10
    return config
