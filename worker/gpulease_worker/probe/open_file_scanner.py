"""Scans all processes of the node for open device files: by descriptor, or mapped into memory.

The driver's process lists are not enough: the driver may take a process off its list before it has freed its memory,
and the forked children of a dead rank keep the device open without ever being listed. The scan compares file names and
not the files behind them, because a stat of a file on a network file system may hang.

| a process | is found |
|---|---|
| has the file open, or mapped without a descriptor, also after the file was deleted | yes |
| in another pid or mount namespace, or in a chroot, where the file is called `.../dev/nvidia0` | yes |
| its first thread has ended and others have not, also while it is inspected | yes, through those |
| was forked during the scan, by one that ends before it is inspected itself | yes, unless this goes on for `ROUNDS` |
| has the file registered with an io_uring and no descriptor of its own any more | yes, where the kernel shows that |
| another user's, and this user may not inspect it | it is counted, except where `hidepid` hides it altogether |
| hangs in the kernel | it is counted; its descriptors are found all the same |
| has the file open in a table of one thread alone (CLONE_FILES taken back), not mapped | no |
| has sent the file over a Unix socket to one that has not received it yet | no |
| opens it under another name, which only root can make | no |

CUDA maps the device file, and all threads of a process share what is mapped, so none of the last three hides one that
computes: the driver's list and the GPU's memory show what is left.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import field
from itertools import takewhile

from gpulease_protocol.host import process_tree
from gpulease_protocol.host.process_id import ProcessId, Stat, program_stat
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Process
from gpulease_worker.processes import bounded_read, procfs

WAIT_S = 0.25
"""How long a reading that no request waits for waits for a scan: enough for a host with a thousand processes."""
SHORT_WAIT_S = 0.025
"""How long one that a request waits for waits for a scan, where the last scan took no longer: a host with a few hundred
processes. Without the scan a GPU that drains would not be free before the next reading."""
PAUSE_RATIO, MAX_PAUSE_S = 10, 1.0
"""The pause after a scan, as a multiple of its duration, and its maximum."""
PAGE_BYTES = 4096
"""As much of a memory map is handed out at a time."""
ScanTarget = tuple[str, str]
"""Path of a device file, and the id of the lease that has ended on its GPU."""
DELETED_SUFFIX = " (deleted)"
"""What the kernel appends to the name of a deleted file."""
IO_URING = "anon_inode:[io_uring]"
"""What the kernel calls an io_uring, which may have files of its own."""
ROUNDS = 4
"""How many times to look for processes that were started during a scan: mostly there are none after the first."""


@dataclass(slots=True)
class ScanResult:
    """The result of one scan of all processes."""

    by_path: dict[str, list[ProcessId]] = field(default_factory=dict)
    """By path: the processes that have the file open or mapped."""
    unreadable: int = 0
    """Number of processes that could not be inspected: this user may not, or they hang in the kernel."""
    unreadable_process: Process | None = None
    """One of them, the oldest by pid."""


class OpenFileScanner:
    """Scans in a thread for the openers of draining GPUs' device files.

    A scan takes longer the more processes and open files the host has, a second for some thousand, and hangs if one of
    them hangs in the kernel. A reading that waited for it would miss its deadline, and every GPU of the node would be
    unknown while one drains. A scan also takes the memory lock of each process, so it is followed by a pause that is
    `PAUSE_RATIO` times as long.

    Args:
        wait_s: How long a reading that no request waits for may wait for a scan. None: until it has finished.
    """

    def __init__(self, wait_s: float | None = WAIT_S) -> None:
        self._wait_s = wait_s
        self._thread: threading.Thread | None = None
        self._targets: frozenset[ScanTarget] = frozenset()
        """What the running or last scan was started for, as far as still wanted."""
        self._result: ScanResult | None = None
        """Its result; None until it has finished, and if it failed."""
        self._next_at_s = 0.0
        self._took_s = 0.0
        """How long the last scan took."""
        self._previous: dict[ScanTarget, ScanResult] = {}
        """The last result, for each target that was open then."""

    def start(self, wanted: Collection[ScanTarget]) -> None:
        """Start a scan for these targets, unless one is running or the pause after the last has not passed.

        A target includes the ended lease: a scan started before the lease had ended does not count.
        """
        self._targets &= frozenset(wanted)  # a lease that was revived may end again
        self._previous = {target: result for target, result in self._previous.items() if target in self._targets}
        up_to_date = self._targets.issuperset(wanted) and time.monotonic() < self._next_at_s
        if self._thread is not None or not wanted or up_to_date:
            return
        self._targets, self._result = frozenset(wanted), None
        self._thread = threading.Thread(target=self._scan, args=({path for path, _ in wanted},), daemon=True)
        self._thread.start()

    def results(self, wanted: Collection[ScanTarget], *, wait: bool = True) -> dict[ScanTarget, ScanResult]:
        """The result of a scan that finished since the last call, for each target that it was started for.

        The other targets are left out; see `previous`. With `wait`, it waits as long as the scanner may; without, for
        `SHORT_WAIT_S` at most.
        """
        longest_s = self._wait_s if wait else SHORT_WAIT_S if self._took_s <= SHORT_WAIT_S else 0.0
        for _ in range(2):  # the running scan may have been started for none of these
            self.start(wanted)
            if self._thread is None:
                break
            self._thread.join(longest_s)
            if self._thread.is_alive():
                break
            self._thread = None
            if (result := self._result) is None:
                break
            self._previous = {target: result for target in self._targets if result.by_path.get(target[0])}
            if self._targets:
                return dict.fromkeys(self._targets, result)
        return {}

    def previous(self, target: ScanTarget) -> ScanResult | None:
        """The last result if the target was open then. Its openers may still be there, and others may have come."""
        return self._previous.get(target)

    def discard(self) -> None:
        """Discard the results of the running and the last scan: nothing drains, or readings have failed meanwhile."""
        self.start(())

    def _scan(self, paths: Collection[str]) -> None:
        begun_s = time.monotonic()
        try:
            self._result = scan(paths)
        except OSError as error:
            print(f"cannot scan processes for open device files: {error}", file=sys.stderr, flush=True)
        self._took_s = time.monotonic() - begun_s
        self._next_at_s = time.monotonic() + min(PAUSE_RATIO * self._took_s, MAX_PAUSE_S)


def scan(paths: Collection[str]) -> ScanResult:
    """The processes, except the caller, that have these files open. Walks /proc once, some tens of microseconds per
    process."""
    result = ScanResult()
    wanted, listed, closed = set(paths), {os.getpid()}, set[int]()
    seen: dict[int, Stat] = {}
    has: dict[int, set[str]] = {}

    def inspect(pid: int) -> bool:
        # What is found is added at once: the descriptors count even if the memory map cannot be read because the
        # process hangs.
        try:
            return _inspect(pid, wanted, has[pid], leader_ended=seen[pid].leader_ended)
        except _FirstThreadEnded:
            return _inspect(pid, wanted, has[pid], leader_ended=True)

    for _ in range(ROUNDS):  # one that is started during a round may have the file of one that has ended by then
        pids = set(process_tree.all_pids()) - listed
        if not pids:
            break
        listed |= pids
        new = {pid: one for pid in sorted(pids) if (one := program_stat(pid)) is not None}
        seen |= new
        has |= {pid: set() for pid in new}
        shown = bounded_read.read_each(inspect, new)
        closed |= {pid for pid in new if not shown.get(pid)}
    result.unreadable = len(closed)
    if closed:
        first = min(closed)
        result.unreadable_process = Process(pid=first, user=procfs.user_of(first), command=seen[first].name)
    for pid, paths_found in has.items():
        for path in tuple(paths_found):
            result.by_path.setdefault(path, []).append(ProcessId(pid, seen[pid].start_ticks))
    return result


class _FirstThreadEnded(Exception):
    """The first thread of a process has ended, and with that its files in /proc are empty."""


def _inspect(pid: int, wanted: set[str], found: set[str], *, leader_ended: bool) -> bool:
    """Add which of the files a process has open to `found`; False if that cannot be read. If its first thread has
    ended, the other threads are read. Raises _FirstThreadEnded if that has ended meanwhile."""
    return all([_open_in(pid, wanted, leader_ended, look, found) for look in (_descriptors, _mapped)])


def _open_in(
    pid: int,
    wanted: set[str],
    leader_ended: bool,
    look: Callable[[str, set[str], set[str]], None],
    found: set[str],
) -> bool:
    try:
        for directory in _other_tasks(pid) if leader_ended else (f"/proc/{pid}",):
            try:
                look(directory, wanted, found)
            except (FileNotFoundError, ProcessLookupError):
                pass  # it has ended and has nothing open
            except _FirstThreadEnded:
                if not leader_ended:
                    raise
    except FileNotFoundError:
        pass  # all of its threads have ended
    except OSError:  # no permission, or no free descriptor
        return False
    return True


def _other_tasks(pid: int) -> Iterator[str]:
    with os.scandir(f"/proc/{pid}/task") as entries:
        yield from [entry.path for entry in entries if entry.name != str(pid)]


def _descriptors(process: str, wanted: set[str], found: set[str]) -> None:
    beginning = _beginning(wanted)
    # A path in the open directory takes a third less of the kernel's time than one from /proc on.
    directory = os.open(f"{process}/fd", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for descriptor in os.listdir(directory):
            try:
                path = os.readlink(descriptor, dir_fd=directory)
                if beginning in path:
                    found.update(_named(path, wanted))
                elif path == IO_URING:
                    found.update(_named_in(_content(f"{process}/fdinfo/{descriptor}"), wanted))
            except FileNotFoundError:  # closed meanwhile
                continue
    finally:
        os.close(directory)


def _mapped(process: str, wanted: set[str], found: set[str]) -> None:
    maps = _content(f"{process}/maps")
    if not maps:
        raise _FirstThreadEnded
    found.update(_named_in(maps, wanted))


def _beginning(wanted: set[str]) -> str:
    """What all of these paths begin with, by letters."""
    first, last = min(wanted, default=""), max(wanted, default="")
    alike = takewhile(lambda pair: pair[0] == pair[1], zip(first, last, strict=False))
    return "".join(one for one, _ in alike)


def _named_in(content: bytes, wanted: set[str]) -> list[str]:
    """The files that the lines of a file of /proc name at their ends."""
    beginning = _beginning(wanted)
    if beginning.encode() not in content:
        return []  # as of nearly every process: one search, and not one for each GPU
    lines = content.decode(errors="replace").splitlines()
    return [one for line in lines if beginning in line for one in _named(line, wanted)]


def _named(path: str, wanted: set[str]) -> list[str]:
    """The files that a name means as it is shown here: that of a file in a chroot begins with the chroot's."""
    name = path.removesuffix(DELETED_SUFFIX)
    return [one for one in wanted if name.endswith(one)]


def _content(path: str) -> bytes:
    """A file of /proc. The kernel hands it out a page at a time. Less work than `Path.read_bytes`."""
    descriptor, parts = os.open(path, os.O_RDONLY | os.O_CLOEXEC), []
    try:
        while part := os.read(descriptor, PAGE_BYTES):
            parts.append(part)
    finally:
        os.close(descriptor)
    return b"".join(parts)
