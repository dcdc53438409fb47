"""What a step does with its rollouts, or a supervised one with its tasks: samples, then an optimizer step of each trainer."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from models.tokenizer import ByteTokenizer, Tokenizer
from rl.batch import Sample
from rl.config import RunConfig
from rl.credit import assign
from rl.environments import Tasks
from rl.renderers import Renderer
from rl.rollout import Rollout
from rl.run import warmup_keys
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


def learn_answers(
    trainer: Trainer,
    config: RunConfig,
    environment: Tasks,
    renderer: Renderer,
    tokenizer: Tokenizer | ByteTokenizer,
    step: int,
) -> dict[str, Any]:
    """One step on the tasks' own answers."""
    count = config.warmup.tasks
    samples = []
    for number, key in enumerate(warmup_keys(config)[(step - 1) * count : step * count]):
        task = environment.task(key)
        if task.answer is None:
            raise ValueError(f"warmup: task {key} of {task.env!r} has no answer to learn; set warmup.steps = 0")
        prompt = renderer.render(list(task.messages))
        answer = [*tokenizer.encode(task.answer), renderer.stop_ids[0]]
        n = len(prompt) + len(answer)
        weights = np.zeros(n, np.float32)
        weights[len(prompt) :] = 1
        zeros = np.zeros(n, np.float32)
        ids = np.asarray([*prompt, *answer], np.int32)
        samples.append(Sample(ids=ids, weights=weights, logprobs=zeros, advantages=zeros, episode=number))
    return {"phase": "sft", **trainer.train(samples, loss="sft")}
