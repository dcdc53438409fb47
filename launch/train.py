"""Trains: `python -m launch.train --config configs/NAME.py [--config.key=value ...]`.

The same command again goes on from the last checkpoint. The last line on standard output is one JSON object.

    python -m launch.train --replay runs/NAME --step N [--config.trainer.key=value ...]

takes a recorded step again, with the batch it had: bit for bit, or with what is overridden of trainer and advantages.
"""

import argparse
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from launch.cli import Parser, override, parse_config, run_main, set_up_jax, use_huge_pages
from rl.config import RunConfig, build
from rl.loop import train
from rl.replay import replay, values_of
from rl.rollout import Rollout


class TerminalReporter:
    """Progress with reward, tokens/s and time left, on standard error."""

    def __init__(self, title: str):
        self.console = Console(stderr=True)
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self.progress = Progress(*columns, console=self.console, disable=not self.console.is_terminal)
        self.task = self.progress.add_task(title)
        self.title = title

    def __enter__(self) -> "TerminalReporter":
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def phase(self, text: str) -> None:
        self.console.print(f"[bold]{self.title}[/bold]: {text}")

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None:
        shown = f"loss {metrics['loss']:.4f}"
        if metrics["phase"] == "rl":
            speed = metrics["sampled_tokens"] / max(metrics["time/rollout_s"], 1e-9)
            shown = f"reward {metrics['reward']:.3f}  {shown}  gap {metrics['max_abs_gap']:.1e}  {speed:.0f} tok/s"
        shown = f"{metrics['phase']} {step}/{total}  {shown}  {metrics['time/step_s']:.1f} s"
        self.progress.update(self.task, completed=step, total=total, description=f"{self.title}: {shown}")
        if self.progress.disable:
            self.console.print(shown, highlight=False)

    def transcript(self, step: int, rollout: Rollout, text: str) -> None:
        self.console.rule(f"step {step}, task {rollout.task.key}, reward {rollout.reward}")
        self.console.print(text, markup=False, highlight=False)
        self.console.rule()


def main() -> None:
    parser = Parser(__doc__)
    parser.add_argument("--replay", metavar="RUN_DIR", help="take a step of this run again; without --config")
    parser.add_argument("--step", type=int, help="of --replay: which")
    if any(text.partition("=")[0] == "--replay" for text in sys.argv[1:]):
        result = take_again(*parser.parse_known_args())
    else:
        arguments, config, config_json = parse_config(parser)
        if arguments.step is not None:
            raise ValueError("--step: is a step of a run to take again; name the run with --replay")
        set_up_jax()
        with TerminalReporter(config.name) as reporter:
            result = train(config, config_json, reporter)
    print(json.dumps(result), flush=True)


def take_again(arguments: argparse.Namespace, overrides: Sequence[str]) -> dict[str, Any]:
    if arguments.step is None:
        raise ValueError("--step: is missing; say which step of the run to take again")
    directory = Path(arguments.replay)
    config: RunConfig = build(RunConfig, override(values_of(directory), overrides))
    set_up_jax()
    with TerminalReporter(f"{config.name} again") as reporter:
        return replay(directory, arguments.step, config, reporter.phase)


if __name__ == "__main__":
    use_huge_pages()
    run_main(main)
