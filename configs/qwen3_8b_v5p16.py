"""Preset for a TPU slice: the training step of Qwen3-8B on v5p-32 (2x2x4: 16 chips), fully sharded.

    python -m launch.bench aot --train --config configs/qwen3_8b_v5p16.py --topology v5p:2x2x4

Hardware: 16 chips of 95 GB; compiling needs none of them. Time: minutes. Expect: under 95 GB a chip (launch/README.md has the
numbers). It is the step that is shown here: four hosts have these chips, and a run of several processes does not sample yet.
"""

from ml_collections import ConfigDict

from configs import qwen3_8b_v6e8


def get_config() -> ConfigDict:
    config = qwen3_8b_v6e8.get_config()
    config.name = "qwen3_8b_v5p16"
    config.update({"engine": {"mesh": {"tensor": 8}}, "trainer": {"rows": 16, "mesh": {"fsdp": 16}}})
    return config
