"""A policy that supplies tokens, and a gateway in a thread: for clients that need a model which acts."""

import threading
from argparse import Namespace
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inference.engine import Engine
from inference.errors import ApiError
from inference.protocol import Limits
from inference.types import Completion, Request, SamplingParams, Tokens
from launch.forced import Forced
from launch.serve import Server, bind, make_door, make_engine, settings
from models.tokenizer import ByteTokenizer
from rl.gateway import Gateway
from rl.graph import Graph
from rl.registry import Sessions
from rl.renderers import ChatML, Qwen3, Renderer

REPO = Path(__file__).parents[1]
SIZES = (
    *("model.shape.num_layers=1", "model.shape.num_heads=1", "model.shape.num_kv_heads=1"),
    *("engine.page_size=128", "engine.num_pages=4096", "engine.max_slots=8", "engine.slot_buckets=(8,)"),
    *("engine.tokens_per_step=1024", "engine.token_buckets=(8,1024)", "engine.decode_steps=1"),
)
Policy = Callable[[str], str]
"""the prompt, control tokens written out -> the answer, likewise and without the end of the turn"""
DEADLINE = 60.0


def make_tiny_engine(context: int) -> Engine:
    """
    Args:
        context: tokens, and a token is a byte.
    """
    sizes = (f"model.shape.max_positions={context}", f"engine.max_context={context}", f"engine.context_buckets=({context},)")
    overrides = [f"--config.{item}" for item in (*SIZES, *sizes)]
    what = settings(Namespace(model=None, config=str(REPO / "configs/tiny.py")), overrides)
    engine, _ = make_engine(what.model, what.engine, what.seed)
    engine.warm_up()
    return engine


@dataclass
class Seen:
    """A request that the engine had."""

    request: Request
    ids: list[int] = field(default_factory=list)
    """sampled so far"""
    logprobs: list[float] = field(default_factory=list)
    whole: bool = False


class Policed(Forced):
    """
    Args:
        most: requests; beyond them every one is refused, as some programs go on for ever.
    """

    def __init__(self, engine: Engine, policy: Policy, most: int = 40) -> None:
        super().__init__(engine)
        assert isinstance(engine.tokenizer, ByteTokenizer)
        self.policy, self.most, self.tokenizer = policy, most, engine.tokenizer
        self.seen: list[Seen] = []
        self.refused = 0
        self.after: Callable[[Seen], None] = lambda seen: None
        """called when a token was sampled, in the server's loop"""

    async def stream(self, request: Request) -> AsyncGenerator[Tokens | Completion, None]:
        if len(self.seen) >= self.most:
            self.refused += 1
            raise ApiError(f"the test allows {self.most} requests", status=400)
        plain = SamplingParams(max_tokens=request.params.max_tokens, stop_ids=request.params.stop_ids, seed=request.params.seed)
        assert request.params == plain, "the log-prob would be another"
        seen = Seen(request)
        self.seen.append(seen)
        answer = self.policy(self.tokenizer.decode(request.prompt_ids))
        wanted = [*self.tokenizer.encode(answer, allow_special=True), self.tokenizer.eos_ids[0]]
        async with aclosing(self.say(request, wanted)) as parts:
            async for part in parts:
                if isinstance(part, Completion):
                    seen.whole = True
                else:
                    seen.ids += part.ids.tolist()
                    seen.logprobs += part.logprobs_full.tolist()
                    self.after(seen)
                yield part


@dataclass
class Live:
    """A gateway in a thread."""

    url: str
    front: Policed
    sessions: Sessions

    def graph(self, name: str) -> Graph:
        return self.sessions.named(name).graph

    @property
    def names(self) -> list[str]:
        return list(self.sessions._sessions)


@contextmanager
def gateway(
    engine: Engine,
    policy: Policy,
    *,
    thinking: bool = False,
    most: int = 40,
    max_context: int | None = None,
    folder: Path | None = None,
    **options: Any,
) -> Iterator[Live]:
    """
    Args:
        thinking: whether the model's format has it.
        options: of Sessions.
    """
    front = Policed(engine, policy, most)
    renderer: Renderer = Qwen3(front.tokenizer) if thinking else ChatML(front.tokenizer)
    door = make_door(engine, front.tokenizer, "tiny", Limits(), None)
    door.front = front
    params = SamplingParams(max_tokens=4096)
    sessions = Sessions(renderer, params, max_context=max_context or engine.config.max_context, folder=folder, **options)
    Gateway(door, sessions)
    listener = bind("127.0.0.1", 0, None)
    listener.listen()  # clients can connect from now on
    server = Server(door)
    thread = threading.Thread(target=server.run, args=([listener],))
    thread.start()
    try:
        yield Live(f"http://127.0.0.1:{listener.getsockname()[1]}", front, sessions)
    finally:
        while not server.started:
            assert thread.is_alive()
        server.loop.call_soon_threadsafe(server.finish)
        thread.join(DEADLINE)
        assert not thread.is_alive()
        listener.close()
        sessions.close()
    reconcile(engine)


def reconcile(engine: Engine) -> None:
    """Nothing is left in the engine, and every page can be had."""
    assert engine.num_in_flight == 0 and not engine.scheduler.running and not engine.scheduler.waiting
    engine.scheduler.check()
    engine.forget()
    assert engine.scheduler.pool.num_free == engine.config.num_pages - 1


def check_record(graph: Graph, seen: list[Seen]) -> None:
    """The record is what the engine was given and sampled, id for id, with its log-probs, and trains each token once."""
    nodes = {node.request_id: node for node in graph.nodes if node.kind == "sampled"}
    assert nodes.keys() == {item.request.id for item in seen if item.ids}
    for item in seen:
        if not item.ids:
            continue
        node = nodes[item.request.id]
        assert graph.path_ids(node.parent) == list(item.request.prompt_ids)
        count = len(node.ids)
        assert list(node.ids) == item.ids[:count] and count >= len(item.ids) - 1
        assert list(node.logprobs) == item.logprobs[:count] == list(node.logprobs_full)
        assert (node.status == "abandoned") is not item.whole
    trained = [n for n in nodes.values() if n.status in ("live", "cut") and graph.calls[n.call].trainable]
    branches = graph.branches()
    weights = sum(float(branch.weights.sum()) for branch in branches)
    assert round(weights, 3) == sum(len(node.ids) for node in trained)
    whole = [graph.path_ids(branch.node_ids[-1]) for branch in branches]
    assert [branch.ids.tolist() for branch in branches] == whole
