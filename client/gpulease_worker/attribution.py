"""Whose a process is, and who keeps a draining GPU: what a reading says of leases, beyond what the driver tells.

A process belongs to a lease of its GPU if one of its cgroups names the lease, if it is the lease's owner or descends
from it, or if GPULEASE_LEASE_ID names the lease in the environment that it or an ancestor was started with. The last
is found for every process when it is read (`source.attribute`); here the rest is added. A process of which none is
true is foreign.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from gpulease.model import GpuReading, LeaseState
from gpulease.owner import stat
from gpulease_worker import open_files, openers, processes
from gpulease_worker.holders import SeenLease
from gpulease_worker.open_files import Looker, Sought
from gpulease_worker.source import Reading

DEVICE_FILES = "GPULEASE_DEVICE_FILES"
"""Environment variable: device files without their minor number, where they are not `/dev/nvidia`."""
Known = openers.Known
"""Whose the processes of the last reading were."""


def begin_look(last: Reading, leases: Sequence[SeenLease], looker: Looker) -> None:
    """Have the look at open device files begin before a reading does, by what the last reading showed."""
    looker.begin(_sought(last.gpus, leases).values())


def _sought(gpus: Sequence[GpuReading], leases: Sequence[SeenLease]) -> dict[str, Sought]:
    """By UUID of each draining GPU whose device file is known: that file, and the lease that has ended on it."""
    ended = {uuid: lease for lease in leases if lease.state is LeaseState.ENDED for uuid in lease.gpus}
    files = {gpu.uuid: path for gpu in gpus if gpu.uuid in ended and (path := device_file(gpu)) is not None}
    return {uuid: (path, ended[uuid].id) for uuid, path in files.items()}


def complete(
    reading: Reading,
    leases: Sequence[SeenLease],
    known: Known | None = None,
    looker: Looker | None = None,
    *,
    wait: bool = True,
) -> Reading:
    """The reading with every process attributed, and with who has the device file of a draining GPU open, as soon as
    that is known.

    `known`: whose the processes of the last reading were, and those that had the device file of a GPU open that still
    drains; it is brought up to date. `looker`: the one of the last reading; where there is none, this waits for a look.
    Without `wait` it waits for none.
    """
    looker = looker or Looker(wait_s=None)
    holding = {uuid: lease for lease in leases for uuid in lease.gpus}
    before = dict(known or {})
    gpus = [_attributed(gpu, holding.get(gpu.uuid)) for gpu in reading.gpus]
    if known is not None:
        gpus = _remembered(gpus, known)
    if reading.simulated:
        gpus = [replace(gpu, minor_number=gpu.index) for gpu in gpus]
    draining = {
        gpu.uuid: device_file(gpu)
        for gpu in gpus
        if gpu.uuid in holding and holding[gpu.uuid].state is LeaseState.ENDED
    }
    if not draining:
        looker.forget()
        return replace(reading, gpus=tuple(gpus))
    seen = _opened(gpus, leases, draining, before, looker, wait)
    if known is not None:
        known.update(_kept(before, known, {holding[uuid].id for uuid in draining}) | seen[1])
    return replace(reading, gpus=seen[0])


def _opened(
    gpus: Sequence[GpuReading],
    leases: Sequence[SeenLease],
    draining: Mapping[str, str | None],
    known: Known,
    looker: Looker,
    wait: bool,
) -> tuple[tuple[GpuReading, ...], Known]:
    """The GPUs with who has the device files of those that drain open; and the processes of their leases among them."""
    holding = {uuid: lease for lease in leases for uuid in lease.gpus}
    wanted = set(_sought(gpus, leases).values())
    found = looker.look(wanted, wait=wait) if wanted else {}
    looks = {
        uuid: found.get((path, holding[uuid].id)) or looker.before((path, holding[uuid].id))
        for uuid, path in draining.items()
        if path is not None
    }
    by_gpu = {uuid: () if path is None else _found(looks[uuid], path) for uuid, path in draining.items()}
    apart = openers.Openers(gpus, leases, known, {one for some in by_gpu.values() for one in some or ()})
    shown = []
    for gpu in gpus:
        some = by_gpu.get(gpu.uuid)
        if some is None:
            shown.append(gpu)
            continue
        lease, path = holding[gpu.uuid], draining[gpu.uuid]
        look = None if path is None else looks[gpu.uuid]
        opened_by = apart.of(gpu, lease, some)
        if path is not None and (path, lease.id) not in found and all(one.lease_id != lease.id for one in opened_by):
            shown.append(gpu)  # nobody of the lease was there when somebody last looked: that says nothing of now
            continue
        unreadable = None if look is None else look.unreadable
        shown.append(replace(gpu, opened_by=opened_by, unreadable_processes=unreadable))
    return tuple(shown), apart.theirs


def device_file(gpu: GpuReading) -> str | None:
    """Path of a GPU's device file; None where its minor number is not known."""
    if gpu.minor_number is None:
        return None
    return f"{os.environ.get(DEVICE_FILES) or '/dev/nvidia'}{gpu.minor_number}"


def belongs(pid: int, lease: SeenLease) -> bool:
    """True when cgroup, ancestry or the marker say that a process works under a lease."""
    return (
        processes.cgroup_names(pid, lease.id)
        or (lease.owner is not None and processes.descends_from(pid, lease.owner))
        or processes.lease_of(pid) == lease.id
    )


def _attributed(gpu: GpuReading, lease: SeenLease | None) -> GpuReading:
    if lease is None or all(process.lease_id == lease.id for process in gpu.processes):
        return gpu
    return replace(
        gpu,
        processes=tuple(
            replace(process, lease_id=lease.id)
            if process.lease_id != lease.id and belongs(process.pid, lease)
            else process
            for process in gpu.processes
        ),
    )


def _remembered(gpus: Sequence[GpuReading], known: Known) -> list[GpuReading]:
    """The GPUs with each process that was a lease's still its.

    A process that ends loses its environment, and its parent, before the driver has given its memory back and takes it
    off the lists; without this its last moments would be a conflict with its own lease.
    """
    before, found = dict(known), []
    known.clear()
    for gpu in gpus:
        shown = []
        for process in gpu.processes:
            seen = stat(process.pid)
            then_ticks, lease_id = before.get(process.pid, (None, None))
            if process.lease_id is None and lease_id is not None and (seen is None or seen.start_ticks == then_ticks):
                process = replace(process, lease_id=lease_id)  # noqa: PLW2901
            if process.lease_id is not None:
                known[process.pid] = (then_ticks if seen is None else seen.start_ticks, process.lease_id)
            shown.append(process)
        found.append(replace(gpu, processes=tuple(shown)))
    return found


def _found(look: open_files.Openers | None, path: str) -> Sequence[processes.Identity] | None:
    """Who has a file open; None while nobody has looked."""
    return None if look is None else look.by_path.get(path, ())


def _kept(before: Known, known: Known, draining: set[str]) -> Known:
    """Of the processes that were known before and are listed no more, those that live, of a lease that drains: one that
    loses its parent is still its lease's."""
    kept = {pid: one for pid, one in before.items() if pid not in known and one[1] in draining}
    return {
        pid: one for pid, one in kept.items() if (seen := processes.Identity.of(pid)) and seen.start_ticks == one[0]
    }
