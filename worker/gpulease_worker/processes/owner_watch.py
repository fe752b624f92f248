"""Watches the processes that own leases, by pidfd: one for each process, however many leases it owns.

A pidfd becomes readable when the whole process has ended, even as a zombie, and not when only its main thread has
(pidfd_open(2)). `execve` changes neither pid nor start time, so the process stays the owner. A process that forks and
exits has ended.

Invariant: no process that may be alive is reported `gone`. A process that cannot be watched, for any reason but its
end, is `unknown`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import select
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.host.process_id import Stat
from gpulease_protocol.node_protocol import MAX_OWNERS, LeaseOwner, OwnerReport, OwnerState
from gpulease_worker.processes import procfs

GONE = (FileNotFoundError, ProcessLookupError)

log = logging.getLogger(__name__)


class WatchError(Exception):
    """An owner cannot be watched, so its state is unknown. The message says why."""


class OwnerWatcher:
    """Watches every owner that the daemon names, and reports the state of each.

    Args:
        changed: Called when an owner ends.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._watches: dict[LeaseOwner, int] = {}
        self._unwatched: dict[LeaseOwner, OwnerReport] = {}
        """Owners that are gone or cannot be watched."""
        self._limit = min(MAX_OWNERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def watch(self, owners: Sequence[LeaseOwner]) -> None:
        """Watch exactly these from now on."""
        named = set(owners)
        for owner in self._watches.keys() - named:
            self._unwatch(owner)
        self._unwatched = {owner: report for owner, report in self._unwatched.items() if owner in named}
        for owner in owners:
            if owner not in self._watches and owner not in self._unwatched:
                self._start_watch(owner)

    @property
    def watched(self) -> Collection[LeaseOwner]:
        """Those that are alive: the owners of all leases here that have not ended, of those that wait too."""
        return self._watches.keys()

    def reports(self) -> tuple[OwnerReport, ...]:
        """The current state of each."""
        alive = (OwnerReport(owner=owner, state=OwnerState.ALIVE) for owner in self._watches)
        return (*alive, *self._unwatched.values())

    def close(self) -> None:
        """End every watch."""
        for owner in list(self._watches):
            self._unwatch(owner)

    def _start_watch(self, owner: LeaseOwner) -> None:
        try:
            if len(self._watches) >= self._limit:
                raise WatchError(f"{self._limit} owners are watched already")
            pidfd = open_pidfd(owner)
            if pidfd is None:
                self._unwatched[owner] = OwnerReport(owner=owner, state=OwnerState.GONE)
                return
            try:
                asyncio.get_running_loop().add_reader(pidfd, self._ended, owner)
            except OSError as error:
                os.close(pidfd)
                raise WatchError(f"its end cannot be awaited: {error.strerror}") from None
        except WatchError as error:
            log.warning("cannot watch process %d, which owns a lease: %s", owner.pid, error)
            self._unwatched[owner] = OwnerReport(owner=owner, state=OwnerState.UNKNOWN, reason=str(error))
        else:
            self._watches[owner] = pidfd

    def _ended(self, owner: LeaseOwner) -> None:
        self._unwatch(owner)
        self._unwatched[owner] = OwnerReport(owner=owner, state=OwnerState.GONE)
        self._changed()

    def _unwatch(self, owner: LeaseOwner) -> None:
        pidfd = self._watches.pop(owner)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


def open_pidfd(owner: LeaseOwner) -> int | None:
    """A pidfd of exactly this process, for the caller to close; None if it has ended. Raises CannotWatch."""
    try:
        pidfd = os.pidfd_open(owner.pid)
    except GONE:
        return None
    except OSError as error:  # no descriptor left, not permitted, a thread's id, an old kernel
        raise WatchError(f"the kernel gives no pidfd for it: {error.strerror}") from None
    try:
        # An open pidfd keeps the pid from being reused; only after that does the start time prove the identity.
        ticks = start_ticks(owner.pid)
        if has_ended(pidfd) or (ticks is not None and ticks != owner.start_ticks):
            os.close(pidfd)
            return None
        if ticks is None:
            raise WatchError("it is alive, but /proc does not show it to this worker")
        if owner.user is not None and not procfs.runs_as(owner.pid, owner.user):
            raise WatchError(f"it does not run as user {owner.user}, whose lease it is")
    except WatchError:
        os.close(pidfd)
        raise
    return pidfd


def start_ticks(pid: int) -> int | None:
    """Start time of a process; None where /proc does not show it. Raises CannotWatch when it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except GONE:
        return None
    except OSError as error:
        raise WatchError(f"its start time cannot be read: {error.strerror}") from None
    with suppress(ValueError, IndexError):
        return Stat.parse(text).start_ticks
    raise WatchError("its start time cannot be read from /proc")


def has_ended(pidfd: int) -> bool:
    """True once the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
