"""Whether the database is still where a restart will look for it."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine

from .store import StoreFailed


class Place:
    """The file of an SQLite database, known by device and inode.

    A file that is moved, removed or replaced stays open in the process that has it: commits go on to succeed, into what
    nobody will ever read again. So the name is looked at after each of them. Any other database is not looked after.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        name = engine.url.database
        self._file = Path(name).absolute() if engine.dialect.name == "sqlite" and name else None
        self._known: tuple[int, int] | None = None

    @property
    def guarded(self) -> bool:
        """True when the lock beside the file keeps other daemons out, whatever becomes of the database."""
        return self._file is not None

    def open(self) -> None:
        """Before reading: from here on the file that has the name now is the database. Raises `StoreFailed` if there is
        none, lest SQLite make an empty one."""
        if self._file is None:
            return
        found = self._identity()
        if found != self._known:
            self._engine.dispose()  # connections to what had the name before
            self._known = found

    def check(self) -> None:
        """After a commit. Raises `StoreFailed` when it went into a file that does not have the name any more."""
        if self._file is not None and self._identity() != self._known:
            raise StoreFailed(f"The database {self._file} has been replaced by another file.", remedy="Put it back.")

    def _identity(self) -> tuple[int, int]:
        assert self._file is not None
        try:
            found = self._file.stat()
        except OSError as error:
            detail = f"The database {self._file} is not there: {error.strerror}."
            raise StoreFailed(detail, remedy="Put it back.") from error
        return found.st_dev, found.st_ino
