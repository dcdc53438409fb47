"""Agents on a scripted engine: append-only, compacting, recursive; limits, errors, time-outs; what is trained of them."""

import random
import textwrap
from collections import Counter, defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inference.types import Completion, FinishReason, Request, SamplingParams
from rl import agents, environments
from rl.agents import Agent, Ask, ContextOverflow, TurnsOver, parallel, use
from rl.calculator import Calculator, calculate
from rl.columns import write
from rl.compacting import Compacting, Tally
from rl.credit import AdvantageConfig, assign
from rl.engines import Engines
from rl.environments import Reward, Step, Task, finish, make_task
from rl.episodes import Episodes
from rl.messages import Message, ToolCall
from rl.recursive import Halves
from rl.renderers import RENDERERS, Renderer
from rl.rollout import Rollout, recorded
from rl.run import make_steps
from tests.runs import REPO
from tests.scripted import END, RENDERER, TOKENIZER, Scripted

Script = Callable[[str, str], str]


def user(text: str) -> Message:
    return {"role": "user", "content": text}


def engine_of(script: Script) -> Scripted:
    """Answers from (conversation, text of the prompt); conversations are `main`, or as `Ask.call` names them."""

    def answers(request: Request) -> tuple[list[int], FinishReason]:
        name = request.id.partition("#")[2]
        call = name.rpartition(":")[0] or "main"
        return [*TOKENIZER.encode(script(call, TOKENIZER.decode(list(request.prompt_ids)))), END], FinishReason.STOP

    return Scripted(answers)


class Playing:
    """An environment of one agent."""

    name = "playing"

    def __init__(self, play: Callable[[Task], Agent[Any]]):
        self.run = play

    def task(self, key: int) -> Task:
        return make_task(self.name, key, [user(f"task {key}")])


def play(
    engine: Any, environment: Any, *, tasks: int = 1, samples: int = 1, renderer: Renderer = RENDERER, **options: Any
) -> list[Rollout]:
    running = Episodes(engine, environment.run, renderer, **{"seed": 3, "max_turns": 30, "max_context": 2000, **options})
    params = SamplingParams(max_tokens=20, temperature=0.7)
    tasks_ = [environment.task(key) for key in range(tasks)]
    return running.finish(running.start(tasks_, samples=samples, params=params, label="train-1", trainable=True))


def ended(rollout: Rollout) -> tuple[str, str | None, float | None]:
    return rollout.graph.episode.status, rollout.graph.episode.stop_reason, rollout.reward


# ---- conversations


def test_an_append_only_agent_is_one_branch() -> None:
    engine = engine_of(lambda call, prompt: "4+5" if "<|im_start|>tool" not in prompt else "9")
    [rollout] = play(engine, Calculator(9, operators="+"))
    assert [message["role"] for message in rollout.messages] == ["user", "assistant", "tool", "assistant"]
    assert rollout.messages[2]["content"] == "9" and rollout.messages[2].get("name") == "calculator"
    [branch] = rollout.graph.branches()
    first, second = engine.completions
    assert tuple(branch.ids[: len(second.prompt_ids)].tolist()) == second.prompt_ids
    assert second.prompt_ids[: len(first.prompt_ids) + len(first.ids)] == (*first.prompt_ids, *first.ids.tolist())
    assert branch.mask.sum() == branch.weights.sum() == rollout.sampled_tokens
    assert [node.kind for node in rollout.graph.nodes] == ["prompt", "sampled", "tool", "sampled"]
    assert rollout.turns == 2 and len(rollout.graph.calls) == 1


def test_a_renderers_own_form_of_a_call() -> None:
    """A call and a broken one, in one branch: nothing of a sampled call is written again."""
    renderer = RENDERERS["qwen3"](TOKENIZER)
    turns = iter(['{"name": "calculator", "arguments": {"expression": "4+5"}}', '{"name": "abacus", "arguments": {}}', None])

    def answers(request: Request) -> tuple[list[int], FinishReason]:
        turn = next(turns)
        text = "9" if turn is None else f"<tool_call>\n{turn}\n</tool_call>"
        return [*TOKENIZER.encode(text, allow_special=True), renderer.stop_ids[0]], FinishReason.STOP

    [rollout] = play(Scripted(answers), Calculator(9), renderer=renderer)
    called = [message["tool_calls"][0] for message in rollout.messages if "tool_calls" in message]
    results = [message for message in rollout.messages if message["role"] == "tool"]
    assert [result["content"] for result in results] == ["9", "error: there is no tool 'abacus'; there is calculator"]
    assert [call["id"] for call in called] == [result.get("tool_call_id") for result in results]
    [branch] = rollout.graph.branches()
    assert branch.mask.sum() == rollout.sampled_tokens and rollout.turns == 3


@pytest.mark.parametrize(("file", "name", "reward"), [("agents.py", "Twice", 1.0), ("README.md", "Checked", 1.0)])
def test_the_examples_run(file: str, name: str, reward: float) -> None:
    text = (REPO / "rl" / file).read_text().partition(f"    class {name}:")
    block = f"    class {name}:" + text[2].partition("\n\n\n")[0].split("\n\nAn agent yields")[0].split("\n\n- An ask")[0]
    made: dict[str, Any] = {**vars(agents), **vars(environments)}
    exec(textwrap.dedent(block), made)
    [rollout] = play(engine_of(lambda call, prompt: "7"), made[name]())
    assert ended(rollout) == ("completed", "stop", reward) and rollout.turns == 2


def test_several_asks_are_sampled_together_and_fork() -> None:
    def run(task: Task) -> Agent[Step]:
        answers = yield [Ask(messages=task.messages), Ask(messages=task.messages)]
        (third,) = yield [Ask(messages=[*task.messages, answers[1], user("why?")])]
        return finish(Reward("r", float([a["content"] for a in (*answers, third)] == ["b", "a", "c"])))

    texts = iter("abc")  # the newest request is answered first
    engine = engine_of(lambda call, prompt: next(texts))
    [rollout] = play(engine, Playing(run))
    assert ended(rollout) == ("completed", "stop", 1.0)
    assert len({request.params.seed for request in engine.requests}) == 3  # equal prompts, other noise
    parents = [node.parent for node in rollout.graph.nodes]
    assert parents == [None, 0, 0, 1, 3]  # a fork after the prompt; the third goes on from the answer that it was given
    assert [branch.weights.sum() for branch in rollout.graph.branches()] == [2, 4]


def test_a_compacted_history_is_a_branch_of_its_own() -> None:
    environment = Tally(999, numbers=5, turns=2)
    engine = engine_of(lambda call, prompt: "12")
    [rollout] = play(engine, environment)
    kinds = [node.kind for node in rollout.graph.nodes]
    part = ["sampled", "tool", "sampled", "tool", "sampled"]  # two numbers and the summary
    assert kinds == ["prompt", *part, "summary", *part, "summary", "sampled"]
    assert len(rollout.graph.calls) == 1 and rollout.turns == 7
    branches = rollout.graph.branches()
    assert [branch.mask.sum() for branch in branches] == [9, 9, 3]
    assert sum(branch.weights.sum() for branch in branches) == rollout.sampled_tokens == 21
    head = RENDERER.render([{"role": "system", "content": "add"}], add_generation_prompt=False)
    assert all(branch.ids[: len(head)].tolist() == head for branch in branches)
    assert TOKENIZER.decode(branches[1].ids.tolist()[len(head) :]).startswith("<|im_start|>user\n12<|im_end|>\n")
    scores = {reward.name: reward.score for reward in rollout.graph.episode.rewards}
    assert scores.keys() == {"exact", "right", "digits", "summary"} and scores["digits"] == 1


def test_compaction_where_it_would_not_fit() -> None:
    """Thirty turns of twenty characters in room for about six; at times not even the request for a summary fits."""
    spoken: list[str] = []

    def run(task: Task) -> Agent[Step]:
        harness = Compacting(task.messages, request="?" * 60, opening="before: ")
        for number in range(30):
            answer = yield from harness.ask(user(f"line {number} of the text"))
            spoken.append(answer["content"])
        return finish(Reward("summaries", float(len(harness.summaries))))

    engine = engine_of(lambda call, prompt: "summary" if "?" * 60 in prompt else "noted")
    [rollout] = play(engine, Playing(run), max_turns=60, max_context=400)
    assert ended(rollout)[:2] == ("completed", "stop") and 3 <= (rollout.reward or 0) <= 15
    assert spoken == ["noted"] * 30
    assert max(len(request.prompt_ids) for request in engine.requests) < 400
    assert sum(branch.weights.sum() for branch in rollout.graph.branches()) == rollout.sampled_tokens
    with_head = RENDERER.render(rollout.task.messages, add_generation_prompt=False)
    assert all(list(request.prompt_ids[: len(with_head)]) == with_head for request in engine.requests)


def test_a_tree_of_calls() -> None:
    """Eight numbers, split twice: main asks, its two agents ask, their four agents ask, beside each other."""
    environment = Halves(9, terms=8, depth=2)
    waiting: list[int] = []

    class Counting(Scripted):
        def step(self) -> list[Completion]:
            waiting.append(len(self._waiting))
            return [done for _ in range(len(self._waiting)) for done in super(Counting, self).step()]

    def answers(request: Request) -> tuple[list[int], FinishReason]:
        text = TOKENIZER.decode(list(request.prompt_ids)).split("user\n")[-1]
        plan = text.count("+") >= 2 and "tool\n" not in text and request.id.count(".") < 2
        if plan:
            return [*TOKENIZER.encode("3" if request.id.endswith("#0") else "?"), END], FinishReason.STOP
        asked = text.split("tool\n")[-1].split("=")[0]
        return [*TOKENIZER.encode(calculate(asked)), END], FinishReason.STOP

    engine = Counting(answers)
    [rollout] = play(engine, environment)
    assert ended(rollout) == ("completed", "stop", 1.0)
    assert waiting == [1, 2, 4, 2, 1]  # plans, then sums
    calls = {call.agent: call for call in rollout.graph.calls}
    assert calls.keys() == {"main", "main.0", "main.1", "main.0.0", "main.0.1", "main.1.0", "main.1.1"}
    for name, call in calls.items():
        assert call.depth == name.count(".")
        if name == "main":
            assert call.parent is None and call.position is None
        else:
            parent = calls[name.rpartition(".")[0]]
            plan = engine.completions[
                [c.request_id.partition("#")[2] for c in engine.completions].index(
                    "0" if parent.agent == "main" else f"{parent.agent}:0"
                )
            ]
            assert call.parent == parent.id and call.position == len(plan.prompt_ids) + len(plan.ids)
        assert {reward.name: reward.score for reward in call.rewards} == {"exact": 1, "right": 1, "digits": 1}
    assert {len(environment_numbers(rollout, engine, name)) for name in ("main.0",)} == {3}  # as the plan said
    assert {node.call for node in rollout.graph.nodes if node.kind == "sampled"} == {call.id for call in calls.values()}
    assert sum(branch.weights.sum() for branch in rollout.graph.branches()) == rollout.sampled_tokens


def environment_numbers(rollout: Rollout, engine: Scripted, call: str) -> list[str]:
    first = next(request for request in engine.requests if request.id.endswith(f"#{call}:0"))
    return TOKENIZER.decode(list(first.prompt_ids)).split("user\n")[1].split("=")[0].split("+")


def test_a_history_handed_to_another_call_is_shared() -> None:
    def run(task: Task) -> Agent[Step]:
        (answer,) = yield [Ask(messages=task.messages)]
        told = [*task.messages, answer]
        yield [
            Ask(messages=[*told, user("check it")], call="critic", role="critic", trainable=False),
            Ask(messages=[*told, user("go on")]),
        ]
        return finish(Reward("r", 1.0))

    [rollout] = play(engine_of(lambda call, prompt: "yes"), Playing(run))
    critic = rollout.graph.calls[1]
    assert (critic.agent, critic.role, critic.trainable, critic.parent) == ("critic", "critic", False, 0)
    assert [node.parent for node in rollout.graph.nodes if node.kind == "tool"] == [1, 1]
    [branch] = rollout.graph.branches()
    assert branch.weights.sum() == branch.mask.sum() == 8  # what the critic said is not trained on


def test_the_conversations_of_a_group_are_on_one_engine() -> None:
    def request(name: str) -> Request:
        return Request(id=name, prompt_ids=(1, 2), params=SamplingParams(max_tokens=1))

    engines = [engine_of(lambda call, prompt: "yes") for _ in range(2)]
    both = Engines(engines)
    for name in ("l/e/1/0#0", "l/e/1/0#a/b:1", "l/e/1/1#main.0:0", "l/e/2/0#0"):
        both.submit(request(name))
    assert [len(engine.requests) for engine in engines] == [3, 1]


def test_agents_do_not_run_in_workers() -> None:
    config: Any = SimpleNamespace(orchestrator=SimpleNamespace(workers=2))
    with pytest.raises(ValueError, match="orchestrator.workers: 'halves' has agents, which run in this process; set it to 0"):
        make_steps(config, Halves())


# ---- limits, errors, time


def test_limits() -> None:
    def asks_for_ever(task: Task) -> Agent[Step]:
        messages = list(task.messages)
        while True:
            (answer,) = yield [Ask(messages=messages)]
            messages += [answer, user("more")]

    def returns_what_it_has(task: Task) -> Agent[Step]:
        try:
            yield from asks_for_ever(task)
        except TurnsOver:
            return Step(rewards=(Reward("so far", 0.5),), done=False)
        except ContextOverflow:
            return finish(Reward("long", 2.0))
        raise AssertionError("it asks for ever")

    def hears_nothing(task: Task) -> Agent[Step]:
        while True:
            try:
                yield [Ask(messages=task.messages)]
            except TurnsOver:
                continue

    def episode(run: Callable[[Task], Agent[Step]], **options: Any) -> tuple[str, str | None, float | None]:
        [rollout] = play(engine_of(lambda call, prompt: "yes"), Playing(run), **options)
        return ended(rollout)

    assert episode(asks_for_ever, max_turns=3) == ("truncated", "max_turns", None)
    assert episode(asks_for_ever, max_context=100) == ("truncated", "context", None)
    assert episode(returns_what_it_has, max_turns=3) == ("truncated", "max_turns", 0.5)
    assert episode(returns_what_it_has, max_context=100) == ("completed", "context", 2.0)
    assert episode(hears_nothing, max_turns=3) == ("truncated", "max_turns", None)


def test_an_answer_never_outgrows_the_context() -> None:
    engine = engine_of(lambda call, prompt: "y")
    environment = Playing(lambda task: stepping_once(task))
    prompt = len(RENDERER.render(environment.task(0).messages))
    play(engine, environment, max_context=prompt + 5)
    assert [request.params.max_tokens for request in engine.requests] == [5]


def stepping_once(task: Task) -> Agent[Step]:
    yield [Ask(messages=task.messages)]
    return finish(Reward("r", 1.0))


@pytest.mark.parametrize(
    ("wanted", "error"),
    [
        (
            [Ask(messages=[user("x")], call="b", parent="c")],
            "ValueError: parent: no conversation 'c' has asked yet; there is main",
        ),
        ([Ask(messages=[{"role": "boss", "content": "x"}])], "ValueError: messages: "),
        ([], "TypeError: an agent yields at least one Ask, or agents to run"),
        ("text", "TypeError: an agent yields a list of Ask, a Future, Attach, or `yield from`s parallel(...), not 'text'"),
        (KeyError("odd"), "KeyError: 'odd'"),
        (None, "TypeError: the agent of an episode returns a Step, not None"),
        (Step(call_rewards={"b": [Reward("r", 1.0)]}), "ValueError: call_rewards: there is no conversation 'b'"),
    ],
)
def test_an_agent_that_fails_fails_its_episode_only(wanted: Any, error: str) -> None:
    def run(task: Task) -> Agent[Any]:
        yield [Ask(messages=task.messages)]
        if task.key:
            return finish(Reward("r", 1.0))
        if isinstance(wanted, Exception):
            raise wanted
        if wanted is None or isinstance(wanted, Step):
            return wanted
        yield wanted

    rollouts = play(engine_of(lambda call, prompt: "yes"), Playing(run), tasks=2)
    assert ended(rollouts[0]) == ("failed", "environment", None) and ended(rollouts[1]) == ("completed", "stop", 1.0)
    assert (rollouts[0].graph.episode.error or "").startswith(error)


def test_an_error_beside_others_waits_for_them() -> None:
    def child(name: str) -> Agent[str]:
        for _ in range(2):
            (answer,) = yield [Ask(messages=[user(name)], call=name)]
            if name == "bad":
                raise KeyError(name)
        return answer["content"]

    def run(task: Task) -> Agent[Step]:
        try:
            yield from parallel(child("bad"), child("good"))
        except KeyError as error:
            assert str(error) == "'bad'"
            return finish(Reward("r", 1.0))
        raise AssertionError("the error is lost")

    engine = engine_of(lambda call, prompt: "yes")
    [rollout] = play(engine, Playing(run))
    assert ended(rollout) == ("completed", "stop", 1.0)
    assert Counter(request.id.partition("#")[2] for request in engine.requests) == {"bad:0": 1, "good:0": 1, "good:1": 1}


def test_what_an_agent_waits_for_does_not_hold_up_the_others() -> None:
    slow: Future[str] = Future()
    failing: Future[str] = Future()
    failing.set_exception(TimeoutError("the sandbox is gone"))

    def run(task: Task) -> Agent[Step]:
        yield [Ask(messages=task.messages)]
        if task.key == 0:
            text = yield slow
            return finish(Reward("r", float(text == "done")))
        if task.key == 1:
            slow.set_result("done")
        if task.key == 2:
            yield failing
        return finish(Reward("r", 0.5))

    rollouts = play(engine_of(lambda call, prompt: "yes"), Playing(run), tasks=3)
    assert [ended(rollout) for rollout in rollouts] == [
        ("completed", "stop", 1.0), ("completed", "stop", 0.5), ("failed", "environment", None)
    ]  # fmt: skip
    assert rollouts[2].graph.episode.error == "TimeoutError: the sandbox is gone"


class Slow(Scripted):
    """Never answers; what is cancelled had two tokens."""

    def __init__(self) -> None:
        super().__init__(lambda request: ([65, 66], FinishReason.ABORT))

    def step(self) -> list[Completion]:
        return []

    def cancel(self, request_id: str) -> Completion:
        [mine] = [request for request in self._waiting if request.id == request_id]
        self._waiting.remove(mine)
        self._waiting.append(mine)
        return super().step()[0]


def test_time_is_over() -> None:
    """All that the engine has of a late episode is taken back and recorded, and its agents are closed."""
    closed: list[str] = []

    def child(name: str) -> Agent[None]:
        try:
            yield [Ask(messages=[user(name)], call=name)]
        finally:
            closed.append(name)

    def run(task: Task) -> Agent[Step]:
        yield from parallel(child("a"), child("b"))
        return finish(Reward("r", 1.0))

    [rollout] = play(Slow(), Playing(run), seconds=0.05)
    assert ended(rollout) == ("aborted", "timeout", None) and sorted(closed) == ["a", "b"]
    assert [node.status for node in rollout.graph.nodes if node.kind == "sampled"] == ["abandoned"] * 2
    assert not rollout.graph.branches()


def test_an_episode_that_is_broken_off_leaves_nothing_behind() -> None:
    """It asks again and again while others of its agents wait for the engine and for what never comes; another one goes on."""
    soon, never = Future[str](), Future[str]()

    class Opening(Slow):
        def step(self) -> list[Completion]:
            if not soon.done():
                soon.set_result("open")
            return super().step()

    def waits(future: Future[str]) -> Agent[str]:
        return (yield future)

    def asks() -> Agent[str]:
        (answer,) = yield [Ask(messages=[user("?")])]
        return answer["content"]

    def insists() -> Agent[str]:
        yield soon
        while True:
            with suppress(TurnsOver):
                yield from asks()

    def run(task: Task) -> Agent[Step]:
        yield from parallel(waits(never)) if task.key else parallel(asks(), insists(), waits(soon), waits(never))
        return finish()

    engine = Opening()
    rollouts = play(engine, Playing(run), tasks=2, max_turns=1, seconds=0.2)
    assert [ended(rollout) for rollout in rollouts] == [("truncated", "max_turns", None), ("aborted", "timeout", None)]
    assert [[node.status for node in rollout.graph.nodes] for rollout in rollouts] == [["live", "abandoned"], []]
    assert not engine._waiting


def test_time_is_over_for_what_an_agent_waits_for_too() -> None:
    """Nobody will ever have the result; another episode of the batch ends as it would."""
    never: Future[str] = Future()
    closed: list[int] = []

    def child(task: Task) -> Agent[str]:
        try:
            return (yield never)
        finally:
            closed.append(task.key)

    def run(task: Task) -> Agent[Step]:
        yield [Ask(messages=task.messages)]
        if task.key == 0:
            yield from parallel(child(task), child(task))
        return finish(Reward("r", 1.0))

    rollouts = play(engine_of(lambda call, prompt: "yes"), Playing(run), tasks=2, seconds=0.3)
    assert [ended(rollout) for rollout in rollouts] == [("aborted", "timeout", None), ("completed", "stop", 1.0)]
    assert closed == [0, 0] and rollouts[0].sampled_tokens == 4
    never.set_result("late")  # of no consequence


# ---- tools


def tool_call(arguments: str, name: str = "calculator") -> ToolCall:
    return {"id": "c1", "name": name, "arguments": arguments}


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (tool_call('{"expression": "3+4*5-2"}'), "21"),
        (tool_call('{"a": 1'), "error: the arguments of calculator are no JSON"),
        (tool_call("[1]"), "error: the arguments of calculator must be a JSON object"),
        (tool_call("[" * 100_000), "error: the arguments of calculator are no JSON"),
        (tool_call('{"expr": "1"}'), "error: TypeError: "),
        (tool_call('{"expression": 7}'), "error: AttributeError: "),
        (tool_call("{}"), "error: TypeError: missing a required argument: 'expression'"),
        (tool_call('{"expression": "__import__(\'os\').abort()"}'), "error: use up to ten whole numbers and + - *"),
        (tool_call("__import__('os').abort()"), "error: the arguments of calculator are no JSON"),
        (tool_call("{}", "abort"), "error: there is no tool 'abort'; there is calculator"),
    ],
)
def test_what_is_wrong_with_a_call_is_told_to_the_model(call: ToolCall, text: str) -> None:
    """C29"""
    message = use(call, {"calculator": calculate})
    assert message["content"].startswith(text) and message["role"] == "tool" and message.get("tool_call_id") == "c1"


def test_a_broken_machine_is_not_the_models_doing() -> None:
    def broken() -> str:
        raise TimeoutError("the sandbox is gone")

    with pytest.raises(TimeoutError, match="the sandbox is gone"):
        use(tool_call("{}"), {"calculator": broken})


# ---- what is trained


class Wandering:
    """An agent that does anything: goes on, goes back, rewrites, summarises, starts others with or without its history."""

    name = "wandering"

    def __init__(self, seed: int):
        self.seed = seed

    def task(self, key: int) -> Task:
        return make_task(self.name, key, [user(f"task {key}")], data={"seed": self.seed})

    def run(self, task: Task) -> Agent[Step]:
        rng = random.Random(f"{self.seed}/{task.key}")
        calls: set[str] = {"main"}
        yield from self._wander(rng, "main", "main", list(task.messages), 2, calls)
        own = {call: [Reward("own", rng.random())] for call in sorted(calls) if rng.random() < 0.5}
        return Step(rewards=(Reward("r", rng.random()),), call_rewards=own)

    def _wander(
        self, rng: random.Random, call: str, parent: str, messages: list[Message], depth: int, calls: set[str]
    ) -> Agent[None]:
        calls.add(call)
        for number in range(rng.randint(1, 4)):
            asks = [Ask(messages=messages, call=call, parent=parent)] * rng.choice([1, 1, 2])
            answers = yield asks
            grown: list[Message] = [*messages, answers[-1], user(f"more {number}")]
            match rng.choice(["on", "on", "back", "rewrite", "summary", "children"]):
                case "on":
                    messages = grown
                case "rewrite":
                    messages = [*messages, {"role": "assistant", "content": "other"}, user(f"and {number}")]
                case "summary":
                    messages = [messages[0], user("before: " + answers[0]["content"])]
                case "children" if depth:
                    histories = [grown, [user("part")], messages][: rng.randint(1, 3)]
                    names = [f"{call}.{number}{place}" for place in range(len(histories))]
                    children = [
                        self._wander(rng, name, call, list(history), depth - 1, calls)
                        for name, history in zip(names, histories, strict=True)
                    ]
                    yield from parallel(*children)
                    messages = grown
                case _:  # the same again
                    pass


def numbered() -> Scripted:
    """Each sampled token has a log-prob that no other has."""
    count = [0]
    rng = random.Random(1)

    class Numbered(Scripted):
        def step(self) -> list[Completion]:
            [done] = super().step()
            first = count[0]
            count[0] += len(done.ids)
            done.logprobs[:] = -np.arange(first, count[0], dtype=np.float32) / 64
            return [done]

    return Numbered(lambda request: ([*TOKENIZER.encode(rng.choice(["a", "b", "long", "other"])), END], FinishReason.STOP))


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from(["whole", "passed", "own"]))
def test_each_sampled_token_is_trained_once(seed: int, calls: Any) -> None:
    """Over forks, rewritten and compacted histories and trees of calls, however credit is given."""
    rollouts = play(numbered(), Wandering(seed), tasks=2, samples=2, max_turns=400)
    assert {rollout.graph.episode.status for rollout in rollouts} == {"completed"}
    config = AdvantageConfig(std="none", calls=calls, call_discount=0.5 if calls == "passed" else 1.0)
    samples, _ = assign(rollouts, config, longest=10**6, temperature=0.7, policy=Nobody())
    trained: defaultdict[float, float] = defaultdict(float)
    for sample in samples:
        for at in sample.trained:
            trained[float(sample.logprobs[at])] += float(sample.weights[at])
        assert not sample.weights[0]
    sampled = [x for rollout in rollouts for node in rollout.graph.nodes for x in node.logprobs]
    assert trained.keys() == set(sampled) and len(sampled) == len(set(sampled)) == sum(r.sampled_tokens for r in rollouts)
    np.testing.assert_allclose(list(trained.values()), 1, rtol=1e-5)
    own_calls = sum(len(rollout.graph.calls) for rollout in rollouts)
    assert len({sample.episode for sample in samples}) == (own_calls if calls == "own" else len(rollouts))


class Nobody:
    def referenced(self, samples: Any, temperature: float) -> Any:
        raise AssertionError("there is no reference")


def test_a_record_of_several_calls_is_read_as_it_was(tmp_path: Path) -> None:
    environment = Wandering(5)
    rollouts = play(numbered(), environment, tasks=3, samples=2, max_turns=400)
    assert max(len(rollout.graph.calls) for rollout in rollouts) > 2
    write(tmp_path / "x.parquet", [rollout.graph for rollout in rollouts])
    again = recorded(tmp_path / "x.parquet", environment)
    for ours, theirs in zip(again, rollouts, strict=True):
        assert ours.graph.calls == theirs.graph.calls and ours.graph.nodes == theirs.graph.nodes
        assert ours.graph.episode == theirs.graph.episode and ours.messages == theirs.messages
        assert (ours.turns, ours.sampled_tokens, ours.prompt_tokens) == (
            theirs.turns,
            theirs.sampled_tokens,
            theirs.prompt_tokens,
        )
    config = AdvantageConfig(calls="own")
    both = [assign(each, config, longest=1, temperature=0.7, policy=Nobody())[0] for each in (rollouts, again)]
    for ours, theirs in zip(*both, strict=True):
        np.testing.assert_array_equal(ours.ids, theirs.ids)
        np.testing.assert_array_equal(ours.advantages, theirs.advantages)
        assert ours.episode == theirs.episode


def test_the_same_play_twice_is_the_same() -> None:
    """Seeds name the conversation and its turn, whichever answer comes first."""

    def seeds(order: int) -> dict[str, int | None]:
        class Ordered(Scripted):
            def step(self) -> list[Completion]:
                self._waiting = sorted(self._waiting, key=lambda request: request.id)[::order]
                return super().step()

        engine = Ordered(lambda request: ([*TOKENIZER.encode("1"), END], FinishReason.STOP))
        play(engine, Halves(9, terms=8, depth=2), samples=2)
        return {request.id: request.params.seed for request in engine.requests}

    forwards, backwards = seeds(1), seeds(-1)
    assert forwards == backwards and len(set(forwards.values())) == len(forwards) == 2 * 7
