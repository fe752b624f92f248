"""Who has a device file open, of all processes of the node: by a descriptor, or mapped into memory.

The driver's process lists do not tell: it may take a process off its list before it has given the memory back, and the
forked children of a dead rank keep the device without ever being listed. Here names are compared, not the files behind
them, because looking at a file that lies on a network may hang.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpulease.owner import stat
from gpulease_worker import patience, processes

KERNEL_THREADS = 2
"""Pid of kthreadd, the parent of every kernel thread."""
GONE = " (deleted)"
"""What the kernel appends to the name of a file that has been removed."""


@dataclass(slots=True)
class Openers:
    """What one look at every process has found."""

    by_path: dict[str, list[processes.Identity]] = field(default_factory=dict)
    """Processes that have a file open or mapped, by its path."""
    unreadable: int = 0
    """Processes that this user may not look into."""


def openers(paths: Collection[str]) -> Openers:
    """Who has these files open, save the caller. One walk of /proc, some tens of microseconds for each process."""
    found = Openers()
    wanted = set(paths)
    seen = {pid: one for pid in processes.pids() if pid != os.getpid() and (one := stat(pid)) is not None}
    seen = {pid: one for pid, one in seen.items() if KERNEL_THREADS not in (pid, one.parent)}
    looks: list[Callable[[str, set[str]], set[str]]] = [_descriptors, _mapped]
    has: dict[int, set[str]] = {}
    closed: set[int] = set()
    for look in looks:

        def at(pid: int, look: Callable[[str, set[str]], set[str]] = look) -> set[str] | None:
            return _open_in(pid, wanted, seen[pid].headless, look)

        # A process whose map cannot be read, because it hangs, may still have told what its descriptors are.
        shown = patience.each(at, seen)
        for pid, paths_found in shown.items():
            has.setdefault(pid, set()).update(paths_found or ())
        closed |= {pid for pid in seen if pid not in shown or shown[pid] is None}
    found.unreadable = len(closed)
    for pid, paths_found in has.items():
        for path in paths_found:
            found.by_path.setdefault(path, []).append(processes.Identity(pid, seen[pid].start_ticks))
    return found


def _open_in(pid: int, wanted: set[str], headless: bool, look: Callable[[str, set[str]], set[str]]) -> set[str] | None:
    """Which of the files a process has open; None where that is not told. Where its first thread has ended, the others
    tell."""
    has: set[str] = set()
    try:
        for place in _other_tasks(pid) if headless else (f"/proc/{pid}",):
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended, and has nothing open
                has |= look(place, wanted)
    except PermissionError:
        return None
    except OSError:
        return set()
    return has


def _other_tasks(pid: int) -> Iterator[str]:
    with os.scandir(f"/proc/{pid}/task") as entries:
        yield from [entry.path for entry in entries if entry.name != str(pid)]


def _descriptors(process: str, wanted: set[str]) -> set[str]:
    has = set()
    with os.scandir(f"{process}/fd") as entries:
        for entry in entries:
            with suppress(FileNotFoundError):  # closed in the meantime
                path = os.readlink(entry.path).removesuffix(GONE)
                if path in wanted:
                    has.add(path)
    return has


def _mapped(process: str, wanted: set[str]) -> set[str]:
    maps = Path(f"{process}/maps").read_bytes()
    likely = [path for path in wanted if path.encode() in maps]
    if not likely:
        return set()
    names = {line.partition("/")[2].removesuffix(GONE) for line in maps.decode(errors="replace").splitlines()}
    return {path for path in likely if path.removeprefix("/") in names}
