"""TODO"""

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
