"""From episodes to samples: every kind of advantage on hand-made episodes, against the estimators of rl.advantages.

Two groups of two episodes; rewards 1, 0 and 2, 2; each episode has a prompt of 3 tokens and 2 sampled ones.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from rl.advantages import gae, whiten
from rl.batch import Sample, Totals, loss_batch
from rl.credit import AdvantageConfig, assign, samples_of
from rl.environments import Reward, make_task
from rl.forest import Layout
from rl.graph import Graph
from rl.loss_batch import aggregate
from rl.records import Call, Episode
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


# ---- episodes of several segments and calls


def episode(key: int, reward: float | None, segments: Sequence[int], calls: Sequence[Call] = (Call(id=0),)) -> Rollout:
    """One prompt; a branch of so many sampled tokens for each segment, of its call where there are several."""
    task = make_task("e", key, [{"role": "user", "content": "x"}])
    graph = Graph(Episode(id="", env="e", key=key, content_hash="", group_id="g", seed=0), calls)
    for number, length in enumerate(segments):
        sample(graph, graph.extend([1, 2, 10 + number]), length, number if len(calls) > 1 else 0)
    graph.finish("completed" if reward is not None else "failed", rewards=[] if reward is None else [Reward("r", reward)])
    return Rollout(task, graph, sampled_tokens=sum(segments))


def sample(graph: Graph, parent: int, length: int, call: int = 0) -> int:
    return graph.add_completion(
        parent,
        request_id=f"{len(graph.nodes)}",
        prompt_ids=graph.path_ids(parent),
        ids=[5] * length,
        logprobs=[LOGP] * length,
        logprobs_full=[LOGP] * length,
        versions=[3] * length,
        temperature=1.0,
        finish_reason="stop",
        message={"role": "assistant", "content": ""},
        call=call,
    )


def given(rollouts: Sequence[Rollout], **config: Any) -> list[Sample]:
    config = {"std": "none", **config}
    return assign(rollouts, AdvantageConfig(**config), longest=9, temperature=1.0, policy=Reader(), critic=Reader())[0]


def values(samples: Sequence[Sample]) -> list[float]:
    """The one advantage of each sample's trained tokens."""
    assert all(len(set(each.advantages[each.trained].tolist())) == 1 for each in samples)
    return [float(each.advantages[each.trained][0]) for each in samples]


def test_a_segment_is_no_rollout() -> None:
    """C16: rewards by (group, rollout, segments) g0: 0 | 1, 1, 1; g1: 2, 2 | 4."""
    rollouts = [episode(0, 0, [1]), episode(0, 1, [1, 1, 1]), episode(1, 2, [1, 1]), episode(1, 4, [1])]
    samples = given(rollouts)
    assert values(samples) == [-0.5, 0.5, 0.5, 0.5, -1, -1, 1]
    # neither is it one to the other kinds: each token counts once in mean and variance
    raw = np.array([-0.5, 0.5, 0.5, 0.5, -1, -1, 1])
    whitened = (raw - raw.mean()) / raw.std()
    np.testing.assert_allclose(values(given(rollouts, kind="reinforce_pp_baseline")), whitened, rtol=1e-5)


def test_a_sequence_has_the_tokens_of_all_its_segments() -> None:
    """C16: lengths 2 and 3 of one episode, 4 of another: 5, 5, 4. Terms 1, 3 | 2, 2, 5 of one episode: 13 / 5."""
    samples = given([episode(0, 0, [2, 3]), episode(0, 1, [4])])
    layout = Layout(rows=1, tokens=64, context=128, branches=4, length=4)
    batch = loss_batch(samples, range(3), Totals.of(samples), layout, 4, ())
    assert batch.sequence_tokens.tolist() == [5, 5, 4, 0] and batch.num_sequences == 2 and batch.num_tokens == 9
    one = given([episode(0, 1, [2, 3])])
    batch = loss_batch(one, range(2), Totals.of(one), layout, 4, ())
    terms = np.array([[1, 3, 0, 0], [2, 2, 5, 0], [0] * 4, [0] * 4], np.float32)
    assert float(aggregate(jnp.asarray(terms), batch, "seq_mean_token_mean")) == pytest.approx(13 / 5)


def test_every_turn_has_the_advantage() -> None:
    """C17: three turns, advantage 0.7: on each turn's own tokens, and nowhere else; mask 0, 0, 1, 1, 1 of one turn."""
    graph = Graph(Episode(id="", env="e", key=0, content_hash="", group_id="g", seed=0))
    node = graph.extend([1, 2])
    for turn in range(3):
        node = sample(graph, node, 3)
        if turn < 2:
            node = graph.extend([*graph.path_ids(node), 8], kind="tool")
    [one] = samples_of([Rollout(make_task("e", 0, []), graph)], [0.7])
    mask = np.array([0, 0, 1, 1, 1, 0, 1, 1, 1, 0, 1, 1, 1], np.float32)
    np.testing.assert_array_equal(one.advantages, np.float32(0.7) * mask)
    np.testing.assert_array_equal(one.weights, mask)


def test_a_turn_on_three_branches_counts_once() -> None:
    """C15: five tokens before a fork in three."""
    rollout = episode(0, 1, [5])
    graph = rollout.graph
    for token in (7, 8, 9):
        sample(graph, graph.extend([*graph.path_ids(1), token], kind="tool"), 2)
    samples = given([rollout, episode(0, 0, [1])])[:3]
    np.testing.assert_allclose([each.weights[3:8] for each in samples], 1 / 3)
    assert sum(each.weights.sum() for each in samples) == pytest.approx(5 + 3 * 2)
    assert Totals.of(samples).tokens[0] == pytest.approx(11)


def tree(reward: float, own: Sequence[float | None]) -> Rollout:
    """main, two agents of it, and one of the first; a segment of one token each."""
    kinds = [("main", None, 0), ("a", 0, 1), ("b", 0, 1), ("a.a", 1, 2)]
    calls = [
        Call(
            id=number,
            agent=name,
            parent=parent,
            depth=depth,
            rewards=() if score is None else (Reward("own", score),),
        )
        for number, ((name, parent, depth), score) in enumerate(zip(kinds, own, strict=True))
    ]
    return episode(0, reward, [1] * 4, calls)


def test_credit_of_calls() -> None:
    rollouts = [tree(1, [None, 3, None, 7]), tree(0, [None, 1, None, None])]
    whole = given(rollouts)
    assert values(whole) == [0.5] * 4 + [-0.5] * 4 and [each.episode for each in whole] == [0] * 4 + [1] * 4
    passed = given(rollouts, calls="passed", call_discount=0.5)
    assert values(passed) == [0.5, 0.25, 0.25, 0.125, -0.5, -0.25, -0.25, -0.125]
    assert [each.episode for each in passed] == [0] * 4 + [1] * 4
    # a: 3 against 1; a.a of the first has nothing to compare with; main and b are the episode's
    own = given(rollouts, calls="own")
    assert values(own) == [0.5, 1, 0.5, 0, -0.5, -1, -0.5, -0.5] and [each.episode for each in own] == list(range(8))


def test_own_rewards_of_an_unscored_episode_are_compared() -> None:
    broken = tree(0, [None, 1, None, None])
    broken.graph.finish("failed")
    samples = given([tree(1, [None, 3, None, None]), broken, tree(0, [None, None, None, None])], calls="own")
    assert values(samples) == [0.5, 1, 0.5, 0.5, -1, -0.5, -0.5, -0.5, -0.5]


def test_a_call_within_anothers_path_trains_its_own_tokens() -> None:
    """A call that goes on from its parent's history: its sequence has its own tokens, the parent's has the parent's."""
    rollout = episode(0, 1, [2])
    graph = rollout.graph
    graph.calls.append(Call(id=1, parent=0, agent="b", depth=1, rewards=(Reward("own", 5.0),)))
    for token, call in ((7, 0), (8, 1)):
        sample(graph, graph.extend([*graph.path_ids(1), token], kind="tool", call=call), 3, call)
    samples = given([rollout, episode(0, 0, [1])], calls="own")
    assert [each.episode for each in samples] == [0, 0, 1, 2]
    assert [float(each.weights.sum()) for each in samples] == [4, 1, 3, 1]
    assert values(samples) == [0.5, 0.5, 0, -0.5]


def test_options_of_calls_are_checked() -> None:
    with pytest.raises(ValueError, match="advantages.calls: 'each' is unknown; use one of"):
        AdvantageConfig(calls="each")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="advantages.call_discount: calls = 'own' does not use it; use 'passed'"):
        AdvantageConfig(calls="own", call_discount=0.5)
    with pytest.raises(ValueError, match="advantages.calls: 'gae' makes advantages of each token; use 'whole' or 'own'"):
        AdvantageConfig(kind="gae", calls="passed")
