"""A process that runs an environment's steps for `rl.workers`: one JSON line in, one out.

    in     {"kind", "options"}, then a line for each step: {"key", "hash", "messages"}
    out    {"ready": true}, then a line for each step: {"messages", "rewards", "done"} or {"error": [class, text]}

A task is made again from its key. What the environment prints goes to standard error, and it reads an empty standard input: the
lines have descriptors of their own. The process, with all that it has started, ends when its input does: its parent is gone.
"""

import dataclasses
import json
import os
import queue
import signal
import threading
from collections.abc import Sequence
from typing import Any, BinaryIO

from rl.environments import AgentEnvironment, Environment
from rl.kinds import make
from rl.messages import Message


def main() -> None:
    lines, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(2, 1)
    section = json.loads(lines.readline())
    environment = make(section["kind"], section["options"])
    assert not isinstance(environment, AgentEnvironment), "agents run in the run's own process"
    steps: queue.SimpleQueue[bytes] = queue.SimpleQueue()
    # in a thread: that the parent is gone is seen in the middle of a step, too
    threading.Thread(target=_read, args=(lines, steps), daemon=True).start()
    _write(answers, {"ready": True})
    while True:
        asked = json.loads(steps.get())
        try:
            answer = _step(environment, asked["key"], asked["hash"], asked["messages"])
        except Exception as error:  # the caller's to record
            answer = {"error": [type(error).__name__, str(error)]}
        _write(answers, answer)


def _step(environment: Environment, key: int, content_hash: str, messages: Sequence[Message]) -> dict[str, Any]:
    task = environment.task(key)
    if task.content_hash != content_hash:
        raise ValueError(f"task {key} of {environment.name!r} is another one here: it does not follow from its key alone")
    return dataclasses.asdict(environment.step(task, messages))


def _read(lines: BinaryIO, steps: queue.SimpleQueue[bytes]) -> None:
    for line in lines:
        steps.put(line)
    os.killpg(0, signal.SIGKILL)  # rl.workers starts it as the leader of a group of its own


def _write(answers: BinaryIO, answer: dict[str, Any]) -> None:
    answers.write(json.dumps(answer).encode() + b"\n")
    answers.flush()


if __name__ == "__main__":
    main()
