"""The sessions of a gateway and their files, where the disk is slow or fails."""

import os
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from inference.errors import ApiError
from inference.types import SamplingParams
from rl import registry as rules
from rl.columns import read
from rl.registry import Sessions
from rl.renderers import Qwen3
from tests.test_sessions import END, MAIN, TOKENIZER, encode, sampled, turn, user

DEADLINE = 20.0


def registry(folder: Path, **options: Any) -> Sessions:
    return Sessions(Qwen3(TOKENIZER), SamplingParams(max_tokens=100), max_context=10**6, folder=folder, **options)


def say(sessions: Sessions, name: str) -> None:
    session = sessions.named(name, make=True)
    asked, _ = session.ask(turn([user(name)]), MAIN)
    session.commit(asked, sampled(asked, [*encode(f"I am {name}"), END]))


def test_who_asks_waits_for_no_disk(tmp_path: Path) -> None:
    """While a finished session is being written, others go on; where that fails it stays, to be finished again."""
    stuck = tmp_path / "session_a.parquet.new"
    os.mkfifo(stuck)  # who opens it to write waits until somebody reads
    with closing(registry(tmp_path)) as sessions, ThreadPoolExecutor(3) as threads:
        say(sessions, "a")
        finishing: Future[Any] = threads.submit(sessions.finish, "a", "completed")
        name, _ = threads.submit(sessions.open, {"id": "b"}).result(DEADLINE)
        threads.submit(say, sessions, "b").result(DEADLINE)
        assert not finishing.done() and name == "b"
        with pytest.raises(ApiError, match="'a' is finished"):
            sessions.named("a", make=True)
        reading = os.open(stuck, os.O_RDONLY)
        with pytest.raises(OSError, match="Invalid argument"):  # a pipe is no file
            finishing.result(DEADLINE)
        os.close(reading)
        stuck.unlink()
        assert sessions.finish("a", "completed")["status"] == "completed"
        with pytest.raises(ApiError, match="'a' is finished"):
            sessions.finish("a", "completed")
    assert {graph.episode.id: graph.episode.status for path in tmp_path.iterdir() for graph in read(path)} == {
        "a": "completed",
        "b": "running",
    }


def test_let_go_and_not_written_yet(tmp_path: Path) -> None:
    """The name of a session whose record is still to come is taken: each record is there, once."""
    with closing(registry(tmp_path, most=1)) as sessions:
        for name in ("a", "b", "a", "b", "a"):
            say(sessions, name)
        with pytest.raises(ApiError, match="there is a session 'b'"):
            sessions.open({"id": "b"})
    written = [graph for path in sorted(tmp_path.iterdir()) for graph in read(path)]
    assert [graph.episode.id for graph in written] == ["a", "a~2", "a~3", "b", "b~2"]
    assert [len(graph.branches()) for graph in written] == [1] * 5
    assert [graph.episode.stop_reason for graph in written] == ["idle", "idle", None, "idle", "idle"]


def test_a_record_that_is_none_is_not_lost(tmp_path: Path) -> None:
    """It cannot be written, and no disk is to blame: the session stays, to be finished again."""
    with closing(registry(tmp_path)) as sessions:
        sessions.open({"id": "a", "key": 2**70})
        say(sessions, "a")
        session = sessions.named("a")
        with pytest.raises(OverflowError):
            sessions.finish("a", "completed")
        session.graph.episode = replace(session.graph.episode, key=1)
        assert sessions.finish("a", "completed")["samples"] == 1
    [graph] = read(tmp_path / "session_a.parquet")
    assert graph.episode.status == "completed" and graph.episode.key == 1


def test_one_record_that_cannot_be_written_holds_up_no_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "FLUSH_SECONDS", 0.01)
    stuck = tmp_path / "session_a.parquet.new"
    stuck.mkdir()
    sessions = registry(tmp_path, most=2, idle_s=0.05)
    sessions.open({"id": "none", "key": 2**70})
    for name in ("a", "b", "c"):
        say(sessions, name)
    end = time.monotonic() + DEADLINE
    while any(name in sessions._sessions for name in ("none", "a", "b", "c")) or set(sessions._unwritten) != {"none", "a"}:
        assert time.monotonic() < end, "the writer has ended, or waits for one record"
        time.sleep(0.01)
    say(sessions, "d")
    with pytest.raises(OverflowError):
        sessions.close()
    stuck.rmdir()
    with pytest.raises(OverflowError):
        sessions.flush()
    written = {graph.episode.id: len(graph.branches()) for path in tmp_path.iterdir() for graph in read(path)}
    assert written == {"a": 1, "b": 1, "c": 1, "d": 1}


def test_nobody_is_let_go_for_who_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rules, "MOST_UNWRITTEN", 1)
    with closing(registry(tmp_path, most=1)) as sessions:
        say(sessions, "a")
        say(sessions, "b")
        with pytest.raises(ApiError, match="the records of 1 sessions are not written yet"):
            say(sessions, "c")
        assert sessions.named("b").counts()["requests"] == 1


def test_a_full_session_is_let_go_for_its_next_request_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who looks at it, or gives its reward, finds it."""
    monkeypatch.setattr(rules, "MOST_REQUESTS", 1)
    with closing(registry(tmp_path)) as sessions:
        say(sessions, "a")
        first = sessions.named("a")
        assert sessions.named("a") is first and first.asked == 1
        assert sessions.named("a", make=True) is not first
        sessions.finish("a", "completed")
    assert len(list(tmp_path.glob("session_*.parquet"))) == 2
