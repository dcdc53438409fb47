"""Agents: environments that drive their own conversations with the model, as generators.

    class Twice:
        name = "twice"

        def task(self, key: int) -> Task:
            return make_task(self.name, key, [{"role": "user", "content": f"Name {key}."}], answer=str(key))

        def run(self, task: Task) -> Agent[Step]:
            messages = list(task.messages)
            (first,) = yield [Ask(messages=messages)]
            messages += [first, {"role": "user", "content": "Sure?"}]
            (second,) = yield [Ask(messages=messages)]
            return finish(Reward("same", float(first["content"] == second["content"])))

An agent yields what it waits for:

    asks          a list of Ask: the answers, in order; the engine samples them together
    a Future      its result; other episodes, and other agents of this one, go on meanwhile
    Attach(...)   a session, for a program that talks to a gateway
    parallel(...) with `yield from`: what several agents return, which run beside each other

An ask gives its conversation whole, each time. What of it was sampled before is continued token for token; a history that was
cut back, rewritten or handed to another conversation is found again as far as it is the same. So an append-only agent, a
compacting one and a tree of agents need no more than this.

What a model writes is data. `use` runs a tool on it, and whatever is wrong with it becomes a message for the model.
"""

import inspect
import json
from collections.abc import Callable, Generator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from inference.calls import CLOSE, OPEN
from rl.environments import Step, Task
from rl.messages import Message, Tool, ToolCall

T = TypeVar("T")
Agent = Generator[Any, Any, T]
"""yields what it waits for (see above), and returns T; the agent of an episode returns a Step"""
MAIN = "main"
"""the episode's own conversation"""


@dataclass(frozen=True, kw_only=True)
class Ask:
    """The next message of a conversation."""

    messages: Sequence[Message]
    """the whole history; copied"""
    tools: Sequence[Tool] = ()
    call: str = MAIN
    """names the conversation in its episode"""
    parent: str = MAIN
    """the conversation that began this one; read at its first ask, and not of the episode's own"""
    role: str = "assistant"
    """what it is for, in words; read at its first ask"""
    trainable: bool = True
    """False: what the conversation samples is recorded, and not trained on; read at its first ask"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "messages", tuple(self.messages))
        object.__setattr__(self, "tools", tuple(self.tools))


@dataclass(frozen=True)
class Attach:
    """Yielded for a `rl.sessions.Session` whose record is the episode's, for programs behind a gateway (rl/harness.py)."""

    bridge: Any
    """the `rl.bridge.Bridge` that its requests come through"""


class Limit(Exception):
    """An ask that the episode has no room for. An agent may catch it, and go on or return what it has; an agent that does not
    ends its episode as truncated."""

    reason = ""


class ContextOverflow(Limit):
    """The conversation is too long to be answered; a shorter one may fit."""

    reason = "context"


class TurnsOver(Limit):
    """The episode has asked as often as it may."""

    reason = "max_turns"


@dataclass(frozen=True)
class Beside:
    """What `parallel` yields."""

    agents: tuple[Agent[Any], ...]


def parallel(*agents: Agent[T]) -> Agent[list[T]]:
    """Runs agents beside each other, each at its own pace: `results = yield from parallel(a, b)`.

    Raises: the first of their errors, when all have ended.
    """
    return (yield Beside(agents))


class Steps(Protocol):
    """Who runs the steps of environments: `rl.workers.Inline` or `rl.workers.Workers`."""

    def submit(self, task: Task, messages: Sequence[Message]) -> Future[Step]: ...

    def close(self) -> None: ...


def stepping(steps: Steps, task: Task) -> Agent[Step]:
    """The agent of an environment that has `step`: model and environment in turn."""
    messages, step = list(task.messages), Step(done=False)
    while True:
        try:
            (answer,) = yield [Ask(messages=messages)]
        except Limit:
            return step  # with the rewards so far
        messages.append(answer)
        step = yield steps.submit(task, messages)
        if step.done:
            return step
        messages.extend(step.messages)


def use(call: ToolCall, tools: Mapping[str, Callable[..., str]]) -> Message:
    """Runs a tool as a model's call says, and returns the tool's message.

    A call of no tool, arguments that are no JSON object or not the tool's, and what the tool makes of odd values come back as
    text that begins with "error:". The arguments go to the tool as data; nothing is evaluated.

    Raises:
        OSError: from the tool: what it runs on has failed (TimeoutError is one), which is not the model's doing.
    """
    return {"role": "tool", "content": _used(call, tools), "tool_call_id": call["id"], "name": call["name"]}


def garbled(message: Message) -> Message | None:
    """What to tell a model whose text has the markup of a call, but no call in it; None where it has not.

    Nothing is guessed of what was meant: a call that is not as its format has it stays text.
    """
    text = message["content"]
    if OPEN not in text and CLOSE not in text:
        return None
    told = (
        f'error: this is no call; write {OPEN}, a JSON object with "name" and "arguments", and {CLOSE}, or your format\'s own'
    )
    return {"role": "tool", "content": f"{told}: {text[max(0, text.find(OPEN)) :][:200]}"}


def _used(call: ToolCall, tools: Mapping[str, Callable[..., str]]) -> str:
    name = call["name"]
    if name not in tools:
        return f"error: there is no tool {name!r}; there is {', '.join(sorted(tools)) or 'none'}"
    try:
        arguments = json.loads(call["arguments"])
    except (ValueError, RecursionError) as error:
        return f"error: the arguments of {name} are no JSON ({error})"
    if not isinstance(arguments, dict):
        return f"error: the arguments of {name} must be a JSON object"
    try:
        inspect.signature(tools[name]).bind(**arguments)
        return tools[name](**arguments)
    except OSError:
        raise
    except ValueError as error:  # in the tool's own words
        return f"error: {error}"
    except Exception as error:  # whatever a tool makes of odd values is the model's to read
        return f"error: {type(error).__name__}: {error}"
