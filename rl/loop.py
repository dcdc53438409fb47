"""A whole run: where it begins, supervised steps, then rollouts and training beside each other, and what is written down.

    supervised steps (or a file's examples) -> rl.orchestrator: rollouts | training | publishing
                                                     |
    after each step: metrics line -> evaluation -> checkpoint

Everything random derives from (seed, version at issue, task, sample), so a run of lag 0 that was killed goes on from its last
checkpoint exactly as if it had not been: what came after that checkpoint is made again. With a lag, groups that were finished
by then are trained on as they are, and those in flight are sampled anew. Either way no task is lost and none
is trained on twice.
"""

import json
import shutil
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from models.compiles import CompileCounter
from rl.buffer import Buffer, Group
from rl.checkpoint import Checkpoints, digest, split
from rl.config import RunConfig
from rl.datasets import Dataset
from rl.environments import EVAL_KEYS
from rl.files import Records, check_directory, lock, run_record, summary
from rl.journal import Journal
from rl.learn import learn_answers
from rl.orchestrator import Orchestrator
from rl.resume import Place, begin, check_data, check_fork, go_on, save
from rl.rollout import Rollout, recorded
from rl.run import Run, export, make_run
from rl.sides import BatchLearner, GroupSampler
from rl.supervised import DataRun, data_step, load_data, make_data_run, num_steps
from rl.whole import write_whole

SILENT_ALARM = 0.9
"""share of groups without signal from which on a step warns"""


class Reporter(Protocol):
    """Where a run shows what it does."""

    def phase(self, text: str) -> None: ...

    def step(self, step: int, total: int, metrics: Mapping[str, Any]) -> None: ...

    def transcript(self, step: int, rollout: Rollout, text: str) -> None: ...


def evaluate(run: Run, step: int, records: Records | None = None) -> dict[str, Any]:
    """Mean reward on the held-out tasks: `eval` at the rollout temperature, `greedy`, and `constant_answer` beside them (None
    where the tasks have no answers)."""
    section = run.config.evaluation
    keys = EVAL_KEYS[: section.tasks]
    tasks = [run.environment.task(key) for key in keys]
    started = time.perf_counter()
    sampled = run.rollout(tasks, label=f"eval-{step}", samples=section.samples)
    greedy = run.rollout(tasks, label=f"greedy-{step}", samples=1, greedy=True)
    run.fleet.forget()  # a resumed run has no evaluation's pages either, so its counts of cached tokens are the same
    answer, score = run.constant_answer(keys) or (None, None)
    if records is not None:
        records.rollouts(f"eval_{step:06d}", [*sampled, *greedy])
    return {
        "step": step,
        "eval": _mean_reward(sampled),
        "greedy": _mean_reward(greedy),
        "constant_answer": score,
        "constant_answer_text": answer,
        "tasks": len(keys),
        "samples": section.samples,
        "computed_tokens": sum(rollout.computed_tokens for rollout in (*sampled, *greedy)),
        "time/evaluate_s": time.perf_counter() - started,
    }


def _mean_reward(rollouts: Sequence[Rollout]) -> float:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    if not rewards:
        raise ValueError("environment: none of the episodes was scored; give the scorer a weight above 0")
    return float(np.mean(rewards))


def train(config: RunConfig, config_json: str, reporter: Reporter) -> dict[str, Any]:
    """Runs, or goes on with, a whole run; returns its summary."""
    directory = Path(config.run_dir) / config.name
    if moved := check_directory(directory, config_json):
        reporter.phase(f"config.{', config.'.join(moved)}: changed; going on within rounding, not bit for bit")
    data = load_data(config, reporter.phase)
    total = num_steps(config, data)
    check_fork(config, directory, total)
    if (done := _finished(directory, config, total)) is not None:
        longer = "data.epochs" if config.data and config.data.epochs else "steps"
        reporter.phase(f"all {total} steps are done; a larger config.{longer} goes on")
        return done
    reporter.phase("loading the model")
    run = make_run(config) if data is None else make_data_run(config, data)
    checkpoints = Checkpoints(directory / "checkpoints", config.checkpoint.keep, config.checkpoint.keep_every)
    # the lock makes the folder, only now: a config that does not fit leaves none behind
    with closing(run), lock(directory), closing(checkpoints):  # whatever happens, what is being written is written to its end
        renderer = run.renderer
        about = run_record(config_json, run.source, renderer.name, renderer.version, config.seed, config.fork)
        about["data_sha256"] = data.sha256 if data else None
        check_data(config, directory, about["data_sha256"])
        write_whole(directory / "run.json", json.dumps(about, indent=2))
        write_whole(directory / "config.json", config_json)
        return _train(run, data, directory, total, checkpoints, config_json, reporter)


def _train(
    run: Run | DataRun,
    data: Dataset | None,
    directory: Path,
    total: int,
    checkpoints: Checkpoints,
    config_json: str,
    reporter: Reporter,
) -> dict[str, Any]:
    config = run.config
    start, begun = begin(run, checkpoints, config_json, reporter.phase)
    with ExitStack() as stack:
        if data is None:
            assert isinstance(run, Run)
            journal = stack.enter_context(closing(Journal(directory / "journal.sqlite")))
            go_on(journal, start, begun, keep=config.orchestrator.lag > 0)
            records = stack.enter_context(closing(Records(directory, start)))
            records.keep(journal.files())
            steps = stack.enter_context(closing(_task_steps(run, directory, start, total, records, journal, reporter)))
        else:
            journal = None
            records = stack.enter_context(closing(Records(directory, start)))
            steps = _steps(run, start, total, lambda step: data_step(run, data, place(step - 1).cursor))

        def place(step: int) -> Place:
            if journal is not None:
                return Place(journal.cursor(), journal.pending())
            return Place(begun.cursor + (step - start) * (config.data.batch if config.data else 0))

        if start < total:
            shutil.rmtree(directory / "hf", ignore_errors=True)  # of a shorter run; made again at the end
        reporter.phase("compiling")
        run.warm_up()
        digest(run.trainer.state)
        saved = partial(save, run, checkpoints, config_json)
        compiled = _take(run, steps, start, total, records, reporter, lambda step: saved(step, place(step)))
        checkpoints.close()
    if config.export:
        reporter.phase("exporting")
        export(run.trainer, run.source, directory / "hf")
    return summary(records, run.compile_s) | {"compiles_after_warmup": compiled}


Steps = Generator[tuple[int, dict[str, Any]]]


def _take(
    run: Run | DataRun,
    steps: Steps,
    start: int,
    total: int,
    records: Records,
    reporter: Reporter,
    checkpoint: Callable[[int], None],
) -> int:
    """Takes all steps; evaluates and writes down. Returns how many programs were compiled meanwhile."""
    config = run.config
    evaluated = {line["step"] for line in records.evaluations()}

    def evaluation(step: int) -> None:
        if isinstance(run, Run) and step not in evaluated:
            reporter.phase(f"evaluating at step {step}")
            records.append("evaluations.jsonl", evaluate(run, step, records))

    compiles = CompileCounter()  # of steps and evaluations; writing a checkpoint may compile
    compiled = 0
    if start == (split(config.fork)[1] or 0):
        with compiles:
            evaluation(start)
        compiled = compiles.count
    for step in range(start + 1, total + 1):
        with compiles:
            done, metrics = next(steps)
            assert done == step, (done, step)
            metrics |= {"weights": digest(run.trainer.state), "compiles": compiles.count}
            records.append("metrics.jsonl", {"step": step, **metrics})
            reporter.step(step, total, metrics)
            if (silent := metrics.get("zero_signal_groups", 0)) >= SILENT_ALARM:
                reporter.phase(
                    f"step {step}: all episodes of {silent:.0%} of the groups earned the same, so they teach nothing; choose "
                    f"tasks that are neither too easy nor too hard, or sample more of each"
                )
            if step == total or (config.evaluation.every and step % config.evaluation.every == 0):
                evaluation(step)
        compiled += compiles.count
        if step == total or (config.checkpoint.every and step % config.checkpoint.every == 0):
            checkpoint(step)
    return compiled


def _steps(run: Run | DataRun, start: int, end: int, take: Callable[[int], dict[str, Any]]) -> Steps:
    """Steps without rollouts, each published when it is done."""
    for step in range(start + 1, end + 1):
        began = time.perf_counter()
        metrics = take(step)
        published = time.perf_counter()
        run.publish()
        ended = time.perf_counter()
        yield step, metrics | {"time/publish_s": ended - published, "time/step_s": ended - began}


def _answers(run: Run, step: int) -> dict[str, Any]:
    return learn_answers(run.trainer, run.config, run.environment, run.renderer, run.tokenizer, step)


def _task_steps(
    run: Run, directory: Path, start: int, total: int, records: Records, journal: Journal, reporter: Reporter
) -> Steps:
    """Supervised steps, then those of rollouts."""
    config = run.config
    yield from _steps(run, start, min(config.warmup.steps, total), partial(_answers, run))
    restored = []
    for row in journal.finished():
        assert row.version is not None and row.oldest is not None and row.file is not None, row
        rollouts = recorded(directory / row.file, run.environment)
        if all(rollout.reward is None for rollout in rollouts):  # the run was broken off before it was dropped, or went back
            journal.drop(row.number, "unscored", max(start, config.warmup.steps) + 1)
        else:
            restored.append(Group(row.number, row.version, row.oldest, rollouts))
    buffer = Buffer(
        lag=config.orchestrator.lag,
        batch=config.rollout.prompts,
        last=total,
        cursor=journal.cursor(),
        pending=journal.pending(),
    )
    for group in restored:
        buffer.restore(group)
    sampler = GroupSampler(run, records, journal)
    show = partial(_show, run, reporter)
    with closing(BatchLearner(run, show, beside=config.orchestrator.lag > 0)) as learner:
        yield from Orchestrator(buffer, sampler, learner, journal, max(start, config.warmup.steps)).steps()


def _finished(directory: Path, config: RunConfig, total: int) -> dict[str, Any] | None:
    """The summary of a run with nothing left to do."""
    if not (directory / "checkpoints").is_dir() or (config.export and not (directory / "hf").exists()):
        return None
    latest = Checkpoints(directory / "checkpoints").latest()
    if latest is None or latest < total:
        return None
    with lock(directory):
        records = Records(directory, latest)
        records.close()
    return summary(records, 0.0)


def _show(run: Run, reporter: Reporter, step: int, rollouts: Sequence[Rollout]) -> None:
    rollout = rollouts[0]
    if (every := run.config.transcripts_every) and (step - 1) % every == 0:
        reporter.transcript(step, rollout, run.tokenizer.decode(rollout.graph.path_ids(len(rollout.graph.nodes) - 1)))
