"""Engines in processes of their own that are started again when they die.

What a dead engine had in flight is sampled again, with the same ids, seeds and prompts: the episodes go on. An engine that dies
again and again without finishing a request is an error with the end of what it said.
"""

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from typing import Any

from inference.types import Completion, Request
from rl.remote import EngineDied, RemoteEngine, nothing
from rl.workers import read_line

TAIL = 2000
"""characters of standard error in an error"""


class EngineProcess:
    """A server's process. Its standard input is a pipe from here, so that one served
    `--with-parent` ends when this process does.

    Args:
        command: prints its address as the first line of standard output, once it answers.
        environment: variables that it has besides this process's.
        seconds: that it may take to do so.
        most: restarts without a finished request in between.
    """

    def __init__(
        self, command: Sequence[str], *, environment: Mapping[str, str] | None = None, seconds: float = 600.0, most: int = 3
    ):
        self.command, self._seconds, self._most = list(command), seconds, most
        self._environment = os.environ | dict(environment or {})
        self._restarts = 0
        self._ended = False
        self._log = tempfile.TemporaryFile()  # noqa: SIM115 (`close` does)
        self._popen: subprocess.Popen[bytes] | None = None
        self.url = ""

    @property
    def pid(self) -> int:
        assert self._popen is not None, "start it first"
        return self._popen.pid

    def alive(self) -> bool:
        return self._popen is not None and self._popen.poll() is None

    def served(self) -> None:
        """It has finished a request: restarts count from 0 again."""
        self._restarts = 0

    def start(self) -> str:
        """Starts it, and returns its address once it answers.

        Raises:
            EngineDied: it ended or took too long, with the end of what it said.
        """
        PIPE = subprocess.PIPE
        self._popen = popen = subprocess.Popen(
            self.command, stdin=PIPE, stdout=PIPE, stderr=self._log, bufsize=0, start_new_session=True, env=self._environment
        )
        assert popen.stdout is not None
        why = "ended before it answered"
        try:
            line = read_line(popen.stdout, self._seconds)
        except TimeoutError:
            line, why = None, f"did not answer in {self._seconds:g} seconds"
        if line is None:
            self.stop()
            raise EngineDied(f"{' '.join(self.command)}: {why}; it said: {self.tail()}")
        self.url = line.decode().strip()
        return self.url

    def restart(self) -> str:
        """As `start`, in place of what is there.

        Raises:
            EngineDied: it was restarted as often as it may be.
        """
        self.stop()
        while True:
            if self._ended:
                raise EngineDied(f"{' '.join(self.command)}: was ended")
            if self._restarts == self._most:
                raise EngineDied(
                    f"{' '.join(self.command)}: died, and {self._most} restarts finished no request; it said: {self.tail()}"
                )
            self._restarts += 1
            with suppress(EngineDied):  # the next one, or the error above, which has what it said
                return self.start()

    def end(self) -> None:
        """Kills it, whatever another thread does to start it, and lets nobody start it again."""
        self._ended = True
        if (popen := self._popen) is not None:
            with suppress(ProcessLookupError):
                os.killpg(popen.pid, signal.SIGKILL)

    def stop(self) -> None:
        """Kills it."""
        if self._popen is None:
            return
        with suppress(ProcessLookupError):
            os.killpg(self._popen.pid, signal.SIGKILL)
        self._popen.wait()
        for pipe in (self._popen.stdin, self._popen.stdout):
            assert pipe is not None
            pipe.close()
        self._popen = None

    def close(self) -> None:
        self.stop()
        self._log.close()

    def tail(self) -> str:
        """The end of what all its lives have said on standard error."""
        return os.pread(self._log.fileno(), TAIL, max(0, os.fstat(self._log.fileno()).st_size - TAIL)).decode(errors="replace")


class ServedEngine:
    """A SamplerEngine on a process that is restarted when it dies; its requests wait for it meanwhile,
    and those of others go on.

    Args:
        mode: of the updates.
    """

    def __init__(self, process: EngineProcess, *, key: str | None = None, mode: str = "retract"):
        self.process, self._key, self._mode = process, key, mode
        self._starter = ThreadPoolExecutor(1, "restart")
        self._waiting: dict[str, Request] = {}
        """submitted, or lost, while there is no server"""
        self._coming: Future[RemoteEngine] | None = None
        self._remote = RemoteEngine(process.url if process.alive() else process.start(), key=key)
        self.version = self._remote.version

    def submit(self, request: Request) -> None:
        if self._coming is not None:
            self._waiting[request.id] = request
        else:
            self._remote.submit(request)

    def cancel(self, request_id: str) -> Completion:
        waiting = self._waiting.pop(request_id, None)
        return self._remote.cancel(request_id) if waiting is None else nothing(waiting)

    def step(self) -> list[Completion]:
        """Raises:
        EngineDied: restarts do not help.
        ValueError: the server refuses a request.
        """
        if self._coming is not None:
            if wait([self._coming], 0.02).done:
                self._take(self._coming.result())
            return []
        done = self._remote.step()
        if done:
            self.process.served()
        if self._remote.lost:
            self._restart()
        return done

    def update(self, version: int, restart: bool = False) -> dict[str, Any]:
        """The server swaps to a version of its store; one that dies of it, or is dead, is brought to it as it restarts.

        Raises:
            ValueError: it refuses, and serves what it had.
        """
        answer: dict[str, Any] = {}
        if self._coming is None:
            try:
                answer = self._remote.update(version, self._mode, restart)
            except EngineDied:
                self.version = version
                self._restart()
        self.version = version
        return answer

    def close(self) -> None:
        self.process.end()
        self._starter.shutdown()
        self._remote.close()
        self.process.close()

    def _restart(self) -> None:
        print(f"engine: {self._remote.why}; starting it again", file=sys.stderr)
        self._waiting |= {request.id: request for request in self._remote.give_up()}
        self._coming = self._starter.submit(self._again)

    def _again(self) -> RemoteEngine:
        while True:
            url, remote = self.process.restart(), None
            try:
                remote = RemoteEngine(url, key=self._key)
                while remote.version != (version := self.version):  # nothing is in flight there
                    remote.update(version, "retract", restart=remote.version > version)
                return remote
            except EngineDied:
                if remote is not None:
                    remote.close()

    def _take(self, remote: RemoteEngine) -> None:
        old, self._remote, self._coming = self._remote, remote, None
        if remote.version != self.version:
            self.update(self.version)
        waiting, self._waiting = self._waiting, {}
        for request in waiting.values():
            self.submit(request)
        old.close()
