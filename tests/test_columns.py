"""Rollouts in Parquet: what comes back, what other tools see, what is refused."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.columns import COLUMNS, read, write
from rl.environments import Reward
from rl.graph import Graph
from rl.messages import Message
from rl.records import Call, Episode, Node

REWARDS = (Reward("exact", 1.0), Reward("style", None, 0.5), Reward("odd", -0.0, 1e-300))
FLOATS = st.floats(width=32, allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=6)


def new_graph(name: str = "e", *calls: Call) -> Graph:
    return Graph(
        Episode(id=name, env="arithmetic", key=3, content_hash="00", group_id="g", seed=2**32 - 1), calls or (Call(id=0),)
    )


def rows_of(ids: list[int]) -> np.ndarray:
    """Two layers, three experts each, that say whose they are."""
    return (np.asarray(ids).reshape(-1, 1, 1) * 6 + np.arange(6).reshape(1, 2, 3)).astype(np.uint16)


def sample(
    graph: Graph, prompt: list[int], ids: list[int], logprobs: list[float], *, routed: bool = False, said: str = ""
) -> int:
    """A turn, with what the path lacks of routing."""
    parent = graph.extend(prompt, messages=[{"role": "user", "content": f"{said}?"}])
    known = graph.routing(parent)
    start = 0 if known is None else len(known)
    message: Message = {"role": "assistant", "content": said}
    return graph.add_completion(
        parent,
        request_id=f"r{len(graph.nodes)}",
        prompt_ids=prompt,
        ids=ids,
        logprobs=logprobs,
        logprobs_full=[-x for x in logprobs],
        versions=[len(graph.path(parent))] * len(ids),
        temperature=0.7,
        finish_reason="stop",
        message=message,
        cached_tokens=start,
        routing=rows_of([*prompt, *ids][start:-1]) if routed else None,
        routing_start=start if routed else 0,
    )


def bits_of(values: Sequence[float]) -> list[int]:
    return np.array(values, np.float32).view(np.uint32).tolist()


def assert_same(ours: Graph, theirs: Graph) -> None:
    assert ours.episode == theirs.episode and ours.calls == theirs.calls and ours.nodes == theirs.nodes
    for x, y in zip(ours.nodes, theirs.nodes, strict=True):
        assert (x.routing is None) == (y.routing is None)
        if x.routing is not None and y.routing is not None:
            assert x.routing.dtype == y.routing.dtype
            np.testing.assert_array_equal(x.routing, y.routing)
        for name in ("logprobs", "logprobs_full"):  # -0.0 == 0.0, but it has other bits
            assert bits_of(getattr(x, name)) == bits_of(getattr(y, name))


def whole_group() -> list[Graph]:
    """Turns, a fork, an agent of its own, routing, a failed episode and one that never began."""
    first = new_graph("a", Call(id=0), Call(id=1, parent=0, agent="helper", depth=1, position=2, trainable=False))
    sample(first, [1, 2], [3, 4], [-0.0, -1e-45], routed=True, said="é\n")
    sample(first, [1, 2, 3, 4, 5], [6], [-3.4028234663852886e38], routed=True)
    first.mark(sample(first, [1, 2], [7, 8, 9], [-0.1, -0.2, -0.3], routed=True), "retried")
    first.finish("completed", rewards=REWARDS, stop_reason="stop", generate_s=0.25, environment_s=1e-9)
    failed = new_graph("b")
    failed.extend([1])
    failed.finish("failed", error="KeyError: 'odd text'")
    return [first, failed, new_graph("c")]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rollouts") / "train_00000007.parquet"
    write(path, whole_group())
    return path


def test_everything_comes_back(file: Path) -> None:
    for ours, theirs in zip(read(file), whole_group(), strict=True):
        assert_same(ours, theirs)
        assert ours.completion("r1") == theirs.completion("r1")
    assert [path.name for path in file.parent.iterdir()] == [file.name]


@settings(max_examples=40)
@given(
    graphs=st.lists(
        st.lists(st.tuples(st.integers(0, 5), st.lists(FLOATS, min_size=1, max_size=4), TEXT), max_size=5), max_size=3
    ),
    routed=st.booleans(),
)
def test_any_graphs_come_back(
    graphs: list[list[tuple[int, list[float], str]]], routed: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Each turn continues some earlier path, or none."""
    made = []
    for number, turns in enumerate(graphs):
        graph = new_graph(str(number))
        for start, logprobs, said in turns:
            prompt = [*graph.path_ids(start if start < len(graph.nodes) else None), len(logprobs)]
            ids = [number + i for i in range(len(logprobs))]
            sample(graph, prompt, ids, logprobs, routed=routed, said=said)
        graph.finish("completed", rewards=[Reward(said, logprobs[0]) for _, logprobs, said in turns], error=None)
        made.append(graph)
    path = tmp_path_factory.getbasetemp() / "any.parquet"
    write(path, made)
    for ours, theirs in zip(read(path), made, strict=True):
        assert_same(ours, theirs)


def test_other_tools_read_a_folder_of_them(file: Path) -> None:
    """Typed columns, a row a node; what belongs to the episode stands in each."""
    write(file.with_name("train_00000008.parquet"), whole_group())
    table = ds.dataset(file.parent, format="parquet").to_table()
    assert table.schema.equals(COLUMNS) and table.num_rows == 2 * (5 + 1 + 1)
    nodes = table.filter(pc.field("episode") == "a").to_pylist()
    assert [row["node"] for row in nodes] == [0, 1, 2, 3, 4] * 2 and {row["reward"] for row in nodes} == {None}
    assert nodes[1]["ids"] == [3, 4] and nodes[1]["mask"] == [True, True] and nodes[1]["versions"] == [1, 1]
    assert nodes[1]["logprobs"] == [0, float(np.float32(-1e-45))]
    routing = np.frombuffer(nodes[1]["routing"]["data"], nodes[1]["routing"]["dtype"]).reshape(nodes[1]["routing"]["shape"])
    np.testing.assert_array_equal(routing, rows_of([1, 2, 3]))
    once = table.filter(pc.field("node") == 0)
    assert once.group_by("episode_status").aggregate([("episode", "count")]).to_pylist() == [
        {"episode_status": "completed", "episode_count": 2},
        {"episode_status": "failed", "episode_count": 2},
    ]
    file.with_name("train_00000008.parquet").unlink()


def test_any_flipped_bit_is_found(file: Path, tmp_path: Path) -> None:
    """Bytes all over the file, and lengths that it may be cut to."""
    whole, path = file.read_bytes(), tmp_path / "broken.parquet"
    for i in range(0, len(whole), 7):
        flipped = bytearray(whole)
        flipped[i] ^= 1 << i % 8
        path.write_bytes(flipped)
        with pytest.raises(ValueError, match="broken.parquet: .*restore it"):
            read(path)
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match="broken.parquet: its footer cannot be read .*restore it"):
            read(path)


def test_what_is_broken_is_named(file: Path, tmp_path: Path) -> None:
    whole, path = bytearray(file.read_bytes()), tmp_path / "broken.parquet"
    group = pq.read_metadata(file).row_group(0)
    [chunk] = [c for c in map(group.column, range(group.num_columns)) if c.path_in_schema.startswith("ids.")]
    whole[chunk.data_page_offset + chunk.total_compressed_size - 1] ^= 1
    path.write_bytes(whole)
    with pytest.raises(ValueError, match=r"broken.parquet: column 'ids' cannot be read \(.*CRC"):
        read(path)
    with pytest.raises(ValueError, match="nowhere.parquet: is missing; restore it"):
        read(tmp_path / "nowhere.parquet")


def test_rules_of_the_graph_hold_for_what_is_read(tmp_path: Path) -> None:
    graph = whole_group()[0]
    graph.nodes[3] = dataclasses.replace(graph.nodes[3], versions=(0,))
    write(tmp_path / "odd.parquet", [graph])
    with pytest.raises(ValueError, match="odd.parquet: versions decrease"):
        read(tmp_path / "odd.parquet")
    wrong = Node(id=0, parent=None, call=0, kind="prompt", ids=(1, 2), mask=(False, False), routing=rows_of([1, 2]))
    graph = new_graph("z")
    graph.nodes.append(wrong)
    write(tmp_path / "odd.parquet", [graph])
    with pytest.raises(ValueError, match="odd.parquet: routing: episode 'z', node 0: .* rows are not one for each"):
        read(tmp_path / "odd.parquet")


def test_another_version_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr("rl.columns.MADE_BY", "rollouts 0")
        write(tmp_path / "old.parquet", whole_group())
    with pytest.raises(ValueError, match="old.parquet: is not 'rollouts 2' of twinax; use the code that wrote it"):
        read(tmp_path / "old.parquet")
