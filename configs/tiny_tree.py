"""A tiny random model halves a sum, asks itself for both parts side by side, and adds them: a tree of calls.

    python -m launch.train --config configs/tiny_tree.py

Hardware: any CPU. Time: about 25 seconds on 2 cores. Expect: mean held-out reward (of at most 3) from 0.02 to 0.54; and the
largest gap of log-probs 0. It learns the shape of answers, no sums.
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config = tiny.get_config()
    config.name = "tiny_tree"
    config.steps = 40
    config.environment = {
        "kind": "halves",
        "renderer": "chatml",
        "max_turns": 6,
        "options": {
            "max_value": 9,
            "terms": 4,
            "depth": 1,
            "weights": {"exact": 1.0, "right": 1.0, "digits": 0.5, "parts": 0.5},
        },
    }
    config.advantages = {"calls": "own"}
    return config
