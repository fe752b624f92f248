"""Limits the size on disk of a job's log files, while the job writes them itself.

There is no pipe between a job and its files, so that no process of gpulease can stall the job or end it by exiting.
Instead, when a file exceeds the limit, its oldest blocks are returned to the file system (`fallocate`, punch hole). Its
length and every byte's offset stay the same: readers continue by offset, and find the hole by SEEK_DATA
(`gpulease_protocol.host.log_files.kept_from`).

Where the file system cannot punch holes, the file is truncated and extended to its former length, and its last part is
written back to its offset; what the job writes at that moment may be lost.

While the disk is nearly full, only the last MiB of each file stays: the rest of the disk is for others, and for the
ledger, without which not even the job that prints could be cancelled.

torchrun and accelerate copy what a rank writes, line by line, from its file. If they fall behind by more than the
limit they read the hole, as one line of zeros that they would hold in memory whole. So a mark with a line feed stays
every MARK_EVERY_BYTES.
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

from gpulease_protocol.host.log_files import BLOCK_BYTES, MARK, kept_from, open_beneath, statuses_in

LAUNCHER = "launcher.log"
NAME = re.compile(r"launcher\.log|rank-\d{1,4}\.log")
CHECK_S = (0.02, 1.0)
"""First and longest pause between two checks: shorter while files grow fast."""
MARK_EVERY_BYTES = 16 * 2**20
MARKED_BYTES = 16 * 2**30
"""How far back from the end marks are kept; no reader is expected further behind."""
KEPT_BY_REWRITE_BYTES = 2**22
"""How much of the end of a file is kept where holes cannot be punched."""
SHORT_DISK_BYTES, SHORT_DISK_RATIO = 2**30, 0.05
"""The disk is nearly full when less is free than the first, or than this share of it if that is less."""
KEPT_ON_SHORT_DISK_BYTES = 2**20
"""How much of each file stays then."""
PUNCH = 0x1 | 0x2
"""FALLOC_FL_KEEP_SIZE and FALLOC_FL_PUNCH_HOLE of linux/falloc.h."""
UNSUPPORTED = {errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL, errno.ENODEV}

_libc = ctypes.CDLL(None, use_errno=True)
_libc.fallocate.argtypes = (ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64)


def punch(descriptor: int, start: int, end: int) -> None:
    """Return the blocks of a part of a file to the file system. Raises OSError; its errno is in
    UNSUPPORTED where that is not possible."""
    if end > start and _libc.fallocate(descriptor, PUNCH, start, end - start):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def bytes_before_short(directory: Path) -> int:
    """How much more may be written until the disk of a directory is nearly full; 0 or less while it is. Raises
    OSError."""
    found = os.statvfs(directory)
    reserve_bytes = min(SHORT_DISK_BYTES, int(found.f_blocks * found.f_frsize * SHORT_DISK_RATIO))
    return found.f_bavail * found.f_frsize - reserve_bytes


class LogSizeLimiter:
    """Limits the log files of one job; run by its supervisor.

    Args:
        logs: The directory, which may be another user's.
        limit_bytes: How much of a file stays on disk; a file that exceeds this by a quarter is cut back to it.
        uid: The user who owns the files. A file of any other user is left alone, whatever its name.
        log_error: Called with a line for `supervisor.log`.
    """

    def __init__(self, logs: Path, limit_bytes: int, uid: int, log_error: Callable[[str], None]) -> None:
        self._logs = logs
        self._limit_bytes = max(limit_bytes, BLOCK_BYTES)
        self._uid = uid
        self._log_error = log_error
        self._pause_s = CHECK_S[0]
        self._sizes: dict[str, tuple[int, int]] = {}
        """Inode and length of each file at the last check."""
        self._fallback_logged = False
        self._short_logged = False
        self.next_at_s = 0.0
        """When to check again, by the monotonic clock."""

    def check(self) -> None:
        """Cut the files that have grown too long, if it is time for a check."""
        if time.monotonic() < self.next_at_s:
            return
        grown, limit_bytes, room_bytes = 0, self._limit_bytes, self._limit_bytes
        with suppress(OSError):  # the user may have removed the directory
            room_bytes = bytes_before_short(self._logs.parent)  # the user can mount nothing there
            if room_bytes <= 0:
                limit_bytes = room_bytes = min(limit_bytes, KEPT_ON_SHORT_DISK_BYTES)
                self._log_short_disk(limit_bytes)
            for name, status in statuses_in(self._logs, NAME):
                grown += self._check_file(name, status, limit_bytes)
        fast = grown > min(limit_bytes, room_bytes) // 16
        self._pause_s = CHECK_S[0] if fast else min(self._pause_s * 1.5, CHECK_S[1])
        self.next_at_s = time.monotonic() + self._pause_s

    def finish(self) -> None:
        """Check once more, after the last process of the job has ended."""
        self.next_at_s = 0.0
        self.check()

    def _check_file(self, name: str, status: os.stat_result, limit_bytes: int) -> int:
        """Cut one file if it is too long. Returns by how many bytes it has grown."""
        inode, before = self._sizes.get(name, (status.st_ino, 0))
        self._sizes[name] = (status.st_ino, status.st_size)
        if status.st_blocks * 512 > limit_bytes + limit_bytes // 4:
            self._cut(name, limit_bytes)
        return status.st_size - before if inode == status.st_ino else status.st_size

    def _cut(self, name: str, limit_bytes: int) -> None:
        try:
            descriptor = open_beneath(self._logs, name, flags=os.O_RDWR)
        except OSError as error:
            self._log_error(f"{name} cannot be cut to its limit: {error}")
            return
        try:
            status = os.fstat(descriptor)
            end = (status.st_size - limit_bytes) // BLOCK_BYTES * BLOCK_BYTES
            # Read from the file each time: the job may have truncated and rewritten it.
            begin = kept_from(descriptor, 0) // BLOCK_BYTES * BLOCK_BYTES
            if status.st_uid == self._uid and begin < end:
                self._remove(descriptor, begin, end, marked=name != LAUNCHER)
        except OSError as error:
            self._log_error(f"{name} cannot be cut to its limit: {error}")
        finally:
            os.close(descriptor)

    def _remove(self, descriptor: int, begin: int, end: int, marked: bool) -> None:
        """Return the blocks in between, the oldest part of the file, to the file system."""
        try:
            if marked:
                punch_marked(descriptor, begin, end)
            else:
                punch(descriptor, begin, end)
        except OSError as error:
            if error.errno not in UNSUPPORTED:
                raise
            self._log_fallback(error)
            rewrite(descriptor, min(self._limit_bytes // 2, KEPT_BY_REWRITE_BYTES))

    def _log_short_disk(self, limit_bytes: int) -> None:
        if not self._short_logged:
            self._short_logged = True
            self._log_error(f"the disk is nearly full: of each log only the last {limit_bytes} bytes are kept")

    def _log_fallback(self, error: OSError) -> None:
        if not self._fallback_logged:
            self._fallback_logged = True
            self._log_error(
                f"the file system of {self._logs} cannot punch holes ({error.strerror}); of a log over"
                f" {self._limit_bytes} bytes only the last"
                f" {min(self._limit_bytes // 2, KEPT_BY_REWRITE_BYTES)} are kept"
            )


def punch_marked(descriptor: int, begin: int, end: int) -> None:
    """Punch a hole, except for a mark at every MARK_EVERY_BYTES. Raises OSError like `punch`."""
    marked_from = end - MARKED_BYTES
    punch(descriptor, 0, marked_from)
    begin = max(begin, marked_from)  # a job can make its file as long as it likes, with nothing in it
    while begin < end:
        after = min(end, (begin // MARK_EVERY_BYTES + 1) * MARK_EVERY_BYTES)
        if begin % MARK_EVERY_BYTES == 0:
            punch(descriptor, begin + BLOCK_BYTES, after)
            os.pwrite(descriptor, MARK, begin)
        else:
            punch(descriptor, begin, after)
        begin = after


def rewrite(descriptor: int, kept_bytes: int) -> None:
    """Keep only the last part of a file, by plain truncation, which every file system supports.

    The file keeps its length, so that writers append at the same offset. What is appended between the first and the
    last step is lost.
    """
    size = os.fstat(descriptor).st_size
    start = max(0, (size - kept_bytes) // BLOCK_BYTES * BLOCK_BYTES)
    kept = os.pread(descriptor, size - start, start)
    os.ftruncate(descriptor, 0)
    if os.fstat(descriptor).st_size < size:
        os.ftruncate(descriptor, size)
    os.pwrite(descriptor, kept, start)
