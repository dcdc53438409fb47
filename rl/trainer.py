"""The trainer: branches in, one optimizer step out.

Legend: B rows, T tokens of a row, D model, S branches of a micro-batch, L trained tokens of the longest branch.

    branches -> pack -> micro-batches -> [forward: hidden -> log-probs at parents -> (S, L) -> loss share] -> gradients,
    summed in float32 over micro-batches -> clip -> AdamW on float32 masters

The forward rounds masters to the published dtype, so it computes with the very weights the engine was given. A loss never
sees rows or trees; its denominators are those of the whole batch.
"""

import inspect
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from models.attention import Array, ForestContext
from models.config import ModelConfig
from models.logprobs import token_log_probs
from models.transformer import Definition, Params
from rl.forest import Branch, Forest, Layout, MicroBatch, PackStats, pack
from rl.losses import LOSSES, Totals, mismatch
from sharding.reshard import abstract
from sharding.rules import Rules

LOGITS_CHUNK = 128
"""tokens whose logits exist at a time"""
BATCH_AXES = ("data", "fsdp")
"""mesh axes over which rows are split"""


@dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW on float32 masters (Loshchilov and Hutter, arXiv 1711.05101)."""

    learning_rate: float
    warmup_steps: int = 0
    """steps over which the rate rises linearly, from its share of one step"""
    b1: float = 0.9
    b2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 1.0
    """largest global norm of the gradient"""

    def build(self) -> optax.GradientTransformation:
        rate = optax.schedules.warmup_constant_schedule(
            init_value=self.learning_rate / max(1, self.warmup_steps),
            peak_value=self.learning_rate,
            warmup_steps=self.warmup_steps,
        )
        return optax.chain(
            optax.clip_by_global_norm(self.clip_norm),
            optax.adamw(rate, b1=self.b1, b2=self.b2, eps=self.eps, weight_decay=self.weight_decay),
        )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One branch with what the loss needs; arrays are aligned with `ids`."""

    ids: np.ndarray
    """int32 [n]"""
    weights: np.ndarray
    """float32 [n]: 0 on tokens that are not trained, 1/branches on sampled tokens of several branches"""
    logprobs: np.ndarray
    """float32 [n]: the sampler's, under its sampling distribution; 0 where not sampled"""
    advantages: np.ndarray
    """float32 [n]"""
    episode: int
    """branches of one episode are one sequence to the loss"""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class LossInputs:
    """Per-branch arrays of one micro-batch and the denominators of the whole batch."""

    old_logp: Array
    """float32 [S, L]"""
    advantages: Array
    """float32 [S, L]"""
    weights: Array
    """float32 [S, L]"""
    sequence_tokens: Array
    """float32 [S]: sum of weights over the branch's whole episode"""
    num_sequences: Array
    """float32 []"""
    num_tokens: Array
    """float32 []"""
    temperature: Array
    """float32 []"""


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    masters: Any
    """name -> float32 array"""
    optimizer: Any
    step: Any
    """int32 []: optimizer steps taken"""


def log_probs(definition: Definition, params: Params, forest: Forest, temperature: jax.Array) -> jax.Array:
    """Log-prob of each branch's trained tokens, `[S, L]` (0 where there is none); each is read at its parent."""
    model = definition.bind(params)
    hidden = model(jnp.asarray(forest.tokens), jnp.asarray(forest.positions), ForestContext(forest.blocks, model.dtype))
    B, T, _ = hidden.shape
    at_parent = jnp.take_along_axis(hidden, forest.read[..., None], axis=1)
    used = jnp.zeros(B * T, bool).at[jnp.where(forest.mask, forest.index, B * T)].set(True, mode="drop").reshape(B, T)
    chunk = next(c for c in range(min(LOGITS_CHUNK, T), 0, -1) if T % c == 0)
    logp = token_log_probs(model, at_parent, jnp.asarray(forest.target), temperature, used, chunk).reshape(B * T)
    return jnp.where(forest.mask, jnp.take(logp, forest.index), 0.0)


class Trainer:
    """Holds masters, optimizer state and the two compiled programs of a step.

    Args:
        masters: stacked float32 weights, placed by `rules` on `mesh`.
        loss: name in `rl.losses.LOSSES`; `loss_options` are its keyword options.
    """

    def __init__(
        self,
        model: ModelConfig,
        masters: Mapping[str, jax.Array],
        *,
        layout: Layout,
        optimizer: OptimizerConfig,
        loss: str,
        dtype: DTypeLike,
        remat: str,
        mesh: Mesh,
        rules: Rules,
        loss_options: Mapping[str, float] | None = None,
    ):
        if loss not in LOSSES:
            raise ValueError(f"trainer.loss: {loss!r} is unknown; use one of {sorted(LOSSES)}")
        given = set(loss_options or {})
        options = {p.name: p.default for p in inspect.signature(LOSSES[loss]).parameters.values() if p.kind is p.KEYWORD_ONLY}
        if unknown := sorted(given - options.keys()):
            raise ValueError(f"trainer.loss_options: {loss!r} does not know {unknown}; its options are {sorted(options)}")
        if missing := [n for n, default in options.items() if default is inspect.Parameter.empty and n not in given]:
            raise ValueError(f"trainer.loss_options: {loss!r} needs {missing}; set them")
        ways = int(np.prod([mesh.shape.get(axis, 1) for axis in BATCH_AXES]))
        if layout.rows % ways:
            raise ValueError(
                f"trainer.rows: {layout.rows} rows cannot be split over {ways} devices on the axes {BATCH_AXES}; use a multiple"
            )
        self.definition = Definition(model, dtype, stacked=True, remat=remat)
        self.layout, self.loss, self.loss_options = layout, loss, dict(loss_options or {})
        self.optimizer = optimizer.build()
        self.shardings = rules.shardings(mesh, self.definition.weights)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        axes = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
        self._rows = NamedSharding(mesh, PartitionSpec(axes or None))
        like = abstract(self.definition.weights, np.float32, self.shardings)
        state = jax.eval_shape(self.optimizer.init, like)
        self._optimizer_shardings = optax.tree_map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            state,
            self.shardings,
            transform_non_params=lambda _: self._replicated,
        )
        init = jax.jit(self.optimizer.init, out_shardings=self._optimizer_shardings)
        step = jax.device_put(jnp.zeros((), jnp.int32), self._replicated)
        self.state = TrainState(dict(masters), init(dict(masters)), step)
        self._zeros = jax.jit(
            lambda: {name: jnp.zeros(weight.shape, jnp.float32) for name, weight in self.definition.weights.items()},
            out_shardings=self.shardings,
        )
        self._programs: dict[str, Any] = {}

    @property
    def step(self) -> int:
        return int(self.state.step)

    def state_shardings(self) -> TrainState:
        """Shardings of `state`, in its own structure."""
        return TrainState(self.shardings, self._optimizer_shardings, self._replicated)

    def accumulate(self, loss: str, masters: Params, grads: Params, forest: Forest, inputs: LossInputs):
        """Pure: adds one micro-batch's gradients to `grads`; returns them and the micro-batch's metric sums."""

        def share(params: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
            logp = log_probs(self.definition, params, forest, jnp.asarray(inputs.temperature))
            weights = jnp.asarray(inputs.weights)
            totals = Totals(inputs.num_sequences, inputs.num_tokens, jnp.asarray(inputs.sequence_tokens))
            options = self.loss_options if loss == self.loss else {}
            value, sums = LOSSES[loss](
                logp, jnp.asarray(inputs.old_logp), jnp.asarray(inputs.advantages), weights, totals, **options
            )
            if loss != "sft":
                sums |= mismatch(logp, jnp.asarray(inputs.old_logp), weights)
            return value, {**sums, "loss": value}

        new, sums = jax.grad(share, has_aux=True)(dict(masters))
        return {name: grads[name] + new[name] for name in new}, sums

    def update(self, state: TrainState, grads: Params) -> tuple[TrainState, dict[str, jax.Array]]:
        """Pure: one optimizer step; a gradient that is not finite changes nothing (`grad_norm` tells)."""
        norm = optax.tree.norm(dict(grads))
        updates, optimizer = self.optimizer.update(dict(grads), state.optimizer, state.masters)
        masters = optax.apply_updates(state.masters, updates)
        new = TrainState(masters, optimizer, state.step + 1)
        kept = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(norm), new, old), new, state)
        return kept, {"grad_norm": norm, "update_norm": optax.tree.norm(updates)}

    def lower(self, loss: str | None = None) -> dict[str, Any]:
        """The lowered programs of a step, over abstract arguments with the serving shardings."""
        loss = loss or self.loss
        masters = abstract(self.definition.weights, np.float32, self.shardings)
        state = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), self.state)
        one = Sample(
            ids=np.zeros(2, np.int32),
            weights=np.array([0, 1], np.float32),
            logprobs=np.zeros(2, np.float32),
            advantages=np.zeros(2, np.float32),
            episode=0,
        )
        [(forest, inputs)], _ = self.prepare([one], temperature=1.0)
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), (forest, inputs))
        accumulate = jax.jit(partial(self.accumulate, loss), donate_argnums=1, out_shardings=(self.shardings, self._replicated))
        update = jax.jit(self.update, donate_argnums=0, out_shardings=(self.state_shardings(), self._replicated))
        return {loss: accumulate.lower(masters, masters, *batch), "update": update.lower(state, masters)}

    def warm_up(self, loss: str | None = None) -> None:
        """Compiles the step's programs; after it a step compiles nothing."""
        for name, lowered in self.lower(loss).items():
            if name not in self._programs:
                self._programs[name] = lowered.compile()
        jax.block_until_ready(self._zeros())

    def prepare(self, samples: Sequence[Sample], *, temperature: float) -> tuple[list[tuple[Forest, LossInputs]], PackStats]:
        """Packs samples and puts the micro-batches on the devices."""
        branches = [Branch(sample.ids, sample.weights > 0) for sample in samples]
        micro_batches, stats = pack(branches, self.layout)
        tokens: dict[int, float] = {}
        for sample in samples:
            tokens[sample.episode] = tokens.get(sample.episode, 0.0) + float(sample.weights.sum())
        num_sequences = sum(1 for count in tokens.values() if count > 0)
        scalars = {
            "num_sequences": np.float32(num_sequences),
            "num_tokens": np.float32(sum(tokens.values())),
            "temperature": np.float32(temperature),
        }
        put = [(micro.forest, self._loss_inputs(micro, samples, tokens, scalars)) for micro in micro_batches]
        return [(self._put_forest(forest), jax.device_put(inputs, self._replicated)) for forest, inputs in put], stats

    def _loss_inputs(
        self, micro: MicroBatch, samples: Sequence[Sample], tokens: dict[int, float], scalars: dict[str, np.float32]
    ) -> LossInputs:
        shape = (self.layout.branches, self.layout.length)
        old_logp, advantages, weights = (np.zeros(shape, np.float32) for _ in range(3))
        sequence_tokens = np.zeros(shape[0], np.float32)
        for row, number in enumerate(micro.order):
            sample = samples[number]
            trained = np.nonzero(sample.weights > 0)[0]
            here = slice(0, len(trained))
            old_logp[row, here] = sample.logprobs[trained]
            advantages[row, here] = sample.advantages[trained]
            weights[row, here] = sample.weights[trained]
            sequence_tokens[row] = tokens[sample.episode]
        return LossInputs(old_logp=old_logp, advantages=advantages, weights=weights, sequence_tokens=sequence_tokens, **scalars)

    def _put_forest(self, forest: Forest) -> Forest:
        places = {f.name: self._replicated if f.name in ("index", "mask") else self._rows for f in fields(Forest)}
        return replace(forest, **{name: jax.device_put(getattr(forest, name), at) for name, at in places.items()})

    def train(self, samples: Sequence[Sample], *, temperature: float = 1.0, loss: str | None = None) -> dict[str, float]:
        """One optimizer step on these samples; returns its metrics.

        Raises:
            ValueError: a sample does not fit the layout (nothing has changed then).
            FloatingPointError: the loss or a gradient is not finite (the state has not changed).
        """
        loss = loss or self.loss
        assert loss in self._programs, f"warm_up({loss!r}) first"
        started = time.perf_counter()
        batches, stats = self.prepare(samples, temperature=temperature)
        packed = time.perf_counter()
        grads, totals = self._zeros(), []
        for forest, inputs in batches:
            grads, sums = self._programs[loss](self.state.masters, grads, forest, inputs)
            totals.append(sums)
        sums = _add_up([jax.device_get(sums) for sums in totals])
        advice = "not finite; lower the learning rate, and look at the step's rollouts"
        if not np.isfinite(sums["loss"]):
            raise FloatingPointError(f"loss is {sums['loss']} at step {self.step}: {advice}")
        self.state, norms = self._programs["update"](self.state, grads)
        norms = {name: float(value) for name, value in jax.device_get(norms).items()}
        if not np.isfinite(norms["grad_norm"]):
            raise FloatingPointError(f"grad_norm is {norms['grad_norm']} at step {self.step}: {advice}")
        return {
            **_means(sums),
            **norms,
            "tokens_in": float(stats.tokens_in),
            "tokens_kept": float(stats.tokens_kept),
            "compression": stats.compression,
            "padding": 1 - stats.tokens_kept / stats.slots,
            "micro_batches": float(len(batches)),
            "time/pack_s": packed - started,
            "time/train_s": time.perf_counter() - packed,
        }


def _add_up(shares: Sequence[Mapping[str, np.ndarray]]) -> dict[str, float]:
    """Sums over micro-batches; names that begin with max_ take the largest."""
    names = shares[0].keys()
    return {n: float((max if n.startswith("max_") else sum)(float(share[n]) for share in shares)) for n in names}


def _means(sums: dict[str, float]) -> dict[str, float]:
    """Sums over tokens become means; the loss, counts and maxima stay."""
    kept = {"loss", "tokens"}
    count = max(sums["tokens"], 1.0)
    return {n: value if n in kept or n.startswith("max_") else value / count for n, value in sums.items()}
