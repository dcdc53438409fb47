"""The device side of the engine: two families of compiled programs over the page pool.

Legend: T tokens, S engine slots, N query blocks, Q queries of a block, C keys of a block, K kv heads, P pages, h head dim.

`extend` computes a flat ragged mix of prefill chunks and decode tokens; `decode` runs up to a number of steps in a loop on
the device. Shapes come from small bucket tables and every program is compiled ahead of time, with the very shardings it is
called with: a shape that was not compiled is an error, not a pause.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from inference.sampler import Warp, sample
from inference.types import MAX_STOP_IDS
from models.attention import KEY_BLOCK, Array, PagedBlocks, PagedContext, pool_dtype
from models.config import ModelConfig
from models.transformer import Definition
from sharding.reshard import abstract
from sharding.rules import Rules

QUERY_BLOCK = 16
MIN_ROWS = 8
"""fewest rows of any product: fewer are slower (measured), and a single one has other bits"""

Pool = list[tuple[jax.Array, jax.Array]]


def powers(low: int, high: int) -> tuple[int, ...]:
    """low, 2 low, 4 low ... up to and including `high`."""
    sizes = []
    while low < high:
        sizes.append(low)
        low *= 2
    return (*sizes, high)


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """Sizes of an engine; all are fixed at start."""

    max_context: int
    """most tokens of a sequence, prompt and sampled; a multiple of 128"""
    max_slots: int = 64
    """sequences that run at once"""
    num_pages: int = 1024
    page_size: int = 16
    """tokens of a page: what the prefix cache shares is whole pages"""
    tokens_per_step: int = 512
    """most tokens of one extend"""
    decode_steps: int = 8
    """most decode steps of one call"""
    context_buckets: tuple[int, ...] = ()
    """key widths to compile for (default: 256, 512 ... max_context)"""
    slot_buckets: tuple[int, ...] = ()
    """decode batch sizes to compile for (default: 8, 16 ... max_slots)"""

    def __post_init__(self) -> None:
        for name in ("max_context", "max_slots", "num_pages", "page_size", "tokens_per_step", "decode_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"engine.{name}: must be at least 1, got {getattr(self, name)}")
        if KEY_BLOCK % self.page_size:
            raise ValueError(f"engine.page_size: must divide {KEY_BLOCK}, got {self.page_size}")
        for size in (self.max_context, *self.context_buckets):
            if size % KEY_BLOCK:
                raise ValueError(f"engine.max_context and context_buckets: {size} is not a multiple of {KEY_BLOCK}")
        for name, sizes, most in (
            ("context_buckets", self.contexts, self.max_context),
            ("slot_buckets", self.slots, max(MIN_ROWS, self.max_slots)),
        ):
            if sizes != tuple(sorted(set(sizes))) or sizes[-1] != most:
                raise ValueError(f"engine.{name}: {sizes} must increase and end at {most}")
        if self.slots[0] < MIN_ROWS:
            raise ValueError(f"engine.slot_buckets: {self.slots} must start at {MIN_ROWS} or more")
        if self.tokens_per_step < self.max_slots:
            raise ValueError(
                f"engine.tokens_per_step: {self.tokens_per_step} is less than max_slots ({self.max_slots}); "
                f"each running sequence needs room for one token"
            )

    @property
    def contexts(self) -> tuple[int, ...]:
        return self.context_buckets or powers(2 * KEY_BLOCK, self.max_context)

    @property
    def slots(self) -> tuple[int, ...]:
        return self.slot_buckets or powers(MIN_ROWS, max(MIN_ROWS, self.max_slots))

    @property
    def tokens(self) -> tuple[int, ...]:
        """Sizes of extend: a quarter and the whole of the step's budget."""
        whole = max(MIN_ROWS, self.tokens_per_step)
        return (max(MIN_ROWS, whole // 4), whole) if whole >= 4 * MIN_ROWS else (whole,)


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Extend:
    tokens: Array
    """int32 [T]"""
    positions: Array
    """int32 [T]"""
    blocks: PagedBlocks
    rows: Array
    """int32 [S]: the tokens after which one is sampled"""
    warp: Warp


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Decode:
    tokens: Array
    """int32 [S]: each sequence's newest token"""
    positions: Array
    """int32 [S]: its position; -1 for an empty slot"""
    table: Array
    """int32 [S, C / page size]"""
    left: Array
    """int32 [S]: tokens it may still sample"""
    stop_ids: Array
    """int32 [S, MAX_STOP_IDS], padded with -1"""
    warp: Warp
    steps: Array
    """int32 []: most steps"""
    until_finished: Array
    """bool []: return as soon as any sequence finishes, because others wait for its slot"""


def _packed(ids: jax.Array, drawn: jax.Array, full: jax.Array) -> jax.Array:
    """int32 [3, S], so that a step comes back in one transfer."""
    bits = (jax.lax.bitcast_convert_type(x.astype(jnp.float32), jnp.int32) for x in (drawn, full))
    return jnp.stack([ids, *bits])


class Runner:
    """Holds the page pool and the compiled programs; weights are an argument of each call."""

    def __init__(self, model: ModelConfig, config: EngineConfig, dtype: DTypeLike, mesh: Mesh, rules: Rules):
        self.config = config
        self.definition = Definition(model, dtype, stacked=False)
        self.dtype = np.dtype(dtype)
        self.shardings = rules.shardings(mesh, self.definition.weights)
        self._replicated = NamedSharding(mesh, PartitionSpec())
        self._pool_sharding = NamedSharding(mesh, rules.spec(("kv_heads", None, None, None), "the page pool"))
        self._pool_dtype = pool_dtype(dtype)
        self._pool_shape = (model.num_kv_heads, config.num_pages, config.page_size, model.head_dim)
        self.pool: Pool = jax.jit(self._empty, out_shardings=self._pool_sharding)()
        self._programs: dict[tuple, Any] = {}

    def _empty(self) -> Pool:
        layers = range(self.definition.config.num_layers)
        return [(jnp.zeros(self._pool_shape, self._pool_dtype), jnp.zeros(self._pool_shape, self._pool_dtype)) for _ in layers]

    def extend(self, params: Mapping[str, jax.Array], pool: Pool, batch: Extend) -> tuple[jax.Array, Pool]:
        """Pure; compiled per (T, C)."""
        model = self.definition.bind(params)
        context = PagedContext(pool, batch.blocks, self.dtype)
        hidden = model(batch.tokens, batch.positions, context)
        logits = model.logits(jnp.take(hidden, batch.rows, axis=0))
        return _packed(*sample(logits, jnp.take(batch.positions, batch.rows) + 1, batch.warp)), context.pool

    def decode(self, params: Mapping[str, jax.Array], pool: Pool, batch: Decode) -> tuple[jax.Array, Pool]:
        """Pure; compiled per (S, C). Rows of the result past a sequence's end, or past the last step, mean nothing."""
        model = self.definition.bind(params)
        S = batch.tokens.shape[0]
        size = self.config.page_size
        places = jnp.arange(S, dtype=jnp.int32)

        def go_on(state: tuple) -> jax.Array:
            step, _, _, left, _, _ = state
            finished = ((left == 0) & (batch.left > 0)).any()
            return (step < batch.steps) & (left > 0).any() & ~(batch.until_finished & finished)

        def body(state: tuple) -> tuple:
            step, tokens, positions, left, out, pool = state
            live = left > 0
            at = jnp.where(live, positions, 0)
            page = jnp.take_along_axis(batch.table, (at // size)[:, None], axis=1)[:, 0]
            blocks = PagedBlocks(
                page=jnp.where(live, page, 0),
                offset=at % size,
                query=places[:, None],
                position=jnp.where(live, positions, -1)[:, None],
                table=batch.table,
                slot=places,
            )
            context = PagedContext(pool, blocks, self.dtype)
            hidden = model(tokens, at, context)
            ids, drawn, full = sample(model.logits(hidden), at + 1, batch.warp)
            stopped = (ids[:, None] == batch.stop_ids).any(axis=1)
            left = jnp.where(live, jnp.where(stopped, 0, left - 1), 0)
            out = out.at[step].set(_packed(ids, drawn, full))
            return step + 1, jnp.where(live, ids, tokens), positions + live, left, out, context.pool

        out = jnp.zeros((self.config.decode_steps, 3, S), jnp.int32)
        state = (jnp.int32(0), batch.tokens, batch.positions, batch.left, out, pool)
        *_, out, pool = jax.lax.while_loop(go_on, body, state)
        return out, pool

    def _greedy(self, S: int) -> Warp:
        return Warp(
            temperature=np.zeros(S, np.float32),
            top_k=np.zeros(S, np.int32),
            top_p=np.ones(S, np.float32),
            min_p=np.zeros(S, np.float32),
            seed=np.zeros(S, np.uint32),
        )

    def empty_extend(self, T: int, C: int) -> Extend:
        """An extend of padding only; the engine fills it in."""
        size, S = self.config.page_size, max(MIN_ROWS, self.config.max_slots)
        N = -(-T // QUERY_BLOCK) + self.config.max_slots
        zeros = np.zeros(T, np.int32)
        blocks = PagedBlocks(
            page=zeros.copy(),
            offset=zeros.copy(),
            query=np.zeros((N, QUERY_BLOCK), np.int32),
            position=np.full((N, QUERY_BLOCK), -1, np.int32),
            table=np.zeros((N, C // size), np.int32),
            slot=zeros.copy(),
        )
        rows = np.zeros(S, np.int32)
        return Extend(tokens=zeros.copy(), positions=zeros.copy(), blocks=blocks, rows=rows, warp=self._greedy(S))

    def empty_decode(self, S: int, C: int) -> Decode:
        """A decode of empty slots only; the engine fills it in."""
        return Decode(
            tokens=np.zeros(S, np.int32),
            positions=np.full(S, -1, np.int32),
            table=np.zeros((S, C // self.config.page_size), np.int32),
            left=np.zeros(S, np.int32),
            stop_ids=np.full((S, MAX_STOP_IDS), -1, np.int32),
            warp=self._greedy(S),
            steps=np.zeros((), np.int32),
            until_finished=np.zeros((), bool),
        )

    def lower(self, kind: str, size: int, C: int) -> Any:
        """The lowered program of one bucket, over abstract arguments with the serving shardings."""
        batch = self.empty_extend(size, C) if kind == "extend" else self.empty_decode(size, C)
        like = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=self._replicated), batch)
        pool = [(jax.ShapeDtypeStruct(self._pool_shape, self._pool_dtype, sharding=self._pool_sharding),) * 2] * len(self.pool)
        params = abstract(self.definition.weights, self.dtype, self.shardings)
        out = (self._replicated, [(self._pool_sharding,) * 2] * len(self.pool))
        function = self.extend if kind == "extend" else self.decode
        return jax.jit(function, donate_argnums=1, out_shardings=out).lower(params, pool, like)

    def warm_up(self) -> int:
        """Compiles every program that serving can need; returns how many."""
        buckets = [("extend", T, C) for T in self.config.tokens for C in self.config.contexts]
        buckets += [("decode", S, C) for S in self.config.slots for C in self.config.contexts]
        missing = [bucket for bucket in buckets if bucket not in self._programs]
        with ThreadPoolExecutor(2) as threads:
            compiled = threads.map(lambda lowered: lowered.compile(), [self.lower(*bucket) for bucket in missing])
            self._programs.update(zip(missing, compiled, strict=True))
        return len(missing)

    def run(self, params: Mapping[str, jax.Array], batch: Extend | Decode) -> np.ndarray:
        """Runs one step on the pool. The result is `[3, S]` for an extend, `[decode_steps, 3, S]` for a decode."""
        if isinstance(batch, Extend):
            bucket = ("extend", batch.tokens.shape[0], batch.blocks.table.shape[1] * self.config.page_size)
        else:
            bucket = ("decode", batch.tokens.shape[0], batch.table.shape[1] * self.config.page_size)
        assert bucket in self._programs, f"{bucket} was not compiled at warm-up"
        out, self.pool = self._programs[bucket](dict(params), self.pool, jax.device_put(batch, self._replicated))
        return np.asarray(out)
