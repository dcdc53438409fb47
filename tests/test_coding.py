"""Programming tasks: what a policy writes through its tools is scored by tests that it cannot see, and harms nothing."""

import json
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from inference.types import FinishReason, Request, SamplingParams
from rl.agents import garbled, use
from rl.coding import Coding, Desk
from rl.environments import Task
from rl.episodes import Episodes
from rl.kinds import make
from rl.problems import FAMILIES, Problem, cases
from rl.rollout import Rollout
from rl.sandbox import Ran
from tests.scripted import END, RENDERER, TOKENIZER, Scripted

SOLUTIONS = {
    "divisible": "def solve(numbers): return sum(n for n in numbers if n % {0} == 0)",
    "caesar": (
        "def solve(text):\n"
        "    turn = lambda c, a: chr((ord(c) - ord(a) + {0}) % 26 + ord(a))\n"
        "    return ''.join(turn(c, 'a') if c.islower() else turn(c, 'A') if c.isupper() else c for c in text)"
    ),
    "runs": (
        "from itertools import groupby\n"
        "def solve(text):\n"
        "    found = [(c, len(list(run))) for c, run in groupby(text)]\n"
        "    return [one for one in found if one[1] >= {0}]"
    ),
    "digits": "def solve(n): return (solve(n // {0}) if n >= {0} else []) + [n % {0}]",
    "window": (
        "def solve(numbers):\n"
        "    sums = [sum(numbers[i:i + {0}]) for i in range(len(numbers)) if i + {0} <= len(numbers)]\n"
        "    return sorted(sums)[-1] if sums else None"
    ),
    "words": (
        "from collections import Counter\ndef solve(text): return Counter(w for w in text.lower().split() if len(w) >= {0})"
    ),
}
"""written from what the task says; {0} is the number in it"""


@pytest.fixture(scope="module")
def coding() -> Coding:
    try:
        return Coding(calls=4, tests=4, limits={"seconds": 4, "memory_mb": 256}, weights={"ran": 0.5})
    except ValueError as error:
        pytest.skip(str(error))


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def write(text: str, path: str = "answer.py") -> str:
    return call("write", path=path, text=text)


def play(coding: Any, turns: Callable[[Task], Sequence[str]], *, keys: Sequence[int] = (0,), **options: Any) -> list[Rollout]:
    """Episodes of a policy that says these things, one after the other; then "done"."""
    said = {key: list(turns(coding.task(key))) for key in keys}

    def answers(request: Request) -> tuple[list[int], FinishReason]:
        episode, _, number = request.id.partition("#")
        mine, turn = said[int(episode.split("/")[2])], int(number)
        return [*TOKENIZER.encode(mine[turn] if turn < len(mine) else "done", allow_special=True), END], FinishReason.STOP

    episodes = Episodes(Scripted(answers), coding.run, RENDERER, seed=1, max_context=20_000, **{"max_turns": 9, **options})
    params = SamplingParams(max_tokens=2000, temperature=1.0)
    begun = episodes.start([coding.task(key) for key in keys], samples=1, params=params, label="t", trainable=True)
    return episodes.finish(begun)


def scores(rollout: Rollout) -> dict[str, float | None]:
    assert rollout.graph.episode.status == "completed", rollout.graph.episode
    return {reward.name: reward.score for reward in rollout.graph.episode.rewards}


def told(rollout: Rollout) -> list[str]:
    return [message["content"] for message in rollout.messages if message["role"] == "tool"]


def solution(task: Task) -> str:
    said = re.sub(r"For example.*", "", task.messages[0]["content"].replace("0, or more", "").replace("number, 0", ""))
    [number] = re.findall(r"(?<![\[\w])\d+", said.replace("[0] for 0", ""))
    return SOLUTIONS[task.data["family"]].format(number)


def test_a_right_solution_has_all_of_it(coding: Coding) -> None:
    """Of every family, as one would write it who has read the task and nothing else."""
    first = {coding.task(key).data["family"]: key for key in reversed(range(60))}
    assert first.keys() == FAMILIES.keys()
    check = call("shell", command="python3 -c 'import answer'")
    rollouts = play(coding, lambda task: [write(solution(task)), check], keys=tuple(first.values()))
    for rollout in rollouts:
        assert scores(rollout) == {"passed": 1.0, "ran": 1.0} and rollout.reward == 1.5, rollout.task
        assert told(rollout) == ["wrote answer.py", "[exit status 0]"]
        assert rollout.turns == 3


def test_wrong_ones_have_what_they_earn(coding: Coding) -> None:
    task = coding.task(0)
    first = task.data["right"][0]
    half = f"seen = []\ndef solve(x):\n    seen.append(x)\n    return {first!r} if len(seen) == 1 else 1 // 0"

    def of(answer: str) -> dict[str, float | None]:
        return scores(play(coding, lambda task: [write(answer)])[0])

    assert of("def solve(x): return 'no'") == {"passed": 0.0, "ran": 1.0}
    assert of(half) == {"passed": 0.25, "ran": 0.25}
    assert of("def solve(x): return {}[x]") == of("syntax error") == of("x = 1") == {"passed": 0.0, "ran": 0.0}
    assert of("while True: pass") == of("import os; os._exit(0)") == {"passed": 0.0, "ran": 0.0}
    slow = f"seen = []\ndef solve(x):\n    seen.append(x)\n    while len(seen) > 1: pass\n    return {first!r}"
    assert of(slow) == {"passed": 0.25, "ran": 0.25}
    [nothing] = play(coding, lambda task: ["it is easy"])
    assert scores(nothing) == {"passed": 0.0, "ran": 0.0} and nothing.turns == 1


CHEAT = """
import json
class Equal:
    def __eq__(self, other): return True
def solve(*arguments): return Equal()
json.dumps = lambda *a, **k: '[true]'
open('/work/results', 'w').write('[true]' + chr(10))
print('[true]')
"""


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where folders are made."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(folder))
    return folder


def test_attacks_earn_nothing_and_harm_nothing(coding: Coding, tmp_path: Path, temporary: Path) -> None:
    """Links out of the folder, tests that are looked for, commands that destroy what they can."""
    (tmp_path / "right.py").write_text("def solve(*x): raise SystemExit('read')")
    (tmp_path / "secret").write_text("s3cret")
    attacks = [
        [call("shell", command="rm -rf / 2>/dev/null; rm -rf /work/* /tmp/*; kill -9 -1")],
        [call("shell", command=f"ln -s {tmp_path}/right.py answer.py; cat {tmp_path}/secret answer.py")],
        [call("shell", command=f"ln -s {tmp_path} out"), write("x", "out/x"), write("x", f"{tmp_path}/x"), write("x", "../x")],
        [call("shell", command="wget -T 1 http://1.1.1.1/ 2>&1; cat /proc/net/route | wc -l")],
        [call("shell", command="mkfifo answer.py")],
        [call("shell", command="mkdir answer.py; head -c 100000000 /dev/zero > big; :(){ :|:& };:")],
        [call("shell", command="head -c 2000000 /dev/zero > answer.py")],
        [write(CHEAT)],
    ]
    for attack in attacks:
        [rollout] = play(coding, lambda task, attack=attack: attack)
        assert scores(rollout)["passed"] == 0.0, attack
        assert told(rollout) and "s3cret" not in str(told(rollout))
        assert not list(temporary.iterdir())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["right.py", "secret", "temporary"]


def test_what_is_wrong_with_calls_comes_back_as_text(coding: Coding) -> None:
    said = [
        '<tool_call>{"name": "shell", "arguments": {"command": "echo hidden"}',
        call("look", command="x") + call("shell", command=["ls"]),
        call("shell", cmd="x"),
    ]
    [rollout] = play(coding, lambda task: said)
    answers = told(rollout)
    assert len(answers) == 3 and all(text.startswith("error: ") for text in answers), answers
    assert "this is no call" in answers[0] and said[0] in answers[0] and "there is no tool 'look'" in answers[1]
    assert "command must be a text" in answers[2] and rollout.turns == 3  # it has made all the calls that it may
    assert garbled({"role": "assistant", "content": "no < call > at all"}) is None


def test_a_command_too_long_for_the_system_is_the_models_doing(coding: Coding) -> None:
    """It would be an OSError of exec's, as if the sandbox had failed."""
    desk = Desk(coding.sandbox, ThreadPoolExecutor(1))
    for name, arguments in (("shell", {"command": "true " + "x" * 200_000}), ("write", {"path": "y" * 200_000, "text": ""})):
        result = use({"id": "0", "name": name, "arguments": json.dumps(arguments)}, desk.tools)
        assert re.match("error: (command|path) is too long; ", result["content"])
    desk.close()


def test_calls_and_turns_are_limited_and_what_there_is_counts(coding: Coding) -> None:
    right = solution(coding.task(0))
    many = call("shell", command="echo 1") * 2 + write(right) + write("def solve(x): pass", "other.py")
    [rollout] = play(coding, lambda task: [many + write("def solve(x): pass"), write("def solve(x): pass")])
    assert scores(rollout)["passed"] == 1.0 and rollout.turns == 1
    [rollout] = play(coding, lambda task: [write(right), write("def solve(x): pass")], max_turns=1)
    assert scores(rollout)["passed"] == 1.0


def test_a_sandbox_that_fails_is_no_reward_of_zero(coding: Coding, monkeypatch: pytest.MonkeyPatch) -> None:
    class Broken:
        def run(self, *arguments: Any) -> Ran:
            raise OSError("no more processes")

    monkeypatch.setattr(coding, "sandbox", Broken())
    [rollout] = play(coding, lambda task: [write(solution(task))])
    episode = rollout.graph.episode
    assert (episode.status, episode.error, rollout.reward) == ("failed", "OSError: no more processes", None)


def test_an_episode_that_is_ended_while_a_command_runs_leaves_nothing(coding: Coding, temporary: Path) -> None:
    agent = coding.run(coding.task(0))
    next(agent)
    calls = [{"id": "1", "name": "shell", "arguments": json.dumps({"command": "sleep 0.5; echo end"})}]
    waits: Any = agent.send([{"role": "assistant", "content": "", "tool_calls": calls}])
    assert isinstance(waits, Future)
    for _ in range(1000):
        if waits.running():
            break
        time.sleep(0.01)
    agent.close()
    assert list(temporary.iterdir())  # something works in it
    assert waits.result(20)["content"].startswith("end")
    for _ in range(1000):
        if not list(temporary.iterdir()):
            break
        time.sleep(0.01)
    assert not list(temporary.iterdir())


def test_tasks(coding: Coding) -> None:
    again = make("coding", {"calls": 4, "tests": 4})
    assert [again.task(key) for key in range(20)] == [coding.task(key) for key in range(20)]
    for key in range(20):
        task = coding.task(key)
        shown = str(task.messages)
        assert len({repr(case) for case in task.data["cases"]}) == 4
        assert not any(f"solve({', '.join(map(repr, case))})" in shown for case in task.data["cases"])
    for name, family in FAMILIES.items():
        problem: Problem = family(random.Random(1))
        assert problem.family == name
        for case in cases(problem, random.Random(2), 20):
            assert json.loads(json.dumps(problem.solve(*case))) == problem.solve(*case)
    with pytest.raises(ValueError, match=r"^families: use some of .*'divisible'.*, got \['sorting'\]"):
        Coding(families=["sorting"])
    with pytest.raises(ValueError, match=r"^calls: must be at least 1"):
        Coding(calls=0)
    with pytest.raises(ValueError, match=r"^environment.options: .*'second'"):
        make("coding", {"limits": {"second": 1}})
