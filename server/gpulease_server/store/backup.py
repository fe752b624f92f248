"""Online backup of an SQLite database: a complete and synced copy, or none.

`VACUUM INTO` reads in one transaction, which blocks no writer in WAL mode. The copy is made under a temporary name,
checked, synced, and only then linked to its final name, which fails if that exists.

A daemon on the copy must not reuse what was given out after the backup: a token that fences off another holder, a
number, a `seq` that a reader of events has passed. So in the copy each counter is raised by `COUNTER_SKIP`.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sqlalchemy import inspect, update
from sqlalchemy.exc import SQLAlchemyError

from gpulease_server.database_settings import sqlite_url
from gpulease_server.store import tables
from gpulease_server.store.database import DatabaseUnusable, connect, database_file, redacted, unusable_error
from gpulease_server.store.dialects import error_message, is_damaged
from gpulease_server.store.file_guard import BACKUP_STAMP
from gpulease_server.store.integrity_check import check_database, check_file, revisions

COUNTER_SKIP = 1_000_000_000
"""More than a daemon can give out between two backups."""


class BackupFailed(DatabaseUnusable):
    """The backup was not made; no file is left."""

    code, title = "backup_failed", "Backup failed"


def backup(url: str, file: Path) -> None:
    """Copy the database of this URL to a new file. Raises `DatabaseUnusable`, and then leaves no file."""
    if database_file(url) is None:
        raise BackupFailed(
            "PostgreSQL is backed up with its own programs, of the server's version.",
            remedy=f"pg_dump --format=custom --file={file} '{_for_libpq(url)}', and pg_restore into an empty database.",
        )
    revisions(url)  # it can be read: then what fails below is the copy
    if file.exists():
        raise BackupFailed(f"{file} exists already.", remedy="Give another name.")
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.touch(mode=0o600, exist_ok=False)
        try:
            _copy(url, partial)
        except SQLAlchemyError as error:
            if is_damaged(error):
                raise
            raise BackupFailed(
                f"{file}: {error_message(error)}.", remedy="Check the directory of the backup and its free space."
            ) from error
        copy = sqlite_url(partial)
        found, newest = revisions(copy)
        # Before an upgrade the schema is an older one: only the file can be checked.
        wrong = check_database(copy) if found in {None, newest} else check_file(copy)
        if wrong:  # this also merges the WAL into the file
            raise BackupFailed(f"The copy is damaged: {wrong[0]}.", remedy="Run gpulease db check on the original.")
        _skip_counters(partial)
        _sync(partial)
        os.link(partial, file)
        _sync(file.absolute().parent)
    except OSError as error:
        raise BackupFailed(
            f"{file}: {error.strerror or error}.", remedy="Check the directory of the backup."
        ) from error
    except SQLAlchemyError as error:
        raise unusable_error(url, error) from error
    finally:
        for beside in ("", "-wal", "-shm", "-journal"):
            with contextlib.suppress(OSError):
                partial.with_name(f"{partial.name}{beside}").unlink()


def _copy(url: str, partial: Path) -> None:
    engine = connect(url)
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql("VACUUM INTO ?", (str(partial.absolute()),))
    finally:
        engine.dispose()


def _skip_counters(partial: Path) -> None:
    made = connect(sqlite_url(partial))
    try:
        with made.begin() as connection:
            connection.execute(update(tables.counter).values(value=tables.counter.c.value + COUNTER_SKIP))
            if any(column["name"] == "database_id" for column in inspect(connection).get_columns("writer")):
                connection.execute(update(tables.writer).values(database_id=None))
            connection.exec_driver_sql(f"PRAGMA user_version = {BACKUP_STAMP}")
    finally:
        made.dispose()


def _sync(path: Path) -> None:
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def _for_libpq(url: str) -> str:
    return redacted(url).replace(":***@", "@")
