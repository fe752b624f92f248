"""Detects that the file of an SQLite database was moved, removed, replaced or overwritten."""

from __future__ import annotations

import os
import secrets
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Engine
from sqlalchemy.exc import SQLAlchemyError

from gpulease_server.store.database import DatabaseUnusable
from gpulease_server.store.ledger_store import StoreFailed

STAMP_OFFSET, STAMP_BYTES = 60, 4
"""Where the head of an SQLite file has its `user_version`."""

BACKUP_STAMP = 0x67706261
"""The stamp of a copy that `gpulease db backup` has made, until a daemon starts on it."""


def require_own_log(file: Path) -> None:
    """Before SQLite opens this file: raise `DatabaseUnusable` if the write-ahead log beside it is of another database.

    The log is that of the former database, after a crash. SQLite would apply it to a backup, and destroy it; it would
    delete it beside a file that is empty or missing, with the last leases in it.
    """
    try:
        is_left = file.with_name(f"{file.name}-wal").stat().st_size > 0
    except OSError:
        return
    if is_left and _is_backup(file):
        raise DatabaseUnusable(
            f"{file} is a backup, and the log beside it is of the database that was there before.",
            remedy=f"Move {file.name}-wal and {file.name}-shm away, then try again; see docs/databases.md.",
        )
    if is_left and (not file.exists() or file.stat().st_size == 0):
        raise DatabaseUnusable(
            f"{file} is missing or empty, and the log beside it is of the database that was there before.",
            remedy=f"Put that one back. If it is lost, move {file.name}-wal and {file.name}-shm away, and restore a"
            " backup; see docs/databases.md.",
        )


def start_on_backup(engine: Engine, file: Path) -> None:
    """Before the first write of a daemon, after `require_own_log`: a backup becomes its database, and from then on has
    a log of its own. Raises `DatabaseUnusable` or SQLAlchemyError."""
    if not _is_backup(file):
        return
    with engine.connect() as connection:
        connection.exec_driver_sql("PRAGMA user_version = 0")
        connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").all()
    engine.dispose()
    if _is_backup(file):
        raise DatabaseUnusable(f"{file} is read by another program.", remedy="End that, then try again.")


def _is_backup(file: Path) -> bool:
    """True for a copy that no daemon has started on."""
    try:
        return _stamp_in(descriptor_of(file, os.O_RDONLY)) == BACKUP_STAMP
    except OSError:
        return False


_descriptors: dict[tuple[int, int, int], int] = {}
"""By device, inode and access mode; never closed: closing any descriptor of a file releases all POSIX locks of
the process on it. Another process that closes the database would then remove the log of the connections here."""


def descriptor_of(file: Path, mode: int) -> int:
    """A descriptor of a file of the database, open for as long as this process lives. `mode`: O_RDONLY or O_RDWR.
    Raises OSError."""
    found = file.stat()
    key = found.st_dev, found.st_ino, mode
    if key not in _descriptors:
        _descriptors[key] = os.open(file, mode | os.O_CLOEXEC)
    return _descriptors[key]


def _stamp_in(descriptor: int) -> int:
    return int.from_bytes(os.pread(descriptor, STAMP_BYTES, STAMP_OFFSET), "big")


class FileGuard:
    """The file of an SQLite database, known by device and inode, and by a stamp in its head.

    A file that is moved, removed or replaced stays open in this process: commits still succeed, into a file that no
    restart will read. So the path is checked after each commit. Other databases are not checked.

    One that is overwritten (`cp`) keeps its inode, and commits still succeed, into a write-ahead log that no longer
    fits to it. So each process stamps the file with a number of its own. It finds a copy from before its start, and one
    of `gpulease db backup`, which has `BACKUP_STAMP`; not a copy that another program has made since.

    A write-ahead log that is deleted stays open as well, so `open` copies it into the database before it closes the
    connections to it: a connection that is made while one of them reads would take the new, empty log for that one.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        name = engine.url.database
        self._file = Path(name).absolute() if engine.dialect.name == "sqlite" and name else None
        self._file_id: tuple[int, int] | None = None
        self._log = ""
        """The write-ahead log: SQLite has it beside the file that a symbolic link leads to."""
        self._log_id: tuple[int, int] | None = None
        """None until it is there."""
        self._stamp = secrets.randbelow(2**31 - 1) + 1
        self._descriptor: int | None = None
        self._is_stamped = False
        """True once the stamp was found in the file itself; before, it may be in the write-ahead log alone."""

    @property
    def locked(self) -> bool:
        """True if the lock beside the file keeps other daemons out, whatever happens to the database."""
        return self._file is not None

    def open(self) -> None:
        """Before loading: take the file at this path as the database from now on. Raises `StoreFailed` if there is
        none, so that SQLite does not create an empty one."""
        if self._file is None:
            return
        found, is_log_gone = self._current_id(), self._is_log_gone()
        if is_log_gone and found == self._file_id:
            self._check_stamp()
            self._save_log()
        if is_log_gone or found != self._file_id:
            self._engine.dispose()  # connections to the former files
            self._write_stamp(self._file)
            self._file_id, self._log, self._log_id = found, f"{os.path.realpath(self._file)}-wal", None
        self._check_stamp()

    def check(self) -> None:
        """After a commit: raises `StoreFailed` if it went into a file that is no longer at this path."""
        if self._file is not None and self._current_id() != self._file_id:
            raise StoreFailed(f"The database {self._file} has been replaced by another file.", remedy="Put it back.")
        if self._is_log_gone():
            raise StoreFailed(f"The log {self._log} has been deleted while it is in use.", remedy="Ask again.")
        self._check_stamp()

    def _save_log(self) -> None:
        """Copy the log into the database, once no one reads from it. Raises `StoreFailed` or SQLAlchemyError."""
        with self._engine.connect() as connection:
            if connection.exec_driver_sql("PRAGMA wal_checkpoint(TRUNCATE)").one()[0]:
                raise StoreFailed(f"The log {self._log} has been deleted while it is read.", remedy="Ask again.")

    def _write_stamp(self, file: Path) -> None:
        """Stamp a file. One that cannot be written is known by its inode alone."""
        self._is_stamped, self._descriptor = False, None
        with suppress(SQLAlchemyError, OSError):
            with self._engine.connect() as connection:
                connection.exec_driver_sql(f"PRAGMA user_version = {self._stamp}")
                connection.exec_driver_sql("PRAGMA wal_checkpoint(PASSIVE)")
            self._descriptor = descriptor_of(file, os.O_RDONLY)

    def _check_stamp(self) -> None:
        if self._descriptor is None:
            return
        try:
            found = _stamp_in(self._descriptor)
        except OSError as error:
            detail = f"The database {self._file} cannot be read: {error.strerror}."
            raise StoreFailed(detail, remedy="Ask again.") from error
        if found != self._stamp and self._is_stamped:
            raise StoreFailed(
                f"The database {self._file} has been overwritten while this daemon uses it; stop the daemon, delete the"
                " -wal and -shm beside it, and restore a backup (docs/databases.md).",
                remedy="Ask again.",
            )
        self._is_stamped = found == self._stamp

    def _is_log_gone(self) -> bool:
        """True if the write-ahead log is no longer the one of the first call."""
        try:
            found = os.stat(self._log)
        except OSError:
            return self._log_id is not None
        self._log_id = self._log_id or (found.st_dev, found.st_ino)
        return self._log_id != (found.st_dev, found.st_ino)

    def _current_id(self) -> tuple[int, int]:
        assert self._file is not None
        try:
            found = self._file.stat()
        except OSError as error:
            detail = f"The database {self._file} cannot be found: {error.strerror}."
            raise StoreFailed(detail, remedy="Put it back.") from error
        return found.st_dev, found.st_ino
