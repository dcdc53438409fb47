"""Groups on their way from issue to training, and how many there may be. Plain Python: it knows no engine, clock or file.

    issue -> running -> finished -> taken by a step
      ^         |           |
      +- again -+-----------+--> dropped

A group is the episodes of one task. Its *lag* is counted from the oldest token in it to the version that trains on it, the time
in flight and in the queue included, and never exceeds the bound:

* No more groups are issued than the steps up to `lag` from now can train on (`capacity`; Fu et al., AReaL, arXiv 2505.24298).
* A step takes the oldest first, and waits while without those that still run it would leave more old groups than the steps
  after it can take in time (`take`). So none is thrown away for being slow, which would bias the batch to short episodes; with
  a bound of 0 that is waiting for all: synchronous training.
"""

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from rl.rollout import Rollout


@dataclass
class Group:
    """The episodes of one task, from its issue on."""

    number: int
    """of the task, in the order in which the run issues them first"""
    version: int
    """that was loaded when it was issued"""
    oldest: int
    """version of its oldest token; that of its issue while it runs, as no token can be older"""
    rollouts: Sequence[Rollout] = ()
    """when it is finished"""


class Buffer:
    """Which groups are running, finished, taken.

    Args:
        lag: the bound.
        batch: groups of a step.
        last: the version that the last step makes.
        cursor: number of the first task that was never issued.
        pending: numbers below it that were neither trained on nor dropped; they are issued first.
    """

    def __init__(self, *, lag: int, batch: int, last: int, cursor: int = 0, pending: Iterable[int] = ()):
        self.lag, self.batch, self.last, self.cursor = lag, batch, last, cursor
        self.running: dict[int, Group] = {}
        self.finished: dict[int, Group] = {}
        self.taken: dict[int, Group] = {}
        self._again = deque(sorted(pending))
        """tasks to issue before new ones"""

    @property
    def pending(self) -> list[int]:
        """Numbers below the cursor that nothing has been trained on."""
        return sorted([*self.running, *self.finished, *self.taken, *self._again])

    def capacity(self, version: int) -> int:
        """How many groups may be issued while `version` is loaded.

        That is (lag + steps done + 1) * batch - (accepted + running), where those accepted are batch groups of each step
        done, those taken and those finished: the steps that are done cancel, so a resumed run needs no count of them.
        """
        on_their_way = len(self.running) + len(self.finished) + len(self.taken)
        return min(self.lag + 1, self.last - version) * self.batch - on_their_way

    def issue(self, version: int) -> Group:
        """The next task's group, which is running now."""
        assert self.capacity(version) > 0, "ask for the capacity first"
        if self._again:
            number = self._again.popleft()
        else:
            number, self.cursor = self.cursor, self.cursor + 1
        group = self.running[number] = Group(number, version, oldest=version)
        return group

    def restore(self, group: Group) -> None:
        """A pending group that was finished before the run was broken off."""
        self._again.remove(group.number)
        self.finished[group.number] = group

    def finish(self, group: Group, rollouts: Sequence[Rollout], oldest: int) -> None:
        group.rollouts, group.oldest = rollouts, oldest
        self.finished[group.number] = self.running.pop(group.number)

    def retry(self, group: Group) -> None:
        """Gives up this attempt; the task is issued again."""
        del (self.running if group.number in self.running else self.finished)[group.number]
        self._again.append(group.number)

    def drop(self, group: Group) -> None:
        """Gives up the task; another takes its place."""
        del (self.running if group.number in self.running else self.finished)[group.number]

    def stale(self, version: int) -> list[Group]:
        """Finished groups that no step can take in time, oldest first: a resumed run may have another bound, or more old groups
        than it would ever have issued."""
        order = enumerate(self._oldest_first())
        return [group for place, group in order if version + place // self.batch - group.oldest > self.lag]

    def _oldest_first(self) -> list[Group]:
        return sorted(self.finished.values(), key=lambda group: (group.oldest, group.number))

    def take(self, version: int) -> list[Group] | None:
        """What the step after `version` trains on, in order of number; None while it has to wait.

        A group must be trained on by version `oldest + lag`. For each k up to `lag`, of those due by `version + k` no more than
        `k * batch` may be left after this step.
        """
        assert not self.taken and not self.stale(version), "one step at a time, and none of what is stale"
        if len(self.finished) < self.batch:
            return None
        oldest_first = self._oldest_first()
        taken, left = oldest_first[: self.batch], [*oldest_first[self.batch :], *self.running.values()]
        due = np.bincount(np.array([max(group.oldest + self.lag - version, 0) for group in left], int), minlength=self.lag + 1)
        if np.any(np.cumsum(due) > self.batch * np.arange(len(due))):
            return None
        self.taken = {group.number: self.finished.pop(group.number) for group in taken}
        return [self.taken[number] for number in sorted(self.taken)]

    def trained(self) -> None:
        """The step that took them is done."""
        self.taken = {}
