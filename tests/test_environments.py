"""Environments: deterministic tasks, disjoint keys, rewards with their rules."""

import sys
import textwrap
from collections.abc import Sequence
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from inference.types import FinishReason, SamplingParams
from rl import environments
from rl.agents import stepping
from rl.environments import (
    EVAL_KEYS,
    EXAMPLE_KEYS,
    TRAIN_KEYS,
    Arithmetic,
    Environment,
    Message,
    ReasoningGym,
    Reward,
    Step,
    Task,
    answer_text,
    constant_answer,
    finish,
    make_task,
    total_reward,
)
from rl.episodes import Episodes
from rl.workers import Inline
from tests.scripted import END, RENDERER, TOKENIZER, Scripted


class Echo:
    """The docstring's example, as a user would write it."""

    name = "echo"

    def task(self, key: int) -> Task:
        return make_task(self.name, key, [{"role": "user", "content": f"Say {key}."}], answer=str(key))

    def step(self, task: Task, messages: Sequence[Message]) -> Step:
        return finish(Reward("exact", float(messages[-1]["content"].strip() == task.answer)))


def answered(env: Environment, task: Task, content: str) -> dict[str, float | None]:
    """Scores by component for one assistant turn."""
    step = env.step(task, [*task.messages, {"role": "assistant", "content": content}])
    assert step.done and not step.messages
    return {reward.name: reward.score for reward in step.rewards}


def needle(**options: Any) -> ReasoningGym:
    return ReasoningGym("needle_haystack", min_num_statements=3, max_num_statements=4, **options)


def test_a_users_environment_is_enough() -> None:
    env: Environment = Echo()
    assert answered(env, env.task(5), " 5\n") == {"exact": 1.0}
    assert answered(env, env.task(5), "6") == {"exact": 0.0}


def test_the_environment_of_the_readme() -> None:
    """The block as it stands: a guess, a hint, the answer; one that is broken off; one that says no number."""
    text = (Path(environments.__file__).parent / "README.md").read_text()
    block = text.partition("## Write an environment\n\n")[2].partition("\n\nName it")[0]
    assert len(lines := [line for line in block.splitlines() if line]) <= 20
    assert all(line.startswith("    ") for line in lines)
    names: dict[str, Any] = {}
    exec(compile(textwrap.dedent(block), "README.md", "exec"), names)
    environment = names["Guess"](most=10)

    def play(*guesses: str, max_turns: int) -> tuple[str, float | None, list[str]]:
        said = iter(guesses)
        engine = Scripted(lambda request: ([*TOKENIZER.encode(next(said)), END], FinishReason.STOP))
        begin = partial(stepping, Inline(environment))
        episodes = Episodes(engine, begin, RENDERER, seed=1, max_context=1000, max_turns=max_turns)
        params = SamplingParams(max_tokens=5)
        batch = episodes.start([environment.task(3)], samples=1, params=params, label="t", trainable=True)
        [rollout] = episodes.finish(batch)
        return rollout.graph.episode.status, rollout.reward, [m["content"] for m in rollout.messages if m["role"] == "user"][1:]

    assert play("0", "5", "1", max_turns=3) == ("completed", 1.0, ["more", "less"])
    assert play("0", "5", max_turns=2) == ("truncated", 0.0, ["more"])
    assert play("what?", max_turns=3) == ("completed", 0.0, [])


def test_key_ranges_are_disjoint_and_example_keys_refused() -> None:
    assert TRAIN_KEYS.stop <= EVAL_KEYS.start and EVAL_KEYS.stop <= EXAMPLE_KEYS.start
    for key in (-1, EXAMPLE_KEYS.start):
        with pytest.raises(ValueError, match=r"^key: "):
            Echo().task(key)


def test_total_reward_keeps_unscored_apart_from_zero() -> None:
    assert total_reward([Reward("a", 1.0, 2.0), Reward("b", 0.5, -1.0)]) == 1.5
    assert total_reward([Reward("a", 0.0)]) == 0.0
    assert total_reward([Reward("a", None), Reward("b", 1.0)]) is None
    assert total_reward([Reward("a", None, 0.0), Reward("b", 1.0)]) == 1.0
    assert total_reward([]) is None
    with pytest.raises(ValueError, match=r"^score: .*unscored"):
        Reward("a", float("nan"))


def test_content_hash_follows_the_content() -> None:
    same = (
        make_task("e", 1, [{"role": "user", "content": "a"}]),
        make_task("e", 2, [{"role": "user", "content": "a"}]),
    )
    assert same[0].content_hash == same[1].content_hash
    assert make_task("e", 1, [{"role": "user", "content": "b"}]).content_hash != same[0].content_hash
    odd = [make_task("e", 1, [], data={"names": set(names), "half": Fraction(1, 2)}) for names in ("abc", "cab")]
    assert odd[0].content_hash == odd[1].content_hash


def test_answer_rule() -> None:
    turn: Message = {"role": "assistant", "content": "\n  Tayo \nbecause he does\n", "thinking": "Bret?"}
    assert answer_text(turn) == "Tayo"
    assert answer_text(turn, "whole") == "Tayo \nbecause he does"


def test_arithmetic_rewards() -> None:
    env = Arithmetic(20, operators="+-*", weights={"right": 0.5})
    assert env.task(3) == Arithmetic(20, operators="+-*").task(3)
    task = make_task("arithmetic", 0, [{"role": "user", "content": "9+8="}], answer="17")
    assert answered(env, task, " 17 \n") == {"exact": 1.0, "right": 1.0, "digits": 1.0}
    assert answered(env, task, "1x") == {"exact": 0.0, "right": 0.5, "digits": 0.5}
    half: Message = {"role": "assistant", "content": "1x"}
    assert total_reward(env.step(task, [half]).rewards) == 0.25
    assert answered(env, task, "170a") == {"exact": 0.0, "right": 0.5, "digits": 0.75}
    assert answered(env, task, "") == {"exact": 0.0, "right": 0.0, "digits": 0.0}
    for key in range(50):
        task = env.task(key)
        assert answered(env, task, str(eval(task.messages[0]["content"][:-1])))["exact"] == 1.0
    with pytest.raises(ValueError, match=r"^weights: "):
        Arithmetic(weights={"dense": 1.0})
    with pytest.raises(ValueError, match=r"^operators: "):
        Arithmetic(operators="/")


def test_constant_answer_is_the_best_of_the_tasks_own() -> None:
    keys = range(300)
    env = Arithmetic(9)
    answers = [env.task(key).answer for key in keys]
    best = constant_answer(env, keys)
    assert best is not None
    answer, score = best
    assert score == max(answers.count(a) for a in answers) / 300 and answers.count(answer) == score * 300
    assert constant_answer(Echo(), [3, 4]) == ("3", 0.5)


def test_no_constant_answer_without_answers_or_scores() -> None:
    class Open(Echo):
        def task(self, key: int) -> Task:
            return make_task(self.name, key, [{"role": "user", "content": "Say something."}])

    class Unscored(Echo):
        def step(self, task: Task, messages: Sequence[Message]) -> Step:
            return finish(Reward("exact", None))

    assert constant_answer(Open(), [3, 4]) is None and constant_answer(Unscored(), [3, 4]) is None


def test_needle_haystack_prompts_share_their_examples() -> None:
    env = needle(num_examples=4)
    first, second = env.task(0), env.task(EVAL_KEYS.start)
    assert first == needle(num_examples=4).task(0)
    assert first.messages[:8] == second.messages[:8] and first.messages[8] != second.messages[8]
    assert [m["role"] for m in first.messages] == ["user", "assistant"] * 4 + ["user"]
    assert first.messages[1]["content"] in first.messages[0]["content"]
    assert first.answer is not None and first.answer in first.messages[-1]["content"]
    assert answered(env, first, f" {first.answer}\nIt says so.") == {"score": 1.0}
    assert answered(env, first, "Nobody") == {"score": 0.0}


def test_examples_in_one_message_and_frames() -> None:
    env = needle(num_examples=2, examples_as="message", question="Q: {question}\nA:", joiner=" ", system="Be brief.")
    system, user = env.task(1).messages
    assert system == {"role": "system", "content": "Be brief."} and user["role"] == "user"
    items = user["content"].split("\n\nQ: ")
    assert len(items) == 3 and items[0].endswith(f"A: {env.examples[0][1]}") and items[2].endswith("\nA:")
    other = env.task(2).messages[1]["content"]
    shared = env.separator.join(asked + " " + answer for asked, answer in env.examples) + "\n\nQ: "
    assert user["content"].startswith(shared) and other.startswith(shared) and user["content"] != other


def test_a_frame_may_have_braces() -> None:
    framed = needle(question="{question} as {json}").task(1).messages[0]["content"]
    assert framed == needle().task(1).messages[0]["content"] + " as {json}"


def test_no_content_repeats_across_keys_and_blocks() -> None:
    env = needle(num_examples=1)
    keys = [*range(990, 1010), *range(EVAL_KEYS.start, EVAL_KEYS.start + 20)]
    hashes = {env.task(key).content_hash for key in keys}
    shown = {env.task(key).messages[-1]["content"] for key in keys}
    assert len(hashes) == len(keys) and env.examples[0][0] not in shown


@pytest.mark.parametrize("dataset", ["basic_arithmetic", "word_sorting", "gsm_symbolic", "list_functions", "acre"])
def test_other_data_sets_with_their_scorers(dataset: str) -> None:
    env = ReasoningGym(dataset, answer_rule="whole")
    for key in (7, EVAL_KEYS.stop - 1):
        task = env.task(key)
        assert task.answer is not None and task == ReasoningGym(dataset, answer_rule="whole").task(key)
        assert answered(env, task, task.answer) == {"score": 1.0}


def test_mistakes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"^dataset: .*needle_haystack"):
        ReasoningGym("needle_haystak")
    with pytest.raises(ValueError, match=r"^statements: .*min_num_statements"):
        ReasoningGym("needle_haystack", statements=3)
    with pytest.raises(ValueError, match=r"^environment.options: .*'min_num_statements': 5.*max_num_statements must be"):
        ReasoningGym("needle_haystack", min_num_statements=5, max_num_statements=4)
    with pytest.raises(ValueError, match=r"^environment.options: .*'min_num_statements': 'x'"):
        ReasoningGym("needle_haystack", min_num_statements="x")
    with pytest.raises(ValueError, match=r"^question: "):
        needle(question="Q:")
    with pytest.raises(ValueError, match=r"^answer_rule: .*whole"):
        ReasoningGym("mini_sudoku").task(0)
    with pytest.raises(ValueError, match=r"^num_examples: "):
        ReasoningGym("graph_color", num_examples=1)


def test_a_missing_package_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"^environment.kind: .*extra `env`"):
        environments.ReasoningGym("needle_haystack")
