"""How the tokens of a step are routed to experts: what is replayed, what the routers say to it, and losses of the routers.

Legend: B rows, T tokens of a row or segment, L layers, E experts, k experts per token.

    off    the trainer routes itself
    R3     the sampler's rows, where they were recorded (Ma et al., arXiv 2510.11370)
    R2     the trainer's own rows at the start of the step, from one scoring pass (Zheng et al., GSPO, arXiv 2507.18071)

A frozen reference and a critic replay the sampler's rows too (R3): a log ratio then compares weights, not choices of experts,
and of equal weights is 0. Else each of them routes itself.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple, get_args

import jax
import jax.numpy as jnp
import numpy as np

from models.attention import Array
from models.config import ModelConfig, MoEConfig
from models.router import Routing, unrecorded
from models.routes import blank, recorded
from sharding.shards import Shards

Replay = Literal["off", "R2", "R3"]
REPLAYS = get_args(Replay)


@dataclass(frozen=True, kw_only=True)
class RouterConfig:
    """What a trainer does with routers. Of a model without experts: nothing."""

    router_replay: Replay = "R3"
    """whose choice of experts the trainer replays"""
    balance_coef: float = 0.0
    """of the load-balance loss (`models.router.Routing.balance`); 0: none"""
    z_coef: float = 0.0
    """of the z loss (`models.router.Routing.z`); 0: none"""

    def check(self, model: ModelConfig) -> None:
        """ValueError names the key and what to change."""
        if self.router_replay not in REPLAYS:
            raise ValueError(f"trainer.router_replay: use one of {REPLAYS}, got {self.router_replay!r}")
        for name in ("balance_coef", "z_coef"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"trainer.{name}: must be a number from 0 up, got {getattr(self, name)!r}")
        if self.balance_coef and self.router_replay == "off":
            raise ValueError(
                "trainer.balance_coef: needs every token's experts before the step, but router_replay 'off' chooses them as it "
                "goes; set trainer.router_replay to 'R2', or balance_coef to 0"
            )
        if model.moe is None:
            given = {"router_replay": self.router_replay == "R2", "balance_coef": self.balance_coef, "z_coef": self.z_coef}
            if name := next((name for name, is_set in given.items() if is_set), None):
                raise ValueError(f"trainer.{name}: {model.family!r} has no experts to route to; leave it out")

    def of_step(self, parts: Sequence["Routes"], model: ModelConfig) -> list["Routes"]:
        """Routes of all parts of a step, with what the routers' losses need of the whole of it.

        Raises:
            ValueError: there is a loss for balance, and a token's row was not recorded.
        """
        if model.moe is None:
            return []
        total = np.float32(max(1, sum(float(part.weight.sum()) for part in parts)))
        load = _load(parts, model) if self.balance_coef and parts else None
        return [replace(part, total=total, load=load) for part in parts]

    def loss(self, sums: dict[str, jax.Array], total: Array) -> jax.Array | None:
        """A share of the routers' losses, []: means over the step's original tokens and over layers; None without any."""
        terms = [coef * sums[f"router/{name}"] for name, coef in (("balance", self.balance_coef), ("z", self.z_coef)) if coef]
        return sum(terms[1:], start=terms[0]) / jnp.asarray(total) if terms else None


NO_OPTIONS = RouterConfig()


@jax.tree_util.register_dataclass
@dataclass(frozen=True, kw_only=True)
class Routes:
    """How the tokens of rows `[B, T]`, or of a segment `[T]`, are routed."""

    rows: Array
    """unsigned [B, T, L, k]: what is replayed (`models.routes`)"""
    weight: Array
    """float32 [B, T]: branches that go on after a token; a branch's last token has no row, and padding has no branch"""
    total: Array
    """float32 []: sum of weights over the step; 1 where it is not trained on"""
    load: Array | None = None
    """float32 [L, E]: share of the step's assignments that each expert gets; where there is a loss to balance them"""

    @staticmethod
    def empty(tokens: tuple[int, ...], like: np.ndarray) -> "Routes":
        """Of padding alone; with rows as `like` has them."""
        rows = blank(math.prod(tokens), like).reshape(*tokens, *like.shape[-2:])
        return Routes(rows=rows, weight=np.zeros(tokens, np.float32), total=np.float32(1))


class Routed(NamedTuple):
    """What became of the tokens of rows or of a segment."""

    rows: jax.Array
    """unsigned [B, T, L, k]: the experts that were used"""
    sums: dict[str, jax.Array]
    """for `rl.measures.add_up` and `finish`, over original tokens"""


def _load(parts: Sequence[Routes], model: ModelConfig) -> np.ndarray:
    """float32 [L, E]: counted on the host from what is replayed, so that no cut of the step changes it."""
    assert model.moe is not None
    L, k, E = model.num_layers, model.moe.experts_per_token, model.moe.num_experts
    counts = np.zeros((L, E))
    for part in parts:
        counted = part.weight > 0
        rows, weight = part.rows[counted], part.weight[counted].astype(np.float64)
        if not recorded(rows).all():
            raise ValueError(
                "trainer.balance_coef: some tokens have no recorded experts, so the load of the step is not known before it; "
                "set trainer.router_replay to 'R2', or balance_coef to 0"
            )
        for layer in range(L):
            counts[layer] += np.bincount(rows[:, layer].ravel(), np.repeat(weight, k), E)
    return (counts / max(1, counts[0].sum())).astype(np.float32)


# ---- on the device


class PerToken(NamedTuple):
    rows: jax.Array
    """unsigned [B, T, L, k]"""
    measures: dict[str, jax.Array]
    """[B, T]: means over layers"""
    counts: jax.Array
    """float32 [L, E]: assignments of the tokens of all devices, by weight"""


def per_token(routing: Routing, routes: Routes, moe: MoEConfig, shards: Shards) -> PerToken:
    """Of what the layers did, `[L, B, T, ...]`; inside of `shards.run`."""
    L, k = routing.ids.shape[0], routing.ids.shape[-1]
    ids = routing.ids.reshape(L, -1, k)
    weight = jnp.broadcast_to(jnp.asarray(routes.weight).reshape(1, -1, 1), ids.shape)
    layer = jnp.arange(L).reshape(-1, 1, 1)
    counts = jnp.zeros((L, moe.num_experts), weight.dtype).at[layer, ids].add(weight)
    if axes := (*shards.rows, *shards.context):
        counts = jax.lax.psum(counts, axes)
    measures: dict[str, Any] = {
        "replayed": (~unrecorded(jnp.asarray(routes.rows))).mean(axis=-1, dtype=routing.z.dtype),
        "mismatch": routing.differs.mean(axis=0, dtype=routing.z.dtype),
        "mismatch_tokens": routing.differs.any(axis=0).astype(routing.z.dtype),
        "z": routing.z.mean(axis=0),
    }
    if routes.load is not None:
        measures["balance"] = routing.balance.mean(axis=0)
    return PerToken(jnp.moveaxis(routing.ids, 0, -2).astype(routes.rows.dtype), measures, counts)


def per_token_specs(routes: Routes | None, tokens: Any, nothing: Any) -> Any:
    """How the devices of a mesh share a PerToken; `tokens` is of arrays `[B, T, ...]`."""
    if routes is None:
        return None
    names = ("replayed", "mismatch", "mismatch_tokens", "z", *(["balance"] if routes.load is not None else []))
    measures: Any = dict.fromkeys(names, tokens)
    return PerToken(tokens, measures, nothing)


def add_tokens(parts: PerToken | None, routes: Routes | None) -> Routed | None:
    """The sums over tokens; outside of `shards.run`, where gradients of sums over devices are plain."""
    if parts is None or routes is None:
        return None
    weight = jnp.asarray(routes.weight)
    sums = {f"router/{name}": (x * weight).sum() for name, x in parts.measures.items()}
    return Routed(parts.rows, {"router/tokens": weight.sum(), "router/load": parts.counts, **sums})
