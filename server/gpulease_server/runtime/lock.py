"""One daemon per data directory and database.

The lock decides who may take over; that the former writer then really is over, the store's term sees to
(`store.term`). So a lock may be lost, and be taken again, without harm: on PostgreSQL it is of a session, and a session
ends with its connection.

| what happens to the lock on PostgreSQL | what follows |
|---|---|
| its holder ends, however | the server ends the session, and the next one takes it |
| its holder is stopped, or cut off, for over `SESSION_S` | the server, which expects a sign of life, ends the session |
| the server restarts, or ends the session | the holder takes it again; its writes meanwhile rest on its term |
| somebody else took it before that | the holder finds a higher term, at its next write or try, and steps down |

On SQLite it is of a file, and lasts as long as the process.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from sqlalchemy import Connection, text
from sqlalchemy.exc import SQLAlchemyError

from gpulease.errors import GpuleaseError

from ..store.database import connect, database_file, shown, unusable
from . import clock

log = logging.getLogger("gpulease.lock")

PING_S = 0.5
"""Time between two signs of life of the session that has the lock."""
SESSION_S = 3.0
"""How long PostgreSQL waits for one before it ends the session, and so the longest a holder that is stopped is waited
for; a daemon under load is later than `PING_S`, but not by so much."""
NEVER_S = float("-inf")
KEY = 0x67707565_61736500
"""Of the advisory lock; within one database, so that each has its own."""

_TAKE = text("SELECT pg_try_advisory_lock(:key)")
_SESSION_ENDS = text(
    "SELECT set_config(name, :value, false) FROM pg_settings WHERE name = 'idle_session_timeout'"  # from version 14 on
)
_WHO = text(
    "SELECT a.application_name, a.client_addr FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid"
    " WHERE l.locktype = 'advisory' AND l.granted AND l.classid = :high AND l.objid = :low AND l.objsubid = 1"
    " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


class AlreadyRunning(GpuleaseError):
    """Another daemon has the data directory or the database. Stop it, or use others."""

    code, title = "already_running", "Already running"


class CannotLock(GpuleaseError):
    """The lock file cannot be opened, because of its directory or its permissions."""

    code, title = "cannot_lock", "Cannot lock"


class OneDaemon:
    """A lock on what only one daemon may use: its data directory, its database.

    Held for the life of the process; the kernel lets go of it however the process ends. Raises `AlreadyRunning` on
    entry when another process holds it.
    """

    def __init__(self, path: Path, what: str, option: str) -> None:
        self.path = path
        self.what = what
        self.option = option
        self._file: int | None = None

    def try_take(self) -> str | None:
        """Take it: None when it was taken, else who has it. Raises `CannotLock`."""
        try:
            file = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            detail = f"{self.path} cannot be opened: {error.strerror}."
            raise CannotLock(detail, remedy=f"Give another {self.option}.") from None
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            pid = os.pread(file, 32, 0).decode(errors="replace").strip() or "unknown"
            os.close(file)
            return f"pid {pid}"
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        self._file = file
        return None

    def keep(self, check: Callable[[], None]) -> None:
        """It cannot be lost: nothing to do."""

    def confirmed(self) -> bool:
        """True while it is held."""
        return self._file is not None

    def close(self) -> None:
        """Let go of it."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        take(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WriterLock(Protocol):
    """What decides who may take over a database. A daemon that stands by tries it again and again."""

    @property
    def what(self) -> str:
        """What it locks, in words."""

    @property
    def option(self) -> str:
        """The option that names it."""

    def try_take(self) -> str | None:
        """Take it, without waiting: None when it was taken, else who has it, in words."""

    def keep(self, check: Callable[[], None]) -> None:
        """From now on, hold on to it; `check` is called, in another thread, whenever it may have been somebody else's
        for a while."""

    def confirmed(self) -> bool:
        """True while nobody else can have it: what was read from memory is then not out of date."""

    def close(self) -> None:
        """Let go of it."""


def take(lock: WriterLock) -> None:
    """Take a lock, or raise `AlreadyRunning` saying who has it."""
    holder = lock.try_take()
    if holder is not None:
        raise AlreadyRunning(
            f"Another gpulease daemon ({holder}) uses {lock.what}.",
            remedy=f"Stop it first, or give this one another {lock.option}.",
        )


def writer_lock(url: str) -> WriterLock:
    """The lock of this database. Raises `DatabaseUnusable` for a URL that cannot be used."""
    file = database_file(url)
    if file is None:
        return AdvisoryLock(url)
    return OneDaemon(file.with_name(f"{file.name}.lock"), f"the database {file}", "--database-url")


def this_process() -> str:
    """This daemon, as others may call it."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


class AdvisoryLock:
    """An advisory lock of PostgreSQL, in a session of its own that does nothing else."""

    option = "--database-url"

    def __init__(self, url: str) -> None:
        self.what = f"the database {shown(url)}"
        self._url = url
        self._engine = connect(url)
        self._session: Connection | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._until_s = NEVER_S

    def try_take(self) -> str | None:
        """Take it: None when it was taken, else who has it. Raises `DatabaseUnusable`."""
        begun_s = clock.now().mono_s
        try:
            holder = self._try_take()
            if holder is None:
                self._until_s = begun_s + SESSION_S
            return holder
        except SQLAlchemyError as error:
            self._drop()
            raise unusable(self._url, error) from error

    def _try_take(self) -> str | None:
        if self._session is None:
            self._session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._session.execute(
                text("SELECT set_config('application_name', :name, false)"), {"name": f"gpulease {this_process()}"[:63]}
            )
        if self._session.execute(_TAKE, {"key": KEY}).scalar_one():
            self._session.execute(_SESSION_ENDS, {"value": str(int(SESSION_S * 1000))})
            return None
        row = self._session.execute(_WHO, {"high": KEY >> 32, "low": KEY & 0xFFFFFFFF}).first()
        if row is None:
            return "just going away"
        name = str(row.application_name or "unknown").removeprefix("gpulease ")
        return name if row.client_addr is None else f"{name}, connected from {row.client_addr}"

    def keep(self, check: Callable[[], None]) -> None:
        """Give a sign of life every `PING_S`; after a loss, call `check` and take it again, as often as it takes."""
        self._thread = threading.Thread(target=self._keep, args=(check,), name="lock", daemon=True)
        self._thread.start()

    def confirmed(self) -> bool:
        """True while the server cannot have ended the session of a holder from which it heard: `SESSION_S` from the
        moment at which the last sign of life was begun. A server that restarts, or an administrator, may end it
        earlier; then this is wrong until the next sign of life, `PING_S` at most."""
        return clock.now().mono_s < self._until_s

    def _keep(self, check: Callable[[], None]) -> None:
        held, pause_s = True, PING_S
        while not self._closing.wait(pause_s):
            pause_s, begun_s = PING_S, clock.now().mono_s
            try:
                if held and self._session is not None:
                    self._session.execute(text("SELECT 1"))
                    self._until_s = begun_s + SESSION_S
                    continue
                check()
                held = self._try_take() is None
                if held:
                    check()
                    self._until_s = begun_s + SESSION_S
                    log.warning("the lock on %s is held again", self.what)
            except SQLAlchemyError as error:
                if held:
                    log.warning("the lock on %s was lost: %s; taking it again", self.what, unusable(self._url, error))
                    pause_s = 0.0  # who took it is to be known soon: readers wait for that
                held, self._until_s = False, NEVER_S
                self._drop()
            except GpuleaseError as error:  # superseded: whoever is told of it ends this daemon
                log.error("%s", error.detail)
                self._until_s = NEVER_S
                self._drop()
                return

    def _drop(self) -> None:
        """Forget the session; the server may know it for some seconds more."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(SQLAlchemyError):
                session.invalidate()
                session.close()

    def close(self) -> None:
        """Let go of it."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * SESSION_S)
        self._drop()
        self._engine.dispose()
