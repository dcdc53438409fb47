"""The whole configuration of a run, as typed sections. Files in configs/ fill it; unknown or missing keys are refused."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from inference.config import EngineConfig
from rl.advantages import Baseline, Std
from rl.corrections import KlKind, OldLogp
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from sharding.rules import Axes

DTYPES = ("bfloat16", "float32")
MINIMA = {
    "steps": 0,
    "transcripts_every": 0,
    "environment.max_turns": 1,
    "engine.first_device": 0,
    "rollout.prompts": 1,
    "rollout.samples": 2,
    "rollout.max_tokens": 1,
    "trainer.first_device": 0,
    "trainer.warmup_steps": 0,
    "trainer.rows": 1,
    "trainer.tokens_per_row": 1,
    "warmup.steps": 0,
    "warmup.tasks": 1,
    "evaluation.tasks": 1,
    "evaluation.samples": 1,
    "evaluation.every": 0,
    "checkpoint.every": 0,
    "checkpoint.keep": 1,
    "checkpoint.keep_every": 0,
}
"""least values of whole numbers; the engine checks its own sizes"""
TEMPERATURES = (1e-4, 1e4)
"""least and most"""


@dataclass(frozen=True, kw_only=True)
class ModelSection:
    source: str
    """a Hugging Face directory, a hub id, or `random`: fresh weights of the shape in `shape`, with a byte tokenizer"""
    shape: Mapping[str, Any] = field(default_factory=dict)
    """fields of ModelConfig, for `random`"""
    dtype: str = "bfloat16"
    """published dtype: what both engines compute with (float32 for oracles)"""


@dataclass(frozen=True, kw_only=True)
class EnvironmentSection:
    kind: str
    """`reasoning_gym` or `arithmetic`"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """the environment's own"""
    renderer: str = "chatml"
    """name in rl.renderers.RENDERERS"""
    renderer_options: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int = 1


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    prompts: int
    """tasks of a step"""
    samples: int
    """episodes of each task: the size of a group; of one alone, every advantage is 0"""
    max_tokens: int
    """most tokens sampled in a turn"""
    temperature: float = 1.0
    std: Std = "population"
    """what group advantages are divided by"""
    baseline: Baseline = "mean"


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Devices and sharding of one side."""

    mesh: Mapping[str, int] = field(default_factory=lambda: {"data": 1})
    """axis -> size, outermost first"""
    rules: Mapping[str, Axes] = field(default_factory=dict)
    """logical dim -> mesh axis, axes or None"""
    first_device: int = 0
    """the mesh takes devices from this one on: the same as the other side's to share them, or others"""


@dataclass(frozen=True, kw_only=True)
class EngineSection(EngineConfig, Placement):
    pass


@dataclass(frozen=True, kw_only=True)
class TrainerSection(OptimizerConfig, Placement):
    tokens_per_row: int
    rows: int = 1
    """rows of a micro-batch"""
    remat: str = "block"
    depth_first: bool = False
    """walk tries that fit no row depth first where repeating their prefixes costs more; else every branch must fit a row"""
    loss: str = "grpo"
    """name in rl.losses.LOSSES"""
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    old_logp: OldLogp = "sampler"
    """denominator of the ratio, see rl.corrections"""
    correction: Mapping[str, Any] = field(default_factory=dict)
    """fields of rl.corrections.Correction; empty: none"""
    kl_coef: float = 0.0
    """of the KL to the initial weights that is added to the loss"""
    kl_kind: KlKind = "k3"

    def objective(self) -> Objective:
        """What the policy is trained on.

        Raises:
            ValueError: names the key and what to change.
        """
        return Objective(
            loss=self.loss,
            options=self.loss_options,
            old_logp=self.old_logp,
            correction=self.correction,
            kl_coef=self.kl_coef,
            kl_kind=self.kl_kind,
        )


@dataclass(frozen=True, kw_only=True)
class WarmupSection:
    """Supervised steps on the tasks' own answers, before reinforcement learning. Reported as phase `sft`."""

    steps: int = 0
    tasks: int = 16
    """tasks of a supervised step; drawn from their own keys"""


@dataclass(frozen=True, kw_only=True)
class EvaluationSection:
    tasks: int = 64
    samples: int = 4
    """episodes of each task at the rollout temperature; one more is greedy"""
    every: int = 0
    """steps between evaluations; 0: only before the first and after the last"""


@dataclass(frozen=True, kw_only=True)
class CheckpointSection:
    every: int = 0
    """steps between checkpoints; 0: only after the last"""
    keep: int = 1
    """the newest ones that are kept"""
    keep_every: int = 0
    """those whose step it divides are kept for good; 0: none"""


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str
    """the run's folder in `run_dir`: a plain name"""
    steps: int
    """reinforcement-learning steps"""
    model: ModelSection
    environment: EnvironmentSection
    rollout: RolloutSection
    engine: EngineSection
    trainer: TrainerSection
    warmup: WarmupSection = WarmupSection()
    evaluation: EvaluationSection = EvaluationSection()
    checkpoint: CheckpointSection = CheckpointSection()
    fork: str = ""
    """`RUN_DIR@STEP`: begin with that run's checkpoint instead of the model's weights; `steps` then counts its steps too"""
    seed: int = 0
    run_dir: str = "runs"
    transcripts_every: int = 10
    """steps between printed sample transcripts; 0: none"""
    export: bool = True
    """write the final weights as a Hugging Face directory"""

    def __post_init__(self) -> None:
        errors = [
            f"{key}: must be at least {least}, got {attrgetter(key)(self)}"
            for key, least in MINIMA.items()
            if attrgetter(key)(self) < least
        ]
        for key in ("trainer.learning_rate", "trainer.clip_norm"):
            if not attrgetter(key)(self) > 0:
                errors.append(f"{key}: must be above 0, got {attrgetter(key)(self)}")
        if self.name in ("", "..") or Path(self.name).name != self.name:
            errors.append(f"name: {self.name!r} is no plain folder name; choose one, and set run_dir for where it is")
        if self.model.dtype not in DTYPES:
            errors.append(f"model.dtype: {self.model.dtype!r} is unknown; use one of {DTYPES}")
        if not TEMPERATURES[0] <= self.rollout.temperature <= TEMPERATURES[1]:
            errors.append(
                f"rollout.temperature: must be from {TEMPERATURES[0]} to {TEMPERATURES[1]}, got {self.rollout.temperature}; "
                f"greedy samples cannot be trained on"
            )
        if self.trainer.loss == "sft":
            errors.append("trainer.loss: 'sft' has no advantages to train on; use warmup.steps for supervised steps")
        if errors:
            raise ValueError("; ".join(errors))


def build(cls: type, given: Mapping[str, Any], where: str = "config") -> Any:
    """A section from nested mappings.

    Raises:
        ValueError: every unknown, missing or mistyped key below `where`, named, in one error.
    """
    errors: list[str] = []
    result = _build(cls, given, where, errors)
    if errors:
        raise ValueError("; ".join(errors))
    return result


def _build(cls: type, given: Mapping[str, Any], where: str, errors: list[str]) -> Any:
    hints = typing.get_type_hints(cls)
    known = {f.name: f for f in dataclasses.fields(cls)}
    before = len(errors)
    for name in given:
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            fix = f"did you mean {close[0]!r}?" if close else f"known keys: {', '.join(sorted(known))}"
            errors.append(f"{where}.{name}: unknown key; {fix}")
    values = {}
    for name, item in known.items():
        if name in given:
            values[name] = _value(hints[name], given[name], f"{where}.{name}", errors)
        elif item.default is dataclasses.MISSING and item.default_factory is dataclasses.MISSING:
            errors.append(f"{where}.{name}: missing; set it in the config file")
    if len(errors) > before:
        return None
    try:
        return cls(**values)
    except ValueError as error:
        errors.append(f"{where}: {error}")
        return None


def _value(hint: Any, value: Any, where: str, errors: list[str]) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint) and isinstance(value, Mapping):
        assert isinstance(hint, type)
        return _build(hint, value, where, errors)
    if origin is Mapping and isinstance(value, Mapping):
        of = typing.get_args(hint)[1]
        return {key: _value(of, item, f"{where}.{key}", errors) for key, item in value.items()}
    try:
        return _plain(hint, value)
    except TypeError:
        if origin is typing.Literal:
            expected = f"one of {typing.get_args(hint)}"
        else:
            expected = hint.__name__ if isinstance(hint, type) and origin is not tuple else str(hint)
        errors.append(f"{where}: expected {expected}, got {value!r}")
        return value


def _plain(hint: Any, value: Any) -> Any:
    """The value as its hint says: lists become tuples, ints floats. TypeError where it does not fit."""
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (origin is typing.Literal and value in inner):
        return value
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(_plain(inner[0], item) for item in value)
    if origin is types.UnionType:
        for each in inner:
            try:
                return _plain(each, value)
            except TypeError:
                pass
    number = isinstance(value, int) and not isinstance(value, bool)
    if hint is float and number:
        return float(value)
    if origin is None and isinstance(hint, type) and isinstance(value, hint) and (hint is not int or number):
        return value
    raise TypeError
