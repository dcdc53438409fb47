"""The forward of a step, in rows and along a path: what is read at each trained token's parent.

Legend: B rows, T tokens of a row or segment, R reads, S branches, L trained tokens of the longest branch, C places of the path
buffer, K kv heads, h head dim. For weights and buffers the leading L is layers.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from models.attention import Array, ForestBlocks, ForestContext
from models.layers import accumulator
from models.logprobs import token_log_probs
from models.path import PathContext
from models.transformer import ALONE, Definition, Params, Transformer
from rl.forest import Forest
from rl.losses import Readout
from rl.routes import PerToken, Routed, Routes, add_tokens, per_token, per_token_specs
from sharding.shards import Shards

LOGITS_CHUNK = 128
"""tokens whose logits exist at a time"""


class Reading(NamedTuple):
    """What a policy or a critic says of each trained token."""

    out: Array
    """its log-prob, or the value of the state before it"""
    entropy: Array
    """of the distribution it comes from, in nats, without a gradient; a critic's is 0"""
    routed: Routed | None = None
    """of all tokens that were computed; of models with experts"""


def _read(
    model: Transformer, readout: Readout, hidden: jax.Array, target: jax.Array, temperature: jax.Array, used: jax.Array
) -> Reading:
    """Of hidden states `[B, R, D]` that predict `target`; `used` says which of them anybody asks for."""
    if readout == "value":
        return Reading(model.values(hidden), jnp.zeros(target.shape, hidden.dtype))
    R = target.shape[1]
    chunk = next(c for c in range(min(LOGITS_CHUNK, R), 0, -1) if R % c == 0)
    return Reading(*token_log_probs(model, hidden, target, temperature, used, chunk))


def read_rows(
    definition: Definition,
    params: Params,
    forest: Forest,
    temperature: jax.Array,
    readout: Readout = "log_prob",
    shards: Shards = ALONE,
) -> Reading:
    """Of each branch's trained tokens, `[S, L]` (0 where there is none); each is read at its parent."""
    B, T = forest.tokens.shape
    used = jnp.zeros(B * T, bool).at[jnp.where(forest.mask, forest.index, B * T)].set(True, mode="drop").reshape(B, T)

    def here(params: Params, forest: Forest, temperature: jax.Array, used: jax.Array) -> tuple[Reading, PerToken | None]:
        model = definition.bind(params, shards)
        first = shards.first_token(forest.tokens.shape[1])
        context = ForestContext(replace(forest.blocks, first=first, platform=shards.platform), model.numerics, shards)
        tokens, positions = jnp.asarray(forest.tokens), jnp.asarray(forest.positions)
        layers = jnp.arange(definition.config.num_layers)
        hidden, _, routed = _scan(model, tokens, positions, layers, lambda layer: (context, layer), forest.routes)
        read = forest.read if first is None else forest.read - first
        at_parent = jnp.take_along_axis(hidden, read[..., None], axis=1)
        return _read(model, readout, at_parent, jnp.asarray(forest.target), temperature, used), routed

    rows = shards.spec("B", "T")
    places = shards.weight_specs(definition.weights), forest_specs(shards, forest.routes), PartitionSpec(), rows
    outs = Reading(rows, rows), per_token_specs(forest.routes, rows, PartitionSpec())
    reading, routed = shards.run(here, places, outs)(params, forest, temperature, used)
    out, entropy = (
        jnp.where(forest.mask, jnp.take(x.reshape(B * T), forest.index), 0.0) for x in (reading.out, reading.entropy)
    )
    return Reading(out, entropy, add_tokens(routed, forest.routes))


def _scan(
    model: Transformer, tokens: jax.Array, positions: jax.Array, scanned: Any, context_of: Callable, routes: Routes | None
) -> tuple[jax.Array, Any, PerToken | None]:
    """`model.scan` with the experts of `routes`, and what became of each token."""
    replay, load = (None, None) if routes is None else (jnp.asarray(routes.rows), routes.load)
    hidden, new, routing = model.scan(tokens, positions, scanned, context_of, replay, load)
    if routes is None:
        return hidden, new, None
    assert routing is not None and model.config.moe is not None
    return hidden, new, per_token(routing, routes, model.config.moe, model.shards)


def forest_specs(shards: Shards, routes: Routes | None) -> Forest:
    """How the devices of a mesh share a forest that has such routes."""
    rows, whole, nothing = shards.spec("B", "T"), shards.spec("B"), PartitionSpec()
    blocks = ForestBlocks(end=whole, query=rows, key=rows)
    if routes is not None:
        routes = Routes(rows=rows, weight=rows, total=nothing, load=None if routes.load is None else nothing)
    return Forest(
        tokens=rows, positions=rows, blocks=blocks, read=rows, target=rows, index=nothing, mask=nothing, routes=routes
    )


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class SegmentArrays:
    """A padded segment of `rl.tries` on the device."""

    tokens: Array
    """int32 [T]"""
    start: Array
    """int32 []"""
    count: Array
    """int32 []: tokens that are not padding"""
    read: Array
    """int32 [R]"""
    target: Array
    """int32 [R]"""
    used: Array
    """bool [R]"""
    routes: Routes | None = None


def read_segment(
    definition: Definition,
    params: Params,
    keys: jax.Array,
    values: jax.Array,
    segment: SegmentArrays,
    temperature: jax.Array,
    readout: Readout,
    shards: Shards = ALONE,
) -> tuple[Reading, tuple[jax.Array, jax.Array]]:
    """Of a segment's reads, `[R]`; and its own keys and values `[L, T, K, h]`.

    keys and values are the path buffer's, `[L, C, K, h]`: of the segment's ancestors, each at its position. Every device of a
    mesh has the whole segment.
    """
    shards = shards.replicated()
    nothing, buffer = PartitionSpec(), shards.spec(None, None, "kv_heads", None)
    places = shards.weight_specs(definition.weights), buffer, buffer, nothing, nothing
    here = partial(_read_segment, definition, readout, shards)
    outs = Reading(nothing, nothing), (buffer, buffer), per_token_specs(segment.routes, nothing, nothing)
    reading, new, routed = shards.run(here, places, outs)(params, keys, values, segment, temperature)
    return reading._replace(routed=add_tokens(routed, segment.routes)), new


def _read_segment(
    definition: Definition,
    readout: Readout,
    shards: Shards,
    params: Params,
    keys: jax.Array,
    values: jax.Array,
    segment: SegmentArrays,
    temperature: jax.Array,
) -> tuple[Reading, tuple[jax.Array, jax.Array], PerToken | None]:
    model = definition.bind(params, shards)
    start, count = jnp.asarray(segment.start), jnp.asarray(segment.count)
    tokens = jnp.asarray(segment.tokens)
    wide = tuple(x.astype(accumulator(definition.dtype)) for x in (keys, values))
    hidden, new, routed = _scan(
        model,
        tokens,
        start + jnp.arange(tokens.shape[0], dtype=jnp.int32),
        wide,
        lambda mine: (PathContext(mine[0], mine[1], start, count, definition.numerics), 0),
        segment.routes,
    )
    at_parent = jnp.take(hidden, jnp.asarray(segment.read), axis=0)[None]
    target, used = jnp.asarray(segment.target)[None], jnp.asarray(segment.used)[None]
    reading = _read(model, readout, at_parent, target, temperature, used)
    out, entropy = (jnp.where(used[0], x[0], 0.0) for x in (reading.out, reading.entropy))
    return Reading(out, entropy), new, routed
