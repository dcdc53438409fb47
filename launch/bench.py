"""Benchmarks, each a command: `python -m launch.bench NAME [--json] ...`. The last line of --json is one object.

loop   where a step's time goes, and tokens per second of each phase
       [--config configs/tiny.py] [--config.key=value ...] [--steps 3]
serve  the engine under a load, next to what the machine could do (launch/serving.py)
       --load uniform|grpo|agent --model DIR [--against transformers|fast] [--requests-scale small]
train  one training step, next to what the machine could do (launch/training.py)
       [--model DIR] [--against transformers|fast] [--scale small]
tree   training on a trie next to training on its branches without sharing (launch/tree.py)
       [--scale small]
r3     routing replay on a small mixture of experts: what it mends, and what recording costs (launch/r3.py)
       [--scale small] [--plot FILE]
parity  each sampled token's log-prob in every company and layout, next to the one it has alone (launch/parity.py)
       [--model DIR] [--numerics exact|fast|both] [--scale small]
delta  bitwise deltas of realistic weights: size next to the entropy bound, and speed on one core (launch/delta.py)
       [--model DIR] [--scale small]
pause  what an update of a serving engine costs, in each mode (launch/pause.py)
       [--model DIR] [--scale small]
gateway  what the gateway costs over the bare engine; sessions at once; breaks of histories (launch/gateway_bench.py)
       [--scale small]
async  sampling beside training by lag, on a virtual clock: the real loop, buffer and scheduler (launch/asynchrony.py)
       [--law NAME] [--scale small]
kv     bytes of keys and values (launch/platforms.py)
       [--model NAME_OR_DIR | --config FILE] [--batch 64] [--context 32768]
aot    the engine's programs, or the training step, compiled for a TPU topology, without a TPU (launch/aot.py)
       [--train] [--config configs/qwen3_8b_v6e8.py] [--config.key=value ...] [--topology v6e:2x4] [--tensor CHIPS]
"""

import argparse
import json
import sys
from collections.abc import Callable
from typing import Any

from launch import aot, asynchrony, delta, gateway_bench, parity, pause, platforms, r3, serving, training, tree
from launch.cli import Parser, read_config, run_main, set_up_jax, use_huge_pages
from rl.config import RunConfig, build
from rl.loop import evaluate
from rl.run import make_run
from rl.sides import plain_step

PHASES = ("rollout", "reward", "pack", "train", "publish", "evaluate")


def loop(arguments: argparse.Namespace) -> dict[str, Any]:
    """Runs a few steps of a config and one evaluation; seconds are per step, but `evaluate` is per evaluation."""
    if arguments.steps < 1:
        raise ValueError(f"--steps: must be at least 1, got {arguments.steps}")
    config: RunConfig = build(RunConfig, read_config(arguments.config, arguments.overrides))
    run = make_run(config)
    run.warm_up()
    lines = [plain_step(run, number) for number in range(arguments.steps)]
    evaluation = evaluate(run, 0)

    def mean(key: str) -> float:
        return sum(line[key] for line in lines) / len(lines)

    seconds = {phase: mean(f"time/{phase}_s") for phase in PHASES[:-1]}
    step_s = sum(seconds.values())
    return {
        "config": config.name,
        "steps": arguments.steps,
        "step_s": step_s,
        "seconds": seconds | {"evaluate": evaluation["time/evaluate_s"]},
        "share": {phase: value / step_s for phase, value in seconds.items()},
        "tokens_per_s": {
            "rollout_sampled": mean("sampled_tokens") / seconds["rollout"],
            "rollout_computed": mean("computed_tokens") / seconds["rollout"],
            "reward": mean("sampled_tokens") / max(seconds["reward"], 1e-9),
            "pack": mean("tokens_in") / seconds["pack"],
            "train_before_sharing": mean("tokens_in") / seconds["train"],
            "train_in_rows": mean("tokens_kept") / seconds["train"],
            "publish": mean("tokens_in") / seconds["publish"],
            "evaluate": evaluation["computed_tokens"] / evaluation["time/evaluate_s"],
        },
        "compile_s": run.compile_s,
    }


def show(result: dict[str, Any], indent: int = 0) -> None:
    """The result as text."""
    for key, value in result.items():
        if isinstance(value, dict):
            print(f"{' ' * indent}{key}:")
            show(value, indent + 2)
        else:
            print(f"{' ' * indent}{key}: {value:.4g}" if isinstance(value, float) else f"{' ' * indent}{key}: {value}")


def main() -> None:
    parser = Parser(__doc__, prog="python -m launch.bench")
    names = parser.add_subparsers(dest="name", required=True)
    command = names.add_parser("loop")
    command.add_argument("--config", default="configs/tiny.py")
    command.add_argument("--steps", type=int, default=3)
    benchmarks: dict[str, Callable[[argparse.Namespace], dict[str, Any]]] = {"loop": loop}
    benchmarks |= {"serve": serving.serve, "train": training.train, "tree": tree.tree, "r3": r3.r3, "delta": delta.delta}
    benchmarks |= {"pause": pause.pause, "async": asynchrony.asynchrony, "gateway": gateway_bench.gateway}
    benchmarks |= {"parity": parity.parity}
    serving.add_arguments(names.add_parser("serve"))
    training.add_arguments(names.add_parser("train"))
    tree.add_arguments(names.add_parser("tree"))
    r3.add_arguments(names.add_parser("r3"))
    delta.add_arguments(names.add_parser("delta"))
    pause.add_arguments(names.add_parser("pause"))
    asynchrony.add_arguments(names.add_parser("async"))
    gateway_bench.add_arguments(names.add_parser("gateway"))
    parity.add_arguments(names.add_parser("parity"))
    benchmarks |= platforms.add_commands(names) | aot.add_commands(names)
    for each in names.choices.values():
        each.add_argument("--json", action="store_true", help="print one JSON object on the last line")
    arguments, arguments.overrides = parser.parse_known_args()
    if arguments.overrides and not getattr(arguments, "config", ""):
        raise ValueError(f"{arguments.overrides[0]}: unknown argument; --help shows the usage")
    set_up_jax()
    result = benchmarks[arguments.name](arguments)
    if arguments.json:
        print(json.dumps(result), flush=True)
    else:
        (parity.show if arguments.name == "parity" else show)(result)
    if not result.get("ok", True):
        sys.exit(1)


if __name__ == "__main__":
    if sys.argv[1:2] in (["train"], ["delta"]):
        use_huge_pages()  # as launch.train does; the peer's process has them too
    if sys.argv[1:2] == ["delta"]:
        delta.one_core()
    if sys.argv[1:2] == ["parity"]:
        parity.eight_devices()
    run_main(main)
