"""Locks: one daemon per data directory, one writer per database.

The lock decides which daemon may take over (leader election); the store's fencing term ensures that the former writer
cannot write any more (`store.fencing`). So losing a lock and taking it again does no harm: on PostgreSQL it belongs to
a session, and a session ends with its connection.

| what happens to the lock on PostgreSQL | what follows |
|---|---|
| its holder ends, in any way | the server ends the session, and the next daemon takes the lock |
| its holder is stopped or cut off for over `SESSION_TIMEOUT_S` | the server gets no keepalive, ends the session |
| the server restarts, or ends the session | the holder takes it again; meanwhile its term guards its writes |
| another daemon took it before that | the holder finds a higher term at its next write or try, and ends |

On SQLite it is a file lock, and lasts as long as the process.
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

from gpulease_protocol.errors import GpuleaseError
from gpulease_server.runtime import clock
from gpulease_server.store.database import connect, database_file, redacted, unusable_error

log = logging.getLogger("gpulease.lock")

PING_S = 0.5
"""Time between two keepalives of the session that has the lock."""
SESSION_TIMEOUT_S = 3.0
"""How long PostgreSQL waits for a keepalive before it ends the session, so the delay after which a stopped holder is
replaced. A daemon under load is later than `PING_S`, but not by this much."""
NEVER_S = float("-inf")
KEY = 0x67707565_61736500
"""Key of the advisory lock, which is separate for each database."""

_TRY_LOCK = text("SELECT pg_try_advisory_lock(:key)")
_SET_SESSION_TIMEOUT = text(
    "SELECT set_config(name, :value, false) FROM pg_settings WHERE name = 'idle_session_timeout'"  # from version 14 on
)
_ALIVE = text("SELECT 1")
_UNLOCK_ALL = text("SELECT pg_advisory_unlock_all()")
_LOCK_HOLDER = text(
    "SELECT a.application_name, a.client_addr FROM pg_locks l JOIN pg_stat_activity a ON a.pid = l.pid"
    " WHERE l.locktype = 'advisory' AND l.granted AND l.classid = :high AND l.objid = :low AND l.objsubid = 1"
    " AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())"
)


class AlreadyRunning(GpuleaseError):
    """Another daemon has the data directory or the database. Stop it, or use others."""

    code, title = "already_running", "Already running"


class CannotLock(GpuleaseError):
    """The lock file cannot be opened, because of its directory or its permissions; or the lock keeps no one out."""

    code, title = "cannot_lock", "Cannot lock"


class FileLock:
    """A file lock on what only one daemon may use: its data directory, its database.

    The kernel releases it when the process ends, in any way. Raises `AlreadyRunning` on entry if another process holds
    it.
    """

    def __init__(self, path: Path, what: str, option: str) -> None:
        self.path = path
        self.what = what
        self.option = option
        self._file: int | None = None

    def try_acquire(self) -> str | None:
        """Acquire it without waiting. Returns None, or who holds it. Raises `CannotLock`."""
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

    def keep_alive(self, check: Callable[[], None]) -> None:
        """Does nothing: a file lock cannot be lost."""

    def is_confirmed(self) -> bool:
        """True while the lock is held."""
        return self._file is not None

    def close(self) -> None:
        """Release the lock."""
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def __enter__(self) -> Self:
        acquire_or_raise(self)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class WriterLock(Protocol):
    """The lock that decides which daemon writes to a database. A standby tries to acquire it again and again."""

    @property
    def what(self) -> str:
        """What it locks, for messages."""

    @property
    def option(self) -> str:
        """The option that chooses it."""

    def try_acquire(self) -> str | None:
        """Acquire it without waiting. Returns None, or who holds it."""

    def keep_alive(self, check: Callable[[], None]) -> None:
        """Keep holding it from now on. Calls `check`, in another thread, whenever another daemon may have held it for a
        while."""

    def is_confirmed(self) -> bool:
        """True while no other daemon can hold it: then what was read from memory is not stale."""

    def close(self) -> None:
        """Release the lock."""


def acquire_or_raise(lock: WriterLock) -> None:
    """Acquire a lock. Raises `AlreadyRunning` with its holder."""
    holder = lock.try_acquire()
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
    return FileLock(file.with_name(f"{file.name}.lock"), f"the database {file}", "--database-url")


def this_process() -> str:
    """Name of this process for messages of other daemons."""
    return f"pid {os.getpid()} on {socket.gethostname()}"


class AdvisoryLock:
    """An advisory lock of PostgreSQL, in a session that does nothing else."""

    option = "--database-url"

    def __init__(self, url: str) -> None:
        self.what = f"the database {redacted(url)}"
        self._url = url
        self._engine = connect(url)
        self._session: Connection | None = None
        self._closing = threading.Event()
        self._thread: threading.Thread | None = None
        self._confirmed_until_s = NEVER_S

    def try_acquire(self) -> str | None:
        """Acquire it without waiting. Returns None, or who holds it.

        Raises `DatabaseUnusable`, or `CannotLock` behind a pooler that does not keep sessions.
        """
        begun_s = clock.now().mono_s
        try:
            holder = self._try_acquire()
            if holder is None:
                self._require_session()
                self._confirmed_until_s = begun_s + SESSION_TIMEOUT_S
            return holder
        except SQLAlchemyError as error:
            self._drop()
            raise unusable_error(self._url, error) from error

    def _require_session(self) -> None:
        """Raise `CannotLock` if the lock, which was acquired, keeps no other client out.

        A pooler in transaction mode gives one session of the server to all its clients, by turns, and a session that
        has the lock gets it again. It may have several; then it is not noticed here, and the fencing term alone ensures
        that one daemon writes.
        """
        kept = True
        with self._engine.connect().execution_options(isolation_level="AUTOCOMMIT") as other:
            shared = other.execute(_TRY_LOCK, {"key": KEY}).scalar_one()
            if shared:
                kept = self._is_kept()
                other.execute(_UNLOCK_ALL)
            other.detach()  # closed, because a connection is needed for this only
        if not shared:
            return
        self._drop()
        if not kept:
            raise CannotLock(
                f"A second connection to {self.what} took over {SESSION_TIMEOUT_S:.0f} s, after which the server ended"
                " the session with the lock.",
                remedy="Let a connection pooler have 25 connections (PgBouncer: default_pool_size); try again.",
            )
        raise CannotLock(
            f"A connection pooler before {self.what} does not keep sessions, to which the lock belongs.",
            remedy="Let it keep them (PgBouncer: pool_mode = session), or give the address of the server itself.",
        )

    def _is_kept(self) -> bool:
        """False if the session of the lock has ended."""
        assert self._session is not None
        try:
            self._session.execute(_ALIVE)
        except SQLAlchemyError:
            return False
        return True

    def _try_acquire(self) -> str | None:
        if self._session is None:
            self._session = self._engine.connect().execution_options(isolation_level="AUTOCOMMIT")
            self._session.execute(
                text("SELECT set_config('application_name', :name, false)"), {"name": f"gpulease {this_process()}"[:63]}
            )
        if self._session.execute(_TRY_LOCK, {"key": KEY}).scalar_one():
            self._session.execute(_SET_SESSION_TIMEOUT, {"value": str(int(SESSION_TIMEOUT_S * 1000))})
            return None
        row = self._session.execute(_LOCK_HOLDER, {"high": KEY >> 32, "low": KEY & 0xFFFFFFFF}).first()
        if row is None:
            return "a daemon that is just ending"
        name = str(row.application_name or "unknown").removeprefix("gpulease ")
        return name if row.client_addr is None else f"{name}, connected from {row.client_addr}"

    def keep_alive(self, check: Callable[[], None]) -> None:
        """Send a keepalive every `PING_S`; after a loss, call `check` and retry until the lock is acquired."""
        self._thread = threading.Thread(target=self._keep_alive, args=(check,), name="lock", daemon=True)
        self._thread.start()

    def is_confirmed(self) -> bool:
        """True until `SESSION_TIMEOUT_S` after the start of the last successful keepalive, since the server cannot have
        ended the session before. A restart of the server or an administrator can; then this is wrong until the next
        keepalive, at most `PING_S`."""
        return clock.now().mono_s < self._confirmed_until_s

    def _keep_alive(self, check: Callable[[], None]) -> None:
        held, pause_s = True, PING_S
        while not self._closing.wait(pause_s):
            pause_s, begun_s = PING_S, clock.now().mono_s
            try:
                if held and self._session is not None:
                    self._session.execute(_ALIVE)
                    self._confirmed_until_s = begun_s + SESSION_TIMEOUT_S
                    continue
                check()
                held = self._try_acquire() is None
                if held:
                    check()
                    self._confirmed_until_s = begun_s + SESSION_TIMEOUT_S
                    log.warning("the lock on %s is held again", self.what)
            except SQLAlchemyError as error:
                if held:
                    log.warning(
                        "the lock on %s was lost: %s; taking it again", self.what, unusable_error(self._url, error)
                    )
                    pause_s = 0.0  # readers wait to learn who has it
                held, self._confirmed_until_s = False, NEVER_S
                self._drop()
            except GpuleaseError as error:  # superseded: `on_superseded` ends this daemon
                log.error("%s", error.detail)
                self._confirmed_until_s = NEVER_S
                self._drop()
                return

    def _drop(self) -> None:
        """Drop the session; the server may keep it for some seconds."""
        session, self._session = self._session, None
        if session is not None:
            with contextlib.suppress(SQLAlchemyError):
                session.invalidate()
                session.close()

    def close(self) -> None:
        """Release the lock."""
        self._closing.set()
        if self._thread is not None:
            self._thread.join(timeout=2 * SESSION_TIMEOUT_S)
        self._drop()
        self._engine.dispose()
