"""The engine: requests in, completions out, one step of the device at a time.

    submit -> waiting -> [admit: prefix match, pages] -> running -> extend / decode -> completion
                 ^                                          |
                 +------------- preempt, retract -----------+

`step` schedules and dispatches a step (host), then reads the one before it, which the device has finished meanwhile or is about
to. Weights change only between steps, while paused, when nothing is in flight.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from inference.batch import Decode, Extend, Shapes
from inference.config import EngineConfig
from inference.memory import check, free_bytes
from inference.memory import plan as plan_memory
from inference.record import completion_of, prepare, record, record_prompt, tokens_of
from inference.routing import Routes
from inference.runner import Runner
from inference.sampler import table_rows
from inference.scheduler import Plan, Scheduler
from inference.sequence import Sequence
from inference.text import TokenizerLike
from inference.types import Completion, FinishReason, Request, Tokens
from models.config import ModelConfig
from models.routes import check_rows
from sharding.deltas import Staged, apply
from sharding.rules import Rules

PAUSE_MODES = ("retract", "keep", "abort")


@dataclass
class EngineStats:
    """Counts since the engine was made."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    """prompt tokens found in the prefix cache"""
    computed_tokens: int = 0
    """tokens that went through the model: prefill, decode and re-prefill"""
    sampled_tokens: int = 0
    extends: int = 0
    decodes: int = 0
    finished: Counter[str] = field(default_factory=Counter)
    """requests by finish reason"""
    passes: Counter[tuple[str, int]] = field(default_factory=Counter)
    """how often the model ran, by kind of step and rows of its products"""


@dataclass(frozen=True)
class _Step:
    """A dispatched step that was not read yet."""

    plan: Plan
    firsts: list[int]
    """tokens of each sequence that were computed before"""
    sampling: list[bool]
    """which sequences sample in an extend"""
    batch: Extend | Decode
    version: int
    out: tuple[jax.Array, ...]


class Engine:
    """Continuous batching over a paged, prefix-cached KV pool.

    Args:
        params: unrolled weights in `dtype`, placed by `rules` on `mesh` (`sharding.reshard` makes them).
        version: of these weights; each sampled token is stamped with the version that sampled it.
        tokenizer: needed for stop strings only.
        exact: see `models.numerics.Numerics`.

    Raises:
        ValueError: the sizes do not fit the model or the memory, or the params are not this model's.
    """

    def __init__(
        self,
        model: ModelConfig,
        config: EngineConfig,
        params: Mapping[str, jax.Array],
        *,
        version: int,
        dtype: DTypeLike,
        mesh: Mesh,
        rules: Rules,
        tokenizer: TokenizerLike | None = None,
        exact: bool = True,
    ):
        if config.max_context > model.max_positions:
            raise ValueError(
                f"engine.max_context: {config.max_context} exceeds the model's {model.max_positions} positions; lower it"
            )
        self.model, self.config, self.tokenizer = model, config, tokenizer
        self.memory = plan_memory(model, config, dtype, mesh, rules)
        check(self.memory, free_bytes(mesh))
        self.runner = Runner(model, config, dtype, mesh, rules, exact)
        self.runner.allocate()
        self.scheduler = Scheduler(
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_slots=config.max_slots,
            max_context=config.max_context,
            tokens_per_step=config.tokens_per_step,
            routes=Routes(model, config.num_pages, config.page_size) if self.shapes.captures else None,
        )
        self.stats = EngineStats()
        self.paused = False
        self._in_flight: dict[str, Sequence] = {}
        self._unread: _Step | None = None
        self._done: list[Completion] = []
        """finished while nobody was asking"""
        self.runner.check_params(params)
        self.params: dict[str, jax.Array] = dict(params)
        self.scheduler.version = version

    @property
    def version(self) -> int:
        return self.scheduler.version

    @property
    def shapes(self) -> Shapes:
        return self.runner.shapes

    @property
    def routes(self) -> Routes | None:
        """Where routing is recorded, if it is."""
        return self.scheduler.routes

    def warm_up(self) -> int:
        """Says what the engine takes and holds (on standard error) and compiles all programs; after it the engine compiles
        nothing. Returns how many were compiled."""
        print(self.memory, file=sys.stderr)
        return self.runner.warm_up(self.params)

    # ---- requests

    def submit(self, request: Request, on_tokens: Callable[[Tokens], None] | None = None) -> None:
        """Queues a request; `step` returns its completion when it has finished.

        Args:
            on_tokens: called by `step` with the tokens it has newly recorded.

        Raises:
            ValueError: the request can never run, its id is in flight, or a token id is outside the vocabulary.
        """
        if request.id in self._in_flight:
            raise ValueError(f"id: a request {request.id!r} is in flight already; give each request its own id")
        if request.adapter:
            raise ValueError(f"adapter: {request.adapter!r} is not loaded; leave it empty")
        params, V = request.params, self.model.vocab_size
        for name, ids in (
            ("prompt_ids", request.prompt_ids),
            ("logit_bias", tuple(token for token, _ in params.logit_bias)),
            ("allowed_ids", params.allowed_ids or ()),
        ):
            if bad := [i for i in ids if not 0 <= i < V]:
                raise ValueError(f"{name}: {bad[0]} is outside the model's vocabulary of {V}; use the model's own tokenizer")
        if params.top_logprobs > V:
            raise ValueError(f"top_logprobs: {params.top_logprobs} is more than the vocabulary's {V} tokens")
        if params.stop and self.tokenizer is None:
            raise ValueError("stop: this engine has no tokenizer to find strings with; give it one, or use stop_ids")
        if request.routing is not None:
            if self.routes is None and self.model.moe is not None:
                raise ValueError("routing: this engine does not record it; set engine.capture_routing, or leave it out")
            check_rows(request.routing, self.model, "routing", most=len(request.prompt_ids) - 1)
        sequence = self.scheduler.add(request, on_tokens)
        prepare(sequence, self.tokenizer)
        self._in_flight[request.id] = sequence

    def cancel(self, request_id: str) -> Completion:
        """Takes a request out, with what was recorded of it so far.

        Raises:
            ValueError: no such request is in flight.
        """
        if request_id not in self._in_flight:
            raise ValueError(f"id: no request {request_id!r} is in flight")
        return self._finish(self._in_flight[request_id], FinishReason.ABORT)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def run(self, requests: Iterable[Request]) -> list[Completion]:
        """Submits the requests, steps until all have finished, and returns their completions in the same order."""
        order = []
        for request in requests:
            self.submit(request)
            order.append(request.id)
        done: dict[str, Completion] = {}
        while any(request_id not in done for request_id in order):
            assert not self.paused, "a paused engine finishes nothing"
            done.update((completion.request_id, completion) for completion in self.step())
        return [done[request_id] for request_id in order]

    # ---- steps

    def step(self, max_steps: int | None = None) -> list[Completion]:
        """Dispatches one step of the device, if there is work, and reads the one before; returns what has finished.

        Args:
            max_steps: most decode steps, where the caller wants to be asked again soon (default: config.decode_steps).
        """
        if not self.paused:
            try:
                self._step(self.config.decode_steps if max_steps is None else min(max_steps, self.config.decode_steps))
            except Exception:
                self._start_over()
                raise
        done, self._done = self._done, []
        return done

    def _step(self, max_steps: int) -> None:
        before, self._unread = self._unread, None
        plan = self.scheduler.schedule(max_steps, drained=before is None)
        if plan is None and before is not None:
            self._read(before)
            before, plan = None, self.scheduler.schedule(max_steps, drained=True)
        if plan is not None:
            self._unread = self._dispatch(plan)
        if before is not None:
            self._read(before)

    def _dispatch(self, plan: Plan) -> _Step:
        if plan.copies:
            self.runner.copy_pages(plan.copies)
        for sequence in plan.fresh:
            params = sequence.request.params
            if params.penalised or params.biased:
                n = len(sequence.request.prompt_ids)
                rows = table_rows(params, sequence.ids[:n], sequence.ids[n:], self.model.vocab_size)
                self.runner.set_slot(sequence.slot, *rows)
        sequences = [sequence for sequence, _ in plan.chunks]
        if plan.steps:
            batch = self.shapes.fill_decode(sequences, plan.left, plan.steps)
            self.stats.decodes += 1
        else:
            batch = self.shapes.fill_extend(plan.chunks)
            self.stats.extends += 1
        out = self.runner.run(self.params, batch)
        firsts = [sequence.computed for sequence in sequences]
        sampling = [sequence.uncomputed == n for sequence, n in plan.chunks]
        self.scheduler.dispatched(plan)
        if self.routes is not None:
            self.routes.dispatched(batch.places(plan.copies, self.config.page_size))
        return _Step(plan, firsts, sampling, batch, self.version, out)

    def _read(self, step: _Step) -> None:
        """Waits for the step's results and records them."""
        out, rows = self.runner.parted(np.asarray(step.out[0]), step.batch)
        if rows is not None:
            self.scheduler.read(step.plan, step.firsts, rows)
        size = step.batch.tokens.shape[0]
        if step.plan.steps:
            longest = 0
            for row, ((sequence, _), left) in enumerate(zip(step.plan.chunks, step.plan.left, strict=True)):
                longest = max(longest, self._record(sequence, step, out[: min(step.plan.steps, left), :, row]))
            self.stats.passes["decode", size] += longest
            return
        self.stats.passes["extend", size] += 1
        at = 0
        for row, ((sequence, n), first) in enumerate(zip(step.plan.chunks, step.firsts, strict=True)):
            self.stats.computed_tokens += n
            if sequence.prompt_logprobs is not None and sequence.finish_reason is None:
                record_prompt(sequence.prompt_logprobs, step.out[1:], slice(at, at + n), first)
            if step.sampling[row]:
                self._record(sequence, step, out[None, :, row])
            at += n

    def _record(self, sequence: Sequence, step: _Step, packed: np.ndarray) -> int:
        """Records what a row sampled, `[steps, ...]`, up to its end; returns how many steps the row took."""
        if sequence.finish_reason is not None:  # it had ended before this step, or was cancelled
            return 0
        new, reason = record(sequence, packed, step.version, self.scheduler.max_context)
        self.stats.sampled_tokens += new
        self.stats.computed_tokens += new if step.plan.steps else 0
        if sequence.on_tokens is not None:
            sequence.on_tokens(tokens_of(sequence, len(sequence.versions) - new))
        if reason:
            self._done.append(self._finish(sequence, reason))
        return new

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Completion:
        self.scheduler.finish(sequence, reason)
        del self._in_flight[sequence.request.id]
        self.stats.prompt_tokens += len(sequence.request.prompt_ids)
        self.stats.cached_tokens += sequence.cached or 0
        self.stats.finished[reason.value] += 1
        return completion_of(sequence, reason, self.routes)

    # ---- updates

    def _drain(self) -> None:
        """Reads the step in flight; what it finishes is returned by the next `step`."""
        if self._unread is not None:
            step, self._unread = self._unread, None
            try:
                self._read(step)
            except Exception:
                self._start_over()
                raise

    def _start_over(self) -> None:
        """After a failed step: what the books say of the pool may not have happened, so every sequence is prefilled again."""
        self._unread = None
        self.scheduler.start_over()
        self.runner.release()
        self.runner.allocate()

    def pause(self, mode: str = "retract") -> None:
        """Stops at this step boundary.

        Args:
            mode: `retract` (running requests give up their pages and are prefilled again, under whatever weights are then
                loaded; they keep what they sampled), `keep` (they keep their pages, which from then on are private), or
                `abort` (they finish with reason abort; the next `step` returns them).

        Raises:
            ValueError: unknown mode.
        """
        if mode not in PAUSE_MODES:
            raise ValueError(f"mode: {mode!r} is unknown; use one of {PAUSE_MODES}")
        self.paused = True
        self._drain()
        for sequence in list(self.scheduler.running):
            if mode == "retract":
                self.scheduler.preempt(sequence)
            elif mode == "keep":
                sequence.private = True
        if mode == "abort":
            self._done += [self._finish(s, FinishReason.ABORT) for s in list(self._in_flight.values())]

    def load(
        self, params: Mapping[str, jax.Array] | Staged, version: int, base: int | None = None, restart: bool = False
    ) -> None:
        """Swaps the weights. Nothing is flushed: pages of another version are never found.

        Args:
            params: the whole tree, or a delta that was staged for the loaded one, whose arrays are then donated.
            base: the version that must be loaded now.
            restart: the trainer went back: `version` may be any, and numbers from now on mean other weights than they did. No
                page of theirs is found again, and running requests are prefilled again whatever the pause's mode.

        Raises:
            ValueError: not paused, `base` is not loaded, version not newer, or a tree that is not the engine's.
        """
        if not self.paused:
            raise ValueError("load: pause the engine first; weights change only at a step boundary")
        base = params.base if isinstance(params, Staged) else base
        if base not in (None, self.version):
            raise ValueError(f"base: {version} follows {base}, but {self.version} is loaded; load what follows that")
        if version <= self.version and not restart:
            raise ValueError(f"version: {version} is not newer than the loaded {self.version}")
        params = apply(self.params, params) if isinstance(params, Staged) else params
        self.runner.check_params(params)
        if restart:
            self.scheduler.restart()
        self.params, self.scheduler.version = dict(params), version

    def resume(self) -> None:
        """Goes on after a pause.

        Raises:
            ValueError: the engine is asleep.
        """
        if self.runner.released:
            raise ValueError("resume: the engine is asleep; wake it")
        self.paused = False

    def sleep(self) -> None:
        """Pauses (retract) and gives the memory of the page pool back; weights and requests stay. `wake` goes on."""
        self.pause("retract")
        self.scheduler.tree.clear()
        self.runner.release()

    def wake(self) -> None:
        """Takes the memory again, empty, and resumes.

        Raises:
            ValueError: the engine is not asleep.
        """
        if not self.runner.released:
            raise ValueError("wake: the engine is not asleep; resume it")
        self.runner.allocate()
        self.resume()

    def forget(self) -> None:
        """Empties the prefix cache, but for pages in use."""
        self.scheduler.tree.evict(self.config.num_pages, self.version)
