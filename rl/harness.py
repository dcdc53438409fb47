"""Agent programs as agents of a run: an unmodified program plays the tasks of an environment, shut in a sandbox.

    config.environment = {
        "kind": "harness",
        "options": {
            "tasks": "reasoning_gym", "task_options": {"dataset": "chain_sum"},
            "command": ["python3", "/work/agent.py"], "files": [("agent.py", "...")],
        },
    }

The program gets the task's last message on standard input, its files in /work, and the model at OPENAI_BASE_URL and
ANTHROPIC_BASE_URL (http://127.0.0.1:8000), with OPENAI_API_KEY and ANTHROPIC_API_KEY of a session that is the episode's record
(rl/sessions.py). It reaches nothing else. When it has ended, the environment scores the last turn of its main conversation. A
program that takes too long, or ends before it has asked anything, fails its episode, which then has no reward.
"""

import os
import secrets
import socket
import tempfile
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import uvicorn

from inference.answers import Served
from inference.api import Door
from inference.protocol import Limits
from inference.types import SamplingParams
from rl.agents import MAIN, Agent, Attach
from rl.bridge import Bridge
from rl.environments import Environment, Step, Task
from rl.gateway import Gateway
from rl.kinds import make
from rl.messages import Message
from rl.registry import Sessions
from rl.sandbox import PORT, Ran, Sandbox, workspace
from rl.sessions import Session

NOTHING: Mapping[str, Any] = MappingProxyType({})


class LocalGateway:
    """A gateway on a Unix socket, in a thread. Only keys of adopted sessions are let in.

    Args:
        port: on this machine's own address too, at `url`, where `key` opens all of its sessions.
    """

    def __init__(self, session: Session, bridge: Bridge, *, port: bool = False) -> None:
        tokenizer: Any = vars(session.renderer)["tokenizer"]
        served = Served(
            name="policy",
            tokenizer=tokenizer,
            max_context=session.max_context,
            eos_ids=tuple(tokenizer.eos_ids),
            limits=Limits(),
            chat=None,
        )
        self.key = secrets.token_urlsafe(24)
        door = Door(bridge, served, api_key=self.key)
        params = SamplingParams(max_tokens=1)
        self.sessions = Sessions(session.renderer, params, max_context=session.max_context, idle_s=float("inf"))
        Gateway(door, self.sessions)
        self._folder = tempfile.TemporaryDirectory(prefix="twinax-")
        self.path = Path(self._folder.name) / "gate"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(self.path))
        listener.listen()  # programs can connect from now on
        os.chmod(self.path, 0o666)  # its folder is for this user alone; in the sandbox it is somebody else's
        listeners, self.url = [listener], ""
        if port:
            listeners.append(socket.create_server(("127.0.0.1", 0)))
            self.url = f"http://127.0.0.1:{listeners[-1].getsockname()[1]}"
        self._server = uvicorn.Server(uvicorn.Config(door.app, lifespan="off", log_level="warning", access_log=False))
        self._thread = threading.Thread(target=self._server.run, args=(listeners,), name="gateway", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._server.should_exit = True
        self._thread.join(10)
        self.sessions.close()
        self._folder.cleanup()


class Harness:
    """Args:
    tasks, task_options: the environment whose tasks are played and that scores them; it has `step`.
    command: of the program.
    files: (name in /work, text).
    env: more variables for the program.
    seconds: that an episode's program may take.
    readable: folders of this machine that the program may read, such as those that it is installed in.
    at_once: programs that run at the same time.
    """

    def __init__(
        self,
        tasks: str,
        command: Sequence[str],
        *,
        task_options: Mapping[str, Any] = NOTHING,
        files: Sequence[tuple[str, str]] = (),
        env: Mapping[str, str] = NOTHING,
        seconds: float = 60.0,
        memory_mb: int = 2048,
        processes: int = 128,
        readable: Sequence[str] = (),
        at_once: int = 16,
    ) -> None:
        played: Any = make(tasks, task_options)
        if not hasattr(played, "step"):
            raise ValueError(f"tasks: {tasks!r} drives conversations of its own; take an environment with `step`")
        self.tasks: Environment = played
        for name, _ in files:
            if Path(name).name != name:
                raise ValueError(f"files: {name!r} must be a plain file name")
        self.name = f"harness/{self.tasks.name}"
        self.command, self.files, self.env = tuple(command), tuple(files), dict(env)
        self._sandbox = Sandbox(seconds=seconds, memory_mb=memory_mb, processes=processes, file_mb=64, readable=tuple(readable))
        self._bridge = Bridge()
        self._gateway: LocalGateway | None = None
        self._pool = ThreadPoolExecutor(at_once, "harness")

    def task(self, key: int) -> Task:
        return replace(self.tasks.task(key), env=self.name)

    def run(self, task: Task) -> Agent[Step]:
        session: Session = yield Attach(self._bridge)
        if self._gateway is None:
            self._gateway = LocalGateway(session, self._bridge)
        sessions, key = self._gateway.sessions, self._gateway.sessions.adopt(session)
        playing = self._pool.submit(self._play, task, key, self._gateway.path)
        try:
            ran: Ran = yield playing
            sessions.drop(session)
            yield self._pool.submit(session.settle)
        finally:
            playing.cancel()  # where the episode was ended before it began
            sessions.drop(session)
        if ran.code is None:
            raise TimeoutError(f"the program took longer than {self._sandbox.seconds:g} s: {ran.output}")
        said = [node for node in session.graph.nodes if node.kind == "sampled" and node.status in ("live", "cut")]
        calls = session.graph.calls
        own = [node for node in said if (calls[node.call].agent, calls[node.call].role) == (MAIN, "assistant")]
        if not own:
            raise RuntimeError(f"the program has ended with status {ran.code} and has asked nothing: {ran.output}")
        answer: Message = {"role": "assistant", "content": own[-1].messages[0]["content"]}
        return replace(self.tasks.step(task, [*task.messages, answer]), done=True, messages=())

    def close(self) -> None:
        """Ends the gateway; no episode may run."""
        self._bridge.close()  # programs that run get errors, and end
        self._pool.shutdown()
        if self._gateway is not None:
            self._gateway.close()

    def _play(self, task: Task, key: str, gate: Path) -> Ran:
        url = f"http://127.0.0.1:{PORT}"
        env = {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_API_KEY": key, "ANTHROPIC_BASE_URL": url, "ANTHROPIC_API_KEY": key}
        with workspace() as folder:
            for name, text in self.files:
                (folder / name).write_text(text)
            return self._sandbox.run(self.command, folder, task.messages[-1]["content"], gate=gate, env={**env, **self.env})
