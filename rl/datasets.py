"""Files of examples: JSON lines, rendered token for token as an engine would have been given and would have sampled them.

    sft   {"messages": [{"role": ..., "content": ...}, ...]}       all turns of the assistant are trained
          {"prompt": TEXT or messages, "completion": TEXT}         the completion is
    dpo   {"prompt": TEXT or messages, "chosen": TEXT or messages, "rejected": TEXT or messages}
                                                                   the turns of the assistant after the prompt are

A prompt's text is a user's turn, every other text an assistant's. What is trained of a turn is its content and its stop token,
as in sampling. Other fields are left alone.

A run reads an endless stream: epoch after epoch, each in an order of its own that derives from (seed, epoch). So the data
cursor, a number of examples, is all that a checkpoint needs of it.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from rl.batch import Sample
from rl.messages import Message
from rl.renderers import ROLES, Renderer

TooLong = Literal["refuse", "drop"]
SHOWN = 5
"""errors of one file that are told at once"""


@dataclass(frozen=True)
class Row:
    """One rendered conversation."""

    ids: np.ndarray
    """int32 [n]; the last one is trained"""
    weights: np.ndarray
    """float32 [n]: 1 on trained tokens"""


@dataclass(frozen=True)
class Dataset:
    """The examples of a file, in its order."""

    kind: str
    """`sft` or `dpo`"""
    examples: list[tuple[Row, ...]]
    """sft: one row; dpo: the chosen one and the rejected one"""
    dropped: int
    """too long ones that were left out"""
    sha256: str
    """of the file"""

    @property
    def longest(self) -> int:
        """Most tokens of a row."""
        return max(len(row.ids) for example in self.examples for row in example)

    @property
    def longest_trained(self) -> int:
        """Most trained tokens of a row."""
        return max(int(row.weights.sum()) for example in self.examples for row in example)

    def samples(self, seed: int, first: int, count: int) -> list[Sample]:
        """Examples number `first` to `first + count - 1` of the stream; every row is an episode, a dpo example is a pair."""
        rows = []
        for pair, (epoch, place) in enumerate(divmod(n, len(self.examples)) for n in range(first, first + count)):
            example = self.examples[self._order(seed, epoch)[place]]
            rows += [(pair if len(example) == 2 else -1, side, row) for side, row in enumerate(example)]
        return [
            Sample(
                ids=row.ids,
                weights=row.weights,
                logprobs=np.zeros(len(row.ids), np.float32),
                advantages=np.zeros(len(row.ids), np.float32),
                episode=episode,
                pair=pair,
                chosen=pair >= 0 and side == 0,
            )
            for episode, (pair, side, row) in enumerate(rows)
        ]

    def _order(self, seed: int, epoch: int) -> np.ndarray:
        return np.random.default_rng((seed, epoch)).permutation(len(self.examples))


def load(path: Path, kind: str, renderer: Renderer, limit: int, too_long: TooLong) -> Dataset:
    """Reads and renders a whole file.

    Args:
        kind: `sft` or `dpo`.
        limit: most tokens of a row.
        too_long: what becomes of longer ones.

    Raises:
        ValueError: the file is not there, has no example, or lines that are none; each with its number, the field and the fix.
    """
    if not path.is_file():
        raise ValueError(f"data.path: there is no file {path}; give a file of JSON lines")
    data = path.read_bytes()
    examples, errors, dropped = [], [], 0
    for number, line in enumerate(data.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            example = _rows(_parsed(line), kind, renderer)
            longest = max(len(row.ids) for row in example)
            if longest > limit and too_long == "refuse":
                raise ValueError(
                    f"{longest} tokens, and a row has {limit}; raise trainer.tokens_per_row, shorten it, or set "
                    f"data.too_long='drop'"
                )
        except ValueError as error:
            errors.append(f"{path}:{number}: {error}")
            continue
        if longest > limit:
            dropped += 1
        else:
            examples.append(example)
    if errors:
        more = f"; and {len(errors) - SHOWN} more lines" if len(errors) > SHOWN else ""
        raise ValueError("; ".join(errors[:SHOWN]) + more)
    if not examples:
        raise ValueError(f"{path}: has no example ({dropped} were too long); see rl/datasets.py for what a line holds")
    return Dataset(kind, examples, dropped, hashlib.sha256(data).hexdigest())


def _parsed(line: bytes) -> dict[str, Any]:
    try:
        value = json.loads(line)
    except ValueError as error:
        raise ValueError(f"no JSON ({error}); write one object a line") from error
    if not isinstance(value, dict):
        raise ValueError(f"expected an object, got {_short(value)}; write one object a line")
    return value


def _rows(value: Mapping[str, Any], kind: str, renderer: Renderer) -> tuple[Row, ...]:
    if kind == "sft" and "messages" in value:
        if "prompt" in value or "completion" in value:
            raise ValueError("messages: beside prompt or completion; keep one of the two forms")
        return (_render(_messages(value, "messages"), 0, "messages", renderer),)
    prompt = _turns(value, "prompt", "user", kind)
    sides = ("completion",) if kind == "sft" else ("chosen", "rejected")
    answers = [_turns(value, side, "assistant", kind) for side in sides]
    if kind == "dpo" and answers[0] == answers[1]:
        raise ValueError("rejected: is the same as chosen, which teaches nothing; remove the line")
    return tuple(_render([*prompt, *answer], len(prompt), side, renderer) for side, answer in zip(sides, answers, strict=True))


def _turns(value: Mapping[str, Any], field: str, role: str, kind: str) -> list[Message]:
    """A field that is a text of this role, or messages."""
    if field not in value:
        forms = "messages, or prompt and completion" if kind == "sft" else "prompt, chosen and rejected"
        raise ValueError(f"{field}: missing; a line for {kind!r} has {forms}")
    if isinstance(value[field], str):
        return [{"role": role, "content": value[field]}]
    return _messages(value, field)


def _messages(value: Mapping[str, Any], field: str) -> list[Message]:
    given = value[field]
    if not isinstance(given, list) or not given:
        raise ValueError(f"{field}: expected messages (a list of objects with role and content), got {_short(given)}")
    for number, message in enumerate(given):
        where = f"{field}[{number}]"
        if not isinstance(message, dict):
            raise ValueError(f"{where}: expected an object with role and content, got {_short(message)}")
        if message.get("role") not in ROLES:
            raise ValueError(f"{where}.role: {_short(message.get('role'))} is unknown; use one of {ROLES}")
        for name in ("content", "thinking"):
            if not isinstance(message.get(name, "" if name == "thinking" else None), str):
                raise ValueError(f"{where}.{name}: expected a text, got {_short(message.get(name))}")
        if unknown := sorted(set(message) - {"role", "content", "thinking"}):
            raise ValueError(f"{where}.{unknown[0]}: no renderer has a form for it; write it into content")
    return given


def _render(messages: Sequence[Message], first: int, field: str, renderer: Renderer) -> Row:
    """The conversation up to its last trained token; turns of the assistant from number `first` on are trained."""
    ids = renderer.render(messages, add_generation_prompt=False)
    weights = np.zeros(len(ids), np.float32)
    for number in range(first, len(messages)):
        if messages[number]["role"] != "assistant":
            continue
        if number == 0:
            raise ValueError(f"{field}: begins with the assistant, who has nothing to answer; put a user's turn before it")
        given = renderer.render(messages[:number])
        said = renderer.render(messages[: number + 1], add_generation_prompt=False)
        if said[: len(given)] != given or ids[: len(said)] != said:
            raise ValueError(
                f"{field}: {renderer.name!r} renders earlier turns anew; give each turn its own prompt and completion"
            )
        stop = max(place for place, token in enumerate(said) if token == renderer.stop_ids[0])
        weights[len(given) : stop + 1] = 1
    if not weights.any():
        raise ValueError(f"{field}: has no turn of the assistant, so there is nothing to learn; add one")
    n = int(np.nonzero(weights)[0][-1]) + 1
    return Row(np.asarray(ids[:n], np.int32), weights[:n])


def _short(value: Any) -> str:
    text = json.dumps(value)
    return text if len(text) <= 40 else f"{text[:37]}..."
