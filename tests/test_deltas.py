"""Deltas on eight virtual devices. Everything is equal bit for bit; there are no tolerances."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from models.compiles import CompileCounter
from sharding.bits import Reader, Writer
from sharding.delta_file import Delta
from sharding.deltas import apply, checksums, diff, stage
from sharding.mesh import make_mesh
from sharding.places import CLASSES

pytestmark = pytest.mark.plain_code

P = PartitionSpec
NoCompiles = Callable[[], AbstractContextManager[CompileCounter]]
Tree = Mapping[str, np.ndarray]

SHAPES = {"a": (64, 24, 10), "norm": (37,), "b": (48, 129)}
"""37 and 129 are cut by no mesh; 64 * 24 * 10 is whole groups of 128, the others are not"""
LAYOUTS: dict[str, tuple[dict[str, int], int, dict[str, PartitionSpec]]] = {
    "one": ({"data": 1}, 7, {}),
    "eight": ({"fsdp": 4, "tensor": 2}, 0, {"a": P("fsdp", "tensor"), "b": P("fsdp")}),
    "eight, inner": ({"tensor": 2, "fsdp": 4}, 0, {"a": P(None, ("fsdp", "tensor")), "b": P(("tensor", "fsdp"))}),
    "two of eight": ({"data": 4, "tensor": 2}, 0, {"a": P(None, None, "tensor"), "b": P("tensor")}),
}
SPECIAL = np.asarray([0, 0x8000, 1, 0x8001, 0x7F80, 0xFF80, 0x7F81, 0x7FC0, 0xFFFF, 0x3F80, 0x7F, 0x80, 0x7F7F], np.uint16)
"""bfloat16: zeros, subnormals, infinities, NaNs with payloads, 1, the edges between"""


def place(tree: Tree, layout: str) -> dict[str, jax.Array]:
    axes, first, specs = LAYOUTS[layout]
    mesh = make_mesh(axes, jax.devices()[first:])
    return {name: jax.device_put(value, NamedSharding(mesh, specs.get(name, P()))) for name, value in tree.items()}


def rounded(tree: Tree) -> dict[str, np.ndarray]:
    return {name: np.asarray(jnp.asarray(value).astype(jnp.bfloat16)) for name, value in tree.items()}


def trees(step: float, seed: int = 0) -> tuple[dict[str, np.ndarray], dict[str, np.ndarray]]:
    """Rounded float32 masters before and after every element moves by `step` up or down."""
    rng = np.random.default_rng(seed)
    old = {name: 0.02 * rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    new = {name: x + np.float32(step) * rng.choice(np.asarray([-1, 1], np.float32), x.shape) for name, x in old.items()}
    return rounded(old), rounded(new)


def assert_bits(params: Mapping[str, jax.Array], wanted: Tree) -> None:
    assert params.keys() == wanted.keys()
    for name, value in wanted.items():
        kind = np.dtype(f"u{value.dtype.itemsize}")
        np.testing.assert_array_equal(np.asarray(params[name]).view(kind), value.view(kind), err_msg=name, strict=True)


def moved(params: Mapping[str, jax.Array], version: int, delta: Delta) -> dict[str, jax.Array]:
    return apply(params, stage(params, version, Delta.from_bytes(delta.to_bytes())))


@pytest.mark.parametrize("step", [0.0, 2e-7, 2e-5, 1.0])
def test_any_sharding_makes_the_same_delta_and_any_applies_it(step: float) -> None:
    """Also the kinds: nothing changed, few did, most did, all did and are best sent whole."""
    old, new = trees(step)
    made = {layout: diff(place(old, layout), place(new, layout), 3, 4).to_bytes() for layout in LAYOUTS}
    delta = Delta.from_bytes(made["one"])
    assert all(data == made["one"] for data in made.values())
    kinds = {entry.name: entry.kind for entry in delta.entries}
    assert kinds["a"] == kinds["b"] == {0.0: "same", 1.0: "dense"}.get(step, "sparse")
    for layout in LAYOUTS:
        params = place(old, layout)
        shardings = {name: array.sharding for name, array in params.items()}
        result = moved(params, 3, delta)
        assert_bits(result, new)
        assert {name: array.sharding for name, array in result.items()} == shardings
        assert checksums(result) == {entry.name: entry.checksum for entry in delta.entries}


def test_small_deltas_are_small() -> None:
    """Below the entropy of the changes without knowing the old bits, header and checksums left aside."""
    rng = np.random.default_rng(1)
    master = 0.025 * rng.standard_normal((512, 1024), np.float32)
    old = rounded({"w": master})
    new = rounded({"w": master + np.float32(3e-7) * rng.standard_normal(master.shape, np.float32)})
    delta = diff(place(old, "one"), place(new, "one"), 0, 1)
    changed = new["w"].view(np.uint16) - old["w"].view(np.uint16)
    _, counts = np.unique(changed, return_counts=True)  # H2(p) + p h_v is the entropy of the differences, 0 among them
    bound = -(counts * np.log2(counts / changed.size)).sum() / 8
    assert 0.005 < np.mean(changed != 0) < 0.02
    assert sum(map(len, delta.data)) < 0.8 * bound


def test_a_scalar_and_nothing() -> None:
    """Leaves of one element and of none."""
    old = {"scalar": np.float32(1.5), "none": np.zeros((3, 0), np.float32)}
    new = {"scalar": np.float32(-0.0), "none": np.zeros((3, 0), np.float32)}
    old, new = ({name: np.asarray(value) for name, value in each.items()} for each in (old, new))
    assert_bits(moved(place(old, "two of eight"), 0, diff(place(old, "one"), place(new, "one"), 0, 1)), new)


def test_checksums_against_numpy() -> None:
    """The definition, element by element, in 64 bits; the same on one device and on eight."""

    def hashed(index: np.ndarray, dim: int, salt: int) -> np.ndarray:
        x = (index.astype(np.uint64) + np.uint64(dim << 28)) * np.uint64(salt) % 2**32
        x = (x ^ (x >> np.uint64(15))) * np.uint64(0x85EBCA77) % 2**32
        return x ^ (x >> np.uint64(13))

    tree, _ = trees(0.0)
    for name, value in tree.items():
        at = [np.asarray(index) for index in np.indices(value.shape)]
        f = np.bitwise_xor.reduce(np.stack([hashed(index, dim, 0x9E3779B1) for dim, index in enumerate(at)])) | np.uint64(1)
        first = value.view(np.uint16).astype(np.uint64) * f % 2**32
        second = first * (hashed(at[-1], 0, 0xC2B2AE3D) | np.uint64(1)) % 2**32
        wanted = f"{int(first.sum()) % 2**32:08x}{int(second.sum()) % 2**32:08x}"
        assert {checksums(place(tree, layout))[name] for layout in LAYOUTS} == {wanted}


def test_the_changed_arrays_are_donated() -> None:
    old, new = trees(2e-6)
    params = place(old, "one")
    params["a"] = jnp.copy(params["a"])  # its own buffer, not the one of numpy
    before = params["a"].unsafe_buffer_pointer()
    result = moved(params, 3, diff(params, place(new, "one"), 3, 4))
    assert params["a"].is_deleted() and result["a"].unsafe_buffer_pointer() == before


@st.composite
def two_patterns(draw: st.DrawFn, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Random bits, special values, and a share of them changed to any other bits or by one."""
    kind = np.dtype(f"u{jnp.dtype(dtype).itemsize}")
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    old = rng.integers(0, np.iinfo(kind).max, (24, 130), kind, endpoint=True)
    if draw(st.booleans()):
        old = rng.choice(SPECIAL, old.shape).astype(kind)
    share = draw(st.sampled_from([0, 0.001, 0.02, 0.5, 0.98, 1]))
    other = rng.integers(0, np.iinfo(kind).max, old.shape, kind, endpoint=True)
    if draw(st.booleans()):
        other = old + rng.choice(np.asarray([1, -1]).astype(kind), old.shape)
    new = np.where(rng.random(old.shape) < share, other, old)
    return old.view(jnp.dtype(dtype)), new.view(jnp.dtype(dtype))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn", "float32"])
@settings(max_examples=10)
@given(data=st.data())
def test_any_bits(dtype: str, data: st.DataObject) -> None:
    old, new = data.draw(two_patterns(dtype))
    delta = diff(place({"b": old}, "eight"), place({"b": new}, "eight"), 0, 1)
    assert_bits(moved(place({"b": old}, "two of eight"), 0, delta), {"b": new})


def test_a_chain_of_100_deltas_is_the_snapshot() -> None:
    """float32 masters take 100 steps; each version's delta is made on eight devices and applied on two."""
    rng = np.random.default_rng(2)
    shapes = {"a": (64, 24, 10), "b": (48, 129)}
    masters = {name: 0.02 * rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    published = place(rounded(masters), "eight")
    served = place(rounded(masters), "two of eight")
    for version in range(100):
        masters = {name: x + 3e-7 * rng.standard_normal(x.shape, np.float32) for name, x in masters.items()}
        new = place(rounded(masters), "eight")
        served = moved(served, version, diff(published, new, version, version + 1))
        published = new
    assert_bits(served, rounded(masters))


def test_every_corrupted_byte_is_caught() -> None:
    old, new = trees(2e-7)
    data = diff(place(old, "one"), place(new, "one"), 3, 4).to_bytes()
    for at in range(len(data)):
        broken = bytearray(data)
        broken[at] ^= 1 + at % 255
        with pytest.raises(ValueError, match="delta: its checksum is not that of its bytes"):
            Delta.from_bytes(bytes(broken))
    for cut in (0, 1, 40, len(data) - 1):
        with pytest.raises(ValueError, match="cut or corrupted"):
            Delta.from_bytes(data[:cut])


def test_out_of_order_twice_and_on_another_base() -> None:
    first, second = trees(2e-6)
    _, other = trees(2e-6, seed=1)
    delta = diff(place(first, "one"), place(second, "one"), 3, 4)
    params = place(first, "eight")
    for version in (2, 4):  # before its base; a second time
        with pytest.raises(ValueError, match=rf"delta\.base: is 3, but the weights are version {version}"):
            stage(params, version, delta)
    wrong = place(other, "eight")
    with pytest.raises(ValueError, match=r"delta\.a: leads from checksum"):
        stage(wrong, 3, delta)
    assert_bits(wrong, other)
    assert_bits(params, first)
    with pytest.raises(ValueError, match="version: 3 does not come after base 3"):
        diff(params, params, 3, 3)


def test_one_flipped_bit_of_the_base_is_seen() -> None:
    """Anywhere, in what changes and in what does not."""
    old, new = trees(2e-7)
    delta = diff(place(old, "one"), place(new, "one"), 3, 4)
    for name, at, bit in (("a", 0, 0), ("a", 15359, 15), ("norm", 36, 7), ("b", 128, 3), ("b", 6191, 14)):
        flipped = {**old, name: old[name].copy()}
        flipped[name].reshape(-1).view(np.uint16)[at] ^= 1 << bit
        with pytest.raises(ValueError, match=rf"delta\.{name}: leads from checksum"):
            stage(place(flipped, "eight"), 3, delta)


def test_the_manifest_is_exact_both_ways() -> None:
    old, new = trees(2e-6)
    delta = diff(place(old, "one"), place(new, "one"), 3, 4)
    params = place({"a": old["a"], "norm": old["norm"][:36], "d": old["b"]}, "one")
    with pytest.raises(
        ValueError, match=r"(?s)3 places.*b is missing.*d is extra.*norm is bfloat16 \[36\], wanted bfloat16 \[37\]"
    ):
        stage(params, 3, delta)
    with pytest.raises(ValueError, match="a is sharded in two ways"):
        diff(place(old, "one"), place(new, "eight"), 3, 4)
    with pytest.raises(ValueError, match="8, 16 or 32 bits"):
        checksums(place({"a": np.zeros(4, np.complex64)}, "one"))


def test_nothing_compiles_for_the_next_delta(assert_no_compiles: NoCompiles) -> None:
    first, second = trees(2e-6)
    moved(place(first, "two of eight"), 3, diff(place(first, "eight"), place(second, "eight"), 3, 4))
    _, third = trees(2.1e-6)
    served, old, new = place(second, "two of eight"), place(second, "eight"), place(third, "eight")
    with assert_no_compiles():
        moved(served, 4, diff(old, new, 4, 5))


def test_a_result_that_was_not_published_is_refused() -> None:
    """A delta whose bytes are whole, but whose data is another's."""
    old, new = trees(2e-6)
    _, other = trees(2.1e-6)
    params = place(old, "one")
    delta, wrong = diff(params, place(new, "one"), 3, 4), diff(params, place(other, "one"), 3, 4)
    with pytest.raises(ValueError, match=r"delta\.a: its result would have checksum"):
        stage(params, 3, replace(delta, data=wrong.data))
    assert_bits(params, old)


@given(
    sizes=st.lists(st.integers(0, 5000), min_size=1, max_size=4),
    share=st.sampled_from([0, 0.001, 0.1, 0.6, 1]),
    seed=st.integers(0, 2**32 - 1),
)
def test_bit_streams(sizes: Sequence[int], share: float, seed: int) -> None:
    """Positions and steps of any density, with outliers, one after the other."""
    rng, writer, wanted = np.random.default_rng(seed), Writer(), []
    for size in sizes:
        positions = np.flatnonzero(rng.random(size) < share)
        steps = rng.choice([-1, 1], len(positions)) * np.where(
            rng.random(len(positions)) < 0.1, rng.integers(1, 2**31, len(positions)), 1
        )
        writer.positions(positions, size)
        writer.steps(steps)
        wanted.append((positions, steps))
    reader = Reader(bytes(writer.data))
    for size, (positions, steps) in zip(sizes, wanted, strict=True):
        np.testing.assert_array_equal(reader.positions(size), positions)
        np.testing.assert_array_equal(reader.steps(len(positions)), steps)
    assert reader.at == len(writer.data)


def test_a_gaussian_step_fills_the_classes() -> None:
    """The edges follow the changes, so that each class has some (what makes the code smaller)."""
    old, new = trees(2e-5)
    delta = diff(place(old, "one"), place(new, "one"), 0, 1)
    edges = list(bytes(delta.data[0][: CLASSES - 1]))
    assert edges == sorted(edges) and len(set(edges) - {255}) >= 1
