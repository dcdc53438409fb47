"""The weight store on memory and files: exact versions, one winner, nothing torn, nothing lost that is needed.

TWINAX_STORE=s3://BUCKET/FOLDER/ pytest tests/test_store.py      the same on an empty folder of another store, by hand
"""

import itertools
import os
import signal
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax.sharding import NamedSharding, PartitionSpec

from sharding.delta_file import Delta
from sharding.head import Head, Version
from sharding.mesh import make_mesh
from sharding.store import Superseded, WeightStore, open_url

Params = dict[str, jax.Array]
SHAPES = {"embed": (48, 128), "blocks.0.norm": (37,)}
_FOLDERS = itertools.count()


def memory() -> str:
    """A folder that no other test sees."""
    return f"{os.environ.get('TWINAX_STORE', 'memory://')}{next(_FOLDERS)}/"


def place(tree: dict[str, np.ndarray], eight: bool = False) -> Params:
    mesh = make_mesh({"fsdp": 8}) if eight else make_mesh({"data": 1})
    specs = {"embed": PartitionSpec("fsdp")} if eight else {}
    return {name: jax.device_put(value, NamedSharding(mesh, specs.get(name, PartitionSpec()))) for name, value in tree.items()}


def tree(version: int) -> dict[str, np.ndarray]:
    """Of a version: each moves some elements of the one before by one ulp."""
    rng = np.random.default_rng(0)
    bits = {name: (0.02 * rng.standard_normal(shape, np.float32)).view(np.uint32) >> 16 for name, shape in SHAPES.items()}
    bits = {name: value.astype(np.uint16) for name, value in bits.items()}
    for step in range(version):
        rng = np.random.default_rng(step + 1)
        bits = {name: value + (rng.random(value.shape) < 0.02).astype(np.uint16) for name, value in bits.items()}
    return {name: value.view(jax.numpy.bfloat16) for name, value in bits.items()}


def publish(store: WeightStore, version: int) -> Version:
    """As a trainer does, that has published the version before."""
    if version == 0:
        return store.publish(place(tree(0)), 0)
    return store.publish(place(tree(version)), version, version - 1, place(tree(version - 1)))


def filled(url: str, versions: int, anchor_every: int, keep: int = 4) -> WeightStore:
    store = WeightStore(url, anchor_every, keep)
    for version in range(versions):
        publish(store, version)
    return store


def assert_version(params: Params, version: int) -> None:
    wanted = tree(version)
    assert params.keys() == wanted.keys()
    for name, value in wanted.items():
        np.testing.assert_array_equal(np.asarray(params[name]).view(np.uint16), value.view(np.uint16), err_msg=name)


def shardings() -> dict[str, jax.sharding.Sharding]:
    """Of a reader on eight devices; the publisher has one."""
    return {name: array.sharding for name, array in place(tree(0), eight=True).items()}


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_every_version_is_read_exactly(kind: str, tmp_path: Path) -> None:
    url = memory() if kind == "memory" else f"file://{tmp_path}/"
    filled(url, 8, anchor_every=3)
    store = WeightStore(url, anchor_every=3)  # another of the same
    head = store.head()
    assert head.version == 7
    assert [number for number, entry in head.versions.items() if entry.anchor_bytes] == [0, 3, 6]
    assert all(0 < entry.delta_bytes < entry.anchor_bytes or number not in (3, 6) for number, entry in head.versions.items())
    for version in range(8):
        assert_version(store.fetch(version, shardings()), version)
    for missing in (8, -1):
        with pytest.raises(ValueError, match=f"version: the store does not hold {missing}; it holds 0, 1, 2"):
            store.fetch(missing, shardings())


def test_catching_up_from_any_version() -> None:
    store = filled(memory(), 6, anchor_every=100)
    for have in range(6):
        params = store.catch_up(place(tree(have), eight=True), have, 5)
        assert_version(params, 5)
        assert params["embed"].sharding == shardings()["embed"]


def test_a_reader_that_is_not_where_it_says_keeps_its_weights() -> None:
    store = filled(memory(), 4, anchor_every=100)
    params = place(tree(1))
    for version in (3, 4 - 1):
        with pytest.raises(ValueError, match="leads from checksum"):
            store.catch_up(params, 2, version)
    assert_version(params, 1)


def test_the_way_with_the_least_to_read() -> None:
    def version(number: int, anchor: int, delta: int) -> Version:
        return Version(number, number - 1 if delta else None, "", anchor, delta)

    listed = [version(0, 100, 0), version(1, 0, 30), version(2, 0, 30), version(3, 100, 30), version(4, 0, 30)]
    head = Head({each.version: each for each in listed}, {})

    def way(wanted: int, have: int | None) -> tuple[int | None, list[int]]:
        anchor, deltas = head.way(wanted, have)
        return anchor, [each.version for each in deltas]

    assert way(4, None) == (3, [4])
    assert way(4, 3) == (None, [4])
    assert way(4, 1) == (None, [2, 3, 4])  # 90 bytes, the anchor and a delta are 130
    assert way(2, None) == (0, [1, 2])
    assert way(1, 3) == (0, [1])  # back: no delta leads there
    assert way(4, -1) == (3, [4])


@settings(max_examples=60)
@given(
    anchors=st.lists(st.booleans(), min_size=1, max_size=12),
    pins=st.dictionaries(st.sampled_from("abc"), st.integers(0, 11)),
    keep=st.integers(1, 4),
)
def test_what_collect_keeps_is_enough(anchors: list[bool], pins: dict[str, int], keep: int) -> None:
    """Every version that is wanted can be made of versions that are kept, and every kept one is needed."""
    versions = {
        number: Version(number, number - 1 if number else None, "", 100 if anchor or not number else 0, 5 if number else 0)
        for number, anchor in enumerate(anchors)
    }
    head = Head(versions, {reader: version for reader, version in pins.items() if version in versions})
    after = head.collected(keep)
    wanted = {*sorted(versions)[-keep:], *head.pins.values()}
    assert {needed for version in wanted for needed in after.needed(version)} == after.versions.keys()
    assert wanted <= after.versions.keys() and after.pins == head.pins


def test_collect_against_pinned_readers(tmp_path: Path) -> None:
    store = filled(f"file://{tmp_path}/", 9, anchor_every=3, keep=1)  # anchors 0, 3, 6
    store.pin("slow", 1)
    store.pin("other", 4)
    assert store.collect() == [2, 5]
    assert {path.name.partition("-")[0] for path in (tmp_path / "data").iterdir() if any(path.rglob("*"))} == {
        f"{version:010d}" for version in (0, 1, 3, 4, 6, 7, 8)
    }
    for version in (1, 4, 8):
        assert_version(store.fetch(version, shardings()), version)
    assert_version(store.catch_up(place(tree(1)), 1, 8), 8)  # the chain has gaps, so by the anchor
    with pytest.raises(ValueError, match="does not hold 2"):
        store.pin("late", 2)
    store.unpin("slow")
    store.pin("other", 8)
    assert store.collect() == [0, 1, 3, 4]
    publish(store, 9)
    assert_version(store.fetch(9, shardings()), 9)


def test_going_back(tmp_path: Path) -> None:
    """A trainer resumes from version 2 and publishes 3 again, with other bits; readers of what is gone are unpinned."""
    store = filled(f"file://{tmp_path}/", 5, anchor_every=2)
    dead = store.head().versions[3]
    store.pin("old", 1)
    store.pin("new", 4)
    for missing in (5, -1):
        with pytest.raises(ValueError, match=f"the store does not hold {missing}"):
            store.rewind(missing)
    assert store.rewind(2) == [3, 4] and store.rewind(2) == []
    head = store.head()
    assert head.version == 2 and head.pins == {"old": 1}
    with pytest.raises(ValueError, match="does not hold 3"):
        store.fetch(3, shardings())
    entry = store.publish(place(tree(7)), 3, 2, place(tree(2)))
    assert entry.digest != dead.digest and entry.base == 2
    assert_version(store.fetch(3, shardings()), 7)
    store.collect()
    assert not any((tmp_path / dead.key).rglob("*")), "the dead one's keys go once the head has passed it"
    assert_version(store.catch_up(place(tree(2)), 2, 3), 7)


def test_publishing_again_is_a_no_op_and_other_bits_are_refused() -> None:
    store = filled(memory(), 3, anchor_every=100)
    before = store.head()
    assert publish(store, 2) == before.versions[2]
    assert publish(store, 1) == before.versions[1]
    with pytest.raises(ValueError, match="version: 2 was published with other bits"):
        store.publish(place(tree(5)), 2, 1, place(tree(1)))
    with pytest.raises(ValueError, match="base: is 1, but the head is version 2"):
        store.publish(place(tree(3)), 3, 1, place(tree(1)))
    with pytest.raises(ValueError, match="base: is None, but the head is version 2"):
        store.publish(place(tree(3)), 3)
    with pytest.raises(ValueError, match=r"(?s)embed is missing.*extra is extra"):
        store.publish(place({"extra": tree(3)["embed"], "blocks.0.norm": tree(3)["blocks.0.norm"]}), 3, 2)
    with pytest.raises(ValueError, match="is no name of a weight"):
        store.publish(place({"../embed": tree(3)["embed"]}), 3, 2)
    assert store.head() == before
    assert store.publish(place(tree(3)), 3, 2).anchor_bytes > 0  # a trainer that came back without the old weights
    assert_version(store.fetch(3, shardings()), 3)


def test_of_two_publishers_one_wins(tmp_path: Path) -> None:
    """Both have read the head before either swaps it; with the same bits both have published."""
    url = f"file://{tmp_path}/"
    filled(url, 1, anchor_every=100)

    class Meets(WeightStore):
        """Waits before the swap until all are there."""

        def _swap(self, head: Head, generation: bytes) -> bool:
            barrier.wait()
            return super()._swap(head, generation)

    barrier = threading.Barrier(3)
    contents = [tree(1), tree(1), tree(2)]

    def attempt(content: dict[str, np.ndarray]) -> str:
        try:
            return Meets(url, anchor_every=100).publish(place(content), 1, 0, place(tree(0))).digest
        except Superseded as error:
            return str(error)

    with ThreadPoolExecutor(3) as pool:
        results = list(pool.map(attempt, contents))
    won = WeightStore(url).head().versions[1].digest
    told = "version 1: another publisher was first, the head is version 1 now"
    assert results in ([won, won, told], [told, told, won])
    assert_version(WeightStore(url).fetch(1, shardings()), 1 if results[2] == told else 2)


def test_a_kill_between_stage_and_head_leaves_the_old_version(tmp_path: Path) -> None:
    """A real process, killed with everything staged; then another publisher takes the same version number."""
    url = f"file://{tmp_path}/"
    filled(url, 2, anchor_every=100)
    program = f"""
        import os, signal
        from sharding.store import WeightStore
        from tests.test_store import place, publish, tree

        class Killed(WeightStore):
            def _swap(self, head, generation):
                os.kill(os.getpid(), signal.SIGKILL)

        publish(Killed({url!r}, anchor_every=1), 2)
    """
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], env=environment, timeout=120, check=False)
    assert done.returncode == -signal.SIGKILL
    staged = list((tmp_path / "data").glob("0000000002-*/anchor/*"))
    assert len(staged) == len(SHAPES)
    store = WeightStore(url, anchor_every=100)
    assert store.head().version == 1
    assert_version(store.fetch(1, shardings()), 1)
    assert store.collect() == []
    assert len(list((tmp_path / "data").glob("0000000002-*/anchor/*"))) == len(SHAPES)  # perhaps still being staged
    store.publish(place(tree(3)), 2, 1, place(tree(1)))
    store.collect()
    assert not [path for path in staged if path.exists()]
    assert_version(store.fetch(2, shardings()), 3)


def test_corruption_is_found_wherever_it_is() -> None:
    url = memory()
    store = filled(url, 3, anchor_every=100)
    kv = open_url(url)
    params = place(tree(1))
    for key in [key.decode() for key in kv.list().result() if key.startswith(b"data/")]:
        whole = kv.read(key).result().value
        for broken in (
            whole[: len(whole) // 2] + bytes([whole[len(whole) // 2] ^ 1]) + whole[len(whole) // 2 + 1 :],
            whole[:-1],
            None,
        ):
            kv.write(key, broken).result()
            if "0000000001" in key:
                with pytest.raises(ValueError, match=r"version 1|is not in the store"):
                    store.catch_up(place(tree(0)), 0, 1)
            elif "0000000002" in key:
                with pytest.raises(ValueError, match=r"version 2|is not in the store"):
                    store.catch_up(params, 1, 2)
            else:
                with pytest.raises(ValueError, match=r"version 0|is not in the store"):
                    store.fetch(0, shardings())
        kv.write(key, whole).result()
    assert_version(params, 1)
    assert_version(store.catch_up(params, 1, 2), 2)


def test_a_delta_is_there_for_a_reader_that_stages_it_itself() -> None:
    store = filled(memory(), 2, anchor_every=100)
    delta = store.delta(store.head().versions[1])
    assert isinstance(delta, Delta) and (delta.base, delta.version) == (0, 1)


def test_mistakes_of_the_url_and_numbers() -> None:
    with pytest.raises(ValueError, match="must end in a slash"):
        WeightStore("memory://x")
    with pytest.raises(ValueError, match="anchor_every, keep: must be at least 1"):
        WeightStore("memory://x/", anchor_every=0)


def test_where_a_store_is_that_is_not_at_aws(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    spec = open_url("s3://bucket/run/weights/").spec().to_json()
    assert (spec["bucket"], spec["path"], spec["endpoint"]) == ("bucket", "run/weights/", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", "http://127.0.0.1:2")
    assert open_url("s3://bucket/x/").spec().to_json()["endpoint"] == "http://127.0.0.1:2"
    assert open_url("memory://x/").spec().to_json()["driver"] == "memory"


def test_a_pin_during_a_publish_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reader that starts late pins a version between the publisher's look at the head and its swap."""
    store = filled(memory(), 2, anchor_every=9)
    swap = store._swap

    def pinned_first(head: Head, generation: bytes) -> bool:
        monkeypatch.setattr(store, "_swap", swap)
        store.pin("late", 1)
        return swap(head, generation)

    monkeypatch.setattr(store, "_swap", pinned_first)
    publish(store, 2)
    assert store.head().version == 2 and store.head().pins == {"late": 1}
    assert_version(store.fetch(2, shardings()), 2)
