"""TODO"""

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
