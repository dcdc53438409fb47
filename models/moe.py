"""A mixture of experts whose routing is an input and an output.

Legend: T tokens, D model, F ffn of an expert, E experts, k experts per token, N = T k assignments, R rows of a tile,
W devices that share the experts.

    logits = x router                                   [T, E]
    ids    = replay, or the k best of logits (+ bias)   [T, k]
    gates  = of the logits at ids                       [T, k]
    y      = sum over j of down_ids[j](gates[j] silu(x gate_ids[j]) (x up_ids[j]))

One code path for sampler and trainer (Ma et al., "Stabilizing MoE RL by Aligning Training and Inference Routers", arXiv
2510.11370): what is replayed are the ids *and their order*; gates come from the live logits, so the router gets its gradient.
The gate multiplies before the last product, so that what remains is a plain sum in the order of ids: no compiler can contract
it, and a token's bits do not depend on its company.
"""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec
from jax.typing import DTypeLike

from models.config import ModelConfig
from models.grouped import grouped
from models.layers import dot, dots, gated, published, weight
from models.numerics import COLUMNS
from models.router import Routing, fold, gap_of, gates_of, scores_of, select, unrecorded
from sharding.shards import Shards

HEADROOM = 1.25
"""rows that a device can be sent in one round, over its equal share"""

SKEWED = "if_skewed"
"""scope of the rounds that an even routing does not need"""

Weights = tuple[jax.Array, jax.Array, jax.Array]
"""gate and up `[E, D, F]`, down `[E, F, D]`"""


# ---- rows of assignments: both are gathers, and so are their transposes


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def spread(x: jax.Array, sent: jax.Array, place: jax.Array, k: int) -> jax.Array:
    """Rows `[M, D]` of x `[T, D]`: row m is the token of assignment `sent[m]`, 0 for none (N = T k). `place[n]` is the row of
    assignment n, M for none."""
    return jnp.take(x, sent // k, axis=0, mode="fill", fill_value=0)


def _spread_forward(x: jax.Array, sent: jax.Array, place: jax.Array, k: int):
    return spread(x, sent, place, k), place


def _spread_backward(k: int, place: jax.Array, g: jax.Array):
    each = jnp.take(g, place, axis=0, mode="fill", fill_value=0)
    return fold(each.reshape(-1, k, *g.shape[1:])), None, None


spread.defvjp(_spread_forward, _spread_backward)


def collect(rows: jax.Array, sent: jax.Array, place: jax.Array) -> jax.Array:
    """Of each assignment its row `[N, ...]`, 0 where it has none: the way back from `spread`, which is as much a way there."""
    return spread(rows, place, sent, 1)


# ---- the experts


def of_assignments(
    x: jax.Array, ids: jax.Array, gates: jax.Array, weights: Weights, dtype: DTypeLike, platform: str
) -> jax.Array:
    """What each assignment gives: x `[T, D]`, ids and gates `[T, k]` -> `[T, k, D]`; 0 where an id is no expert (E)."""
    T, k = ids.shape
    order = jnp.argsort(ids.reshape(-1), stable=True)
    place = jnp.zeros(T * k, jnp.int32).at[order].set(jnp.arange(T * k, dtype=jnp.int32), unique_indices=True)
    sizes = (ids.reshape(-1, 1) == jnp.arange(weights[0].shape[0])[None]).sum(axis=0, dtype=jnp.int32)
    gate, up = grouped(spread(x, order, place, k), weights[:2], sizes, dtype, platform)
    hidden: jax.Array = gated(gate, up, dtype)  # pyright: ignore[reportAssignmentType]
    hidden = hidden * collect(gates.reshape(-1), place, order)[:, None]
    (out,) = grouped(hidden, weights[2:], sizes, dtype, platform)
    return collect(out, order, place).reshape(T, k, -1)


def apply_experts(
    x: jax.Array, ids: jax.Array, gates: jax.Array, weights: Weights, dtype: DTypeLike, shards: Shards
) -> jax.Array:
    """The sum of each token's experts, `[T, D]`. Experts that are split over devices: where their axis splits tokens too,
    assignments travel to their expert and back; else every device adds up its own."""
    axes = shards.kept("experts")
    if axes and set(axes) <= set(shards.rows):
        each = exchanged(x, ids, gates, weights, dtype, shards, axes)
        return shards.total(fold(each), "expert_ffn")
    if axes:
        mine = ids - jax.lax.axis_index(axes) * weights[0].shape[0]
        ids = jnp.where((mine >= 0) & (mine < weights[0].shape[0]), mine, weights[0].shape[0])
    total = fold(of_assignments(x, ids, gates, weights, dtype, shards.platform))
    return shards.total(shards.total(total, "experts"), "expert_ffn")


def exchanged(
    x: jax.Array, ids: jax.Array, gates: jax.Array, weights: Weights, dtype: DTypeLike, shards: Shards, axes: tuple[str, ...]
) -> jax.Array:
    """`of_assignments` where each device has some of the tokens and some of the experts: nothing is ever dropped.

    A round sends every device up to HEADROOM times its equal share; if the routing is skewed, more rounds follow. All devices
    of the mesh run as many, so that no collective waits for one that others skip.
    """
    (T, k), N, W = ids.shape, ids.size, jax.lax.axis_size(axes)
    num_experts = weights[0].shape[0]
    C = min(-(-int(N * HEADROOM) // (8 * W)) * 8, N)
    target, flat = ids.reshape(-1) // num_experts, ids.reshape(-1) % num_experts
    is_for = target[:, None] == jnp.arange(W)[None]
    rank = jnp.take_along_axis(jnp.cumsum(is_for, axis=0) - 1, target[:, None], axis=1)[:, 0]
    most = jax.lax.pmax(is_for.sum(axis=0).max(), (*shards.rows, *shards.context))

    def one(number: int | jax.Array, x: jax.Array, gates: jax.Array, weights: Weights) -> jax.Array:
        slot = rank - number * C
        place = jnp.where((slot >= 0) & (slot < C), target * C + slot, W * C)
        sent = jnp.full(W * C, N, jnp.int32).at[place].set(jnp.arange(N, dtype=jnp.int32), mode="drop")
        rows = shards.exchange(spread(x, sent, place, k), axes, dtype)
        expert = shards.exchange(jnp.take(flat, sent, mode="fill", fill_value=num_experts), axes, jnp.int32)
        gate = shards.exchange(collect(gates.reshape(-1), place, sent), axes, gates.dtype)
        out = of_assignments(rows, expert[:, None], gate[:, None], weights, dtype, shards.platform)[:, 0]
        return collect(shards.exchange(out, axes, out.dtype), sent, place)

    def body(total: jax.Array, number: jax.Array) -> tuple[jax.Array, None]:
        nothing = partial(jnp.zeros_like, total)
        new = jax.lax.cond(number * C < most, one, lambda *_: nothing(), number, x, gates, weights)
        return total + new, None

    total = one(0, x, gates, weights)
    rounds = -(-T * min(k, num_experts) // C)
    if rounds > 1:
        with jax.named_scope(SKEWED):
            total, _ = jax.lax.scan(jax.checkpoint(body, prevent_cse=False), total, jnp.arange(1, rounds))
    return total.reshape(T, k, -1)


class MoE(nnx.Module):
    """The experts of a layer, the shared one included."""

    def __init__(self, model: ModelConfig, dtype: DTypeLike, deep: float):
        assert model.moe is not None
        config = self.config = model.moe
        D, E, F, S = model.model_dim, config.num_experts, config.ffn_dim, config.shared_ffn_dim
        self.dtype = dtype
        self.router = weight((D, E), ("embed", "router"), D**-0.5)
        if config.selection_bias:
            self.bias = weight((E,), ("router",), 0.01)
        self.gate = weight((E, D, F), ("experts", "embed", "expert_ffn"), D**-0.5)
        self.up = weight((E, D, F), ("experts", "embed", "expert_ffn"), D**-0.5)
        self.down = weight((E, F, D), ("experts", "expert_ffn", "embed"), F**-0.5 * deep)
        if S:
            self.shared_gate = weight((D, S), ("embed", "ffn"), D**-0.5)
            self.shared_up = weight((D, S), ("embed", "ffn"), D**-0.5)
            self.shared_down = weight((S, D), ("ffn", "embed"), S**-0.5 * deep)
        if config.shared_gate:
            self.shared_router = weight((D, 1), ("embed", "router"), D**-0.5)

    def __call__(
        self,
        x: jax.Array,
        replay: jax.Array | None,
        load: jax.Array | None,
        shards: Shards,
        outer: Shards,
    ) -> tuple[jax.Array, Routing]:
        """Hidden states `[..., D]` -> what the experts add to them, and how they were routed.

        Args:
            replay: `[..., k]` ids in the order of their use, of an unsigned dtype; rows that say "not recorded" route
                themselves.
            load: `[E]` share of a batch's assignments that each expert gets, for `Routing.balance`.
            outer: of a caller that is not inside of `shards.run`: how the experts' weights are split there.
        """
        flat = x.reshape(-1, x.shape[-1])
        logits = self._logits(flat, self.router)
        bias = published(self.bias[...], self.dtype) if self.config.selection_bias else None
        scores = scores_of(self.config, jax.lax.stop_gradient(logits), bias)
        own = ids = select(self.config, scores)
        if replay is not None:
            replay = replay.reshape(ids.shape)
            ids = jnp.where(unrecorded(replay)[:, None], own, replay.astype(jnp.int32))
        gates = gates_of(self.config, logits, ids)
        y = self._experts(flat, ids, gates, shards, outer)
        if self.config.shared_ffn_dim:
            y = y + shards.total(self._shared(flat), "ffn")
        differs = (ids[:, :, None] != own[:, None, :]).all(axis=2).any(axis=1)
        routing = Routing(ids, differs, *self._losses(logits, load), gap_of(self.config, scores))
        return y.reshape(x.shape), Routing(*(part.reshape(*x.shape[:-1], *part.shape[1:]) for part in routing))

    def _logits(self, x: jax.Array, router: nnx.Param) -> jax.Array:
        """Few columns have bits of their own (models/README.md): they are filled up."""
        w = router[...]
        return dot("td,de->te", x, jnp.pad(w, ((0, 0), (0, -w.shape[1] % COLUMNS))), self.dtype)[:, : w.shape[1]]

    def _experts(self, x: jax.Array, ids: jax.Array, gates: jax.Array, shards: Shards, outer: Shards) -> jax.Array:
        parts = self.gate, self.up, self.down
        weights = tuple(w[...] for w in parts)
        if outer.mesh is None:
            return apply_experts(x, ids, gates, weights, self.dtype, shards)
        here: Callable = partial(apply_experts, dtype=self.dtype, shards=outer)
        whole = PartitionSpec()
        split = tuple(outer.spec(*w.get_metadata()["description"].dims) for w in parts)
        return outer.run(here, (whole, whole, whole, split), whole)(x, ids, gates, weights)

    def _shared(self, x: jax.Array) -> jax.Array:
        gate, up = dots("td,df->tf", x, (self.shared_gate[...], self.shared_up[...]), self.dtype)
        hidden: jax.Array = gated(gate, up, self.dtype)  # pyright: ignore[reportAssignmentType]
        if self.config.shared_gate:
            hidden = hidden * jax.nn.sigmoid(self._logits(x, self.shared_router))
        return dot("tf,fd->td", hidden, self.shared_down[...], self.dtype)

    def _losses(self, logits: jax.Array, load: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """balance and z: `[T]` each."""
        z = jax.nn.logsumexp(logits, axis=1) ** 2
        if load is None:
            return jnp.ones_like(z), z
        scores = jax.nn.sigmoid(logits) if self.config.scoring == "sigmoid" else jax.nn.softmax(logits, axis=1)
        shares = scores / scores.sum(axis=1, keepdims=True)
        return (shares * load[None]).sum(axis=1) * logits.shape[1], z
