"""Remembers which processes descend from the owner of a lease, so that they are known when the chain is cut.

A rank belongs to its launcher by descent alone: it was started before the lease, so no marker is in its environment.
SIGKILL of the launcher leaves it alive with another parent. So while a lease has an owner, /proc is walked once a
second, and each process below an owner is remembered with that owner, until it ends or no lease has that owner.

| what happens | what is remembered |
|---|---|
| a process, or one between it and its owner, loses its parent | its owner, as before, also of what it starts later |
| a process below an owner takes a lease itself | it and what is below it are the new owner's |
| an orphan is adopted by an owner further up | its own owner, not the one that adopted it |
| a pid is used again | nothing: the start time is another |
| the probe or the worker restarts | the same: the worker passes it to each probe and keeps it in `leases.json` |
| a process starts and loses its parent between two walks | nothing: it is judged as one without a lease |
| more than `MAX_REMEMBERED` processes | those known before; the rest only while the chain is whole |
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Collection, Mapping

from gpulease_protocol.host import process_tree
from gpulease_protocol.host.process_id import ProcessId, Stat, stat
from gpulease_worker.processes.lease_cache import LeaseCache

MIN_PAUSE_S, PAUSE_RATIO = 1.0, 20
"""Shortest time between two walks, and how many times as long as a walk the pause is: 5 % of a core at most."""
MAX_REMEMBERED = 10_000

OwnerOf = dict[ProcessId, ProcessId]
"""The owner of leases that each process descends or descended from; of an owner, the next one above it."""

log = logging.getLogger(__name__)


class DescendantWatcher:
    """Walks /proc in a thread, now and then, and puts what it finds into the lease cache.

    Args:
        leases: The worker's cache, which names the owners.
    """

    def __init__(self, leases: LeaseCache) -> None:
        self._leases = leases
        self._next_at_s = 0.0
        self._looked_for: frozenset[ProcessId] = frozenset()
        self._walk: asyncio.Task[None] | None = None

    def look(self) -> None:
        """Start a walk, unless no lease has an owner, one is running, or the last was just now with the same owners."""
        owners, running = self._leases.owners(), self._walk is not None and not self._walk.done()
        due = time.monotonic() >= self._next_at_s or not owners <= self._looked_for
        if owners and due and not running:
            self._looked_for = owners
            self._walk = asyncio.create_task(self._look())

    async def close(self) -> None:
        """Wait for the running walk to end."""
        if self._walk is not None:
            await asyncio.wait({self._walk})

    async def _look(self) -> None:
        begun_s = time.monotonic()
        try:
            found = await asyncio.to_thread(trace, self._leases.owners(), self._leases.owner_of())
        except OSError as error:
            log.warning("cannot read /proc, so orphans of leases may not be recognized: %s", error)
        else:
            self._leases.remember(found)
        ended_s = time.monotonic()
        self._next_at_s = ended_s + max(MIN_PAUSE_S, PAUSE_RATIO * (ended_s - begun_s))


def trace(owners: Collection[ProcessId], known: Mapping[ProcessId, ProcessId]) -> OwnerOf:
    """Every living process that descends from one of these owners, with the nearest. One walk of /proc.

    Args:
        owners: The owners of leases, dead ones too.
        known: The result of the last walk: it counts where the chain has been cut since.
    """
    status_of = {pid: status for pid in process_tree.all_pids() if (status := stat(pid)) is not None}
    found = resolve(status_of, frozenset(owners), known)
    if len(found) <= MAX_REMEMBERED:
        return found
    in_order = sorted(found, key=lambda process: process not in known)  # stable: the known ones first
    return {process: found[process] for process in in_order[:MAX_REMEMBERED]}


def resolve(
    status_of: Mapping[int, Stat], owners: frozenset[ProcessId], known: Mapping[ProcessId, ProcessId]
) -> OwnerOf:
    """As `trace`, of these processes."""
    above: OwnerOf = {}
    nearest: dict[int, ProcessId | None] = {}

    def is_below(owner: ProcessId | None, other: ProcessId) -> bool:
        for _ in range(len(owners)):
            owner = None if owner is None else above.get(owner) or known.get(owner)
            if owner == other:
                return True
        return False

    for first in status_of:
        path, pid = [], first
        while pid in status_of and pid not in nearest:
            path.append(pid)
            nearest[pid] = None  # ends the walk where pids that were used again make a circle
            parent = status_of.get(status_of[pid].parent)
            if parent is None or parent.start_ticks > status_of[pid].start_ticks:
                break
            pid = status_of[pid].parent
        owner = nearest.get(pid)
        for pid in reversed(path):  # from the top down
            process, before = ProcessId(pid, status_of[pid].start_ticks), None
            if (before := known.get(process)) in owners and before != owner and not is_below(owner, before):
                owner = before
            if owner is not None and not status_of[pid].dead:
                above[process] = owner
            nearest[pid] = owner = process if process in owners else owner
    return above
