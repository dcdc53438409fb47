"""Environments of the `verifiers` library (0.4: `verifiers.v1`), played as they are: its tasks, harnesses, tools and rewards.

    config.environment = {"kind": "verifiers", "options": {"taskset": "gsm8k-v1"}}

Each of its rollouts is an episode, recorded token for token, as its model calls come to a gateway of this run: it proxies
them there, and what they are called by (the trace's id, `X-Session-ID`) says which episode they belong to. What it runs besides
the model (harnesses, tools, users) runs where its own `runtime` says; `subprocess`, the default here, is no sandbox.

An episode that verifiers does not call ok, for whatever reason, fails, and has no reward.
"""

import asyncio
import importlib
import itertools
import os
import threading
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from types import MappingProxyType
from typing import Any

from rl.agents import Agent, Attach
from rl.bridge import Bridge
from rl.environments import EVAL_KEYS, Reward, Step, Task, finish, make_task
from rl.harness import LocalGateway
from rl.messages import Message
from rl.sessions import Session

KEY = "TWINAX_VERIFIERS_API_KEY"
"""the environment variable in which verifiers finds the gateway's key; it hands no name with API_KEY on to programs"""
INSTALL = (
    "environment.kind: install verifiers next to twinax, in an environment of its own as it wants other versions than twinax's "
    "tests: pip install 'verifiers>=0.4,<0.5'"
)


class Verifiers:
    """Tasks of a taskset; a train key is one of them, counted round, and so is an eval key of the last `held_out` ones.

    Components: the rewards of its trace, by name and weight, and its metrics, with weight 0.

    Args:
        taskset: id of an installed taskset.
        config: more of verifiers' `EnvConfig`: {"taskset": {...}, "agent": {"harness": {"id": "null"}, "max_turns": 4}}.
        held_out: tasks for evaluation alone; a tenth of all by default.
        most: tasks that are read.

    Raises:
        ValueError: verifiers is not installed, knows no such taskset, or refuses the config; there are several agents.
    """

    def __init__(
        self,
        taskset: str,
        *,
        config: Mapping[str, Any] = MappingProxyType({}),
        held_out: int | None = None,
        most: int = 10_000,
    ) -> None:
        self._vf = _verifiers()
        self.name = f"verifiers/{taskset}"
        self._env = _environment(taskset, config)
        self._tasks = list(itertools.islice(self._env.taskset, most))
        held_out = max(1, len(self._tasks) // 10) if held_out is None else held_out
        if not 0 < held_out < len(self._tasks):
            raise ValueError(f"held_out: must be above 0 and below the number of tasks, {len(self._tasks)}, got {held_out}")
        self._train, self._held_out = self._tasks[:-held_out], self._tasks[-held_out:]
        self._bridge = Bridge()
        self._gateway: LocalGateway | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._serving: asyncio.Future[None] | None = None
        self._keeper: asyncio.Task[None] | None = None

    def task(self, key: int) -> Task:
        found = self._task(key)
        data = found.data
        system: list[Message] = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        messages: list[Message] = [*system, {"role": "user", "content": data.prompt_text}]
        return make_task(self.name, key, messages, data={"hash": found.hash})

    def _task(self, key: int) -> Any:
        some, at = (self._held_out, key - EVAL_KEYS.start) if key in EVAL_KEYS else (self._train, key)
        return some[at % len(some)]

    def run(self, task: Task) -> Agent[Step]:
        session: Session = yield Attach(self._bridge)
        if self._gateway is None:
            self._gateway = LocalGateway(session, self._bridge, port=True)
            os.environ[KEY] = self._gateway.key
        sessions = self._gateway.sessions
        playing = self._start(self._play(self._task(task.key), session, self._gateway))
        try:
            episode = yield playing
        finally:
            playing.cancel()  # where the episode was ended
            sessions.drop(session)
        yield self._start(asyncio.to_thread(session.settle))
        return _step(episode)

    def close(self) -> None:
        """Ends what verifiers serves, and the gateway."""
        self._bridge.close()  # who waits gets an error, and ends
        if self._loop is not None:
            self._start(self._end()).result()
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()
            self._loop.close()
            self._loop = None
        if self._gateway is not None:
            self._gateway.close()
            self._gateway = None

    async def _end(self) -> None:
        if self._keeper is not None:
            self._keeper.cancel()
            await asyncio.wait([self._keeper])
        await asyncio.get_running_loop().shutdown_default_executor()

    def _start(self, work: Coroutine[Any, Any, Any]) -> Future[Any]:
        """In an event loop of its own, in a thread."""
        if self._loop is None:
            self._loop = asyncio.new_event_loop()
            self._thread = threading.Thread(target=self._loop.run_forever, name="verifiers", daemon=True)
            self._thread.start()
        return asyncio.run_coroutine_threadsafe(work, self._loop)

    async def _play(self, task: Any, session: Session, gateway: LocalGateway) -> Any:
        if self._serving is None:
            self._serving = asyncio.get_running_loop().create_future()
            self._keeper = asyncio.create_task(self._keep(self._serving))
        await asyncio.shield(self._serving)
        client = self._vf.EvalClientConfig(base_url=f"{gateway.url}/v1", api_key_var=KEY)
        context = self._vf.ModelContext(model="policy", client=client)
        return await self._env.run_episode(task, context, on_trace=lambda trace: gateway.sessions.adopt(session, trace.id))

    async def _keep(self, serving: "asyncio.Future[None]") -> None:
        """Holds what verifiers serves to harnesses, for as long as the process lives."""
        try:
            async with self._env.serving():
                serving.set_result(None)
                await asyncio.Event().wait()
        except Exception as error:  # of whatever kind: each episode fails with it
            if serving.done():
                raise
            serving.set_exception(error)


def _verifiers() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ModuleNotFoundError as error:
        if (error.name or "").split(".")[0] != "verifiers":
            raise
        raise ValueError(INSTALL) from error


def _environment(taskset: str, config: Mapping[str, Any]) -> Any:
    """The `Env`, with a subprocess for a runtime where the config names none."""
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    seat = importlib.import_module("verifiers.v1").AgentConfig
    given = {**config, "taskset": {**config.get("taskset", {}), "id": taskset}}
    try:
        kind = loaders.environment_class(taskset, given.get("id", ""))
        config_type = loaders.concrete_type(kind, loaders.EnvConfig, origin=loaders.Env) or loaders.EnvConfig
        seats = [name for name, field in config_type.model_fields.items() if isinstance(field.default, seat)]
        if len(seats) != 1:
            raise ValueError(f"taskset: {taskset!r} has several agents ({', '.join(seats)}); take one with a single agent")
        given[seats[0]] = {"runtime": {"type": "subprocess"}, **given.get(seats[0], {})}
        return kind(config_type.model_validate(given))
    except (ModuleNotFoundError, AttributeError, TypeError) as error:
        raise ValueError(f"taskset: verifiers cannot load {taskset!r} ({error}); install its package") from error


def _step(episode: Any) -> Step:
    if not episode.ok:
        errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
        said = f"{errors[0].type}: {errors[0].message}" if errors else "no reason is given"
        raise RuntimeError(f"verifiers: {said}")
    [trace] = episode.traces
    rewards = [
        Reward(name, None) if got is None else Reward(name, got.score, got.weight) for name, got in trace.rewards.items()
    ]
    metrics = [Reward(name, value, 0.0) for name, value in trace.metrics.items() if name not in trace.rewards]
    return finish(*rewards, *metrics)
