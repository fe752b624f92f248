"""Detaches what the user of a job has mounted in the job's directory, before root removes it.

The user owns directories there and may mount a file system of their own on one (FUSE, fusermount3). Root can be refused
there, or hang, and must delete nothing in it. So it is detached first (umount2, MNT_DETACH); one that an ordinary user
serves is aborted as well (MNT_FORCE), which ends whatever hangs in it.

The user may also exchange directories for links while root looks. So a path from the kernel's list of mounts is not
followed as such: each part is looked up in the directory before it, as a handle, and compared by its mount. That asks
no file system anything, and what is detached is the first mount on the way.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from pathlib import Path

from gpulease_protocol.host.log_files import mount_id

DETACH_S = 5.0
"""How long to go on while the user mounts again and again."""
MOUNTS = Path("/proc/self/mountinfo")
MNT_FORCE, MNT_DETACH, UMOUNT_NOFOLLOW = 1, 2, 8
ESCAPED = re.compile(rb"\\([0-7]{3})")
SERVED_BY = re.compile(rb"(?:^|,)user_id=(\d+)(?:,|$)")

_libc = ctypes.CDLL(None, use_errno=True)


def detach_beneath(directory: Path) -> int:
    """Detach all that is mounted beneath a directory, and return how many mounts that were; 0 unless this is root.

    The directory itself must lie where no user can exchange it.
    """
    if os.geteuid() != 0:
        return 0
    root = os.path.join(os.path.realpath(os.fsencode(directory.parent)), os.fsencode(directory.name))
    detached, until_s = 0, time.monotonic() + DETACH_S
    while (found := mounts_beneath(root)) and time.monotonic() < until_s:
        users = {number for number, _, of_user in found if of_user}
        number = sum(_detach_first(root, path, users) for _, path, _ in found)
        if number == 0:
            break
        detached += number
    return detached


def mounts_beneath(root: bytes) -> list[tuple[int, bytes, bool]]:
    """What is mounted beneath a directory: number, path below it, and whether an ordinary user serves it by FUSE."""
    found = []
    for line in MOUNTS.read_bytes().splitlines():
        place, _, system = line.partition(b" - ")
        fields, (kind, _, options) = place.split(b" "), system.split(b" ", 2)
        path = ESCAPED.sub(lambda match: bytes([int(match[1], 8)]), fields[4])
        if path.startswith(root + b"/"):
            user = SERVED_BY.search(options)
            of_user = kind.split(b".")[0] == b"fuse" and user is not None and int(user[1]) != 0
            found.append((int(fields[0]), path[len(root) + 1 :], of_user))
    return found


def _detach_first(root: bytes, path: bytes, users: set[int]) -> bool:
    """Detach the first mount on the way to a path; False if there is none any more."""
    place = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        mount = mount_id(place)
        for part in path.split(b"/"):
            inner = os.open(part, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=place)
            if (number := mount_id(inner)) != mount:
                os.close(inner)
                flags = MNT_DETACH | UMOUNT_NOFOLLOW | (MNT_FORCE if number in users else 0)
                result: int = _libc.umount2(b"/proc/self/fd/%d/%s" % (place, part), flags)
                return result == 0
            os.close(place)
            place = inner
    except OSError:  # it was removed meanwhile, or is a link now
        pass
    finally:
        os.close(place)
    return False
