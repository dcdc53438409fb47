"""The agents of one episode while they run: what they wait for, and what becomes of the answers."""

from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from rl.agents import Agent, Ask, Attach, Beside
from rl.environments import Step


class _Thread:
    """One agent, and what it waits for."""

    def __init__(self, agent: Agent[Any], parent: "Ticket | None"):
        self.agent, self.parent = agent, parent
        self.single = False
        """it waits for one value, not for a list"""
        self.got: list[Any] = []
        self.missing = 0
        self.error: Exception | None = None
        """the first of what it waited for"""


@dataclass(frozen=True, eq=False)
class Ticket:
    """Where an answer goes."""

    thread: _Thread
    place: int


class Play:
    """Runs the agent of an episode, and those that it runs beside each other.

    What they wait for is in `wanted`; each of it is to be answered once, with `give` or `refuse`. `over`: the agent has ended;
    then `step` is what it returned, or `error` what it raised.
    """

    def __init__(self, agent: Agent[Step]):
        self.wanted: deque[tuple[Ticket, Ask | Attach | Future[Any]]] = deque()
        self.over, self.step = False, Step(done=False)
        self.error: Exception | None = None
        self._threads: list[_Thread] = []
        self._begin(agent, None)

    def give(self, ticket: Ticket, value: Any) -> None:
        """The answer to an ask, or the result of a future."""
        ticket.thread.got[ticket.place] = value
        self._arrived(ticket.thread)

    def refuse(self, ticket: Ticket, error: Exception) -> None:
        """An error, which is raised in the agent when all else that it waits for is there."""
        ticket.thread.error = ticket.thread.error or error
        self._arrived(ticket.thread)

    def close(self) -> None:
        """Ends the agents where they are; what they raise of it is not reported, as the episode has its end already."""
        for thread in reversed(self._threads):
            _close(thread.agent)
        self._threads.clear()
        self.wanted.clear()

    def _begin(self, agent: Agent[Any], parent: Ticket | None) -> None:
        thread = _Thread(agent, parent)
        self._threads.append(thread)
        self._go_on(thread, None)

    def _arrived(self, thread: _Thread) -> None:
        thread.missing -= 1
        if not thread.missing:
            self._go_on(thread, thread.got[0] if thread.single else thread.got)

    def _go_on(self, thread: _Thread, value: Any) -> None:
        error, thread.error = thread.error, None
        try:
            waits = thread.agent.send(value) if error is None else thread.agent.throw(error)
            self._want(thread, waits)
        except StopIteration as stop:
            self._ended(thread, stop.value, None)
        except Exception as raised:  # the caller's to record
            self._ended(thread, None, raised)

    def _want(self, thread: _Thread, waits: Any) -> None:
        """Raises TypeError for what no agent can wait for."""
        thread.single = isinstance(waits, Future | Attach)
        several: Sequence[Any] = [waits] if thread.single else waits.agents if isinstance(waits, Beside) else waits
        asks = isinstance(several, list | tuple) and all(isinstance(one, Ask) for one in several)
        if not (thread.single or isinstance(waits, Beside) or asks):
            raise TypeError(
                f"an agent yields a list of Ask, a Future, Attach, or `yield from`s parallel(...), not {waits!r:.200}"
            )
        if not several:
            raise TypeError("an agent yields at least one Ask, or agents to run")
        thread.got, thread.missing = [None] * len(several), len(several)
        tickets = [Ticket(thread, place) for place in range(len(several))]
        if isinstance(waits, Beside):
            for ticket, agent in zip(tickets, waits.agents, strict=True):
                self._begin(agent, ticket)
        else:
            self.wanted.extend(zip(tickets, several, strict=True))

    def _ended(self, thread: _Thread, value: Any, error: Exception | None) -> None:
        _close(thread.agent)
        self._threads.remove(thread)
        if thread.parent is not None:
            if error is None:
                return self.give(thread.parent, value)
            return self.refuse(thread.parent, error)
        if error is None and not isinstance(value, Step):
            error = TypeError(f"the agent of an episode returns a Step, not {value!r:.200}")
        self.over, self.error = True, error
        if error is None:
            self.step = value


def _close(agent: Agent[Any]) -> None:
    with suppress(Exception):
        agent.close()
