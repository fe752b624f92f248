"""A copy of an SQLite database, taken while a daemon writes to it: complete and on the disk, or not there at all.

`VACUUM INTO` reads in one transaction, for which WAL makes no writer wait. The copy is made beside the file under
another name, synced, looked through, and only then linked to its own name, which fails if that is taken.

A daemon on the copy must not give out again what was given out after the copy was made: a token that fences off
somebody else, a number, a `seq` below which a reader of events has seen everything. So in the copy the next of each
is `AHEAD` further on.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from sqlalchemy import update
from sqlalchemy.exc import SQLAlchemyError

from . import tables
from .database import DatabaseUnusable, connect, database_file, shown, unusable
from .dialects import file_of
from .examine import examine, require_there

AHEAD = 1_000_000_000
"""Over all that a daemon can give out between two backups."""


class BackupFailed(DatabaseUnusable):
    """The backup was not made; nothing is left of it."""

    code, title = "backup_failed", "Backup failed"


def backup(url: str, file: Path) -> None:
    """Copy the database of this URL to a new file. Raises `DatabaseUnusable`, and leaves no file then."""
    if database_file(url) is None:
        raise BackupFailed(
            "PostgreSQL has programs of its own for this, which have to be of the server's version.",
            remedy=f"pg_dump --format=custom --file={file} '{_for_libpq(url)}', and pg_restore into an empty database.",
        )
    require_there(url)
    if file.exists():
        raise BackupFailed(f"{file} is there already.", remedy="Give a name that is free.")
    partial = file.with_name(f".{file.name}.{os.getpid()}.partial")
    try:
        partial.touch(mode=0o600, exist_ok=False)
        _copy(url, partial)
        wrong = examine(f"sqlite:///{partial.absolute()}")
        if wrong:  # besides, the last connection to close has left one file, with no log beside it
            raise BackupFailed(f"The copy is wrong: {wrong[0]}.", remedy="Ask `gpulease db check` about the original.")
        _move_ahead(partial)
        _sync(partial)
        os.link(partial, file)
        _sync(file.absolute().parent)
    except OSError as error:
        raise BackupFailed(f"{file}: {error.strerror or error}.", remedy="Look at the place for the backup.") from error
    except SQLAlchemyError as error:
        raise unusable(url, error) from error
    finally:
        for name in (partial, partial.with_name(f"{partial.name}-wal"), partial.with_name(f"{partial.name}-shm")):
            with contextlib.suppress(OSError):
                name.unlink()


def _copy(url: str, partial: Path) -> None:
    engine = connect(url)
    try:
        with engine.connect() as connection:
            file_of(connection).execute("VACUUM INTO ?", (str(partial.absolute()),))
    finally:
        engine.dispose()


def _move_ahead(partial: Path) -> None:
    made = connect(f"sqlite:///{partial.absolute()}")
    try:
        with made.begin() as connection:
            connection.execute(update(tables.counter).values(value=tables.counter.c.value + AHEAD))
    finally:
        made.dispose()


def _sync(path: Path) -> None:
    place = os.open(path, os.O_RDONLY)
    try:
        os.fsync(place)
    finally:
        os.close(place)


def _for_libpq(url: str) -> str:
    return shown(url).replace(":***@", "@")
