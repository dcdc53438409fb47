"""The loads of `launch.bench serve`: which tokens come, how many are sampled, and what an ideal prefix cache would find.
Plain Python, so that a peer's process makes the same ones without jax."""

import random
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Turn:
    """A request of a conversation: its prompt is all that came before, prompts and sampled tokens alike, then `added`."""

    added: tuple[int, ...]
    sampled: int
    """exactly so many tokens are sampled"""


@dataclass(frozen=True)
class Load:
    """Conversations that all begin at once; each one's next turn comes when its last one is complete."""

    conversations: tuple[tuple[Turn, ...], ...]
    at_once: int
    """most requests that run at the same time; others wait"""

    @property
    def longest(self) -> int:
        """Tokens of the longest conversation, prompts and sampled ones."""
        return max(map(num_tokens, self.conversations))

    @property
    def num_sampled(self) -> int:
        return sum(turn.sampled for turns in self.conversations for turn in turns)


def num_tokens(turns: Sequence[Turn]) -> int:
    return sum(len(turn.added) + turn.sampled for turn in turns)


LOADS: dict[str, dict[str, dict[str, int]]] = {
    "uniform": {
        "full": {"requests": 64, "prompt_min": 32, "prompt_max": 256, "sampled_min": 16, "sampled_max": 256, "at_once": 16},
        "small": {"requests": 8, "prompt_min": 4, "prompt_max": 32, "sampled_min": 2, "sampled_max": 16, "at_once": 4},
    },
    "grpo": {
        "full": {"prompts": 8, "samples": 8, "shared": 200, "own": 50, "sampled": 64, "at_once": 32},
        "small": {"prompts": 2, "samples": 4, "shared": 25, "own": 12, "sampled": 8, "at_once": 4},
    },
    "agent": {
        "full": {"trajectories": 8, "turns": 6, "observed": 60, "sampled": 40, "at_once": 8},
        "small": {"trajectories": 2, "turns": 3, "observed": 15, "sampled": 10, "at_once": 4},
    },
}
"""Sizes of each load. uniform: unrelated requests, lengths uniform between their bounds. grpo: `samples` of each of `prompts`
prompts, which begin with `shared` tokens that all have and end with `own` ones of each prompt. agent: each turn adds
`observed` tokens and samples some; the whole history is sent again each turn."""


def make_load(name: str, scale: str, vocab_size: int) -> Load:
    """The load of that name; the same one each time."""
    sizes, source = LOADS[name][scale], random.Random(name)

    def text(length: int) -> tuple[int, ...]:
        # the first ids of a vocabulary are control tokens and single bytes, which text hardly has
        return tuple(source.randrange(vocab_size // 100, vocab_size) for _ in range(length))

    def between(what: str) -> int:
        return source.randint(sizes[f"{what}_min"], sizes[f"{what}_max"])

    if name == "uniform":
        requests = [Turn(text(between("prompt")), between("sampled")) for _ in range(sizes["requests"])]
    elif name == "grpo":
        shared = text(sizes["shared"])
        prompts = [shared + text(sizes["own"]) for _ in range(sizes["prompts"])]
        requests = [Turn(prompt, sizes["sampled"]) for prompt in prompts for _ in range(sizes["samples"])]
    else:
        turns = [Turn(text(sizes["observed"]), sizes["sampled"]) for _ in range(sizes["trajectories"] * sizes["turns"])]
        return Load(tuple(zip(*[iter(turns)] * sizes["turns"], strict=True)), sizes["at_once"])
    return Load(tuple((request,) for request in requests), sizes["at_once"])


def make_rows(vocab_size: int, rows: int, length: int) -> list[list[int]]:
    """Random ids to train on; the same ones each time."""
    source = random.Random("rows")
    return [[source.randrange(vocab_size) for _ in range(length)] for _ in range(rows)]


@dataclass(frozen=True)
class Asked:
    """A request came."""

    prompt: tuple[int, ...]
    sampled: int
    """exactly so many tokens are to be sampled"""


@dataclass(frozen=True)
class Answered:
    """A request is complete."""

    ids: tuple[int, ...]
    """its prompt and what was sampled"""


Trace = Sequence[Asked | Answered]
"""what happened, in order"""


def questions(trace: Trace) -> list[Asked]:
    return [event for event in trace if isinstance(event, Asked)]


def ideal_hits(trace: Trace) -> list[int]:
    """Prompt tokens of each request, in order of arrival, that need not be computed given a prefix cache that shares single
    tokens and never forgets.

    A prompt is there for those who come after it, even while it is being computed. So is an answer once it is complete, but
    for its last token, which never goes through the model. The last token of a prompt is always computed: what follows it
    is what is wanted.
    """
    known: list[tuple[int, ...]] = []
    hits = []
    for event in trace:
        if isinstance(event, Answered):
            known.append(event.ids[:-1])
        else:
            hits.append(max((_shared(event.prompt[:-1], ids) for ids in known), default=0))
            known.append(event.prompt)
    return hits


def _shared(these: Sequence[int], those: Sequence[int]) -> int:
    """Tokens of the longest prefix that both have."""
    return next(
        (n for n, (this, that) in enumerate(zip(these, those, strict=False)) if this != that), min(len(these), len(those))
    )


def ideal_hit_rate(trace: Trace) -> float:
    """Share of all prompt tokens."""
    return sum(ideal_hits(trace)) / sum(len(asked.prompt) for asked in questions(trace))
