"""The engine's side of `launch.bench parity`: the same requests in every kind of company.

Each company starts cold, with a scheduler of its own limits: the compiled programs are those of one engine.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from inference.config import EngineConfig
from inference.engine import Engine
from inference.record import prepare, record_prompt
from inference.routing import Routes
from inference.scheduler import Scheduler
from inference.types import Completion, Request, SamplingParams
from models.config import ModelConfig
from models.transformer import describe
from sharding.mesh import make_mesh
from sharding.reshard import reshard
from sharding.rules import Axes, Rules

DRAFTS = range(2, 9)
"""new positions of a sequence that one extend scores"""


DEVICES = {"data": 8, "fsdp": 8, "context": 2, "expert": 2, "tensor": 2}
"""rows are split along data, fsdp and expert, a row's tokens along context, weights along fsdp, expert and tensor"""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    prompts: tuple[tuple[int, int], ...]
    """of each request: tokens it shares with the others, and tokens of its own"""
    sampled: int
    context: int
    slots: int
    rows: tuple[int, ...] = (2, 4)
    """of micro-batches, besides those of one row"""
    engine_axes: tuple[str, ...] = ("data", "tensor")
    """what engines are split over"""
    trainer_axes: tuple[str, ...] = ("data", "fsdp", "context", "expert", "tensor")
    gradients: bool = False


@dataclass(frozen=True, kw_only=True)
class Case:
    """A row of the matrix."""

    model: ModelConfig
    masters: dict[str, np.ndarray]
    """stacked, float32"""
    text: np.ndarray
    """token ids that prompts are cut from"""
    sizes: Sizes
    exact: bool

    def requests(self) -> list[Request]:
        cuts = np.cumsum([max(shared for shared, _ in self.sizes.prompts), *(own for _, own in self.sizes.prompts)])
        assert cuts[-1] <= len(self.text), "the text is too short"
        return [
            Request(
                id=str(number),
                prompt_ids=(*self.text[:shared].tolist(), *self.text[cuts[number] : cuts[number] + own].tolist()),
                params=SamplingParams(max_tokens=self.sizes.sampled, seed=number),
            )
            for number, (shared, own) in enumerate(self.sizes.prompts)
        ]

    def placed(self, mesh: Mesh, rules: Rules) -> dict[str, jax.Array]:
        """The masters on a mesh."""
        shardings = rules.shardings(mesh, describe(self.model))
        return {name: jax.device_put(x, shardings[name]) for name, x in self.masters.items()}

    def mesh(self, axis: str) -> tuple[Mesh, Rules]:
        """Devices along an axis, as many as DEVICES says; one without."""
        rules: dict[str, Axes] = {"fsdp": {"embed": "fsdp"}, "expert": {"experts": "expert"}, "tensor": self._split()}.get(
            axis, {}
        )
        count = DEVICES.get(axis, 1)
        return make_mesh({axis or "data": count}, jax.devices()[:count]), Rules(rules)

    def _split(self) -> dict[str, Axes]:
        """What two devices can share."""
        dims = {dim for weight in describe(self.model).values() for dim in weight.dims}
        heads = ("heads", "kv_heads") if self.model.num_kv_heads % 2 == 0 else ()
        return {dim: "tensor" for dim in ("ffn", "vocab", "expert_ffn", *heads) if dim in dims}


def make_engine(case: Case, axis: str = "") -> Engine:
    """Warmed up."""
    sizes, target = case.sizes, describe(case.model, stacked=False)
    mesh, rules = case.mesh(axis)
    whole = max(shared + own for shared, own in sizes.prompts) + sizes.sampled
    config = EngineConfig(
        max_context=sizes.context,
        context_buckets=(sizes.context,),
        max_slots=sizes.slots,
        num_pages=len(sizes.prompts) * sizes.context // 16 + 1,
        page_size=16,
        tokens_per_step=-(-whole // 16) * 16,
        token_buckets=(16, -(-whole // 16) * 16),
    )
    params = reshard(case.placed(mesh, rules), describe(case.model), target, rules.shardings(mesh, target), jnp.bfloat16)
    engine = Engine(case.model, config, params, version=0, dtype=jnp.bfloat16, mesh=mesh, rules=rules, exact=case.exact)
    engine.warm_up()
    return engine


def make_cold(engine: Engine, num_pages: int = 0, tokens_per_step: int = 0) -> None:
    """Forgets all that was computed, and serves within these limits from now on (default: those of the config). With a pool of
    another size, admission leaves no room for those who run."""
    config, version = engine.config, engine.version
    engine.scheduler = Scheduler(
        num_pages=num_pages or config.num_pages,
        page_size=config.page_size,
        max_slots=config.max_slots,
        max_context=config.max_context,
        tokens_per_step=tokens_per_step or config.tokens_per_step,
        routes=Routes(engine.model, config.num_pages, config.page_size) if engine.shapes.captures else None,
        reserve=0 if num_pages else None,
    )
    engine.scheduler.version = version


def play(
    engine: Engine, requests: Sequence[Request], steps: int = 8, after_step: Callable[[int], None] | None = None
) -> list[Completion]:
    """The completions of requests that come at once, with so many decode steps a call."""
    for request in requests:
        engine.submit(request)
    done: dict[str, Completion] = {}
    number = 0
    while engine.num_in_flight:
        done |= {completion.request_id: completion for completion in engine.step(steps)}
        if after_step is not None:
            after_step(number := number + 1)
    done |= {completion.request_id: completion for completion in engine.step(steps)}  # what a pause has read
    return [done[request.id] for request in requests]


def alone(engine: Engine, requests: Sequence[Request], steps: int = 1) -> list[Completion]:
    """Each by itself in a cold engine, its prompt whole, with one decode step a call: what all else is compared with."""
    completions = []
    for request in requests:
        make_cold(engine)
        completions += play(engine, [request], steps)
        assert completions[-1].cached_tokens == 0
    return completions


def batched(engine: Engine, requests: Sequence[Request], steps: int = 1) -> list[Completion]:
    make_cold(engine)
    return play(engine, requests, steps)


def chunked(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    make_cold(engine, tokens_per_step=13)
    return play(engine, requests)


def prefix_hit(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    make_cold(engine)
    play(engine, requests)
    completions = play(engine, requests)
    assert all(len(c.prompt_ids) < 8 or c.cached_tokens > 0 for c in completions)
    return completions


def preempted(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    size = engine.config.page_size
    longest = max(len(request.prompt_ids) + request.params.max_tokens for request in requests)
    make_cold(engine, num_pages=-(-longest // size) + 2)
    completions = play(engine, requests)
    assert engine.scheduler.num_preemptions > 0, "the pool was large enough"
    return completions


def retracted(engine: Engine, requests: Sequence[Request]) -> list[Completion]:
    """Every few steps all give up their pages, and the same weights come as a new version."""
    make_cold(engine)

    def update(number: int) -> None:
        if number % 4 == 0:
            engine.pause("retract")
            engine.load(engine.params, engine.version + 1)
            engine.resume()

    completions = play(engine, requests, 2, update)
    assert max(len(set(completion.versions.tolist())) for completion in completions) > 1
    return completions


COMPANIES: dict[str, Callable[[Engine, Sequence[Request]], list[Completion]]] = {
    "alone vs batched": batched,
    "K = 1 vs K = 8": partial(alone, steps=8),
    "whole vs chunked": chunked,
    "cold vs prefix hit": prefix_hit,
    "preempted": preempted,
    "retracted": retracted,
}


def prefilled(engine: Engine, known: Sequence[Completion]) -> list[np.ndarray]:
    """Of each completion's tokens: the log-probs when prompt and tokens come as one prompt (as they were routed)."""
    make_cold(engine)
    asked = [
        Request(
            id=completion.request_id,
            prompt_ids=(*completion.prompt_ids, *completion.ids.tolist()),
            params=SamplingParams(max_tokens=1, prompt_logprobs=True),
            routing=completion.routing,
        )
        for completion in known
    ]
    found = [completion.prompt_logprobs for completion in play(engine, asked)]
    return [each.logprobs[-len(completion.ids) :] for each, completion in zip(found, known, strict=True) if each is not None]


def drafted(
    engine: Engine, known: Sequence[Completion], wrong: bool = False
) -> tuple[list[tuple[np.ndarray, np.ndarray]], int]:
    """Pairs of log-probs, one by one and as drafts; and how many sampled another token after a right draft.

    Half of each completion's tokens are cached; one step then scores the next 2 to 8 positions of all sequences, as a step that
    verifies drafts would: the scheduler admits them, and the log-prob of each token is read at the position before it. The last
    position of a right draft samples one token more. Of a wrong draft count the positions up to its first wrong token.
    """
    make_cold(engine)
    known = known[: engine.config.max_slots]
    cached = [len(c.ids) // 2 for c in known]
    play(engine, [_gone_on(c, c.ids[:n], False) for c, n in zip(known, cached, strict=True)])
    ends = [min(n + DRAFTS[row % len(DRAFTS)], len(c.ids) - 1) for row, (c, n) in enumerate(zip(known, cached, strict=True))]
    right = [end - max(1, (end - n) // 3) if wrong else end for n, end in zip(cached, ends, strict=True)]
    for c, end, good in zip(known, ends, right, strict=True):
        ids = np.concatenate([c.ids[:good], (c.ids[good:end] + 1) % engine.model.vocab_size])
        engine.scheduler.add(_gone_on(c, ids, True))
    plan = engine.scheduler.schedule(1, drained=True)
    assert plan is not None and not plan.steps and len(plan.chunks) == len(known), "all in one extend"
    assert all(1 < n < 16 for _, n in plan.chunks), "on a warm cache"
    engine.runner.copy_pages(plan.copies)
    for sequence, _ in plan.chunks:
        prepare(sequence, None)  # only now, as a prompt that is to be scored whole takes nothing from the cache
    batch = engine.shapes.fill_extend(plan.chunks)
    out = engine.runner.run(engine.params, batch)
    sampled, _ = engine.runner.parted(np.asarray(out[0]), batch)
    pairs, parted, at = [], 0, 0
    for row, (sequence, n) in enumerate(plan.chunks):
        number = [c.request_id for c in known].index(sequence.request.id)
        c, end, scores = known[number], right[number], sequence.prompt_logprobs
        assert scores is not None
        record_prompt(scores, out[1:], slice(at, at + n), sequence.computed)
        at += n
        first = sequence.computed + 1 - len(c.prompt_ids)
        pairs.append((c.logprobs[first:end], scores.logprobs[len(c.prompt_ids) :][first:end]))
        if not wrong and sampled[0, row] == c.ids[end]:
            pairs.append((c.logprobs[end : end + 1], sampled[1, row : row + 1].view(np.float32)))
        parted += int(not wrong and sampled[0, row] != c.ids[end])
    return pairs, parted


def _gone_on(completion: Completion, ids: np.ndarray, scored: bool) -> Request:
    """The request of a completion, gone on to these tokens."""
    params = SamplingParams(max_tokens=1, prompt_logprobs=scored, seed=int(completion.request_id))
    return Request(id=completion.request_id, prompt_ids=(*completion.prompt_ids, *ids.tolist()), params=params)
