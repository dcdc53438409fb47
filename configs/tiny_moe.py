"""A tiny random mixture of experts learns one-digit sums' shape, with the sampler's routing replayed by the trainer (R3).

    python -m launch.train --config configs/tiny_moe.py

Hardware: any CPU. Time: about a minute, most of it compiling. Expect: mean held-out reward (of at most 2.5) from 0.02 to 0.5,
log-prob gap and `router/mismatch` exactly 0, `router/max_load` from 3.7 to 2.2 (1 is even, 4 is two experts for all).
"""

from typing import Any

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config: Any = tiny.get_config()
    config.name = "tiny_moe"
    config.model.update(
        {
            "shape": {
                "family": "qwen3_moe",
                "tied_head": False,
                "moe": {"num_experts": 8, "experts_per_token": 2, "ffn_dim": 64},
            }
        }
    )
    del config.engine.rules["ffn"], config.trainer.rules["ffn"]  # experts have one of their own
    config.trainer.update({"router_replay": "R3", "balance_coef": 1e-2, "z_coef": 1e-4})
    return config
