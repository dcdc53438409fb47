"""The ledger of a run's tasks, one SQLite file: issued -> finished -> trained at a step, or dropped because.

    tasks    one row a group, by its number in the order of issue: how it stands now
    events   one row for everything that ever happened to one, earlier attempts and undone steps too; only ever added to
    ledger   a view of tasks with the state as a word and times as text

    state      what it means                                                       goes on to
    waiting    to be issued: given up, rewound, or taken over from another run     issued
    issued     its episodes run                                                    finished, waiting, dropped
    finished   `file` has its rollouts                                             trained, waiting, dropped
    trained    at trained_step, `lag` versions after its oldest token
    dropped    at dropped_step, because of what `dropped` says

Each call is one transaction, so a kill leaves it whole or not there. `train` reaches the disk, with all before it, before it
returns: a checkpoint never outlives the rows of its steps. Any tool that reads SQLite may look on while the run goes on.
"""

import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from rl.environments import Task
from rl.journal_file import connect

STATES = ("waiting", "issued", "finished", "trained", "dropped")
OPEN = "trained_step IS NULL AND dropped IS NULL"
NOT_FINISHED = "finished = NULL, file = NULL, oldest = NULL, newest = NULL"
NOT_ISSUED = f"version = NULL, issued = NULL, {NOT_FINISHED}"


@dataclass(frozen=True, slots=True)
class Row:
    """One task, as the table has it. Times are Unix seconds."""

    number: int
    env: str
    key: int
    content_hash: str
    attempt: int
    version: int | None
    """the weights that were loaded when it was issued"""
    issued: float | None
    finished: float | None
    file: str | None
    """its rollouts, from the run's folder on"""
    oldest: int | None
    """lowest version of its sampled tokens"""
    newest: int | None
    trained_step: int | None
    lag: int | None
    dropped: str | None
    dropped_step: int | None


COLUMNS = ", ".join(field.name for field in fields(Row))


class Journal:
    """One run's ledger, used from one thread of the process that holds the run's folder.

    Args:
        read_only: look at a copy of the file; nothing is written beside it.

    Raises:
        ValueError: the file is damaged, or no journal of this version of twinax.
    """

    def __init__(self, path: Path, *, read_only: bool = False):
        self.path = path
        self._db = connect(path, read_only)

    def close(self) -> None:
        self._db.close()

    # What happens to a task.

    def issue(self, number: int, task: Task, attempt: int, version: int) -> None:
        """Its episodes begin. A number is issued again, with a higher attempt, after a kill or `retry`."""
        with self._transaction():
            named = (task.env, task.key, task.content_hash)
            found = self._db.execute(f"SELECT {COLUMNS} FROM tasks WHERE number = ?", (number,)).fetchone()
            if found is None:
                assert number == self.cursor() and attempt > 0, f"group {number} was issued before {self.cursor()}"
            else:
                row = Row(*found)
                assert row.attempt < attempt, f"group {number}: attempt {attempt} does not follow {row.attempt}"
                assert row.finished is row.trained_step is row.dropped is None, f"{row} is not to be issued again"
                assert row.attempt == 0 or (row.env, row.key, row.content_hash) == named, f"{row} was another task, not {named}"
            self._db.execute(
                "INSERT OR REPLACE INTO tasks (number, env, key, content_hash, attempt, version, issued) "
                "VALUES (?, ?, ?, ?, ?, ?, ?)",
                (number, *named, attempt, version, time.time()),
            )
            self._note("issued", "number = ?", (number,))

    def finish(self, number: int, file: str, oldest: int, newest: int) -> None:
        """All its episodes ended, and `file` has them."""
        with self._transaction():
            self._set(
                "finished = ?, file = ?, oldest = ?, newest = ?",
                (time.time(), file, oldest, newest),
                number,
                "issued IS NOT NULL AND finished IS NULL",
            )
            self._note("finished", "number = ?", (number,))

    def retry(self, number: int, reason: str) -> None:
        """This attempt is given up, finished or not; the task waits to be issued again. Its file, if any, is kept."""
        with self._transaction():
            self._note("retried", "number = ?", (number,), reason=reason)
            self._set(NOT_ISSUED, (), number, "issued IS NOT NULL")

    def drop(self, number: int, reason: str, step: int) -> None:
        """It is not trained on, now that `step` is the run's."""
        with self._transaction():
            self._set("dropped = ?, dropped_step = ?", (reason, step), number)
            self._note("dropped", "number = ?", (number,), reason=reason, step=step)

    def train(self, step: int, lags: Mapping[int, int]) -> None:
        """A step trains on these numbers, each so many versions after its oldest token."""
        self._db.execute("PRAGMA synchronous = FULL")
        try:
            with self._transaction():
                for number, lag in lags.items():
                    self._set("trained_step = ?, lag = ?", (step, lag), number, "finished IS NOT NULL")
                    self._note("trained", "number = ?", (number,), step=step)
        finally:
            self._db.execute("PRAGMA synchronous = NORMAL")

    def rewind(self, step: int, keep: bool = True) -> None:
        """The run goes on from the checkpoint of `step`: later training and drops are undone, and what was running, or was
        sampled with later weights, waits to be issued again.

        Args:
            keep: finished groups that older weights sampled; else they are made again too.
        """
        with self._transaction():
            undone, why = "trained_step > ? OR dropped_step > ?", f"the run went on from step {step}"
            self._note("undone", undone, (step, step), reason=why)
            self._db.execute(
                f"UPDATE tasks SET trained_step = NULL, lag = NULL, dropped = NULL, dropped_step = NULL WHERE {undone}",
                (step, step),
            )
            lost = f"{OPEN} AND issued IS NOT NULL AND (finished IS NULL OR newest > ?)"
            newest = step if keep else -1
            self._note("lost", lost, (newest,), reason=why)
            self._db.execute(f"UPDATE tasks SET {NOT_ISSUED} WHERE {lost}", (newest,))

    def adopt(self, cursor: int, pending: Sequence[int]) -> None:
        """Takes over from a run, or a part of one, that this journal has no rows of: numbers below `cursor` are done, but for
        those that are pending. The same again changes nothing."""
        assert all(0 <= number < cursor for number in pending), (cursor, pending)
        with self._transaction():
            known = self._db.execute("SELECT cursor FROM taken_over").fetchall()
            if known != [(cursor,)]:
                assert not known and self.cursor() == 0, f"{self.path} has rows of its own"
                self._db.execute("INSERT INTO taken_over VALUES (?)", (cursor,))
                self._db.executemany("INSERT INTO tasks (number, attempt) VALUES (?, 0)", [(number,) for number in pending])

    # How things stand.

    def cursor(self) -> int:
        """The number that is issued next: all below it were."""
        numbers = "SELECT cursor AS next FROM taken_over UNION SELECT 1 + max(number) FROM tasks"
        return self._db.execute(f"SELECT coalesce(max(next), 0) FROM ({numbers})").fetchone()[0]

    def pending(self) -> list[int]:
        """Numbers below the cursor that are neither trained nor dropped, in order."""
        return [number for (number,) in self._db.execute(f"SELECT number FROM tasks WHERE {OPEN} ORDER BY number")]

    def finished(self) -> list[Row]:
        """Those that can be trained on as they are, in order."""
        return self._rows(f"finished IS NOT NULL AND {OPEN}")

    def trained(self, step: int) -> list[Row]:
        """What a step trained on, in order of number."""
        return self._rows("trained_step = ?", step)

    def attempt(self, number: int) -> int:
        """The last attempt at a task; 0: there was none."""
        found = self._db.execute("SELECT attempt FROM tasks WHERE number = ?", (number,)).fetchone()
        return found[0] if found else 0

    def files(self) -> set[str]:
        """Names of all rollouts that belong to the run, of attempts that were given up too."""
        retried = "SELECT file FROM events WHERE event = 'retried' AND file IS NOT NULL"
        return {file for (file,) in self._db.execute(f"SELECT file FROM tasks WHERE file IS NOT NULL UNION {retried}")}

    def counts(self) -> dict[str, int]:
        """Tasks in each state."""
        return dict.fromkeys(STATES, 0) | dict(self._db.execute("SELECT state, count(*) FROM ledger GROUP BY state"))

    def _rows(self, where: str, *values: Any) -> list[Row]:
        return [Row(*row) for row in self._db.execute(f"SELECT {COLUMNS} FROM tasks WHERE {where} ORDER BY number", values)]

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        self._db.execute("COMMIT")

    def _set(self, change: str, values: tuple[Any, ...], number: int, where: str = "TRUE") -> None:
        """Changes a task that is neither trained nor dropped, and is as `where` says."""
        done = self._db.execute(f"UPDATE tasks SET {change} WHERE number = ? AND {OPEN} AND {where}", (*values, number))
        assert done.rowcount == 1, f"group {number}: {self._rows('number = ?', number)} cannot become: {change} {values}"

    def _note(
        self, event: str, where: str, values: tuple[Any, ...], *, step: int | None = None, reason: str | None = None
    ) -> None:
        """Adds an event of each of some tasks, with its version and file as they are in the table."""
        self._db.execute(
            f"INSERT INTO events (time, number, attempt, event, version, step, file, reason) "
            f"SELECT ?, number, attempt, ?, version, coalesce(?, trained_step, dropped_step), file, ? FROM tasks WHERE {where}",
            (time.time(), event, step, reason, *values),
        )
