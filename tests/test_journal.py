"""The ledger of tasks: any sequence of calls against a plain model, kills at random moments, files that are refused."""

import random
import signal
import sqlite3
import subprocess
import sys
import tempfile
import textwrap
import time
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rl.environments import Task, make_task
from rl.journal import STATES, Journal

REPO = Path(__file__).parents[1]


def task(number: int) -> Task:
    return make_task("count", number, [{"role": "user", "content": f"{number}?"}], answer=str(number))


def done(journal: Journal, number: int, attempt: int = 1, version: int = 0, newest: int | None = None) -> None:
    """Issued and finished."""
    journal.issue(number, task(number), attempt, version)
    journal.finish(number, f"rollouts/{number}_{attempt}", version, version if newest is None else newest)


@pytest.fixture
def journal(tmp_path: Path):
    with closing(Journal(tmp_path / "journal.sqlite")) as opened:
        yield opened


def test_a_task_from_its_issue_to_its_step(journal: Journal) -> None:
    assert (journal.cursor(), journal.pending(), journal.finished(), journal.attempt(0)) == (0, [], [], 0)
    before = time.time()
    for number in range(3):
        journal.issue(number, task(number), 1, 4)
    assert journal.cursor() == 3 and journal.pending() == [0, 1, 2] and journal.finished() == []
    journal.finish(1, "rollouts/b", 4, 6)
    [row] = journal.finished()
    assert (row.number, row.env, row.key, row.content_hash) == (1, "count", 1, task(1).content_hash)
    assert (row.attempt, row.version, row.file, row.oldest, row.newest) == (1, 4, "rollouts/b", 4, 6)
    assert row.issued is not None and row.finished is not None and before <= row.issued <= row.finished <= time.time()
    journal.finish(0, "rollouts/a", 4, 4)
    journal.train(7, {1: 2, 0: 3})
    assert [(row.number, row.trained_step, row.lag) for row in journal.trained(7)] == [(0, 7, 3), (1, 7, 2)]
    journal.drop(2, "too old", 7)
    assert journal.pending() == journal.finished() == journal.trained(6) == []
    assert journal.counts() == {"waiting": 0, "issued": 0, "finished": 0, "trained": 2, "dropped": 1}


def test_earlier_attempts_stay_on_record(journal: Journal, tmp_path: Path) -> None:
    """An engine that died; a group that became too old; a resumed run: all of it can be read, with sqlite3 alone."""
    journal.issue(0, task(0), 1, 0)
    journal.issue(0, task(0), 2, 1)
    journal.finish(0, "rollouts/0_2", 1, 1)
    journal.retry(0, "lag")
    assert journal.counts()["waiting"] == 1 and journal.pending() == [0] and journal.attempt(0) == 2
    done(journal, 0, attempt=3, version=3)
    journal.train(4, {0: 1})
    journal.rewind(2)
    assert journal.pending() == [0] and journal.finished() == [] and journal.files() == {"rollouts/0_2"}
    done(journal, 0, attempt=4, version=2)
    journal.train(3, {0: 1})
    with closing(sqlite3.connect(tmp_path / "journal.sqlite")) as read:
        events = read.execute("SELECT event, attempt, version, step, file, reason FROM events ORDER BY id").fetchall()
        assert read.execute("SELECT number, env, key, state, attempt, trained_step FROM ledger").fetchall() == [
            (0, "count", 0, "trained", 4, 3)
        ]
    why = "the run went on from step 2"
    assert events == [
        ("issued", 1, 0, None, None, None),
        ("issued", 2, 1, None, None, None),
        ("finished", 2, 1, None, "rollouts/0_2", None),
        ("retried", 2, 1, None, "rollouts/0_2", "lag"),
        ("issued", 3, 3, None, None, None),
        ("finished", 3, 3, None, "rollouts/0_3", None),
        ("trained", 3, 3, 4, "rollouts/0_3", None),
        ("undone", 3, 3, 4, "rollouts/0_3", why),
        ("lost", 3, 3, None, "rollouts/0_3", why),
        ("issued", 4, 2, None, None, None),
        ("finished", 4, 2, None, "rollouts/0_4", None),
        ("trained", 4, 2, 3, "rollouts/0_4", None),
    ]
    assert journal.files() == {"rollouts/0_2", "rollouts/0_4"}


def test_what_is_left_after_going_back(journal: Journal) -> None:
    for number, newest in enumerate((0, 1, 2, 3)):
        done(journal, number, newest=newest)
        journal.train(number + 1, {number: number})
    done(journal, 4, version=2)
    journal.drop(4, "lag", 4)
    journal.issue(5, task(5), 1, 4)
    for _ in range(2):  # the second time it finds nothing to do
        journal.rewind(2)
        assert [row.number for step in (1, 2) for row in journal.trained(step)] == [0, 1]
        # version 2 is what the run goes on with, version 3 is made again
        assert [row.number for row in journal.finished()] == [2, 4]
        assert journal.pending() == [2, 3, 4, 5] and journal.cursor() == 6
        assert journal.counts() == {"waiting": 2, "issued": 0, "finished": 2, "trained": 2, "dropped": 0}


def test_a_run_that_takes_over(journal: Journal) -> None:
    for _ in range(2):
        journal.adopt(20, [3, 17])
    assert journal.cursor() == 20 and journal.pending() == [3, 17] and journal.attempt(3) == 0
    assert journal.finished() == [] and journal.counts() == dict.fromkeys(STATES, 0) | {"waiting": 2}
    done(journal, 17)
    done(journal, 20)
    journal.train(9, {17: 0, 20: 0})
    journal.drop(3, "no more of these", 9)
    assert journal.pending() == [] and journal.cursor() == 21
    with pytest.raises(AssertionError, match="has rows of its own"):
        journal.adopt(30, [])
    journal.rewind(8)
    assert journal.pending() == [3, 17, 20]


# ---- any sequence of calls

CALLS = ("issue", "finish", "retry", "drop", "train", "rewind", "reopen")


class Model:
    """What a journal says, in plain dicts."""

    def __init__(self) -> None:
        self.tasks: list[dict[str, Any]] = []
        self.step = 1

    def of(self, state: str) -> list[int]:
        return [number for number, each in enumerate(self.tasks) if each["state"] == state]

    def waits(self, number: int) -> None:
        self.tasks[number] = {"state": "waiting", "attempt": self.tasks[number]["attempt"]}

    def rewind(self, step: int) -> None:
        for number, each in enumerate(self.tasks):
            if each["state"] in ("trained", "dropped") and each["step"] > step:
                each["state"] = "finished" if each.get("file") else "issued" if "version" in each else "waiting"
            if each["state"] == "issued" or (each["state"] == "finished" and each["newest"] > step):
                self.waits(number)
        self.step = step + 1


def call(journal: Journal, model: Model, name: str, number: int, other: int) -> None:
    """One call with these numbers, on both; one that the model does not allow is refused, and changes nothing."""
    known = number < len(model.tasks)
    each = model.tasks[number] if known else {"state": "new", "attempt": 0}
    given: tuple[Any, ...] = (number,)
    after: dict[str, Any] | None = None
    match name:
        case "issue":
            given = (number, task(number), other, model.step)
            if number <= len(model.tasks) and each["state"] in ("new", "waiting", "issued") and other > each["attempt"]:
                after = {"state": "issued", "attempt": other, "version": model.step}
        case "finish":
            given = (number, f"{number}/{each['attempt']}", model.step, model.step + other)
            if each["state"] == "issued":
                after = each | {"state": "finished", "file": given[1], "newest": given[3]}
        case "retry":
            given = (number, "why")
            if each["state"] in ("issued", "finished"):
                after = {"state": "waiting", "attempt": each["attempt"]}
        case "drop":
            given = (number, "why", model.step)
            if each["state"] in ("waiting", "issued", "finished"):
                after = each | {"state": "dropped", "step": model.step}
        case "train":
            numbers = dict.fromkeys([number, other], 2)
            given = (model.step, numbers)
            if all(n in model.of("finished") for n in numbers):
                for n in numbers:
                    model.tasks[n] |= {"state": "trained", "step": model.step}
                model.step += 1
                after = model.tasks[number]
    if after is None:
        with pytest.raises(AssertionError):
            getattr(journal, name)(*given)
    else:
        getattr(journal, name)(*given)
        model.tasks[number:] = [after, *model.tasks[number + 1 :]]


def assert_same(journal: Journal, model: Model) -> None:
    pending = sorted(model.of("waiting") + model.of("issued") + model.of("finished"))
    assert journal.cursor() == len(model.tasks) and journal.pending() == pending
    assert journal.counts() == {state: len(model.of(state)) for state in STATES}
    assert [(row.number, row.attempt, row.file, row.newest) for row in journal.finished()] == [
        (n, model.tasks[n]["attempt"], model.tasks[n]["file"], model.tasks[n]["newest"]) for n in model.of("finished")
    ]
    for step in range(1, model.step):
        assert [row.number for row in journal.trained(step)] == [
            n for n in model.of("trained") if model.tasks[n]["step"] == step
        ]


@settings(max_examples=60)
@given(st.lists(st.tuples(st.sampled_from(CALLS), st.integers(0, 5), st.integers(0, 5)), max_size=60))
def test_any_sequence_of_calls(calls: list[tuple[str, int, int]]) -> None:
    model = Model()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "journal.sqlite"
        journal = Journal(path)
        for name, number, other in calls:
            if name == "reopen":
                journal.close()
                journal = Journal(path)
            elif name == "rewind":
                step = min(number, model.step - 1)
                journal.rewind(step)
                model.rewind(step)
            else:
                call(journal, model, name, number, other)
            assert_same(journal, model)
        journal.close()


# ---- killed

KILLED = """
import sys
from pathlib import Path
from rl.journal import Journal
from rl.environments import make_task

def task(number):
    return make_task("count", number, [{"role": "user", "content": f"{number}?"}])

journal = Journal(Path(sys.argv[1]))
step = 1 + max((row[0] or 0 for row in journal._db.execute("SELECT max(trained_step) FROM tasks")), default=0)
journal.rewind(step - 1)
while True:
    for number in [*journal.pending(), *range(journal.cursor(), journal.cursor() + 4)][:4]:
        if number in [row.number for row in journal.finished()]:
            continue
        journal.issue(number, task(number), journal.attempt(number) + 1, step - 1)
        journal.finish(number, f"rollouts/{number}", step - 1, step - 1)
    journal.train(step, {number: 0 for number in journal.pending()[:4]})
    print(step, flush=True)
    step += 1
"""


def test_killed_at_random_moments(tmp_path: Path) -> None:
    """Twenty times: whole transactions, nothing acknowledged is gone, no task trained twice or left out."""
    path, draw, acknowledged = tmp_path / "journal.sqlite", random.Random(1), 0
    for kill in range(20):
        child = subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(KILLED), str(path)], cwd=REPO, stdout=subprocess.PIPE, text=True
        )
        assert child.stdout is not None
        assert child.stdout.readline() == f"{acknowledged + 1}\n", f"kill {kill}: it does not go on where it was"
        time.sleep(0.05 * draw.random())
        child.send_signal(signal.SIGKILL)
        said = child.communicate()[0].splitlines()
        acknowledged += 1 + sum(line.isdecimal() and int(line) > acknowledged + 1 for line in said)
        with closing(Journal(path, read_only=True)) as copy:
            assert copy.counts()["trained"] in (4 * acknowledged, 4 * acknowledged + 4)
        with closing(Journal(path)) as journal:
            assert journal._db.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
            steps = [journal.trained(step) for step in range(1, acknowledged + 2)]
            assert [len(rows) for rows in steps[:-1]] == [4] * acknowledged and len(steps[-1]) in (0, 4)
            acknowledged += len(steps[-1]) == 4  # it was written, and the kill came before it was said
            numbers = [row.number for rows in steps for row in rows]
            assert numbers == list(range(4 * acknowledged)) and journal.pending() == list(range(len(numbers), journal.cursor()))
            trained = Counter(n for (n,) in journal._db.execute("SELECT number FROM events WHERE event = 'trained'"))
            assert set(trained.values()) == {1}
    assert acknowledged > 40


# ---- files


def test_looking_on_writes_nothing(journal: Journal, tmp_path: Path) -> None:
    done(journal, 0)
    rows = journal.finished()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with closing(Journal(tmp_path / "journal.sqlite", read_only=True)) as copy:
        assert copy.pending() == [0] and copy.finished() == rows
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_file_that_is_no_journal_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    path.write_text("no database " * 100)
    with pytest.raises(ValueError, match=r"journal.sqlite: cannot be used as a journal \(file is not a database\); restore it"):
        Journal(path)
    path.unlink()
    with closing(sqlite3.connect(path)) as other:
        other.execute("CREATE TABLE tasks (number INTEGER)")
    whole = path.read_bytes()
    with pytest.raises(ValueError, match="is of another program; use the code that wrote it"):
        Journal(path)
    assert path.read_bytes() == whole


def test_another_schema_and_damage_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(Journal(path)) as journal:
        for number in range(200):
            done(journal, number)
    whole = path.read_bytes()
    with closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA user_version = 9")
    with pytest.raises(ValueError, match="is of schema 9, this code reads 1"):
        Journal(path)
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ValueError, match="cannot be used as a journal"):
        Journal(path)
    path.write_bytes(whole[:8192] + b"\xff" * 4096 + whole[12288:])
    with pytest.raises(ValueError, match="cannot be used as a journal"):
        Journal(path)
