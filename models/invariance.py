"""Whether this machine keeps the promise of exact numerics: `check` runs what a model computes, at the model's own dims.

Legend: T rows, D model, H query heads, K kv heads, h head dim, F ffn, V vocab, E experts, N query blocks, Q queries of a block,
C keys of a block.
"""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from models.attention import KEY_BLOCK, Ragged, attend_blocks, attend_lists
from models.config import ModelConfig
from models.layers import gated, rope_tables, rotate
from models.logprobs import log_prob
from models.moe import of_assignments
from models.numerics import COLUMNS, MOST_ROWS, ROWS, Numerics, rms_norm

VOCAB = 8192
EXPERTS = 4
"""a larger vocabulary, or more experts, would take time and show nothing new"""


def check(config: ModelConfig, numerics: Numerics) -> list[str]:
    """What breaks the promise on this process's devices: of each primitive whose bits depend on company its name, and when they
    do. Empty where all keep their bits. Takes some seconds: most of them compile."""
    return [*_moved_by_rows(config, numerics), *moved_in_attention(config, numerics)]


class _Primitive(NamedTuple):
    dim: int
    """of its rows"""
    weights: tuple[tuple[int, ...], ...]
    """shapes of what it takes beside them"""
    function: Callable[..., jax.Array]


def _normal(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def _differ(some: Any, others: Any) -> bool:
    """Whether a bit differs, the sign of zero included."""
    return np.asarray(some).tobytes() != np.asarray(others).tobytes()


def _product(spec: str, numerics: Numerics, rows: int, columns: int) -> _Primitive:
    shape = (columns, rows) if spec == "td,vd->tv" else (rows, columns)
    return _Primitive(rows, (shape,), partial(numerics.dot, spec))


def _primitives(config: ModelConfig, numerics: Numerics) -> dict[str, _Primitive]:
    """By name: functions of `[T, dim]` and weights."""
    D, h, V = config.model_dim, config.head_dim, min(config.vocab_size, VOCAB)
    wide, narrow = config.num_heads * h, config.num_kv_heads * h
    shapes = [(D, wide), (D, narrow), (wide, D)]
    if config.moe is None or config.moe.shared_ffn_dim:
        F = config.moe.shared_ffn_dim if config.moe else config.ffn_dim
        shapes += [(D, F), (F, D)]
    found = {f"product {a} x {b}": _product("td,df->tf", numerics, a, b) for a, b in dict.fromkeys(shapes)}
    head = "td,vd->tv" if config.tied_head else "td,dv->tv"
    found[f"head {D} x {V}"] = _product(head, numerics, D, V)

    def norm(x: jax.Array, scale: jax.Array) -> jax.Array:
        return rms_norm(x, scale, config.norm_eps, numerics)

    def turn(x: jax.Array) -> jax.Array:
        """As queries and keys are: with the scale after it. Places are the row's own."""
        position = jax.lax.bitcast_convert_type(x[:, 0], jnp.int32) & 1023
        return rotate(x[:, None], rope_tables(config, position, numerics.dtype), numerics.dtype) * h**-0.5

    def drawn(logits: jax.Array) -> jax.Array:
        warm = numerics.tempered(logits, jnp.broadcast_to(0.5 + logits[:, :1] ** 2, logits.shape))
        return log_prob(warm, jnp.argmax(logits, axis=-1).astype(jnp.int32), numerics)

    found[f"rms_norm {D}"] = _Primitive(D, ((D,),), norm)
    if config.qk_norm:
        found[f"rms_norm {h}"] = _Primitive(h, ((h,),), norm)
    found["rotary positions"] = _Primitive(h, (), turn)
    found["gated"] = _Primitive(2 * D, (), lambda x: gated(x[:, :D], x[:, D:], numerics.dtype))  # pyright: ignore[reportArgumentType]
    found["log-softmax"] = _Primitive(V, (), drawn)
    if config.moe is not None:
        found["experts"] = _experts(config, numerics)
        columns = config.moe.num_experts
        found["router"] = _product("td,df->tf", numerics, D, columns + -columns % COLUMNS)
    return found


def _experts(config: ModelConfig, numerics: Numerics) -> _Primitive:
    assert config.moe is not None
    D, F, E = config.model_dim, config.moe.ffn_dim, min(config.moe.num_experts, EXPERTS)
    k = min(config.moe.experts_per_token, E)

    def experts(x: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        """The row says where it goes."""
        gates, ids = jax.lax.top_k(jax.nn.sigmoid(x[:, :E]), k)
        return of_assignments(x, ids, gates, (gate, up, down), numerics, jax.default_backend())

    return _Primitive(D, ((E, D, F), (E, D, F), (E, F, D)), experts)


def _moved_by_rows(config: ModelConfig, numerics: Numerics) -> list[str]:
    """All primitives in one program for each number of rows: there is less to compile."""
    primitives = _primitives(config, numerics)
    rows = {dim: _normal(dim, MOST_ROWS, dim) for dim in {p.dim for p in primitives.values()}}
    weights = {
        name: tuple(jnp.asarray(_normal(seed, *shape), numerics.dtype) for seed, shape in enumerate(p.weights))
        for name, p in primitives.items()
    }

    @jax.jit
    def run(rows: dict, weights: dict) -> dict[str, jax.Array]:
        return {name: p.function(rows[p.dim], *weights[name]) for name, p in primitives.items()}

    whole, moved = jax.device_get(run(rows, weights)), dict.fromkeys(primitives, "")
    for n in ROWS:
        for some in (slice(0, n), slice(MOST_ROWS - n, MOST_ROWS)):
            part = run({dim: x[some] for dim, x in rows.items()}, weights)
            for name in (name for name in primitives if _differ(part[name], whole[name][some])):
                moved[name] = moved[name] or f"{name}: {n} rows are not those of {MOST_ROWS}"
    return [text for text in moved.values() if text]


def moved_in_attention(config: ModelConfig, numerics: Numerics) -> list[str]:
    """Few queries, few sequences, padding, lists as the engine has them, and keys in other places of their block."""
    G, h, K = config.num_heads // config.num_kv_heads, config.head_dim, min(config.num_kv_heads, 2)
    N, Q, C, seen = 3, 64, 2 * KEY_BLOCK, 40
    q, k, v = _normal(0, N, Q, K * G, h), _normal(1, K, N, C, h), _normal(2, K, N, C, h)
    visible = np.broadcast_to(np.arange(C)[None] <= (C - Q + np.arange(Q))[:, None], (N, Q, C))
    attend = jax.jit(partial(attend_blocks, numerics=numerics))
    whole = np.asarray(attend(q, k, v, visible))
    found = [
        f"attention, head dim {h}: {n} queries of one sequence are not those of {Q} of {N}"
        for n in (1, 7)
        if _differ(attend(q[:1, -n:], k[:, :1], v[:, :1], visible[:1, -n:]), whole[:1, -n:])
    ]
    first = np.broadcast_to(np.arange(C) < seen, (N, Q, C))
    keys, values = (x[..., :KEY_BLOCK, :] for x in (k, v))
    few = attend(q, keys, values, first[..., :KEY_BLOCK])
    if _differ(few, attend(q, k, v, first)):
        found.append(f"attention, head dim {h}: padding moves it")
    # The engine's lists: every sequence's key blocks one after the other, and of its queries all, some or the last.
    pages = [np.moveaxis(x.reshape(K, -1, KEY_BLOCK, h), 1, 0) for x in (k, v)]
    W = C // KEY_BLOCK
    blocks = Ragged(owner=np.repeat(np.arange(N), W), index=np.arange(N * W).reshape(N, W))
    listed = jax.jit(partial(attend_lists, numerics=numerics))
    for n in (1, 7, Q):
        seen_there = visible[:, -n:].reshape(N, n, W, KEY_BLOCK).swapaxes(1, 2).reshape(N * W, n, KEY_BLOCK)
        if _differ(listed(q[:, -n:], *pages, seen_there, blocks), whole[:, -n:]):
            found.append(f"attention, head dim {h}: {n} queries over pages are not those of {Q} over a row")
    places = np.sort(np.random.default_rng(3).permutation(KEY_BLOCK)[:seen])
    k[:, :, places], v[:, :, places] = k[:, :, :seen].copy(), v[:, :, :seen].copy()
    if _differ(few, attend(q, k, v, np.isin(np.arange(C), places) & np.ones_like(first))):
        found.append(f"attention, head dim {h}: keys in between move it")
    return found
