"""The serve benchmark: its loads, the ideal cache and the arithmetic it is measured with, and each load at small scale on a
tiny random model."""

import argparse
import importlib.util
import itertools
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from inference.types import Tokens
from launch import quiet, serving
from launch.cli import Parser
from launch.loads import LOADS, Answered, Asked, Load, Turn, ideal_hit_rate, ideal_hits, make_load
from launch.peers import play
from models.config import ModelConfig
from models.hf import save_hf
from models.transformer import Definition, describe
from sharding.mesh import make_mesh
from sharding.reshard import init
from sharding.rules import Rules

MODEL = ModelConfig(
    family="llama",
    vocab_size=256,
    model_dim=64,
    ffn_dim=128,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    max_positions=256,
    tied_head=True,
)
DOTS = 2 * (64 * 64 + 2 * 64 * 32 + 64 * 64 + 3 * 64 * 128)
"""weights in the products of MODEL's layers: q, k and v, o, and the three of the MLP"""


def random_params(stacked: bool) -> dict[str, jax.Array]:
    weights = describe(MODEL, stacked)
    shardings = Rules().shardings(make_mesh({"data": 1}, jax.devices()[:1]), weights)
    return init(weights, jax.random.key(0), jnp.float32, shardings)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("serving") / "model"
    save_hf(path, MODEL, {name: np.asarray(array) for name, array in random_params(True).items()}, dtype=jnp.bfloat16)
    return path


def parse(*arguments: str) -> argparse.Namespace:
    parser = Parser()
    serving.add_arguments(parser)
    return parser.parse_args(arguments)


# ---- loads


def test_loads_are_what_they_say() -> None:
    uniform, grpo, agent = (make_load(name, "full", 49152) for name in ("uniform", "grpo", "agent"))
    requests = [turn for (turn,) in uniform.conversations]
    assert len(requests) == 64 and uniform.at_once == 16
    prompts, sampled = {len(turn.added) for turn in requests}, {turn.sampled for turn in requests}
    assert 32 <= min(prompts) < 64 and 224 < max(prompts) <= 256 and 16 <= min(sampled) < 48 and 224 < max(sampled) <= 256
    assert uniform.longest == max(len(turn.added) + turn.sampled for turn in requests)

    requests = [turn for (turn,) in grpo.conversations]
    assert len(requests) == 64 and grpo.at_once == 32 and {(len(turn.added), turn.sampled) for turn in requests} == {(250, 64)}
    assert len({turn.added[:200] for turn in requests}) == 1 and len({turn.added for turn in requests}) == 8
    assert all(len({turn.added for turn in requests[at : at + 8]}) == 1 for at in range(0, 64, 8)), "groups come together"

    assert len(agent.conversations) == agent.at_once == 8 and agent.longest == 600 and agent.num_sampled == 1920
    assert {(len(turn.added), turn.sampled) for turns in agent.conversations for turn in turns} == {(60, 40)}
    assert len({turn.added for turns in agent.conversations for turn in turns}) == 48

    for load in (uniform, grpo, agent):
        ids = [i for turns in load.conversations for turn in turns for i in turn.added]
        assert min(ids) >= 491 and max(ids) < 49152
    assert make_load("grpo", "full", 49152) == grpo


def test_ideal_hits_by_hand() -> None:
    """A group, another prompt with the same beginning, a next turn, the very same request again, and a stranger."""
    prompt = (1, 2, 3, 4)
    trace = [
        Asked(prompt, 2),  # nothing is there
        Asked(prompt, 2),  # all of it is being computed, but its last token always is
        Asked((1, 2, 9), 2),
        Answered((*prompt, 5, 6)),
        Asked((*prompt, 5, 6, 7, 8), 2),  # 6 was sampled last and never computed
        Answered((*prompt, 5, 7)),
        Asked((*prompt, 5, 6, 7, 8), 1),
        Asked((8,), 1),
    ]
    assert ideal_hits(trace) == [0, 3, 2, 5, 7, 0]
    assert ideal_hit_rate(trace) == 17 / (4 + 4 + 3 + 8 + 8 + 1)


def test_ideal_hits_of_the_loads() -> None:
    """grpo: 7 prompts find the shared 200, 56 all but a token. agent: a turn finds the one before, but for its last token."""
    grpo = [Asked(turn.added, turn.sampled) for (turn,) in make_load("grpo", "full", 49152).conversations]
    assert ideal_hit_rate(grpo) == (7 * 200 + 56 * 249) / (64 * 250)
    turns = make_load("agent", "full", 49152).conversations[0]
    history, trace = (), []
    for turn in turns:
        trace.append(Asked(history + turn.added, turn.sampled))
        history += turn.added + (0,) * turn.sampled
        trace.append(Answered(history))
    assert ideal_hits(trace) == [0, 99, 199, 299, 399, 499]


# ---- arithmetic


def test_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that come together share the time since the ones before; the first ones give the time to the first token."""
    times = iter([10.0, 10.5, 11.5, 11.75])
    monkeypatch.setattr(time, "perf_counter", lambda: next(times))
    first, between = [], []
    on_tokens = serving.clock(first, between)
    for count in (2, 4, 1):
        some, none = np.zeros(count, np.float32), np.zeros((count, 0))
        ids = np.zeros(count, np.int32)
        on_tokens(Tokens(ids=ids, logprobs=some, logprobs_full=some, versions=ids, top_ids=none, top_logprobs=none))
    assert first == [0.5] and between == [0.25] * 4 + [0.25]


def test_useful_flops() -> None:
    """Counted token by token: 5 prompt tokens and 2 of 3 sampled ones; then a request that finds 4 of its 5 tokens."""
    trace = [Asked((1, 2, 3, 4, 5), 3), Asked((1, 2, 3, 4, 5), 1)]
    tokens = [*range(7), 4]
    flops = sum(2 * DOTS + 2 * 2 * 2 * 64 * (position + 1) for position in tokens) + 4 * 2 * 64 * 256
    assert serving.useful_flops(MODEL, trace) == flops


@pytest.mark.parametrize(("rows", "heads"), [(8, 8), (128, 16)])
def test_all_products_are_in_the_ceiling(rows: int, heads: int) -> None:
    """XLA's own count, after it has left out what nobody reads; the little in between is below a tenth."""
    definition, params = Definition(MODEL, jnp.bfloat16, stacked=False), random_params(False)
    call = jax.jit(partial(serving.products, definition, heads))
    x = jnp.ones((rows, MODEL.model_dim))
    out = call(params, x)
    assert out.shape == (heads, MODEL.vocab_size) and np.isfinite(out).all()
    analysis: Any = call.lower(params, x).compile().cost_analysis()
    expected = 2 * rows * DOTS + 2 * heads * 64 * 256
    assert expected <= analysis["flops"] <= 1.1 * expected


def test_others(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In 2 s the machine works 3.5 s, of which this process and its children 2.5 s."""
    ticks = os.sysconf("SC_CLK_TCK")

    def state(user: float, idle: float) -> str:
        return f"cpu {int(user * ticks)} 0 {ticks} {int(idle * ticks)} {ticks} 0 0 0 0 0\ncpu0 1 1\n"

    class Times:
        user, system, children_user, children_system = 1.0, 0.0, 0.0, 0.0

    monkeypatch.setattr(quiet, "STAT", tmp_path / "stat")
    monkeypatch.setattr(os, "times", Times)
    clock = itertools.count(5.0, 2.0)
    monkeypatch.setattr(time, "perf_counter", lambda: next(clock))
    quiet.STAT.write_text(state(100, 50))
    with quiet.Others() as others:
        quiet.STAT.write_text(state(103.5, 50.5))
        Times.user, Times.children_user = 2.5, 1.0
    assert others.cpus == pytest.approx(0.5)
    quiet.warn(others.cpus, "at noon")
    assert capsys.readouterr().err == "warning: other processes kept 0.5 CPUs busy at noon; timings need a quiet machine\n"
    quiet.STAT.unlink()
    with quiet.Others() as others:
        pass
    quiet.warn(others.cpus, "at noon")
    quiet.warn(0.05, "at noon")
    assert others.cpus is None and not capsys.readouterr().err


# ---- what it does

KEYS = {
    "load", "at_once", "model", "dtype", "tokens_per_s", "ttft_p50_ms", "itl_p50_ms", "prefix_hit_rate", "ideal_hit_rate",
    "dot_fraction", "roofline_fraction", "best_gflops_per_s", "compiles_after_warmup", "warm_up_compile_s", "wall_s",
    "other_cpus", "requests", "sampled_tokens", "computed_tokens", "prompt_tokens", "steps", "preemptions",
}  # fmt: skip


@pytest.mark.parametrize("name", LOADS)
def test_each_load(name: str, directory: Path) -> None:
    """Nothing compiles after warm-up, nothing is preempted, and the prefix cache is as good as an ideal one."""
    result = serving.serve(parse("--load", name, "--model", str(directory), "--requests-scale", "small"))
    load = make_load(name, "small", MODEL.vocab_size)
    assert result.keys() == KEYS | LOADS[name]["small"].keys()
    assert result["sampled_tokens"] == load.num_sampled and result["requests"] == sum(map(len, load.conversations))
    assert result["compiles_after_warmup"] == 0 and result["preemptions"] == 0
    assert result["tokens_per_s"] == pytest.approx(load.num_sampled / result["wall_s"])
    for key in ("ttft_p50_ms", "itl_p50_ms", "dot_fraction", "roofline_fraction", "best_gflops_per_s", "steps"):
        assert result[key] > 0, key
    assert result["prefix_hit_rate"] >= 0.98 * result["ideal_hit_rate"]
    assert (result["ideal_hit_rate"] > 0.4) == (name != "uniform")
    # tokens that were computed: all that were not found, and all sampled ones but each request's last
    missed = result["prompt_tokens"] * (1 - result["prefix_hit_rate"])
    assert result["computed_tokens"] == pytest.approx(missed + result["sampled_tokens"] - result["requests"])


def test_peers_batches() -> None:
    """Batches in order, padded to the longest; turn by turn; each request keeps only its own tokens."""
    calls = []
    numbers = itertools.count(100)

    def generate(prompts: list[list[int]], num_sampled: int) -> list[list[int]]:
        calls.append(([list(prompt) for prompt in prompts], num_sampled))
        return [[next(numbers)] * num_sampled for _ in prompts]

    play(Load(tuple((Turn((n,), n),) for n in (1, 3, 2)), at_once=2), generate)
    assert calls == [([[1], [3]], 3), ([[2]], 2)]
    calls.clear()
    play(Load(((Turn((1, 2), 1), Turn((3,), 2)), (Turn((4,), 2), Turn((5,), 1))), at_once=2), generate)
    assert calls == [([[1, 2], [4]], 2), ([[1, 2, 103, 3], [4, 104, 104, 5]], 2)]


def test_a_peer_that_is_not_there(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="--against: torch is not installed; install it, or leave --against out"):
        serving.serve(parse("--load", "grpo", "--model", str(directory), "--against", "transformers"))
    with pytest.raises(ValueError, match="--load: invalid choice: 'chat'"):
        parse("--load", "chat", "--model", str(directory))


@pytest.mark.skipif(importlib.util.find_spec("transformers") is None, reason="transformers is not installed")
@pytest.mark.oracle
@pytest.mark.slow
def test_against_transformers(directory: Path) -> None:
    arguments = ("--load", "agent", "--model", str(directory), "--requests-scale", "small", "--against", "transformers")
    result = serving.serve(parse(*arguments))
    assert result["ratio"] == pytest.approx(result["tokens_per_s"] / result["transformers_tokens_per_s"])
    assert result["transformers_tokens_per_s"] == pytest.approx(result["sampled_tokens"] / result["transformers_wall_s"])
    assert result["transformers_attention"] in ("sdpa", "eager") and result["compiles_after_warmup"] == 0
