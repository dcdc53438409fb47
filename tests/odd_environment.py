"""An environment for test_workers.py, imported by worker processes: the last message says what the step does."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from rl.environments import Reward, Step, Task, finish, make_task
from rl.messages import Message


class Odd:
    name = "odd"

    def task(self, key: int) -> Task:
        return make_task(self.name, key, [{"role": "user", "content": f"{key}?"}], answer=str(key))

    def step(self, task: Task, messages: Sequence[Message]) -> Step:
        print("a line that is no answer", flush=True)
        word, _, rest = messages[-1]["content"].partition(" ")
        if word == "raise":
            return finish(Reward("x", {}[rest]))
        if word == "once" and not (mark := Path(rest)).exists():  # waits at the first time only
            mark.write_text(str(os.getpid()))
            time.sleep(60)
        if word == "die":
            with open(rest, "a") as log:
                log.write("died\n")
            os.kill(os.getpid(), signal.SIGKILL)
        if word == "child":  # a sandbox, say
            child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
            Path(rest).write_text(f"{os.getpid()} {child.pid}")
            child.wait()
        if word == "more":
            return Step(messages=({"role": "tool", "content": "again"},), rewards=(Reward("y", None, 0.0),), done=False)
        if os.read(0, 1):
            raise AssertionError("the protocol's lines are not the environment's input")
        return finish(Reward("length", len(messages[-1]["content"]) / 7), Reward("key", float(task.key), 0.5))
