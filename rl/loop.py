"""The loop of a run, lag 0: each step samples with the weights of the step before, trains once, publishes.

    tasks (keys by step) -> rollout -> reward -> advantages -> pack -> train -> publish -> metrics -> checkpoint
      ^                                                                                                  |
      +--------------------------------------------------------------------------------------------------+

    who          waits for                          is waited for by
    rollout      the weights of the last step       train
    train        all episodes of the step           publish
    publish      the optimizer step                 the next rollout
    checkpoint   the metrics line of its step       the next checkpoint; it is written while the next steps run

Everything random derives from (seed, step, task, sample), so a run that was killed goes on from its last checkpoint exactly
as if it had not been: what was recorded past that checkpoint is dropped, and made again.
"""

import json
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from models.compiles import CompileCounter
from rl.batch import Sample
from rl.checkpoint import Checkpoints, split
from rl.config import RunConfig
from rl.credit import assign
from rl.datasets import Dataset
from rl.environments import EVAL_KEYS, TRAIN_KEYS
from rl.files import Records, check_directory, lock, run_record, summary, write_whole
from rl.resume import begin, check_data, check_fork, save
from rl.rollout import Rollout
from rl.run import Run, export, make_run, warmup_keys
from rl.supervised import DataRun, data_step, load_data, make_data_run, num_steps

SILENT_ALARM = 0.9
"""share of groups without signal from which on a step warns"""
CRITIC_METRICS = ("loss", "return", "value_clipped", "explained_variance", "grad_norm", "update_norm")


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
    started, computed = time.perf_counter(), run.engine.stats.computed_tokens
    sampled = run.rollout(tasks, label=f"eval-{step}", samples=section.samples)
    greedy = run.rollout(tasks, label=f"greedy-{step}", samples=1, greedy=True)
    run.engine.forget()  # a resumed run has no evaluation's pages either, so its counts of cached tokens are the same
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
        "computed_tokens": run.engine.stats.computed_tokens - computed,
        "time/evaluate_s": time.perf_counter() - started,
    }


def _mean_reward(rollouts: Sequence[Rollout]) -> float:
    rewards = [rollout.reward for rollout in rollouts if rollout.reward is not None]
    if not rewards:
        raise ValueError("environment: none of the episodes was scored; give the scorer a weight above 0")
    return float(np.mean(rewards))


def supervised_step(run: Run, step: int) -> dict[str, Any]:
    """One step on the tasks' own answers."""
    count = run.config.warmup.tasks
    samples = []
    for number, key in enumerate(warmup_keys(run.config)[(step - 1) * count : step * count]):
        task = run.environment.task(key)
        if task.answer is None:
            raise ValueError(f"warmup: task {key} of {task.env!r} has no answer to learn; set warmup.steps = 0")
        prompt = run.renderer.render(list(task.messages))
        answer = [*run.tokenizer.encode(task.answer), run.renderer.stop_ids[0]]
        n = len(prompt) + len(answer)
        weights = np.zeros(n, np.float32)
        weights[len(prompt) :] = 1
        zeros = np.zeros(n, np.float32)
        ids = np.asarray([*prompt, *answer], np.int32)
        samples.append(Sample(ids=ids, weights=weights, logprobs=zeros, advantages=zeros, episode=number))
    return {"phase": "sft", **run.trainer.train(samples, loss="sft")}


def reinforcement_step(
    run: Run, step: int, records: Records, on_transcript: Callable[[Rollout], None], *, first: int | None = None
) -> dict[str, Any]:
    """Rollout, reward, advantages, one optimizer step, on the train keys from `first` on (None: of a run that is no fork)."""
    config = run.config.rollout
    first = _cursor(run.config, step, 0, 0) if first is None else first
    tasks = [run.environment.task(key) for key in TRAIN_KEYS[first : first + config.prompts]]
    started = time.perf_counter()
    computed = run.engine.stats.computed_tokens
    rollouts = run.rollout(tasks, label=f"train-{step}", samples=config.samples, trainable=True)
    elapsed = time.perf_counter() - started
    records.rollouts(f"step_{step:06d}", rollouts)
    on_transcript(rollouts[0])
    rewards = [rollout.reward for rollout in rollouts]
    samples, credit = assign(
        rollouts,
        run.config.advantages,
        longest=config.max_tokens * run.config.environment.max_turns,
        temperature=config.temperature,
        policy=run.trainer,
        critic=run.critic,
    )
    metrics = run.trainer.train(samples, temperature=config.temperature)
    if run.critic is not None:
        critic = run.critic.train(samples)
        metrics |= {f"critic/{name}": critic[name] for name in CRITIC_METRICS if name in critic}
        metrics |= {"time/critic_s": critic["time/pack_s"] + critic["time/train_s"]}
    lengths = [rollout.sampled_tokens for rollout in rollouts]
    reward_s = sum(rollout.environment_s for rollout in rollouts)
    return {
        "phase": "rl",
        "reward": float(np.mean([reward for reward in rewards if reward is not None])),
        **credit,
        "length_mean": float(np.mean(lengths)),
        "cut": float(np.mean([rollout.graph.episode.stop_reason == "length" for rollout in rollouts])),
        "prefix_hit_rate": sum(r.cached_tokens for r in rollouts) / sum(r.prompt_tokens for r in rollouts),
        "computed_tokens": run.engine.stats.computed_tokens - computed,
        "sampled_tokens": sum(lengths),
        **metrics,
        "time/rollout_s": elapsed - reward_s,
        "time/reward_s": reward_s,
    }


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
    with lock(directory), closing(checkpoints):  # whatever happens, what is being written is written to its end
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
    start, cursor = begin(run, checkpoints, config_json, reporter.phase)
    records = Records(directory, start)
    if start < total:
        shutil.rmtree(directory / "hf", ignore_errors=True)  # of a shorter run; made again at the end
    reporter.phase("compiling")
    run.warm_up()
    evaluated = {line["step"] for line in records.evaluations()}

    compiles = CompileCounter()  # of steps and evaluations; writing a checkpoint may compile

    def evaluation(step: int) -> None:
        if isinstance(run, Run) and step not in evaluated:
            reporter.phase(f"evaluating at step {step}")
            records.append("evaluations.jsonl", evaluate(run, step, records))

    def task_step(run: Run, step: int, first: int) -> dict[str, Any]:
        if step <= config.warmup.steps:
            return supervised_step(run, step)
        return reinforcement_step(run, step, records, lambda rollout: _show(run, reporter, step, rollout), first=first)

    def take(step: int) -> None:
        began = time.perf_counter()
        first = _cursor(config, step, start, cursor)
        if data is not None:
            metrics = data_step(run, data, first)
        else:
            assert isinstance(run, Run)
            metrics = task_step(run, step, first)
        published = time.perf_counter()
        run.publish()
        ended = time.perf_counter()
        metrics |= {"time/publish_s": ended - published, "time/step_s": ended - began, "compiles": compiles.count}
        records.append("metrics.jsonl", {"step": step, **metrics})
        reporter.step(step, total, metrics)
        if (silent := metrics.get("zero_signal_groups", 0)) >= SILENT_ALARM:
            reporter.phase(
                f"step {step}: all episodes of {silent:.0%} of the groups earned the same, so they teach nothing; choose tasks "
                f"that are neither too easy nor too hard, or sample more of each"
            )

    compiled = 0
    if start == (split(config.fork)[1] or 0):
        with compiles:
            evaluation(start)
        compiled = compiles.count
    for step in range(start + 1, total + 1):
        with compiles:
            take(step)
            if step == total or (config.evaluation.every and step % config.evaluation.every == 0):
                evaluation(step)
        compiled += compiles.count
        if step == total or (config.checkpoint.every and step % config.checkpoint.every == 0):
            save(run, checkpoints, step, _cursor(config, step + 1, start, cursor), config_json)
    checkpoints.close()
    records.close()
    if config.export:
        reporter.phase("exporting")
        export(run.trainer, run.source, directory / "hf")
    return summary(records, run.compile_s) | {"compiles_after_warmup": compiled}


def _cursor(config: RunConfig, step: int, start: int, cursor: int) -> int:
    """The first train key, or example of a file, of a step of a run that goes on from `start` with `cursor`.

    The supervised steps of the warm-up have keys of their own.
    """
    used = config.rollout.prompts if config.data is None else config.data.batch
    return cursor + max(0, step - 1 - max(start, config.warmup.steps)) * used


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


def _show(run: Run, reporter: Reporter, step: int, rollout: Rollout) -> None:
    if (every := run.config.transcripts_every) and (step - 1) % every == 0:
        reporter.transcript(step, rollout, run.tokenizer.decode(rollout.graph.path_ids(len(rollout.graph.nodes) - 1)))
