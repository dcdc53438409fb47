"""Paged attention: which backend writes and reads the page pool on which platform, and what each can do.

Legend: T flat tokens of a step, S rows (sequences of the step), P pages, H query heads, K kv heads, h head dim.

All backends take one flat mix of prefill and decode tokens. `ragged` is the Pallas kernel for TPU that jax ships; it keeps keys
and values in one array, so that a page is one copy. `gather` is plain XLA and the reference; it is what GPUs get too, as no
kernel for them has been checked.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from absl import logging
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from models import gather
from models.config import ModelConfig
from models.gather import PagedBlocks
from models.numerics import Numerics
from sharding.rules import Rules

Layer = Any
"""one layer's part of the page pool: arrays whose first dim is pages, as `Backend.layer` describes them"""

BLOCK_KEYS, BLOCK_QUERIES = 512, 32
"""what `ragged` computes at a time; not tuned (no TPU was at hand), compiled for v5e, v5p, v6e with 1 to 32 kv heads a chip"""
SCALAR_BYTES = (1 << 20) - (16 << 10)
"""a TPU core's scalar memory, less what `ragged` needs besides the block table"""


@dataclass(frozen=True, kw_only=True)
class Need:
    """What an engine asks of its attention."""

    model: ModelConfig
    numerics: Numerics
    num_pages: int
    page_size: int
    num_rows: int
    """most sequences of a step"""
    row_pages: int
    """most pages of a sequence"""
    mesh: Mesh
    rules: Rules

    @property
    def platform(self) -> str:
        """Where it will run: the mesh's devices may be of a machine that is only compiled for."""
        return self.mesh.devices.flat[0].platform

    def spec(self, *dims: str | None) -> PartitionSpec:
        return self.rules.spec(dims, "the page pool")


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """Where a backend runs and what it computes; None is any."""

    platforms: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    head_dims: tuple[int, ...] | None = None

    def lacks(self, need: Need) -> list[str]:
        dtype, head_dim = need.numerics.dtype.name, need.model.head_dim
        return [
            f"it is for {what} {' and '.join(map(str, can))}, not {asked}"
            for what, can, asked in (
                ("platform", self.platforms, need.platform),
                ("model.dtype", self.dtypes, dtype),
                ("head dim", self.head_dims, head_dim),
            )
            if can is not None and asked not in can
        ]


class Backend(Protocol):
    """Paged attention of one engine."""

    name: str
    abilities: Abilities

    def __init__(self, need: Need): ...

    @staticmethod
    def lacks(need: Need) -> list[str]:
        """Why it cannot do what is needed, besides its abilities; each with what to change."""
        ...

    def layer(self) -> Layer:
        """Shapes, dtypes and shardings of one layer's pool."""
        ...

    def write(self, layer: Layer, k: jax.Array, v: jax.Array, blocks: PagedBlocks) -> Layer:
        """Puts the step's keys and values `[T, K, h]` into their pages."""
        ...

    def attend(self, layer: Layer, q: jax.Array, blocks: PagedBlocks) -> jax.Array:
        """`[T, H, h]` -> `[T, H * h]`; tokens of no row mean nothing, but are finite."""
        ...


class Gather:
    """Plain XLA (`models/gather.py`)."""

    name = "gather"
    abilities = Abilities()

    def __init__(self, need: Need):
        self._need = need

    @staticmethod
    def lacks(need: Need) -> list[str]:
        return []

    def layer(self) -> Layer:
        need = self._need
        sharding = NamedSharding(need.mesh, need.spec(None, "kv_heads", None, None))
        shape = need.num_pages, need.model.num_kv_heads, need.page_size, need.model.head_dim
        return (jax.ShapeDtypeStruct(shape, gather.pool_dtype(need.numerics.dtype), sharding=sharding),) * 2

    def write(self, layer: Layer, k: jax.Array, v: jax.Array, blocks: PagedBlocks) -> Layer:
        return gather.write(layer, k, v, blocks, self._need.numerics.dtype)

    def attend(self, layer: Layer, q: jax.Array, blocks: PagedBlocks) -> jax.Array:
        return gather.attend(layer, q, blocks, self._need.numerics)


class RaggedKernel:
    """jax's ragged paged attention (version 1). Each chip computes its own heads.

    A layer is `[P, page size, 2 K, h]`, keys and values in turn. The rows of a step that have tokens come first.
    """

    name = "ragged"
    abilities = Abilities(platforms=("tpu",), dtypes=("bfloat16",), head_dims=(128,))

    def __init__(self, need: Need):
        self._need = need
        self._pool = need.spec(None, None, "kv_heads", None)
        self._heads = need.spec(None, "kv_heads", None)

    @staticmethod
    def lacks(need: Need) -> list[str]:
        reasons = []
        if need.rules.table.get("heads") != need.rules.table.get("kv_heads"):
            reasons.append("a chip needs the keys of its own query heads: map heads and kv_heads to one axis in engine.rules")
        sharding = NamedSharding(need.mesh, need.spec("kv_heads"))
        (heads,) = sharding.shard_shape((need.model.num_kv_heads,))
        if heads not in (1, 2, 4) and heads % 8:
            reasons.append(f"a chip has 1, 2, 4 or a multiple of 8 kv heads, not {heads}: change engine.mesh")
        table = 4 * -(-need.num_rows // 8) * 8 * -(-need.row_pages // 128) * 128  # in tiles of 8 x 128
        if table > SCALAR_BYTES:
            reasons.append(
                f"a block table of {need.num_rows} rows and {need.row_pages} pages takes {table} of {SCALAR_BYTES} bytes of "
                f"scalar memory: raise engine.page_size, or lower engine.max_slots or engine.max_context"
            )
        if need.platform == "tpu" and _kernel() is None:
            reasons.append(f"jax {jax.__version__} does not ship it")
        return reasons

    def layer(self) -> Layer:
        need = self._need
        shape = need.num_pages, need.page_size, 2 * need.model.num_kv_heads, need.model.head_dim
        return jax.ShapeDtypeStruct(shape, need.numerics.dtype, sharding=NamedSharding(need.mesh, self._pool))

    def write(self, layer: Layer, k: jax.Array, v: jax.Array, blocks: PagedBlocks) -> Layer:
        def local(pool: jax.Array, k: jax.Array, v: jax.Array, page: jax.Array, offset: jax.Array) -> jax.Array:
            T, K, h = k.shape
            pairs = jnp.stack([k, v], axis=2).reshape(T, 2 * K, h)
            return pool.at[page, offset].set(pairs.astype(pool.dtype))

        none = PartitionSpec()
        specs = self._pool, self._heads, self._heads, none, none
        return self._on_chips(local, specs, self._pool)(layer, k, v, blocks.page, blocks.offset)

    def attend(self, layer: Layer, q: jax.Array, blocks: PagedBlocks) -> jax.Array:
        T, _, h = q.shape
        row_pages, page_size = blocks.table.shape[1], layer.shape[1]
        kernel = _kernel()
        assert kernel is not None
        local = partial(
            kernel,
            sm_scale=h**-0.5,
            num_kv_pages_per_block=min(row_pages, max(1, BLOCK_KEYS // page_size)),
            num_queries_per_block=min(T, BLOCK_QUERIES),
        )
        # A finished row of a decode still has its token, but no keys; the kernel needs as many keys as tokens.
        lengths = jnp.maximum(blocks.lengths, blocks.starts[1:] - blocks.starts[:-1])
        none = PartitionSpec()
        specs = self._heads, self._pool, none, none, none, none
        out = self._on_chips(local, specs, self._heads)(
            q.astype(layer.dtype), layer, lengths, blocks.table, blocks.starts, blocks.num_rows
        )
        # The kernel leaves tokens of no row as the memory was.
        used = jnp.arange(T) < blocks.starts[blocks.num_rows[0]]
        return jnp.where(used[:, None, None], out, 0).astype(q.dtype).reshape(T, -1)

    def _on_chips(self, local: Callable, specs: tuple[PartitionSpec, ...], out: PartitionSpec) -> Callable:
        return jax.shard_map(local, mesh=self._need.mesh, in_specs=specs, out_specs=out, check_vma=False)


def _kernel() -> Callable[..., jax.Array] | None:
    """jax's kernel; None where this jax has none. It is experimental: this is the only place that knows where it is."""
    try:
        from jax.experimental.pallas.ops.tpu.ragged_paged_attention import ragged_paged_attention
    except ImportError:
        return None
    return ragged_paged_attention


BACKENDS: dict[str, type[Backend]] = {"ragged": RaggedKernel, "gather": Gather}
"""the first that can do what is needed is taken"""


def choose(need: Need, name: str = "auto") -> Backend:
    """The backend of an engine; says in the log which, and why none before it.

    Args:
        name: one of BACKENDS, or `auto`: the first that can.

    Raises:
        ValueError: the one asked for is unknown, or cannot do what is needed; says why.
    """
    if name not in ("auto", *BACKENDS):
        raise ValueError(f"engine.attention: {name!r} is unknown; use auto, {' or '.join(BACKENDS)}")
    passed = ""
    for each, backend in BACKENDS.items():
        if name not in ("auto", each):
            continue
        if reasons := "; ".join(backend.abilities.lacks(need) + backend.lacks(need)):
            passed += f"; {each} cannot: {reasons}"
            continue
        logging.info("paged attention on %s: %s%s", need.platform, each, passed)
        return backend(need)
    raise ValueError(f"engine.attention{passed.replace(';', ':', 1)}; or set it to auto")


class PagedContext:
    """Writes each layer's keys and values into the page pool, then attends to the pages. Unrolled layers only.

    After the forward `pool` is the new pool.
    """

    def __init__(self, pool: Sequence[Layer], blocks: PagedBlocks, backend: Backend):
        self.pool = list(pool)
        self.blocks, self.backend = blocks, backend

    def attend(self, layer: int | jax.Array, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        assert isinstance(layer, int), "the page pool is a list over layers: unroll the model"
        self.pool[layer] = self.backend.write(self.pool[layer], k, v, self.blocks)
        return self.backend.attend(self.pool[layer], q, self.blocks)
