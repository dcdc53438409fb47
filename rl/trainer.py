"""The trainer: samples in, one optimizer step out.

Legend: S branches of a micro-batch, L trained tokens of the longest branch.

    samples -> plan -> micro-batches of rows, and tries to walk depth first

    one pass     forward: a reading at each trained token's parent -> (S, L) -> loss share -> gradients; micro-batches add up
    two passes   score everything -> loss and its cotangent of each reading, once -> forward, transposed, with those cotangents:
                 where a trie is walked, or where a loss needs the whole batch at once and that has several micro-batches

    gradients (float32) -> clip -> AdamW on float32 masters

The forward rounds masters to the published dtype, so it computes with the very weights the engine was given. A loss never
sees rows or trees; its denominators are those of the whole batch.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.typing import DTypeLike

from models.config import ModelConfig
from models.flops import forward_flops, peak_flops_per_s
from models.transformer import Definition, Params
from rl.batch import Sample, Totals, branches_of, loss_batch, on_tokens
from rl.depth_first import DepthFirst
from rl.forest import Layout
from rl.forward import Reading
from rl.loss_batch import LossBatch
from rl.measures import add_up, finish
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.programs import Programs, TrainState
from rl.routes import NO_OPTIONS, RouterConfig
from rl.tries import Plan, plan
from sharding.rules import Rules


class Trainer:
    """Holds masters, optimizer state and the compiled programs of a step.

    Args:
        masters: stacked float32 weights, placed by `rules` on `mesh`.
        objective: what `train` minimises; its readout says whether this is a policy or a critic.
        others: more objectives by name, with the same readout, for `train(..., loss=name)`.
        exact: see `models.numerics.Numerics`.
    """

    def __init__(
        self,
        model: ModelConfig,
        masters: Mapping[str, jax.Array],
        *,
        layout: Layout,
        optimizer: OptimizerConfig,
        objective: Objective,
        dtype: DTypeLike,
        remat: str,
        mesh: Mesh,
        rules: Rules,
        others: Mapping[str, Objective] | None = None,
        router: RouterConfig = NO_OPTIONS,
        exact: bool = True,
    ):
        self.objectives = {objective.loss: objective, **(others or {})}
        self.loss, self.layout = objective.loss, layout
        value_head = objective.readout == "value"
        self.definition = Definition(model, dtype, stacked=True, remat=remat, value_head=value_head, exact=exact)
        self.programs = Programs(self.definition, layout, optimizer, self.objectives, mesh, rules, router)
        self.walk = DepthFirst(self.programs, mesh) if layout.path else None
        self.state: TrainState = self.programs.init(masters)
        self.reference: Params | None = None
        """a frozen policy in the masters' dtype and place, for losses and advantages that read its log-probs"""

    @property
    def step(self) -> int:
        return int(self.state.step)

    def warm_up(self, loss: str | None = None, reading_only: bool = False) -> None:
        """Compiles the programs of a step, or what `read` needs of them; after it a step, or `read`, compiles nothing."""
        loss = loss or self.loss
        self.programs.warm_up(loss, self.objectives[loss].joint or self.walk is not None, reading_only)
        if self.walk is not None:
            self.walk.warm_up(reading_only)

    def plan(self, samples: Sequence[Sample]) -> Plan:
        """Where each sample's tokens are computed.

        Raises:
            ValueError: a sample does not fit the layout, or its routing is not the model's.
        """
        branches = branches_of(samples, self.definition.config, self.programs.router)
        return plan(branches, self.layout, row_passes=3 if self.definition.remat == "none" else 4)

    def train(self, samples: Sequence[Sample], *, temperature: float = 1.0, loss: str | None = None) -> dict[str, float]:
        """One optimizer step on these samples; returns its metrics.

        Raises:
            ValueError: a sample does not fit the layout (nothing has changed then).
            FloatingPointError: the loss or a gradient is not finite (the state has not changed).
        """
        loss = loss or self.loss
        started = time.perf_counter()
        planned = self.plan(samples)
        packed = time.perf_counter()
        if "reference_logp" in self.objectives[loss].needs:
            samples = self.referenced(samples, temperature)
        grads, shares = self.gradients(samples, planned, temperature, loss)
        metrics = finish(add_up(jax.device_get(shares)))
        advice = "not finite; lower the learning rate, and look at the step's rollouts"
        if not np.isfinite(metrics["loss"]):
            raise FloatingPointError(f"loss is {metrics['loss']} at step {self.step}: {advice}")
        self.state, norms = self.programs["update"](self.state, grads)
        norms = {name: float(value) for name, value in jax.device_get(norms).items()}
        if not np.isfinite(norms["grad_norm"]):
            raise FloatingPointError(f"grad_norm is {norms['grad_norm']} at step {self.step}: {advice}")
        stats, train_s = planned.stats, time.perf_counter() - packed
        return {
            **metrics,
            **norms,
            **self._utilisation(planned, train_s),
            "tokens_in": float(stats.tokens_in),
            "tokens_kept": float(stats.tokens_kept),
            "compression": stats.compression,
            "padding": 1 - stats.tokens_kept / stats.slots,
            "micro_batches": float(len(planned.micro_batches)),
            "walked_tries": float(len(planned.tries)),
            "time/pack_s": packed - started,
            "time/train_s": train_s,
        }

    def _utilisation(self, planned: Plan, seconds: float) -> dict[str, float]:
        """Useful operations: 6 a weight and token, and attention; what is computed again does not count (MFU, not HFU)."""
        stats = planned.stats
        flops = 3 * forward_flops(self.definition.config, stats.tokens_kept, stats.key_sum, stats.reads)
        peak = peak_flops_per_s(self.programs.mesh.devices.flat[0])
        speed = flops / seconds / self.programs.mesh.size
        return {"flops": flops, "time/flops_per_s": speed} | ({"time/mfu": speed / peak} if peak else {})

    def gradients(self, samples: Sequence[Sample], planned: Plan, temperature: float, loss: str) -> tuple[Any, list[Any]]:
        """Gradients of the whole batch, and metric sums of its parts, all on the device."""
        whole = self.objectives[loss].joint and len(planned.micro_batches) > 1
        way = self._two_passes if planned.tries or whole else self._one_pass
        at, router = self.programs.put(np.float32(temperature)), self.programs.router
        if planned.routes and router.router_replay == "R2":
            planned = self._own_routes(planned, at)
        return way(loss, samples, planned.routed(router.of_step(planned.routes, self.definition.config)), at)

    def _own_routes(self, planned: Plan, temperature: jax.Array) -> Plan:
        """The plan with the experts that the policy chooses as it is now."""
        params, readings = self.state.masters, []
        for micro in planned.micro_batches:
            readings.append(self.programs["score"](params, self.programs.put_forest(micro.forest), temperature))
        for trie in planned.tries:
            assert self.walk is not None
            readings += self.walk.readings(params, trie, temperature)
        chosen = jax.device_get([reading.routed.rows for reading in readings])
        filled = []
        for part, rows in zip(planned.routes, chosen, strict=True):
            filled.append(replace(part, rows=rows[: part.rows.shape[0]]))  # a segment's padding is cut off
        return planned.routed(filled)

    def _one_pass(self, loss: str, samples: Sequence[Sample], planned: Plan, temperature: jax.Array):
        grads, shares, totals = self.programs.zeros(), [], Totals.of(samples)
        for micro in planned.micro_batches:
            batch = self._batch(loss, samples, micro.order, totals)
            forest = self.programs.put_forest(micro.forest, step=True)
            grads, sums = self.programs[loss](self.state.masters, grads, forest, batch, temperature)
            shares.append(sums)
        return grads, shares

    def _two_passes(self, loss: str, samples: Sequence[Sample], planned: Plan, temperature: jax.Array):
        programs, params = self.programs, self.state.masters
        out_grads, shares = self._loss_of_readings(loss, samples, self._readings(samples, planned, params, temperature))
        grads, routers = programs.zeros(), []
        for micro in planned.micro_batches:
            matrix = programs.put(self._matrix([out_grads[n] for n in micro.order]))
            grads, sums = programs["pull"](params, grads, programs.put_forest(micro.forest, step=True), temperature, matrix)
            routers.append(sums)
        for trie in planned.tries:
            assert self.walk is not None
            entries = np.zeros(trie.num_entries, programs.accum)
            for number, index in zip(trie.order, trie.index, strict=True):
                np.add.at(entries, index, out_grads[number])
            grads, sums = self.walk.pull(params, grads, trie, temperature, entries)
            routers += sums
        return grads, shares + [sums for sums in routers if sums]

    def _loss_of_readings(self, loss: str, samples: Sequence[Sample], readings: Reading):
        """Of each sample the cotangent of each reading; and metric sums."""
        S, totals = self.layout.branches, Totals.of(samples)
        if self.objectives[loss].joint and len(samples) > S:
            raise ValueError(f"trainer.loss: {loss!r} compares all {len(samples)} branches of a step, but the layout has {S}")
        out_grads, shares = [], []
        for first in range(0, len(samples), S):
            numbers = range(first, min(first + S, len(samples)))
            matrices = Reading(*(self.programs.put(self._matrix([x[n] for n in numbers])) for x in readings[:2]))
            batch = self._batch(loss, samples, numbers, totals)
            cotangent, sums = self.programs[f"{loss} of readings"](matrices, batch)
            rows = zip(np.asarray(cotangent), numbers, strict=False)
            out_grads += [row[: len(readings.out[number])] for row, number in rows]
            shares.append(sums)
        return out_grads, shares

    def read(self, samples: Sequence[Sample], *, temperature: float = 1.0, params: Params | None = None) -> list[np.ndarray]:
        """Of each sample's trained tokens, in order: log-probs, or a critic's values; nothing is trained.

        Args:
            params: other weights of this model in the masters' dtype and place: a frozen reference, a teacher.
        """
        weights: Params = self.state.masters if params is None else params
        return self._readings(samples, self.plan(samples), weights, self.programs.put(np.float32(temperature))).out

    def freeze_reference(self) -> None:
        """The weights as they are now become the reference."""
        self.reference = jax.tree.map(jnp.copy, self.state.masters)

    def referenced(self, samples: Sequence[Sample], temperature: float) -> list[Sample]:
        """The samples with the reference's log-probs; those that have them stay."""
        if all(sample.reference_logprobs is not None for sample in samples):
            return list(samples)
        assert self.reference is not None, "freeze_reference() first"
        read = self.read(samples, temperature=temperature, params=self.reference)
        return [replace(sample, reference_logprobs=on_tokens(sample, x)) for sample, x in zip(samples, read, strict=True)]

    def _readings(self, samples: Sequence[Sample], planned: Plan, params: Params, temperature: jax.Array) -> Any:
        """A Reading of lists: of each sample, what is read of its trained tokens."""
        got: Any = Reading([np.zeros(0)] * len(samples), [np.zeros(0)] * len(samples))
        running = [
            (micro.order, self.programs["score"](params, self.programs.put_forest(micro.forest), temperature))
            for micro in planned.micro_batches
        ]
        for order, reading in running:
            for x, matrix in zip(got[:2], jax.device_get(reading[:2]), strict=True):
                for row, number in enumerate(order):
                    x[number] = matrix[row, : len(samples[number].trained)]
        for trie in planned.tries:
            assert self.walk is not None
            reading = self.walk.score(params, trie, temperature)
            for x, entries in zip(got[:2], reading[:2], strict=True):
                for number, index in zip(trie.order, trie.index, strict=True):
                    x[number] = entries[index]
        return got

    def _matrix(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """[S, L], padded with 0."""
        matrix = np.zeros((self.layout.branches, self.layout.length), self.programs.accum)
        for row, values in zip(matrix, rows, strict=False):
            row[: len(values)] = values
        return matrix

    def _batch(self, loss: str, samples: Sequence[Sample], numbers: Iterable[int], totals: Totals) -> LossBatch:
        needs = self.objectives[loss].needs
        return self.programs.put(loss_batch(samples, numbers, totals, self.layout, self.step, needs))
