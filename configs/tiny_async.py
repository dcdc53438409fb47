"""The tiny run with rollouts beside training: six engines on six devices, the trainer on two, at most two versions apart.

    XLA_FLAGS=--xla_force_host_platform_device_count=8 python -m launch.train --config configs/tiny_async.py

Hardware: any CPU, as eight virtual devices. Time: about two minutes, most of it compiling. Expect: mean held-out reward (of at
most 2.5) from 0.03 to 0.5, as configs/tiny.py; `lag_max` at most 2; `wait/trainer_s`, `wait/rollout_s`: who waits for whom.
"""

from typing import Any

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config: Any = tiny.get_config()
    config.name = "tiny_async"
    config.orchestrator = {"lag": 2}
    # decoupled PPO: the ratio's denominator is the policy one version back, and the sampler's distance to that is a weight
    config.trainer.update({"old_logp": "interpolated", "correction": {"kind": "decoupled"}})
    config.trainer.update({"mesh": {"fsdp": 2, "tensor": 1}, "rows": 2})
    return config
