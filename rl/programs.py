"""The device side of a step: pure functions, and their compiled programs.

Legend: S branches of a micro-batch, L trained tokens of the longest branch.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models.layers import accumulator
from models.routes import not_recorded
from models.transformer import Definition, Params
from rl.batch import Totals, loss_batch
from rl.branches import Branch
from rl.forest import Forest, Layout
from rl.forward import Reading, forest_specs, read_rows
from rl.loss_batch import LossBatch
from rl.losses import Readout
from rl.objective import Objective
from rl.optimizer import OptimizerConfig
from rl.routes import NO_OPTIONS, RouterConfig, Routes
from rl.tries import plan
from sharding.reshard import abstract
from sharding.rules import Rules
from sharding.shards import ROWS, Shards


@jax.tree_util.register_dataclass
@dataclass
class TrainState:
    masters: Any
    """name -> float32 array"""
    optimizer: Any
    """of the weights that are not frozen"""
    step: Any
    """int32 []: optimizer steps taken"""


class Programs:
    """What a step runs on the devices, under one mesh and one layout.

    Args:
        objectives: by name; all have one readout.
    """

    def __init__(
        self,
        definition: Definition,
        layout: Layout,
        optimizer: OptimizerConfig,
        objectives: Mapping[str, Objective],
        mesh: Mesh,
        rules: Rules,
        router: RouterConfig = NO_OPTIONS,
    ):
        router.check(definition.config)
        self.router = router
        self.shards = Shards.of(mesh, rules, definition.weights)
        ways = int(np.prod([mesh.shape[axis] for axis in self.shards.rows]))
        if layout.rows % ways:
            raise ValueError(
                f"trainer.rows: {layout.rows} rows cannot be split over {ways} devices on the axes {ROWS}; use a multiple"
            )
        parts = int(np.prod([mesh.shape[axis] for axis in self.shards.context]))
        if layout.shards != parts:
            raise ValueError(f"layout: is for {layout.shards} devices a row, but the axis 'context' has {parts}; use {parts}")
        readouts: list[Readout] = [objective.readout for objective in objectives.values()]
        assert len(set(readouts)) == 1, readouts
        self.readout: Readout = readouts[0]
        self.definition, self.layout, self.objectives, self.mesh = definition, layout, objectives, mesh
        self.optimizer = optimizer.build()
        self.trained = optimizer.trained(definition.weights)
        self.accum = accumulator(definition.dtype)
        self.shardings = rules.shardings(mesh, definition.weights)
        self.replicated = NamedSharding(mesh, PartitionSpec())
        self.grad_shardings = {name: self.shardings[name] for name in self.trained}
        like = abstract({name: definition.weights[name] for name in self.trained}, self.accum, self.shardings)
        self._optimizer_shardings = optax.tree_map_params(
            self.optimizer,
            lambda _, sharding: sharding,
            jax.eval_shape(self.optimizer.init, like),
            self.grad_shardings,
            transform_non_params=lambda _: self.replicated,
        )
        self.offload = optimizer.offload
        self.zeros = jax.jit(
            lambda: {name: jnp.zeros(x.shape, self.accum) for name, x in like.items()}, out_shardings=self.grad_shardings
        )
        """float32 gradients of nothing"""
        self._compiled: dict[str, Any] = {}

    def init(self, masters: Params) -> TrainState:
        """The state before the first step."""
        init = jax.jit(self.optimizer.init, out_shardings=self.state_shardings().optimizer)
        return TrainState(dict(masters), init({name: masters[name] for name in self.trained}), self.put(np.zeros((), np.int32)))

    def state_shardings(self) -> TrainState:
        """Where the state is between updates."""
        kept = self._optimizer_shardings
        if self.offload:
            kept = jax.tree.map(lambda sharding: sharding.with_memory_kind("pinned_host"), kept)
        return TrainState(self.shardings, kept, self.replicated)

    # ---- pure functions

    def accumulate(self, loss: str, params: Params, grads: Params, forest: Forest, batch: LossBatch, temperature: jax.Array):
        """One micro-batch's gradients added to `grads`, and its metric sums."""

        def share(trained: Params) -> tuple[jax.Array, dict[str, jax.Array]]:
            reading = self.score({**params, **trained}, forest, temperature)
            value, sums = self.objectives[loss](reading.out, batch, entropy=reading.entropy)
            routers, router_sums = self.routers(reading, forest.routes)
            return value if routers is None else value + routers, {**sums, **router_sums}

        new, sums = jax.grad(share, has_aux=True)({name: params[name] for name in self.trained})
        return {name: grads[name] + new[name] for name in new}, sums

    def score(self, params: Params, forest: Forest, temperature: jax.Array) -> Reading:
        """Readings of one micro-batch, `[S, L]`."""
        return read_rows(self.definition, params, forest, jnp.asarray(temperature), self.readout, self.shards)

    def routers(self, reading: Reading, routes: Routes | None) -> tuple[jax.Array | None, dict[str, jax.Array]]:
        """This share of the routers' loss, and metric sums."""
        if routes is None or reading.routed is None:
            return None, {}
        value = self.router.loss(reading.routed.sums, routes.total)
        return value, reading.routed.sums | ({} if value is None else {"router/loss": value})

    def loss_grad(self, loss: str, reading: Reading, batch: LossBatch) -> tuple[jax.Array, dict[str, jax.Array]]:
        """Cotangent of each reading, and metric sums."""

        def share(out: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
            return self.objectives[loss](out, batch, entropy=jnp.asarray(reading.entropy))

        return jax.grad(share, has_aux=True)(jnp.asarray(reading.out))

    def pull(self, params: Params, grads: Params, forest: Forest, temperature: jax.Array, out_grads: jax.Array):
        """`grads` with one micro-batch's added, given the cotangent of each of its readings; and the routers' metric sums."""

        def forward(trained: Params):
            reading = self.score({**params, **trained}, forest, temperature)
            routers, sums = self.routers(reading, forest.routes)
            return (reading.out, routers), sums

        (_, routers), transpose, sums = jax.vjp(forward, {name: params[name] for name in self.trained}, has_aux=True)
        [new] = transpose((jnp.asarray(out_grads), jax.tree.map(jnp.ones_like, routers)))
        return {name: grads[name] + new[name] for name in new}, sums

    def update(self, state: TrainState, grads: Params) -> tuple[TrainState, dict[str, jax.Array]]:
        """One optimizer step; a gradient that is not finite changes nothing (`grad_norm` tells)."""
        norm = optax.tree.norm(dict(grads))
        if self.offload:
            state = replace(state, optimizer=jax.device_put(state.optimizer, self._optimizer_shardings))
        trained = {name: state.masters[name] for name in self.trained}
        updates, optimizer = self.optimizer.update(dict(grads), state.optimizer, trained)
        masters: Any = optax.apply_updates(trained, updates)
        new = TrainState({**state.masters, **masters}, optimizer, state.step + 1)
        kept = jax.tree.map(lambda new, old: jnp.where(jnp.isfinite(norm), new, old), new, state)
        return kept, {"grad_norm": norm, "update_norm": optax.tree.norm(updates)}

    # ---- compiled

    def lower(self, loss: str, two_passes: bool, reading_only: bool = False) -> dict[str, Any]:
        """The lowered programs of a step by name."""
        return {name: traced.lower() for name, traced in self.trace(loss, two_passes, reading_only).items()}

    def trace(self, loss: str, two_passes: bool, reading_only: bool = False) -> dict[str, Any]:
        """The traced programs, over abstract arguments with the shardings of a step: no device is asked for anything."""

        def like(x: Any, sharding: Any = self.replicated) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(np.shape(x), x.dtype, sharding=sharding)

        params = abstract(self.definition.weights, self.accum, self.shardings)
        grads = {name: params[name] for name in self.trained}
        optimizer = jax.tree.map(like, jax.eval_shape(self.optimizer.init, grads), self.state_shardings().optimizer)
        state = TrainState(params, optimizer, jax.ShapeDtypeStruct((), np.int32, sharding=self.replicated))
        model = self.definition.config
        rows = None if model.moe is None else np.zeros_like(not_recorded(2, model))
        one = plan([Branch(np.zeros(2, np.int32), np.array([False, True]), rows)], replace(self.layout, path=0), 3)
        forest = one.micro_batches[0].forest
        scored = jax.tree.map(like, forest, self.forest_shardings(forest))
        forest = one.routed(self.router.of_step(one.routes, model)).micro_batches[0].forest
        forest = jax.tree.map(like, forest, self.forest_shardings(forest))
        batch = jax.tree.map(like, loss_batch([], [], Totals({}, 0), self.layout, 0, self.objectives[loss].needs))
        temperature = like(np.float32(1))
        matrix = jax.ShapeDtypeStruct((self.layout.branches, self.layout.length), self.accum, sharding=self.replicated)

        def jit(function: Callable, donate: tuple[int, ...] = (), out: Any = self.replicated) -> Any:
            return jax.jit(function, donate_argnums=donate, out_shardings=out)

        both = (self.grad_shardings, self.replicated)
        traced = {"score": jit(self.score).trace(params, scored, temperature)}
        if reading_only:
            return traced
        traced |= {
            loss: jit(partial(self.accumulate, loss), (1,), both).trace(params, grads, forest, batch, temperature),
            "update": jit(self.update, (0,), (self.state_shardings(), self.replicated)).trace(state, grads),
        }
        if two_passes:
            traced[f"{loss} of readings"] = jit(partial(self.loss_grad, loss)).trace(Reading(matrix, matrix), batch)
            traced["pull"] = jit(self.pull, (1,), both).trace(params, grads, forest, temperature, matrix)
        return traced

    def warm_up(self, loss: str, two_passes: bool, reading_only: bool = False) -> None:
        """Compiles them; after it nothing compiles."""
        for name, lowered in self.lower(loss, two_passes, reading_only).items():
            if name not in self._compiled:
                self._compiled[name] = lowered.compile()
        jax.block_until_ready(self.zeros())

    def __getitem__(self, name: str) -> Callable[..., Any]:
        """A compiled program."""
        assert name in self._compiled, f"{name!r} is not compiled: warm_up() first"
        return self._compiled[name]

    # ---- arguments

    def put(self, tree: Any) -> Any:
        """On every device."""
        return jax.device_put(tree, self.replicated)

    def put_forest(self, forest: Forest, step: bool = False) -> Forest:
        """Each row where it is computed; `step` says whether with what the routers' losses need."""
        if forest.routes is not None and not step:
            forest = replace(forest, routes=replace(forest.routes, load=None))
        return jax.device_put(forest, self.forest_shardings(forest))

    def forest_shardings(self, forest: Forest) -> Forest:
        specs = forest_specs(self.shards, forest.routes)
        return jax.tree.map(
            lambda spec: NamedSharding(self.mesh, spec), specs, is_leaf=lambda leaf: isinstance(leaf, PartitionSpec)
        )
