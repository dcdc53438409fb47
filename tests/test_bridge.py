"""Programs that leave a run's gateway: what was sampled for them is recorded, once, and before the episode is closed."""

import asyncio
import http.client
import json
import socket
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing

import pytest

from inference.errors import ApiError
from inference.types import Completion, FinishReason, Request, SamplingParams
from rl.agents import Agent, Attach
from rl.bridge import Bridge
from rl.environments import Reward, Step, Task, finish, make_task
from rl.episodes import Episodes
from rl.harness import LocalGateway
from rl.messages import Message
from rl.rollout import Rollout
from rl.sessions import Session
from tests.scripted import END, RENDERER, TOKENIZER, Scripted

ANSWER = [*TOKENIZER.encode("7"), END]
CUT = TOKENIZER.encode("so f")


class Holding(Scripted):
    """Answers when it is told to; what is cancelled until then had four tokens."""

    def __init__(self) -> None:
        super().__init__(lambda request: (ANSWER, FinishReason.STOP))
        self.holds = True
        self.came: Future[None] = Future()
        self.cancelled: Future[None] = Future()

    def submit(self, request: Request) -> None:
        super().submit(request)
        if not self.came.done():
            self.came.set_result(None)

    def step(self) -> list[Completion]:
        return [] if self.holds or not self._waiting else super().step()

    def cancel(self, request_id: str) -> Completion:
        [mine] = [request for request in self._waiting if request.id == request_id]
        self._waiting.remove(mine)
        self._waiting.append(mine)
        self.answers = lambda request: (CUT, FinishReason.ABORT)
        [done] = super().step()
        self.answers, self.holds = lambda request: (ANSWER, FinishReason.STOP), False
        self.cancelled.set_result(None)
        return done


class Program:
    """An environment whose program is a function in a thread of this process."""

    name = "program"

    def __init__(self, play: Callable[[int, str], None], settle: bool = True) -> None:
        self._play, self._settle = play, settle
        self._bridge, self._pool = Bridge(), ThreadPoolExecutor(1)
        self._gateway: LocalGateway | None = None

    def task(self, key: int) -> Task:
        return make_task(self.name, key, [{"role": "user", "content": "?"}])

    def run(self, task: Task) -> Agent[Step]:
        session: Session = yield Attach(self._bridge)
        self._gateway = self._gateway or LocalGateway(session, self._bridge, port=True)
        key = self._gateway.sessions.adopt(session)
        yield self._pool.submit(self._play, int(self._gateway.url.rpartition(":")[2]), key)
        if self._settle:
            yield self._pool.submit(session.settle)
        return finish(Reward("r", 1.0))

    def close(self) -> None:
        self._bridge.close()
        self._pool.shutdown()
        if self._gateway is not None:
            self._gateway.close()


def ask(port: int, key: str, *, stream: bool, history: Sequence[Message] = ()) -> http.client.HTTPConnection:
    """Sends a request, and leaves the answer where it is."""
    client = http.client.HTTPConnection("127.0.0.1", port, timeout=20)
    body = {"model": "policy", "messages": [*history, {"role": "user", "content": "?"}], "stream": stream}
    headers = {"content-type": "application/json", "authorization": f"Bearer {key}"}
    client.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    return client


def play(engine: Holding, program: Callable[[int, str], None], *, settle: bool = True, seconds: float = 0.0) -> Rollout:
    environment = Program(program, settle)
    with closing(environment):
        running = Episodes(engine, environment.run, RENDERER, seed=3, max_turns=9, max_context=2000, seconds=seconds)
        params = SamplingParams(max_tokens=20)
        batch = running.start([environment.task(0)], samples=1, params=params, label="train-1", trainable=True)
        [rollout] = running.finish(batch)
    return rollout


def sampled(rollout: Rollout) -> list[tuple[str, list[int]]]:
    return [(node.status, list(node.ids)) for node in rollout.graph.nodes if node.kind == "sampled"]


def leave(client: http.client.HTTPConnection) -> None:
    assert client.sock is not None
    client.sock.shutdown(socket.SHUT_RDWR)
    client.close()


@pytest.mark.parametrize("stream", [False, True])
def test_what_was_sampled_of_an_answer_whose_client_left(stream: bool) -> None:
    """It is abandoned; the same request again is sampled anew, and trained on once."""
    engine = Holding()

    def program(port: int, key: str) -> None:
        client = ask(port, key, stream=stream)
        engine.came.result(20)
        leave(client)
        engine.cancelled.result(20)
        with closing(ask(port, key, stream=stream)) as again:
            answer = again.getresponse()
            assert answer.status == 200 and b'"content":"7"' in answer.read()

    rollout = play(engine, program)
    assert sampled(rollout) == [("abandoned", CUT), ("live", ANSWER)]
    assert rollout.turns == 1 and rollout.sampled_tokens == len(ANSWER)
    assert sum(float(branch.weights.sum()) for branch in rollout.graph.branches()) == len(ANSWER)


def test_it_leaves_and_asks_no_more() -> None:
    engine = Holding()

    def program(port: int, key: str) -> None:
        client = ask(port, key, stream=True)
        engine.came.result(20)
        leave(client)

    rollout = play(engine, program)
    assert rollout.graph.episode.status == "completed" and rollout.turns == 0
    assert sampled(rollout) == [("abandoned", CUT)]


def test_an_episode_that_ends_with_a_request_on_its_way() -> None:
    """Its record has what was sampled, though nobody waited for the answer to be given."""
    engine, clients = Holding(), list[http.client.HTTPConnection]()

    def program(port: int, key: str) -> None:
        clients.append(ask(port, key, stream=True))
        engine.came.result(20)

    rollout = play(engine, program, settle=False)
    assert sampled(rollout) == [("abandoned", CUT)]
    clients[0].close()


@pytest.mark.parametrize("stream", [False, True])
def test_an_engine_that_has_gone_back_does_not_end_the_run(stream: bool) -> None:
    """What cannot be recorded is refused, and its client hears why; the program and the run go on."""
    engine, said = Holding(), list[bytes]()
    engine.holds = False
    history: list[Message] = [{"role": "user", "content": "?"}, {"role": "assistant", "content": "7"}]

    def program(port: int, key: str) -> None:
        for version, told in ((7, []), (0, history), (7, history)):
            engine.version = version
            with closing(ask(port, key, stream=stream, history=told)) as client:
                said.append(client.getresponse().read())

    rollout = play(engine, program)
    assert [b"gone back to version 0, and this conversation was sampled up to 7" in answer for answer in said] == [
        False,
        True,
        False,
    ]
    assert sampled(rollout) == [("live", ANSWER)] * 2
    assert rollout.turns == 2 and rollout.graph.episode.status == "completed"


def test_a_run_that_breaks_off_lets_nobody_wait() -> None:
    """Its engine answers nobody any more; who waits for it, has left or asks later is told."""

    async def all_end() -> list[Completion | str]:
        bridge = Bridge()

        async def one(name: str) -> Completion | str:
            request = Request(id=f"e#{name}", prompt_ids=(1,), params=SamplingParams(max_tokens=1))
            try:
                [completion] = [part async for part in bridge.stream(request)]
            except ApiError as error:
                return str(error)
            assert isinstance(completion, Completion)
            return completion

        waits, leaves = asyncio.create_task(one("waits")), asyncio.create_task(one("leaves"))
        await asyncio.sleep(0)
        assert len(bridge.take()) == 2
        leaves.cancel()
        bridge.close()
        return [*await asyncio.gather(waits, leaves), await one("late")]

    waits, leaves, late = asyncio.run(all_end())
    for completion in (waits, leaves):
        assert isinstance(completion, Completion) and completion.finish_reason is FinishReason.ABORT and not len(completion.ids)
    assert late == "the run has ended"
