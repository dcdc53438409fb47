"""Trains: `python -m launch.train --config configs/NAME.py [--config.key=value ...]`.

The same command again goes on from the last checkpoint. The last line on standard output is one JSON object.
"""

import json
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from launch.cli import Parser, parse_config, run_main, set_up_jax, use_huge_pages
from rl.loop import train
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
    _, config, config_json = parse_config(Parser(__doc__))
    set_up_jax()
    with TerminalReporter(config.name) as reporter:
        result = train(config, config_json, reporter)
    print(json.dumps(result), flush=True)


if __name__ == "__main__":
    use_huge_pages()
    run_main(main)
