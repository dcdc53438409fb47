"""Who runs environments: this process, or some of their own.

A step is a function of the task and the messages alone, so a step whose worker dies is given to another one. What comes of no
answer is an exception, never a reward: the caller records the episode as failed, and unscored.
"""

import json
import os
import queue
import select
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import Future
from contextlib import suppress
from typing import IO, Any

from rl.environments import Environment, Reward, Step, Task
from rl.messages import Message

MOST_DEATHS = 3
"""of workers in one step, before the step is the suspect"""


class WorkerDied(RuntimeError):
    """Every worker that ran the step died of it, or the workers were closed."""


class StepError(Exception):
    """What an environment raised in a worker. Its class, made for it, has the name of the one that was raised."""


class Inline:
    """Runs steps in this process, as they come."""

    def __init__(self, environment: Environment):
        self.environment = environment

    def submit(self, task: Task, messages: Sequence[Message]) -> Future[Step]:
        answer: Future[Step] = Future()
        try:
            answer.set_result(self.environment.step(task, messages))
        except Exception as error:  # the caller's to record
            answer.set_exception(error)
        return answer

    def close(self) -> None:
        pass


class Workers:
    """Runs steps in `count` processes (`rl.worker`), in the order in which they are submitted.

    Args:
        kind, options: of the environment, as in the config.
        seconds: that a step may take; its worker is killed then. 0: any.
    """

    def __init__(self, kind: str, options: Mapping[str, Any], count: int, seconds: float = 0.0):
        self._section = {"kind": kind, "options": dict(options)}
        self._seconds = seconds or None
        self._steps: queue.SimpleQueue[tuple[bytes, Future[Step]] | None] = queue.SimpleQueue()
        self._closing = threading.Lock()
        """held while a process is started, or all are killed"""
        self._closed = False
        self.processes: list[_Process | None] = [None] * count
        self._threads = [threading.Thread(target=self._run, args=(i,), name=f"worker-{i}", daemon=True) for i in range(count)]
        for thread in self._threads:
            thread.start()

    def submit(self, task: Task, messages: Sequence[Message]) -> Future[Step]:
        """The step, or one of StepError, TimeoutError and WorkerDied."""
        assert not self._closed, "the workers are closed"
        answer: Future[Step] = Future()
        asked = {"key": task.key, "hash": task.content_hash, "messages": list(messages)}
        self._steps.put((json.dumps(asked).encode() + b"\n", answer))
        return answer

    def close(self) -> None:
        """Kills all processes; steps that are not done end as WorkerDied."""
        with self._closing:
            self._closed = True
            for process in self.processes:
                if process is not None:
                    process.kill()
        for _ in self._threads:
            self._steps.put(None)
        for thread in self._threads:
            thread.join()

    def _run(self, number: int) -> None:
        with suppress(WorkerDied):  # closed before it began
            self._start(number)
        while (asked := self._steps.get()) is not None:
            line, answer = asked
            if not answer.set_running_or_notify_cancel():
                continue
            try:
                answer.set_result(self._step(number, line))
            except Exception as error:  # the caller's to record
                answer.set_exception(error)
        self._end(number)

    def _start(self, number: int) -> "_Process":
        self._end(number)
        with self._closing:
            if self._closed:
                raise WorkerDied("the workers were closed before the step was done")
            self.processes[number] = process = _Process(self._section)
        return process

    def _end(self, number: int) -> None:
        if (process := self.processes[number]) is not None:
            self.processes[number] = None
            process.close()

    def _step(self, number: int, line: bytes) -> Step:
        for _ in range(MOST_DEATHS):
            process = self.processes[number]
            if process is None or not process.ready():
                process = self._start(number)
            try:
                answer = process.ask(line, self._seconds) if process.ready() else None
            except TimeoutError:
                self._end(number)
                raise TimeoutError(f"the environment's step took more than {self._seconds:g} seconds") from None
            if answer is not None:
                return _step_of(json.loads(answer))
            self._end(number)
        if self._closed:
            raise WorkerDied("the workers were closed before the step was done")
        raise WorkerDied(f"{MOST_DEATHS} workers died in this step, one after the other")


def _step_of(answer: Mapping[str, Any]) -> Step:
    if "error" in answer:
        name, text = answer["error"]
        raise type(name, (StepError,), {})(text)
    rewards = tuple(Reward(**reward) for reward in answer["rewards"])
    return Step(messages=tuple(answer["messages"]), rewards=rewards, done=answer["done"])


class _Process:
    """One worker, seen from outside. It leads a group of its own, so that what the environment starts dies with it."""

    def __init__(self, section: Mapping[str, Any]):
        command = [sys.executable, "-m", "rl.worker"]
        self._popen = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0, start_new_session=True
        )
        self.pid = self._popen.pid
        self._ready = False
        self._send(json.dumps(section).encode() + b"\n")

    def ready(self) -> bool:
        """Waits until it has its environment; False where it is dead."""
        self._ready = self._ready or self._receive(None) is not None
        return self._ready and self._popen.poll() is None

    def ask(self, line: bytes, seconds: float | None) -> bytes | None:
        """Its answer; None where it died first.

        Raises:
            TimeoutError: it did not answer in time.
        """
        return self._receive(seconds) if self._send(line) else None

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._popen.wait()

    def close(self) -> None:
        """Kills it and lets go of its pipes; for the one thread that talks with it."""
        self.kill()
        assert self._popen.stdin is not None and self._popen.stdout is not None
        self._popen.stdin.close()
        self._popen.stdout.close()

    def _send(self, line: bytes) -> bool:
        assert self._popen.stdin is not None
        rest = memoryview(line)
        try:
            while rest:
                rest = rest[self._popen.stdin.write(rest) :]
        except BrokenPipeError:
            return False
        return True

    def _receive(self, seconds: float | None) -> bytes | None:
        assert self._popen.stdout is not None
        return read_line(self._popen.stdout, seconds)


def read_line(pipe: IO[bytes], seconds: float | None) -> bytes | None:
    """The next line of a process, of which nothing more has come; None where the pipe ends first.

    Raises:
        TimeoutError: it is not there in time.
    """
    poll, end = select.poll(), None if seconds is None else time.monotonic() + seconds
    poll.register(pipe, select.POLLIN)
    line = b""
    while not line.endswith(b"\n"):
        if not poll.poll(None if end is None else max(0.0, end - time.monotonic()) * 1000):
            raise TimeoutError
        part = os.read(pipe.fileno(), 2**16)
        if not part:
            return None
        line += part
    return line
