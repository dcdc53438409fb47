"""Group advantages in numpy: how much better an episode did than the others of its task."""

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
    """Advantages of N episodes (not branches: spread them afterwards).

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
