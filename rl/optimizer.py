"""AdamW on float32 masters: schedules, clipping, and which weights are decayed or frozen."""

from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, get_args

import optax

Schedule = Literal["constant", "linear", "cosine"]


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101). Names of weights are shell patterns, such as `*norm` or `blocks.*`."""

    learning_rate: float
    warmup_steps: int = 0
    """steps over which the rate rises linearly, from its share of one step"""
    schedule: Schedule = "constant"
    """the rate after warm-up; linear and cosine fall to `final_rate` over `decay_steps`, and stay there"""
    decay_steps: int = 0
    final_rate: float = 0.0
    """as a share of `learning_rate`"""
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    not_decayed: tuple[str, ...] = ("*norm",)
    clip_norm: float = 1.0
    """largest global norm of the gradient"""
    offload: bool = False
    """keep the optimizer's state in the host's memory, but for the update: less on the devices, a copy there and back a step"""
    frozen: tuple[str, ...] = ()
    """weights that stay as they are: they get no gradient, and no room in the optimizer's state"""

    def build(self) -> optax.GradientTransformation:
        """Over a flat dict of the trained weights.

        Raises:
            ValueError: an unknown schedule, or one without its length.
        """
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(
                self.rate(),
                b1=self.b1,
                b2=self.b2,
                eps=self.eps,
                weight_decay=self.weight_decay,
                mask=self._decayed,
            ),
        )

    def _decayed(self, params: Any) -> dict[str, bool]:
        return {name: not _matches(name, self.not_decayed) for name in params}

    def rate(self) -> optax.Schedule:
        """The learning rate of a step, counted from 0."""
        if self.schedule not in get_args(Schedule):
            raise ValueError(f"trainer.schedule: {self.schedule!r} is unknown; use one of {get_args(Schedule)}")
        if self.schedule != "constant" and self.decay_steps < 1:
            raise ValueError(f"trainer.decay_steps: schedule {self.schedule!r} needs the steps it takes to fall; set them")
        first = optax.schedules.warmup_constant_schedule(
            init_value=self.learning_rate / max(1, self.warmup_steps),
            peak_value=self.learning_rate,
            warmup_steps=self.warmup_steps,
        )
        if self.schedule == "constant":
            return first
        if self.schedule == "linear":
            rest = optax.schedules.linear_schedule(self.learning_rate, self.learning_rate * self.final_rate, self.decay_steps)
        else:
            rest = optax.schedules.cosine_decay_schedule(self.learning_rate, self.decay_steps, alpha=self.final_rate)
        return optax.schedules.join_schedules([first, rest], [self.warmup_steps])

    def trained(self, names: Iterable[str]) -> list[str]:
        """The weights that are not frozen.

        Raises:
            ValueError: a pattern of `frozen` or `not_decayed` that no weight has, or nothing is left to train.
        """
        names = list(names)
        for pattern in self.frozen:
            if not any(fnmatchcase(name, pattern) for name in names):
                raise ValueError(f"trainer.frozen: no weight is called {pattern!r}; they are {', '.join(names)}")
        trained = [name for name in names if not _matches(name, self.frozen)]
        if not trained:
            raise ValueError(f"trainer.frozen: {self.frozen} freezes every weight; leave some to train")
        return trained


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
