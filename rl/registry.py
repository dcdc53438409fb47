"""The sessions of a gateway: by name and by key, each written down as one file of rollouts.

A session is written within some seconds of whatever happens in it (`FLUSH_SECONDS`; a process that is killed loses no more),
when it is finished, and when the gateway ends. One that nobody has used for long, or that has become very long, is closed, let
go and written; if its name comes again, that is another episode, NAME~2. Who asks waits for no disk: nothing is written under
the lock.
"""

import hashlib
import secrets
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import quote

from inference.errors import ApiError
from inference.types import SamplingParams
from rl.columns import write
from rl.environments import Reward
from rl.graph import Graph
from rl.records import Episode, EpisodeStatus
from rl.renderers import Renderer
from rl.rollout import sample_seed
from rl.session_bodies import MOST_OF_NAME, NAME
from rl.sessions import Session
from rl.wires import Identity

FLUSH_SECONDS = 5.0
DEFAULT = "default"
MOST_REQUESTS = 10_000
"""of a session"""
MOST_UNWRITTEN = 4096
"""sessions let go whose records could not be written yet"""


class Sessions:
    """Args:
    folder: of the records, session_NAME.parquet; None keeps none.
    most: sessions at once; beyond them the one that was used longest ago is let go.
    shared: whether requests that name no session are in one together, `default`; else each is alone, and not recorded.
    idle_s: seconds without a request after which a session is let go.
    """

    def __init__(
        self,
        renderer: Renderer,
        params: SamplingParams,
        *,
        max_context: int,
        folder: Path | None = None,
        most: int = 4096,
        idle_s: float = 3600.0,
        client_sampling: bool = False,
        shared: bool = True,
        seed: int = 0,
    ) -> None:
        self.renderer, self.params, self.max_context = renderer, params, max_context
        self.folder, self.most, self.idle_s = folder, most, idle_s
        self.client_sampling, self.shared, self.seed = client_sampling, shared, seed
        self._sessions: dict[str, Session] = {}
        self._keys: dict[bytes, str] = {}
        """digest of a key -> session: the time that it takes to look one up tells nothing about a key. Keys outlive sessions:
        who still has one must not get into another."""
        self._finished: set[str] = set()
        self._unwritten: dict[str, Session] = {}
        """by episode: let go, and their last record not written yet"""
        self._lock = threading.RLock()
        self._closing = threading.Event()
        self._writer = threading.Thread(target=self._write_often, name="sessions", daemon=True)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
        self._writer.start()

    def owner(self, key: bytes) -> str | None:
        """The session that a key opens. Waits for nobody, as the server's loop asks it."""
        return self._keys.get(_digest(key))

    def of(self, path_name: str | None, key: bytes, who: Identity) -> Session:
        """The session that a request belongs to; a new one where there is none of that name.

        Raises:
            ApiError: it is finished, or its name cannot be one.
        """
        if path_name is not None and not NAME.fullmatch(path_name):
            raise ApiError(f"session: {path_name[:100]!r} cannot be a name; it must match {NAME.pattern}", param="session")
        name = path_name or self.owner(key) or who.session
        if name is None and not self.shared:
            return self._session(secrets.token_hex(8), {})
        return self.named(name or DEFAULT, make=True)

    def named(self, name: str, *, make: bool = False) -> Session:
        with self._lock:
            if name in self._finished:
                raise ApiError(f"session: {name!r} is finished; open another", status=409)
            known = self._sessions.get(name)
            if known is None and not make:
                raise ApiError(f"session: there is no {name!r}", status=404)
            if known is None or (make and known.asked >= MOST_REQUESTS and not known.running):
                self._make(name, {})
            session = self._sessions.pop(name)
            self._sessions[name] = session  # the last one used is last
            session.used = time.monotonic()
            return session

    def open(self, fields: dict[str, Any]) -> tuple[str, str]:
        """A new session and the key that opens it and no other.

        Args:
            fields: of its Episode; `id` is its name.

        Raises:
            ApiError: there is one of that name.
        """
        with self._lock:
            name = fields.pop("id", None) or secrets.token_hex(8)
            if name in self._sessions or name in self._finished or self._known(name):
                raise ApiError(f"name: there is a session {name!r} already; choose another", status=409, param="name")
            self._make(name, fields)
            return name, self._new_key(name)

    def adopt(self, session: Session, name: str | None = None) -> str:
        """Takes in a session that somebody else has made, and writes; returns the key that opens it until it is dropped.

        Args:
            name: what clients call it, where that is not the episode's id.
        """
        with self._lock:
            name = name or session.graph.episode.id
            self._sessions[name] = session
            return self._new_key(name)

    def drop(self, session: Session) -> None:
        """Lets nobody into an adopted session any more."""
        with self._lock:
            for name in [name for name, known in self._sessions.items() if known is session]:
                del self._sessions[name]
                self._forget_keys(name)

    def _new_key(self, name: str) -> str:
        key = f"tx-{secrets.token_urlsafe(24)}"
        self._keys[_digest(key.encode())] = name
        return key

    def _forget_keys(self, name: str) -> None:
        self._keys = {key: owner for key, owner in self._keys.items() if owner != name}

    def finish(
        self, name: str, status: EpisodeStatus, rewards: Sequence[Reward] = (), reason: str = "finished"
    ) -> dict[str, Any]:
        """Closes a session and writes its record; returns its counts.

        A session stays, to be finished again, where its record cannot be written.

        Raises:
            ApiError: there is none of that name, or it has requests in flight.
            OSError, ValueError, OverflowError: it cannot be written.
        """
        with self._lock:
            session = self.named(name)
            session.finish(status, rewards, reason)
            del self._sessions[name]
            self._finished.add(name)
        try:
            self._write(session)
        except BaseException:  # whatever it is, nobody else has the record
            with self._lock:
                self._finished.remove(name)
                self._sessions[name] = session
            raise
        return session.counts()

    def close(self) -> None:
        """Writes what was not written.

        Raises:
            OSError, ValueError, OverflowError: of the first record that cannot be; all others are written.
        """
        self._closing.set()
        self._writer.join()
        self.flush()

    def flush(self) -> None:
        """Writes what has changed. Raises as `close` does."""
        with self._lock:
            sessions, ended = list(self._sessions.values()), self._unwritten.copy()
        errors: list[Exception] = []
        for session in [*ended.values(), *sessions]:
            last = session.graph.episode.id in ended
            try:
                if last or session.changed:
                    self._write(session)
            except Exception as error:  # this record's own; raised when all others have had their turn
                errors.append(error)
                continue
            if last:
                with self._lock:
                    self._unwritten.pop(session.graph.episode.id, None)
        if errors:
            raise errors[0]

    def _make(self, name: str, fields: dict[str, Any]) -> None:
        if len(self._unwritten) >= MOST_UNWRITTEN:
            raise ApiError(f"the records of {len(self._unwritten)} sessions are not written yet; try again later", status=503)
        if name in self._sessions:
            self._let_go(name)
        if len(self._sessions) >= self.most:
            oldest = next((name for name, session in self._sessions.items() if not session.running), None)
            if oldest is None:
                raise ApiError(f"{self.most} sessions have requests in flight; try again later", status=429)
            self._let_go(oldest)
        number, own = 1, name
        while self._known(own):
            number += 1
            own = f"{name}~{number}"
        self._sessions[name] = self._session(own, {"group_id": name} | fields)

    def _session(self, name: str, fields: dict[str, Any]) -> Session:
        plain: dict[str, Any] = {"env": "gateway", "key": 0, "content_hash": "", "group_id": name, "seed": 0} | fields
        plain["seed"] = sample_seed(self.seed, plain["seed"], name)
        return Session(
            Graph(Episode(id=name, **plain)),
            self.renderer,
            self.params,
            max_context=self.max_context,
            client_sampling=self.client_sampling,
        )

    def _let_go(self, name: str) -> None:
        """Closes a session; the writer writes it. ApiError: it has requests in flight."""
        session = self._sessions[name]
        session.finish("completed", (), "idle")
        del self._sessions[name]
        if self.folder is not None:
            self._unwritten[session.graph.episode.id] = session

    def _known(self, episode: str) -> bool:
        """Whether there is a record of that name, or will be one."""
        return episode in self._unwritten or self._file(episode).exists()

    def _file(self, episode: str) -> Path:
        name = quote(episode, safe="")  # of a client's own header, it may be anything that can be printed
        if len(name) > MOST_OF_NAME:
            name = f"{name[:MOST_OF_NAME]}-{hashlib.sha256(name.encode()).hexdigest()[:16]}"
        return (self.folder or Path("/nonexistent")) / f"session_{name}.parquet"

    def _write_often(self) -> None:
        while not self._closing.wait(FLUSH_SECONDS):
            self._let_go_idle()
            try:
                self.flush()
            except Exception as error:  # a record that cannot be written must not end the writer of all others
                said = f"{type(error).__name__}: {error}"
                print(f"warning: records were not written, and will be tried again: {said}", file=sys.stderr)

    def _let_go_idle(self) -> None:
        before = time.monotonic() - self.idle_s
        with self._lock:
            idle = [name for name, session in self._sessions.items() if session.used < before and not session.running]
            for name in idle:
                with suppress(ApiError):  # it is asked again just now
                    self._let_go(name)

    def _write(self, session: Session) -> None:
        if self.folder is not None:
            with session.whole() as graph:
                write(self._file(graph.episode.id), [graph])


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
