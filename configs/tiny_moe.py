"""A tiny random mixture of experts learns one-digit sums' shape, with the sampler's routing replayed by the trainer (R3).

python -m launch.train --config configs/tiny_moe.py
"""

from typing import Any

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    fields: Any = tiny.get_config().to_dict()
    for side in ("engine", "trainer"):
        del fields[side]["rules"]["ffn"]  # no layer has it: experts have an `expert_ffn`
    config = ConfigDict(fields)
    config.name = "tiny_moe"
    moe = {"num_experts": 8, "experts_per_token": 2, "ffn_dim": 64}
    config.update({"model": {"shape": {"family": "qwen3_moe", "tied_head": False, "moe": moe}}})
    config.update({"trainer": {"router_replay": "R3", "balance_coef": 1e-2, "z_coef": 1e-4}})
    return config
