"""Other engines under the loads of `launch.bench serve`: `python -m launch.peers NAME --load LOAD --scale SCALE --model DIR`.

A process of its own, without jax, so that neither side's threads stand in the other's way. Prints one JSON object.

transformers: batched `generate` in bfloat16 on all threads, as a user would write it. Requests go in batches of the load's
`at_once`, in the order in which they come, padded on the left. A batch runs until its longest request is done; of each
request only its own tokens count. An agent load goes as one batch per turn, with the whole histories.
"""

import argparse
import importlib
import json
import os
import time
from collections.abc import Callable
from typing import Any

from launch.loads import LOADS, Load, Turn, make_load
from launch.quiet import Others

Generate = Callable[[list[list[int]], int], list[list[int]]]
"""prompts, and how many tokens to sample after each -> the sampled tokens"""


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


def transformers(load_name: str, scale: str, directory: str, rounds: int) -> dict[str, Any]:
    """Best of so many rounds, after a warm-up that also finds the faster one of its attentions."""
    torch, library = importlib.import_module("torch"), importlib.import_module("transformers")
    torch.set_num_threads(os.cpu_count() or 1)
    torch.manual_seed(0)
    library.utils.logging.disable_progress_bar()
    model = library.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16).eval()
    generate = make_generate(model, torch)
    load = make_load(load_name, scale, model.config.vocab_size)

    def seconds(load: Load) -> float:
        started = time.perf_counter()
        play(load, generate)
        return time.perf_counter() - started

    # the first batch, with all that is added to each conversation as one prompt, and a few tokens sampled
    added = [sum((turn.added for turn in turns), ()) for turns in load.conversations[: load.at_once]]
    trial = Load(tuple((Turn(ids, 8),) for ids in added), load.at_once)
    tried = {}
    for attention in ("sdpa", "eager"):
        model.set_attn_implementation(attention)
        tried[attention] = min(seconds(trial) for _ in range(2))
    fastest = min(tried, key=tried.__getitem__)
    model.set_attn_implementation(fastest)
    with Others() as others:
        wall_s = min(seconds(load) for _ in range(rounds))
    return {
        "tokens_per_s": load.num_sampled / wall_s,
        "wall_s": wall_s,
        "attention": fastest,
        "version": library.__version__,
        "other_cpus": others.cpus,
    }


PEERS: dict[str, Callable[[str, str, str, int], dict[str, Any]]] = {"transformers": transformers}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("peer", choices=PEERS)
    parser.add_argument("--load", choices=LOADS, required=True)
    parser.add_argument("--scale", choices=("full", "small"), required=True)
    parser.add_argument("--model", metavar="DIR", required=True)
    parser.add_argument("--rounds", type=int, default=2)
    arguments = parser.parse_args()
    result = PEERS[arguments.peer](arguments.load, arguments.scale, arguments.model, arguments.rounds)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
