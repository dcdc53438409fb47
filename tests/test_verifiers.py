"""Environments of verifiers, as it runs them itself; skipped where it is not installed (it conflicts with other packages of the
tests: see rl/README.md for an environment that has both)."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inference.types import FinishReason, Request, SamplingParams
from rl.environments import EVAL_KEYS
from rl.episodes import Episodes
from rl.kinds import make
from rl.rollout import Rollout
from tests.scripted import END, RENDERER, TOKENIZER, Scripted

PACKAGE = '''
"""Counting: the model is asked for a number, and once more by its user; a harness that runs in this process."""
import httpx
import verifiers.v1 as vf
from verifiers.v1.dialects.chat import message_to_wire
from verifiers.v1.runtimes import ProgramResult

__all__ = ["CountingTaskset", "CountingEnv", "InProcess"]


class Data(vf.TaskData):
    answer: str = ""


class CountingTask(vf.Task[Data]):
    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        if "crash" in self.data.prompt:
            raise RuntimeError("the scorer is broken")
        return float(trace.last_reply.strip() == self.data.answer)

    @vf.metric
    async def length(self, trace: vf.Trace) -> float:
        return float(len(trace.last_reply))


class CountingTaskset(vf.Taskset[CountingTask]):
    def load(self):
        for number in range(20):
            text = f"after {number}?" if number != 7 else "crash"
            yield CountingTask(Data(prompt=text, system_prompt="count", answer=str(number + 1)))


class Config(vf.EnvConfig):
    player: vf.AgentConfig = vf.AgentConfig()


class CountingEnv(vf.Env[Config]):
    async def run(self, task, agents):
        async with agents.player.interaction(task) as interaction:
            await interaction.turn()
            await interaction.turn("sure?")


class InProcess(vf.Harness[vf.HarnessConfig]):
    APPENDS_SYSTEM_PROMPT = SUPPORTS_RESUME = True
    EXECUTES_CODE = NEEDS_CONTAINER = False

    async def launch(self, ctx, trace, runtime, endpoint, secret, mcp_urls, data, tool_interception_url=None):
        system, prompt = self.resolve_prompt(data)
        said = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [message_to_wire(m) for m in prompt]
        body = {"model": ctx.model, "messages": [{"role": "system", "content": system}, *said]}
        async with httpx.AsyncClient(timeout=30, trust_env=False) as client:
            answer = await client.post(f"{endpoint}/chat/completions", json=body, headers={"authorization": f"Bearer {secret}"})
        return ProgramResult(exit_code=0 if answer.status_code == 200 else 1, stdout="", stderr=answer.text)
'''


@pytest.fixture(scope="module")
def counting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    pytest.importorskip("verifiers.v1", reason="verifiers is not installed here")
    folder = tmp_path_factory.mktemp("packages")
    (folder / "twinax_counting.py").write_text(PACKAGE)
    sys.path.insert(0, str(folder))
    environment: Any = make("verifiers", {"taskset": "twinax-counting", "held_out": 5})
    yield environment
    environment.close()
    sys.path.remove(str(folder))


def play(environment: Any, keys: list[int], script: Any, **options: Any) -> tuple[list[Rollout], Scripted]:
    def answers(request: Request) -> tuple[list[int], FinishReason]:
        text = script(TOKENIZER.decode(list(request.prompt_ids)))
        return [*TOKENIZER.encode(text), END], FinishReason.STOP

    engine = Scripted(answers)
    episodes = Episodes(engine, environment.run, RENDERER, **{"seed": 3, "max_turns": 30, "max_context": 2000, **options})
    params = SamplingParams(max_tokens=20, temperature=0.7)
    tasks = [environment.task(key) for key in keys]
    return episodes.finish(episodes.start(tasks, samples=2, params=params, label="train-1", trainable=True)), engine


def right(prompt: str) -> str:
    number = int(prompt.split("after ")[1].split("?")[0]) if "after" in prompt else 0
    return str(number + 1) if "sure?" in prompt else "let me see"


def test_its_rollouts_are_episodes(counting: Any) -> None:
    """Two turns, of six episodes at once: each in its own record, token for token, with the rewards of its own task."""
    rollouts, engine = play(counting, [0, 3, EVAL_KEYS.start + 1], right)
    for rollout in rollouts:
        graph = rollout.graph
        assert graph.episode.status == "completed", graph.episode.error
        assert {(r.name, r.score, r.weight) for r in graph.episode.rewards} >= {("right", 1.0, 2.0)} and rollout.reward == 2.0
        assert [(r.score, r.weight) for r in graph.episode.rewards if r.name == "length"] == [
            (float(len(rollout.messages[-1]["content"])), 0.0)
        ]
        assert [message["role"] for message in rollout.messages] == ["system", "user", "assistant", "user", "assistant"]
        assert tuple(rollout.messages[:2]) == rollout.task.messages
        [branch] = graph.branches()
        assert branch.weights.sum() == rollout.sampled_tokens and rollout.turns == 2
        first, second = [c for c in engine.completions if c.request_id.startswith(f"{graph.episode.id}#")]
        assert tuple(branch.ids.tolist()) == (*second.prompt_ids, *second.ids.tolist())
        assert second.prompt_ids[: len(first.prompt_ids) + len(first.ids)] == (*first.prompt_ids, *first.ids.tolist())
    assert {rollout.task.messages[1]["content"] for rollout in rollouts} == {"after 0?", "after 3?", "after 16?"}
    wrong, _ = play(counting, [0], lambda prompt: "9")
    assert [rollout.reward for rollout in wrong] == [0.0, 0.0]


def test_what_fails_there_has_no_reward(counting: Any) -> None:
    rollouts, _ = play(counting, [7], right)
    for rollout in rollouts:
        assert (rollout.graph.episode.status, rollout.reward) == ("failed", None)
        assert "the scorer is broken" in str(rollout.graph.episode.error)
    rollouts, _ = play(counting, [1], right, max_context=60)  # no room to answer
    assert [rollout.reward for rollout in rollouts] == [None, None]
    again, _ = play(counting, [1], right)  # and nothing is broken by it
    assert [rollout.reward for rollout in again] == [2.0, 2.0]


def test_tasks_and_mistakes(counting: Any) -> None:
    shown = [counting.task(key).messages[1]["content"] for key in (0, 15, 14)]
    assert shown == ["after 0?", "after 0?", "after 14?"]
    assert [counting.task(EVAL_KEYS.start + key).messages[1]["content"] for key in (0, 5, 4)] == [
        "after 15?",
        "after 15?",
        "after 19?",
    ]
    with pytest.raises(ValueError, match=r"^taskset: verifiers cannot load 'no-such-tasks'"):
        make("verifiers", {"taskset": "no-such-tasks"})
    with pytest.raises(ValueError, match=r"^held_out: must be above 0 and below the number of tasks, 20, got 20"):
        make("verifiers", {"taskset": "twinax-counting", "held_out": 20})


def test_without_verifiers_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "verifiers", None)
    monkeypatch.setitem(sys.modules, "verifiers.v1", None)
    with pytest.raises(ValueError, match=r"^environment.kind: install verifiers .*pip install 'verifiers>=0.4,<0.5'"):
        make("verifiers", {"taskset": "x"})
