"""Recursive agents: a sum is split where the model says, agents that it starts solve the parts beside each other, and it puts
their answers together."""

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rl.agents import MAIN, Agent, Ask, parallel
from rl.environments import Reward, Step, Task, answer_text, make_task
from rl.messages import Message
from rl.scoring import component_weights, text_scores

LONGEST = 12
"""characters of an agent's answer that its parent reads"""


class Halves:
    """Sums of `terms` numbers from 0 to `max_value`, split up to `depth` times.

    An agent with more than two numbers is asked how many go to its first agent (a digit; half of them where it says something
    else), then for the sum of what its agents answered. The others are asked for their sum. They are called main, main.0,
    main.0.1, ...

    Components: `exact`, `right`, `digits` of the whole sum (see text_scores), and `parts`, the mean of what is right of the
    other agents' sums; `weights` are 1, 0, 0, 0. A call's own rewards are the first three, of its own sum.
    """

    def __init__(
        self,
        max_value: int = 9,
        *,
        terms: int = 4,
        depth: int = 1,
        seed: int = 0,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        for name, value, least in (("max_value", max_value, 0), ("terms", terms, 1), ("depth", depth, 0)):
            if value < least:
                raise ValueError(f"{name}: must be at least {least}, got {value}")
        self.name = "halves"
        self.max_value, self.terms, self.depth, self.seed = max_value, terms, depth, seed
        self.weights = component_weights(weights, exact=1.0, right=0.0, digits=0.0, parts=0.0)

    def task(self, key: int) -> Task:
        rng = random.Random(f"{self.seed}/{key}")
        numbers = [rng.randint(0, self.max_value) for _ in range(self.terms)]
        return make_task(self.name, key, [_question(numbers)], answer=str(sum(numbers)), data={"numbers": numbers})

    def run(self, task: Task) -> Agent[Step]:
        scores: dict[str, dict[str, float]] = {}
        yield from self._solve(task.data["numbers"], MAIN, MAIN, self.depth, scores)
        whole = scores[MAIN]
        parts = [score["right"] for call, score in scores.items() if call != MAIN]
        components = {**whole, "parts": sum(parts) / max(len(parts), 1)}
        return Step(
            rewards=tuple(Reward(name, score, self.weights[name]) for name, score in components.items()),
            call_rewards={
                call: [Reward(name, score, self.weights[name]) for name, score in own.items()] for call, own in scores.items()
            },
        )

    def _solve(
        self, numbers: Sequence[int], call: str, parent: str, depth: int, scores: dict[str, dict[str, float]]
    ) -> Agent[str]:
        """Returns the answer as it was written; puts its scores with the others'."""
        messages: list[Message] = [_question(numbers)]
        if depth and len(numbers) > 2:
            (plan,) = yield [Ask(messages=messages, call=call, parent=parent)]
            at = _split(answer_text(plan), len(numbers))
            answers = yield from parallel(
                *(
                    self._solve(part, f"{call}.{place}", call, depth - 1, scores)
                    for place, part in enumerate((numbers[:at], numbers[at:]))
                )
            )
            messages += [plan, {"role": "tool", "content": "+".join(answer[:LONGEST] for answer in answers) + "="}]
        (said,) = yield [Ask(messages=messages, call=call, parent=parent)]
        scores[call] = text_scores(answer_text(said), str(sum(numbers)))
        return answer_text(said)


def _question(numbers: Sequence[int]) -> Message:
    return {"role": "user", "content": "+".join(map(str, numbers)) + "="}


def _split(plan: str, count: int) -> int:
    """How many of `count` numbers the first agent gets."""
    return int(plan) if plan in list(map(str, range(1, count))) else count // 2
