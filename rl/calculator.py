"""Sums with a calculator: an agent that asks for a tool, reads its result and answers.

What the model writes is, in this order: calls of the tool, where its renderer has a form for them; an answer, if it is a whole
number; else what is typed into the calculator, so that a model of bytes without any form can use it.
"""

import json
import random
import re
from collections.abc import Mapping
from types import MappingProxyType

from rl.agents import Agent, Ask, use
from rl.environments import Reward, Step, Task, answer_text, finish, make_task
from rl.messages import Message, Tool, ToolCall
from rl.scoring import component_weights, text_scores

CALCULATOR: Tool = {
    "name": "calculator",
    "description": "Works out sums, differences and products of whole numbers.",
    "parameters": {
        "type": "object",
        "properties": {"expression": {"type": "string", "description": "such as 3+4*5"}},
        "required": ["expression"],
    },
}
EXPRESSION = re.compile(r"-?\d{1,9}([+*-]\d{1,9}){0,9}")
TYPED = set("0123456789+-*")


def calculate(expression: str) -> str:
    """The value of whole numbers with + - * between them, in decimal.

    Raises:
        ValueError: it is something else.
    """
    text = expression.replace(" ", "")
    if EXPRESSION.fullmatch(text) is None:
        raise ValueError("use up to ten whole numbers and + - *")
    value = 0
    for sign, product in re.findall(r"([+-]?)([\d*]+)", text):
        factors = 1
        for factor in product.split("*"):
            factors *= int(factor)
        value += -factors if sign == "-" else factors
    return str(value)


def calls_of(message: Message, number: int) -> list[ToolCall]:
    """The calls that a message makes; none where it is an answer."""
    if calls := message.get("tool_calls"):
        return calls
    text = answer_text(message)
    if re.fullmatch(r"-?\d+", text):
        return []
    return [{"id": f"typed_{number}", "name": "calculator", "arguments": json.dumps({"expression": text})}]


class Calculator:
    """Sums of `terms` numbers from 0 to `max_value`. After `calls` calls what comes next is the answer.

    Components: `exact` (0 or 1), `right` and `digits` of the answer (see text_scores), `used` (whether the calculator gave the
    right value), and of what was typed, means over calls: `typed` (share of characters that a calculator has) and `copied`
    (share right in place, as the question has them). Their `weights` are 1, 0, 0, 0, 0, 0.

    Args:
        declare: tell the model of the tool, as its renderer does.
    """

    def __init__(
        self,
        max_value: int = 99,
        *,
        terms: int = 2,
        operators: str = "+",
        calls: int = 2,
        declare: bool = True,
        seed: int = 0,
        weights: Mapping[str, float] = MappingProxyType({}),
    ) -> None:
        for name, value, least in (("max_value", max_value, 0), ("terms", terms, 1), ("calls", calls, 1)):
            if value < least:
                raise ValueError(f"{name}: must be at least {least}, got {value}")
        if not operators or set(operators) - set("+-*"):
            raise ValueError(f"operators: use some of '+-*', got {operators!r}")
        self.name = "calculator"
        self.max_value, self.terms, self.operators, self.calls, self.seed = max_value, terms, operators, calls, seed
        self.tools = (CALCULATOR,) if declare else ()
        self.weights = component_weights(weights, exact=1.0, right=0.0, digits=0.0, used=0.0, typed=0.0, copied=0.0)

    def task(self, key: int) -> Task:
        rng = random.Random(f"{self.seed}/{key}")
        text = str(rng.randint(0, self.max_value))
        for _ in range(self.terms - 1):
            text += f"{rng.choice(self.operators)}{rng.randint(0, self.max_value)}"
        return make_task(self.name, key, [{"role": "user", "content": f"{text}="}], answer=calculate(text))

    def run(self, task: Task) -> Agent[Step]:
        assert task.answer is not None
        messages, said, used, typed = list(task.messages), task.messages[-1], False, list[str]()
        question = task.messages[-1]["content"].removesuffix("=")
        for number in range(self.calls + 1):
            (said,) = yield [Ask(messages=messages, tools=self.tools)]
            calls = calls_of(said, number)
            if not calls or number == self.calls:
                break
            results = [use(call, {"calculator": calculate}) for call in calls]
            messages += [said, *results]
            used = used or any(result["content"] == task.answer for result in results)
            typed.append(said["content"])
        scores = text_scores(answer_text(said), task.answer)
        scores |= {
            "used": float(used),
            "typed": sum(sum(c in TYPED for c in text) / max(len(text), 1) for text in typed) / max(len(typed), 1),
            "copied": sum(text_scores(text, question)["right"] for text in typed) / max(len(typed), 1),
        }
        return finish(*(Reward(name, score, self.weights[name]) for name, score in scores.items()))
