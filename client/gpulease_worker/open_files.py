"""Who has a device file open, of all processes of the node: by a descriptor, or mapped into memory.

The driver's process lists do not tell: it may take a process off its list before it has given the memory back, and the
forked children of a dead rank keep the device without ever being listed. Here names are compared, not the files behind
them, because looking at a file that lies on a network may hang.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from gpulease.owner import stat
from gpulease_worker import patience, processes

WAIT_S = 0.25
"""How long a reading that nobody waits for waits for a look: long enough for a host of a thousand processes."""
PAUSES, LONGEST_PAUSE_S = 10, 1.0
"""How many times as long as a look the pause after it is, and the longest one."""
KERNEL_THREADS = 2
"""Pid of kthreadd, the parent of every kernel thread."""
Sought = tuple[str, str]
"""Path of a device file, and the lease that has ended on its GPU."""
GONE = " (deleted)"
"""What the kernel appends to the name of a file that has been removed."""


@dataclass(slots=True)
class Openers:
    """What one look at every process has found."""

    by_path: dict[str, list[processes.Identity]] = field(default_factory=dict)
    """Processes that have a file open or mapped, by its path."""
    unreadable: int = 0
    """Processes that this user may not look into."""


class Looker:
    """Looks who has the device files of draining GPUs open, beside the readings.

    A look takes as long as the host has processes and open files, a second for some thousand, and hangs where one of
    them does so in the kernel. A reading that waited would miss its deadline, and every GPU of the node be unknown for
    as long as one drains. And it takes the memory lock of each process that it looks into, so there is a pause after
    each that is `PAUSES` times as long as it was.

    Args:
        wait_s: How long a reading that may wait does so; None: until the look is over.
    """

    def __init__(self, wait_s: float | None = WAIT_S) -> None:
        self._wait_s = wait_s
        self._thread: threading.Thread | None = None
        self._sought: frozenset[Sought] = frozenset()
        """What the look under way, or the last one, was begun for, as far as it is still wanted."""
        self._found: Openers | None = None
        """What that look has found; None until it is over, and where it failed."""
        self._next_at_s = 0.0
        self._open: dict[Sought, Openers] = {}
        """What the last look found open, by what was sought."""

    def begin(self, wanted: Collection[Sought]) -> None:
        """Begin a look for these, unless one is under way, or too little time has passed since the last.

        `wanted`: each file, with the lease that has ended on it: a look from before that does not count.
        """
        self._sought &= frozenset(wanted)  # a lease that was revived may end again
        self._open = {sought: found for sought, found in self._open.items() if sought in self._sought}
        known = self._sought.issuperset(wanted) and time.monotonic() < self._next_at_s
        if self._thread is not None or not wanted or known:
            return
        self._sought, self._found = frozenset(wanted), None
        self._thread = threading.Thread(target=self._look, args=({path for path, _ in wanted},), daemon=True)
        self._thread.start()

    def look(self, wanted: Collection[Sought], *, wait: bool = True) -> dict[Sought, Openers]:
        """What a look has found since the last question, for each that was wanted already when it was begun; of the
        others nothing is known, but for `before`."""
        for _ in range(2):  # the look under way may have been begun for none of these
            self.begin(wanted)
            if self._thread is None:
                break
            self._thread.join(self._wait_s if wait else 0.0)
            if self._thread.is_alive():
                break
            self._thread = None
            if (found := self._found) is None:
                break
            self._open = {one: found for one in self._sought if found.by_path.get(one[0])}
            if self._sought:
                return dict.fromkeys(self._sought, found)
        return {}

    def before(self, sought: Sought) -> Openers | None:
        """What the look before found open, until there is another. Who was there may still be; who was not may be."""
        return self._open.get(sought)

    def forget(self) -> None:
        """Nothing drains, or it is not known for how long nothing could be read: what is found by a look under way, or
        was found since the last question, is of no use."""
        self.begin(())

    def _look(self, paths: Collection[str]) -> None:
        begun_s = time.monotonic()
        try:
            self._found = openers(paths)
        except OSError as error:
            print(f"Who has device files open cannot be looked for: {error}", file=sys.stderr, flush=True)
        took_s = time.monotonic() - begun_s
        self._next_at_s = time.monotonic() + min(PAUSES * took_s, LONGEST_PAUSE_S)


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
    except OSError:  # it may not be looked into, or there is no descriptor left to do so
        return None
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
