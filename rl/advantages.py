"""Advantages in numpy, on the host: of an episode within its group, and of tokens.

Legend: N episodes (or branches), n tokens of one.

Per-token arrays are ragged: a sequence of N arrays [n]. Weights are those of LossBatch: 0 on tokens that are not trained,
1 / branches on sampled tokens of several branches. What stands where the weight is 0 is not read, and comes back as 0.
"""

from collections.abc import Hashable, Sequence
from typing import Literal, get_args

import numpy as np

Std = Literal["none", "sample", "population"]
Baseline = Literal["mean", "leave_one_out"]


def group_advantages(
    rewards: Sequence[float | None],
    group_ids: Sequence[Hashable],
    *,
    std: Std,
    baseline: Baseline,
    eps: float = 1e-6,
) -> tuple[np.ndarray, np.ndarray]:
    """Advantages of N episodes (not branches).

    Args:
        rewards: total reward of each episode; None or NaN means unscored.
        group_ids: what makes a group, normally (environment name, task key), so that equal keys of two environments
            stay apart.
        std: divide by the group's standard deviation plus `eps`; `sample` has n - 1 below the line.
        baseline: subtract the group's mean, or the mean of the *other* episodes (RLOO).

    Returns:
        (advantages float32 [N], scored bool [N]). Unscored episodes get 0 and do not move their siblings' baseline;
        a group with one scored episode gets 0, as there is nothing to compare it with.
    """
    if std not in get_args(Std):
        raise ValueError(f"std: use one of {get_args(Std)}, got {std!r}")
    if baseline not in get_args(Baseline):
        raise ValueError(f"baseline: use one of {get_args(Baseline)}, got {baseline!r}")
    if len(rewards) != len(group_ids):
        raise ValueError(f"group_ids: give one for each reward, got {len(group_ids)} for {len(rewards)}")
    values = np.array([np.nan if reward is None else reward for reward in rewards], np.float64)
    if np.isinf(values).any():
        raise ValueError("rewards: an infinite reward has no advantage; bound it, or give None for unscored")
    scored = ~np.isnan(values)
    groups: dict[Hashable, list[int]] = {}
    for i, group in enumerate(group_ids):
        if scored[i]:
            groups.setdefault(group, []).append(i)
    advantages = np.zeros(len(values), np.float32)
    for members in groups.values():
        n = len(members)
        if n < 2:
            continue
        centred = values[members] - values[members].mean()
        if baseline == "leave_one_out":
            centred *= n / (n - 1)
        if std != "none":
            centred /= values[members].std(ddof=1 if std == "sample" else 0) + eps
        advantages[members] = centred
    return advantages, scored


def dynamic_sampling(rewards: Sequence[float | None], group_ids: Sequence[Hashable]) -> tuple[np.ndarray, float]:
    """DAPO (2503.14476): which episodes are worth training on. A group whose rewards are all equal has no signal.

    Returns:
        (kept bool [N]: scored episodes of groups with signal; share of groups without signal, unscored ones among them).
    """
    _, scored = group_advantages(rewards, group_ids, std="none", baseline="mean")
    values: dict[Hashable, list[float]] = {group: [] for group in group_ids}
    for reward, group, counts in zip(rewards, group_ids, scored, strict=True):
        if reward is not None and counts:
            values[group].append(reward)
    signal = {group: len(earned) > 0 and min(earned) < max(earned) for group, earned in values.items()}
    kept = np.array([signal[group] for group in group_ids], bool) & scored
    return kept, 1 - sum(signal.values()) / len(signal) if signal else 0.0


def soft_overlong(length: int, max_length: int, cache: int) -> float:
    """DAPO (2503.14476), eq. 13: what is added to the reward of a long completion, from 0 down to -1.

    0 up to `max_length - cache` tokens, then a line to -1 at `max_length`, -1 beyond.
    """
    if not 0 < cache <= max_length:
        raise ValueError(f"cache: must be from 1 to max_length = {max_length}, got {cache}")
    return float(np.clip((max_length - cache - length) / cache, -1, 0))


def whiten(advantages: Sequence[np.ndarray], weights: Sequence[np.ndarray], eps: float = 1e-8) -> list[np.ndarray]:
    """Mean 0 and population variance 1 over all trained tokens of the batch, each counted by its weight.

    Give the whole batch: a share's own mean is another. If all are equal, they become 0.

    Returns:
        N arrays float32 [n].
    """
    values = _flat([np.where(w > 0, a, 0) for a, w in zip(advantages, weights, strict=True)])
    counts = _flat(weights)
    total = counts.sum()
    if total == 0:
        return [np.zeros(len(a), np.float32) for a in advantages]
    mean = (values * counts).sum() / total
    std = np.sqrt((((values - mean) ** 2) * counts).sum() / total)
    return [
        np.where(w > 0, (np.where(w > 0, a, mean) - mean) / (std + eps), 0).astype(np.float32)
        for a, w in zip(advantages, weights, strict=True)
    ]


def reinforce_pp(
    rewards: Sequence[float], kl: Sequence[np.ndarray], weights: Sequence[np.ndarray], *, beta: float, gamma: float = 1.0
) -> list[np.ndarray]:
    """REINFORCE++ (2501.03262): the return to go of r_t = [t is the last] R - beta kl_t, whitened over the batch.

    Args:
        rewards: total reward of each of N scored episodes.
        kl: N arrays [n], of each token: log pi - log reference (k1), as sampled.

    Returns:
        N arrays float32 [n].
    """
    returns = []
    for reward, kl_n, weights_n in zip(rewards, kl, weights, strict=True):
        trained = np.nonzero(weights_n > 0)[0]
        to_go, result = float(reward), np.zeros(len(weights_n))
        for step, t in enumerate(reversed(trained)):
            to_go = (to_go if step == 0 else gamma * to_go) - beta * float(kl_n[t])
            result[t] = to_go
        returns.append(result)
    return whiten(returns, weights)


def gae(
    rewards: np.ndarray, values: np.ndarray, mask: np.ndarray, *, gamma: float = 1.0, lam: float = 0.95
) -> tuple[np.ndarray, np.ndarray]:
    """Generalised advantage estimation (1506.02438) over the actions of an episode.

        delta_t = r_t + gamma V_next - V_t,   A_t = delta_t + gamma lam A_next,   return_t = A_t + V_t

    `next` is the next *action*: observation tokens between two actions consume no step, and after the last one V and A are 0.

    Args:
        rewards: [n], on the action tokens that earned them.
        values: [n], the critic's before the update, read where the token is sampled from.
        mask: [n], not 0 on actions.

    Returns:
        (advantages, returns), float32 [n], 0 where the mask is 0.
    """
    actions = np.nonzero(mask)[0]
    lost = np.setdiff1d(np.nonzero(rewards)[0], actions)
    if len(lost):
        raise ValueError(f"rewards: tokens {lost.tolist()} are no actions; put their reward on the action before")
    advantages, returns = np.zeros(len(mask), np.float32), np.zeros(len(mask), np.float32)
    next_value = next_advantage = 0.0
    for t in reversed(actions):
        value = float(values[t])
        next_advantage = float(rewards[t]) + gamma * next_value - value + gamma * lam * next_advantage
        next_value = value
        advantages[t], returns[t] = next_advantage, next_advantage + value
    return advantages, returns


def _flat(arrays: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.asarray(x, np.float64) for x in arrays]) if len(arrays) else np.zeros(0)
