"""What a step does with its rollouts: credit, then one optimizer step of the policy, and of the critic if there is one."""

from collections.abc import Sequence
from typing import Any

from rl.config import RunConfig
from rl.credit import assign
from rl.rollout import Rollout
from rl.trainer import Trainer

CRITIC_METRICS = ("loss", "return", "value_clipped", "explained_variance", "grad_norm", "update_norm")


def learn(trainer: Trainer, critic: Trainer | None, config: RunConfig, rollouts: Sequence[Rollout]) -> dict[str, Any]:
    """Returns the step's metrics, but for those of rollouts.

    Raises:
        ValueError: no episode was scored, or one does not fit the layout. Nothing has changed then.
        FloatingPointError: the loss or a gradient is not finite.
    """
    samples, metrics = assign(
        rollouts,
        config.advantages,
        longest=config.rollout.max_tokens * config.environment.max_turns,
        temperature=config.rollout.temperature,
        policy=trainer,
        critic=critic,
    )
    metrics |= trainer.train(samples, temperature=config.rollout.temperature)
    if critic is not None:
        learned = critic.train(samples)
        metrics |= {f"critic/{name}": learned[name] for name in CRITIC_METRICS if name in learned}
        metrics["time/critic_s"] = learned["time/pack_s"] + learned["time/train_s"]
    return metrics
