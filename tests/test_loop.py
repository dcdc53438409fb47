"""The loop: episodes on a scripted engine; whole runs of the tiny config as processes, broken off and gone on with."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from inference.types import Completion, FinishReason, Request, SamplingParams
from rl.agents import stepping
from rl.credit import AdvantageConfig, samples_of
from rl.environments import Reward, Step, Task, finish, make_task
from rl.episodes import Episodes
from rl.files import Records
from rl.journal import Journal
from rl.learn import learn
from rl.messages import Message
from rl.rollout import Rollout
from rl.workers import Inline
from tests.scripted import END, RENDERER, TOKENIZER, Scripted, rows_of

REPO = Path(__file__).parents[1]

# ---- episodes on a scripted engine


class Counting:
    """Asks `turns` times for the next number; the reward is the share of turns that were right."""

    name = "counting"

    def __init__(self, turns: int):
        self.turns = turns

    def task(self, key: int) -> Task:
        return make_task(self.name, key, [{"role": "user", "content": f"Count from {key}."}], answer=str(key))

    def step(self, task: Task, messages: Sequence[Message]) -> Step:
        said = [message["content"] for message in messages if message["role"] == "assistant"]
        assert messages[-1]["role"] == "assistant"
        if len(said) < self.turns:
            return Step(messages=({"role": "user", "content": f"after {said[-1]}?"},), done=False)
        right = [text == str(task.key + turn) for turn, text in enumerate(said)]
        return finish(Reward("right", sum(right) / self.turns))


def episodes(engine: Scripted, environment: Counting, tasks: int = 2, samples: int = 3, **options: Any) -> list[Rollout]:
    params = SamplingParams(max_tokens=9, temperature=options.pop("temperature", 0.7))
    batch = {"label": options.pop("label", "train-4"), "trainable": options.pop("trainable", True)}
    begin = partial(stepping, Inline(environment))
    running = Episodes(engine, begin, RENDERER, **{"seed": 3, "max_turns": 3, "max_context": 500, **options})
    given = [environment.task(k) for k in range(5, 5 + tasks)]
    return running.finish(running.start(given, samples=samples, params=params, **batch))


def counts(request: Request) -> tuple[list[int], FinishReason]:
    """The right number for task 5 in its first turn, `9` afterwards; sample 1 is cut in turn 1, without its end token."""
    name, turn = request.id.rsplit("#", 1)
    _, _, key, sample = name.split("/")
    text = key if turn == "0" else "9"
    if (turn, sample) == ("1", "1"):
        return TOKENIZER.encode(text + "..."), FinishReason.LENGTH
    return [*TOKENIZER.encode(text), END], FinishReason.STOP


def test_ids_are_exactly_what_the_engine_was_given() -> None:
    engine = Scripted(counts)
    rollouts = episodes(engine, Counting(3))
    assert [(r.task.key, r.graph.episode.id) for r in rollouts] == [
        (k, f"train-4/counting/{k}/{s}") for k in (5, 6) for s in range(3)
    ]
    assert len({request.id for request in engine.requests}) == len(engine.requests) == 2 * 3 * 3
    by_episode: dict[str, list[Completion]] = {}
    for completion in engine.completions:
        by_episode.setdefault(completion.request_id.rsplit("#", 1)[0], []).append(completion)
    for rollout in rollouts:
        turns = by_episode[rollout.graph.episode.id]
        stream, mask, logp = list(turns[0].prompt_ids), [False] * len(turns[0].prompt_ids), [0.0] * len(turns[0].prompt_ids)
        assert stream == RENDERER.render(list(rollout.task.messages))
        for number, turn in enumerate(turns):
            assert list(turn.prompt_ids) == stream  # a conversation only grows, and sampled ids are never encoded again
            stream += turn.ids.tolist()
            mask += [True] * len(turn.ids)
            logp += turn.logprobs.tolist()
            if number < 2:
                said = turn.ids[turn.ids != END].tolist()
                bridge = RENDERER.bridge(stream, [{"role": "user", "content": f"after {TOKENIZER.decode(said)}?"}])
                assert bridge is not None
                stream += bridge
                mask += [False] * len(bridge)
                logp += [0.0] * len(bridge)
        (branch,) = rollout.graph.branches(2.0)
        assert branch.ids.tolist() == stream and branch.mask.tolist() == mask
        np.testing.assert_array_equal(branch.logprobs, np.asarray(logp, np.float32))
        np.testing.assert_array_equal(branch.weights, np.asarray(mask, np.float32))
        # the advantage stands on every turn's own action tokens, and nowhere else
        np.testing.assert_array_equal(branch.advantages, 2.0 * np.asarray(mask, np.float32))
        np.testing.assert_array_equal(branch.versions, np.where(mask, 7, -1))
        np.testing.assert_array_equal(branch.temperatures[branch.mask], np.float32(0.7))
        # turn by turn the rows that were not there yet: those of the boundary token came with the next turn
        assert branch.routing is not None and (branch.routing[-1] == 255).all()
        np.testing.assert_array_equal(branch.routing[:-1], rows_of(stream[:-1]))
        assert [turn.routing_start for turn in turns] == [0, *(len(t.prompt_ids) + len(t.ids) - 1 for t in turns[:-1])]
        assert rollout.turns == 3 and rollout.sampled_tokens == sum(mask)
        assert rollout.prompt_tokens == sum(len(turn.prompt_ids) for turn in turns)
        assert rollout.cached_tokens == sum(turn.cached_tokens for turn in turns)
        assert rollout.reward == pytest.approx(1 / 3)
        assert rollout.graph.episode.status == "completed" and rollout.graph.episode.stop_reason == "stop"
        assert [m["role"] for m in rollout.messages] == ["user", "assistant"] * 3


def test_what_the_trainer_gets() -> None:
    rollouts = episodes(Scripted(counts), Counting(3))
    samples = samples_of(rollouts, [0.5, -1.0, 0.25, 0.0, 1.0, 2.0])
    assert [sample.episode for sample in samples] == list(range(6))
    for sample, advantage, rollout in zip(samples, [0.5, -1.0, 0.25, 0.0, 1.0, 2.0], rollouts, strict=True):
        np.testing.assert_array_equal(sample.advantages, advantage * (sample.weights > 0))
        assert sample.weights.sum() == rollout.sampled_tokens and sample.weights[0] == 0


def test_seeds_name_the_sample() -> None:
    engine, again, other = Scripted(counts), Scripted(counts), Scripted(counts)
    episodes(engine, Counting(1))
    episodes(again, Counting(1))
    episodes(other, Counting(1), label="train-5")
    seeds = [request.params.seed for request in engine.requests]
    assert len(set(seeds)) == 6
    assert seeds == [request.params.seed for request in again.requests]
    assert not set(seeds) & {request.params.seed for request in other.requests}
    assert all(END in request.params.stop_ids for request in engine.requests)


def test_most_turns() -> None:
    engine = Scripted(counts)
    rollouts = episodes(engine, Counting(3), max_turns=2)
    assert len(engine.requests) == 2 * 3 * 2
    for rollout in rollouts:
        assert rollout.graph.episode.status == "truncated" and rollout.graph.episode.stop_reason == "max_turns"
        assert rollout.reward is None and rollout.turns == 2


def test_an_aborted_episode_keeps_what_it_had() -> None:
    def answers(request: Request) -> tuple[list[int], FinishReason]:
        return ([65], FinishReason.ABORT) if request.id.endswith("1#1") else counts(request)

    rollouts = episodes(Scripted(answers), Counting(2), tasks=1)
    status = [(r.graph.episode.status, r.graph.episode.stop_reason, r.turns) for r in rollouts]
    assert status == [("completed", "stop", 2), ("aborted", "abort", 1), ("completed", "stop", 2)]
    assert rollouts[1].reward is None and len(rollouts[1].graph.branches()) == 1
    assert [node.status for node in rollouts[1].graph.nodes if node.kind == "sampled"] == ["live", "abandoned"]


def test_an_environment_that_raises_fails_its_episode_only() -> None:
    class Fragile(Counting):
        def step(self, task: Task, messages: Sequence[Message]) -> Step:
            if task.key == 6:
                raise KeyError("odd text")
            return super().step(task, messages)

    rollouts = episodes(Scripted(counts), Fragile(1))
    assert [r.graph.episode.status for r in rollouts] == ["completed"] * 3 + ["failed"] * 3
    assert all(r.reward is None and r.graph.episode.error == "KeyError: 'odd text'" for r in rollouts[3:])


def test_an_episode_that_would_outgrow_the_context_ends() -> None:
    first = len(RENDERER.render(list(Counting(3).task(5).messages)))
    rollouts = episodes(Scripted(counts), Counting(3), tasks=1, max_context=first + 20)
    assert {(r.graph.episode.status, r.graph.episode.stop_reason, r.turns) for r in rollouts} == {("truncated", "context", 1)}


def test_unscored_episodes_do_not_dilute_the_step() -> None:
    """A step in which one of two groups failed trains as one with the other group alone."""
    rollouts = episodes(Scripted(counts), Counting(1))
    for rollout in rollouts[3:]:
        rollout.graph.finish("failed")
    seen: dict[str, Any] = {}

    def train(samples: Any, temperature: float) -> dict[str, float]:
        seen["episodes"] = [sample.episode for sample in samples]
        return {}

    config: Any = SimpleNamespace(
        rollout=SimpleNamespace(temperature=1.0, max_tokens=8),
        advantages=AdvantageConfig(std="none"),
        environment=SimpleNamespace(max_turns=1),
    )
    trainer: Any = SimpleNamespace(train=train)
    metrics = learn(trainer, None, config, rollouts)
    assert seen["episodes"] == [0, 1, 2] and metrics["unscored"] == 0.5


def test_greedy_episodes_are_not_trained_on() -> None:
    rollouts = episodes(Scripted(counts), Counting(1), samples=1, temperature=0.0, trainable=False)
    assert not any(sample.weights.any() for sample in samples_of(rollouts, [1.0, 1.0]))
    with pytest.raises(ValueError, match="temperature: greedy samples"):
        episodes(Scripted(counts), Counting(1), samples=1, temperature=0.0)


# ---- a run's files


def test_a_cut_last_line_is_dropped(tmp_path: Path) -> None:
    lines = [json.dumps({"step": step, "loss": step / 3}) + "\n" for step in range(1, 5)]
    for cut in (1, 9, len(lines[3]) - 1, len(lines[3])):
        (tmp_path / "metrics.jsonl").write_text("".join(lines[:3]) + lines[3][:cut])
        records = Records(tmp_path, 3)
        assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines[:3])
        records.append("metrics.jsonl", {"step": 4, "loss": 0.5})
        records.close()
        assert [line["step"] for line in records.metrics()] == [1, 2, 3, 4]


def test_a_cut_line_may_end_in_a_brace(tmp_path: Path) -> None:
    (tmp_path / "evaluations.jsonl").write_text('{"step": 2}\n{"step": 4, "constant_answer_text": "{x}')
    records = Records(tmp_path, 4)
    records.close()
    assert records.evaluations() == [{"step": 2}]


# ---- whole runs, as processes

KEYS = (
    "eval_before", "eval_after", "greedy_before", "greedy_after", "constant_answer", "reward_first", "reward_last", "steps",
    "train_wall_s", "compile_s", "rollout_tokens_per_s", "train_tokens_per_s", "forest_compression", "prefix_hit_rate",
    "max_abs_logprob_gap", "mean_k3",
)  # fmt: skip
STEPS = 20
LONG = (f"--config.steps={STEPS}", "--config.evaluation.every=5", "--config.checkpoint.every=5")


def start(run_dir: Path, *overrides: str, devices: int = 1, config: str = "tiny") -> subprocess.Popen[str]:
    file = f"configs/{config}.py"
    command = [sys.executable, "-m", "launch.train", "--config", file, f"--config.run_dir={run_dir}", *overrides]
    environment = os.environ | {"XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}"}
    return subprocess.Popen(command, cwd=REPO, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)


def finished(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


def kill_when(process: subprocess.Popen[str], condition: Callable[[], bool]) -> None:
    """SIGKILL at the first moment the condition holds."""
    limit = time.monotonic() + 200
    while not condition():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < limit
        time.sleep(0.001)
    process.send_signal(signal.SIGKILL)
    process.communicate()


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Whole lines, without wall times and the count of compiles."""
    read = [json.loads(line) for line in path.read_text().splitlines()]
    return [{k: v for k, v in line.items() if not k.startswith(("time/", "wait/")) and k != "compiles"} for line in read]


def rollouts_of(directory: Path) -> dict[str, list[dict[str, Any]]]:
    """By evaluation, and by step and task, the rows of all nodes that were trained on or scored, without wall times."""
    timed = ["generate_s", "environment_s"]
    files = {path.name: path for path in (directory / "rollouts").glob("eval_*")}
    with closing(Journal(directory / "journal.sqlite", read_only=True)) as journal:
        for step in range(1, STEPS + 1):
            files |= {f"{step}/{row.number}": directory / str(row.file) for row in journal.trained(step)}
    return {name: pq.read_table(path).drop_columns(timed).to_pylist() for name, path in files.items()}


@pytest.fixture(scope="module")
def unbroken(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    run_dir = tmp_path_factory.mktemp("unbroken")
    return run_dir / "tiny", finished(start(run_dir, *LONG))


@pytest.mark.slow
def test_tiny_learns(unbroken: tuple[Path, dict[str, Any]]) -> None:
    directory, result = unbroken
    assert result.keys() >= set(KEYS)
    assert all(isinstance(result[key], int | float) for key in KEYS)
    assert result["steps"] == STEPS and result["compiles_after_warmup"] == 0
    assert result["max_abs_logprob_gap"] == 0 and result["mean_k3"] == 0
    assert result["eval_after"] > result["eval_before"] + 0.2
    assert result["reward_last"] > result["reward_first"] + 0.2
    assert result["forest_compression"] > 1.5 and 0 < result["prefix_hit_rate"] < 1
    names = {
        "config.json",
        "run.json",
        "metrics.jsonl",
        "evaluations.jsonl",
        "checkpoints",
        "rollouts",
        "tensorboard",
        "journal.sqlite",
    }
    assert {path.name for path in directory.iterdir()} == names | {".lock"}
    assert json.loads((directory / "config.json").read_text())["steps"] == STEPS
    metrics, evaluations = lines_of(directory / "metrics.jsonl"), lines_of(directory / "evaluations.jsonl")
    assert [line["step"] for line in metrics] == list(range(1, STEPS + 1))
    assert [line["step"] for line in evaluations] == list(range(0, STEPS + 1, 5))
    assert result["eval_before"] == evaluations[0]["eval"] and result["eval_after"] == evaluations[-1]["eval"]
    assert sorted(int(path.name) for path in (directory / "checkpoints").iterdir()) == [15, 20]
    for name, records in rollouts_of(directory).items():
        count = 16 * 5 if name.startswith("eval") else 8
        assert sum(record["node"] == 0 for record in records) == count
    keys = {record["key"] for name, records in rollouts_of(directory).items() if "/" in name for record in records}
    assert keys == set(range(4 * STEPS))  # no task twice


@pytest.mark.slow
def test_a_killed_run_goes_on(unbroken: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    """Killed while a checkpoint is written, then in the middle of a step, with a cut last line: the same files, bit for bit."""
    directory, expected = unbroken

    def steps_done() -> int:
        path = again / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    def writes_checkpoint() -> bool:
        return any("orbax-checkpoint-tmp" in path.name for path in again.glob("checkpoints/*"))

    for attempt in range(4):  # on a busy machine the kill may come too late to cut the checkpoint
        run_dir = tmp_path / str(attempt)
        again = run_dir / "tiny"
        kill_when(start(run_dir, *LONG), writes_checkpoint)
        if not (again / "checkpoints" / "5").exists():
            break
    else:
        pytest.fail("no kill came in time")
    assert steps_done() >= 5  # it is written while the next steps run
    kill_when(start(run_dir, *LONG), lambda: steps_done() >= 12)
    assert (again / "checkpoints" / "10").exists() and steps_done() < STEPS
    with (again / "metrics.jsonl").open("a") as file:
        file.write('{"step": 20, "phase": "rl", "rew')
    result = finished(start(run_dir, *LONG))

    assert lines_of(again / "evaluations.jsonl") == lines_of(directory / "evaluations.jsonl")
    assert lines_of(again / "metrics.jsonl") == lines_of(directory / "metrics.jsonl")
    assert rollouts_of(again) == rollouts_of(directory)
    timed = {"train_wall_s", "compile_s", "rollout_tokens_per_s", "train_tokens_per_s"}
    assert {k: v for k, v in result.items() if k not in timed} == {k: v for k, v in expected.items() if k not in timed}

    kept = {path: path.read_bytes() for path in again.rglob("*") if path.is_file() and "tensorboard" not in path.parts}
    process = start(run_dir, *LONG)
    out, err = process.communicate(timeout=100)
    assert err == "tiny: all 20 steps are done; a larger config.steps goes on\n"  # no model is loaded, nothing compiled
    once_more = json.loads(out)
    assert {path: path.read_bytes() for path in kept} == kept
    assert {k: v for k, v in once_more.items() if k != "compile_s"} == {k: v for k, v in result.items() if k != "compile_s"}

    process = start(run_dir, *LONG, "--config.trainer.learning_rate=0.1")
    out, err = process.communicate(timeout=100)
    assert process.returncode == 2 and not out
    assert err.splitlines()[-1].startswith("error: config.trainer.learning_rate: differs from the run that ")
    assert {path: path.read_bytes() for path in kept} == kept


@pytest.mark.slow
def test_trainer_and_engine_on_their_own_meshes(tmp_path: Path) -> None:
    """Trainer fsdp 4 x tensor 2 on devices 0 to 7, engine tensor 2 on 8 and 9: the numbers of one device, float32."""
    common = (
        "--config.model.dtype=float32", "--config.steps=4", "--config.warmup.steps=1", "--config.trainer.rows=4",
        "--config.trainer.tokens_per_row=256", "--config.evaluation.tasks=4",
    )  # fmt: skip
    mesh = (
        "--config.trainer.mesh.fsdp=4", "--config.trainer.mesh.tensor=2", "--config.engine.mesh.tensor=2",
        "--config.engine.first_device=8",
    )  # fmt: skip
    many = finished(start(tmp_path / "many", *common, *mesh, devices=10))
    one = finished(start(tmp_path / "one", *common))
    lines = {name: lines_of(tmp_path / name / "tiny" / "metrics.jsonl") for name in ("many", "one")}
    assert [line["phase"] for line in lines["many"]] == ["sft", "rl", "rl", "rl", "rl"]
    for ours, theirs in zip(lines["many"], lines["one"], strict=True):
        keys = {"loss", "grad_norm", "nll", "reward", "length_mean", "micro_batches"} & ours.keys()
        assert len(keys) == (6 if ours["phase"] == "rl" else 4)
        for key in keys:
            assert ours[key] == pytest.approx(theirs[key], rel=1e-5, abs=1e-5), (ours["step"], key)
    assert many["eval_after"] == pytest.approx(one["eval_after"], abs=1e-5)
    assert many["compiles_after_warmup"] == one["compiles_after_warmup"] == 0
    assert 0 < many["max_abs_logprob_gap"] < 1e-5


@pytest.mark.slow
def test_experts_learn_with_replay_and_a_killed_run_goes_on(tmp_path: Path) -> None:
    """The sampler's rows are there for every token (the balance loss needs them), and the trainer routes as the sampler did;
    killed between checkpoints, the run writes the same files."""
    whole, again = (tmp_path / name / "tiny_moe" for name in ("whole", "again"))
    options = ("--config.steps=12", "--config.evaluation.every=6")
    result = finished(start(whole.parent, *options, config="tiny_moe"))
    assert result["eval_after"] > result["eval_before"] + 0.2
    assert result["max_abs_logprob_gap"] == 0 and result["mean_k3"] == 0 and result["compiles_after_warmup"] == 0
    lines = lines_of(whole / "metrics.jsonl")
    assert all(line["router/mismatch"] == 0 and line["router/loss"] > 0.01 for line in lines)

    def steps_done() -> int:
        path = again / "metrics.jsonl"
        return path.read_text().count("\n") if path.exists() else 0

    kill_when(start(again.parent, *options, config="tiny_moe"), lambda: steps_done() >= 7)
    assert steps_done() < 12
    finished(start(again.parent, *options, config="tiny_moe"))
    assert lines_of(again / "metrics.jsonl") == lines
    assert rollouts_of(again) == rollouts_of(whole)
