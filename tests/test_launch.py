"""Entry points: each mistake gives one `error: ...` line that names the field and the fix, before a run's folder is made;
evaluate, bench and convert do what they say."""

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
from tokenizers import Tokenizer as JsonTokenizer
from tokenizers.models import WordLevel

import launch.bench
import launch.convert
import launch.evaluate
import launch.train
from launch.cli import Parser, read_config, run_main
from models.hf import load_hf
from models.hf_config import read_config as read_model_config
from rl.checkpoint import Checkpoints
from rl.config import MINIMA, RunConfig, build
from rl.run import make_model, make_trainer

pytestmark = pytest.mark.plain_code

REPO = Path(__file__).parents[1]
TINY = str(REPO / "configs/tiny.py")
GOLDEN = REPO / "tests/golden/tiny_llama3"


class Ended(NamedTuple):
    code: int
    out: str
    err: str


Launch = Callable[..., Ended]


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Launch:
    """Runs an entry point in this process: `launched(module, *arguments)`."""

    def run(module: Any, *arguments: str) -> Ended:
        monkeypatch.setattr(sys, "argv", [f"python -m {module.__name__}", *arguments])
        capsys.readouterr()
        code = 0
        try:
            run_main(module.main)
        except SystemExit as error:
            code = int(error.code or 0)
        captured = capsys.readouterr()
        return Ended(code, captured.out, captured.err)

    return run


def refused(ended: Ended, pattern: str) -> None:
    """Exit code 2, nothing on standard output, and one error line, the last."""
    assert ended.code == 2 and not ended.out, ended
    lines = ended.err.splitlines()
    assert [line for line in lines if line.startswith("error: ")] == lines[-1:], ended.err
    assert re.search(pattern, lines[-1]), lines[-1]
    assert "Traceback" not in ended.err


# ---- mistakes

MISTAKES = {
    "unknown key": (["typo=1"], r"error: config.typo: unknown key; known keys: .*trainer"),
    "close key": (["trainer.learning_rat=1"], r"config.trainer.learning_rat: unknown key; did you mean 'learning_rate'\?"),
    "section of a value": (["steps.x=1"], r"config.steps.x: 'steps' has no keys below it"),
    "not an override": (["steps"], r"--config.steps: unknown argument; override a key of the config as --config.key=value"),
    "word for a number": (["steps=many"], r"config.steps: expected int, got 'many'"),
    "fraction": (["rollout.prompts=2.5"], r"config.rollout.prompts: expected int, got 2.5"),
    "number for a bool": (["export=3"], r"config.export: expected bool, got 3"),
    "mesh of words": (["trainer.mesh={'data': 'x'}"], r"config.trainer.mesh.data: expected int, got 'x'"),
    "several": (["steps=x", "foo=1", "seed=y"], r"config.foo: unknown.*config.steps: expected int.*config.seed: expected int"),
    "std": (["advantages.std=max"], r"config.advantages.std: expected one of \('none', 'sample', 'population'\), got 'max'"),
    "number for numbers": (["engine.slot_buckets=32"], r"config.engine.slot_buckets: expected tuple\[int, ...\], got 32"),
    "words for numbers": (["engine.slot_buckets=(8, 'x')"], r"engine.slot_buckets: expected tuple\[int, ...\], got \(8, 'x'\)"),
    "number for ids": (["model.shape.eos_ids=2"], r"config.model.shape.eos_ids: expected tuple\[int, ...\], got 2"),
    "number for axes": (["trainer.rules={'embed': 3}"], r"config.trainer.rules.embed: expected str \| tuple.* \| None, got 3"),
    "axes of numbers": (
        ["engine.rules={'ffn': ('tensor', 1)}"],
        r"config.engine.rules.ffn: expected str .* got \('tensor', 1\)",
    ),
    "one sample": (["rollout.samples=1"], r"config: rollout.samples: must be at least 2, got 1"),
    "greedy": (["rollout.temperature=0"], r"rollout.temperature: must be from 0.0001 to 10000.0, got 0.0; greedy"),
    "learning rate": (
        ["trainer.learning_rate=0", "trainer.clip_norm=-1"],
        r"rate: must be above 0.*trainer.clip_norm: must be",
    ),
    "folder": (["name=a/b"], r"config: name: 'a/b' is no plain folder name; choose one, and set run_dir"),
    "folder above": (["name=.."], r"config: name: '..' is no plain folder name"),
    "no name": (["name="], r"config: name: '' is no plain folder name"),
    "supervised loss": (["trainer.loss=sft"], r"trainer.loss: 'sft' .*, or use warmup.steps for supervised steps"),
    "dtype": (["model.dtype=bfloat17"], r"model.dtype: 'bfloat17' is unknown; use one of .*bfloat16"),
    "shape": (["model.shape.num_head=3"], r"config.model.shape.num_head: unknown key; did you mean 'num_heads'\?"),
    "heads": (["model.shape.num_kv_heads=3"], r"config.model.shape: num_kv_heads: 3 must divide num_heads \(4\)"),
    "small vocabulary": (["model.shape.vocab_size=100"], r"vocab_size: the tokenizer has ids up to 263, the model only 100"),
    "no model": (["model.source=/nowhere"], r"model: '/nowhere' is neither a local directory nor a hub id"),
    "environment": (["environment.kind=chess"], r"environment.kind: 'chess' is unknown; use one of \['arithmetic'"),
    "renderer": (["environment.renderer=xml"], r"environment.renderer: 'xml' is unknown; use one of \['chatml'"),
    "options": (["environment.options={'maximum': 3}"], r"environment.options: .*'maximum'"),
    "dataset": (
        ["environment.kind=reasoning_gym", "environment.options={'dataset': 'chain_sums'}"],
        r"dataset: reasoning_gym has no 'chain_sums'; close names: chain_sum",
    ),
    "long prompt": (
        [f"environment.renderer_options={{'system': '{'x' * 200}'}}"],
        r"engine.max_context: 128 tokens have no room for the \d+ prompt tokens of task 1000000000 of .*; raise it",
    ),
    "short rows": (
        ["trainer.tokens_per_row=64", "rollout.max_tokens=60"],
        r"trainer.tokens_per_row: 64 tokens cannot hold the \d+ prompt tokens .* lower rollout.max_tokens",
    ),
    "few pages": (["engine.num_pages=4"], r"engine.num_pages: 4 pages of 8 tokens, one spare, cannot hold .*; raise it"),
    "positions": (
        ["engine.max_context=1024", "engine.context_buckets=(1024,)"],
        r"engine.max_context: 1024 exceeds the .*512 positions; lower it",
    ),
    "rows not of 64": (["trainer.tokens_per_row=100"], r"layout: tokens \(100\) must be a multiple of 64"),
    "engine devices": (["engine.mesh.tensor=16"], r"engine.mesh: tensor=16 needs 16 devices, but there are 8; make"),
    "no devices left": (["engine.first_device=9"], r"engine.mesh: .* needs 1 devices, but there are 0"),
    "trainer devices": (["trainer.mesh.fsdp=9"], r"trainer.mesh: fsdp=9 x tensor=1 needs 9 devices, but there are 8"),
    "unknown axis": (["trainer.mesh={'datum': 1}"], r"trainer.mesh: axis 'datum' is unknown; use some of"),
    "one axis twice": (
        ["trainer.rules={'embed': 'tensor', 'ffn': 'tensor'}"],
        r"trainer.rules: blocks.* has dims .*'embed'.* both on mesh axis 'tensor'; map one",
    ),
    "axis that does not divide": (
        ["engine.mesh.tensor=4"],
        r"engine.rules: dim 'kv_heads' of blocks.0.k has size 2, which 4 devices on 'tensor' do not divide; change",
    ),
    "rule for no dim": (
        ["trainer.rules={'embd': 'tensor'}"],
        r"trainer.rules: no weight has a dim 'embd'; did you mean 'embed'",
    ),
    "axis the mesh lacks": (
        ["trainer.rules={'ffn': 'expert'}"],
        r"trainer.rules: 'ffn' is mapped to 'expert', but the mesh has",
    ),
    "rows": (["trainer.mesh.fsdp=2"], r"trainer.rows: 1 rows cannot be split over 2 devices"),
    "loss": (["trainer.loss=poo"], r"trainer.loss: 'poo' is unknown; use one of"),
    "loss option": (["trainer.loss_options={'beta': 0.1}"], r"trainer.loss_options: 'grpo' does not know \['beta'\]"),
    "routing that nobody records": (
        ["engine.capture_routing=False"],
        r"engine.capture_routing: trainer.router_replay 'R3' .*True",
    ),
    "load of examples": (
        ["trainer.balance_coef=0.1", "warmup.steps=2"],
        r"trainer.balance_coef: supervised examples have no recorded experts.* set trainer.router_replay to 'R2'",
    ),
    "router replay": (["trainer.router_replay=R4"], r"trainer.router_replay: .*R4"),
    "engine dtype": (["engine.dtype=float8"], r"engine.dtype: 'float8' is unknown; leave it out, or use one of"),
    "remat": (["trainer.remat=all"], r"remat: 'all' is unknown; use one of"),
}


@pytest.mark.parametrize(("overrides", "pattern"), MISTAKES.values(), ids=MISTAKES)
def test_mistakes_in_a_config(overrides: list[str], pattern: str, launched: Launch, tmp_path: Path) -> None:
    changes = [f"--config.{override}" for override in (f"run_dir={tmp_path}/runs", *overrides)]
    refused(launched(launch.train, "--config", TINY, *changes), pattern)
    assert not list(tmp_path.iterdir())


def test_minima(launched: Launch) -> None:
    """Whole numbers below their least are all named in one line."""
    ended = launched(launch.train, "--config", TINY, *(f"--config.{key}={least - 1}" for key, least in MINIMA.items()))
    for key, least in MINIMA.items():
        refused(ended, rf"{key}: must be at least {least}, got {least - 1}(\.0)?(;|$)")


def test_mistakes_in_a_config_file(launched: Launch, tmp_path: Path) -> None:
    """Unknown and missing keys of a file, all named in one line; files that are no config."""
    path = tmp_path / "mine.py"
    path.write_text(
        "from configs import tiny\n"
        "def get_config():\n"
        "    config = tiny.get_config()\n"
        f"    config.run_dir = {str(tmp_path / 'runs')!r}\n"
        "    config.trainer.learning_rat = 1\n"
        "    del config.rollout['max_tokens']\n"
        "    del config['engine']\n"
        "    return config\n"
    )
    ended = launched(launch.train, "--config", str(path))
    for text in (
        "config.trainer.learning_rat: unknown key; did you mean 'learning_rate'?",
        "config.rollout.max_tokens: missing; set it in the config file",
        "config.engine: missing; set it in the config file",
    ):
        refused(ended, re.escape(text))
    path.write_text("x = 1\n")
    refused(launched(launch.train, "--config", str(path)), r"--config: .*mine.py has no get_config\(\); define it")
    for name in ("none.py", "mine.txt"):
        refused(launched(launch.evaluate, "--config", str(tmp_path / name)), "--config: there is no Python file .*; give one")
    refused(launched(launch.train), "--config; --help shows the usage")
    assert [item.name for item in tmp_path.iterdir()] == ["mine.py"]


def test_overrides() -> None:
    """Literals, words, strings that look like numbers, keys that the file leaves to their default, and whole sections."""
    given = ["steps=7", "trainer.learning_rate=1e-4", "name=12", "run_dir=elsewhere", "export=false", "warmup.steps=2",
             "engine.slot_buckets=(8, 32)", "evaluation={'tasks': 3}", "advantages.std=none", "trainer.mesh.fsdp=2",
             "trainer.rules.embed=None", "trainer.rules.ffn=('fsdp', 'tensor')"]  # fmt: skip
    config: RunConfig = build(RunConfig, read_config(TINY, [f"--config.{text}" for text in given]))
    assert (config.steps, config.trainer.learning_rate, config.name, config.run_dir) == (7, 1e-4, "12", "elsewhere")
    assert config.export is False and config.warmup.steps == 2 and config.warmup.tasks == 16
    assert config.engine.slot_buckets == (8, 32) and config.evaluation.tasks == 3 and config.evaluation.samples == 4
    assert config.trainer.rules["embed"] is None and config.trainer.rules["ffn"] == ("fsdp", "tensor")
    assert config.advantages.std == "none" and config.trainer.mesh == {"fsdp": 2, "tensor": 1}


@pytest.mark.parametrize("path", sorted((REPO / "configs").glob("[!_]*.py")), ids=lambda path: path.stem)
def test_configs_are_valid(path: Path) -> None:
    config: RunConfig = build(RunConfig, read_config(str(path)))
    assert config.name == path.stem


def test_a_bug_keeps_its_traceback() -> None:
    def main() -> None:
        raise KeyError("a bug")

    with pytest.raises(KeyError):
        run_main(main)
    with pytest.raises(ValueError, match="the following arguments are required: --config; --help"):
        parser = Parser("about")
        parser.add_argument("--config", required=True)
        parser.parse_args([])


def model_directory(path: Path, vocab_size: int) -> Path:
    """The golden tiny Llama with a word tokenizer of `vocab_size` ids."""
    shutil.copytree(GOLDEN, path)
    words = ["<|im_start|>", "<|im_end|>", *(f"w{n}" for n in range(vocab_size - 2))]
    tokenizer = JsonTokenizer(WordLevel({word: n for n, word in enumerate(words)}, unk_token="w0"))
    tokenizer.add_special_tokens(words[:2])
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_damaged_models(launched: Launch, tmp_path: Path) -> None:
    """Cut weights and another model's tokenizer, in train and in convert."""
    model = model_directory(tmp_path / "model", 128)
    train = ("--config", TINY, f"--config.run_dir={tmp_path}/runs", f"--config.model.source={model}")
    weights = (model / "model.safetensors").read_bytes()
    (model / "model.safetensors").write_bytes(weights[:-100])
    pattern = "model.safetensors: cannot be read, it is truncated"
    refused(launched(launch.train, *train), pattern)
    refused(launched(launch.convert, str(model), str(tmp_path / "out")), pattern)
    shutil.rmtree(model)
    model_directory(model, 140)
    pattern = r"vocab_size: the tokenizer has ids up to 139, the model only 128 embedding rows; use the tokenizer that came"
    refused(launched(launch.train, *train), pattern)
    refused(launched(launch.evaluate, "--config", TINY, "--model", str(model)), pattern)
    refused(launched(launch.convert, str(model), str(tmp_path / "out")), pattern)
    (model / "tokenizer.json").unlink()
    refused(launched(launch.train, *train), r"has no tokenizer.json or tokenizer.model; copy the model's there")
    assert [path.name for path in tmp_path.iterdir()] == ["model"]


def test_convert_refuses(launched: Launch, tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_bytes(b"GGUF\x03\x00\x00\x00" + b"\xff" * 64)
    refused(launched(launch.convert, str(tmp_path / "a.gguf"), str(tmp_path / "out")), r"a\.gguf: ")
    refused(launched(launch.convert, str(tmp_path / "b.gguf"), str(tmp_path / "out")), r"b\.gguf: there is no such file")
    refused(launched(launch.convert, "embedded", str(tmp_path)), str(tmp_path))
    (tmp_path / "run/checkpoints").mkdir(parents=True)
    (tmp_path / "run/config.json").write_text(json.dumps(read_config(TINY)))
    refused(
        launched(launch.convert, str(tmp_path / "run"), str(tmp_path / "out")), "checkpoints: holds no whole checkpoint; train"
    )
    refused(launched(launch.convert, "embedded"), "required: DEST; --help shows the usage")
    refused(launched(launch.convert, "embedded", "out", "--fast"), "unrecognized arguments: --fast; --help shows")
    refused(launched(launch.bench, "loop", "--config", str(tmp_path / "x.py")), "--config: there is no Python file")
    refused(launched(launch.bench, "loop", "--steps", "0"), "--steps: must be at least 1, got 0")
    refused(launched(launch.bench, "loop", "--config", TINY, "--config.typo=1"), "config.typo: unknown key")
    refused(launched(launch.bench, "lop"), "argument name: invalid choice: 'lop'")
    assert not (tmp_path / "out").exists()


def process(*arguments: str) -> Ended:
    done = subprocess.run(
        [sys.executable, "-m", *arguments], cwd=REPO, env=os.environ.copy(), text=True, capture_output=True, timeout=120
    )
    return Ended(done.returncode, done.stdout, done.stderr)


def test_as_processes(tmp_path: Path) -> None:
    """What a shell sees of a mistake, and of --help."""
    runs = f"--config.run_dir={tmp_path}/runs"
    ended = process("launch.train", "--config", "configs/tiny.py", runs, "--config.typo=1")
    refused(ended, "error: config.typo: unknown key")
    assert len(ended.err.splitlines()) == 1
    (tmp_path / "a.gguf").write_bytes(b"GGUF")
    ended = process("launch.convert", str(tmp_path / "a.gguf"), str(tmp_path / "out"))
    refused(ended, r"a\.gguf: ")
    assert len(ended.err.splitlines()) == 1
    ended = process("launch.train", "--help")
    assert ended.code == 0 and "--config.key=value" in ended.out and not ended.err
    assert [path.name for path in tmp_path.iterdir()] == ["a.gguf"]


# ---- what they do

SMALL = ("--config.steps=1", "--config.evaluation.tasks=3", "--config.evaluation.samples=2", "--config.rollout.prompts=2")


@pytest.mark.slow
def test_train_then_convert_and_evaluate(launched: Launch, tmp_path: Path) -> None:
    """The exported directories hold the checkpoint's masters, rounded; evaluate repeats the run's first evaluation."""
    options = ("--config", TINY, f"--config.run_dir={tmp_path}", "--config.export=true", *SMALL)
    ended = launched(launch.train, *options)
    assert ended.code == 0, ended.err
    assert json.loads(ended.out.splitlines()[-1])["steps"] == 1 and len(ended.out.splitlines()) == 1
    run = tmp_path / "tiny"

    refused(
        launched(launch.convert, f"{run}@7", str(tmp_path / "out")), r"checkpoints: has no checkpoint of step 7; it has \[1\]"
    )
    assert launched(launch.convert, f"{run}@1", str(tmp_path / "out")) == Ended(0, f"wrote {tmp_path / 'out'}\n", "")
    config: RunConfig = build(RunConfig, json.loads((run / "config.json").read_text()))
    model, _, _ = make_model(config.model)
    trainer = make_trainer(config, model, None)
    start = {name: np.array(value) for name, value in trainer.state.masters.items()}
    checkpoints = Checkpoints(run / "checkpoints")
    states, meta = checkpoints.restore(1, {"policy": trainer.state})
    state = states["policy"]
    assert meta["step"] == 1 and meta["cursor"] == 2 and meta["seed"] == 0 and meta["config"]["name"] == "tiny"
    for directory in (tmp_path / "out", run / "hf"):
        assert read_model_config(directory) == model
        stored = load_hf(directory, model, ml_dtypes.bfloat16)
        assert stored.keys() == state.masters.keys()
        for name, value in state.masters.items():
            assert value.dtype == np.float32
            np.testing.assert_array_equal(stored[name], np.asarray(value).astype(ml_dtypes.bfloat16), err_msg=name)
            assert not np.array_equal(np.asarray(value), start[name])
    refused(launched(launch.convert, str(run), str(tmp_path / "out")), str(tmp_path / "out"))

    ended = launched(launch.evaluate, "--config", TINY, *SMALL)
    assert ended.code == 0, ended.err
    result, first = json.loads(ended.out), json.loads((run / "evaluations.jsonl").read_text().splitlines()[0])
    assert first.keys() == result.keys() >= {"eval", "greedy", "constant_answer", "tasks", "samples"}
    assert {k: v for k, v in result.items() if "time" not in k} == {k: v for k, v in first.items() if "time" not in k}


@pytest.mark.slow
def test_bench_loop(launched: Launch) -> None:
    ended = launched(launch.bench, "loop", "--config", TINY, "--steps", "2", "--json", "--config.name=other")
    assert ended.code == 0, ended.err
    result = json.loads(ended.out.splitlines()[-1])
    phases = {"rollout", "reward", "pack", "train", "publish"}
    assert result["config"] == "other" and result["steps"] == 2
    assert result["seconds"].keys() == phases | {"evaluate"} and result["share"].keys() == phases
    assert sum(result["share"].values()) == pytest.approx(1)
    assert sum(result["seconds"][phase] for phase in phases) == pytest.approx(result["step_s"])
    assert all(value > 0 for value in (*result["seconds"].values(), *result["tokens_per_s"].values(), result["compile_s"]))
