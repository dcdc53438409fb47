"""Reads what a compiled program moves between devices, from its text; and what a traced one multiplies.

    for each in collectives(compiled.as_text()):
        each.kind, each.times, each.bytes        "all-gather", 36, 33554432

Loops are counted as often as the compiler knows that they run (`times`), and all branches of a conditional, which says so.
"""

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from models.moe import SKEWED

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute")
_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) \(.*\) -> .*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?[\w.\-]+ = (.*?) ([\w\-]+)\((.*)$")
_SHAPE = re.compile(r"\b(pred|[a-z]+\d+(?:e\d+m\d+\w*)?)\[([\d,]*)\]")
_CALLED = re.compile(r"(?:calls|body|to_apply|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_MESH = re.compile(r"replica_groups=mesh\[([^\]]*)\] \{([^}]*)\}")
_CONDITION = re.compile(r"condition=%?([\w.\-]+)")
_GROUPS = re.compile(r"replica_groups=(?:\{\{([\d,]*)\}|\[\d+,(\d+)\])")
_TRIPS = re.compile(r'known_trip_count"?:\s*\{"?n"?:\s*"?(\d+)')


@dataclass(frozen=True)
class Collective:
    kind: str
    """one of KINDS"""
    shapes: tuple[tuple[int, ...], ...]
    """of its results"""
    bytes: int
    """of its results on one device; of a reduce-scatter's operands, which are the larger"""
    times: int
    """how often it runs; loops of unknown length count once"""
    computation: str
    conditional: bool = False
    """it is in a branch, and may not run"""


def _arrays(text: str) -> list[tuple[str, tuple[int, ...]]]:
    return [(kind, tuple(int(n) for n in dims.split(",") if n)) for kind, dims in _SHAPE.findall(text)]


def _bytes(kind: str, shape: tuple[int, ...]) -> int:
    bits = 8 if kind == "pred" else int(re.findall(r"\d+", kind)[0])
    return math.prod(shape) * bits // 8


def _computations(text: str) -> tuple[dict[str, list[tuple[str, str, str]]], str]:
    """name -> (result, operation, the rest of the line) of its instructions; and the name of the entry."""
    found: dict[str, list[tuple[str, str, str]]] = {}
    entry = current = ""
    for line in text.splitlines():
        if (start := _COMPUTATION.match(line)) is not None:
            current = start[2]
            found[current] = []
            entry = current if start[1] else entry
        elif (match := _INSTRUCTION.match(line)) is not None and current:
            found[current].append((match[1], match[2], match[3]))
    return found, entry


def _collective(kind: str, operation: str, result: str, rest: str, times: int, computation: str) -> Collective:
    arrays = _arrays(result)
    if operation.endswith("-start") and kind != "all-reduce":
        arrays = [array for array in arrays if array != ("u32", ())]
        arrays = arrays[len(arrays) // 2 :]  # the first half repeats the operands
    ways = _group_size(rest) if kind == "reduce-scatter" else 1
    shapes = tuple(shape for _, shape in arrays)
    return Collective(kind, shapes, ways * sum(_bytes(*array) for array in arrays), times, computation)


def _group_size(rest: str) -> int:
    """Devices that take part: {{0,1},{2,3}}, [2,2]<=[4] or mesh['a'=2,'b'=2] {'b'}."""
    if (groups := _GROUPS.search(rest)) is not None:
        return int(groups[2]) if groups[2] else len(groups[1].split(","))
    groups = _MESH.search(rest)
    assert groups is not None, rest
    sizes = {name: int(size) for name, size in (part.split("=") for part in groups[1].split(","))}
    return math.prod(sizes[name] for name in groups[2].split(","))


def _trips(rest: str, found: dict[str, list[tuple[str, str, str]]]) -> int:
    """How often a loop runs, 1 where the compiler does not know: what it says, or the one number that its condition has."""
    if (said := _TRIPS.search(rest)) is not None:
        return int(said[1])
    condition = _CONDITION.search(rest)
    numbers = [
        int(body.split(")")[0])
        for result, operation, body in found.get(condition[1] if condition else "", ())
        if operation == "constant" and result.startswith("s32[]")
    ]
    return numbers[0] if len(numbers) == 1 else 1


def collectives(text: str) -> list[Collective]:
    """Of a compiled program (`compiled.as_text()`), in the order of its computations.

    Raises:
        ValueError: the text has no entry computation.
    """
    found, entry = _computations(text)
    if not entry:
        raise ValueError("collectives: no ENTRY computation; give the text of a compiled program, compiled.as_text()")

    def walk(name: str, times: int, conditional: bool) -> Iterator[Collective]:
        for result, operation, rest in found.get(name, ()):
            kind = operation.removesuffix("-start")
            if kind in KINDS:
                yield replace(_collective(kind, operation, result, rest, times, name), conditional=conditional)
                continue
            inner = times * _trips(rest, found) if operation == "while" else times
            called = _CALLED.findall(rest) + [n.strip(" %") for part in _BRANCHES.findall(rest) for n in part.split(",")]
            for each in called:
                yield from walk(each, inner, conditional or operation == "conditional")

    return list(walk(entry, 1, False))


def moved(found: list[Collective]) -> dict[str, dict[str, int]]:
    """Of each kind: how many run, and their bytes on one device; those in branches apart."""
    result: dict[str, dict[str, int]] = {}
    for each in found:
        name = f"{each.kind}, conditional" if each.conditional else each.kind
        kind = result.setdefault(name, {"count": 0, "bytes": 0})
        kind["count"] += each.times
        kind["bytes"] += each.times * each.bytes
    return dict(sorted(result.items()))


def product_flops(jaxpr: Any) -> int:
    """FLOPs of the products of a traced program: on one device of a `shard_map`, of every pass of a scan, of the dearer
    branch of a conditional. Loops of unknown length are left out, and so is what only a skewed routing needs."""
    inner = getattr(jaxpr, "jaxpr", jaxpr)
    return sum(_flops(eqn) for eqn in inner.eqns)


def _flops(eqn: Any) -> int:
    name, params = eqn.primitive.name, eqn.params
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        left = eqn.invars[0].aval.shape
        return 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(left[dim] for dim in contracted)
    if name == "ragged_dot_general":  # every row of its left operand, whether it belongs to an expert or not
        left, right = (operand.aval.shape for operand in eqn.invars[:2])
        return 2 * math.prod(left) * right[-1]
    if name == "while" or SKEWED in str(eqn.source_info.name_stack):
        return 0
    if name == "cond":
        return max(product_flops(branch) for branch in params["branches"])
    times = params["length"] if name == "scan" else 1
    called = (params.get(key) for key in ("jaxpr", "call_jaxpr"))
    return times * sum(product_flops(each) for each in called if each is not None)
