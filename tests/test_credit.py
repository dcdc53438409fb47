"""From episodes to samples: every kind of advantage on hand-made episodes, against the estimators of rl.advantages.

Two groups of two episodes; rewards 1, 0 and 2, 2; each episode has a prompt of 3 tokens and 2 sampled ones.
"""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from rl.advantages import gae, whiten
from rl.batch import Sample
from rl.credit import AdvantageConfig, assign
from rl.environments import Reward, make_task
from rl.graph import Graph
from rl.records import Episode
from rl.rollout import Rollout

REWARDS: list[float | None] = [1.0, 0.0, 2.0, 2.0]
LOGP = -0.5
REFERENCE = -0.75


def rollout(number: int, reward: float | None) -> Rollout:
    task = make_task("e", number // 2, [{"role": "user", "content": "x"}])
    graph = Graph(Episode(id=str(number), env="e", key=task.key, content_hash="", group_id="g", seed=0))
    prompt = graph.extend([1, 2, number])
    graph.add_completion(
        prompt,
        request_id=str(number),
        prompt_ids=(1, 2, number),
        ids=[5, 6],
        logprobs=[LOGP, LOGP],
        logprobs_full=[LOGP, LOGP],
        versions=[3, 3],
        temperature=1.0,
        finish_reason="stop",
        message={"role": "assistant", "content": ""},
    )
    graph.finish("completed" if reward is not None else "failed", rewards=[] if reward is None else [Reward("r", reward)])
    return Rollout(task, graph, sampled_tokens=2)


class Reader:
    """A reference and a critic with fixed numbers."""

    def referenced(self, samples: Any, temperature: float) -> list[Sample]:
        return [replace(s, reference_logprobs=np.where(s.weights > 0, REFERENCE, 0).astype(np.float32)) for s in samples]

    def read(self, samples: Any) -> list[np.ndarray]:
        return [np.array([0.5, 0.25], np.float32) for _ in samples]


def run(config: AdvantageConfig, rewards: list[float | None] = REWARDS) -> tuple[list[Sample], dict[str, float]]:
    rollouts = [rollout(number, reward) for number, reward in enumerate(rewards)]
    return assign(rollouts, config, longest=4, temperature=1.0, policy=Reader(), critic=Reader())


def trained(samples: list[Sample], field: str = "advantages") -> np.ndarray:
    return np.stack([getattr(sample, field)[sample.trained] for sample in samples])


def test_group() -> None:
    samples, metrics = run(AdvantageConfig(std="none"))
    np.testing.assert_allclose(trained(samples), [[0.5, 0.5], [-0.5, -0.5], [0, 0], [0, 0]])
    assert metrics == {"zero_signal_groups": 0.5, "unscored": 0.0}
    assert [sample.versions.tolist() for sample in samples if sample.versions is not None] == [[-1, -1, -1, 3, 3]] * 4


def test_unscored_episodes_and_groups_without_signal_are_left_out() -> None:
    samples, metrics = run(AdvantageConfig(std="none"), [1.0, 0.0, None, 2.0])
    assert [s.ids[2] for s in samples] == [0, 1, 3] and metrics["unscored"] == 0.25
    samples, metrics = run(AdvantageConfig(std="none", dynamic_sampling=True))
    assert [s.ids[2] for s in samples] == [0, 1] and [s.episode for s in samples] == [0, 1]
    samples, metrics = run(AdvantageConfig(dynamic_sampling=True), [1.0, 1.0, 2.0, 2.0])
    assert len(samples) == 4 and metrics["zero_signal_groups"] == 1 and not trained(samples).any()
    with pytest.raises(ValueError, match="no episode was scored; the step's file in rollouts/"):
        run(AdvantageConfig(), [None] * 4)


def test_overlong() -> None:
    """Two of at most four tokens, of which the last three are the cache: -1/3 for all, so group advantages stay."""
    plain, _ = run(AdvantageConfig(std="none"))
    shaped, _ = run(AdvantageConfig(std="none", overlong_cache=3))
    np.testing.assert_allclose(trained(shaped), trained(plain), atol=1e-7)
    critic, _ = run(AdvantageConfig(kind="gae", overlong_cache=3, lam=1.0))
    np.testing.assert_allclose(trained(critic, "returns")[:, 1], np.array([1, 0, 2, 2]) - 1 / 3, rtol=1e-6)


def test_reinforce_pp() -> None:
    """Return to go: R - beta KL of this token and those after it, KL = log pi - log reference = .25; whitened."""
    samples, _ = run(AdvantageConfig(kind="reinforce_pp", kl_coef=0.1))
    raw = np.array([[r - 0.05, r - 0.025] for r in (1, 0, 2, 2)])
    np.testing.assert_allclose(trained(samples), (raw - raw.mean()) / raw.std(), rtol=1e-5)


def test_reinforce_pp_baseline() -> None:
    samples, _ = run(AdvantageConfig(kind="reinforce_pp_baseline"))
    raw = np.repeat([[0.5], [-0.5], [0], [0]], 2, axis=1)
    np.testing.assert_allclose(trained(samples), raw / raw.std(), rtol=1e-5)


def test_gae() -> None:
    """The critic says .5 and .25; each token's KL of .25 costs .025."""
    samples, _ = run(AdvantageConfig(kind="gae", kl_coef=0.1, gamma=0.9, lam=0.8))
    both = [gae(np.array([-0.025, r - 0.025]), np.array([0.5, 0.25]), np.ones(2), gamma=0.9, lam=0.8) for r in (1, 0, 2, 2)]
    ones = [np.ones(2, np.float32)] * 4
    np.testing.assert_allclose(trained(samples), whiten([a for a, _ in both], ones), rtol=1e-5)
    np.testing.assert_allclose(trained(samples, "returns"), [r for _, r in both], rtol=1e-6)
    np.testing.assert_array_equal(trained(samples, "values"), [[0.5, 0.25]] * 4)


def test_a_kl_of_tokens_needs_their_rewards() -> None:
    with pytest.raises(ValueError, match="advantages.kl_coef: 'group' has no reward of each token; use trainer.kl_coef"):
        AdvantageConfig(kl_coef=0.1)
