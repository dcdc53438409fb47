"""Environments: a task is a prompt made from a key, a step scores the conversation so far.

An environment is any object with `name`, `task` and `step` (or `run`, see rl/agents.py); the simple case is short:

    class Echo:
        name = "echo"

        def task(self, key: int) -> Task:
            return make_task(self.name, key, [{"role": "user", "content": f"Say {key}."}], answer=str(key))

        def step(self, task: Task, messages: Sequence[Message]) -> Step:
            return finish(Reward("exact", float(messages[-1]["content"].strip() == task.answer)))

Keys: TRAIN_KEYS, EVAL_KEYS and EXAMPLE_KEYS are disjoint ranges. A key names one task for ever (given the environment's
options), so a run is resumed, and an evaluation repeated, by keys alone. Small task spaces can repeat a *content* under
two keys: compare `Task.content_hash` where that matters.
"""

import difflib
import hashlib
import importlib
import json
import math
import random
from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from types import MappingProxyType
from typing import Any, Literal, Protocol, get_args, runtime_checkable

from rl.messages import Message
from rl.scoring import component_weights, text_scores

TRAIN_KEYS = range(10**9)
EVAL_KEYS = range(10**9, 2 * 10**9)
EXAMPLE_KEYS = range(2 * 10**9, 3 * 10**9)
"""Worked examples in prompts come from here; `task` refuses these keys."""


@dataclass(frozen=True, slots=True)
class Reward:
    """One named component of a reward. A score of None means unscored, which is not 0; weight 0 means logged only."""

    name: str
    score: float | None
    weight: float = 1.0

    def __post_init__(self) -> None:
        if self.score is not None and not math.isfinite(self.score):
            raise ValueError(f"score: {self.name!r} is {self.score}; give a finite number, or None for unscored")


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One prompt. (`env`, `key`) is its identity and that of its group."""

    env: str
    key: int
    content_hash: str
    """sha256 of messages, answer and data: tells whether two keys hold the same task"""
    messages: tuple[Message, ...]
    answer: str | None
    """a right answer, where the environment knows one"""
    data: Mapping[str, Any] = field(default_factory=dict)
    """what the scorer needs besides; made again from the key, never stored"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """What the environment says after an assistant's turn."""

    messages: tuple[Message, ...] = ()
    """tool or user turns to append; empty when done"""
    rewards: tuple[Reward, ...] = ()
    done: bool = True
    """False, as an agent's last word: the episode was broken off"""
    call_rewards: Mapping[str, Sequence[Reward]] = field(default_factory=dict)
    """of an environment with `run`: what single conversations earned, by `Ask.call`; see `rl.credit`, calls = "own" """


class Tasks(Protocol):
    """A source of tasks: `task` is deterministic."""

    @property
    def name(self) -> str: ...

    def task(self, key: int) -> Task: ...


@runtime_checkable
class AgentEnvironment(Tasks, Protocol):
    """Drives conversations of its own (`rl.agents`); errors that `run` raises fail the episode."""

    def run(self, task: Task) -> Generator[Any, Any, Step]:
        """`task.messages` open the episode's own conversation, "main"; others may be asked too."""
        ...


class Environment(Tasks, Protocol):
    """Tasks and their scorer; errors that `step` raises fail the episode."""

    def step(self, task: Task, messages: Sequence[Message]) -> Step:
        """Takes the whole conversation, the last message being the assistant's."""
        ...


def make_task(
    env: str, key: int, messages: Sequence[Message], *, answer: str | None = None, data: Mapping[str, Any] | None = None
) -> Task:
    """A Task with its content hash. ValueError when the key is no train or eval key."""
    if key not in TRAIN_KEYS and key not in EVAL_KEYS:
        raise ValueError(f"key: {key} is neither a train key (0 to 1e9 - 1) nor an eval key (1e9 to 2e9 - 1); use one")
    content = json.dumps([env, list(messages), answer, data or {}], sort_keys=True, default=_plain)
    digest = hashlib.sha256(content.encode()).hexdigest()
    return Task(env=env, key=key, content_hash=digest, messages=tuple(messages), answer=answer, data=data or {})


def _plain(value: Any) -> Any:
    """Other types in task data, the same in every process."""
    return sorted(map(str, value)) if isinstance(value, set | frozenset) else str(value)


def finish(*rewards: Reward) -> Step:
    """The last step of an episode."""
    return Step(rewards=rewards, done=True)


def total_reward(rewards: Sequence[Reward]) -> float | None:
    """Weighted sum of the scores; None when there are none, or when one that counts (weight != 0) is unscored."""
    counted = [reward for reward in rewards if reward.weight != 0]
    scores = [reward.weight * reward.score for reward in counted if reward.score is not None]
    return math.fsum(scores) if counted and len(scores) == len(counted) else None


AnswerRule = Literal["first_line", "whole"]


def answer_text(message: Message, rule: AnswerRule = "first_line") -> str:
    """The answer in an assistant's message: its content, stripped; with `first_line` then cut at the first newline."""
    text = message["content"].strip()
    return text if rule == "whole" else text.split("\n", 1)[0].strip()


def constant_answer(env: Environment | AgentEnvironment, keys: Sequence[int]) -> tuple[str, float] | None:
    """The one answer that scores best on all these tasks, and its mean total reward: what not reading the prompt earns.

    Candidates are the tasks' own answers, scored by the environment; unscored tasks do not count. Ties: the earliest.
    None where no task has an answer, or none is scored, and for agents, whose answers are more than one message.
    """
    if isinstance(env, AgentEnvironment):
        return None
    tasks = [env.task(key) for key in keys]
    candidates = list(dict.fromkeys(task.answer for task in tasks if task.answer is not None))

    def mean_score(answer: str) -> float | None:
        turn: Message = {"role": "assistant", "content": answer}
        totals = [total_reward(env.step(task, [*task.messages, turn]).rewards) for task in tasks]
        scored = [total for total in totals if total is not None]
        return math.fsum(scored) / len(scored) if scored else None

    means = [(answer, mean) for answer in candidates if (mean := mean_score(answer)) is not None]
    return max(means, key=lambda pair: pair[1], default=None)


class Arithmetic:
    """Sums like 3+4= of operands 0 to `max_value`: no package, no sandbox, and a random byte model can learn it.

    Components: `exact` (0 or 1), `right` (share of characters right in place, of the longer text) and `digits` (share
    of characters that are digits). `weights` by component (1, 0, 0): weigh the last two for a dense reward.
    """

    def __init__(
        self,
        max_value: int = 9,
        *,
        operators: str = "+",
        seed: int = 0,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        if max_value < 0:
            raise ValueError(f"max_value: must be at least 0, got {max_value}")
        if not operators or set(operators) - set("+-*"):
            raise ValueError(f"operators: use some of '+-*', got {operators!r}")
        self.name = "arithmetic"
        self.max_value, self.operators, self.seed = max_value, operators, seed
        self.weights = component_weights(weights, exact=1.0, right=0.0, digits=0.0)

    def task(self, key: int) -> Task:
        rng = random.Random(f"{self.seed}/{key}")
        a, b = rng.randint(0, self.max_value), rng.randint(0, self.max_value)
        operator = rng.choice(self.operators)
        answer = {"+": a + b, "-": a - b, "*": a * b}[operator]
        return make_task(self.name, key, [{"role": "user", "content": f"{a}{operator}{b}="}], answer=str(answer))

    def step(self, task: Task, messages: Sequence[Message]) -> Step:
        assert task.answer is not None
        scores = text_scores(answer_text(messages[-1]), task.answer)
        return finish(*(Reward(name, score, self.weights[name]) for name, score in scores.items()))


class ReasoningGym:
    """Any reasoning_gym data set (extra `env`) with its own scorer; `options` are the data set's own.

    `num_examples` worked examples open every prompt, the same for all keys, so that they are a shared prefix of every
    prompt, token for token: as earlier user/assistant turns (`examples_as="turns"`) or in the one user message
    (`"message"`: question, `joiner`, answer; items apart by `separator`). `question` frames each question.
    The answer is read by `answer_rule` (see answer_text). Evaluate at the seed of training: many data sets draw item i
    of seed s as item i - 1 of seed s + 1, so only the keys of one seed are disjoint.
    """

    BLOCK = 1000
    """items per reasoning_gym object: block c is made with seed + c * BLOCK, so seed + index is the key's alone"""

    def __init__(
        self,
        dataset: str,
        *,
        num_examples: int = 0,
        examples_as: Literal["turns", "message"] = "turns",
        system: str | None = None,
        question: str = "{question}",
        joiner: str = "\n",
        separator: str = "\n\n",
        answer_rule: AnswerRule = "first_line",
        seed: int = 0,
        **options: Any,
    ) -> None:
        if not 0 <= seed <= 10**9:
            raise ValueError(f"seed: use a number from 0 to 1e9, got {seed}")
        if examples_as not in ("turns", "message"):
            raise ValueError(f"examples_as: use 'turns' or 'message', got {examples_as!r}")
        if "{question}" not in question:
            raise ValueError(f"question: the frame must contain {{question}}, got {question!r}")
        if answer_rule not in get_args(AnswerRule):
            raise ValueError(f"answer_rule: use one of {get_args(AnswerRule)}, got {answer_rule!r}")
        self._gym = _reasoning_gym(dataset, options)
        self.name = f"reasoning_gym/{dataset}"
        self.dataset, self.options, self.seed = dataset, options, seed
        self.examples_as, self.system = examples_as, system
        self.question, self.joiner, self.separator = question, joiner, separator
        self.answer_rule: AnswerRule = answer_rule
        self._blocks: dict[int, Any] = {}
        try:
            self._block(0)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(f"environment.options: {dataset!r} refuses {options} ({error}); change these values") from error
        self.examples = tuple(self._example(EXAMPLE_KEYS[i]) for i in range(num_examples))

    def _block(self, key: int) -> Any:
        """The reasoning_gym object that holds this key; the last few are kept."""
        block = key // self.BLOCK
        if block not in self._blocks:
            if len(self._blocks) >= 8:
                del self._blocks[next(iter(self._blocks))]
            seed = self.seed + block * self.BLOCK
            self._blocks[block] = self._gym.create_dataset(self.dataset, seed=seed, size=self.BLOCK, **self.options)
        return self._blocks[block]

    def _entry(self, key: int) -> dict[str, Any]:
        entry = self._block(key)[key % self.BLOCK]
        if self.answer_rule == "first_line" and "\n" in (entry["answer"] or "").strip():
            raise ValueError(f"answer_rule: answers of {self.dataset!r} have several lines; use answer_rule='whole'")
        return entry

    def _example(self, key: int) -> tuple[str, str]:
        entry = self._entry(key)
        if entry["answer"] is None:
            raise ValueError(f"num_examples: {self.dataset!r} knows no answers to show; use num_examples=0")
        return self.question.replace("{question}", entry["question"]), entry["answer"]

    def task(self, key: int) -> Task:
        entry = self._entry(key)
        question = self.question.replace("{question}", entry["question"])
        messages: list[Message] = []
        if self.system is not None:
            messages.append({"role": "system", "content": self.system})
        if self.examples_as == "turns":
            for asked, answer in self.examples:
                messages.append({"role": "user", "content": asked})
                messages.append({"role": "assistant", "content": answer})
        else:
            shown = [asked + self.joiner + answer for asked, answer in self.examples]
            question = self.separator.join([*shown, question])
        messages.append({"role": "user", "content": question})
        return make_task(self.name, key, messages, answer=entry["answer"], data=entry)

    def step(self, task: Task, messages: Sequence[Message]) -> Step:
        answer = answer_text(messages[-1], self.answer_rule)
        return finish(Reward("score", float(self._block(task.key).score_answer(answer, dict(task.data)))))


def _reasoning_gym(dataset: str, options: Mapping[str, Any]) -> Any:
    """The reasoning_gym module, after checking that it is there, and the names of the data set and of its options."""
    try:
        gym = importlib.import_module("reasoning_gym")
        known = importlib.import_module("reasoning_gym.factory").DATASETS
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "reasoning_gym":
            raise
        raise ValueError("environment.kind: install reasoning_gym, in the extra `env`: pip install -e '.[env]'") from error
    if dataset not in known:
        close = difflib.get_close_matches(dataset, known, n=5, cutoff=0.4)
        raise ValueError(f"dataset: reasoning_gym has no {dataset!r}; close names: {', '.join(close) or 'none'}")
    allowed = {item.name for item in fields(known[dataset][1])} - {"seed", "size"}
    if unknown := sorted(set(options) - allowed):
        raise ValueError(f"{unknown[0]}: {dataset!r} has no such option; it has {', '.join(sorted(allowed))}")
    return gym
