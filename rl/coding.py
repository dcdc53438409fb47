"""Programming tasks: a model writes a function with a shell, in a sandbox; hidden tests score it.

The model's tools, and the tests, run in `rl.sandbox`, each episode in a folder of its own, in threads beside the engine. Tests
run in another folder, with only the answer in it: arguments go in, results come out, and what is right is known here alone.
"""

import json
import random
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from tempfile import mkdtemp
from types import MappingProxyType
from typing import Any, TypeVar

from rl.agents import Agent, Ask, Limit, garbled, use
from rl.environments import Reward, Step, Task, component_weights, finish, make_task
from rl.messages import Tool
from rl.problems import FAMILIES, cases
from rl.sandbox import Sandbox, discard, read_answer, workspace

T = TypeVar("T")
ANSWER = "answer.py"
LONGEST = 50_000
"""bytes of a command or path: Linux takes none of more than 128 KiB, which would look as if the sandbox had failed"""
TEXT = {"type": "string"}
TOOLS: tuple[Tool, ...] = (
    {
        "name": "shell",
        "description": "Runs a command with sh in /work, and returns what it writes and its exit status.",
        "parameters": {"type": "object", "properties": {"command": TEXT}, "required": ["command"]},
    },
    {
        "name": "write",
        "description": "Writes a text into a file, whose path is relative to /work.",
        "parameters": {"type": "object", "properties": {"path": TEXT, "text": TEXT}, "required": ["path", "text"]},
    },
)
JUDGE = """
import json, sys
results = open("results", "w")
sys.path.insert(0, "/work")
cases = json.load(sys.stdin)
from answer import solve
for arguments in cases:
    try:
        line = json.dumps([solve(*arguments)], sort_keys=True)
    except Exception:
        line = "[]"
    results.write(line + chr(10))
    results.flush()
"""
"""writes a line for each call: [result], or [] where there is none; Python's `-I` has no folder of its own in its path"""


class Coding:
    """Functions to be written, of the families in rl/problems.py; the answer is /work/answer.py.

    Components: `passed`, the share of hidden tests that it passes, and `ran`, the share that ended with any result. Their
    `weights` are 1, 0. Where the sandbox itself fails (OSError) the episode fails: it has no reward, rather than one of 0.

    Args:
        families: of problems; all of them by default.
        calls: most tool calls of an episode.
        tests: hidden tests of a task.
        threads: most commands at once, of all episodes.
        limits: of each command: fields of rl.sandbox.Sandbox.

    Raises:
        ValueError: an option is none, or this machine cannot isolate, or has no Python for what is isolated.
    """

    def __init__(
        self,
        *,
        families: Sequence[str] = tuple(FAMILIES),
        calls: int = 8,
        tests: int = 8,
        threads: int = 4,
        limits: Mapping[str, Any] = MappingProxyType({}),
        seed: int = 0,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        for name, value in (("calls", calls), ("tests", tests), ("threads", threads)):
            if value < 1:
                raise ValueError(f"{name}: must be at least 1, got {value}")
        if not families or set(families) - FAMILIES.keys():
            raise ValueError(f"families: use some of {sorted(FAMILIES)}, got {list(families)}")
        self.name = "coding"
        self.families, self.calls, self.tests, self.seed = tuple(families), calls, tests, seed
        self.weights = component_weights(weights, passed=1.0, ran=0.0)
        self.sandbox = Sandbox(**limits)
        with workspace() as folder:
            if self.sandbox.run(["python3", "-I", "-c", "import json"], folder).code != 0:
                raise ValueError(
                    "environment.kind: coding needs a python3 below /usr, for programs in the sandbox; install one"
                )
        self._pool = ThreadPoolExecutor(threads, "coding")

    def close(self) -> None:
        """Waits for the commands that run."""
        self._pool.shutdown()

    def task(self, key: int) -> Task:
        rng = random.Random(f"{self.seed}/{key}")
        problem = FAMILIES[rng.choice(self.families)](rng)
        shown, *hidden = [(case, problem.solve(*case)) for case in cases(problem, rng, self.tests + 1)]
        text = (
            f"Write a Python function {problem.signature} into the file {ANSWER}. It returns {problem.text}. For example, "
            f"solve({', '.join(map(repr, shown[0]))}) returns {shown[1]!r}. Say when you are done."
        )
        data = {"family": problem.family, "cases": [case for case, _ in hidden], "right": [right for _, right in hidden]}
        return make_task(self.name, key, [{"role": "user", "content": text}], data=data)

    def run(self, task: Task) -> Agent[Step]:
        with self._desk() as desk:
            messages, left = list(task.messages), self.calls
            while left > 0:
                try:
                    (said,) = yield [Ask(messages=messages, tools=TOOLS)]
                except Limit:
                    break  # what there is counts
                calls = said.get("tool_calls", [])
                wrong = garbled(said)
                if not calls and wrong is None:
                    break
                messages.append(said)
                for call in calls[:left]:
                    messages.append((yield desk.do(use, call, desk.tools)))
                if wrong is not None:
                    messages.append(wrong)
                left -= max(1, len(calls))
            answer = yield desk.do(read_answer, desk.folder, ANSWER)
            results = [] if answer is None else (yield desk.do(self._results, answer, task.data["cases"]))
        right = [json.dumps([value], sort_keys=True) for value in task.data["right"]]
        passed = sum(ours == theirs for ours, theirs in zip(right, results, strict=False)) / self.tests
        ran = sum(line != "[]" for line in results[: self.tests]) / self.tests
        scores = {"passed": passed, "ran": ran}
        return finish(*(Reward(name, score, self.weights[name]) for name, score in scores.items()))

    def _results(self, answer: bytes, cases: list[Any]) -> list[str]:
        """What the judge has written of the answer's calls."""
        with workspace() as folder:
            (folder / ANSWER).write_bytes(answer)
            self.sandbox.run(["python3", "-IB", "-c", JUDGE], folder, json.dumps(cases))
            found = read_answer(folder, "results")
        return [] if found is None else found.decode(errors="replace").splitlines()

    @contextmanager
    def _desk(self) -> Iterator["Desk"]:
        desk = Desk(self.sandbox, self._pool)
        try:
            yield desk
        finally:
            desk.close()


class Desk:
    """The folder of one episode, and the tools that work in it."""

    def __init__(self, sandbox: Sandbox, pool: ThreadPoolExecutor) -> None:
        self.folder = Path(mkdtemp(prefix="twinax-coding-"))
        self.tools: Mapping[str, Callable[..., str]] = {"shell": self._shell, "write": self._write}
        self._sandbox, self._pool = sandbox, pool
        self._last: Future[Any] | None = None

    def do(self, work: Callable[..., T], *arguments: Any) -> Future[T]:
        """In a thread; one after the other."""
        assert self._last is None or self._last.done()
        self._last = future = self._pool.submit(work, *arguments)
        return future

    def close(self) -> None:
        """Removes the folder, as soon as nothing works in it."""
        if self._last is None or self._last.cancel() or self._last.done():
            discard(self.folder)
        else:
            self._last.add_done_callback(lambda _: discard(self.folder))

    def _shell(self, command: str) -> str:
        ran = self._sandbox.run(["sh", "-c", _argument(command, "command")], self.folder)
        how = "took too long, and was ended" if ran.code is None else f"exit status {ran.code}"
        return f"{ran.output}[{how}]"

    def _write(self, path: str, text: str) -> str:
        """By a command too, as a path may lead anywhere."""
        where = shlex.quote(_argument(path, "path"))
        script = f'set -e; at=$(dirname -- {where}); mkdir -p -- "$at"; cat > {where}'
        ran = self._sandbox.run(["sh", "-c", script], self.folder, _text(text, "text"))
        return f"wrote {path}" if ran.code == 0 else f"error: {ran.output.strip() or 'it could not be written'}"


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str) or "\0" in value:
        raise ValueError(f"{name} must be a text")
    return value


def _argument(value: Any, name: str) -> str:
    text = _text(value, name)
    if len(shlex.quote(text).encode()) > LONGEST:
        raise ValueError(f"{name} is too long; write a long text into a file")
    return text
