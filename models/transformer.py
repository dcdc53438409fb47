"""The one decoder that trainer and engine share: Llama, Qwen3, Qwen3-MoE and Qwen2-MoE.

Legend: T tokens, D model, H query heads, K kv heads, h head dim, F ffn, V vocab, L layers, E experts, k experts per token.

The forward is written over a token dim and never knows who calls it: each layer hands q, k, v to an attention context.
Weights are described once, by `weight(...)` in the modules; parameters are a flat dict from dotted names to arrays.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name
from jax.typing import DTypeLike

from models.attention import Context
from models.config import ModelConfig
from models.layers import dot, dots, gated, published, rope_tables, rotate, weight
from models.moe import MoE
from models.numerics import Numerics, rms_norm
from models.router import Routing
from sharding.rules import Weight
from sharding.shards import Shards, gathers
from sharding.vocabulary import Head, lookup

PRODUCT = "product"
"""name of what remat `dots` keeps"""


def _all_but_gathered(primitive: Any, *_: Any, **params: Any) -> bool:
    """Kept, gathered weights (which products read reshaped) would add up to the whole model."""
    return primitive.name != "reshape" and not gathers(params)


REMAT = {
    "none": _all_but_gathered,
    "block": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.save_only_these_names(PRODUCT),
}
"""what a layer's backward finds saved: everything, only the layer's input, or also the results of its products"""

Params = Mapping[str, jax.Array]
ALONE = Shards()


class Block(nnx.Module):
    """Pre-norm attention and gated feed-forward, or experts."""

    def __init__(self, config: ModelConfig, numerics: Numerics):
        D, H, K, h, F = config.model_dim, config.num_heads, config.num_kv_heads, config.head_dim, config.ffn_dim
        self.eps, self.numerics, self.dtype = config.norm_eps, numerics, numerics.dtype
        deep = (2 * config.num_layers) ** -0.5  # residual branches start smaller the deeper the model (GPT-2)
        self.attn_norm = weight((D,), ("norm",), 0)
        self.q = weight((D, H, h), ("embed", "heads", "head_dim"), D**-0.5)
        self.k = weight((D, K, h), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.v = weight((D, K, h), ("embed", "kv_heads", "head_dim"), D**-0.5)
        self.o = weight((H, h, D), ("heads", "head_dim", "embed"), (H * h) ** -0.5 * deep)
        if config.qkv_bias:
            self.q_bias = weight((H, h), ("heads", "head_dim"), 0.02)
            self.k_bias = weight((K, h), ("kv_heads", "head_dim"), 0.02)
            self.v_bias = weight((K, h), ("kv_heads", "head_dim"), 0.02)
        if config.qk_norm:
            self.q_norm = weight((h,), ("norm",), 0)
            self.k_norm = weight((h,), ("norm",), 0)
        self.mlp_norm = weight((D,), ("norm",), 0)
        if config.moe:
            self.moe = MoE(config, self.dtype, deep)
            return
        self.gate = weight((D, F), ("embed", "ffn"), D**-0.5)
        self.up = weight((D, F), ("embed", "ffn"), D**-0.5)
        self.down = weight((F, D), ("ffn", "embed"), F**-0.5 * deep)

    def norm(self, x: jax.Array, scale: nnx.Param) -> jax.Array:
        return rms_norm(x, published(scale[...], self.dtype), self.eps, self.numerics)

    def project(self, x: jax.Array, *weights: nnx.Param) -> list[jax.Array]:
        """`[..., D] x [D, ...]` for each weight, as products of matrices."""
        arrays = [w[...] for w in weights]
        matrices = [array.reshape(array.shape[0], -1) for array in arrays]
        outs = [checkpoint_name(out, PRODUCT) for out in dots("td,df->tf", x.reshape(-1, x.shape[-1]), matrices, self.dtype)]
        return [out.reshape(*x.shape[:-1], *array.shape[1:]) for out, array in zip(outs, arrays, strict=True)]

    def attention(self, layer, x: jax.Array, rope: tuple[jax.Array, jax.Array], context: Context) -> jax.Array:
        y = self.norm(x, self.attn_norm)
        q, k, v = self.project(y, self.q, self.k, self.v)
        if hasattr(self, "q_bias"):
            biases = self.q_bias, self.k_bias, self.v_bias
            q, k, v = (
                x + jnp.broadcast_to(published(b[...], self.dtype), x.shape) for x, b in zip((q, k, v), biases, strict=True)
            )
        if hasattr(self, "q_norm"):
            q, k = self.norm(q, self.q_norm), self.norm(k, self.k_norm)
        out = context.attend(layer, rotate(q, rope, self.dtype), rotate(k, rope, self.dtype), v)
        out = checkpoint_name(out, PRODUCT)
        w = self.o[...]
        return dot("te,ed->td", out.reshape(-1, out.shape[-1]), w.reshape(-1, w.shape[-1]), self.dtype).reshape(x.shape)

    def mlp(self, x: jax.Array) -> jax.Array:
        gate, up = self.project(self.norm(x, self.mlp_norm), self.gate, self.up)
        return self.project(gated(gate, up, self.dtype), self.down)[0]

    def __call__(
        self,
        layer,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        context: Context,
        shards: Shards = ALONE,
        outer: Shards = ALONE,
        replay: jax.Array | None = None,
        load: jax.Array | None = None,
    ) -> tuple[jax.Array, Routing | None]:
        with jax.named_scope("attention"):
            x = x + shards.total(self.attention(layer, x, rope, context), "heads")
        if not hasattr(self, "moe"):
            with jax.named_scope("mlp"):
                return x + shards.total(self.mlp(x), "ffn"), None
        with jax.named_scope("moe"):
            y, routing = self.moe(self.norm(x, self.mlp_norm), replay, load, shards, outer)
            return x + checkpoint_name(y, PRODUCT), routing


class Transformer(nnx.Module):
    """Token ids to final hidden states; `logits` gives the head's products.

    Args:
        stacked: one block whose weights carry a leading layer dim, scanned with `remat` (trainer), or a list of blocks,
            unrolled (engine: slicing stacked weights inside a decode loop copies them).
    """

    def __init__(self, config: ModelConfig, numerics: Numerics, stacked: bool, remat: str = "none", value_head: bool = False):
        D, V = config.model_dim, config.vocab_size
        if remat not in REMAT:
            raise ValueError(f"remat: {remat!r} is unknown; use one of {sorted(REMAT)}")
        self.config, self.numerics, self.dtype, self.remat = config, numerics, numerics.dtype, remat
        self.shards = self.outer = ALONE
        self.embed = weight((V, D), ("vocab", "embed"), D**-0.5)
        if stacked:
            self.blocks = Block(config, numerics)
        else:
            self.blocks = nnx.List([Block(config, numerics) for _ in range(config.num_layers)])
        self.norm = weight((D,), ("norm",), 0)
        if not config.tied_head:
            self.head = weight((D, V), ("embed", "vocab"), D**-0.5)
        if value_head:
            self.value = weight((D,), ("embed",), 0.1 * D**-0.5)

    def __call__(self, tokens: jax.Array, positions: jax.Array, context: Context) -> jax.Array:
        """tokens and positions int32 `[..., T]` -> normalised hidden states `[..., T, D]`."""
        return self.forward(tokens, positions, context)[0]

    def forward(
        self, tokens: jax.Array, positions: jax.Array, context: Context, replay: jax.Array | None = None
    ) -> tuple[jax.Array, Routing | None]:
        """The hidden states, and how experts were chosen `[L, ..., T]` (None where there are none).

        Args:
            replay: unsigned `[..., T, L, k]`: the experts to use; see `models.moe.MoE`.
        """
        if isinstance(self.blocks, nnx.List):
            x, rope = self._start(tokens, positions)
            routings = []
            for layer, block in enumerate(self.blocks):
                mine = None if replay is None else replay[..., layer, :]
                x, routing = block(layer, x, rope, context, self.shards, self.outer, mine)
                routings.append(routing)
            return self._end(x), jax.tree.map(lambda *parts: jnp.stack(parts), *routings) if self.config.moe else None
        layers = jnp.arange(self.config.num_layers)
        hidden, _, routing = self.scan(tokens, positions, layers, lambda layer: (context, layer), replay)
        return hidden, routing

    def scan(
        self,
        tokens: jax.Array,
        positions: jax.Array,
        scanned: Any,
        context_of: Callable[[Any], tuple[Context, int | jax.Array]],
        replay: jax.Array | None = None,
        load: jax.Array | None = None,
    ) -> tuple[jax.Array, Any, Routing | None]:
        """The forward of stacked blocks, each with a context of its own.

        Args:
            scanned: a tree whose arrays have a leading layer dim.
            context_of: a layer's part of `scanned` -> its context, and the layer number that the context is told.
            replay: as `forward`'s.
            load: `[L, E]`: share of the batch's assignments that each expert gets.

        Returns:
            Hidden states `[..., T, D]`; what the contexts left in an attribute `new`, stacked (None where they have none); and
            the routing.
        """
        x, rope = self._start(tokens, positions)
        definition, weights = nnx.split(self.blocks)
        by_layer = None if replay is None else jnp.moveaxis(replay, -2, 0)

        def body(x: jax.Array, part: tuple[Any, Any, Any, Any]) -> tuple[jax.Array, Any]:
            state, mine, replay, load = part
            context, layer = context_of(mine)
            state = jax.tree.map(self._whole, state, is_leaf=lambda leaf: isinstance(leaf, nnx.Variable))
            block = nnx.merge(definition, state)
            x, routing = block(layer, x, rope, context, self.shards, self.outer, replay, load)
            return x, (getattr(context, "new", None), routing)

        if self.remat != "none" or self.shards.mesh:
            body = jax.checkpoint(body, policy=REMAT[self.remat], prevent_cse=False)
        x, (new, routing) = jax.lax.scan(body, x, (weights, scanned, by_layer, load))
        return self._end(x), new, routing

    def _start(self, tokens: jax.Array, positions: jax.Array) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
        rope = rope_tables(self.config, positions, self.dtype)
        # XLA on CPU gathers 16-bit floats as float32, and would convert the whole table ahead of a decode loop.
        table, tokens = jax.lax.optimization_barrier((self.embed[...], tokens))
        return published(lookup(self.shards, table, tokens), self.dtype), rope

    def _end(self, x: jax.Array) -> jax.Array:
        return rms_norm(x, published(self._whole(self.norm)[...], self.dtype), self.config.norm_eps, self.numerics)

    def _whole(self, w: Any) -> Any:
        """A weight's variable, with all of the weight that products use on one device."""
        return w.replace(self.shards.whole(w[...], w.get_metadata()["description"].dims, self.dtype))

    def values(self, hidden: jax.Array) -> jax.Array:
        """Hidden states `[..., D]` -> the critic's value of each, `[...]`."""
        return (hidden * jnp.broadcast_to(published(self._whole(self.value)[...], self.dtype), hidden.shape)).sum(axis=-1)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """Hidden states `[T, D]` -> `[T, V]`."""
        return self.products(hidden, self._unembedding[...])

    @property
    def _unembedding(self) -> nnx.Param:
        """`[V, D]` where it is the table of embeddings, else `[D, V]`."""
        return self.embed if self.config.tied_head else self.head

    def head_part(self) -> Head:
        """What this device has of the head; all of it where it is alone."""
        w = self._unembedding
        return Head.of(self.shards, w[...], w.get_metadata()["description"].dims, self.dtype)

    @property
    def head_spec(self) -> str:
        """The head's products, for `dot`."""
        return "td,vd->tv" if self.config.tied_head else "td,dv->tv"

    def products(self, hidden: jax.Array, weight: jax.Array) -> jax.Array:
        """Hidden states `[T, D]` -> logits of the head's ids, or of a part of them."""
        return dot(self.head_spec, hidden, weight, self.dtype)


def _named(model: Transformer) -> list[tuple[str, tuple, nnx.Param]]:
    flat: Any = nnx.to_flat_state(nnx.state(model))
    return [(".".join(map(str, path)), path, variable) for path, variable in flat]


def describe(config: ModelConfig, stacked: bool = True, value_head: bool = False) -> dict[str, Weight]:
    """Every weight of the model by name; stacked blocks carry a leading `layer` dim."""
    weights = {}
    for name, _, variable in _named(Transformer(config, Numerics(jnp.float32), stacked, value_head=value_head)):
        description: Weight = variable.get_metadata()["description"]
        if stacked and name.startswith("blocks."):
            description = dataclasses.replace(
                description, shape=(config.num_layers, *description.shape), dims=("layer", *description.dims)
            )
        weights[name] = description
    return weights


class Definition:
    """The model without its weights; `bind(params)` inside a jitted function gives a callable Transformer."""

    def __init__(
        self,
        config: ModelConfig,
        dtype: DTypeLike,
        stacked: bool,
        remat: str = "none",
        value_head: bool = False,
        exact: bool = True,
    ):
        numerics = Numerics(dtype, exact)
        model = Transformer(config, numerics, stacked, remat, value_head)
        self.config, self.numerics, self.dtype, self.remat = config, numerics, numerics.dtype, remat
        self.weights = describe(config, stacked, value_head)
        self._graph = nnx.graphdef(model)
        self._named = _named(model)

    def bind(self, params: Params, shards: Shards = ALONE, outer: Shards = ALONE) -> Transformer:
        """A Transformer over these arrays (traced or real). Names must match exactly.

        Args:
            shards: of a caller inside of `shards.run`: the arrays are this device's parts.
            outer: of a caller outside: how the experts are split.
        """
        assert params.keys() == self.weights.keys(), sorted(params.keys() ^ self.weights.keys())
        state: Any = nnx.from_flat_state([(path, variable.replace(params[name])) for name, path, variable in self._named])
        model = nnx.merge(self._graph, state)
        model.shards, model.outer = shards, outer
        return model
