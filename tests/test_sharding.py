"""Meshes, rules, init and reshard on eight virtual devices. Values must be equal bit for bit: nothing is summed.

Legend: L layers, D model, H query heads, h head dim, F ffn, V vocab.
"""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from models.compiles import CompileCounter
from models.config import ModelConfig, MoEConfig
from models.transformer import describe
from sharding.mesh import make_mesh
from sharding.reshard import abstract, init, reshard
from sharding.route import route
from sharding.rules import Rules, Weight

pytestmark = pytest.mark.plain_code

NoCompiles = Callable[[], AbstractContextManager[CompileCounter]]

L, D, H, h, F, V = 3, 16, 4, 6, 24, 40

BLOCK = {
    "norm": Weight((D,), ("model",), 0),
    "q": Weight((D, H, h), ("model", "heads", "head"), 0.02),
    "down": Weight((F, D), ("ffn", "model"), 0.02),
}
OUTER = {"embed": Weight((V, D), ("vocab", "model"), 0.02), "norm": Weight((D,), ("model",), 0)}
STACKED = OUTER | {
    f"blocks.{name}": Weight((L, *weight.shape), ("layer", *weight.dims), weight.init) for name, weight in BLOCK.items()
}
UNROLLED = OUTER | {f"blocks.{i}.{name}": weight for i in range(L) for name, weight in BLOCK.items()}

TRAIN = Rules({"model": "fsdp", "heads": "tensor", "ffn": "tensor", "vocab": "tensor"})
SERVE = Rules({"heads": "tensor", "ffn": "tensor", "vocab": "tensor"})


def whole(params: Mapping[str, jax.Array]) -> dict[str, np.ndarray]:
    return {name: np.asarray(array) for name, array in params.items()}


def unstacked(params: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The unrolled tree's values, made with numpy alone."""
    result = {}
    for name, array in params.items():
        if name.startswith("blocks."):
            result |= {f"blocks.{i}.{name.removeprefix('blocks.')}": array[i] for i in range(L)}
        else:
            result[name] = array
    return result


def assert_same(params: Mapping[str, jax.Array], wanted: Mapping[str, np.ndarray]) -> None:
    assert params.keys() == wanted.keys()
    for name, array in params.items():
        np.testing.assert_array_equal(np.asarray(array), wanted[name], err_msg=name, strict=True)


def devices(first: int, count: int) -> list[jax.Device]:
    return jax.devices()[first : first + count]


LAYOUTS: dict[str, tuple[Rules, dict[str, int], int]] = {
    "fsdp4 tensor2": (TRAIN, {"fsdp": 4, "tensor": 2}, 0),
    "tensor2 fsdp4": (TRAIN, {"tensor": 2, "fsdp": 4}, 0),  # the same devices in another order
    "data2 tensor2": (SERVE, {"data": 2, "tensor": 2}, 4),
    "tensor2": (SERVE, {"tensor": 2}, 6),
    "one device": (SERVE, {"tensor": 1}, 7),
}
"""rules, mesh, first device"""


def layout(name: str, weights: Mapping[str, Weight]) -> dict[str, Sharding]:
    """Of all weights or some."""
    rules, axes, first = LAYOUTS[name]
    mesh = make_mesh(axes, jax.devices()[first:])
    return {name: rules.sharding(mesh, weight, name) for name, weight in weights.items()}


@pytest.mark.parametrize("there", LAYOUTS)
@pytest.mark.parametrize("here", LAYOUTS)
def test_there_and_back_is_bitwise(here: str, there: str, capfd: pytest.CaptureFixture[str]) -> None:
    trainer = init(STACKED, jax.random.key(0), jnp.float32, layout(here, STACKED))
    before = whole(trainer)
    engine_shardings = layout(there, UNROLLED)
    engine = reshard(trainer, STACKED, UNROLLED, engine_shardings, jnp.float32)
    assert_same(engine, unstacked(before))
    assert {name: array.sharding for name, array in engine.items()} == engine_shardings
    back_shardings = layout(here, STACKED)
    back = reshard(engine, UNROLLED, STACKED, back_shardings, jnp.float32, chunk_bytes=1)
    assert_same(back, before)
    assert all(array.sharding.is_equivalent_to(back_shardings[name], array.ndim) for name, array in back.items())
    assert "full rematerialization" not in capfd.readouterr().err  # XLA found no way but the one that wastes memory


@pytest.mark.parametrize("chunk_bytes", [1, 2**28])
@pytest.mark.parametrize("weights", [STACKED, UNROLLED], ids=["stacked", "unrolled"])
def test_same_form_in_another_place(weights: Mapping[str, Weight], chunk_bytes: int) -> None:
    here = init(weights, jax.random.key(1), jnp.float32, layout("fsdp4 tensor2", weights))
    there = reshard(here, weights, weights, layout("tensor2", weights), jnp.float32, chunk_bytes)
    assert_same(there, whole(here))


def test_cast_is_the_rounding_of_numpy() -> None:
    trainer = init(STACKED, jax.random.key(2), jnp.float32, layout("fsdp4 tensor2", STACKED))
    engine = reshard(trainer, STACKED, UNROLLED, layout("tensor2", UNROLLED), jnp.bfloat16)
    assert_same(engine, {name: array.astype(jnp.bfloat16) for name, array in unstacked(whole(trainer)).items()})


@pytest.mark.parametrize(("experts", "ffn", "split"), [(5, 7, "expert_ffn"), (6, 9, "experts")])
def test_experts_that_axes_do_not_divide(experts: int, ffn: int, split: str) -> None:
    """A trainer at expert 2 x fsdp 2 to an engine at tensor 2 elsewhere, twice with other weights: each leaf is the rounding of
    its source. Dims that an axis does not divide are whole on every device, and never padded."""
    model = ModelConfig(
        family="qwen3_moe", vocab_size=40, model_dim=16, ffn_dim=24, num_layers=L, num_heads=4, num_kv_heads=2, head_dim=6,
        max_positions=64,
        moe=MoEConfig(num_experts=experts, experts_per_token=2, ffn_dim=ffn),
    )  # fmt: skip
    source, target = describe(model), describe(model, stacked=False)
    here = Rules({"embed": "fsdp", "experts": "expert"}).shardings(make_mesh({"expert": 2, "fsdp": 2}), source)
    rules = Rules({split: "tensor", "heads": "tensor", "kv_heads": "tensor", "vocab": "tensor"})
    there = rules.shardings(make_mesh({"tensor": 2}, devices(6, 2)), target)
    for seed in range(2):
        trainer = init(source, jax.random.key(seed), jnp.float32, here)
        assert trainer["blocks.moe.up"].sharding.shard_shape((L, experts, 16, ffn)) == (
            L,
            experts if experts % 2 else 3,
            8,
            ffn,
        )
        engine = reshard(trainer, source, target, there, jnp.bfloat16, chunk_bytes=2**12)
        assert_same(engine, {name: array.astype(jnp.bfloat16) for name, array in unstacked(whole(trainer)).items()})
        assert {name: array.sharding for name, array in engine.items()} == there
    kept = (3, 16, ffn) if split == "experts" else (experts, 16, ffn)
    assert engine["blocks.1.moe.up"].sharding.shard_shape((experts, 16, ffn)) == kept
    gone = {name: weight for name, weight in target.items() if name != "blocks.1.moe.down"}
    with pytest.raises(ValueError, match=r"source: blocks\.1\.moe\.down is extra; the target does not want it"):
        reshard(trainer, source, gone, {name: there[name] for name in gone}, jnp.bfloat16)
    with pytest.raises(ValueError, match=r"target: blocks\.1\.moe\.down is missing from the source"):
        reshard({n: engine[n] for n in gone}, gone, target, there, jnp.bfloat16)


def test_layers_split_over_an_axis() -> None:
    weights = {"blocks.q": Weight((4, D, H, h), ("layer", "model", "heads", "head"), 0.02)}
    unrolled = {f"blocks.{i}.q": Weight((D, H, h), ("model", "heads", "head"), 0.02) for i in range(4)}
    rules = Rules({"layer": "data", "heads": "tensor"})
    shardings = rules.shardings(make_mesh({"data": 2, "tensor": 2}), weights)
    here = init(weights, jax.random.key(3), jnp.float32, shardings)
    there = reshard(here, weights, unrolled, layout("tensor2", unrolled), jnp.float32)
    for i in range(4):
        np.testing.assert_array_equal(np.asarray(there[f"blocks.{i}.q"]), np.asarray(here["blocks.q"])[i])
    back = reshard(there, unrolled, weights, shardings, jnp.float32)
    np.testing.assert_array_equal(np.asarray(back["blocks.q"]), np.asarray(here["blocks.q"]))


def test_result_shares_no_buffer() -> None:
    """The trainer donates its arrays to the next step; the engine must live on."""
    shardings = layout("one device", STACKED)
    here = init(STACKED, jax.random.key(4), jnp.float32, shardings)
    before = whole({name: jnp.copy(array) for name, array in here.items()})
    there = reshard(here, STACKED, STACKED, shardings, jnp.float32)
    for array in here.values():
        array.delete()
    assert_same(there, before)


def test_no_compile_after_the_first(assert_no_compiles: NoCompiles) -> None:
    first = init(STACKED, jax.random.key(5), jnp.float32, layout("fsdp4 tensor2", STACKED))
    second = init(STACKED, jax.random.key(6), jnp.float32, layout("fsdp4 tensor2", STACKED))
    engine = reshard(first, STACKED, UNROLLED, layout("tensor2", UNROLLED), jnp.bfloat16)
    reshard(engine, UNROLLED, STACKED, layout("fsdp4 tensor2", STACKED), jnp.bfloat16)
    with assert_no_compiles():  # new meshes and shardings, equal to the old ones
        engine = reshard(second, STACKED, UNROLLED, layout("tensor2", UNROLLED), jnp.bfloat16)
        reshard(engine, UNROLLED, STACKED, layout("fsdp4 tensor2", STACKED), jnp.bfloat16)


COUNTS = st.sampled_from([1, 2, 3, 4, 6])


@given(source=st.tuples(COUNTS, COUNTS), target=st.tuples(COUNTS, COUNTS), spare=st.sampled_from([1, 2]))
def test_route_copies_shard_to_shard(source: tuple[int, int], target: tuple[int, int], spare: int) -> None:
    """Every piece that a target device asks for is some source device's whole shard, so no host gathers.

    Up to the copy nothing is exchanged but by all-gathers, and after it nothing at all.
    """
    if source[0] * source[1] * spare > 8 or target[0] * target[1] > 8:
        return
    shape = (12, 24)
    here = NamedSharding(make_mesh({"fsdp": source[0], "tensor": source[1], "data": spare}), PartitionSpec("fsdp", "tensor"))
    there = NamedSharding(
        make_mesh({"fsdp": target[0], "tensor": target[1]}, jax.devices()[::-1]), PartitionSpec("tensor", "fsdp")
    )
    way = route(here, there, len(shape))
    assert way.before.device_set == way.common.device_set == here.device_set
    assert way.after.device_set == there.device_set

    def pieces(sharding: Sharding) -> set[str]:
        return {str(index) for index in sharding.devices_indices_map(shape).values()}

    assert pieces(way.after) == pieces(way.before)
    for fine, coarse in ((here, way.common), (way.before, way.common), (there, way.after)):
        for device, index in coarse.devices_indices_map(shape).items():
            for whole_range, part_range, size in zip(index, fine.devices_indices_map(shape)[device], shape, strict=True):
                part, outer = range(size)[part_range], range(size)[whole_range]
                assert outer[0] <= part[0] and part[-1] <= outer[-1]


def test_route_moves_only_what_the_target_wants() -> None:
    """Fully sharded on four devices to tensor parallel on two: halves are copied, not wholes."""
    here = NamedSharding(make_mesh({"fsdp": 4}), PartitionSpec("fsdp"))
    there = NamedSharding(make_mesh({"tensor": 2}, devices(4, 2)), PartitionSpec(None, "tensor"))
    way = route(here, there, 2)
    assert way.common.is_fully_replicated
    assert way.before.shard_shape((8, 6)) == (8, 3)
    assert way.after is there
    # and when the trainer is tensor parallel as well, its halves are the engine's
    here = NamedSharding(make_mesh({"fsdp": 4, "tensor": 2}), PartitionSpec("fsdp", "tensor"))
    way = route(here, there, 2)
    assert way.common == way.before
    assert way.common.shard_shape((8, 6)) == (8, 3)


def test_pieces_that_neither_side_holds_evenly() -> None:
    weights = {"down": Weight((F, D), ("ffn", "model"), 0.02)}
    rules = Rules({"ffn": "fsdp"})
    here = init(weights, jax.random.key(7), jnp.float32, rules.shardings(make_mesh({"fsdp": 3}), weights))
    there = reshard(here, weights, weights, rules.shardings(make_mesh({"fsdp": 4}, devices(3, 4)), weights), jnp.float32)
    assert_same(there, whole(here))


def test_manifest_lists_every_fault_and_moves_nothing() -> None:
    shardings = layout("fsdp4 tensor2", STACKED)
    params = init(STACKED, jax.random.key(8), jnp.float32, shardings)
    params["ghost"] = params["norm"]
    params["embed"] = params["embed"][:-1]
    source = STACKED | {"blocks.up": Weight((L, D, F), ("layer", "model", "ffn"), 0.02)}
    target = dict(UNROLLED)
    del target["blocks.1.q"]
    target["head"] = Weight((D, V), ("model", "vocab"), 0.02)
    target["norm"] = Weight((D + 1,), ("model",), 0)
    target["blocks.0.down"] = Weight((F, D), ("model", "ffn"), 0.02)
    place = layout("tensor2", UNROLLED)
    with pytest.raises(ValueError, match="differ in 10 places, nothing was moved") as caught:
        reshard(params, source, target, place, jnp.float32)
    text = str(caught.value)
    for fault in (
        "params: blocks.up is missing; the source describes it",
        "params: ghost is extra; the source does not describe it",
        "params: embed has shape [39, 16], but the source describes [40, 16]",
        "target: head is missing from the source",
        "source: blocks.1.q is extra; the target does not want it",
        "source: blocks.up is extra; the target does not want it",
        "target: norm is [model=17], but the source has [model=16]",
        "target: blocks.0.down is [model=24, ffn=16], but the source has [ffn=24, model=16]",
        "shardings: head is missing",
        "shardings: blocks.1.q is extra",
    ):
        assert fault in text
    assert not any(array.is_deleted() for array in params.values())


def test_manifest_counts_layers() -> None:
    shallow = {name: Weight((2, *w.shape[1:]), w.dims, w.init) if "blocks" in name else w for name, w in STACKED.items()}
    params = init(STACKED, jax.random.key(9), jnp.float32, layout("one device", STACKED))
    with pytest.raises(ValueError, match=r"source: blocks\.2\.q is extra"):
        reshard(params, STACKED, shallow, layout("one device", shallow), jnp.float32)


def test_init_does_not_depend_on_the_mesh_or_on_other_weights() -> None:
    key = jax.random.key(10)
    values = whole(init(STACKED, key, jnp.float32, layout("one device", STACKED)))
    for name in LAYOUTS:
        assert_same(init(STACKED, key, jnp.float32, layout(name, STACKED)), values)
    alone = {"embed": STACKED["embed"]}
    assert_same(init(alone, key, jnp.float32, layout("tensor2", alone)), {"embed": values["embed"]})
    assert np.array_equal(values["norm"], np.ones(D, np.float32))
    assert abs(values["blocks.down"].std() - 0.02) < 0.001  # 1,152 draws: their deviation is known to 0.0004
    assert not np.array_equal(values["blocks.down"][0], values["blocks.down"][1])


def test_init_rounds_the_same_draws() -> None:
    shardings = layout("fsdp4 tensor2", STACKED)
    exact = whole(init(STACKED, jax.random.key(11), jnp.float32, shardings))
    rounded = init(STACKED, jax.random.key(11), jnp.bfloat16, shardings)
    assert_same(rounded, {name: array.astype(jnp.bfloat16) for name, array in exact.items()})


def test_abstract_describes_init() -> None:
    shardings = layout("fsdp4 tensor2", STACKED)
    params = init(STACKED, jax.random.key(12), jnp.bfloat16, shardings)
    for name, struct in abstract(STACKED, jnp.bfloat16, shardings).items():
        array = params[name]
        assert (struct.shape, struct.dtype, struct.sharding) == (array.shape, array.dtype, array.sharding)
    assert abstract(STACKED, jnp.float32)["norm"].sharding is None


def test_two_dims_on_one_axis_are_refused_by_name() -> None:
    rules = Rules({"model": "tensor", "heads": "tensor"})
    with pytest.raises(ValueError, match=r"blocks\.q has dims 'model' and 'heads' both on mesh axis 'tensor'"):
        rules.shardings(make_mesh({"tensor": 2}), STACKED)


def test_dim_that_an_axis_does_not_divide_is_named() -> None:
    with pytest.raises(ValueError, match=r"dim 'head' of blocks\.q has size 6, which 4 devices on 'tensor'"):
        Rules({"head": "tensor"}).shardings(make_mesh({"tensor": 4}), STACKED)


def test_axis_that_the_mesh_lacks_is_named() -> None:
    with pytest.raises(ValueError, match="'model' is mapped to 'fsdp', but the mesh has axes"):
        TRAIN.shardings(make_mesh({"tensor": 2}), STACKED)


def test_rule_for_a_dim_that_no_weight_has_is_named() -> None:
    mesh = make_mesh({"tensor": 2})
    with pytest.raises(ValueError, match=r"^rules: no weight has a dim 'modle'; did you mean 'model'\?"):
        Rules({"heads": "tensor", "modle": "tensor"}).shardings(mesh, STACKED)
    with pytest.raises(ValueError, match=r"^rules: .* 'xyz'; they have ffn, head, heads, model, vocab$"):
        Rules({"xyz": None}).shardings(mesh, UNROLLED)


def test_meshes_that_cannot_be() -> None:
    with pytest.raises(ValueError, match="fsdp=8 x tensor=2 needs 16 devices, but there are 8"):
        make_mesh({"fsdp": 8, "tensor": 2})
    with pytest.raises(ValueError, match="axis 'model' is unknown"):
        make_mesh({"model": 2})
    with pytest.raises(ValueError, match="axis 'data' has size 0"):
        make_mesh({"data": 0})


def test_one_axis_over_several_mesh_axes() -> None:
    mesh = make_mesh({"data": 2, "fsdp": 2, "tensor": 2})
    sharding = Rules({"model": ("data", "fsdp"), "vocab": "tensor"}).sharding(mesh, OUTER["embed"], "embed")
    assert sharding.shard_shape((V, D)) == (V // 2, D // 4)
