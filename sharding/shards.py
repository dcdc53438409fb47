"""What each device of a mesh holds of a training step, and the collectives between them, said one by one.

Legend: B rows, T tokens, D model, V vocab.

A step runs as one program per device (`jax.shard_map`). Rows are split over `data`, `fsdp` and `expert`, the tokens of a row
over `context`; a weight that is split over one of these axes is gathered where it is used, one layer at a time, and its
gradient is summed and cut again (Rajbhandari et al., ZeRO, arXiv 1910.02054). Heads, ffn and vocabulary that are split over
another axis stay split (Shoeybi et al., Megatron-LM, arXiv 1909.08053), and so do experts over theirs: tokens travel to them.
The table of embeddings and the head are never whole on any device.

Left to the partitioner, the head was gathered for every chunk of logits, its gradient summed as often, and logits were whole
where a reshape merges a split dim with another.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax.typing import DTypeLike

from sharding.rules import Rules, Weight

ROWS = ("data", "fsdp", "expert")
"""mesh axes over which rows are split"""
CONTEXT = ("context",)
"""the mesh axis over which the tokens of a row are split"""
SPLIT = ("heads", "kv_heads", "ffn", "vocab", "experts", "expert_ffn")
"""dims that may stay split over other axes; `experts` also over the axis `expert`, whose devices exchange tokens"""


@dataclass(frozen=True)
class Shards:
    """One device's view. `Shards()` is the view of a device that is alone: every method then returns what it was given.

    Methods other than `run` are called inside of `run`.
    """

    mesh: Mesh | None = None
    table: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """logical dim -> axes that split it; axes of one device are left out"""
    rows: tuple[str, ...] = ()
    """axes that split B; none where every device has all tokens"""
    context: tuple[str, ...] = ()
    """axes that split T"""
    platform: str = ""
    """of the devices; empty: this process's own"""

    @staticmethod
    def of(mesh: Mesh, rules: Rules, weights: Mapping[str, Weight]) -> "Shards":
        """Of a step on this mesh with these weights.

        Raises:
            ValueError: heads and kv heads are split differently, experts over several axes, or layers are split.
        """
        sizes = {axis: size for axis, size in mesh.shape.items() if size > 1}
        named = {dim: (axes,) if isinstance(axes, str) else axes or () for dim, axes in rules.table.items()}
        table = {dim: tuple(axis for axis in axes if axis in sizes) for dim, axes in named.items()}
        table |= dict.fromkeys(rules.uneven(mesh, weights), ())
        shards = Shards(
            mesh if sizes else None,
            tuple(table.items()),
            tuple(axis for axis in ROWS if axis in sizes),
            tuple(axis for axis in CONTEXT if axis in sizes),
            mesh.devices.flat[0].platform,
        )
        if shards.kept("heads") != shards.kept("kv_heads"):
            raise ValueError(
                f"rules: heads are on {shards.kept('heads')}, kv_heads on {shards.kept('kv_heads')}; a device needs the kv "
                f"heads of its heads, so map both to one axis (or to None, where it does not divide kv_heads)"
            )
        if len(shards.axes("experts")) > 1:
            raise ValueError(
                f"rules: 'experts' is on {shards.axes('experts')}; map it to one axis, 'expert' in a trainer, and "
                f"'expert_ffn' to another"
            )
        if shards.axes("layer"):
            raise ValueError(
                f"rules: 'layer' is mapped to {shards.axes('layer')[0]!r}; every device computes all layers, so map it to None"
            )
        return shards

    def replicated(self) -> "Shards":
        """The same weights, but every device has all tokens."""
        return replace(self, rows=(), context=())

    def axes(self, dim: str) -> tuple[str, ...]:
        return dict(self.table).get(dim, ())

    def kept(self, dim: str) -> tuple[str, ...]:
        """Axes over which a weight's dim stays split where it is used."""
        return tuple(
            axis
            for axis in self.axes(dim)
            if dim in SPLIT and (axis not in (*ROWS, *CONTEXT) or (dim, axis) == ("experts", "expert"))
        )

    def spec(self, *dims: str | None) -> PartitionSpec:
        """Of an array: `B` is rows, `T` tokens, other names are logical dims of which the split is kept."""
        own = {"B": self.rows, "T": self.context}
        entries = (own[dim] if dim in own else self.kept(dim) if dim else () for dim in dims)
        return PartitionSpec(*(axes or None for axes in entries))

    def sharding(self, *dims: str | None) -> NamedSharding | None:
        return NamedSharding(self.mesh, self.spec(*dims)) if self.mesh else None

    def weight_specs(self, weights: Mapping[str, Weight]) -> dict[str, PartitionSpec]:
        return {name: PartitionSpec(*(self.axes(dim) or None for dim in weight.dims)) for name, weight in weights.items()}

    def run(self, function: Callable[..., Any], in_specs: Any, out_specs: Any) -> Callable[..., Any]:
        """The function, as one program per device."""
        if self.mesh is None:
            return function
        return jax.shard_map(function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)

    # ---- weights

    def whole(self, weight: jax.Array, dims: tuple[str, ...], dtype: DTypeLike) -> jax.Array:
        """A weight (or keys, values) as products use it: rounded to `dtype`, in its own dtype, and gathered except for splits
        that are kept. The gradient is not rounded."""
        cuts = [(at, axis) for at, dim in enumerate(dims) for axis in self.axes(dim) if axis not in self.kept(dim)]
        return _gather(weight, tuple(cuts), np.dtype(dtype)) if cuts else weight

    def total(self, x: jax.Array, dim: str) -> jax.Array:
        """Sum of products over a dim that stays split."""
        axes = self.kept(dim)
        return jax.lax.psum(x, axes) if axes else x

    def exchange(self, x: jax.Array, axes: tuple[str, ...], dtype: DTypeLike) -> jax.Array:
        """Rows `[W n, ...]`, n for each of the W devices along these axes -> those that they have for this one; rounded to
        `dtype` on the way. The gradient is not rounded."""
        return _exchange(x, axes, np.dtype(dtype))

    # ---- tokens

    def token_dim(self, axis: str) -> int | None:
        """The dim of `[B, T]` that an axis splits."""
        return 0 if axis in self.rows else 1 if axis in self.context else None

    def first_token(self, num_tokens: int) -> jax.Array | None:
        """Row place of the first of the tokens that are here; None where all are."""
        return jax.lax.axis_index(self.context) * num_tokens if self.context else None

    def everyones(self, x: jax.Array, axes: Iterable[str], dtype: DTypeLike) -> jax.Array:
        """Tokens `[B, T, ...]` of all devices along these axes, as far as they have different ones; floats rounded to `dtype`
        on the way. The last of the axes is the outermost."""
        cuts = tuple((dim, axis) for axis in reversed(tuple(axes)) if (dim := self.token_dim(axis)) is not None)
        if not cuts:
            return x
        return _gather(x, cuts, np.dtype(dtype if jnp.issubdtype(x.dtype, jnp.floating) else x.dtype))

    def own(self, x: jax.Array, axes: Iterable[str]) -> jax.Array:
        """Of what `everyones` gave, this device's part."""
        for axis in reversed(tuple(axes)):
            if (dim := self.token_dim(axis)) is not None:
                size = x.shape[dim] // jax.lax.axis_size(axis)
                x = jax.lax.dynamic_slice_in_dim(x, jax.lax.axis_index(axis) * size, size, axis=dim)
        return x


def _gather_forward(x: jax.Array, cuts: tuple[tuple[int, str], ...], dtype: np.dtype):
    return _gather(x, cuts, dtype), None


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: jax.Array, cuts: tuple[tuple[int, str], ...], dtype: np.dtype) -> jax.Array:
    """The last axis of a dim is its innermost split, so it is gathered first."""
    narrow = x.astype(dtype)
    for dim, axis in reversed(cuts):
        narrow = jax.lax.all_gather(narrow, axis, axis=dim, tiled=True)
    return narrow.astype(x.dtype)


def _gather_backward(cuts: tuple[tuple[int, str], ...], dtype: np.dtype, saved: None, g: jax.Array):
    for dim, axis in cuts:
        g = jax.lax.psum_scatter(g, axis, scatter_dimension=dim, tiled=True)
    return (g,)


_gather.defvjp(_gather_forward, _gather_backward)


def _exchange_forward(x: jax.Array, axes: tuple[str, ...], dtype: np.dtype):
    return _exchange(x, axes, dtype), None


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _exchange(x: jax.Array, axes: tuple[str, ...], dtype: np.dtype) -> jax.Array:
    narrow = jax.lax.all_to_all(x.astype(dtype), axes, split_axis=0, concat_axis=0, tiled=True)
    return narrow.astype(x.dtype)


def _exchange_backward(axes: tuple[str, ...], dtype: np.dtype, saved: None, g: jax.Array):
    return (jax.lax.all_to_all(g, axes, split_axis=0, concat_axis=0, tiled=True),)


_exchange.defvjp(_exchange_forward, _exchange_backward)


def gathers(params: Mapping[str, Any]) -> bool:
    """Whether a primitive with these parameters is a gather of `whole`: remat policies see no more of it."""
    called = params.get("call_jaxpr")
    return called is not None and any(eqn.primitive.name == "all_gather" for eqn in called.eqns)
