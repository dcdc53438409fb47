"""From scored episodes to samples: which are trained on, and each token's advantage.

    kind                       a token's advantage
    group                      its episode's reward against those of its task's other episodes, by `std` and `baseline`
    reinforce_pp               the return to go of R - kl_coef x (log pi - log reference), whitened over the step's tokens
    reinforce_pp_baseline      reward less the group's mean, whitened over the step's tokens
    gae                        generalised advantage estimation with a critic, whitened over the step's tokens

Episodes without a reward teach nothing, and do not dilute the others' denominators.

Episodes of several calls (agents that call others, or cut their history back) have several branches:

    calls      sequences to the loss      a token's advantage
    whole      one an episode             its episode's
    passed     one an episode             its episode's, times call_discount ** depth of the call that sampled it
    own        one a call                 its call's, where the environment scored that (Step.call_rewards); else its episode's

Groups are compared reward by reward: an episode counts once, however many branches and calls it has. A call's own reward is
compared with those of the calls of that name in the task's other episodes.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol, get_args

import numpy as np

from rl.advantages import (
    Baseline,
    Std,
    dynamic_sampling,
    gae,
    group_advantages,
    reinforce_pp,
    soft_overlong,
    whiten,
)
from rl.batch import Sample, on_tokens
from rl.environments import total_reward
from rl.rollout import Rollout

Kind = Literal["group", "reinforce_pp", "reinforce_pp_baseline", "gae"]
KINDS = get_args(Kind)
Calls = Literal["whole", "passed", "own"]


@dataclass(frozen=True, kw_only=True)
class AdvantageConfig:
    kind: Kind = "group"
    std: Std = "population"
    """what group advantages are divided by"""
    baseline: Baseline = "mean"
    """what is subtracted first: the group's mean, or that of the other episodes"""
    kl_coef: float = 0.0
    """of the KL to the initial weights that is taken from the reward of each token (reinforce_pp, gae)"""
    gamma: float = 1.0
    lam: float = 0.95
    """of gae"""
    overlong_cache: int = 0
    """tokens before rollout.max_tokens from which on a completion's reward falls, to -1 at the end (DAPO's soft overlong
    punishment); 0: none"""
    dynamic_sampling: bool = False
    """leave out groups whose rewards are all equal (DAPO); with it a step may train on fewer episodes than it sampled"""
    calls: Calls = "whole"
    """whose reward the tokens of several calls of an episode learn from"""
    call_discount: float = 1.0
    """of calls = "passed" """

    def __post_init__(self) -> None:
        token_level = self.kind in ("reinforce_pp", "gae")
        if self.calls not in get_args(Calls):
            raise ValueError(f"advantages.calls: {self.calls!r} is unknown; use one of {get_args(Calls)}")
        if self.call_discount != 1 and self.calls != "passed":
            raise ValueError(
                f"advantages.call_discount: calls = {self.calls!r} does not use it; use 'passed', or leave it at 1"
            )
        if token_level and self.calls == "passed":
            raise ValueError(f"advantages.calls: {self.kind!r} makes advantages of each token; use 'whole' or 'own'")
        if self.kl_coef and not token_level:
            raise ValueError(f"advantages.kl_coef: {self.kind!r} has no reward of each token; use trainer.kl_coef instead")


class Policy(Protocol):
    def referenced(self, samples: Sequence[Sample], temperature: float) -> list[Sample]: ...


class Critic(Protocol):
    def read(self, samples: Sequence[Sample]) -> list[np.ndarray]: ...


@dataclass(frozen=True)
class _Sequence:
    """What is one sequence to the loss: an episode, or a call of one."""

    rollout: Rollout
    call: int | None
    earned: int
    """which of the compared rewards it learns from"""


def samples_of(rollouts: Sequence[Rollout], advantages: Sequence[float]) -> list[Sample]:
    """Every branch of finished episodes, as one flat stream; an episode's advantage stands on all its sampled tokens."""
    sequences = [_Sequence(rollout, None, number) for number, rollout in enumerate(rollouts)]
    return _samples(sequences, advantages, 1.0)


def _samples(sequences: Sequence[_Sequence], advantages: Sequence[float], discount: float) -> list[Sample]:
    """
    Args:
        advantages: of each compared reward.
        discount: of a call's advantage for each call between it and the episode's own.
    """
    samples = []
    for number, sequence in enumerate(sequences):
        graph, advantage = sequence.rollout.graph, float(advantages[sequence.earned])
        by_call = [advantage * discount**call.depth for call in graph.calls]
        samples += [
            Sample(
                ids=branch.ids,
                weights=branch.weights,
                logprobs=branch.logprobs,
                advantages=branch.advantages,
                versions=branch.versions,
                routing=branch.routing,
                episode=number,
            )
            for branch in graph.branches(by_call, sequence.call)
        ]
    return samples


def assign(
    rollouts: Sequence[Rollout],
    config: AdvantageConfig,
    *,
    longest: int,
    temperature: float,
    policy: Policy,
    critic: Critic | None = None,
) -> tuple[list[Sample], dict[str, float]]:
    """Samples with their advantages (for gae also the critic's values and returns), and metrics.

    Args:
        longest: most tokens an episode can sample; see `overlong_cache`.
        policy: gives the log-probs of the reference, where there is a KL in the reward.

    Raises:
        ValueError: no episode was scored.
    """
    rewards = [_shaped(rollout, config, longest) for rollout in rollouts]
    groups: list[Hashable] = [(rollout.task.env, rollout.task.key) for rollout in rollouts]
    sequences = [_Sequence(rollout, None, number) for number, rollout in enumerate(rollouts)]
    if config.calls == "own":
        sequences = _by_call(rollouts, rewards, groups)
    centred = config.kind == "reinforce_pp_baseline"  # whitened below
    std, baseline = ("none", "mean") if centred else (config.std, config.baseline)
    advantages, scored = group_advantages(rewards, groups, std=std, baseline=baseline)
    if not scored.any():
        raise ValueError("environment: no episode was scored; the step's file in rollouts/ has their errors")
    signal, silent = dynamic_sampling(rewards, groups)
    metrics = {"zero_signal_groups": silent, "unscored": float(1 - scored[: len(rollouts)].mean())}
    kept = signal if config.dynamic_sampling and signal.any() else scored
    sequences = [sequence for sequence in sequences if kept[sequence.earned]]
    samples = _samples(sequences, advantages.tolist(), config.call_discount)
    if config.kl_coef:
        samples = policy.referenced(samples, temperature)
    earned = [rewards[sequences[sample.episode].earned] or 0.0 for sample in samples]
    return _token_level(samples, config, earned, critic), metrics


def _by_call(rollouts: Sequence[Rollout], rewards: list[float | None], groups: list[Hashable]) -> list[_Sequence]:
    """A sequence for each call; the calls' own rewards, and what each is compared with, are appended to the episodes'."""
    sequences = []
    for number, rollout in enumerate(rollouts):
        for call in rollout.graph.calls:
            earned = number
            if call.rewards:
                earned = len(rewards)
                rewards.append(total_reward(call.rewards))
                groups.append((rollout.task.env, rollout.task.key, call.agent))
            sequences.append(_Sequence(rollout, call.id, earned))
    return sequences


def _token_level(samples: list[Sample], config: AdvantageConfig, earned: list[float], critic: Critic | None) -> list[Sample]:
    """Replaces the group advantages where `config` says so; `earned` is each sample's reward."""
    weights = [sample.weights for sample in samples]
    kl = [_kl(sample) for sample in samples]
    match config.kind:
        case "group":
            return samples
        case "reinforce_pp":
            return _with("advantages", samples, reinforce_pp(earned, kl, weights, beta=config.kl_coef, gamma=config.gamma))
        case "reinforce_pp_baseline":
            return _with("advantages", samples, whiten([sample.advantages for sample in samples], weights))
        case "gae":
            assert critic is not None
            values = [on_tokens(sample, read) for sample, read in zip(samples, critic.read(samples), strict=True)]
            both = [
                gae(_token_rewards(sample, reward, config.kl_coef * k), v, w, gamma=config.gamma, lam=config.lam)
                for sample, reward, k, v, w in zip(samples, earned, kl, values, weights, strict=True)
            ]
            samples = _with("returns", _with("values", samples, values), [returns for _, returns in both])
            return _with("advantages", samples, whiten([advantages for advantages, _ in both], weights))


def _shaped(rollout: Rollout, config: AdvantageConfig, longest: int) -> float | None:
    if rollout.reward is None or not config.overlong_cache:
        return rollout.reward
    return rollout.reward + soft_overlong(rollout.sampled_tokens, longest, config.overlong_cache)


def _kl(sample: Sample) -> np.ndarray:
    """[n]: log pi - log reference of each trained token, as it was sampled; 0 without a reference."""
    if sample.reference_logprobs is None:
        return np.zeros(len(sample.ids), np.float32)
    return np.where(sample.weights > 0, sample.logprobs - sample.reference_logprobs, 0)


def _token_rewards(sample: Sample, reward: float, kl: np.ndarray) -> np.ndarray:
    """[n]: the episode's reward on the branch's last trained token, less each token's KL."""
    rewards = -np.asarray(kl, np.float64)
    if len(sample.trained):
        rewards[sample.trained[-1]] += reward
    return rewards


def _with(field: str, samples: Sequence[Sample], values: Sequence[np.ndarray]) -> list[Sample]:
    return [replace(sample, **{field: value}) for sample, value in zip(samples, values, strict=True)]
