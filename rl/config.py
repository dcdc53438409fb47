"""The whole configuration of a run, as typed sections. Files in configs/ fill it; unknown or missing keys are refused."""

import dataclasses
import difflib
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from inference.runner import EngineConfig
from rl.advantages import Baseline, Std
from rl.trainer import OptimizerConfig

DTYPES = ("bfloat16", "float32")


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
    """episodes of each task: the size of a group"""
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
    rules: Mapping[str, Any] = field(default_factory=dict)
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
    loss: str = "grpo"
    loss_options: Mapping[str, float] = field(default_factory=dict)


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


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str
    """the run's folder in `run_dir`"""
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
    seed: int = 0
    run_dir: str = "runs"
    transcripts_every: int = 10
    """steps between printed sample transcripts; 0: none"""
    export: bool = True
    """write the final weights as a Hugging Face directory"""

    def __post_init__(self) -> None:
        if self.steps < 0 or self.warmup.steps < 0:
            raise ValueError(f"steps, warmup.steps: must be 0 or more, got {self.steps} and {self.warmup.steps}")
        if self.model.dtype not in DTYPES:
            raise ValueError(f"model.dtype: {self.model.dtype!r} is unknown; use one of {DTYPES}")
        if self.rollout.samples < 2:
            raise ValueError("rollout.samples: a group needs at least 2 samples, or every advantage is 0")
        if self.rollout.temperature <= 0:
            raise ValueError("rollout.temperature: must be above 0; greedy samples cannot be trained on")


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
    if origin is tuple and isinstance(value, list | tuple):
        return tuple(value)
    if origin is Mapping and isinstance(value, Mapping):
        of = typing.get_args(hint)[1]
        return value if of is Any else {key: _value(of, item, f"{where}.{key}", errors) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is typing.Literal:
        fits = value in typing.get_args(hint)
        expected = f"one of {typing.get_args(hint)}"
    else:
        kind = Mapping if origin is not None and issubclass(origin, Mapping) else hint
        plain = kind if isinstance(kind, type | types.UnionType) else object
        fits = isinstance(value, plain) and not (isinstance(value, bool) and plain is int)
        expected = getattr(plain, "__name__", str(plain))
    if not fits:
        errors.append(f"{where}: expected {expected}, got {value!r}")
    return value
