"""A run's files: which configs may share a folder, who holds it, what is recorded of the run, TensorBoard's events."""

import dataclasses
import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launch.cli import read_config
from rl import files
from rl.config import RunConfig, build
from rl.files import Records, check_directory, lock, run_record

REPO = Path(__file__).parents[1]
HOLD = (
    "import sys; from pathlib import Path; from rl.files import lock\nwith lock(Path(sys.argv[1])): print(flush=True); input()"
)


def config_json(*overrides: str) -> str:
    return json.dumps(read_config(str(REPO / "configs/tiny.py"), [f"--config.{text}" for text in overrides]))


def test_another_config_is_refused_by_name(tmp_path: Path) -> None:
    check_directory(tmp_path, config_json())
    (tmp_path / "config.json").write_text(config_json())
    same = config_json("steps=5", "checkpoint.every=2", "export=true", "transcripts_every=1")
    assert check_directory(tmp_path, same) == []
    assert check_directory(tmp_path, config_json("trainer.mesh.fsdp=2", "trainer.rows=2")) == [
        "trainer.mesh.fsdp",
        "trainer.rows",
    ]
    other = config_json("trainer.learning_rate=0.2", "trainer.mesh.fsdp=2", "seed=1", "fork=runs/x@3")
    with pytest.raises(ValueError, match=r"^config.fork, config.seed, config.trainer.learning_rate: differs .*"):
        check_directory(tmp_path, other)


def test_defaults_and_a_moved_folder_are_no_change(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(config_json())
    whole: dict[str, Any] = dataclasses.asdict(build(RunConfig, json.loads(config_json())))
    check_directory(tmp_path, json.dumps(whole))
    check_directory(tmp_path, config_json("run_dir=/elsewhere", "trainer.b1=0.9", "rollout.temperature=1"))


def test_a_config_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(json.loads(config_json()) | {"typo": 1}))
    with pytest.raises(ValueError, match=r"config.json: is no config of .*config.typo: unknown key.*another config.name"):
        check_directory(tmp_path, config_json())


def test_one_process_holds_a_run(tmp_path: Path) -> None:
    run = tmp_path / "runs/x"
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(run)], cwd=REPO, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None and other.stdout.readline() == "\n"
    with pytest.raises(ValueError, match=r"runs/x: another process is at this run; wait .*another config.name"), lock(run):
        pass
    other.kill()
    other.communicate()
    for _ in range(2):
        with lock(run), pytest.raises(ValueError, match="another process"), lock(run):
            pass


def test_no_events_without_a_line(tmp_path: Path) -> None:
    records = Records(tmp_path, 0)
    records.close()
    assert not (tmp_path / "tensorboard").exists()
    records = Records(tmp_path, 0)
    records.append("metrics.jsonl", {"step": 1, "loss": 0.5})
    records.append("metrics.jsonl", {"step": 2, "loss": 0.5})
    records.close()
    Records(tmp_path, 2).close()
    assert len(list((tmp_path / "tensorboard").iterdir())) == 1


def test_run_record(tmp_path: Path) -> None:
    for name, text in {"b.safetensors": "2", "a.safetensors": "1", "tokenizer.json": "{}", "chat_template.jinja": "t"}.items():
        (tmp_path / name).write_text(text)
    record = run_record(config_json(), tmp_path, "chatml", 1, 7)
    assert json.loads(json.dumps(record)) == record
    assert record["id"] == "tiny" and record["seed"] == 7 and (record["renderer"], record["renderer_version"]) == ("chatml", 1)
    assert record["model_sha256"] == hashlib.sha256(b"12").hexdigest()
    assert record["tokenizer_sha256"] == hashlib.sha256(b"{}t").hexdigest()
    assert record["config_sha256"] == hashlib.sha256(config_json().encode()).hexdigest()
    assert record["packages"].keys() == set(files.PACKAGES) and record["python"].startswith("3.")
    assert record["code_commit"] is None or len(record["code_commit"]) == 40
    random = run_record(config_json(), None, "chatml", 1, 7, "runs/parent@30")
    fork = {"id": "parent", "directory": "runs/parent", "step": 30}
    assert random == record | {"model_sha256": None, "tokenizer_sha256": None, "fork": fork} and record["fork"] is None


def test_no_git(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "__file__", str(tmp_path / "rl/files.py"))
    assert run_record(config_json(), None, "chatml", 1, 0)["code_commit"] is None
    (tmp_path / ".git").mkdir()  # no repository
    assert run_record(config_json(), None, "chatml", 1, 0)["code_commit"] is None
    monkeypatch.setenv("PATH", "")
    assert run_record(config_json(), None, "chatml", 1, 0)["code_commit"] is None
