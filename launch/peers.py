"""Others at the work of `launch.bench serve` and `launch.bench train`: `python -m launch.peers WORK NAME --model DIR ...`.

A process of its own, without jax, so that neither side's threads stand in the other's way. Prints one JSON object.

transformers serves: batched `generate` in bfloat16 on all threads, as a user would write it. Requests go in batches of the
load's `at_once`, in the order in which they come, padded on the left. A batch runs until its longest request is done; of each
request only its own tokens count. An agent load goes as one batch per turn, with the whole histories.

transformers trains: the model's own loss in training mode, torch's fused AdamW, with what is fastest of weights in bfloat16
or float32 ones under autocast, and of all rows at once or in micro-batches.
"""

import argparse
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from launch.loads import LOADS, Load, Turn, make_load, make_rows
from launch.quiet import Others, peak_bytes

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""prompts, and how many tokens to sample after each -> the sampled tokens"""
LEARNING_RATE = 1e-5
"""of both sides' AdamW"""
PRECISIONS = ("autocast", "bfloat16")
"""in which torch trains: float32 weights under autocast, or bfloat16 ones"""


def play(load: Load, generate: Generate) -> None:
    """Plays the load in batches, turn by turn."""
    for first in range(0, len(load.conversations), load.at_once):
        batch = load.conversations[first : first + load.at_once]
        histories: list[list[int]] = [[] for _ in batch]
        for turns in zip(*batch, strict=True):
            for history, turn in zip(histories, turns, strict=True):
                history += turn.added
            sampled = generate(histories, max(turn.sampled for turn in turns))
            for history, turn, ids in zip(histories, turns, sampled, strict=True):
                history += ids[: turn.sampled]


def make_generate(model: Any, torch: Any) -> Generate:
    pad = 0  # masked, so any id will do

    def generate(prompts: list[list[int]], num_sampled: int) -> list[list[int]]:
        width = max(map(len, prompts))
        ids = torch.tensor([[pad] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.inference_mode():
            out = model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                temperature=1.0,
                top_k=0,
                top_p=1.0,
                max_new_tokens=num_sampled,
                min_new_tokens=num_sampled,
                pad_token_id=pad,
                use_cache=True,
            )
        assert out.shape[1] == width + num_sampled, "generate ended early"
        return out[:, width:].tolist()

    return generate


def load_transformers() -> tuple[Any, Any]:
    """torch on all threads, and transformers."""
    torch, library = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    library.utils.logging.disable_progress_bar()
    return torch, library


def serve_transformers(directory: str, load: str, scale: str) -> dict[str, Any]:
    """Best of two rounds, after a warm-up that also finds the faster one of its attentions."""
    torch, library = load_transformers()
    model = library.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    generate = make_generate(model, torch)
    work = make_load(load, scale, model.config.vocab_size)

    def seconds(load: Load) -> float:
        started = time.perf_counter()
        play(load, generate)
        return time.perf_counter() - started

    # the first batch, with all that is added to each conversation as one prompt, and a few tokens sampled
    added = [sum((turn.added for turn in turns), ()) for turns in work.conversations[: work.at_once]]
    trial = Load(tuple((Turn(ids, 8),) for ids in added), work.at_once)
    tried = {}
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        tried[attention] = min(seconds(trial) for _ in range(2))
    fastest = min(tried, key=tried.__getitem__)
    model.set_attn_implementation(fastest)
    with Others() as others:
        wall_s = min(seconds(work) for _ in range(2))
    return {
        "tokens_per_s": work.num_sampled / wall_s,
        "wall_s": wall_s,
        "attention": fastest,
        "version": library.__version__,
        "other_cpus": others.cpus,
    }


def make_step(directory: str, precision: str, rows: list[list[int]]) -> Callable[[int, int], tuple[float, float]]:
    """`step(num_rows, rows_at_once)` takes one optimizer step on the first rows: its seconds, and its loss."""
    torch, library = load_transformers()
    autocast = precision == "autocast"
    dtype = torch.float32 if autocast else torch.bfloat16
    model = library.AutoModelForCausalLM.from_pretrained(directory, dtype=dtype).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, fused=True)
    ids = torch.tensor(rows)

    def step(num_rows: int, rows_at_once: int) -> tuple[float, float]:
        started = time.perf_counter()
        total = 0.0
        for some in ids[:num_rows].split(rows_at_once):
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = model(input_ids=some, labels=some, use_cache=False).loss * (len(some) / num_rows)
            loss.backward()
            total += float(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
        return time.perf_counter() - started, total

    return step


def train_transformers(directory: str, rows: int, length: int, rows_at_once: int) -> dict[str, Any]:
    """Best of two steps in the way that is fastest; the precision is tried on one micro-batch, how to split the rows on all."""
    _, library = load_transformers()
    ids = make_rows(library.AutoConfig.from_pretrained(directory).vocab_size, rows, length)

    def twice(step: Callable[[int, int], tuple[float, float]], num_rows: int, at_once: int) -> tuple[float, float]:
        """Seconds of the faster step, loss of the first."""
        (first_s, loss), (second_s, _) = step(num_rows, at_once), step(num_rows, at_once)
        return min(first_s, second_s), loss

    tried = {precision: twice(make_step(directory, precision, ids), rows_at_once, rows_at_once) for precision in PRECISIONS}
    precision = min(tried, key=tried.__getitem__)
    step = make_step(directory, precision, ids)
    ways, losses = {}, []
    for at_once in (rows_at_once, rows):  # the most memory comes last
        with Others() as others:
            wall_s, loss = twice(step, rows, at_once)
        ways[at_once] = {"wall_s": wall_s, "other_cpus": others.cpus, "peak_bytes": peak_bytes()}
        losses.append(loss)
    at_once = min(ways, key=lambda at_once: ways[at_once]["wall_s"])
    return {
        "tokens_per_s": rows * length / ways[at_once]["wall_s"],
        **ways[at_once],
        "rows_at_once": at_once,
        "precision": precision,
        "all_at_once_tokens_per_s": rows * length / ways[rows]["wall_s"],
        "loss": losses[0],
        "version": library.__version__,
    }


PEERS: dict[str, dict[str, Callable[..., dict[str, Any]]]] = {
    "serve": {"transformers": serve_transformers},
    "train": {"transformers": train_transformers},
}
"""by work, then by name"""


def check_installed(peer: str) -> None:
    """
    Raises:
        ValueError: a package that the peer needs is not there.
    """
    for package in ("torch", peer):
        if importlib.util.find_spec(package) is None:
            raise ValueError(f"--against: {package} is not installed; install it, or leave --against out")


def run_peer(work: str, peer: str, directory: Path, **options: int | str) -> dict[str, Any]:
    """The peer's own process, alone on the machine."""
    command = [sys.executable, "-m", "launch.peers", work, peer, "--model", str(directory.absolute())]
    command += [f"--{name.replace('_', '-')}={value}" for name, value in options.items()]
    done = subprocess.run(command, cwd=Path(__file__).parents[1], stdout=subprocess.PIPE, text=True)
    if done.returncode:
        raise RuntimeError(f"{' '.join(command)} failed; standard error has its reason")
    return json.loads(done.stdout.splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    works = parser.add_subparsers(dest="work", required=True)
    serve, train = works.add_parser("serve"), works.add_parser("train")
    for name, command in works.choices.items():
        command.add_argument("peer", choices=PEERS[name])
        command.add_argument("--model", dest="directory", metavar="DIR", required=True)
    serve.add_argument("--load", choices=LOADS, required=True)
    serve.add_argument("--scale", choices=("full", "small"), required=True)
    for name in ("--rows", "--length", "--rows-at-once"):
        train.add_argument(name, type=int, required=True)
    options = vars(parser.parse_args())
    print(json.dumps(PEERS[options.pop("work")][options.pop("peer")](**options)))


if __name__ == "__main__":
    main()
