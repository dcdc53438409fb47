"""The file of a run's journal (rl/journal.py): its tables, and how it is opened, checked or looked at."""

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

APPLICATION = 0x7477696E
"""says in the file's head whose it is"""
SCHEMA = 1
CREATE = f"""
CREATE TABLE tasks (
    number INTEGER PRIMARY KEY,
    env TEXT,
    key INTEGER,
    content_hash TEXT,
    attempt INTEGER NOT NULL,
    version INTEGER,
    issued REAL,
    finished REAL,
    file TEXT,
    oldest INTEGER,
    newest INTEGER,
    trained_step INTEGER,
    lag INTEGER,
    dropped TEXT,
    dropped_step INTEGER,
    CHECK ((env IS NULL) = (attempt = 0)),
    CHECK ((version IS NULL) = (issued IS NULL)),
    CHECK ((finished IS NULL) = (file IS NULL) AND (file IS NULL) = (oldest IS NULL) AND (oldest IS NULL) = (newest IS NULL)),
    CHECK (finished IS NULL OR issued IS NOT NULL),
    CHECK (trained_step IS NULL OR (finished IS NOT NULL AND dropped IS NULL)),
    CHECK ((trained_step IS NULL) = (lag IS NULL) AND (dropped IS NULL) = (dropped_step IS NULL))
) STRICT;
CREATE TABLE events (
    id INTEGER PRIMARY KEY,
    time REAL NOT NULL,
    number INTEGER NOT NULL,
    attempt INTEGER NOT NULL,
    event TEXT NOT NULL,
    version INTEGER,
    step INTEGER,
    file TEXT,
    reason TEXT
) STRICT;
CREATE TABLE taken_over (cursor INTEGER PRIMARY KEY) STRICT;
CREATE VIEW ledger AS SELECT
    number, env, key,
    CASE
        WHEN dropped IS NOT NULL THEN 'dropped'
        WHEN trained_step IS NOT NULL THEN 'trained'
        WHEN finished IS NOT NULL THEN 'finished'
        WHEN issued IS NOT NULL THEN 'issued'
        ELSE 'waiting'
    END AS state,
    attempt, version, oldest, newest, trained_step, lag, dropped, dropped_step, file,
    datetime(issued, 'unixepoch') AS issued, datetime(finished, 'unixepoch') AS finished
FROM tasks;
PRAGMA application_id = {APPLICATION};
PRAGMA user_version = {SCHEMA};
"""


def connect(path: Path, read_only: bool) -> sqlite3.Connection:
    """A connection to a journal, which is made if need be; of `read_only`, to a copy.

    Raises:
        ValueError: the file is damaged, or no journal of this version of twinax.
    """
    with _advice(path):
        db = _copy(path) if read_only else sqlite3.connect(path, isolation_level=None)
        try:
            _open(path, db)
        except BaseException:
            db.close()
            raise
        return db


def _open(path: Path, db: sqlite3.Connection) -> None:
    [[check]] = db.execute("PRAGMA quick_check(1)")
    if check != "ok":
        raise sqlite3.DatabaseError(check)
    new = not db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    found = [db.execute(f"PRAGMA {name}").fetchone()[0] for name in ("application_id", "user_version")]
    if not new and found != [APPLICATION, SCHEMA]:
        what = f"of schema {found[1]}, this code reads {SCHEMA}" if found[0] == APPLICATION else "of another program"
        raise ValueError(f"{path}: is {what}; use the code that wrote it, or give this run another config.name")
    db.execute("PRAGMA journal_mode = WAL")
    db.execute("PRAGMA synchronous = NORMAL")
    if new:
        db.executescript(f"BEGIN; {CREATE} COMMIT;")


def _copy(path: Path) -> sqlite3.Connection:
    """A connection to a copy that nobody else sees: opening the file itself would make, or merge, the files beside it."""
    with tempfile.TemporaryDirectory() as folder:
        for name in (path.name, f"{path.name}-wal"):
            if (source := path.with_name(name)).exists():
                shutil.copyfile(source, Path(folder) / name)
        with sqlite3.connect(Path(folder) / path.name) as read:
            memory = sqlite3.connect(":memory:", isolation_level=None)
            read.backup(memory)
        read.close()
    return memory


@contextmanager
def _advice(path: Path) -> Iterator[None]:
    """What SQLite says of a file that it cannot use, as a ValueError that names the file."""
    try:
        yield
    except sqlite3.DatabaseError as error:
        raise ValueError(
            f"{path}: cannot be used as a journal ({error}); restore it, or remove it to go on from the newest checkpoint"
        ) from error
