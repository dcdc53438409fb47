"""Runs that learn from a file (`data` in the config): what they are made of, and their step.

Nothing is sampled, so there is no engine, unless the config names an environment: then the held-out tasks are evaluated as in
any other run. The layout of a micro-batch is made for the file: its longest example, its longest answer.
"""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from models.attention import KEY_BLOCK
from models.config import ModelConfig
from models.tokenizer import ByteTokenizer, Tokenizer
from rl.config import NO_TASKS, EngineSection, RolloutSection, RunConfig
from rl.datasets import Dataset, load
from rl.placement import placed
from rl.renderers import Renderer
from rl.run import (
    Run,
    check_prompts,
    make_environment,
    make_fleet,
    make_model,
    make_renderer,
    make_steps,
    make_trainer,
)
from rl.trainer import Trainer


@dataclass
class DataRun:
    """A policy that learns from a file, and no engine."""

    config: RunConfig
    model: ModelConfig
    source: Path | None
    """the Hugging Face directory the weights came from"""
    tokenizer: Tokenizer | ByteTokenizer
    renderer: Renderer
    trainer: Trainer
    compile_s: float = 0.0

    def warm_up(self) -> None:
        """Compiles every program of a step; after it nothing is compiled."""
        started = time.perf_counter()
        self.trainer.warm_up()
        self.compile_s += time.perf_counter() - started

    def publish(self) -> None:
        """There is no engine to publish to."""

    def close(self) -> None:
        """There is nothing to end."""


def load_data(config: RunConfig, report: Callable[[str], None]) -> Dataset | None:
    """The run's file, rendered; None where it learns from rollouts.

    Raises:
        ValueError: the file, or the renderer, is not usable.
    """
    if (section := config.data) is None:
        return None
    model, _, tokenizer = make_model(config.model)
    limit = model.max_positions if config.trainer.depth_first else config.trainer.tokens_per_row
    data = load(Path(section.path), config.trainer.loss, make_renderer(config.environment, tokenizer), limit, section.too_long)
    dropped = f"; {data.dropped} of more than {limit} tokens were dropped" if data.dropped else ""
    report(f"{section.path}: {len(data.examples)} examples, the longest of {data.longest} tokens{dropped}")
    return data


def num_steps(config: RunConfig, data: Dataset | None) -> int:
    """Optimizer steps of a run. The last one of some epochs over a file is filled up from the epoch after them."""
    if data is None or config.data is None or not config.data.epochs:
        return config.warmup.steps + config.steps
    return -(-config.data.epochs * len(data.examples) // config.data.batch)


def make_data_run(config: RunConfig, data: Dataset) -> Run | DataRun:
    """All pieces of a run that learns from a file.

    Raises:
        ValueError: a part of the config does not fit the model, the devices or another part.
    """
    model, source, tokenizer = make_model(config.model)
    if config.environment.kind == NO_TASKS:
        trainer = make_trainer(_fitted(config, data), model, source)
        return DataRun(config, model, source, tokenizer, make_renderer(config.environment, tokenizer), trainer)
    environment, renderer = make_environment(config, tokenizer)
    assert config.data is not None
    check_prompts(replace(config, steps=0, data=replace(config.data, epochs=1)), environment, renderer)
    trainer = make_trainer(_fitted(config, data), model, source)
    fleet, steps = make_fleet(config, model, trainer), make_steps(config, environment)
    return Run(config, model, source, tokenizer, environment, renderer, trainer, fleet, steps)


def _fitted(config: RunConfig, data: Dataset) -> RunConfig:
    """The config with sizes from which the trainer's layout comes out as the file needs it."""
    assert config.data is not None
    return replace(
        placed(config),
        rollout=RolloutSection(prompts=config.data.batch, samples=2, max_tokens=data.longest_trained),
        environment=replace(config.environment, max_turns=1),
        engine=EngineSection(max_context=-(-data.longest // KEY_BLOCK) * KEY_BLOCK),
    )


def data_step(run: Run | DataRun, data: Dataset, first: int) -> dict[str, Any]:
    """One optimizer step on the examples of the stream from `first` on."""
    assert run.config.data is not None
    samples = data.samples(run.config.seed, first, run.config.data.batch)
    return {"phase": data.kind, "epoch": first / len(data.examples), **run.trainer.train(samples)}
