"""A reserve of disk that the ledger alone may use: blocks behind the end of its files.

Anyone on the host can fill the disk, a job that prints in a loop for one. SQLite could then commit nothing, and not
even the job that fills the disk could be cancelled. So blocks are allocated beyond the end of the database and of its
write-ahead log (fallocate(2) with FALLOC_FL_KEEP_SIZE). The files become no longer, no other file can have these
blocks, and a commit that extends a file takes them instead of new ones.

States: `is_short` is false while the whole reserve is allocated, and true from the first time it could not be.

| what happens | what follows |
|---|---|
| the disk fills up | commits go on in the reserve, until it cannot be topped up: `is_short` |
| `is_short` | new lease requests and jobs get 503; releases, cancellations and reports go on |
| the reserve is used up | the outage of a full disk (`runtime.outage`), as without a reserve |
| space is free again | the next `top_up` allocates the whole reserve, and new requests are taken in |
| the file system cannot allocate in advance (ZFS, NFS before 4.2) | there is no reserve; logged once |
| a copy-on-write file system (btrfs) | a page that is written again needs a new block, so the reserve is worth less |
| the daemon ends | the log is removed with its reserve, so a start on a full disk fails |
| PostgreSQL | its disk is its server's: no reserve |
"""

from __future__ import annotations

import ctypes
import errno
import logging
import os
from contextlib import suppress
from pathlib import Path

from sqlalchemy import Engine

from gpulease_server.store.file_guard import descriptor_of
from gpulease_server.store.log_limit import LogLimit

log = logging.getLogger("gpulease.store")

DATABASE_RESERVE_BYTES = 4 * 2**20
"""Behind the end of the database: a lease or job that ends takes some 2 kB of it."""
LOG_RESERVE_BYTES = 8 * 2**20
"""Behind the end of the write-ahead log, which is used again from its beginning after some 4 MiB."""
FALLOC_FL_KEEP_SIZE = 0x1
UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


class DiskReserve:
    """The reserve of one SQLite database. It blocks, and is used from the thread that commits.

    Args:
        engine: The database.
    """

    def __init__(self, engine: Engine) -> None:
        name = engine.url.database
        self._file = Path(os.path.realpath(name)) if engine.dialect.name == "sqlite" and name else None
        self._log_limit = LogLimit(engine, Path(f"{self._file}-wal")) if self._file is not None else None
        self._unsupported = False
        self.is_short = False
        """True while the whole reserve cannot be allocated, because the disk is full."""

    def top_up(self) -> None:
        """Shorten a log that is too long, allocate what is missing of the reserve, and note whether that succeeded.
        Raises nothing."""
        if self._file is None or self._log_limit is None:
            return
        self._log_limit.keep()
        if self._unsupported:
            return
        was_short, self.is_short = self.is_short, False
        for path, size_bytes in ((self._file, DATABASE_RESERVE_BYTES), (self._log_limit.file, LOG_RESERVE_BYTES)):
            with suppress(FileNotFoundError):  # the log is made by the first commit
                self._allocate(path, size_bytes)
        if self.is_short and not was_short:
            log.error(
                "the disk of %s is full: new requests are refused; what is reserved for the ledger is left for releases"
                " and cancellations",
                self._file,
            )
        elif was_short and not self.is_short:
            log.warning("the disk of %s has space again", self._file)

    def _allocate(self, path: Path, size_bytes: int) -> None:
        try:
            descriptor = descriptor_of(path, os.O_RDWR)
            end = os.fstat(descriptor).st_size
            if _libc.fallocate(descriptor, FALLOC_FL_KEEP_SIZE, end, size_bytes):
                number = ctypes.get_errno()
                raise OSError(number, os.strerror(number))
        except FileNotFoundError:
            raise
        except OSError as error:
            if error.errno in (errno.ENOSPC, errno.EDQUOT):
                self.is_short = True
            elif error.errno in UNSUPPORTED:
                self._unsupported = True
                log.warning("no disk can be reserved for %s: its file system does not allocate in advance", path)
            else:
                log.warning("no disk can be reserved for %s: %s", path, error.strerror)
