"""`launch.bench parity`: has a token's log-prob the same bits whatever it is computed with?

Tiny random models of three kinds, or one with real weights. Requests of 1 to 280 tokens, some with a common start, are sampled
one by one in a cold engine, a decode step a call; then again in each company, and read by the trainer in each layout.

    max_abs_gap   largest difference of log-probs from those, over sampled tokens up to the first that is another
    values        how many were compared
    parted        sequences that went on with another token

    retracted             every few steps all pages are given up, and equal weights are loaded as a new version
    decode vs prefill     prompt and sampled tokens as one prompt; models with experts are told how they were routed
    drafts, wrong drafts  2 to 8 new positions of every sequence in one step, on a warm cache, as a step that verifies drafts
                          would compute them; of wrong drafts those up to the first wrong token
    trainer               replays the engine's routing (R3); packed: a row a micro-batch, rows hold tries, not sequences

`exact`: each cell must be 0, those of NOT_PROMISED left out, or the command names it and ends with exit code 1. `fast`: its
sizes, without a promise. `gradients` (full scale, exact): loss and gradient in other micro-batches and on meshes, next to
those of micro-batches of one row: their sums over rows have other orders there, so they are near each other, not equal.
"""

import argparse
import os
import sys
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inference.types import Completion
from launch.parity_engine import COMPANIES, DEVICES, Case, Sizes, alone, batched, drafted, make_engine, prefilled
from launch.parity_trainer import PACKED, distance, gradient, layouts, read, samples_of
from models.config import ModelConfig, MoEConfig
from models.hf import load_hf, resolve
from models.hf_config import read_config
from models.tokenizer import Tokenizer
from models.transformer import describe
from sharding.mesh import make_mesh
from sharding.reshard import init
from sharding.rules import Rules

Cell = dict[str, Any]
NOT_PROMISED = {
    f"{side}, tensor 2": "partial sums of one product cross devices, in another order than one device adds them"
    for side in ("engine", "trainer")
}
SHAPE: dict[str, Any] = {"vocab_size": 202, "model_dim": 64, "ffn_dim": 96, "num_layers": 2, "num_heads": 4}
MODELS = {
    "dense": ModelConfig(family="llama", num_kv_heads=2, head_dim=16, max_positions=512, tied_head=True, **SHAPE),
    "GQA, qk-norm": ModelConfig(family="qwen3", num_kv_heads=1, head_dim=64, max_positions=512, **SHAPE),
    "MoE, replay": ModelConfig(
        family="qwen3_moe",
        num_kv_heads=2,
        head_dim=32,
        max_positions=512,
        moe=MoEConfig(num_experts=8, experts_per_token=3, ffn_dim=48),
        **SHAPE,
    ),
}
PROMPTS = ((150, 0), (150, 0), (150, 40), (70, 60), (0, 33), (0, 1), (0, 65), (0, 130), (0, 280), (0, 200))
REAL = ((100, 0), (100, 20), (60, 70), (0, 1), (0, 150), (0, 33))
SIZES = {
    "full": Sizes(prompts=PROMPTS, sampled=24, context=384, slots=16, gradients=True),
    "small": Sizes(
        prompts=PROMPTS,
        sampled=16,
        context=384,
        slots=8,
        engine_axes=("data",),
        trainer_axes=("data", "fsdp", "context", "expert"),
    ),
    "real": Sizes(
        prompts=REAL, sampled=20, context=256, slots=8, rows=(4,), engine_axes=(), trainer_axes=("fsdp",)
    ),  # along data every device has all weights
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", default="", help="real weights instead: a Hugging Face directory or hub id")
    parser.add_argument("--numerics", choices=("exact", "fast", "both"), default="both")
    parser.add_argument("--scale", choices=("full", "small"), default="full", help="small: fewer tokens, companies and layouts")


def eight_devices() -> None:
    """Of a CPU, before JAX looks at it; a number that is set stays."""
    flags = os.environ.get("XLA_FLAGS", "")
    if "xla_force_host_platform_device_count" not in flags:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count=8".strip()


def parity(arguments: argparse.Namespace) -> dict[str, Any]:
    """The matrix of each mode, and whether all that is promised is 0; what is not is named on standard error.

    Raises:
        ValueError: this is no CPU, or it has less than eight devices.
    """
    if jax.default_backend() != "cpu" or jax.device_count() < 8:
        raise ValueError(
            f"parity: needs 8 virtual devices of a CPU, not {jax.device_count()} of {jax.default_backend()}; set "
            f"JAX_PLATFORMS=cpu, and leave XLA_FLAGS alone"
        )
    if arguments.model:
        cases = real_case(arguments.model)
    else:
        cases = {name: tiny_case(model, SIZES[arguments.scale]) for name, model in MODELS.items()}
    result: dict[str, Any] = {"ok": True}
    for mode in ("exact", "fast") if arguments.numerics == "both" else (arguments.numerics,):
        rows = {name: row(f"{mode}, {name}", replace(case, exact=mode == "exact")) for name, case in cases.items()}
        result[mode] = {name: cells for name, (cells, _) in rows.items()}
        if mode == "exact":
            result["gradients"] = {name: distances for name, (_, distances) in rows.items() if distances}
            wrong = failures(result[mode])
            result["ok"] = not wrong
            for text in wrong:
                print(f"parity: not exact: {text}", file=sys.stderr)
    return result | {"not_promised": dict(NOT_PROMISED)}


def failures(matrix: dict[str, dict[str, Cell]]) -> list[str]:
    """The promised cells that are not 0."""
    return [
        f"{name}, {column}: {cell}"
        for name, cells in matrix.items()
        for column, cell in cells.items()
        if column not in NOT_PROMISED and not (cell["max_abs_gap"] == 0 and cell["parted"] == 0 and cell["values"] > 0)
    ]


def show(result: dict[str, Any]) -> None:
    """The matrices as text: a line for each company and layout, a column for each model."""
    for mode in ("exact", "fast"):
        if mode in result:
            columns = dict.fromkeys(column for cells in result[mode].values() for column in cells)
            print("".join([f"{mode:28}", *(f"{name:>18}" for name in result[mode])]))
            for column in columns:
                cells = [_text(cells.get(column)) for cells in result[mode].values()]
                print("".join([f"{column + '*' * (column in NOT_PROMISED):28}", *(f"{text:>18}" for text in cells)]))
            for column in sorted(columns.keys() & NOT_PROMISED.keys()):
                print(f"* {column}: not promised, as {NOT_PROMISED[column]}")
    for name, distances in result.get("gradients", {}).items():
        for column, far in distances.items():
            print(f"{name}, {column}: loss off by {far['loss']:.1e}, gradient by {far['gradient']:.1e} of its norm")
    print("ok" if result["ok"] else "not ok")


def _text(cell: Cell | None) -> str:
    if cell is None:
        return "-"
    return f"{cell['max_abs_gap']:.2g}" + (f", {cell['parted']} parted" if cell["parted"] else "")


def tiny_case(model: ModelConfig, sizes: Sizes) -> Case:
    weights = describe(model)
    mesh = make_mesh({"data": 1}, jax.devices()[:1])
    masters = init(weights, jax.random.key(0), jnp.float32, Rules().shardings(mesh, weights))
    count = max(shared for shared, _ in sizes.prompts) + sum(own for _, own in sizes.prompts)
    text = np.random.default_rng(0).integers(0, model.vocab_size, count)
    return Case(model=model, masters=jax.device_get(masters), text=text, sizes=sizes, exact=True)


def real_case(name: str) -> dict[str, Case]:
    """Prompts are pieces of this folder's notes."""
    directory = resolve(name)
    model, notes = read_config(directory), Path(__file__).with_name("README.md").read_text()
    text = np.asarray(Tokenizer.load(directory).encode(notes))
    return {directory.name: Case(model=model, masters=load_hf(directory, model), text=text, sizes=SIZES["real"], exact=True)}


def row(name: str, case: Case) -> tuple[dict[str, Cell], dict[str, dict[str, float]]]:
    """All cells of a model, from one set of completions; and how far gradients are from each other, where that is asked."""
    requests, sizes = case.requests(), case.sizes
    cells: dict[str, Cell] = {}

    def tell(column: str, cell: Cell) -> None:
        print(f"{name}, {column}: {cell}", file=sys.stderr, flush=True)
        cells[column] = cell

    engine = make_engine(case)
    known = alone(engine, requests)
    for column, company in COMPANIES.items():
        tell(column, compared(known, company(engine, requests)))
    tell("decode vs prefill", gap(against(known, prefilled(engine, known))))
    tell("drafts", gap(*drafted(engine, known)))
    tell("wrong drafts", gap(*drafted(engine, known, wrong=True)))
    del engine
    for axis in sizes.engine_axes:
        completions = batched(make_engine(case, axis), requests)
        tell(f"engine, {axis} {DEVICES[axis]}", compared(known, completions))
    samples, gradients = samples_of(case, known), {}
    for column, make in layouts(case).items():
        trainer = make()
        tell(column, gap(against(known, read(trainer, samples))))
        if sizes.gradients and case.exact and trainer.walk is None and column not in NOT_PROMISED:
            gradients[column] = gradient(trainer, samples)
    distances = {column: distance(each, gradients[PACKED]) for column, each in gradients.items() if column != PACKED}
    for column, each in distances.items():
        print(f"{name}, gradients, {column}: {each}", file=sys.stderr, flush=True)
    return cells, distances


def against(known: Sequence[Completion], found: Sequence[np.ndarray]) -> Iterable[tuple[np.ndarray, np.ndarray]]:
    return zip((completion.logprobs for completion in known), found, strict=True)


def compared(known: Sequence[Completion], others: Sequence[Completion]) -> Cell:
    """As far as both sampled the same."""
    pairs, parted = [], 0
    for a, b in zip(known, others, strict=True):
        assert len(a.ids) == len(b.ids)
        differ = a.ids != b.ids
        same = int(differ.argmax()) if differ.any() else len(a.ids)
        parted += int(differ.any())
        pairs.append((a.logprobs[:same], b.logprobs[:same]))
    return gap(pairs, parted)


def gap(pairs: Iterable[tuple[np.ndarray, np.ndarray]], parted: int = 0) -> Cell:
    a, b = (np.concatenate(each) for each in zip(*pairs, strict=True))
    assert a.shape == b.shape and a.dtype == b.dtype == np.float32
    return {"max_abs_gap": float(np.abs(a - b).max(initial=0)), "values": len(a), "parted": parted}
