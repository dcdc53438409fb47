"""A tiny random model uses a calculator: a call in text, its result, an answer; each turn is trained on.

    python -m launch.train --config configs/tiny_tools.py

Hardware: any CPU. Time: about 45 seconds on 2 cores. Expect: mean held-out reward (of at most 5) from 0.02 to 0.84; and the
largest gap of log-probs 0. It learns the shape of answers, no sums.
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config = tiny.get_config()
    config.name = "tiny_tools"
    config.steps = 40
    config.environment = {
        "kind": "calculator",
        "renderer": "chatml",
        "max_turns": 6,
        "options": {
            "max_value": 9,
            "calls": 1,
            "declare": False,
            "weights": {"exact": 1.0, "right": 1.0, "digits": 0.5, "used": 1.0, "typed": 0.5, "copied": 1.0},
        },
    }
    return config
