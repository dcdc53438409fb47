"""The layouts that one array passes between two meshes, so that every copy is from one device to one device.

`jax.device_put` copies shard to shard if each shard that the target asks for is some source device's whole shard;
otherwise it gathers the array on the host. So the copy happens between two layouts of the same pieces.
"""

from dataclasses import dataclass
from functools import cache
from itertools import takewhile

import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding


@dataclass(frozen=True)
class Route:
    """The layouts that one array passes on its way."""

    source: Sharding
    common: Sharding
    """on the source devices: what the two ends agree on; reached from `source` by all-gathers alone"""
    before: Sharding
    """on the source devices: `common`, cut as the target wants it, as far as the devices allow"""
    after: Sharding
    """on the target devices: the same pieces as `before`, so that the copy is shard to shard"""


@cache
def route(source: Sharding, target: Sharding, ndim: int) -> Route:
    """Derives the layouts between two shardings of an array with `ndim` dims.

    Mesh axes are split into prime factors first, so that 4 ways and 2 ways have 2 ways in common.
    """
    mesh, cuts = _split(source, ndim)
    target_mesh, target_cuts = _split(target, ndim)
    common = [
        tuple(pair[0] for pair in takewhile(lambda pair: mesh.shape[pair[0]] == target_mesh.shape[pair[1]], pairs))
        for pairs in map(zip, cuts, target_cuts)
    ]
    free = [axis for axis in mesh.axis_names if not any(axis in axes for axes in common)]
    before = [list(axes) for axes in common]
    for axes, wanted in zip(before, target_cuts, strict=True):
        for axis in wanted[len(axes) :]:
            match = next((own for own in free if mesh.shape[own] == target_mesh.shape[axis]), None)
            if match is None:
                break
            free.remove(match)
            axes.append(match)
    after = [wanted[: len(axes)] for axes, wanted in zip(before, target_cuts, strict=True)]
    return Route(
        source,
        NamedSharding(mesh, PartitionSpec(*common)),
        NamedSharding(mesh, PartitionSpec(*map(tuple, before))),
        target if tuple(after) == target_cuts else NamedSharding(target_mesh, PartitionSpec(*after)),
    )


@cache
def without_first_dim(sharding: Sharding, ndim: int) -> Sharding:
    """Sharding of one layer of a stack with `ndim` dims."""
    mesh, cuts = _split(sharding, ndim)
    return NamedSharding(mesh, PartitionSpec(*cuts[1:]))


def _split(sharding: Sharding, ndim: int) -> tuple[Mesh, tuple[tuple[str, ...], ...]]:
    """The mesh with each axis split into prime factors, and the split axes that cut each dim."""
    if sharding.num_devices == 1:
        return Mesh(np.asarray(list(sharding.device_set)), ("one",)), ((),) * ndim
    if not isinstance(sharding, NamedSharding) or not isinstance(sharding.mesh, Mesh):
        raise ValueError(f"reshard: expected a NamedSharding on a mesh of devices, got {sharding}; use out_shardings")
    split = {
        axis: {f"{axis}.{i}": factor for i, factor in enumerate(_prime_factors(size))}
        for axis, size in sharding.mesh.shape.items()
    }
    sizes = {name: size for factors in split.values() for name, size in factors.items()}
    entries = [(axes,) if isinstance(axes, str) else axes or () for axes in sharding.spec]
    entries += [()] * (ndim - len(entries))
    cuts = tuple(tuple(name for axis in axes for name in split[axis]) for axes in entries)
    return Mesh(sharding.mesh.devices.reshape(tuple(sizes.values())), tuple(sizes)), cuts


def _prime_factors(number: int) -> list[int]:
    factors, divisor = [], 2
    while number > 1:
        while number % divisor == 0:
            factors.append(divisor)
            number //= divisor
        divisor += 1
    return factors
