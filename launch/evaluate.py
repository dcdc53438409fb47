"""Scores a model on the held-out tasks of a config: `python -m launch.evaluate --config configs/NAME.py [--model DIR]`.

Prints one JSON object: mean reward at the rollout temperature, greedily, and of the best constant answer.
"""

import json
from dataclasses import replace

from launch.cli import Parser, parse_config, run_main, set_up_jax
from rl.loop import evaluate
from rl.run import make_run


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument(
        "--model", metavar="DIR", help="a Hugging Face directory or hub id, instead of the config's model.source"
    )
    arguments, config, _ = parse_config(parser)
    if arguments.model is not None:
        config = replace(config, model=replace(config.model, source=arguments.model))
    set_up_jax()
    policy = make_run(config)
    policy.fleet.start(policy.trainer)
    print(json.dumps(evaluate(policy, 0)), flush=True)


if __name__ == "__main__":
    run_main(main)
