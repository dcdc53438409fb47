"""The gradient of attention over rows of tries, in square blocks of neighbouring places.

Legend: B rows, T tokens, N blocks of a row, s places of a block, H query heads, K kv heads, h head dim, R = s H / K queries
that share a kv head.

The forward sums keys in path order, by lists; here no order is promised, so blocks are slices of the row, nothing is
gathered or scattered, and pairs of blocks that see nothing of each other are left out. Scores are made as keys x queries:
then each of the five products contracts the last dim of its left operand, the one form that is fast on XLA-CPU.
"""

import jax
import jax.numpy as jnp

from models.layers import dot
from models.numerics import row_sum

SCORES = {"cpu": 1 << 20}
"""most scores of a pair of blocks: on a CPU they should stay in cache; other platforms: 2^27"""
UNSEEN = 1e30
"""log of the sum of a query's weights where it has none"""


def forest_gradient(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out: jax.Array,
    log_mass: jax.Array,
    end: jax.Array,
    g: jax.Array,
    first: int | jax.Array = 0,
    platform: str = "",
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Gradients, in g's dtype, of q `[B, T, H, h]`, k and v `[B, T', K, h]` in the dtype of products, given the cotangent g
    of the output `out`, both `[B, T, H h]`. T' is the whole row, of which T may be a part.

    Args:
        q: with the scale h^-1/2 in it; the gradient is of q without it.
        log_mass: `[B, T, H]` log of the sum of exp(score) over a query's keys; UNSEEN for one without.
        end: `[B, T']`; u sees v iff v <= u < end[v].
        first: row place of the first query.
        platform: that computes it; empty: this process's own.
    """
    B, T, H, h = q.shape
    dtype, K, G = q.dtype, k.shape[2], H // k.shape[2]
    most = SCORES.get(platform or jax.default_backend(), 1 << 27)
    s = next(s for s in (512, 256, 128, 64) if s == 64 or (s <= T and B * H * s * s <= most))

    def blocks(x: jax.Array, none: float = 0) -> jax.Array:
        """`[B, T, K or H, any]` -> `[N, B, K, s or R, any]`"""
        x = jnp.pad(x, ((0, 0), (0, -x.shape[1] % s), (0, 0), (0, 0)), constant_values=none)
        x = x.reshape(B, -1, s, K, x.shape[2] // K, x.shape[-1]).transpose(1, 0, 3, 4, 2, 5)
        return x.reshape(len(x), B, K, -1, x.shape[-1])

    def rows(x: jax.Array, heads: int, tokens: int) -> jax.Array:
        """`[N, B, K, s or R, h]` -> `[B, tokens, heads, h]`"""
        x = x.reshape(-1, B, K, heads // K, s, h).transpose(1, 0, 4, 2, 3, 5)
        return x.reshape(B, -1, heads, h)[:, :tokens]

    accum, g = g.dtype, g.reshape(q.shape)
    delta = blocks(row_sum(g * out.reshape(q.shape))[..., None]).swapaxes(3, 4)
    mass = blocks(log_mass[..., None], UNSEEN).swapaxes(3, 4)
    q, g, k, v = (blocks(x.astype(dtype)) for x in (q, g, k, v))
    k_turned = k.swapaxes(3, 4)
    places = end.shape[1]
    end = jnp.pad(end, ((0, 0), (0, -places % s))).reshape(B, -1, s)
    last = end.max(axis=(0, 2))  # of each block of keys, over all rows
    asked = (mass < UNSEEN).any(axis=(1, 2, 3, 4))  # of each block of queries
    begin = first + jnp.arange(len(q))[:, None] * s
    alive = (jnp.arange(len(k))[None] * s < begin + s) & (last[None] > begin) & asked[:, None]
    queries, keys = jnp.nonzero(alive, size=alive.size, fill_value=0)

    def body(number: jax.Array, grads: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
        i, j = queries[number], keys[number]
        here, there = (first + i * s + jnp.arange(s))[None, None], (j * s + jnp.arange(s))[None, :, None]
        seen = (there <= here) & (here < end[:, j][..., None])
        scores = dot("bkch,bkrh->bkcr", k[j], q[i], dtype)
        seen = jnp.broadcast_to(seen[:, None, :, None], (B, K, s, G, s)).reshape(scores.shape)
        p = jnp.where(seen, jnp.exp(scores - jnp.broadcast_to(mass[i], scores.shape)), 0)
        dp = dot("bkch,bkrh->bkcr", v[j], g[i], dtype)
        ds = p * (dp - jnp.broadcast_to(delta[i], dp.shape))
        dq, dk, dv = grads
        return (
            dq.at[i].add(dot("bkhc,bkcr->bkhr", k_turned[j], ds, dtype)),
            dk.at[j].add(dot("bkcr,bkrh->bkch", ds, q[i], dtype)),
            dv.at[j].add(dot("bkcr,bkrh->bkch", p, g[i], dtype)),
        )

    zeros = jnp.zeros((len(q), B, K, h, G * s), accum), *(jnp.zeros(k.shape, accum) for _ in range(2))
    dq, dk, dv = jax.lax.fori_loop(0, alive.sum(), body, zeros)
    return rows(dq.swapaxes(3, 4), H, T) * h**-0.5, rows(dk, K, places), rows(dv, K, places)
