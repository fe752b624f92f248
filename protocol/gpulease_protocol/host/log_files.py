"""Opening files that another user may have put in place of a job's own.

A job's log directory belongs to the job's user, and daemon, worker and supervisor may be root: a link there
must not lead them to a file that this user could not read, and a FIFO must not make them wait. Where
`fs.protected_hardlinks` is off any user may make a hard link to any file: only files of the directory's owner count.

The user may also mount a file system there (FUSE) that never answers: who asks it anything hangs, without a remedy. So
each name is looked up as a handle (O_PATH) and compared by its mount, which asks no file system, before it is used.

A file that has grown over its bound has a hole where its oldest part was (`gpulease_worker.jobs.log_size_limit`).
"""

from __future__ import annotations

import errno
import os
import re
import stat
from collections.abc import Iterator
from contextlib import suppress
from itertools import islice
from pathlib import Path

BLOCK_BYTES = 4096
"""Unit in which parts of a log are given back to the file system."""
MARK = b"\n[... gpulease: older output was dropped here ...]\n"
"""Begins a block that was left in a hole, so that a reader by lines finds one."""
MAX_NAMES = 4096
"""Names of a log directory that are looked at."""


def open_beneath(directory: Path, *parts: str, flags: int = os.O_RDONLY) -> int:
    """A descriptor of the regular file `directory/parts...`, no part of which is a link, leads upwards or lies on
    another mount, and which has the same owner as `directory`.

    `directory` itself must lie where only its owner's superior can exchange it. Raises FileNotFoundError when there is
    no such regular file, OSError otherwise; a part that is no plain name raises ValueError.
    """
    place = _look_up_directory(directory)
    try:
        owner, mount = os.fstat(place).st_uid, mount_id(place)
        for number, part in enumerate(parts, 1):
            if part in ("", ".", "..") or "/" in part:
                raise ValueError(f"{part!r} is not the name of a file")
            if number < len(parts):
                inner = _look_up(part, place, mount, os.O_DIRECTORY)
            else:
                if flags & os.O_CREAT:
                    _create(part, place)
                inner = _look_up(part, place, mount)
            os.close(place)
            place = inner
        found = os.fstat(place)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != owner:
            raise FileNotFoundError(f"{'/'.join(parts)} in {directory} is not a regular file of the directory's owner")
        return _reopened(place, (flags & ~os.O_CREAT) | os.O_NONBLOCK)
    finally:
        os.close(place)


def open_directory(directory: Path) -> int:
    """A descriptor of a log directory. Raises OSError, also where it is a link or a file system is mounted on it."""
    place = _look_up_directory(directory)
    try:
        return _reopened(place, os.O_RDONLY | os.O_DIRECTORY)
    finally:
        os.close(place)


def stat_beneath(directory: Path, name: str) -> os.stat_result:
    """The status of a name in a log directory, of a link itself. Raises OSError, also where it is on another mount."""
    place = _look_up_directory(directory)
    try:
        return _status(name, place, mount_id(place))
    finally:
        os.close(place)


def statuses_in(directory: Path, wanted: re.Pattern[str]) -> Iterator[tuple[str, os.stat_result]]:
    """As `names_in`, each with its status as by `stat_beneath`; without those that have none. Looks the directory up
    once, not for each of thousands."""
    names, place = names_in(directory, wanted), _look_up_directory(directory)
    try:
        mount = mount_id(place)
        for name in names:
            with suppress(OSError):
                yield name, _status(name, place, mount)
    finally:
        os.close(place)


def names_in(directory: Path, wanted: re.Pattern[str]) -> list[str]:
    """Names of a log directory that match `wanted` as a whole, in order; at most MAX_NAMES are looked at.

    Raises OSError, also where the directory is a link, or a file system is mounted on it.
    """
    place = open_directory(directory)
    try:
        with os.scandir(place) as entries:
            return sorted(entry.name for entry in islice(entries, MAX_NAMES) if wanted.fullmatch(entry.name))
    finally:
        os.close(place)


def _look_up_directory(directory: Path) -> int:
    """A handle of a directory that is on the mount of the one that it lies in."""
    parent = os.open(directory.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        return _look_up(directory.name, parent, mount_id(parent), os.O_DIRECTORY)
    finally:
        os.close(parent)


def _look_up(name: str, place: int, mount: int, flags: int = 0) -> int:
    """A handle (O_PATH) of a name in a directory; of a link itself. Raises OSError where it is not on this mount."""
    inner = os.open(name, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC | flags, dir_fd=place)
    if mount_id(inner) != mount:
        os.close(inner)
        raise OSError(errno.EXDEV, "a file system is mounted on it", name)
    return inner


def _status(name: str, place: int, mount: int) -> os.stat_result:
    inner = _look_up(name, place, mount)
    try:
        return os.fstat(inner)
    finally:
        os.close(inner)


def _create(name: str, place: int) -> None:
    """Create an empty file unless the name is taken."""
    with suppress(FileExistsError):
        os.close(os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600, dir_fd=place))


def mount_id(descriptor: int) -> int:
    """The mount that a descriptor is on. Asks the kernel alone, never the file system."""
    with open(f"/proc/self/fdinfo/{descriptor}", "rb", buffering=0) as file:
        return int(file.read().partition(b"mnt_id:")[2].split()[0])


def _reopened(handle: int, flags: int) -> int:
    """A descriptor that can be read or written, of what a handle stands for."""
    return os.open(f"/proc/self/fd/{handle}", flags | os.O_CLOEXEC)


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
