"""Scores a model on the held-out tasks of a config: `python -m launch.evaluate --config configs/NAME.py [--model DIR]`.

Prints one JSON object: mean reward at the rollout temperature, greedily, and of the best constant answer.
"""

import json
import sys
from dataclasses import replace

from absl import app, flags
from ml_collections import config_flags

from launch.cli import run_main, set_up_jax
from rl.config import RunConfig, build
from rl.loop import evaluate
from rl.run import make_run

CONFIG = config_flags.DEFINE_config_file("config", None, "Path of a file in configs/.")
MODEL = flags.DEFINE_string("model", None, "A Hugging Face directory or hub id, instead of the config's model.source.")


def main(_: list[str]) -> None:
    def run() -> None:
        config: RunConfig = build(RunConfig, CONFIG.value.to_dict())
        if MODEL.value is not None:
            config = replace(config, model=replace(config.model, source=MODEL.value))
        set_up_jax()
        policy = make_run(config)
        policy.engine.warm_up()
        print(json.dumps(evaluate(policy, 0)), flush=True)

    run_main(run)


if __name__ == "__main__":
    flags.mark_flag_as_required("config")
    app.run(main, sys.argv)
