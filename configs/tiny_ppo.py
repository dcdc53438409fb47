"""The tiny random model learns one-digit sums' shape by PPO: a critic and generalised advantage estimation, in seconds.

    python -m launch.train --config configs/tiny_ppo.py

Hardware: any CPU. Time: about half a minute, most of it compiling. Expect: mean held-out reward (of at most 2.5) from 0.03 to
0.5, and the critic's mean value (`critic/return` in metrics.jsonl) following the reward.
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config = tiny.get_config()
    config.name = "tiny_ppo"
    config.update({"trainer": {"loss": "ppo"}})
    config.advantages = {"kind": "gae", "gamma": 1.0, "lam": 0.95}
    config.critic = {"learning_rate": 3e-3}
    return config
