"""Opening files that another user may have put in place of a job's own.

A job's log directory belongs to the job's user, and daemon, worker and supervisor may be root: a link there
must not lead them to a file that this user could not read, and a FIFO must not make them wait. Where
`fs.protected_hardlinks` is off any user may make a hard link to any file: only files of the directory's owner count.

A file that has grown over its bound has a hole where its oldest part was (`gpulease_worker.jobs.log_size_limit`).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from itertools import islice
from pathlib import Path

BLOCK_BYTES = 4096
"""Unit in which parts of a log are given back to the file system."""
MARK = b"\n[... gpulease: older output was dropped here ...]\n"
"""Begins a block that was left in a hole, so that a reader by lines finds one."""
MAX_NAMES = 4096
"""Names of a log directory that are looked at."""


def open_beneath(directory: Path, *parts: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file `directory/parts...`, no part of which is a link or leads upwards, and which has
    the same owner as `directory`.

    `directory` itself must lie where only its owner's superior can exchange it. Raises FileNotFoundError when there is
    no such regular file, OSError otherwise; a part that is no plain name raises ValueError.
    """
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        owner = os.fstat(place).st_uid
        for number, part in enumerate(parts, 1):
            if part in ("", ".", "..") or "/" in part:
                raise ValueError(f"{part!r} is not the name of a file")
            last = number == len(parts)
            kind = flags | os.O_NONBLOCK if last else os.O_RDONLY | os.O_DIRECTORY
            inner = os.open(part, kind | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=place)
            os.close(place)
            place = inner
        opened = os.fstat(place)
        if not stat.S_ISREG(opened.st_mode) or opened.st_uid != owner:
            raise FileNotFoundError(f"{'/'.join(parts)} in {directory} is not a regular file of the directory's owner")
    except BaseException:
        os.close(place)
        raise
    return place


def names_in(directory: Path, wanted: re.Pattern[str]) -> list[str]:
    """Names of a log directory that match `wanted` as a whole, in order; at most MAX_NAMES are looked at.

    Raises OSError, also where the directory is a link.
    """
    place = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        with os.scandir(place) as entries:
            return sorted(entry.name for entry in islice(entries, MAX_NAMES) if wanted.fullmatch(entry.name))
    finally:
        os.close(place)


def kept_from(descriptor: int, offset: int) -> int:
    """The first offset at or after `offset` at which bytes are still there; the end of the file if there is none.

    Where the file system does not know holes (NFS before 4.2), what was dropped reads as zeros.
    """
    while True:
        try:
            found = os.lseek(descriptor, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # nothing but a hole, or nothing, up to the end
                return max(offset, os.fstat(descriptor).st_size)
            if error.errno == errno.EINVAL:
                return offset
            raise
        block = found // BLOCK_BYTES * BLOCK_BYTES
        if os.pread(descriptor, len(MARK), block) != MARK:
            return found
        offset = block + BLOCK_BYTES


def tail(directory: Path, *parts: str, size_bytes: int) -> str:
    """The end of such a file, as text; empty where it cannot be read."""
    try:
        descriptor = open_beneath(directory, *parts)
    except (OSError, ValueError):
        return ""
    with os.fdopen(descriptor, "rb") as file:
        file.seek(max(0, os.fstat(descriptor).st_size - size_bytes))
        return file.read(size_bytes).decode(errors="replace")
