"""The engine: requests in, completions out, one step of the device at a time.

    submit -> waiting -> [admit: prefix match, pages] -> running -> extend / decode -> completion
                 ^                                          |
                 +------------- preempt, retract -----------+

A step is schedule (host), run (device), record (host). Weights change only between steps, while paused.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import jax
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from inference.runner import QUERY_BLOCK, EngineConfig, Runner
from inference.sampler import Warp
from inference.scheduler import Plan, Scheduler, Sequence
from inference.types import Completion, FinishReason, Request
from models.config import ModelConfig
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


class Engine:
    """Continuous batching over a paged, prefix-cached KV pool.

    Args:
        params: unrolled weights in `dtype`, placed by `rules` on `mesh` (`sharding.reshard` makes them).
        version: of these weights; each sampled token is stamped with the version that sampled it.
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
    ):
        if config.max_context > model.max_positions:
            raise ValueError(
                f"engine.max_context: {config.max_context} exceeds the {model.max_positions} positions the model was trained "
                f"for; lower it"
            )
        self.model, self.config = model, config
        self.runner = Runner(model, config, dtype, mesh, rules)
        self.scheduler = Scheduler(
            num_pages=config.num_pages,
            page_size=config.page_size,
            max_slots=config.max_slots,
            max_context=config.max_context,
            tokens_per_step=config.tokens_per_step,
        )
        self.stats = EngineStats()
        self.paused = False
        self._in_flight: dict[str, Sequence] = {}
        self._aborted: list[Completion] = []
        self.params: Mapping[str, jax.Array] = {}
        self._set_params(params, version)

    @property
    def version(self) -> int:
        return self.scheduler.version

    def warm_up(self) -> int:
        """Compiles all programs; after it the engine compiles nothing. Returns how many were compiled."""
        return self.runner.warm_up()

    def submit(self, request: Request) -> None:
        """Queues a request; `step` returns its completion when it has finished.

        Raises:
            ValueError: the request can never run, its id is in flight, or a token id is outside the vocabulary.
        """
        if request.id in self._in_flight:
            raise ValueError(f"id: a request {request.id!r} is in flight already; give each request its own id")
        if request.adapter:
            raise ValueError(f"adapter: {request.adapter!r} is not loaded; leave it empty")
        if bad := [i for i in request.prompt_ids if not 0 <= i < self.model.vocab_size]:
            raise ValueError(
                f"prompt_ids: {bad[0]} is outside the model's vocabulary of {self.model.vocab_size}; "
                f"use the model's own tokenizer"
            )
        self._in_flight[request.id] = self.scheduler.add(request)

    def cancel(self, request_id: str) -> Completion:
        """Takes a request out, with what it has sampled so far.

        Raises:
            ValueError: no such request is in flight.
        """
        if request_id not in self._in_flight:
            raise ValueError(f"id: no request {request_id!r} is in flight")
        return self._finish(self._in_flight[request_id], FinishReason.ABORT)

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    def step(self) -> list[Completion]:
        """One step of the device, if there is work; returns what finished."""
        done, self._aborted = self._aborted, []
        if self.paused:
            return done
        plan = self.scheduler.schedule(self.config.decode_steps)
        if plan is not None:
            done += self._decode(plan) if plan.steps else self._extend(plan)
        return done

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
        for sequence in list(self.scheduler.running):
            if mode == "retract":
                self.scheduler.preempt(sequence)
            elif mode == "keep":
                sequence.private = True
        if mode == "abort":
            self._aborted += [self._finish(s, FinishReason.ABORT) for s in list(self._in_flight.values())]

    def load(self, params: Mapping[str, jax.Array], version: int) -> None:
        """Swaps the weights. Nothing is flushed: pages of another version are never found.

        Raises:
            ValueError: not paused, version not newer, or names, shapes, dtypes that are not the model's.
        """
        if not self.paused:
            raise ValueError("load: pause the engine first; weights change only at a step boundary")
        if version <= self.version:
            raise ValueError(f"version: {version} is not newer than the loaded {self.version}")
        self._set_params(params, version)

    def resume(self) -> None:
        self.paused = False

    def forget(self) -> None:
        """Empties the prefix cache, but for pages in use."""
        self.scheduler.tree.evict(self.config.num_pages, self.version)

    def _set_params(self, params: Mapping[str, jax.Array], version: int) -> None:
        weights, dtype = self.runner.definition.weights, self.runner.dtype
        errors = [f"missing {name}" for name in weights.keys() - params.keys()]
        errors += [f"unknown {name}" for name in params.keys() - weights.keys()]
        errors += [
            f"{name} is {params[name].dtype}{list(params[name].shape)}, not {dtype}{list(weights[name].shape)}"
            for name in weights.keys() & params.keys()
            if params[name].shape != weights[name].shape or params[name].dtype != dtype
        ]
        if errors:
            raise ValueError("params: " + "; ".join(sorted(errors)))
        self.params, self.scheduler.version = dict(params), version

    def _context(self, longest: int) -> int:
        return next(C for C in self.config.contexts if longest <= C)

    def _extend(self, plan: Plan) -> list[Completion]:
        size = self.config.page_size
        total = sum(n for _, n in plan.chunks)
        T = next(T for T in self.config.tokens if total <= T)
        batch = self.runner.empty_extend(T, self._context(max(s.computed + n for s, n in plan.chunks)))
        blocks, at, block = batch.blocks, 0, 0
        for row, (sequence, n) in enumerate(plan.chunks):
            first, here = sequence.computed, slice(at, at + n)
            positions = np.arange(first, first + n)
            pages = np.asarray(sequence.pages, np.int32)
            batch.tokens[here], batch.positions[here] = sequence.ids[first : first + n], positions
            blocks.page[here], blocks.offset[here] = pages[positions // size], positions % size
            for start in range(0, n, QUERY_BLOCK):
                queries = min(QUERY_BLOCK, n - start)
                blocks.query[block, :queries] = np.arange(at + start, at + start + queries)
                blocks.position[block, :queries] = positions[start : start + queries]
                blocks.table[block, : len(pages)] = pages[: blocks.table.shape[1]]  # a decode may have left more
                blocks.slot[at + start : at + start + queries] = block * QUERY_BLOCK + np.arange(queries)
                block += 1
            batch.rows[row] = at + n - 1
            _fill_warp(batch.warp, row, sequence)
            at += n
        out = self.runner.run(self.params, batch)
        self.stats.extends += 1
        done = []
        for row, (sequence, n) in enumerate(plan.chunks):
            self.stats.computed_tokens += n
            self.scheduler.computed(sequence, n)
            if sequence.uncomputed == 0 and (reason := self._record(sequence, out[:, row])):
                done.append(self._finish(sequence, reason))
        return done

    def _decode(self, plan: Plan) -> list[Completion]:
        sequences = [sequence for sequence, _ in plan.chunks]
        ahead = [min(plan.steps, self.scheduler.budget_left(s)) for s in sequences]
        S = next(S for S in self.config.slots if len(sequences) <= S)
        longest = max(s.computed + n for s, n in zip(sequences, ahead, strict=True))
        batch = self.runner.empty_decode(S, self._context(longest))
        for row, sequence in enumerate(sequences):
            batch.tokens[row], batch.positions[row] = sequence.ids[-1], sequence.computed
            batch.table[row, : len(sequence.pages)] = sequence.pages
            batch.left[row] = self.scheduler.budget_left(sequence)
            stop_ids = sequence.request.params.stop_ids
            batch.stop_ids[row, : len(stop_ids)] = stop_ids
            _fill_warp(batch.warp, row, sequence)
        batch.steps[()] = plan.steps
        until_finished = bool(self.scheduler.waiting)
        batch.until_finished[()] = until_finished
        out = self.runner.run(self.params, batch)
        self.stats.decodes += 1
        return self._record_decode(sequences, out, plan.steps, until_finished)

    def _record_decode(self, sequences: list[Sequence], out: np.ndarray, steps: int, until_finished: bool) -> list[Completion]:
        """Walks the steps the device took; it stopped by the same rule."""
        finished: dict[int, FinishReason] = {}
        for step in range(steps):
            if len(finished) == len(sequences) or (until_finished and finished):
                break
            for row, sequence in enumerate(sequences):
                if row in finished:
                    continue
                self.stats.computed_tokens += 1
                self.scheduler.computed(sequence, 1)
                if reason := self._record(sequence, out[step, :, row]):
                    finished[row] = reason
        return [self._finish(sequences[row], reason) for row, reason in sorted(finished.items())]

    def _record(self, sequence: Sequence, packed: np.ndarray) -> FinishReason | None:
        """Appends one sampled token; returns why the sequence is over, if it is."""
        drawn, full = packed[1:].view(np.float32)
        sequence.ids.append(int(packed[0]))
        sequence.logprobs.append(float(drawn))
        sequence.logprobs_full.append(float(full))
        sequence.versions.append(self.version)
        self.stats.sampled_tokens += 1
        if sequence.ids[-1] in sequence.request.params.stop_ids:
            return FinishReason.STOP
        return FinishReason.LENGTH if self.scheduler.budget_left(sequence) == 0 else None

    def _finish(self, sequence: Sequence, reason: FinishReason) -> Completion:
        self.scheduler.finish(sequence, reason)
        request = sequence.request
        del self._in_flight[request.id]
        self.stats.prompt_tokens += len(request.prompt_ids)
        self.stats.cached_tokens += sequence.cached or 0
        return Completion(
            request_id=request.id,
            prompt_ids=request.prompt_ids,
            ids=np.asarray(sequence.ids[len(request.prompt_ids) :], np.int32),
            logprobs=np.asarray(sequence.logprobs, np.float32),
            logprobs_full=np.asarray(sequence.logprobs_full, np.float32),
            versions=np.asarray(sequence.versions, np.int32),
            finish_reason=reason,
            cached_tokens=sequence.cached or 0,
            prefilled_tokens=sequence.prefilled,
        )


def _fill_warp(warp: Warp, row: int, sequence: Sequence) -> None:
    params = sequence.request.params
    warp.temperature[row], warp.top_k[row], warp.top_p[row] = params.temperature, params.top_k, params.top_p
    warp.min_p[row], warp.seed[row] = params.min_p, params.seed
