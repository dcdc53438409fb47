"""What a step reports: how far the trainer is from the sampler, and sums turned into the numbers of metrics.jsonl.

Legend: N branches, L longest branch, K lag buckets.

Measures leave the device as sums over a share of the batch, are added up over shares on the host, and only then divided.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from rl.loss_batch import LOG_RATIO_LIMIT, LossBatch, clean

BUCKETS = ("lag_0", "lag_1", "lag_2-3", "lag_4+")
"""by consumer's version - token's version; lag 0 has the numerics alone"""
BUCKET_STARTS = (1, 2, 4)
FACTORS = (1.25, 2.0, 4.0)
"""F(tau) is the share of tokens with max(rho, 1 / rho) > tau"""
LEAST_GAP = 1e-8
BINS_PER_DECADE = 40
NUM_BINS = 2 + BINS_PER_DECADE * 12
"""of |log rho|: below 1e-8, forty a decade (6 % wide) up to 10,000, above"""

Sums = dict[str, Array]


def mismatch(logp: Array, batch: LossBatch) -> Sums:
    """How far the trainer is from the sampler on trained tokens; log rho = trainer's - sampler's log-prob.

    Sums over tokens (Schulman's estimators of KL(mu || pi), http://joschu.net/blog/kl-approx.html): k1 = -log rho,
    k2 = (log rho)^2 / 2, k3 = rho - 1 - log rho; |log rho| with its histogram; rho and rho^2; tokens beyond each of FACTORS.
    Over shares, max_ names take the maximum and min_ names the minimum. All are there for all tokens, as [], and for each
    lag bucket, as [K] under "lag/". rho_geo is exp(mean log rho) of a branch.
    """
    logp, batch = clean(jax.lax.stop_gradient(logp), batch)
    log_rho = logp - batch.sampler_logp
    starts = jnp.array(BUCKET_STARTS)
    bucket = (batch.lag[..., None] >= starts.reshape(1, 1, -1)).sum(-1)
    everything = [batch.weights, *(jnp.where(bucket == k, batch.weights, 0) for k in range(len(BUCKETS)))]
    sums = jax.vmap(lambda weights: _sums(log_rho, weights))(jnp.stack(everything))
    sums["gap_histogram"] = _histogram(jnp.abs(log_rho), bucket, batch.weights)
    sums |= {"lag": (batch.lag * batch.weights).sum()[None], "max_lag": batch.lag.max()[None]}
    by_lag = {f"lag/{name}": value[1:] for name, value in sums.items() if name not in ("lag", "max_lag")}
    return {**{name: value[0] for name, value in sums.items()}, **by_lag}


def _sums(log_rho: Array, weights: Array) -> Sums:
    """Sums over the tokens with these weights, all [N, L]."""
    bounded = jnp.clip(log_rho, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT)
    rho, gap, counted = jnp.exp(bounded), jnp.abs(log_rho), weights > 0
    values = {
        "tokens": jnp.ones_like(rho),
        "k1": -log_rho,
        "k2": log_rho**2 / 2,
        "k3": jnp.expm1(bounded) - log_rho,
        "abs_gap": gap,
        "ratio": rho,
        "ratio_squared": rho**2,
        **{f"f_{factor:g}": gap > np.log(factor) for factor in FACTORS},
    }
    tokens = weights.sum(1)
    mean = (log_rho * weights).sum(1) / jnp.where(tokens > 0, tokens, 1)
    geometric = jnp.exp(jnp.clip(mean, -LOG_RATIO_LIMIT, LOG_RATIO_LIMIT))
    extremes = {
        "max_abs_gap": jnp.where(counted, gap, 0).max(),
        "max_ratio": jnp.where(counted, rho, 0).max(),
        "max_rho_geo": jnp.where(tokens > 0, geometric, 0).max(),
        "min_rho_geo": jnp.where(tokens > 0, geometric, jnp.inf).min(),
    }
    return {**{name: (value * weights).sum() for name, value in values.items()}, **extremes}


def _histogram(gap: Array, bucket: Array, weights: Array) -> Array:
    """[1 + K, bins]: weight of the tokens in each bin of |log rho|, of all tokens and of each lag bucket."""
    place = jnp.floor(jnp.log10(jnp.maximum(gap, LEAST_GAP / 10) / LEAST_GAP) * BINS_PER_DECADE) + 1
    place = jnp.clip(place, 0, NUM_BINS - 1).astype(jnp.int32)
    by_lag = jnp.zeros((len(BUCKETS), NUM_BINS), weights.dtype).at[bucket, place].add(weights)
    return jnp.concatenate([by_lag.sum(0, keepdims=True), by_lag])


def add_up(shares: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Sums over shares, in float64; names that begin with max_ (also below lag/) take the largest, min_ the smallest.

    Passes of a step may each have names of their own.
    """

    def one(name: str) -> Any:
        values = [np.asarray(share[name], np.float64) for share in shares if name in share]
        kind = name.removeprefix("lag/")[:4]
        return np.max(values, 0) if kind == "max_" else np.min(values, 0) if kind == "min_" else sum(values)

    return {name: one(name) for name in dict.fromkeys(name for share in shares for name in share)}


def finish(sums: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of metrics.jsonl. A sum becomes a mean over tokens (pair_ names: over pairs); loss, tokens, pairs, maxima
    and minima stay. Beside them:

        ess                 (sum rho)^2 / (tokens * sum rho^2): the effective share of samples
        chi2                mean rho^2 less 1
        abs_gap_p99         upper end of the histogram's bin in which the 99th percentile of |log rho| is
        lag_mean, lag_max   of tokens, in versions
        router/...          of original tokens with a row, below; router/loss is part of loss
        explained_variance  of a critic: 1 - Var(return - value) / Var(return); not there if all returns are equal

    The mismatch of the tokens of one lag is under lag_0/, lag_1/, lag_2-3/, lag_4+/; a bucket without tokens is not there.
    """
    result = _means({name: value for name, value in sums.items() if not name.startswith(("lag/", "router/"))})
    if "router/tokens" in sums:
        result |= _router_means(sums)
        result["loss"] += result.get("router/loss", 0.0)
    by_lag = {name.removeprefix("lag/"): value for name, value in sums.items() if name.startswith("lag/")}
    for number, bucket in enumerate(BUCKETS if by_lag else ()):
        if by_lag["tokens"][number] > 0:
            part = _means({name: value[number] for name, value in by_lag.items()})
            result |= {f"{bucket}/{name}": value for name, value in part.items()}
    return result


def _means(sums: Mapping[str, Any]) -> dict[str, float]:
    tokens = float(sums["tokens"]) or 1.0
    result = {}
    for name, value in sums.items():
        if name in ("loss", "tokens", "pairs") or name.startswith(("max_", "min_")):
            result[name] = float(value)
        elif name.startswith("pair_"):
            result[name] = float(value) / max(float(sums["pairs"]), 1.0)
        elif name != "gap_histogram":
            result[name] = float(value) / tokens
    if "gap_histogram" in sums:
        squared = result.pop("ratio_squared")
        result["ess"] = result["ratio"] ** 2 / squared if squared else 0.0
        result["chi2"] = squared - 1 if squared else 0.0
        result["abs_gap_p99"] = min(_percentile(np.asarray(sums["gap_histogram"]), 0.99), result["max_abs_gap"])
        if not np.isfinite(result["min_rho_geo"]):  # no token at all
            del result["min_rho_geo"]
    if "lag" in sums:
        result["lag_mean"], result["lag_max"] = result.pop("lag"), result.pop("max_lag")
    if "return_squared" in sums:
        variance = result.pop("return_squared") - result["return"] ** 2
        unexplained = result.pop("value_error_squared") - result.pop("value_error") ** 2
        if variance > 0:
            result["explained_variance"] = 1 - unexplained / variance
    return result


def _router_means(sums: Mapping[str, Any]) -> dict[str, float]:
    """replayed: share of (token, layer) whose experts were given; mismatch: whose own experts are others than those;
    mismatch_tokens: of tokens with any (neither is there where nothing was replayed);
    max_load: an expert's share of its layer's assignments, times E, the largest; balance and z: what the losses are made of."""
    tokens, load = max(1.0, float(sums["router/tokens"])), np.asarray(sums["router/load"])
    result = {"router/max_load": float((load / np.maximum(load.sum(1, keepdims=True), 1)).max() * load.shape[1])}
    silent = () if float(sums["router/replayed"]) else ("router/mismatch", "router/mismatch_tokens")
    for name in ("replayed", "mismatch", "mismatch_tokens", "balance", "z"):
        if (name := f"router/{name}") in sums and name not in silent:
            result[name] = float(sums[name]) / tokens
    return result | ({"router/loss": float(sums["router/loss"])} if "router/loss" in sums else {})


def _percentile(histogram: np.ndarray, share: float) -> float:
    """Upper end of the first bin at which `share` of the weight is reached; 0 for the lowest bin, infinite for the highest."""
    place = int(np.searchsorted(np.cumsum(histogram), share * histogram.sum() * (1 - 1e-12)))
    if place == 0:
        return 0.0
    return LEAST_GAP * 10 ** (place / BINS_PER_DECADE) if place < NUM_BINS - 1 else np.inf
