"""Detects that the file of an SQLite database was moved, removed or replaced."""

from __future__ import annotations

from pathlib import Path

from sqlalchemy import Engine

from gpulease_server.store.ledger_store import StoreFailed


class FileGuard:
    """The file of an SQLite database, known by device and inode.

    A file that is moved, removed or replaced stays open in this process: commits still succeed, into a file that no
    restart will read. So the path is checked after each commit. Other databases are not checked.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        name = engine.url.database
        self._file = Path(name).absolute() if engine.dialect.name == "sqlite" and name else None
        self._file_id: tuple[int, int] | None = None

    @property
    def locked(self) -> bool:
        """True if the lock beside the file keeps other daemons out, whatever happens to the database."""
        return self._file is not None

    def open(self) -> None:
        """Before loading: take the file at this path as the database from now on. Raises `StoreFailed` if there is
        none, so that SQLite does not create an empty one."""
        if self._file is None:
            return
        found = self._current_id()
        if found != self._file_id:
            self._engine.dispose()  # connections to the former file
            self._file_id = found

    def check(self) -> None:
        """After a commit: raises `StoreFailed` if it went into a file that is no longer at this path."""
        if self._file is not None and self._current_id() != self._file_id:
            raise StoreFailed(f"The database {self._file} has been replaced by another file.", remedy="Put it back.")

    def _current_id(self) -> tuple[int, int]:
        assert self._file is not None
        try:
            found = self._file.stat()
        except OSError as error:
            detail = f"The database {self._file} cannot be found: {error.strerror}."
            raise StoreFailed(detail, remedy="Put it back.") from error
        return found.st_dev, found.st_ino
