"""Device meshes. The only place that knows about axis types: everything runs under Auto (GSPMD)."""

import math
from collections.abc import Mapping, Sequence

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

AXES = ("data", "fsdp", "tensor", "expert", "context")


def make_mesh(axes: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
    """A mesh with the named axes, over the first devices that it needs.

    Args:
        axes: axis name -> size, outermost first; names come from `AXES`.
        devices: the devices it may use (default: all).

    Raises:
        ValueError: unknown axis, size below 1, or more devices asked for than there are.
    """
    devices = list(jax.devices() if devices is None else devices)
    for axis, size in axes.items():
        if axis not in AXES:
            raise ValueError(f"mesh: axis {axis!r} is unknown; use some of {AXES}")
        if size < 1:
            raise ValueError(f"mesh: axis {axis!r} has size {size}; it must be at least 1")
    wanted = math.prod(axes.values())
    if wanted > len(devices):
        shape = " x ".join(f"{axis}={size}" for axis, size in axes.items())
        raise ValueError(f"mesh: {shape} needs {wanted} devices, but there are {len(devices)}; make an axis smaller")
    grid = np.asarray(devices[:wanted], dtype=object).reshape(tuple(axes.values()))
    return Mesh(grid, tuple(axes), axis_types=(AxisType.Auto,) * len(axes))
