"""One daemon per data directory and database."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from types import TracebackType
from typing import Self

from gpulease.errors import GpuleaseError


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

    def __enter__(self) -> Self:
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
            raise AlreadyRunning(
                f"Another gpulease daemon (pid {pid}) uses {self.what}.",
                remedy=f"Stop it first, or give this one another {self.option}.",
            ) from None
        os.ftruncate(file, 0)
        os.pwrite(file, f"{os.getpid()}\n".encode(), 0)
        self._file = file
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._file is not None:
            os.close(self._file)
