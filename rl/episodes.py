"""Episodes: agents and engine in turn, recorded token for token in message graphs.

    task -> agent -> asks -> ids -> submit ... completion -> graph -> agent -> more asks, or a Step: the episode's end

All episodes in flight advance together; the engine batches whatever there is, of several conversations of an episode too.
Batches of episodes begin and end independently. Agents run in this process, between the engine's steps.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, wait
from dataclasses import dataclass, replace
from typing import Any

from inference.types import Completion, FinishReason, Request, SamplingParams
from rl.agents import MAIN, Agent, Ask, Attach, ContextOverflow, Limit, TurnsOver
from rl.bridge import Outside
from rl.conversations import Conversation, Conversations
from rl.environments import Step, Task
from rl.graph import Graph
from rl.histories import Prompt
from rl.messages import CallKind
from rl.play import Play, Ticket
from rl.records import Call, Episode, EpisodeStatus
from rl.renderers import Renderer
from rl.rollout import Batch, Rollout, SamplerEngine, sample_seed
from rl.sessions import Session

MOST_REFUSED = 1000
"""asks of an episode, until it is broken off"""


@dataclass(eq=False)
class _Running:
    """What an episode has besides its record while it runs."""

    batch: Batch
    rollout: Rollout
    play: Play
    conversations: Conversations
    asked: int = 0
    refused: int = 0
    reason: str = "environment"
    """how its last ask ended"""

    @property
    def graph(self) -> Graph:
        return self.rollout.graph

    @property
    def over(self) -> bool:
        return self.graph.episode.status != "running"


@dataclass
class _Flight:
    """A request that the engine has, or a future that an agent waits for."""

    running: _Running
    ticket: Ticket
    since: float
    asked: tuple[Conversation, Prompt, int] | None = None
    """of a request, with the prompt's node"""


class Episodes:
    """Episodes in flight on one engine.

    An agent that raises fails its episode, which then has no reward; the others go on.

    Args:
        begin: the agent that plays a task: `run` of an environment, or `rl.agents.stepping` for one that has `step`.
        max_context: most tokens of a path; an ask that leaves no room for an answer is refused.
        max_turns: most asks of an episode.
        seconds: that an episode may take; it is aborted then and has no reward. 0: any.
    """

    def __init__(
        self,
        engine: SamplerEngine,
        begin: Callable[[Task], Agent[Step]],
        renderer: Renderer,
        *,
        seed: int,
        max_context: int,
        max_turns: int = 1,
        seconds: float = 0.0,
    ):
        self.engine, self.begin, self.renderer, self.seed = engine, begin, renderer, seed
        self.max_context, self.max_turns, self.seconds = max_context, max_turns, seconds
        self._sampling: dict[str, _Flight] = {}
        """by request"""
        self._outside = Outside(engine)
        self._awaited: list[tuple[Future[Any], _Flight]] = []
        """in the order in which agents began to wait"""

    def start(self, tasks: Sequence[Task], *, samples: int, params: SamplingParams, label: str, trainable: bool) -> Batch:
        """Begins `samples` episodes of each task.

        Args:
            params: of every request; its seed and stop ids are set here.
            label: names the batch; request ids and noise derive from it, the task and the sample.
            trainable: whether the record may be trained on (greedy samples may not).
        """
        deadline = time.monotonic() + self.seconds if self.seconds else float("inf")
        batch = Batch(replace(params, stop_ids=tuple(self.renderer.stop_ids)), deadline)
        begun = []
        for task in tasks:
            for number in range(samples):
                name = f"{label}/{task.env}/{task.key}/{number}"
                assert name not in batch.rollouts, f"two tasks of a batch are {name}"
                episode = Episode(
                    id=name,
                    env=task.env,
                    key=task.key,
                    content_hash=task.content_hash,
                    group_id=f"{label}/{task.env}/{task.key}",
                    seed=sample_seed(self.seed, label, task.env, task.key, number),
                )
                batch.rollouts[name] = rollout = Rollout(task, Graph(episode, (Call(id=0, trainable=trainable),)))
                conversations = Conversations(rollout.graph, self.renderer)
                started = time.perf_counter()
                begun.append(_Running(batch, rollout, Play(self.begin(task)), conversations))
                rollout.environment_s += time.perf_counter() - started
        batch.running = set(batch.rollouts)
        for running in begun:
            self._serve(running)
        return batch

    def finish(self, batch: Batch) -> list[Rollout]:
        """Goes on, with whatever else is in flight, until a batch is done; in the order of its tasks."""
        while not batch.done:
            self.poll()
        return list(batch.rollouts.values())

    def poll(self) -> None:
        """A step of the engine, and all that follows from what is there."""
        self._outside.poll()
        if self._sampling or self._outside.sampling:
            own = [done for done in self.engine.step() if not self._outside.done(done)]
            for flight, completion in [(self._sampling.pop(done.request_id), done) for done in own]:
                self._sampled(flight, completion)
        elif self._awaited:  # nothing to do until something that agents wait for is there, or asks
            pause = 0.002 if self._outside else 0.05
            wait([future for future, _ in self._awaited], timeout=pause, return_when=FIRST_COMPLETED)
        ready = [awaited for awaited in self._awaited if awaited[0].done()]
        for awaited in ready:
            self._awaited.remove(awaited)
        for future, flight in ready:
            self._hand(future, flight)
            self._serve(flight.running)
        if self.seconds:
            flights, now = [*self._sampling.values(), *(flight for _, flight in self._awaited)], time.monotonic()
            for running in {flight.running: None for flight in flights if flight.running.batch.deadline < now}:
                self._over(running, "aborted", "timeout")

    def _serve(self, running: _Running) -> None:
        """Sends out what the agent waits for, or closes the episode."""
        play = running.play
        while play.wanted and not running.over:
            ticket, wanted = play.wanted.popleft()
            if isinstance(wanted, Ask):
                try:
                    request, asked = self._request(running, wanted)
                except (Limit, ValueError) as error:  # no room for it, or the agent asked for what cannot be
                    self._refuse(running, ticket, error)
                else:
                    self._sampling[request.id] = _Flight(running, ticket, time.perf_counter(), asked)
                    self.engine.submit(request)
            elif isinstance(wanted, Attach):
                session = self._session(running)
                self._outside.attach(wanted.bridge, session, running.rollout.count)
                play.give(ticket, session)
            elif wanted.done():
                self._hand(wanted, _Flight(running, ticket, time.perf_counter()))
            else:
                self._awaited.append((wanted, _Flight(running, ticket, time.perf_counter())))
        if play.over and not running.over:
            self._end(running)

    def _session(self, running: _Running) -> Session:
        """Its record is the episode's."""
        trainable = running.graph.calls[0].trainable
        kinds: tuple[CallKind, ...] = ("turn",) if trainable else ()
        return Session(
            running.graph,
            self.renderer,
            running.batch.params,
            max_context=self.max_context,
            trainable=kinds,
            max_asked=self.max_turns,  # the trainer has room for no more
        )

    def _refuse(self, running: _Running, ticket: Ticket, error: Exception) -> None:
        running.refused += 1
        if isinstance(error, Limit):
            running.reason = error.reason
        if running.refused > MOST_REFUSED:  # it asks again and again
            return self._over(running, "truncated", running.reason)
        running.play.refuse(ticket, error)

    def _request(self, running: _Running, ask: Ask) -> tuple[Request, tuple[Conversation, Prompt, int]]:
        """Puts an ask in the record, and makes it a request.

        Raises:
            Limit: there is no room for it.
            ValueError: its messages cannot be rendered, or its parent is unknown.
        """
        graph, batch = running.graph, running.batch
        if running.asked >= self.max_turns:
            raise TurnsOver(f"the episode may ask {self.max_turns} times (environment.max_turns)")
        prompt = running.conversations.prompt_of(ask.messages, ask.tools)
        if len(prompt.ids) >= self.max_context:
            raise ContextOverflow(f"{len(prompt.ids)} tokens leave no room for an answer in {self.max_context}")
        conversation = running.conversations.asks(ask, prompt)
        node, number = conversation.node, conversation.asked - 1
        assert node is not None
        name = str(number) if ask.call == MAIN else f"{ask.call}:{number}"
        own = graph.episode.seed if name == "0" else sample_seed(graph.episode.seed, name)
        room = min(batch.params.max_tokens, self.max_context - len(prompt.ids))
        request = Request(
            id=f"{graph.episode.id}#{name}",
            prompt_ids=tuple(prompt.ids),
            params=replace(batch.params, seed=own, max_tokens=room),
            routing=graph.routing(node),
        )
        running.asked += 1
        return request, (conversation, prompt, node)

    def _sampled(self, flight: _Flight, completion: Completion) -> None:
        """Commits a completion, and gives it to the agent."""
        running, rollout, graph = flight.running, flight.running.rollout, flight.running.graph
        assert flight.asked is not None
        conversation, prompt, before = flight.asked
        rollout.generate_s += time.perf_counter() - flight.since
        message, node = self.renderer.parse(completion.ids.tolist(), f"call_{rollout.turns}", prompt.tools), before
        if len(completion.ids):
            temperature = running.batch.params.temperature
            node = graph.record(before, completion, message, temperature=temperature, call=conversation.call.id)
        if running.over or completion.finish_reason is FinishReason.ABORT:
            if node != before:
                graph.mark(node, "abandoned")
            return None if running.over else self._over(running, "aborted", "abort")
        running.conversations.answered(conversation, prompt, node, message)
        running.reason = completion.finish_reason.value
        rollout.count(completion)
        started = time.perf_counter()
        running.play.give(flight.ticket, message)
        rollout.environment_s += time.perf_counter() - started
        self._serve(running)

    def _hand(self, future: Future[Any], flight: _Flight) -> None:
        """Gives an agent the result that it has waited for."""
        running = flight.running
        if running.over:
            return
        try:
            value = future.result()
        except Exception as error:  # the agent's to see
            running.play.refuse(flight.ticket, error)
        else:
            running.play.give(flight.ticket, value)
        running.rollout.environment_s += time.perf_counter() - flight.since

    def _end(self, running: _Running) -> None:
        """The agent has ended."""
        step, error, graph = running.play.step, running.play.error, running.graph
        for name, rewards in step.call_rewards.items():
            if name not in running.conversations.by_name:
                error = error or ValueError(f"call_rewards: there is no conversation {name!r}")
                break
            number = running.conversations.by_name[name].call.id
            graph.calls[number] = replace(graph.calls[number], rewards=tuple(rewards))
        if isinstance(error, Limit):
            self._over(running, "truncated", error.reason)
        elif error is not None:  # whatever a scorer does to odd text, it is not the run's end, nor a reward of 0
            self._over(running, "failed", "environment", error=f"{type(error).__name__}: {error}")
        else:
            self._over(running, "completed" if step.done else "truncated", running.reason, rewards=step.rewards)

    def _over(self, running: _Running, status: EpisodeStatus, reason: str, **changes: Any) -> None:
        """Ends an episode and what the engine has of it; nobody waits any more for what its agents waited for."""
        rollout = running.rollout
        running.play.close()
        self._outside.leave(rollout.graph.episode.id)
        times = {"generate_s": rollout.generate_s, "environment_s": rollout.environment_s}
        rollout.graph.finish(status, stop_reason=reason, **times, **changes)
        running.batch.running.remove(rollout.graph.episode.id)
        self._awaited = [awaited for awaited in self._awaited if awaited[1].running is not running]
        for request in [request for request, flight in self._sampling.items() if flight.running is running]:
            self._sampled(self._sampling.pop(request), self.engine.cancel(request))
