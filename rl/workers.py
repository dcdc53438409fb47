"""Who runs environments."""

from collections.abc import Sequence
from concurrent.futures import Future

from rl.environments import Environment, Message, Step, Task


class Inline:
    """Runs steps in this process, as they come."""

    def __init__(self, environment: Environment):
        self.environment = environment

    def submit(self, task: Task, messages: Sequence[Message]) -> Future[Step]:
        answer: Future[Step] = Future()
        try:
            answer.set_result(self.environment.step(task, messages))
        except Exception as error:  # the caller's to record
            answer.set_exception(error)
        return answer
