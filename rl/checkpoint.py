"""Checkpoints: everything a run needs to go on as if it had never stopped.

    checkpoints/STEP/NAME/      masters, optimizer state and step of one trainer (`policy`, ...), through Orbax
    checkpoints/STEP/meta.json  data cursor, seed, config; of arrays the form and the sum of their bits; sizes of files
    checkpoints/damaged/STEP/   one that could not be read when the run went on; nothing reads it again

`save` returns as soon as Orbax holds the arrays: it copies them to the host; where they are there already it keeps a reference,
and XLA then copies what it was to overwrite. The files are written meanwhile, to a folder whose renaming is the commit, and one
that is no longer kept is renamed before it is deleted. So a kill leaves no folder with a plain number that is not whole. What a
disk does to it later, sizes and sums find: Orbax alone returns wrong weights, without an error, for a flipped bit.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jax.sharding import NamedSharding, PartitionSpec

from rl.programs import TrainState

META = "meta.json"
TEMPORARY = ".orbax-checkpoint-tmp"
"""what Orbax appends to the name of a folder that it is still writing"""
REMOVED = ".removed"
DAMAGED = "damaged"
UNSIGNED = {1: jnp.uint8, 2: jnp.uint16, 4: jnp.uint32}


class Damaged(ValueError):
    """A checkpoint whose files, or bits, are not those that were saved."""


class Checkpoints:
    """The checkpoints of one run, by step: the newest `keep`, and for good those whose step `keep_every` divides (0: none).

    Only `save`, `close` and `resume` change the folder, so that another run's can be read.
    """

    def __init__(self, directory: Path, keep: int = 1, keep_every: int = 0):
        self.directory = directory.absolute()
        self.keep, self.keep_every = keep, keep_every
        self._writer: ocp.AsyncCheckpointer | None = None
        self._pending: tuple[int, dict[str, Any]] = (0, {})
        """what is being written: its step and its meta"""

    def steps(self) -> list[int]:
        """Steps of the checkpoints that were written to their end, oldest first."""
        paths = self.directory.iterdir() if self.directory.is_dir() else ()
        return sorted(int(path.name) for path in paths if path.name.isdecimal())

    def latest(self) -> int | None:
        """Step of the newest."""
        return max(self.steps(), default=None)

    def save(self, step: int, states: Mapping[str, TrainState], meta: Mapping[str, Any]) -> None:
        """Begins to write; the arrays of the states may be donated as soon as it returns.

        Raises:
            OSError: the checkpoint before this one could not be written.
        """
        assert step > max(self.steps(), default=-1), (step, self.steps())
        if self._writer is None:
            if jax.process_index() == 0:
                for path in self.directory.glob(f"*{TEMPORARY}*"):  # of a process that was killed
                    shutil.rmtree(path)
            options = ocp.AsyncOptions(post_finalization_callback=self._complete)
            self._writer = ocp.AsyncCheckpointer(ocp.CompositeCheckpointHandler(), async_options=options)
        self._finish()
        arrays = {name: _describe(_tree(state)) for name, state in states.items()}
        self._pending = step, {**meta, "arrays": arrays}
        items = {name: ocp.args.StandardSave(_tree(state)) for name, state in states.items()}
        self._writer.save(self.directory / str(step), args=ocp.args.Composite(**items))

    def _complete(self) -> None:
        """The last file of a checkpoint; runs in the writer's thread, when the others are there and before the renaming."""
        step, meta = self._pending
        [path] = self.directory.glob(f"{step}{TEMPORARY}*")
        files = _sizes(path, meta["arrays"])
        (path / META).write_text(json.dumps({**meta, "files": files}))

    def _finish(self) -> None:
        """Waits for the write in flight; then removes what is no longer kept."""
        assert self._writer is not None
        try:
            self._writer.wait_until_finished()
        except Exception as error:  # what broke in another thread: every file system has its own errors
            raise OSError(f"{self.directory / str(self._pending[0])}: could not be written: {error}") from error
        if jax.process_index() == 0:
            for step in self.steps()[: -self.keep]:
                if not self.keep_every or step % self.keep_every:
                    os.rename(self.directory / str(step), self.directory / f"{step}{REMOVED}")
            for path in self.directory.glob(f"*{REMOVED}"):
                shutil.rmtree(path)

    def close(self) -> None:
        """Waits until all is written.

        Raises:
            OSError: the last checkpoint could not be written.
        """
        if self._writer is not None:
            try:
                self._finish()
            finally:
                self._writer.close()
                self._writer = None

    def restore(self, step: int, like: Mapping[str, TrainState]) -> tuple[dict[str, TrainState], dict[str, Any]]:
        """The states, bit for bit, in the shardings of `like`, whatever mesh they were saved from; and the caller's meta.

        Raises:
            Damaged: it is not as it was saved.
            ValueError: there is no such step, or its states of these names have other arrays than `like`.
        """
        path, meta = self.directory / str(step), self.meta(step)
        _check_form(path, meta["arrays"], like)
        abstract = {name: jax.tree.map(_abstract, _tree(state)) for name, state in like.items()}
        items = {name: ocp.args.StandardRestore(tree) for name, tree in abstract.items()}
        try:
            with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
                read = reader.restore(path, args=ocp.args.Composite(**items))
        except Exception as error:  # Orbax raises bare Exceptions for files that it cannot decode
            raise Damaged(f"{path}: cannot be read: {error}") from error
        states = {name: replace(state, **read[name]) for name, state in like.items()}
        for name, state in states.items():
            if wrong := sorted(_differing(_describe(_tree(state)), meta["arrays"][name])):
                raise Damaged(f"{path}: the bits of {name}/{wrong[0]} are not those that were saved")
        return states, meta

    def meta(self, step: int) -> dict[str, Any]:
        """What the caller saved beside the states. Damaged, or ValueError, as `restore`."""
        if step not in (steps := self.steps()):
            raise ValueError(f"{self.directory}: has no checkpoint of step {step}; it has {steps or 'none'}")
        return _read_meta(self.directory / str(step))

    def resume(
        self, like: Mapping[str, TrainState], report: Callable[[str], None]
    ) -> tuple[int, dict[str, TrainState], dict[str, Any]] | None:
        """The newest checkpoint that is whole: its step, and what `restore` gives; None where there is none at all.

        Newer ones that are damaged are moved to `damaged/`, each with a line to `report`.

        Raises:
            ValueError: all are damaged, or the newest whole one holds other arrays than `like`.
        """
        damaged: list[int] = []
        for step in reversed(self.steps()):
            try:
                found = step, *self.restore(step, like)
            except Damaged as error:
                report(f"{error}; taking an older checkpoint")
                damaged.append(step)
                continue
            for newer in damaged:  # not before: another process may still be looking at them
                self._set_aside(newer)
            return found
        if damaged:
            raise ValueError(f"{self.directory}: all checkpoints are damaged; remove the run's folder to start anew")
        return None

    def _set_aside(self, step: int) -> None:
        if jax.process_index() == 0:
            aside = self.directory / DAMAGED / str(step)
            shutil.rmtree(aside, ignore_errors=True)
            aside.parent.mkdir(exist_ok=True)
            os.rename(self.directory / str(step), aside)


def locate(text: str) -> tuple[Checkpoints, int]:
    """The checkpoints of a run's folder and a step of theirs, of `RUN_DIR@STEP`; of `RUN_DIR` alone, the newest step.

    Raises:
        ValueError: there is no such folder or step.
    """
    directory, step = split(text)
    checkpoints = Checkpoints(Path(directory) / "checkpoints")
    steps = checkpoints.steps()
    if not steps:
        raise ValueError(f"{checkpoints.directory}: holds no whole checkpoint; train with checkpoint.every above 0")
    step = steps[-1] if step is None else step
    checkpoints.meta(step)
    return checkpoints, step


def split(text: str) -> tuple[str, int | None]:
    """Folder and step of `RUN_DIR@STEP`; None where there is no step."""
    directory, _, step = text.rpartition("@")
    return (directory, int(step)) if directory and step.isdecimal() else (text, None)


def _tree(state: TrainState) -> dict[str, Any]:
    return {field.name: getattr(state, field.name) for field in fields(state)}


def _abstract(x: jax.Array) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding)


def _sizes(path: Path, names: Mapping[str, Any]) -> dict[str, int]:
    """Bytes of every file of the named states."""
    found = (file for name in names for file in sorted((path / name).rglob("*")) if file.is_file())
    return {str(file.relative_to(path)): file.stat().st_size for file in found}


def _read_meta(path: Path) -> dict[str, Any]:
    """The meta of a checkpoint all of whose files are there in their sizes; Damaged otherwise."""
    try:
        meta = json.loads((path / META).read_text())
        files, arrays = meta["files"], meta["arrays"]
    except (OSError, ValueError, KeyError) as error:
        raise Damaged(f"{path / META}: cannot be read ({error})") from error
    if wrong := sorted(_differing(_sizes(path, arrays), files)):
        raise Damaged(f"{path / wrong[0]}: is missing, cut or new")
    return meta


def _differing(ours: Mapping[str, Any], theirs: Mapping[str, Any]) -> set[str]:
    return {name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name)}


def _names(tree: Any) -> list[str]:
    return [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in jax.tree.leaves_with_path(tree)]


def digest(state: TrainState) -> str:
    """Of the masters' bits, the same on any mesh: what a metrics line says of the weights after its step."""
    return hashlib.sha256(json.dumps(_describe(state.masters)).encode()).hexdigest()[:16]


def _describe(tree: Any) -> dict[str, Any]:
    """Name -> form of each array, and the sum of its bits as unsigned integers, modulo 2^32: it is the same on any mesh."""
    arrays = jax.tree.leaves(tree)
    replicated = NamedSharding(arrays[0].sharding.mesh, PartitionSpec())
    sums = jax.device_get(jax.jit(_sums, out_shardings=replicated)(arrays))
    return {name: [*_form(x), int(total)] for name, x, total in zip(_names(tree), arrays, sums, strict=True)}


def _form(x: jax.Array) -> list[Any]:
    return [str(x.dtype), list(x.shape)]


def _sums(arrays: list[jax.Array]) -> list[jax.Array]:
    bits = [jax.lax.bitcast_convert_type(x, UNSIGNED[x.dtype.itemsize]) for x in arrays]
    return [jnp.sum(x, dtype=jnp.uint32) for x in bits]


def _check_form(path: Path, saved: Mapping[str, Any], like: Mapping[str, TrainState]) -> None:
    """Refuses a checkpoint of other arrays than `like`."""
    ours = {f"{name}/{leaf}": _form(x) for name, state in like.items() for leaf, x in _leaves(state)}
    theirs = {f"{name}/{leaf}": form[:2] for name in like for leaf, form in saved.get(name, {}).items()}
    if wrong := sorted(_differing(theirs, ours)):
        shown = "; ".join(f"{name}: {theirs.get(name, 'absent')} there, {ours.get(name, 'absent')} here" for name in wrong[:3])
        raise ValueError(
            f"{path}: holds other arrays than this config ({shown}; {len(wrong)} in all); use the model, the optimizer and the "
            f"critic that it was saved with"
        )


def _leaves(state: TrainState) -> list[tuple[str, jax.Array]]:
    return list(zip(_names(_tree(state)), jax.tree.leaves(_tree(state)), strict=True))
