"""Checkpoints and what they promise: the same bits on any mesh, whatever is donated, damaged or killed meanwhile."""

import json
import resource
import shutil
import signal
import time
from collections.abc import Callable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from launch.cli import read_config
from rl.checkpoint import META, REMOVED, TEMPORARY, Checkpoints, Damaged
from rl.columns import read
from rl.config import RunConfig, build
from rl.journal import Journal
from rl.loop import train
from rl.programs import TrainState
from sharding.mesh import make_mesh
from tests.runs import KILLS, REPO, SMALL, Lines, ended, lines_of, start, weights_of

pytestmark = pytest.mark.plain_code

# ---- one checkpoint


def state_of(seed: int, *, size: int = 64, **mesh: int) -> TrainState:
    """Random masters in rows over `fsdp`, an optimizer state with a tuple in it, step = seed."""
    devices = make_mesh(mesh or {"fsdp": 1}, jax.devices())
    rows, replicated = (NamedSharding(devices, spec) for spec in (PartitionSpec("fsdp"), PartitionSpec()))
    draw = np.random.default_rng(seed).standard_normal
    return TrainState(
        {name: jax.device_put(draw((size, 8)).astype(np.float32), rows) for name in ("embed", "out")},
        (jax.device_put(draw((size, 8)).astype(np.float32), rows), jax.device_put(jnp.int32(seed), replicated)),
        jax.device_put(jnp.int32(seed), replicated),
    )


def assert_same(ours: Any, theirs: Any) -> None:
    for x, y in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_array_equal(x, y)


def saved(directory: Path, *steps: int) -> Checkpoints:
    checkpoints = Checkpoints(directory, keep=9)
    for step in steps:
        checkpoints.save(step, {"policy": state_of(step)}, {"seed": step})
    checkpoints.close()
    return checkpoints


def test_what_was_saved_may_be_donated_at_once(tmp_path: Path) -> None:
    """Steps that overwrite the state run while it is being written."""
    train = jax.jit(lambda state: jax.tree.map(lambda x: x * 3 + 1, state), donate_argnums=0)
    state = state_of(3, size=2**17)
    checkpoints = Checkpoints(tmp_path, keep=3)
    expected = []
    for step in range(3):
        expected.append(jax.tree.map(lambda x: np.array(x, copy=True), state))
        checkpoints.save(step, {"policy": state}, {})
        for _ in range(4):
            state = train(state)
        jax.block_until_ready(state)
    checkpoints.close()
    for step in range(3):
        assert_same(checkpoints.restore(step, {"policy": state})[0]["policy"], expected[step])


def test_several_states_on_another_mesh(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(5, {"policy": state_of(1), "critic": state_of(2, fsdp=2)}, {"seed": 3, "next_key": 40})
    checkpoints.close()
    like = {"policy": state_of(8, fsdp=4), "critic": state_of(9, fsdp=8)}
    found = Checkpoints(tmp_path).resume(like, print)
    assert found is not None
    step, states, meta = found
    assert step == 5 and (meta["seed"], meta["next_key"]) == (3, 40)
    assert_same(states, {"policy": state_of(1), "critic": state_of(2)})
    for x, y in zip(jax.tree.leaves(states), jax.tree.leaves(like), strict=True):
        assert x.sharding == y.sharding


def test_which_are_kept(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2, keep_every=4)
    for step in range(1, 11):
        checkpoints.save(step, {"policy": state_of(step)}, {})
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["10", "4", "8", "9"]
    assert checkpoints.steps() == [4, 8, 9, 10] and checkpoints.latest() == 10
    with pytest.raises(ValueError, match=r"has no checkpoint of step 7; it has \[4, 8, 9, 10\]"):
        checkpoints.restore(7, {"policy": state_of(1)})


def test_what_a_kill_leaves_is_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path, 3)
    for name in (f"6{TEMPORARY}", f"2{REMOVED}"):
        shutil.copytree(tmp_path / "3", tmp_path / name)
    (tmp_path / f"6{TEMPORARY}" / META).unlink()
    checkpoints = Checkpoints(tmp_path, keep=9)
    found = checkpoints.resume({"policy": state_of(1)}, pytest.fail)
    assert found is not None and found[0] == 3
    assert len(list(tmp_path.iterdir())) == 3  # reading removes nothing: it may be another process's run
    checkpoints.save(6, {"policy": state_of(6)}, {})
    checkpoints.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "6"]
    assert_same(checkpoints.restore(6, {"policy": state_of(1)})[0]["policy"], state_of(6))


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


def empty(path: Path) -> None:
    path.write_bytes(b"")


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def largest(path: Path) -> Path:
    """The file with the arrays themselves, incompressible as they are: Orbax reads it, whatever it holds."""
    return max((file for file in path.rglob("*") if file.is_file()), key=lambda file: file.stat().st_size)


def test_a_damaged_one_is_never_chosen(tmp_path: Path) -> None:
    """Every file of the newest checkpoint in turn is missing, empty or cut, or the arrays have one bit that is another."""
    saved(tmp_path / "whole", 5, 10)
    files = sorted(path for path in (tmp_path / "whole/10").rglob("*") if path.is_file())
    damages: list[tuple[Path, Callable[[Path], None]]] = [(f, how) for f in files for how in (Path.unlink, empty, cut)]
    for number, (file, damage) in enumerate([*damages, (largest(tmp_path / "whole/10"), flip)]):
        run = tmp_path / str(number)
        shutil.copytree(tmp_path / "whole", run)
        damage(run / file.relative_to(tmp_path / "whole"))
        lines: list[str] = []
        found = Checkpoints(run).resume({"policy": state_of(1)}, lines.append)
        assert found is not None
        if found[0] == 10:  # what Orbax keeps for itself at the top, which nothing reads
            assert file.parent.name == "10" and file.name != META
        else:
            assert found[0] == 5 and Checkpoints(run).steps() == [5] and (run / "damaged/10").is_dir()
            assert len(lines) == 1 and lines[0].startswith(f"{run}/10") and lines[0].endswith("; taking an older checkpoint")
        assert_same(found[1]["policy"], state_of(found[0]))


def test_all_damaged(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1, 2)
    for step in (1, 2):
        flip(largest(tmp_path / str(step)))
    with pytest.raises(Damaged, match=r"/2: the bits of policy/\w+/\w+ are not those that were saved"):
        checkpoints.restore(2, {"policy": state_of(1)})
    with pytest.raises(ValueError, match="all checkpoints are damaged; remove the run's folder"):
        checkpoints.resume({"policy": state_of(1)}, print)
    assert checkpoints.steps() == [1, 2]


def test_other_arrays_are_no_damage(tmp_path: Path) -> None:
    checkpoints = saved(tmp_path, 1)
    with pytest.raises(ValueError, match=r"policy/masters/embed: \['float32', \[64, 8\]\] there, \S+ \[32, 8\]\] here"):
        checkpoints.resume({"policy": state_of(1, size=32)}, pytest.fail)
    with pytest.raises(ValueError, match=r"critic/masters/embed: absent there.*use the model, the optimizer and the critic"):
        checkpoints.resume({"policy": state_of(1), "critic": state_of(1)}, pytest.fail)
    assert checkpoints.steps() == [1]


def test_a_write_that_fails_is_told(tmp_path: Path) -> None:
    """At the next save, or when the run closes its checkpoints; those before it stay."""
    checkpoints = saved(tmp_path, 1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10**5, hard))  # bytes a file: as if the disk were full at the last file
    long = {"config": "x" * 10**6}
    try:
        checkpoints.save(2, {"policy": state_of(2)}, long)
        with pytest.raises(OSError, match="/2: could not be written: .*File too large"):
            checkpoints.save(3, {"policy": state_of(3)}, {})
        checkpoints.save(4, {"policy": state_of(4)}, long)
        with pytest.raises(OSError, match="/4: could not be written: .*File too large"):
            checkpoints.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert checkpoints.steps() == [1]
    checkpoints.save(5, {"policy": state_of(5)}, {})
    checkpoints.close()
    assert checkpoints.steps() == [1, 5] and len(list(tmp_path.iterdir())) == 2
    assert json.loads((tmp_path / "5" / META).read_text())["files"]


# ---- whole runs, in this process


def run(run_dir: Path, *overrides: str) -> list[str]:
    """Trains configs/tiny.py; what the reporter was told."""
    given = [f"--config.{text}" for text in (f"run_dir={run_dir}", *SMALL, *overrides)]
    values = read_config(str(REPO / "configs/tiny.py"), given)
    reporter = Lines()
    train(build(RunConfig, values), json.dumps(values), reporter)
    return reporter.phases


CHILD = ("name=child", "model.dtype=float32", "steps=6")
PARENT = ("name=parent", "model.dtype=float32", "steps=6", "checkpoint.every=2", "checkpoint.keep=1", "checkpoint.keep_every=4")


@pytest.fixture(scope="module")
def parent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six steps, of which checkpoints 4 and 6 are kept."""
    run_dir = tmp_path_factory.mktemp("parent")
    run(run_dir, *PARENT)
    return run_dir / "parent"


@pytest.mark.slow
def test_a_fork_goes_on_as_its_parent_did(parent: Path, tmp_path: Path) -> None:
    assert Checkpoints(parent / "checkpoints").steps() == [4, 6]
    shutil.copytree(parent, tmp_path / "parent")
    same = (*CHILD, "checkpoint.every=1", "checkpoint.keep=9", "evaluation.every=5", f"fork={tmp_path / 'parent'}@4")
    run(tmp_path, *same)
    child = tmp_path / "child"
    assert lines_of(child) == lines_of(parent)[4:] and [line["step"] for line in lines_of(child)] == [5, 6]
    assert [line["step"] for line in lines_of(child, "evaluations")] == [4, 5, 6]
    assert lines_of(child, "evaluations")[-1] == lines_of(parent, "evaluations")[-1]
    assert_same(weights_of(child), weights_of(parent))
    about = json.loads((child / "run.json").read_text())
    assert about["fork"] == {"id": "parent", "directory": str(tmp_path / "parent"), "step": 4}

    shutil.rmtree(tmp_path / "parent")  # a fork has its first checkpoint itself
    for step in (5, 6):
        shutil.rmtree(child / "checkpoints" / str(step))
    assert "resuming from step 4" in run(tmp_path, *same)
    assert lines_of(child) == lines_of(parent)[4:]
    assert [line["step"] for line in lines_of(child, "evaluations")] == [4, 5, 6]


@pytest.mark.slow
def test_a_fork_with_another_batch_uses_no_task_twice(parent: Path, tmp_path: Path) -> None:
    run(tmp_path, *CHILD, "rollout.prompts=3", "rollout.samples=2", f"fork={parent}@4", "trainer.learning_rate=1e-3")
    with closing(Journal(tmp_path / "child/journal.sqlite", read_only=True)) as journal:
        rows = [journal.trained(step) for step in (5, 6)]
    assert [[row.key for row in of_step] for of_step in rows] == [[8, 9, 10], [11, 12, 13]]
    files = [tmp_path / "child" / str(row.file) for of_step in rows for row in of_step]
    assert [{graph.episode.key for graph in read(file)} for file in files] == [{key} for key in range(8, 14)]


@pytest.mark.slow
def test_forks_that_are_refused(parent: Path, tmp_path: Path) -> None:
    for fork, words in (
        (f"{parent}@5", r"^config.fork: \S+parent/checkpoints: has no checkpoint of step 5; it has \[4, 6\]"),
        (f"{parent}", r"^config.fork: '\S+/parent' names no step; write \S+/parent@STEP with one of \[4, 6\]"),
        ("nowhere@3", r"^config.fork: \S+/nowhere/checkpoints: holds no whole checkpoint"),
    ):
        with pytest.raises(ValueError, match=words):
            run(tmp_path, *CHILD, f"fork={fork}")
    with pytest.raises(ValueError, match="config.steps: the fork begins after step 6 of 6"):
        run(tmp_path, *CHILD, f"fork={parent}@6")
    with pytest.raises(ValueError, match="config.fork: differs from the run that .* holds; give this run another config.name"):
        run(parent.parent, *PARENT, f"fork={parent}@4")
    assert not list(tmp_path.iterdir())
    with pytest.raises(ValueError, match=r"holds other arrays than this config \(policy/masters/\S+: "):
        run(tmp_path, *CHILD, f"fork={parent}@4", "model.shape.ffn_dim=64")


@pytest.mark.slow
def test_resumed_on_another_mesh(parent: Path, tmp_path: Path, report: Callable[[str], None]) -> None:
    """Four steps on one device, two on four: within 1e-5 of six on one, in float32."""
    shutil.copytree(parent, tmp_path / "parent")
    shutil.rmtree(tmp_path / "parent/checkpoints/6")
    said = run(tmp_path, *PARENT, "trainer.mesh.fsdp=2", "trainer.mesh.tensor=2")
    assert said[0] == "config.trainer.mesh.fsdp, config.trainer.mesh.tensor: changed; going on within rounding, not bit for bit"
    assert "resuming from step 4" in said
    ours, theirs = lines_of(tmp_path / "parent"), lines_of(parent)
    assert ours[:4] == theirs[:4] and len(ours) == len(theirs) == 6
    for line, expected in zip(ours, theirs, strict=True):
        for key in ("loss", "grad_norm", "reward", "length_mean", "nll"):
            assert line[key] == pytest.approx(expected[key], rel=1e-5, abs=1e-5), (line["step"], key)
    pairs = zip(*(jax.tree.leaves(weights_of(directory)) for directory in (tmp_path / "parent", parent)), strict=True)
    gap = max(float(np.max(np.abs(x.astype(np.float64) - y))) for x, y in pairs)
    report(f"resumed on fsdp 2 x tensor 2: largest difference in masters and optimizer state {gap:.1e}")
    assert 0 < gap < 1e-5


# ---- killed


@pytest.mark.slow
def test_killed_at_random_moments(tmp_path: Path, report: Callable[[str], None]) -> None:
    """TWINAX_KILLS times (4 by default): while it starts, in a step, and while a checkpoint is written."""
    options = (
        f"steps={10 * KILLS}",
        "checkpoint.every=2",
        "checkpoint.keep=2",
        "checkpoint.keep_every=8",
        "evaluation.every=7",
    )
    ended(start(tmp_path / "unbroken", *options))
    directory, expected = tmp_path / "killed/tiny", tmp_path / "unbroken/tiny"
    draw = np.random.default_rng(4)

    def newest_write() -> int:
        """When the newest unfinished checkpoint last changed, in nanoseconds; 0: there is none."""
        times = [0]
        for path in directory.glob(f"checkpoints/*{TEMPORARY}*"):
            with suppress(FileNotFoundError):
                times.append(path.stat().st_ctime_ns)
        return max(times)

    cut_writes, resumed = 0, []
    for number in range(KILLS):
        kind = ("write", "step", "write", "start")[number % 4]
        cut_before, steps_before = newest_write(), len(list(directory.glob("rollouts/*")))
        process = start(tmp_path / "killed", *options)
        limit = time.monotonic() + 200
        while kind != "start" and process.poll() is None and time.monotonic() < limit:
            if newest_write() > cut_before if kind == "write" else len(list(directory.glob("rollouts/*"))) > steps_before:
                break
            time.sleep(0.001)
        time.sleep({"write": 0.05, "step": 0.5, "start": 5}[kind] * draw.uniform())
        assert process.poll() is None, f"kill {number} came too late: {process.communicate()[1]}"
        process.send_signal(signal.SIGKILL)
        resumed += [int(line.split()[-1]) for line in process.communicate()[1].splitlines() if "resuming from step" in line]
        cut_writes += newest_write() > cut_before
    ended(start(tmp_path / "killed", *options))
    report(f"{KILLS} kills, {cut_writes} of them in a checkpoint's write; gone on from steps {resumed}")
    assert cut_writes > 0
    assert [line["step"] for line in lines_of(directory)] == list(range(1, 10 * KILLS + 1))
    for name in ("metrics", "evaluations"):
        assert lines_of(directory, name) == lines_of(expected, name)
    assert_same(weights_of(directory), weights_of(expected))
    assert sorted(p.name for p in (directory / "checkpoints").iterdir()) == sorted(
        p.name for p in (expected / "checkpoints").iterdir()
    )
    tasks = range(2 * 10 * KILLS)
    for each in (directory, expected):
        with closing(Journal(each / "journal.sqlite", read_only=True)) as journal:
            assert [row.number for step in range(1, 10 * KILLS + 1) for row in journal.trained(step)] == list(tasks)
            assert journal.pending() == [] and journal.cursor() == len(tasks)
            names = {str(row.file) for step in range(1, 10 * KILLS + 1) for row in journal.trained(step)}
            assert names <= {f"rollouts/{path.name}" for path in (each / "rollouts").iterdir()}
