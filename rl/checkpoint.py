"""Checkpoints: everything a run needs to go on as if it had never stopped.

A checkpoint holds masters, optimizer state and step (arrays, through Orbax) and, as JSON, the data cursor, the seed that all
randomness derives from (with step, task and sample; there is no other random state) and the config. Orbax writes to a
temporary folder and renames it, so a half-written checkpoint is never found.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from rl.programs import TrainState


class Checkpoints:
    """The checkpoints of one run, by step; old ones are removed once `keep` newer ones exist."""

    def __init__(self, directory: Path, keep: int):
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False, create=True)
        self._manager = ocp.CheckpointManager(directory.absolute(), options=options)

    def latest(self) -> int | None:
        """Step of the newest whole checkpoint."""
        return self._manager.latest_step()

    def save(self, step: int, state: TrainState, meta: Mapping[str, Any]) -> None:
        self._manager.save(
            step, args=ocp.args.Composite(state=ocp.args.StandardSave(_tree(state)), meta=ocp.args.JsonSave(dict(meta)))
        )

    def restore(self, step: int, like: TrainState) -> tuple[TrainState, dict[str, Any]]:
        """State in the shapes, dtypes and shardings of `like`, and the metadata."""
        abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), _tree(like))
        read = self._manager.restore(
            step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract), meta=ocp.args.JsonRestore())
        )
        return TrainState(**read["state"]), read["meta"]

    def close(self) -> None:
        self._manager.close()


def _tree(state: TrainState) -> dict[str, Any]:
    return {"masters": state.masters, "optimizer": state.optimizer, "step": state.step}
