"""Which devices each side of a run has, and how its arrays lie there."""

import math
from collections.abc import Mapping
from dataclasses import replace

import jax
from jax.sharding import Mesh

from rl.config import Placement, RunConfig
from sharding.mesh import make_mesh
from sharding.rules import Rules, Weight


def placed(config: RunConfig) -> RunConfig:
    """The config with numbers where it leaves engines and devices to us: with a lag, engines have three quarters of the
    devices, and the trainer begins after them.

    Raises:
        ValueError: there is a lag, and the two sides share devices.
    """
    section, engine, trainer = config.orchestrator, config.engine, config.trainer
    if section.processes:
        if jax.default_backend() != "cpu":
            raise ValueError(
                f"orchestrator.processes: on {jax.default_backend()} this process takes all devices, and engines in others "
                f"would find none; set it to False: engines and trainer have devices of their own in one process"
            )
        first = max(trainer.first_device, 0)
        section = replace(section, engines=section.engines or 1)
        return replace(config, orchestrator=section, trainer=replace(trainer, first_device=first))
    own = math.prod(engine.mesh.values())
    count = section.engines
    if not count:
        count = max(1, (3 * jax.device_count() // 4 - engine.first_device) // own) if section.lag else 1
    end = engine.first_device + count * own
    first = trainer.first_device
    if first < 0:
        first = end if section.lag else 0
    theirs = range(first, first + math.prod(trainer.mesh.values()))
    if section.lag and theirs.start < end and engine.first_device < theirs.stop:
        raise ValueError(
            f"orchestrator.lag: with a lag the trainer has devices of its own, but {count} engines have {engine.first_device} "
            f"to {end - 1}, and the trainer {theirs.start} to {theirs.stop - 1}; set trainer.first_device, or lag = 0"
        )
    return replace(config, orchestrator=replace(section, engines=count), trainer=replace(trainer, first_device=first))


def mesh_of(placement: Placement, side: str) -> tuple[Mesh, Rules]:
    assert placement.first_device >= 0, "placed() says where the trainer begins"
    devices = jax.devices()[placement.first_device :]
    try:
        return make_mesh(placement.mesh, devices), Rules(dict(placement.rules))
    except ValueError as error:
        raise ValueError(f"{side}.{error}") from error


def shardings_of(rules: Rules, mesh: Mesh, weights: Mapping[str, Weight], side: str) -> dict[str, jax.sharding.Sharding]:
    try:
        return rules.shardings(mesh, weights)
    except ValueError as error:
        raise ValueError(f"{side}.{error}") from error
