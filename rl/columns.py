"""Rollouts as columns: Parquet files, one row a node of a message graph, for training again and for pandas or duckdb.

What belongs to the episode stands in each row of its nodes; `where node = 0` gives each episode once. An episode without a node
has one row with no node. A file is written whole or not at all, and its footer has a checksum of all of it: the pages' own do
not cover headers and footer, where a flipped bit may give other numbers without an error (measured: one in 400 did).
"""

import dataclasses
import json
import zlib
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from models.routes import from_record, to_record
from rl.environments import Reward, total_reward
from rl.graph import Graph
from rl.records import Call, Episode, Node
from rl.whole import write_whole

MADE_BY = "rollouts 2"
"""of which schema; to be raised with any change of it"""
REWARD = [("name", pa.string()), ("score", pa.float64()), ("weight", pa.float64())]
ROUTING = [("dtype", pa.string()), ("shape", pa.list_(pa.int32())), ("crc32", pa.int64()), ("data", pa.binary())]
EPISODE = {
    "episode": pa.string(),
    "env": pa.string(),
    "key": pa.int64(),
    "content_hash": pa.string(),
    "group_id": pa.string(),
    "seed": pa.int64(),
    "episode_status": pa.string(),
    "stop_reason": pa.string(),
    "reward": pa.float64(),
    "rewards": pa.list_(pa.struct(REWARD)),
    "error": pa.string(),
    "generate_s": pa.float64(),
    "environment_s": pa.float64(),
    "calls": pa.string(),
}
NODE = {
    "node": pa.int32(),
    "parent": pa.int32(),
    "call": pa.int32(),
    "kind": pa.string(),
    "status": pa.string(),
    "ids": pa.list_(pa.int32()),
    "mask": pa.list_(pa.bool_()),
    "messages": pa.string(),
    "logprobs": pa.list_(pa.float32()),
    "logprobs_full": pa.list_(pa.float32()),
    "versions": pa.list_(pa.int32()),
    "temperature": pa.float64(),
    "finish_reason": pa.string(),
    "cached_tokens": pa.int32(),
    "request_id": pa.string(),
    "routing": pa.struct(ROUTING),
    "routing_start": pa.int32(),
}
RENAMED = {(Episode, "id"): "episode", (Episode, "status"): "episode_status", (Node, "id"): "node"}
"""fields that stand under another name, as an episode and its nodes share the columns of a file"""
JSON = ("calls", "messages")
CHECKSUM = b"crc32="
UNSEALED = CHECKSUM + b"0" * 8
"""a value in the footer, until the checksum of the file with these zeros takes their place"""
COLUMNS = pa.schema(EPISODE | NODE)
LAYOUT: dict[str, Any] = {
    "compression": "zstd",
    "use_dictionary": [name for name, kind in (EPISODE | NODE).items() if pa.types.is_string(kind)],
    "write_statistics": ["key", "reward", "node"],
    "write_page_checksum": True,
    "store_schema": False,
}


def write(path: Path, graphs: Sequence[Graph]) -> None:
    """One file, whole or not at all. The floats of log-probs come back bit for bit."""
    rows = [row for graph in graphs for row in _rows(graph)]
    buffer = pa.BufferOutputStream()
    with pq.ParquetWriter(buffer, COLUMNS, **LAYOUT) as file:
        file.write_table(pa.Table.from_pylist(rows, schema=COLUMNS))
        file.add_key_value_metadata({"twinax": MADE_BY, "checksum": UNSEALED.decode()})
    data = buffer.getvalue().to_pybytes()
    head, _, tail = data.rpartition(UNSEALED)  # the footer is the file's end
    write_whole(path, head + CHECKSUM + b"%08x" % zlib.crc32(data) + tail)


def read(path: Path) -> list[Graph]:
    """The graphs of a file, through the checks of `Graph`.

    Raises:
        ValueError: it is cut, corrupted, or of another version of twinax; it names what cannot be read.
    """
    try:
        data = path.read_bytes()
    except FileNotFoundError as error:
        raise ValueError(f"{path}: is missing; restore it") from error
    _check(path, data)
    table = pq.read_table(pa.BufferReader(data))
    if (table.schema.metadata or {}).get(b"twinax") != MADE_BY.encode() or not table.schema.equals(COLUMNS):
        raise ValueError(f"{path}: is not {MADE_BY!r} of twinax; use the code that wrote it")
    rows = table.to_pylist()
    starts = [i for i, row in enumerate(rows) if not row["node"]]
    try:
        return [_graph(rows[first:end]) for first, end in pairwise([*starts, len(rows)])]
    except (AssertionError, ValueError) as error:
        raise ValueError(f"{path}: {error}") from error


def _rows(graph: Graph) -> Iterator[dict[str, Any]]:
    episode = _fields(graph.episode) | {"reward": total_reward(graph.episode.rewards)}
    episode["rewards"] = [dataclasses.asdict(reward) for reward in graph.episode.rewards]
    episode["calls"] = json.dumps([dataclasses.asdict(call) for call in graph.calls], allow_nan=False)
    for node in graph.nodes:
        own = _fields(node) | {"messages": json.dumps(node.messages, allow_nan=False)}
        yield episode | own | {"routing": None if node.routing is None else to_record(node.routing)}
    if not graph.nodes:
        yield episode


def _graph(rows: Sequence[dict[str, Any]]) -> Graph:
    """Of one episode's rows."""
    first = rows[0]
    values = _values(Episode, first)
    values["rewards"] = tuple(Reward(**reward) for reward in first["rewards"])
    episode = Episode(**values)
    calls = [{**call, "rewards": tuple(Reward(**reward) for reward in call["rewards"])} for call in json.loads(first["calls"])]
    graph = Graph(episode, [Call(**call) for call in calls])
    for row in rows if first["node"] is not None else ():
        values = _values(Node, row)
        values["messages"] = tuple(json.loads(row["messages"]))
        if row["routing"] is not None:
            values["routing"] = from_record(row["routing"], f"routing: episode {episode.id!r}, node {row['node']}")
        graph.restore(Node(**values))
    return graph


def _fields(item: Episode | Node) -> dict[str, Any]:
    """Column -> value; those that no column can hold are still to be written in another way."""
    kind = type(item)
    return {RENAMED.get((kind, field.name), field.name): getattr(item, field.name) for field in dataclasses.fields(item)}


def _values(kind: type[Episode] | type[Node], row: dict[str, Any]) -> dict[str, Any]:
    """Field -> value."""
    values: dict[str, Any] = {}
    for field in dataclasses.fields(kind):
        value = row[RENAMED.get((kind, field.name), field.name)]
        values[field.name] = tuple(value) if isinstance(value, list) else value
    return values


def _check(path: Path, data: bytes) -> None:
    """Refuses a file that is not, to the bit, as it was written."""
    head, found, tail = data.rpartition(CHECKSUM)
    if found and b"%08x" % zlib.crc32(head + UNSEALED + tail[8:]) == tail[:8]:
        return
    raise ValueError(f"{path}: {_broken(data)}; it is cut, corrupted or not of twinax: restore it")


def _broken(data: bytes) -> str:
    """Which part of a file does not have its bits."""
    try:
        file = pq.ParquetFile(pa.BufferReader(data), page_checksum_verification=True)
    except (OSError, ValueError) as error:
        return f"its footer cannot be read ({_line(error)})"
    for name in file.schema_arrow.names:
        try:
            file.read(columns=[name])
        except (OSError, ValueError) as error:
            return f"column {name!r} cannot be read ({_line(error)})"
    return "its headers do not have the checksum of the footer"


def _line(error: Exception) -> str:
    return str(error).partition("\n")[0]
