"""A harness that cuts its history back: when it gets long the model writes a summary, which then stands for what came before.

    head, question, answer, question, answer, request -> summary
    head, summary, question -> answer ...

The parts are branches of one call that share their head. What the model writes as a summary is trained on as all its turns are.
"""

import random
from collections.abc import Mapping, Sequence
from types import MappingProxyType

from rl.agents import Agent, Ask, ContextOverflow
from rl.environments import Reward, Step, Task, answer_text, finish, make_task
from rl.messages import Message, Tool
from rl.scoring import component_weights, text_scores


class Compacting:
    """A conversation that is cut back after `turns` answers, or where it would not fit.

    Args:
        head: what always stays: system message and task.
        turns: 0: only where it would not fit.
        request: asks for the summary.
        opening: what stands before a summary when it is given back.
    """

    def __init__(
        self,
        head: Sequence[Message],
        *,
        turns: int = 0,
        request: str = "Sum up what we have so far; it will be all that you know of it.",
        opening: str = "What came before: ",
        tools: Sequence[Tool] = (),
    ):
        self.head, self.turns, self.request, self.opening, self.tools = tuple(head), turns, request, opening, tools
        self.since: list[Message] = []
        """what stands after the head"""
        self.answers = 0
        self.summaries: list[str] = []

    def ask(self, *new: Message) -> Agent[Message]:
        """Goes on with these messages, and returns the answer.

        Raises:
            ContextOverflow: head, summary and these alone do not fit.
        """
        if self.turns and self.answers >= self.turns:
            yield from self.compact()
        try:
            answer = yield from self._asked(new)
        except ContextOverflow:
            if not self.answers:
                raise
            yield from self.compact()
            answer = yield from self._asked(new)
        self.since += [*new, answer]
        self.answers += 1
        return answer

    def compact(self) -> Agent[None]:
        """Puts a summary in the place of what stands after the head. Where not even the request for it fits, the newest answers
        are left out of it, one after the other."""
        kept = list(self.since)
        while True:
            try:
                (said,) = yield [self._ask([*kept, {"role": "user", "content": self.request}])]
                break
            except ContextOverflow:
                answers = [place for place, message in enumerate(kept) if message["role"] == "assistant"]
                if len(answers) < 2:
                    raise
                del kept[answers[-2] + 1 :]
        self.summaries.append(said["content"])
        summary: Message = {"role": "user", "content": self.opening + said["content"]}
        self.since, self.answers = [summary], 0

    def _asked(self, new: Sequence[Message]) -> Agent[Message]:
        (answer,) = yield [self._ask([*self.since, *new])]
        return answer

    def _ask(self, messages: Sequence[Message]) -> Ask:
        return Ask(messages=[*self.head, *messages], tools=self.tools)


class Tally:
    """Numbers from 0 to `max_value`, one a turn, to be added up; after `turns` of them the model has only its summary.

    Components: `exact` of the last total; `right` and `digits` (see text_scores), means over the totals; `summary`, the mean of
    what is right of summaries. Their `weights` are 1, 0, 0, 0.
    """

    def __init__(
        self,
        max_value: int = 9,
        *,
        numbers: int = 4,
        turns: int = 2,
        request: str = "total?",
        opening: str = "",
        seed: int = 0,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        for name, value, least in (("max_value", max_value, 0), ("numbers", numbers, 1), ("turns", turns, 0)):
            if value < least:
                raise ValueError(f"{name}: must be at least {least}, got {value}")
        self.name = "tally"
        self.max_value, self.numbers, self.turns, self.seed = max_value, numbers, turns, seed
        self.request, self.opening = request, opening
        self.weights = component_weights(weights, exact=1.0, right=0.0, digits=0.0, summary=0.0)

    def task(self, key: int) -> Task:
        rng = random.Random(f"{self.seed}/{key}")
        numbers = [rng.randint(0, self.max_value) for _ in range(self.numbers)]
        messages: list[Message] = [{"role": "system", "content": "add"}, {"role": "user", "content": f"+{numbers[0]}"}]
        return make_task(self.name, key, messages, answer=str(sum(numbers)), data={"numbers": numbers})

    def run(self, task: Task) -> Agent[Step]:
        harness = Compacting(task.messages[:1], turns=self.turns, request=self.request, opening=self.opening)
        total, scores, summaries = 0, [], []
        for number in task.data["numbers"]:
            before = len(harness.summaries)
            answer = yield from harness.ask({"role": "user", "content": f"+{number}"})
            summaries += [text_scores(text.strip(), str(total))["right"] for text in harness.summaries[before:]]
            total += number
            scores.append(text_scores(answer_text(answer), str(total)))
        means = {name: sum(score[name] for score in scores) / len(scores) for name in ("right", "digits")}
        summary = sum(summaries) / len(summaries) if summaries else 0.0
        components = {"exact": scores[-1]["exact"], **means, "summary": summary}
        return finish(*(Reward(name, score, self.weights[name]) for name, score in components.items()))
