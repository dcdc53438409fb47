"""The memory plan equals what an engine allocates, and its refusals say what would fit."""

from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference import memory
from inference.config import EngineConfig
from inference.memory import MemoryPlan, amount, check, free_bytes, plan, token_bytes
from inference.runner import Runner
from models.config import ModelConfig, MoEConfig
from sharding.mesh import make_mesh
from sharding.reshard import abstract
from sharding.rules import Rules

MODEL = ModelConfig(
    family="qwen3",
    vocab_size=256,
    model_dim=32,
    ffn_dim=64,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=512,
)
CONFIG = EngineConfig(max_context=256, max_slots=8, num_pages=20, page_size=16, tokens_per_step=64)
TENSOR = Rules({"heads": "tensor", "kv_heads": "tensor", "ffn": "tensor", "vocab": "tensor"})

PLAN = MemoryPlan(
    num_chips=1,
    weight_bytes=10**6,
    max_slots=7,
    slot_bytes=1000,
    token_bytes=100,
    page_size=16,
    num_pages=100,
    max_context=1024,
)


def test_llama_3_8b() -> None:
    """Hand-computed: 2 x 32 layers x 8 heads x 128 x 2 bytes."""
    model = replace(MODEL, family="llama", num_layers=32, num_heads=32, num_kv_heads=8, head_dim=128)
    assert token_bytes(model, "bfloat16") == 131072
    assert amount(token_bytes(model, "bfloat16") * 64 * 32768) == "256 GiB"


@pytest.mark.parametrize(("num_bytes", "text"), [(0, "0 bytes"), (1023, "1023 bytes"), (1024, "1 KiB"), (1536, "1.5 KiB")])
def test_amount(num_bytes: int, text: str) -> None:
    assert amount(num_bytes) == text
    assert amount(num_bytes * 2**10).split()[0] == text.split()[0] or num_bytes == 0


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float32])
@pytest.mark.parametrize("axes", [{"data": 1}, {"tensor": 2}, {"data": 2, "tensor": 2}], ids=str)
def test_plan_is_what_is_allocated(axes: dict[str, int], dtype: Any) -> None:
    held_as_planned(MODEL, dtype, make_mesh(axes), TENSOR if "tensor" in axes else Rules())


@pytest.mark.parametrize(("experts", "held"), [(8, 2), (6, 6)])
def test_plan_of_experts(experts: int, held: int) -> None:
    """Experts that their axis divides are planned once over its devices, others once on each."""
    moe = MoEConfig(num_experts=experts, experts_per_token=2, ffn_dim=24)
    model = replace(MODEL, family="qwen3_moe", moe=moe)
    mesh = make_mesh({"expert": 4, "tensor": 2})
    rules = Rules({"heads": "tensor", "kv_heads": "tensor", "vocab": "tensor", "experts": "expert", "expert_ffn": "tensor"})
    planned = held_as_planned(model, jnp.bfloat16, mesh, rules)
    whole = plan(model, CONFIG, jnp.bfloat16, mesh, Rules({**rules.table, "experts": None}))
    one = 3 * 32 * (24 // 2) * MODEL.num_layers * 2  # bytes of an expert's gate, up and down, on each of two chips
    assert whole.weight_bytes - planned.weight_bytes == (experts - held) * one


def held_as_planned(model: ModelConfig, dtype: Any, mesh: Any, rules: Rules) -> MemoryPlan:
    runner = Runner(model, CONFIG, dtype, mesh, rules)
    runner.allocate()
    device = mesh.devices.flat[0]

    def held(tree: Any) -> int:
        shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards if shard.device == device]
        return sum(shard.data.nbytes for shard in shards)

    weights = abstract(runner.definition.weights, dtype, runner.shardings)
    planned = plan(model, CONFIG, dtype, mesh, rules)
    assert planned.num_chips == mesh.size
    assert planned.pool_bytes == held(runner.state.pool)
    assert planned.weight_bytes == held({n: jax.device_put(np.zeros(w.shape, dtype), w.sharding) for n, w in weights.items()})
    assert planned.table_bytes == held(runner.state.tables)
    assert planned.total_bytes == planned.pool_bytes + planned.weight_bytes + planned.table_bytes
    return planned


@pytest.mark.parametrize(
    ("num_pages", "max_context", "longest", "at_once"),
    [(65, 1024, 1024, 1), (64, 1024, 1008, 0), (129, 1024, 1024, 2), (2, 128, 16, 0)],
)
def test_what_fits_the_pool(num_pages: int, max_context: int, longest: int, at_once: int) -> None:
    """One page is for trash."""
    small = replace(PLAN, num_pages=num_pages, max_context=max_context)
    assert (small.longest_context, small.full_sequences) == (longest, at_once)
    assert small.num_tokens == (num_pages - 1) * 16


def test_plan_as_text() -> None:
    assert str(replace(PLAN, num_chips=4)).splitlines() == [
        "engine memory, each of 4 chips: 1.114 MiB = weights 976.6 KiB + pages 156.2 KiB + sampler tables 7.812 KiB",
        "pages: 100 of 16 tokens, 100 bytes a token and chip; they hold 1,584 tokens",
        "longest sequence: 1,024 tokens; 1 of max_context (1,024) at once",
    ]


def test_rows_of_routing_are_the_hosts() -> None:
    """48 layers, 8 experts of a token, a byte each."""
    assert str(replace(PLAN, row_bytes=384)).splitlines()[-1] == "routing: 384 bytes a token, 600 KiB of host memory"
    model = replace(MODEL, family="qwen3_moe", num_layers=48, moe=MoEConfig(num_experts=128, experts_per_token=8, ffn_dim=8))
    assert plan(model, CONFIG, jnp.bfloat16, make_mesh({"data": 1}), Rules()).row_bytes == 384
    without = replace(CONFIG, capture_routing=False)
    assert plan(model, without, jnp.bfloat16, make_mesh({"data": 1}), Rules()).row_bytes == 0


@pytest.mark.parametrize("free", [167_999, 120_000, 60_000, 25_000])
def test_the_number_that_a_refusal_gives_fits(free: int) -> None:
    with pytest.raises(ValueError, match=r"engine\.num_pages: 100 pages .* is free beside the weights; lower it to") as refused:
        check(PLAN, free)
    words = str(refused.value).split("lower it to ")[1].split(", and max_context to ")
    num_pages = int(words[0])
    smaller = replace(PLAN, num_pages=num_pages)
    check(smaller, free)
    with pytest.raises(ValueError, match=r"engine\.num_pages"):
        check(replace(PLAN, num_pages=num_pages + 1), free)
    context = int(words[1]) if len(words) > 1 else PLAN.max_context
    assert context <= smaller.num_tokens
    assert (len(words) > 1) == (smaller.num_tokens < PLAN.max_context)


def test_what_fits_is_not_refused() -> None:
    check(PLAN, PLAN.pool_bytes + PLAN.table_bytes)


def test_tables_that_leave_no_room_for_pages() -> None:
    with pytest.raises(ValueError, match=r"engine\.max_slots: .* lower it to 3, and num_pages"):
        check(PLAN, 9000)
    with pytest.raises(ValueError, match=r"engine\.max_slots: .* more chips \(engine\.mesh\)"):
        check(PLAN, 1000)


@dataclass
class Device:
    stats: dict[str, int] | None

    def memory_stats(self) -> dict[str, int] | None:
        return self.stats


def test_free_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The least that any chip has; virtual devices share the machine's memory."""
    chips: Any = SimpleNamespace(local_devices=[Device({"bytes_limit": 100, "bytes_in_use": used}) for used in (10, 30)])
    assert free_bytes(chips) == 70
    monkeypatch.setattr(memory, "_host_bytes", lambda: 800)
    assert free_bytes(make_mesh({"data": 8})) == 100


def test_host_bytes_are_of_this_machine() -> None:
    assert 2**20 < memory._host_bytes() < 2**50
