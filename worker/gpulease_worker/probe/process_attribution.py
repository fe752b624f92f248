"""Attributes processes to leases, and reports who still uses a draining GPU: what the driver alone cannot tell.

A process belongs to a lease of its GPU in one of three cases. Its cgroup is named after the lease, and no user can make
that cgroup. It is the lease's owner, or descends from it, or did so before an ancestor died (`owner_descendants`). It
or an ancestor was started with a GPULEASE_LEASE_ID that names the lease: this is a claim (`lease_claims`), and counts
only for processes of the lease's user. Any other process is foreign. A lease that is shown for a process always has
GPUs on this node. The environments of one user take a bounded part of a reading; what is left over is attributed in
the next.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from gpulease_protocol.host.process_id import ProcessId, stat
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import GpuReading, LeaseState, Process
from gpulease_worker.probe.open_file_scanner import OpenFileScanner, ScanTarget
from gpulease_worker.probe.opener_classifier import KnownProcesses, OpenerClassifier
from gpulease_worker.probe.probe_protocol import Reading
from gpulease_worker.processes import cgroup_directory, lease_claims, procfs
from gpulease_worker.processes.lease_cache import CachedLease, remembered_owners

DEVICE_FILES = "GPULEASE_DEVICE_FILES"
"""Environment variable: path of the device files without the minor number, if not `/dev/nvidia`."""


@dataclass(frozen=True, slots=True)
class _Scan:
    """How the openers of a reading's draining GPUs are found and classified."""

    scanner: OpenFileScanner
    wait: bool
    budget: lease_claims.Budget
    askers: Collection[ProcessId]


def start_scan(last: Reading, leases: Sequence[CachedLease], scanner: OpenFileScanner) -> None:
    """Start scanning open device files before a reading begins, based on the last reading."""
    ended = {uuid: lease for lease in leases if lease.state is LeaseState.ENDED for uuid in lease.gpus}
    scanner.start(_scan_targets(last.gpus, ended).values())


def attribute(
    reading: Reading,
    leases: Sequence[CachedLease],
    known: KnownProcesses | None = None,
    scanner: OpenFileScanner | None = None,
    *,
    wait: bool = True,
    askers: Collection[ProcessId] = (),
) -> Reading:
    """The reading with every process attributed, and with the openers of each draining GPU once they are known.

    Args:
        reading: As read from the driver.
        leases: Every lease with GPUs on this node.
        known: Processes of leases in the last reading, and openers of GPUs that still drain. Updated in place.
        scanner: That of the last reading. If None, this waits until a scan has finished.
        wait: Whether to wait for a scan as long as the scanner may, or only briefly because a request waits.
        askers: The owners of all leases that have not ended, of those that wait too.
    """
    scanner = scanner or OpenFileScanner(wait_s=None)
    before = dict(known or {})
    budget = lease_claims.Budget()
    gpus = _with_leases(reading, leases, known, budget)
    scan = _Scan(scanner, wait, budget, askers)
    gpus = _with_draining(gpus, leases, known, before, scan)
    return replace(reading, gpus=tuple(gpus))


def attribute_some(
    reading: Reading,
    last: Reading,
    leases: Sequence[CachedLease],
    known: KnownProcesses,
    scanner: OpenFileScanner,
    *,
    askers: Collection[ProcessId] = (),
) -> tuple[Reading, Reading]:
    """As `attribute`, for a reading of some GPUs: that reading, and the last one of all GPUs with those in it.

    The openers of a GPU are classified by the processes on all others, which are as the last reading shows them.
    """
    before, of_these = dict(known), dict(known)
    budget = lease_claims.Budget()
    shown = {gpu.uuid: gpu for gpu in _with_leases(reading, leases, of_these, budget)}
    known |= of_these
    gpus = [shown.get(gpu.uuid, gpu) for gpu in last.gpus]
    merged = _with_draining(gpus, leases, known, before, _Scan(scanner, False, budget, askers))
    some = tuple(gpu for gpu in merged if gpu.uuid in shown)
    return replace(reading, gpus=some), replace(last, gpus=tuple(merged))


def _with_leases(
    reading: Reading, leases: Sequence[CachedLease], known: KnownProcesses | None, budget: lease_claims.Budget
) -> list[GpuReading]:
    """The GPUs of a reading, with every process attributed. Replaces the contents of `known`."""
    lease_by_gpu = {uuid: lease for lease in leases for uuid in lease.gpus}
    descendants = remembered_owners(leases)
    listed = {process.pid for gpu in reading.gpus for process in gpu.processes if process.lease_id is None}
    claims = lease_claims.nearest_claims(listed, lease_claims.uids_of(leases), budget)
    gpus = [_with_lease_ids(gpu, lease_by_gpu.get(gpu.uuid), descendants, claims) for gpu in reading.gpus]
    if known is not None:
        gpus = _with_remembered_leases(gpus, known)
    if reading.simulated:
        gpus = [gpu if gpu.minor_number == gpu.index else replace(gpu, minor_number=gpu.index) for gpu in gpus]
    return gpus


def _with_draining(
    gpus: list[GpuReading],
    leases: Sequence[CachedLease],
    known: KnownProcesses | None,
    before: KnownProcesses,
    scan: _Scan,
) -> list[GpuReading]:
    """The GPUs, with the openers of each draining one once they are known. Adds to `known`."""
    lease_by_gpu = {uuid: lease for lease in leases for uuid in lease.gpus}
    draining = {
        gpu.uuid: lease
        for gpu in gpus
        if (lease := lease_by_gpu.get(gpu.uuid)) is not None and lease.state is LeaseState.ENDED
    }
    if not draining:
        scan.scanner.discard()
        return gpus
    shown, lease_processes = _with_openers(gpus, leases, draining, before, scan)
    if known is not None:
        known.update(_unlisted(before, known, {lease.id for lease in draining.values()}) | lease_processes)
    return shown


def _scan_targets(gpus: Sequence[GpuReading], draining: Mapping[str, CachedLease]) -> dict[str, ScanTarget]:
    """By UUID of each draining GPU with a known device file: that file and the lease that has ended on it."""
    paths = {gpu.uuid: path for gpu in gpus if gpu.uuid in draining and (path := device_file(gpu)) is not None}
    return {uuid: (path, draining[uuid].id) for uuid, path in paths.items()}


def _with_openers(
    gpus: Sequence[GpuReading],
    leases: Sequence[CachedLease],
    draining: Mapping[str, CachedLease],
    known: KnownProcesses,
    scan: _Scan,
) -> tuple[list[GpuReading], KnownProcesses]:
    """The GPUs, each draining one with its openers; and those openers that belong to the ended leases."""
    targets = _scan_targets(gpus, draining)
    current = scan.scanner.results(set(targets.values()), wait=scan.wait) if targets else {}
    results = {uuid: current.get(target) or scan.scanner.previous(target) for uuid, target in targets.items()}
    openers = {uuid: result.by_path.get(targets[uuid][0], ()) for uuid, result in results.items() if result is not None}
    found = {one for some in openers.values() for one in some}
    classifier = OpenerClassifier(gpus, leases, known, found, scan.budget, scan.askers)
    shown = []
    for gpu in gpus:
        lease, target = draining.get(gpu.uuid), targets.get(gpu.uuid)
        if lease is None or (target is not None and gpu.uuid not in openers):
            shown.append(gpu)
            continue
        opened_by = classifier.classify(gpu, lease, openers.get(gpu.uuid, ()))
        outdated = target is not None and target not in current
        if outdated and all(process.lease_id != lease.id for process in opened_by):
            shown.append(gpu)  # the last scan found no process of the lease, which says nothing about now
            continue
        result = results.get(gpu.uuid)
        if result is None:
            shown.append(replace(gpu, opened_by=opened_by, unreadable_processes=None))
            continue
        number, one = result.unreadable, result.unreadable_process
        shown.append(replace(gpu, opened_by=opened_by, unreadable_processes=number, unreadable_process=one))
    return shown, classifier.lease_processes


def device_file(gpu: GpuReading) -> str | None:
    """Path of a GPU's device file; None if its minor number is unknown."""
    if gpu.minor_number is None:
        return None
    return f"{os.environ.get(DEVICE_FILES) or '/dev/nvidia'}{gpu.minor_number}"


def belongs_to(pid: int, lease: CachedLease, descendants: Mapping[ProcessId, ProcessId]) -> bool:
    """True if cgroup or ancestry (`descendants`: as remembered) prove that a process works under a lease."""
    return bool(cgroup_directory.leases_of(pid, (lease.id,))) or (
        lease.owner is not None and procfs.descends_from(pid, lease.owner, descendants)
    )


def _with_lease_ids(
    gpu: GpuReading, lease: CachedLease | None, descendants: Mapping[ProcessId, ProcessId], claims: Mapping[int, str]
) -> GpuReading:
    def lease_of(process: Process) -> str | None:
        claimed = process.lease_id or claims.get(process.pid)
        if lease is None or claimed == lease.id:
            return claimed
        return lease.id if belongs_to(process.pid, lease, descendants) else claimed

    if not gpu.processes:
        return gpu
    return replace(gpu, processes=tuple(replace(process, lease_id=lease_of(process)) for process in gpu.processes))


def _with_remembered_leases(gpus: Sequence[GpuReading], known: KnownProcesses) -> list[GpuReading]:
    """The GPUs, with each process that belonged to a lease still attributed to it. Replaces the contents of `known`.

    An exiting process loses its environment and its parent before the driver frees its memory and takes it off its
    lists. Without this, it would count as a conflict with its own lease meanwhile.
    """
    before, shown_gpus = dict(known), []
    known.clear()
    for gpu in gpus:
        shown = []
        for process in gpu.processes:
            now = stat(process.pid)
            start_ticks, lease_id = before.get(process.pid, (None, None))
            if process.lease_id is None and lease_id is not None and (now is None or now.start_ticks == start_ticks):
                process = replace(process, lease_id=lease_id)  # noqa: PLW2901
            if process.lease_id is not None:
                known[process.pid] = (start_ticks if now is None else now.start_ticks, process.lease_id)
            shown.append(process)
        shown_gpus.append(replace(gpu, processes=tuple(shown)) if shown else gpu)
    return shown_gpus


def _unlisted(before: KnownProcesses, listed: KnownProcesses, draining: set[str]) -> KnownProcesses:
    """Processes of draining leases that were known before, are no longer listed and still run: one that loses its
    parent still belongs to its lease."""
    missing = {pid: one for pid, one in before.items() if pid not in listed and one[1] in draining}
    return {pid: one for pid, one in missing.items() if (now := ProcessId.of(pid)) and now.start_ticks == one[0]}
