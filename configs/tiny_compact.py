"""TODO"""

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
