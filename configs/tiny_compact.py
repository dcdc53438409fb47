"""A tiny random model adds numbers over turns whose history is cut back to its own summary (compaction).

    python -m launch.train --config configs/tiny_compact.py

Hardware: any CPU. Time: about 45 seconds on 2 cores. Expect: mean held-out reward (of at most 3) from 0.02 to 0.54; and the
largest gap of log-probs 0. It learns the shape of answers, no sums.
"""

from ml_collections import ConfigDict

from configs import tiny


def get_config() -> ConfigDict:
    config = tiny.get_config()
    config.name = "tiny_compact"
    config.steps = 40
    config.environment = {
        "kind": "tally",
        "renderer": "chatml",
        "max_turns": 6,
        "options": {
            "max_value": 9,
            "numbers": 4,
            "turns": 2,
            "weights": {"exact": 1.0, "right": 1.0, "digits": 0.5, "summary": 0.5},
        },
    }
    return config
