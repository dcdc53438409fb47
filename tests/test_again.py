"""Steps of a recorded run taken again: the same bits, another loss on the same batch, no file touched."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from launch.cli import override, read_config
from rl.config import RunConfig, build
from rl.loop import train
from rl.replay import replay, values_of
from tests.runs import REPO, SMALL, Lines

pytestmark = pytest.mark.plain_code

OPTIONS = ("steps=3", "warmup.steps=2", "checkpoint.every=2", "checkpoint.keep=9")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two supervised steps, then three on rollouts; checkpoints 2, 4 and 5."""
    run_dir = tmp_path_factory.mktemp("run")
    values = read_config(
        str(REPO / "configs/tiny.py"), [f"--config.{text}" for text in (f"run_dir={run_dir}", *SMALL, *OPTIONS)]
    )
    train(build(RunConfig, values), json.dumps(values), Lines())
    return run_dir / "tiny"


def again(run: Path, step: int, *overrides: str) -> dict[str, Any]:
    values = override(values_of(run), [f"--config.{text}" for text in overrides])
    return replay(run, step, build(RunConfig, values), Lines().phase)


@pytest.mark.slow
def test_a_recorded_step_gives_the_same_bits(run: Path, tmp_path: Path) -> None:
    """From the checkpoint before it; with all but the last removed, from the model's weights on, through every step."""
    before = {path: path.read_bytes() for path in run.rglob("*") if path.is_file()}
    whole = again(run, 5)
    assert (whole["replayed_from"], whole["equal"], whole["differs"]) == (4, True, [])
    assert whole["recorded"]["weights"] == whole["metrics"]["weights"] and whole["metrics"]["tokens"] > 0
    assert {path: path.read_bytes() for path in run.rglob("*") if path.is_file()} == before
    shutil.copytree(run, tmp_path / "copy")
    for step in (2, 4):
        shutil.rmtree(tmp_path / f"copy/checkpoints/{step}")
    far = again(tmp_path / "copy", 5)
    assert (far["replayed_from"], far["equal"]) == (0, True)
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    lines[-1]["loss"] += 1
    (tmp_path / "copy/metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert again(tmp_path / "copy", 5)["differs"] == ["loss"]


@pytest.mark.slow
def test_another_loss_on_the_same_batch(run: Path) -> None:
    other = again(run, 5, "trainer.loss=dapo", "trainer.learning_rate=1e-4")
    assert other["changed"] == ["trainer.learning_rate", "trainer.loss"] and not other["equal"]
    assert "weights" in other["differs"] and "tokens" not in other["differs"]
    assert other["recorded"]["weights"] == again(run, 5)["metrics"]["weights"] != other["metrics"]["weights"]


@pytest.mark.slow
def test_what_is_refused(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"^config.environment.options.max_value, config.seed: cannot differ in a replay"):
        again(run, 5, "seed=1", "environment.options.max_value=8")
    with pytest.raises(ValueError, match=r"^step: 6 is not on record; .* has steps 1 to 5"):
        again(run, 6)
    with pytest.raises(ValueError, match="holds no run; give the folder that has its config.json"):
        again(tmp_path, 5)
    with pytest.raises(ValueError, match="advantages.kind: 'gae' needs the critic of the run"):
        again(run, 5, "advantages.kind=gae")
    with pytest.raises(ValueError, match="config.trainer: its optimizer keeps other arrays|frozen|trainable"):
        again(run, 5, "trainer.frozen=('embed',)")
