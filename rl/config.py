"""The whole configuration of a run, as typed sections. Files in configs/ fill it; unknown or missing keys are refused."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any

from inference.config import EngineConfig
from models.exact import MODES
from rl.build import UNLESS
from rl.build import build as build
from rl.corrections import KlKind, OldLogp
from rl.credit import AdvantageConfig
from rl.datasets import TooLong
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.routes import RouterConfig
from sharding.rules import Axes

DATA_LOSSES = ("sft", "dpo")
"""of runs that learn from a file"""
NO_TASKS = "none"
DTYPES = ("bfloat16", "float32")
MINIMA = {
    "steps": 0,
    "transcripts_every": 0,
    "environment.max_turns": 1,
    "engine.first_device": 0,
    "rollout.prompts": 1,
    "rollout.samples": 2,
    "rollout.max_tokens": 1,
    "trainer.first_device": -1,
    "trainer.warmup_steps": 0,
    "trainer.rows": 1,
    "trainer.tokens_per_row": 1,
    "orchestrator.lag": 0,
    "orchestrator.engines": 0,
    "orchestrator.anchor_every": 1,
    "orchestrator.workers": 0,
    "orchestrator.environment_s": 0,
    "orchestrator.episode_s": 0,
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
    numerics: str = "auto"
    """exact: log-probs of the trainer's own version have the sampler's bits, or the run is refused; fast: sums in the
    compiler's order; auto: exact on CPUs, as far as it goes there, and fast elsewhere (models/README.md)"""

    def __post_init__(self) -> None:
        if self.numerics not in MODES:
            raise ValueError(f"model.numerics: {self.numerics!r} is unknown; use one of {MODES}")


@dataclass(frozen=True, kw_only=True)
class EnvironmentSection:
    kind: str
    """a name in rl/kinds.py, or MODULE:CLASS of one's own; `none` where a run learns from a file and is not evaluated"""
    options: Mapping[str, Any] = field(default_factory=dict)
    """the environment's own"""
    renderer: str = "chatml"
    """name in rl.renderers.RENDERERS"""
    renderer_options: Mapping[str, Any] = field(default_factory=dict)
    max_turns: int = 1
    """most answers of the model in an episode, of all its conversations together"""


@dataclass(frozen=True, kw_only=True)
class RolloutSection:
    prompts: int
    """tasks of a step"""
    samples: int
    """episodes of each task: the size of a group; of one alone, every advantage is 0"""
    max_tokens: int
    """most tokens sampled in a turn"""
    temperature: float = 1.0


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
    dtype: str = ""
    """what the engine computes with, where it is not model.dtype: to see what other numerics than the trainer's do"""


@dataclass(frozen=True, kw_only=True)
class TrainerSection(OptimizerConfig, RouterConfig, Placement):
    first_device: int = -1
    """-1: 0, and with a lag the first one after the engines"""
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
class CriticSection(OptimizerConfig):
    """The critic of advantages.kind = "gae": the policy's first weights with a value head, in the trainer's mesh and layout."""

    learning_rate: float = 1e-5
    loss_options: Mapping[str, Any] = field(default_factory=dict)
    """of rl.losses.value"""


@dataclass(frozen=True, kw_only=True)
class WarmupSection:
    """Supervised steps on the tasks' own answers, before reinforcement learning. Reported as phase `sft`."""

    steps: int = 0
    tasks: int = 16
    """tasks of a supervised step; drawn from their own keys"""


@dataclass(frozen=True, kw_only=True)
class DataSection:
    """Learning from a file instead of from rollouts, with trainer.loss `sft` or `dpo`. What its lines hold: rl/datasets.py."""

    path: str
    """JSON lines"""
    batch: int
    """examples of a step; of dpo, pairs"""
    epochs: int = 0
    """passes over the file; 0: `steps` says how long the run is"""
    too_long: TooLong = "refuse"
    """what becomes of examples that fit no row"""

    def __post_init__(self) -> None:
        for name, least in (("batch", 1), ("epochs", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"data.{name}: must be at least {least}, got {getattr(self, name)}")


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
class OrchestratorSection:
    """How rollouts and training go on beside each other: rl/loop.py."""

    lag: int = 0
    """most versions from the oldest token of a sample to the version that trains on it; 0: synchronous"""
    mode: str = "retract"
    """what an update does to requests in flight: `retract` prefills them again, `keep` lets them keep their keys and values"""
    engines: int = 0
    """copies of the engine, each with a mesh of its own, one after the other from engine.first_device on; 0: one, and with a
    lag as many as three quarters of the devices hold"""
    processes: bool = False
    """each engine is a server in a process of its own; weights reach it through the store"""
    store: str = ""
    """URL below which the weight store is, for engines in processes; empty: the folder `weights` of the run"""
    anchor_every: int = 25
    """versions from one full copy in the store to the next"""
    workers: int = 0
    """processes that run environments; 0: they run in this one"""
    environment_s: float = 0.0
    """seconds that an environment's step may take in a worker; 0: any"""
    episode_s: float = 0.0
    """seconds that an episode may take from its first request on; 0: any"""


NO_ROLLOUT = RolloutSection(prompts=1, samples=2, max_tokens=1)
NO_ENGINE = EngineSection(max_context=128)


@dataclass(frozen=True, kw_only=True)
class RunConfig:
    name: str
    """the run's folder in `run_dir`: a plain name"""
    steps: int
    """reinforcement-learning steps; with `data`, steps on its examples"""
    model: ModelSection
    environment: EnvironmentSection
    rollout: RolloutSection = field(default=NO_ROLLOUT, metadata={UNLESS: "data"})
    engine: EngineSection = field(default=NO_ENGINE, metadata={UNLESS: "data"})
    trainer: TrainerSection
    data: DataSection | None = None
    advantages: AdvantageConfig = field(default_factory=AdvantageConfig)
    critic: CriticSection = CriticSection()
    warmup: WarmupSection = WarmupSection()
    orchestrator: OrchestratorSection = OrchestratorSection()
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
        if self.model.numerics == "exact" and self.engine.dtype not in ("", self.model.dtype):
            errors.append(
                f"engine.dtype: with model.numerics 'exact' both sides compute in model.dtype, {self.model.dtype}; leave it out"
            )
        if self.orchestrator.mode not in ("retract", "keep"):
            errors.append(f"orchestrator.mode: {self.orchestrator.mode!r} is unknown; use 'retract' or 'keep'")
        if self.orchestrator.store and not self.orchestrator.store.endswith("/"):
            errors.append(f"orchestrator.store: {self.orchestrator.store!r} must end in a slash, as it is a folder")
        if self.engine.dtype not in ("", *DTYPES):
            errors.append(f"engine.dtype: {self.engine.dtype!r} is unknown; leave it out, or use one of {DTYPES}")
        if not TEMPERATURES[0] <= self.rollout.temperature <= TEMPERATURES[1]:
            errors.append(
                f"rollout.temperature: must be from {TEMPERATURES[0]} to {TEMPERATURES[1]}, got {self.rollout.temperature}; "
                f"greedy samples cannot be trained on"
            )
        if self.trainer.router_replay == "R3" and not self.engine.capture_routing:
            errors.append(
                "engine.capture_routing: trainer.router_replay 'R3' replays what the engine records; set it to True, or "
                "router_replay to 'R2' or 'off'"
            )
        if self.trainer.router_replay == "R3" and self.trainer.balance_coef and (self.warmup.steps or self.data):
            errors.append(
                "trainer.balance_coef: supervised examples have no recorded experts, so their load is not known before a step; "
                "set trainer.router_replay to 'R2', or balance_coef to 0"
            )
        if self.data is None:
            if self.trainer.loss in DATA_LOSSES:
                errors.append(
                    f"trainer.loss: {self.trainer.loss!r} has no rollouts to learn from; give examples in data.path, or use "
                    f"warmup.steps for supervised steps on the tasks' own answers"
                )
            if self.environment.kind == NO_TASKS:
                errors.append("environment.kind: 'none' has no tasks to learn from; name an environment, or give data.path")
        else:
            if self.trainer.loss not in DATA_LOSSES:
                errors.append(
                    f"trainer.loss: {self.trainer.loss!r} learns from rollouts; with data.path, use one of {DATA_LOSSES}"
                )
            if self.environment.kind != NO_TASKS and (self.rollout is NO_ROLLOUT or self.engine is NO_ENGINE):
                errors.append("environment.kind: is evaluated with rollout and engine; give both sections, or set it to 'none'")
            if self.warmup.steps:
                errors.append("warmup.steps: a run that learns from data.path has no other supervised steps; set it to 0")
            if bool(self.data.epochs) == bool(self.steps):
                errors.append("data.epochs: says how long the run is, and so does steps; set one of them, the other to 0")
        if errors:
            raise ValueError("; ".join(errors))
