"""`launch.bench parity`: is a token's log-prob the same bits whatever it is computed with?

Tiny random models of three kinds, or one with real weights. Requests of 1 to 280 tokens, some with a common start, are sampled
one by one in a cold engine, a decode step a call; then again in each company, and read by the trainer in each layout.

    max_abs_gap   largest difference of log-probs from those, over sampled tokens up to the first that is another
    values        how many were compared
    parted        sequences that went on with another token

    drafts              2 to 8 new positions of every sequence in one step, on a warm cache, as a step that verifies drafts would;
                        wrong: up to the first wrong token of each
    decode vs prefill   prompt and sampled tokens as one prompt; models with experts are told how they were routed
    retracted           every few steps all pages are given up, and equal weights loaded as a new version
    trainer             reads with the engine's routing (R3); packed: one row a micro-batch, tries share their starts

`exact`: each cell must be 0, those of NOT_PROMISED left out, or the command ends with exit code 1 and names it. `fast`: its
sizes, without a promise. `gradients` (full scale, exact): loss and gradient, in other micro-batches and meshes, next to those
of micro-batches of one row; sums over rows have an order there, so they are close, not equal.
"""

import argparse
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from inference.types import Completion
from launch.parity_engine import (
    COMPANIES,
    Case,
    Sizes,
    alone,
    batched,
    drafted,
    make_engine,
    one_device,
    prefilled,
)
from launch.parity_trainer import distance, gradient, layouts, on_eight, read, samples_of, tensor_2
from models.config import ModelConfig, MoEConfig
from models.hf import load_hf, resolve
from models.hf_config import read_config
from models.tokenizer import Tokenizer
from models.transformer import describe
from sharding.reshard import init

Cell = dict[str, Any]
NOT_PROMISED = ("engine, tensor 2", "trainer, tensor 2")
"""partial sums of one product cross devices, in another order than one device adds them up"""
V = 202
SHAPE: dict[str, Any] = {"vocab_size": V, "model_dim": 64, "ffn_dim": 96, "num_layers": 2, "num_heads": 4, "max_positions": 512}
MODELS = {
    "dense": ModelConfig(family="llama", num_kv_heads=2, head_dim=16, tied_head=True, **SHAPE),
    "GQA + qk-norm": ModelConfig(family="qwen3", num_kv_heads=1, head_dim=64, **SHAPE),
    "MoE with replay": ModelConfig(
        family="qwen3_moe",
        num_kv_heads=2,
        head_dim=32,
        moe=MoEConfig(num_experts=8, experts_per_token=3, ffn_dim=48),
        **SHAPE,
    ),
}
PROMPTS = ((150, 0), (150, 0), (150, 40), (70, 60), (0, 33), (0, 1), (0, 65), (0, 130), (0, 280), (0, 200))
SIZES = {
    "full": Sizes(prompts=PROMPTS, sampled=24, context=384, slots=16, gradients=True),
    "small": Sizes(
        prompts=PROMPTS, sampled=12, context=384, slots=8, micro_batches=(1, 4), eight=("data", "fsdp"), tensor=False
    ),
    "real": Sizes(
        prompts=((100, 0), (100, 20), (60, 70), (0, 1), (0, 150), (0, 33)), sampled=8, context=256, slots=8,
        micro_batches=(1, 4), eight=("fsdp",), tensor=False,
    ),
}  # fmt: skip


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", metavar="DIR", default="", help="real weights instead: a Hugging Face directory or hub id")
    parser.add_argument("--numerics", choices=("exact", "fast", "both"), default="both")
    parser.add_argument("--scale", choices=("full", "small"), default="full", help="small: fewer tokens and layouts")


def parity(arguments: argparse.Namespace) -> dict[str, Any]:
    """The matrix of each mode, and whether all that is promised is 0; what is not is named on standard error."""
    if len(jax.devices()) < 8:
        raise ValueError(f"XLA_FLAGS: the matrix needs 8 devices, and there are {len(jax.devices())}; leave it unset on a CPU")
    if arguments.model:
        case = real_case(arguments.model)
        cases = {str(case.model.family): case}
    else:
        cases = {name: tiny_case(model, SIZES[arguments.scale]) for name, model in MODELS.items()}
    matrix = {name: row(name, case) for name, case in cases.items()}
    wrong = failures(matrix)
    for name in wrong:
        print(f"parity: not 0: {name}", file=sys.stderr)
    return {"exact": matrix, "ok": not wrong}


def failures(matrix: dict[str, dict[str, Cell]]) -> list[str]:
    """The promised cells that are not 0."""
    return [
        f"{name}, {column}: max_abs_gap {cell['max_abs_gap']:g}, {cell['parted']} parted of {cell['values']} values"
        for name, cells in matrix.items()
        for column, cell in cells.items()
        if column not in NOT_PROMISED and not (cell["max_abs_gap"] == 0 and cell["parted"] == 0 and cell["values"] > 0)
    ]


def tiny_case(model: ModelConfig, sizes: Sizes) -> Case:
    weights = describe(model)
    mesh, rules = one_device()
    masters = init(weights, jax.random.key(0), jnp.float32, rules.shardings(mesh, weights))
    count = max(shared for shared, _ in sizes.prompts) + sum(own for _, own in sizes.prompts)
    text = np.random.default_rng(0).integers(0, model.vocab_size, count)
    return Case(model=model, masters={name: np.asarray(x) for name, x in masters.items()}, text=text, sizes=sizes)


def real_case(name: str) -> Case:
    """Prompts are pieces of this repository's notes."""
    directory = resolve(name)
    model = read_config(directory)
    text = np.asarray(Tokenizer.load(directory).encode(__doc__ or ""), np.int32)
    return Case(model=model, masters=load_hf(directory, model), text=text, sizes=SIZES["real"])


def row(name: str, case: Case) -> dict[str, Cell]:
    """All cells of a model, from one set of completions."""
    requests, sizes = case.requests(), case.sizes
    engine = make_engine(case, *one_device())
    known = alone(engine, requests)
    cells: dict[str, Cell] = {}

    def tell(column: str, cell: Cell) -> None:
        print(f"{name}, {column}: {cell}", file=sys.stderr, flush=True)
        cells[column] = cell

    for column, company in COMPANIES.items():
        tell(column, compared(known, company(engine, requests)))
    tell("decode vs prefill", gap(zip((c.logprobs for c in known), prefilled(engine, known), strict=True)))
    tell("drafts", gap(drafted(engine, known, wrong=False)))
    tell("wrong drafts", gap(drafted(engine, known, wrong=True)))
    del engine
    if "engine data" in sizes.eight:
        tell("engine, data 8", compared(known, batched(make_engine(case, *on_eight(case, "data")), requests)))
    if sizes.tensor:
        tell("engine, tensor 2", compared(known, batched(make_engine(case, *tensor_2(case)), requests)))
    samples = samples_of(case, known)
    for column, make in layouts(case).items():
        tell(column, gap(zip((c.logprobs for c in known), read(make(), samples), strict=True)))
    return cells


def compared(known: Sequence[Completion], others: Sequence[Completion]) -> Cell:
    """As far as both sampled the same."""
    pairs, parted = [], 0
    for a, b in zip(known, others, strict=True):
        n = min(len(a.ids), len(b.ids))
        differ = a.ids[:n] != b.ids[:n]
        parted += int(differ.any() or len(a.ids) != len(b.ids))
        same = int(differ.argmax()) if differ.any() else n
        pairs.append((a.logprobs[:same], b.logprobs[:same]))
    return gap(pairs, parted)


def gap(pairs: Iterable[tuple[np.ndarray, np.ndarray]], parted: int = 0) -> Cell:
    a, b = (np.concatenate(each) for each in zip(*pairs, strict=True))
    assert a.shape == b.shape and a.dtype == b.dtype == np.float32
    return {"max_abs_gap": float(np.abs(a - b).max(initial=0)), "values": len(a), "parted": parted}
