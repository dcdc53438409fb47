"""The device side of the engine: two families of compiled programs over the engine's state.

Legend: T tokens, S rows (sequences of a step), M key blocks of all rows.

`extend` computes a flat ragged mix of prefill chunks and decode tokens; `decode` runs up to a number of steps in a loop on
the device. Shapes come from small bucket tables and every program is compiled ahead of time, with the very shardings it is
called with: a shape that was not compiled is an error, not a pause.

A slot's newest token lives on the device, so that a step can be dispatched before the one before it is read: where the host
passes no token, the slot's is taken.
"""

import math
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from inference.batch import Decode, Extend, Shapes
from inference.config import EngineConfig
from inference.sampler import Sampled, Tables, count, empty_tables, prompt_log_probs, sample, set_row
from inference.types import MAX_TOP_LOGPROBS
from models.attention import Array
from models.config import ModelConfig
from models.gather import PagedBlocks
from models.paged import Need, PagedContext, choose
from models.router import Routing
from models.transformer import Definition
from sharding.reshard import abstract
from sharding.rules import Rules
from sharding.shards import Shards


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class State:
    """What stays on the device; donated to every program."""

    pool: list[Any]
    """a layer's pages each, as the attention backend keeps them"""
    last: Array
    """int32 [slots + 1]: newest token of each slot; -1 when it was the last. The last row is for padding"""
    tables: Tables


PACKED = 3 + 2 * MAX_TOP_LOGPROBS
"""values of one sampled token, as `_packed`"""


def _packed(sampled: Sampled) -> jax.Array:
    """int32 [PACKED, S], so that a step comes back in one transfer."""
    logprobs = jnp.stack([sampled.logprobs, sampled.logprobs_full])
    bits = jax.lax.bitcast_convert_type(jnp.concatenate([logprobs, sampled.top_logprobs.T]), jnp.int32)
    return jnp.concatenate([sampled.ids[None], bits[:2], sampled.top_ids.T, bits[2:]])


def _joined(packed: jax.Array, rows: jax.Array | None) -> jax.Array:
    """The same with rows of routing: int32 [...], their bytes after what was sampled."""
    if rows is None:
        return packed
    flat, width = rows.reshape(-1), 4 // rows.dtype.itemsize
    words = jax.lax.bitcast_convert_type(jnp.pad(flat, (0, -flat.size % width)).reshape(-1, width), jnp.int32)
    return jnp.concatenate([packed.reshape(-1), words])


class Runner:
    """Holds the device state and the compiled programs; weights are an argument of each call."""

    def __init__(
        self, model: ModelConfig, config: EngineConfig, dtype: DTypeLike, mesh: Mesh, rules: Rules, exact: bool = True
    ):
        self.config = config
        self.definition = Definition(model, dtype, stacked=False, exact=exact)
        self.dtype = np.dtype(dtype)
        self.shardings = rules.shardings(mesh, self.definition.weights)
        need = Need(
            model=model,
            numerics=self.definition.numerics,
            num_pages=config.num_pages,
            page_size=config.page_size,
            num_rows=max(config.slots),
            row_pages=config.max_context // config.page_size,
            mesh=mesh,
            rules=rules,
        )
        self.backend = choose(need, config.attention)
        self.shapes = Shapes(config, model, need.platform)
        self._outer = Shards.of(mesh, rules, self.definition.weights).replicated() if model.moe else Shards()
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._table_sharding = NamedSharding(mesh, rules.spec((None, "vocab"), "the sampler's tables"))
        self._state: State | None = None
        self._programs: dict[tuple, Any] = {}

    # ---- the device state

    def abstract_state(self) -> State:
        """Shapes, dtypes and shardings of the device state."""
        slots, V = self.config.max_slots, self.definition.config.vocab_size

        def split(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._table_sharding)

        tables = jax.tree.map(split, jax.eval_shape(partial(empty_tables, slots, V)))
        last = jax.ShapeDtypeStruct((slots + 1,), jnp.int32, sharding=self._replicated)
        pool = [self.backend.layer() for _ in range(self.definition.config.num_layers)]
        return State(pool=pool, last=last, tables=tables)

    def allocate(self) -> None:
        """An empty device state."""
        like = self.abstract_state()
        zeros = jax.jit(
            lambda: jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), like),
            out_shardings=jax.tree.map(lambda x: x.sharding, like),
        )
        self._state = zeros()

    def release(self) -> None:
        """Gives the memory of the device state back; `allocate` makes a new one."""
        self._state = None

    @property
    def released(self) -> bool:
        return self._state is None

    @property
    def state(self) -> State:
        assert self._state is not None, "the runner has no device state: allocate() first"
        return self._state

    # ---- the programs: pure functions

    def extend(self, params: Mapping[str, jax.Array], state: State, batch: Extend) -> tuple[tuple[jax.Array, ...], State]:
        """Compiled per T. Returns what was sampled, packed `[..., S]` (and the routing, `_joined`), and the log-probs of the
        prompt `[T]`, `[T, top]`."""
        model = self.definition.bind(params, outer=self._outer)
        newest = jnp.take(state.last, batch.slot)
        tokens = jnp.maximum(jnp.where(batch.tokens >= 0, batch.tokens, jnp.take(newest, batch.row)), 0)
        context = PagedContext(state.pool, batch.blocks, self.backend)
        hidden, routing = model.forward(tokens, batch.positions, context, batch.replay)
        at = jnp.take(batch.positions, batch.sampled) + 1
        logits = model.logits(jnp.take(hidden, batch.sampled, axis=0))
        sampled = sample(logits, at, batch.slot, batch.warp, state.tables, model.numerics)
        # The host does not know yet that a row's newest token was its last; what the row samples now means nothing.
        live = (batch.host_token | (newest >= 0)) & (batch.slot < self.config.max_slots)
        stopped = (sampled.ids[:, None] == batch.stop_ids).any(axis=1)
        last = state.last.at[batch.slot].set(jnp.where(live & ~stopped, sampled.ids, -1))
        tables = count(state.tables, batch.slot, sampled.ids, live)
        prompt = prompt_log_probs(model, hidden, batch.next_ids, batch.prompt_wanted, batch.prompt_top)
        return (_joined(_packed(sampled), self._rows(routing)), *prompt), State(pool=context.pool, last=last, tables=tables)

    def decode(self, params: Mapping[str, jax.Array], state: State, batch: Decode) -> tuple[tuple[jax.Array, ...], State]:
        """Compiled per (S, M). Returns packed samples `[decode_steps, ..., S]` (and the routing, `_joined`); those past a row's
        end, or past the last step, mean nothing."""
        model = self.definition.bind(params, outer=self._outer)
        S = batch.tokens.shape[0]
        size = self.config.page_size
        tokens = jnp.where(batch.tokens >= 0, batch.tokens, jnp.take(state.last, batch.slot))
        left = jnp.where(tokens >= 0, batch.left, 0)
        starts = jnp.arange(S + 1, dtype=jnp.int32)

        def go_on(carry: tuple) -> jax.Array:
            step, _, _, left, *_ = carry
            return (step < batch.steps) & (left > 0).any()

        def body(carry: tuple) -> tuple:
            step, tokens, positions, left, out, rows, pool, tables = carry
            live = left > 0
            at = jnp.where(live, positions, 0)
            page = jnp.take_along_axis(batch.table, (at // size)[:, None], axis=1)[:, 0]
            blocks = PagedBlocks(
                page=jnp.where(live, page, 0),
                offset=at % size,
                table=batch.table,
                starts=starts,
                lengths=jnp.where(live, at + 1, 0),
                num_rows=jnp.full((1,), S, jnp.int32),
                reads=(batch.reads(jnp.where(live, positions, -1)),),
            )
            context = PagedContext(pool, blocks, self.backend)
            hidden, routing = model.forward(jnp.maximum(tokens, 0), at, context)
            sampled = sample(model.logits(hidden), at + 1, batch.slot, batch.warp, tables, model.numerics)
            tables = count(tables, batch.slot, sampled.ids, live)
            stopped = (sampled.ids[:, None] == batch.stop_ids).any(axis=1)
            out = out.at[step].set(_packed(sampled))
            if rows is not None:
                rows = rows.at[step].set(self._rows(routing))
            tokens = jnp.where(live, jnp.where(stopped, -1, sampled.ids), tokens)
            left = jnp.where(live & ~stopped, left - 1, 0)
            return step + 1, tokens, positions + live, left, out, rows, context.pool, tables

        packed = jax.eval_shape(lambda: _packed(sample(*self._sample_like(S, batch, state.tables))))
        out = jnp.zeros((self.config.decode_steps, *packed.shape), packed.dtype)
        like = self.shapes.rows(S)
        rows = None if like is None else jnp.zeros((self.config.decode_steps, *like.shape), like.dtype)
        carry = (jnp.int32(0), tokens, batch.positions, left, out, rows, state.pool, state.tables)
        _, tokens, _, _, out, rows, pool, tables = jax.lax.while_loop(go_on, body, carry)
        last = state.last.at[batch.slot].set(tokens)
        return (_joined(out, rows),), State(pool=pool, last=last, tables=tables)

    def _rows(self, routing: Routing | None) -> jax.Array | None:
        """The experts of each token `[T, L, k]`, as they are recorded."""
        moe = self.definition.config.moe
        if routing is None or moe is None or not self.shapes.captures:
            return None
        return jnp.moveaxis(routing.ids, 0, 1).astype(moe.route_dtype)

    def _sample_like(self, S: int, batch: Decode, tables: Tables) -> tuple:
        logits = jnp.zeros((S, self.definition.config.vocab_size), jnp.float32)
        return logits, batch.positions, batch.slot, batch.warp, tables, self.definition.numerics

    def copy(self, state: State, source: jax.Array, target: jax.Array, num_pages: jax.Array) -> State:
        """Copies pages `source[i]` to `target[i]`, one after the other: a prefix that ends inside a page goes on in its own."""

        def one(i: jax.Array, pool: list[Any]) -> list[Any]:
            def copied(pages: jax.Array) -> jax.Array:
                page = jax.lax.dynamic_slice_in_dim(pages, source[i], 1)
                return jax.lax.dynamic_update_slice_in_dim(pages, page, target[i], axis=0)

            return jax.tree.map(copied, pool)

        pool = jax.lax.fori_loop(0, num_pages, one, state.pool)
        return State(pool=pool, last=state.last, tables=state.tables)

    def set_row(self, state: State, slot: jax.Array, counts: jax.Array, bias: jax.Array) -> State:
        """A slot's rows of the sampler's tables."""
        return State(pool=state.pool, last=state.last, tables=set_row(state.tables, slot, counts, bias))

    # ---- compiling and calling them

    def buckets(self) -> list[tuple]:
        """The programs that serving can need."""
        config = self.config
        extends = [("extend", T) for T in config.tokens]
        return [*extends, *(("decode", S, M) for S in config.slots for M in config.key_blocks(S)), ("copy",), ("set_row",)]

    def lower(self, bucket: tuple) -> Any:
        """The lowered program of one bucket, over abstract arguments with the serving shardings."""
        state = self.abstract_state()
        shardings = jax.tree.map(lambda x: x.sharding, state)

        def like(batch: Any) -> Any:
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated), batch)

        kind, *sizes = bucket
        if kind == "copy":
            pages = np.zeros(self.config.max_slots, np.int32)
            arguments = like((pages, pages, np.zeros((), np.int32)))
            return jax.jit(self.copy, donate_argnums=0, out_shardings=shardings).lower(state, *arguments)
        if kind == "set_row":
            rows = [np.zeros((), np.int32), *(np.zeros(table.shape[1], table.dtype) for table in jax.tree.leaves(state.tables))]
            return jax.jit(self.set_row, donate_argnums=0, out_shardings=shardings).lower(state, *like(rows))
        batch = self.shapes.extend(*sizes) if kind == "extend" else self.shapes.decode(*sizes)
        function: Callable = self.extend if kind == "extend" else self.decode
        params = abstract(self.definition.weights, self.dtype, self.shardings)
        outs = (self._replicated,) * (4 if kind == "extend" else 1)
        return jax.jit(function, donate_argnums=1, out_shardings=(outs, shardings)).lower(params, state, like(batch))

    def warm_up(self, params: Mapping[str, jax.Array]) -> int:
        """Compiles every program that serving can need, and calls it once with padding: a first call is slower than those
        after it. Returns how many were compiled."""
        compiled = self.compile()
        for kind, *sizes in self.buckets() if compiled else ():
            if kind == "copy":
                self.copy_pages([])
            elif kind == "set_row":
                tables = jax.tree.leaves(self.state.tables)
                self.set_slot(self.config.max_slots, *(np.zeros(table.shape[1], table.dtype) for table in tables))
            else:
                self.run(params, self.shapes.extend(*sizes) if kind == "extend" else self.shapes.decode(*sizes))
        jax.block_until_ready(self.state.last)
        return compiled

    def compile(self) -> int:
        """Compiles what is missing of the programs; returns how many."""
        missing = [bucket for bucket in self.buckets() if bucket not in self._programs]
        with ThreadPoolExecutor(2) as threads:
            compiled = threads.map(lambda lowered: lowered.compile(), [self.lower(bucket) for bucket in missing])
            self._programs.update(zip(missing, compiled, strict=True))
        return len(missing)

    def _program(self, bucket: tuple) -> Any:
        assert bucket in self._programs, f"{bucket} was not compiled at warm-up"
        return self._programs[bucket]

    def run(self, params: Mapping[str, jax.Array], batch: Extend | Decode) -> tuple[jax.Array, ...]:
        """Dispatches one step; the results are on their way to the host."""
        bucket = batch.bucket
        out, self._state = self._program(bucket)(params, self.state, jax.device_put(batch, self._replicated))
        out[0].copy_to_host_async()
        return out

    def parted(self, out: np.ndarray, batch: Extend | Decode) -> tuple[np.ndarray, np.ndarray | None]:
        """What `run` gave first -> what was sampled, int32 [PACKED, S] or [decode_steps, PACKED, S], and the routing of all
        tokens `[T, L, k]` or `[decode_steps, S, L, k]` where it is captured."""
        S = batch.slot.shape[0]
        like = self.shapes.rows(batch.tokens.shape[0])
        if like is None:
            return out, None
        steps = (self.config.decode_steps,) if isinstance(batch, Decode) else ()
        n, shape = math.prod((*steps, PACKED, S)), (*steps, *like.shape)
        return out[:n].reshape(*steps, PACKED, S), out[n:].view(like.dtype)[: math.prod(shape)].reshape(shape)

    def check_params(self, params: Mapping[str, jax.Array]) -> None:
        """Refuses a tree that is not exactly the engine's.

        Raises:
            ValueError: lists every name, shape, dtype and sharding that differs.
        """
        weights, dtype, shardings = self.definition.weights, self.dtype, self.shardings
        errors = [f"missing {name}" for name in weights.keys() - params.keys()]
        errors += [f"unknown {name}" for name in params.keys() - weights.keys()]
        for name in weights.keys() & params.keys():
            array, shape = params[name], weights[name].shape
            if array.shape != shape or array.dtype != dtype:
                errors.append(f"{name} is {array.dtype}{list(array.shape)}, not {dtype}{list(shape)}")
            elif not array.sharding.is_equivalent_to(shardings[name], len(shape)):
                errors.append(f"{name} is placed as {array.sharding}, not {shardings[name]}: reshard it")
        if errors:
            raise ValueError("params: " + "; ".join(sorted(errors)))

    def copy_pages(self, pairs: list[tuple[int, int]]) -> None:
        """Copies pages, (source, target) each, in this order; at most max_slots of them."""
        pages = np.zeros((2, self.config.max_slots), np.int32)
        pages[:, : len(pairs)] = np.asarray(pairs, np.int32).T
        arguments = jax.device_put((*pages, np.int32(len(pairs))), self._replicated)
        self._state = self._program(("copy",))(self.state, *arguments)

    def set_slot(self, slot: int, counts: np.ndarray, bias: np.ndarray) -> None:
        """Fills a slot's rows of the sampler's tables."""
        rows = jax.device_put((np.int32(slot), counts, bias), self._replicated)
        self._state = self._program(("set_row",))(self.state, *rows)
