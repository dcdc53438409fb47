"""From a RunConfig to the pieces of a run: model, tokenizer, environment, renderer, trainer, engine."""

import math
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from inference.config import EngineConfig
from inference.engine import Engine
from inference.types import SamplingParams
from models.attention import KEY_BLOCK
from models.config import ModelConfig
from models.exact import is_exact
from models.hf import load_hf, resolve, save_hf
from models.hf_config import read_config
from models.tokenizer import ByteTokenizer, Tokenizer
from models.transformer import describe
from rl.agents import Steps, stepping
from rl.build import build, pick
from rl.config import EngineSection, EnvironmentSection, ModelSection, RunConfig
from rl.environments import EVAL_KEYS, TRAIN_KEYS, AgentEnvironment, Environment, Task, Tasks, constant_answer
from rl.episodes import Episodes
from rl.fleet import Fleet, Local, Served, published_params
from rl.forest import Layout
from rl.kinds import make
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.placement import mesh_of, placed, shardings_of
from rl.renderers import RENDERERS, Renderer
from rl.rollout import Batch, Rollout
from rl.routes import RouterConfig
from rl.trainer import Trainer
from rl.workers import Inline, Workers
from sharding.reshard import init
from sharding.store import WeightStore


@dataclass
class Run:
    """A policy on two engines and what it plays with."""

    config: RunConfig
    model: ModelConfig
    source: Path | None
    """the Hugging Face directory the weights came from"""
    tokenizer: Tokenizer | ByteTokenizer
    environment: Environment | AgentEnvironment
    renderer: Renderer
    trainer: Trainer
    fleet: Fleet
    """its engines"""
    steps: Steps | None
    """who runs the environment's steps; None: its agents run in this process"""
    critic: Trainer | None = None
    """reads and learns values, where advantages need them"""
    compile_s: float = 0.0
    _constant: tuple[list[int], tuple[str, float] | None] | None = None

    def warm_up(self) -> None:
        """Compiles every program of a step; after it nothing is compiled."""
        started = time.perf_counter()
        self.trainer.warm_up()
        if self.critic is not None:
            self.critic.warm_up()
        if self.config.warmup.steps:
            self.trainer.warm_up("sft")
        self.fleet.start(self.trainer)
        self.compile_s += time.perf_counter() - started

    def constant_answer(self, keys: Sequence[int]) -> tuple[str, float] | None:
        """As `rl.environments.constant_answer`; scoring every answer on every task is done once."""
        if self._constant is None or self._constant[0] != list(keys):
            self._constant = list(keys), constant_answer(self.environment, keys)
        return self._constant[1]

    def publish(self) -> None:
        """The trainer's weights become the engines'."""
        self.fleet.swap(self.fleet.stage(self.trainer))

    def close(self) -> None:
        """Ends the processes that run environments and engines, if any do."""
        if self.steps is not None:
            self.steps.close()
        close = getattr(self.environment, "close", None)
        if close is not None:
            close()
        self.fleet.close()

    @cached_property
    def episodes(self) -> Episodes:
        """What runs on the engines."""
        if isinstance(self.environment, AgentEnvironment):
            begin = self.environment.run
        else:
            assert self.steps is not None
            begin = partial(stepping, self.steps)
        return Episodes(
            self.fleet.sampler(),
            begin,
            self.renderer,
            seed=self.config.seed,
            max_context=longest_branch(self.config),
            max_turns=self.config.environment.max_turns,
            seconds=self.config.orchestrator.episode_s,
        )

    def start(self, tasks: Sequence[Task], *, label: str, samples: int, greedy: bool = False, trainable: bool = False) -> Batch:
        """Begins episodes with the config's sampling; `episodes.poll` brings them on."""
        config = self.config.rollout
        params = SamplingParams(max_tokens=config.max_tokens, temperature=0.0 if greedy else config.temperature)
        return self.episodes.start(tasks, samples=samples, params=params, label=label, trainable=trainable)

    def rollout(
        self, tasks: Sequence[Task], *, label: str, samples: int, greedy: bool = False, trainable: bool = False
    ) -> list[Rollout]:
        """Begins episodes and goes on until they are done."""
        return self.episodes.finish(self.start(tasks, label=label, samples=samples, greedy=greedy, trainable=trainable))


def export(trainer: Trainer, source: Path | None, directory: Path, fused_experts: bool = False) -> None:
    """Writes the published weights as a Hugging Face directory, with the tokenizer files of `source`."""
    definition, masters = trainer.definition, trainer.state.masters
    dtype = np.dtype(definition.dtype)
    save_hf(directory, definition.config, masters, tokenizer_files_from=source, dtype=dtype, fused=fused_experts)


def make_model(section: ModelSection) -> tuple[ModelConfig, Path | None, Tokenizer | ByteTokenizer]:
    """Shape and tokenizer of a model, checked against each other, and its directory if it has one."""
    if section.source == "random":
        model, source, tokenizer = build(ModelConfig, section.shape, "config.model.shape"), None, ByteTokenizer()
    else:
        source = resolve(section.source)
        model, tokenizer = read_config(source), Tokenizer.load(source)
    tokenizer.check_vocab(model)
    return model, source, tokenizer


def make_environment(
    config: RunConfig, tokenizer: Tokenizer | ByteTokenizer
) -> tuple[Environment | AgentEnvironment, Renderer]:
    section = config.environment
    return make(section.kind, section.options), make_renderer(section, tokenizer)


def make_steps(config: RunConfig, environment: Environment | AgentEnvironment) -> Inline | Workers | None:
    """Who runs the environment's steps; None where it has agents.

    Raises:
        ValueError: agents are to run in processes of their own.
    """
    section = config.orchestrator
    if isinstance(environment, AgentEnvironment):
        if section.workers:
            raise ValueError(
                f"orchestrator.workers: {environment.name!r} has agents, which run in this process; set it to 0, and let them "
                f"wait for what takes long in a Future"
            )
        return None
    if not section.workers:
        return Inline(environment)
    return Workers(config.environment.kind, config.environment.options, section.workers, section.environment_s)


def make_renderer(section: EnvironmentSection, tokenizer: Tokenizer | ByteTokenizer) -> Renderer:
    if section.renderer not in RENDERERS:
        raise ValueError(f"environment.renderer: {section.renderer!r} is unknown; use one of {sorted(RENDERERS)}")
    try:
        return RENDERERS[section.renderer](tokenizer, **section.renderer_options)
    except TypeError as error:
        raise ValueError(f"environment.renderer_options: {error}") from error


def longest_branch(config: RunConfig) -> int:
    """Most tokens that engine and trainer can hold."""
    longest = config.engine.max_context
    return longest if config.trainer.depth_first else min(longest, config.trainer.tokens_per_row)


def layout_of(config: RunConfig) -> Layout:
    """The fixed shape of the run's micro-batches."""
    most = max(config.rollout.prompts * config.rollout.samples, config.warmup.tasks if config.warmup.steps else 0)
    return Layout(
        rows=config.trainer.rows,
        tokens=config.trainer.tokens_per_row,
        context=_blocks(min(config.engine.max_context, config.trainer.tokens_per_row)),
        branches=most,
        length=config.rollout.max_tokens * config.environment.max_turns,
        path=_blocks(config.engine.max_context) if config.trainer.depth_first else 0,
        shards=config.trainer.mesh.get("context", 1),
    )


def _blocks(tokens: int) -> int:
    """Rounded up to whole key blocks."""
    return -(-tokens // KEY_BLOCK) * KEY_BLOCK


def make_trainer(config: RunConfig, model: ModelConfig, source: Path | None, *, critic: bool = False) -> Trainer:
    """A trainer with the model's own weights, or random ones, as masters; a critic has a value head besides."""
    section = placed(config).trainer
    mesh, rules = mesh_of(section, "trainer")
    optimizer = pick(OptimizerConfig, config.critic if critic else section)
    objective = Objective(loss="value", options=config.critic.loss_options) if critic else section.objective()
    weights = describe(model, value_head=critic)
    shardings = shardings_of(rules, mesh, weights, "trainer")
    masters = init(weights, jax.random.key(config.seed), jnp.float32, shardings)
    if source is not None:
        loaded = load_hf(source, model)
        masters |= {name: jax.device_put(loaded.pop(name), shardings[name]) for name in describe(model)}
    dtype = jnp.dtype(config.model.dtype)
    trainer = Trainer(
        model,
        masters,
        layout=layout_of(config),
        optimizer=optimizer,
        objective=objective,
        others={} if critic or section.loss == "sft" else {"sft": Objective(loss="sft")},
        dtype=dtype,
        remat=section.remat,
        mesh=mesh,
        rules=rules,
        router=pick(RouterConfig, section),
        exact=is_exact(config.model.numerics, model, dtype, mesh, rules, "trainer", section.depth_first),
    )
    if not critic and ("reference_logp" in objective.needs or config.advantages.kl_coef):
        trainer.freeze_reference()
    return trainer


def make_fleet(config: RunConfig, model: ModelConfig, trainer: Trainer) -> Fleet:
    """Engines side by side: here, with the trainer's weights, or in processes that are not started yet."""
    config = placed(config)
    section = config.orchestrator
    if section.processes:
        folder = (Path(config.run_dir) / config.name).absolute()
        url = f"{section.store}{config.name}/" if section.store else f"file://{folder}/weights/"
        command = [sys.executable, "-m", "launch.serve", "--config", str(folder / "config.json"), "--port", "0"]
        weights = describe(model, stacked=False)
        mesh, rules = mesh_of(config.trainer, "trainer")
        return Served(
            section.engines,
            [*command, "--store", url, "--with-parent"],
            lambda: WeightStore(url, section.anchor_every),
            section.mode,
            weights,
            shardings_of(rules, mesh, weights, "trainer"),
            jnp.dtype(config.engine.dtype or config.model.dtype),
        )
    first, own = config.engine.first_device, math.prod(config.engine.mesh.values())
    places = range(first, first + section.engines * own, own)
    engines = [make_engine(replace(config.engine, first_device=place), config, model, trainer) for place in places]
    return Local(engines, section.mode)


def make_engine(section: EngineSection, config: RunConfig, model: ModelConfig, trainer: Trainer) -> Engine:
    mesh, rules = mesh_of(section, "engine")
    dtype = jnp.dtype(section.dtype or config.model.dtype)
    weights = describe(model, stacked=False)
    return Engine(
        model,
        pick(EngineConfig, section),
        published_params(trainer, weights, shardings_of(rules, mesh, weights, "engine"), dtype),
        version=trainer.step,
        dtype=dtype,
        mesh=mesh,
        rules=rules,
        exact=is_exact(config.model.numerics, model, dtype, mesh, rules, "engine"),
    )


def warmup_keys(config: RunConfig) -> range:
    """Train keys of all supervised steps: from the upper half, so that no task is seen twice."""
    first = len(TRAIN_KEYS) // 2
    return TRAIN_KEYS[first : first + config.warmup.steps * config.warmup.tasks]


def check_prompts(config: RunConfig, environment: Tasks, renderer: Renderer) -> None:
    """Refuses prompts that leave no room for an answer, before a run starts.

    Raises:
        ValueError: a prompt with its answer does not fit the engine's context or pages, or the trainer's rows.
    """
    engine = config.engine
    trained = {*TRAIN_KEYS[: config.steps * config.rollout.prompts], *warmup_keys(config)}
    for key in (*EVAL_KEYS[: config.evaluation.tasks], *sorted(trained)):
        n = len(renderer.render(list(environment.task(key).messages)))
        what = f"the {n} prompt tokens of task {key} of {environment.name!r}"
        if n >= engine.max_context:
            raise ValueError(
                f"engine.max_context: {engine.max_context} tokens have no room for {what} and one sampled token; raise it, or "
                f"make the tasks shorter"
            )
        longest = min(n + config.rollout.max_tokens, engine.max_context)
        if longest > (engine.num_pages - 1) * engine.page_size:
            raise ValueError(
                f"engine.num_pages: {engine.num_pages} pages of {engine.page_size} tokens, one spare, cannot hold {what} and "
                f"up to {longest - n} sampled ones; raise it, or lower rollout.max_tokens"
            )
        if key in trained and longest > longest_branch(config):
            raise ValueError(
                f"trainer.tokens_per_row: {config.trainer.tokens_per_row} tokens cannot hold {what} and up to {longest - n} "
                f"sampled ones; raise it, set trainer.depth_first, or lower rollout.max_tokens"
            )


def make_run(config: RunConfig) -> Run:
    """All pieces of a run.

    Raises:
        ValueError: a part of the config does not fit the model, the devices or another part.
    """
    model, source, tokenizer = make_model(config.model)
    environment, renderer = make_environment(config, tokenizer)
    check_prompts(config, environment, renderer)
    trainer = make_trainer(config, model, source)
    critic = make_trainer(config, model, source, critic=True) if config.advantages.kind == "gae" else None
    fleet, steps = make_fleet(config, model, trainer), make_steps(config, environment)
    return Run(config, model, source, tokenizer, environment, renderer, trainer, fleet, steps, critic)
