"""Keeps the log files of a job to a bound on disk, while the job writes them itself.

There is no pipe between a job and its files, so that nothing of ours can stall it or, by dying, end it. Instead the
oldest blocks of a file that has grown over the bound are given back to the file system (`fallocate`, punch hole). Its
length and the place of every byte in it stay as they were: who reads goes on by offset, and finds the hole by SEEK_DATA
(`gpulease.log_files.kept_from`).

Where the file system cannot punch holes the file is emptied and set back to its length, with its last part written to
its place again; what the job writes in that moment may be lost.

torchrun and accelerate copy what a rank writes, line by line, from its file. One that falls behind by more than the
bound finds the hole, as a line of zeros that it would hold in memory whole. So a mark with a line feed stays every
MARK_EVERY_BYTES.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpulease.log_files import BLOCK_BYTES, MARK, kept_from, names_in, open_beneath

LAUNCHER = "launcher.log"
NAME = re.compile(r"launcher\.log|rank-\d{1,4}\.log")
LOOK_S = (0.02, 1.0)
"""First and longest pause between two looks: shorter while files grow fast."""
MARK_EVERY_BYTES = 16 * 2**20
MARKED_BYTES = 16 * 2**30
"""How far back from the end marks are kept; who is further behind than that has given up."""
REWRITTEN_BYTES = 2**22
"""How much of the end of a file is kept where holes cannot be punched."""
PUNCH = 0x1 | 0x2
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of linux/falloc.h."""
CANNOT = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def punch(descriptor: int, start: int, end: int) -> None:
    """Give the blocks of a part of a file back. Raises OSError, with a number of CANNOT where that is not possible."""
    if end > start and _libc.fallocate(descriptor, PUNCH, start, end - start):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


class LogBound:
    """The log files of one job, looked at by its supervisor.

    Args:
        logs: The directory, which may be another user's.
        bound_bytes: How much of a file stays on disk; a file is cut back to this when it is a quarter over it.
        uid: Whose files they are. A file of anybody else's is left alone, whatever its name.
        say: Takes a line that somebody should see.
    """

    def __init__(self, logs: Path, bound_bytes: int, uid: int, say: Callable[[str], None]) -> None:
        self._logs = logs
        self._bound_bytes = max(bound_bytes, BLOCK_BYTES)
        self._uid = uid
        self._say = say
        self._pause_s = LOOK_S[0]
        self._seen: dict[str, tuple[int, int]] = {}
        """Inode and length of each file at the last look."""
        self._told = False
        self.next_at_s = 0.0
        """When to look again, by the monotonic clock."""

    def look(self) -> None:
        """Cut what has grown too long, if it is time to look."""
        if time.monotonic() < self.next_at_s:
            return
        grown = 0
        with suppress(OSError):  # the user may have removed his directory
            for name in names_in(self._logs, NAME):
                with suppress(OSError):
                    grown = max(grown, self._look_at(name))
        fast = grown > self._bound_bytes // 16
        self._pause_s = LOOK_S[0] if fast else min(self._pause_s * 1.5, LOOK_S[1])
        self.next_at_s = time.monotonic() + self._pause_s

    def finish(self) -> None:
        """Look once more, now that nothing writes."""
        self.next_at_s = 0.0
        self.look()

    def _look_at(self, name: str) -> int:
        """Cut one file. Returns by how many bytes it has grown."""
        status = os.stat(self._logs / name, follow_symlinks=False)
        inode, before = self._seen.get(name, (status.st_ino, 0))
        self._seen[name] = (status.st_ino, status.st_size)
        if status.st_blocks * 512 > self._bound_bytes + self._bound_bytes // 4:
            self._cut(name)
        return status.st_size - before if inode == status.st_ino else status.st_size

    def _cut(self, name: str) -> None:
        try:
            descriptor = open_beneath(self._logs, name, flags=os.O_RDWR)
        except OSError as error:
            self._say(f"{name} cannot be kept to its bound: {error}")
            return
        try:
            status = os.fstat(descriptor)
            end = (status.st_size - self._bound_bytes) // BLOCK_BYTES * BLOCK_BYTES
            # Asked of the file each time: the job may have cut it itself, and written it anew.
            begin = kept_from(descriptor, 0) // BLOCK_BYTES * BLOCK_BYTES
            if status.st_uid == self._uid and begin < end:
                self._drop(descriptor, begin, end, marked=name != LAUNCHER)
        except OSError as error:
            self._say(f"{name} cannot be kept to its bound: {error}")
        finally:
            os.close(descriptor)

    def _drop(self, descriptor: int, begin: int, end: int, marked: bool) -> None:
        """Give back what lies between, which is the oldest part of the file."""
        try:
            if marked:
                punch_marked(descriptor, begin, end)
            else:
                punch(descriptor, begin, end)
        except OSError as error:
            if error.errno not in CANNOT:
                raise
            self._tell(error)
            rewrite(descriptor, min(self._bound_bytes // 2, REWRITTEN_BYTES))

    def _tell(self, error: OSError) -> None:
        if not self._told:
            self._told = True
            self._say(
                f"the file system of {self._logs} cannot punch holes ({error.strerror}); of a log over"
                f" {self._bound_bytes} bytes only the last {min(self._bound_bytes // 2, REWRITTEN_BYTES)} are kept"
            )


def punch_marked(descriptor: int, begin: int, end: int) -> None:
    """Punch between, but for a mark at every MARK_EVERY_BYTES. Raises OSError as `punch`."""
    punch(descriptor, 0, min(begin, end - MARKED_BYTES))
    while begin < end:
        after = min(end, (begin // MARK_EVERY_BYTES + 1) * MARK_EVERY_BYTES)
        if begin % MARK_EVERY_BYTES == 0:
            punch(descriptor, begin + BLOCK_BYTES, after)
            os.pwrite(descriptor, MARK, begin)
        else:
            punch(descriptor, begin, after)
        begin = after


def rewrite(descriptor: int, kept_bytes: int) -> None:
    """Give all of a file back but its last part, with plain truncation, which every file system has.

    The file is as long as before, so that whoever appends to it does so at the same place. What is appended between
    the first and the last step is lost.
    """
    size = os.fstat(descriptor).st_size
    start = max(0, (size - kept_bytes) // BLOCK_BYTES * BLOCK_BYTES)
    kept = os.pread(descriptor, size - start, start)
    os.ftruncate(descriptor, 0)
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    os.pwrite(descriptor, kept, start)
