"""Preset for a TPU slice: Qwen3-30B-A3B, 128 experts of which a token passes 8, on v5p-32 (2x2x4: 16 chips).

    python -m launch.bench aot --train --config configs/qwen3_30b_a3b_v5p16.py --topology v5p:2x2x4

Hardware: 16 chips of 95 GB; compiling needs none of them. Time: minutes. Expect: under 95 GB a chip (launch/README.md has the
numbers). The trainer splits rows over both axes, the weights' embedding dim over `fsdp` and the experts over `expert`; the
engine, on one host of the slice, splits kv heads (it has 4) over `tensor` and the experts over the same chips. Several hosts
train here, and a run of several processes does not sample yet.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import qwen3_8b_v6e8


def get_config() -> ConfigDict:
    config: Any = qwen3_8b_v6e8.get_config()
    config.name = "qwen3_30b_a3b_v5p16"
    config.model.source = "Qwen/Qwen3-30B-A3B"
    config.engine.mesh = {"tensor": 4}
    config.engine.rules = {"heads": "tensor", "kv_heads": "tensor", "vocab": "tensor", "experts": "tensor"}
    config.trainer.rows = 16
    config.trainer.mesh = {"fsdp": 4, "expert": 4}
    config.trainer.rules = {"embed": "fsdp", "experts": "expert"}
    return config
