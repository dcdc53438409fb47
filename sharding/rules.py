"""One description of a weight, one table from logical dims to mesh axes; everything else derives from the two."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import jax
from absl import logging
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

Axes = str | tuple[str, ...] | None

UNEVEN = ("experts", "expert_ffn")
"""dims that stay whole where their axes do not divide them: checkpoints have 60 experts, and inner dims of any size"""


@dataclass(frozen=True)
class Weight:
    """Shape, logical dims and initialiser of one weight. Its dtype is the reader's choice (masters, published)."""

    shape: tuple[int, ...]
    dims: tuple[str, ...]
    """one logical dim per array dimension; a leading `layer` marks stacked blocks"""
    init: float
    """standard deviation of a normal; 0 stands for ones (norm scales)"""

    def __post_init__(self) -> None:
        assert len(self.shape) == len(self.dims), (self.shape, self.dims)

    @property
    def size(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Rules:
    """Logical dim -> mesh axis (or axes, or None). A dim that is not named is replicated."""

    table: Mapping[str, Axes] = field(default_factory=dict)

    def spec(self, dims: tuple[str | None, ...], name: str = "array") -> PartitionSpec:
        """Partition of an array with these logical dims.

        Raises:
            ValueError: two dims of the array are mapped to one mesh axis.
        """
        taken: dict[str, str] = {}
        entries: list[Axes] = []
        for dim in dims:
            axes = self.table.get(dim) if dim else None
            for axis in (axes,) if isinstance(axes, str) else (axes or ()):
                if axis in taken:
                    raise ValueError(
                        f"rules: {name} has dims {taken[axis]!r} and {dim!r} both on mesh axis {axis!r}; "
                        f"map one of them to another axis or to None"
                    )
                taken[axis] = str(dim)
            entries.append(axes)
        return PartitionSpec(*entries)

    def sharding(self, mesh: Mesh | AbstractMesh, weight: Weight, name: str) -> NamedSharding:
        """Sharding of one weight on a mesh.

        Raises:
            ValueError: a rule names an axis the mesh lacks, or an axis that does not divide the dimension.
        """
        spec = self.spec(weight.dims, name)
        entries: list[Axes] = []
        for size, dim, axes in zip(weight.shape, weight.dims, spec, strict=True):
            ways = 1
            for axis in (axes,) if isinstance(axes, str) else (axes or ()):
                if axis not in mesh.shape:
                    raise ValueError(f"rules: {dim!r} is mapped to {axis!r}, but the mesh has axes {tuple(mesh.shape)}")
                ways *= mesh.shape[axis]
            entries.append(axes if size % ways == 0 else None)
            if size % ways and dim not in UNEVEN:
                raise ValueError(
                    f"rules: dim {dim!r} of {name} has size {size}, which {ways} devices on {axes!r} do not divide; "
                    f"change the mesh or map {dim!r} to None"
                )
        return NamedSharding(mesh, PartitionSpec(*entries))

    def shardings(self, mesh: Mesh | AbstractMesh, weights: Mapping[str, Weight]) -> dict[str, jax.sharding.Sharding]:
        """Shardings of a whole tree, by name.

        Raises:
            ValueError: a rule is for a dim that no weight has, or one of `sharding`'s.
        """
        dims = sorted({dim for weight in weights.values() for dim in weight.dims})
        for dim in self.table:
            if dim not in dims:
                close = difflib.get_close_matches(dim, dims, n=1)
                fix = f"did you mean {close[0]!r}?" if close else f"they have {', '.join(dims)}"
                raise ValueError(f"rules: no weight has a dim {dim!r}; {fix}")
        for dim in self.uneven(mesh, weights):
            logging.warning(
                "rules: %r is mapped to %r, which does not divide it: every device has all of it", dim, self.table[dim]
            )
        return {name: self.sharding(mesh, weight, name) for name, weight in weights.items()}

    def ways(self, mesh: Mesh | AbstractMesh, dim: str) -> int:
        """Over how many devices a dim is split."""
        axes = self.table.get(dim)
        return math.prod(mesh.shape.get(axis, 1) for axis in ((axes,) if isinstance(axes, str) else axes or ()))

    def uneven(self, mesh: Mesh | AbstractMesh, weights: Mapping[str, Weight]) -> list[str]:
        """Dims of UNEVEN that stay whole on this mesh."""
        whole = []
        for dim in UNEVEN:
            ways = self.ways(mesh, dim)
            sizes = {
                size for weight in weights.values() for name, size in zip(weight.dims, weight.shape, strict=True) if name == dim
            }
            if any(size % ways for size in sizes):
                whole.append(dim)
        return whole
