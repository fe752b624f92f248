"""Watches the processes whose end is the end of a lease, by pidfd: one for each process, however many leases it owns.

A pidfd becomes readable when the whole process has ended, as a zombie too, and not when only its main thread has
(pidfd_open(2)). `execve` changes neither pid nor start time: the process lives on. Who forks and exits has ended.

What must always hold: nobody is reported `gone` who may live. Whatever keeps a process from being watched, but its end,
makes it `unknown`.
"""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import select
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from gpulease.exchange import MAX_OWNERS, LeaseOwner, OwnerReport, OwnerState
from gpulease.owner import Stat

GONE = (FileNotFoundError, ProcessLookupError)

log = logging.getLogger(__name__)


class CannotWatch(Exception):
    """An owner that cannot be watched, and of which so nothing is known. The text says why."""


class Owners:
    """Keeps a watch on every owner that the daemon names, and tells what each watch shows.

    Args:
        changed: Called when an owner ends.
    """

    def __init__(self, changed: Callable[[], None]) -> None:
        self._changed = changed
        self._watches: dict[LeaseOwner, int] = {}
        self._over: dict[LeaseOwner, OwnerReport] = {}
        """Owners that are gone, or cannot be watched."""
        self._most = min(MAX_OWNERS, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2)

    def watch(self, owners: Sequence[LeaseOwner]) -> None:
        """Watch exactly these from now on."""
        wanted = set(owners)
        for owner in self._watches.keys() - wanted:
            self._unwatch(owner)
        self._over = {owner: report for owner, report in self._over.items() if owner in wanted}
        for owner in owners:
            if owner not in self._watches and owner not in self._over:
                self._begin(owner)

    def reports(self) -> tuple[OwnerReport, ...]:
        """What is seen of each at this moment."""
        alive = (OwnerReport(owner=owner, state=OwnerState.ALIVE) for owner in self._watches)
        return (*alive, *self._over.values())

    def close(self) -> None:
        """End every watch."""
        for owner in list(self._watches):
            self._unwatch(owner)

    def _begin(self, owner: LeaseOwner) -> None:
        try:
            if len(self._watches) >= self._most:
                raise CannotWatch(f"{self._most} owners are watched already")
            pidfd = open_owner(owner)
            if pidfd is None:
                self._over[owner] = OwnerReport(owner=owner, state=OwnerState.GONE)
                return
            try:
                asyncio.get_running_loop().add_reader(pidfd, self._ended, owner)
            except OSError as error:
                os.close(pidfd)
                raise CannotWatch(f"its end cannot be waited for: {error.strerror}") from None
        except CannotWatch as error:
            log.warning("process %d, which owns a lease, is not watched: %s", owner.pid, error)
            self._over[owner] = OwnerReport(owner=owner, state=OwnerState.UNKNOWN, reason=str(error))
        else:
            self._watches[owner] = pidfd

    def _ended(self, owner: LeaseOwner) -> None:
        self._unwatch(owner)
        self._over[owner] = OwnerReport(owner=owner, state=OwnerState.GONE)
        self._changed()

    def _unwatch(self, owner: LeaseOwner) -> None:
        pidfd = self._watches.pop(owner)
        asyncio.get_running_loop().remove_reader(pidfd)
        os.close(pidfd)


def open_owner(owner: LeaseOwner) -> int | None:
    """A pidfd of exactly this process, for the caller to close; None if it has ended. Raises CannotWatch."""
    try:
        pidfd = os.pidfd_open(owner.pid)
    except GONE:
        return None
    except OSError as error:  # out of descriptors, no right to, not a process but one of its threads, an old kernel
        raise CannotWatch(f"the kernel gives no pidfd of it: {error.strerror}") from None
    try:
        # The pidfd pins whoever has the pid now; only after that does the start time prove who it is.
        seen = start_ticks(owner.pid)
        if has_ended(pidfd) or (seen is not None and seen != owner.start_ticks):
            os.close(pidfd)
            return None
        if seen is None:
            raise CannotWatch("it lives, and /proc does not show it to this worker")
    except CannotWatch:
        os.close(pidfd)
        raise
    return pidfd


def start_ticks(pid: int) -> int | None:
    """Start time of a process; None where /proc shows none. Raises CannotWatch when it cannot be read."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except GONE:
        return None
    except OSError as error:
        raise CannotWatch(f"its start time cannot be read: {error.strerror}") from None
    with suppress(ValueError, IndexError):
        return Stat.parse(text).start_ticks
    raise CannotWatch("its start time cannot be read from /proc")


def has_ended(pidfd: int) -> bool:
    """True once the process of a pidfd has ended."""
    poll = select.poll()
    poll.register(pidfd, select.POLLIN)
    return bool(poll.poll(0))
