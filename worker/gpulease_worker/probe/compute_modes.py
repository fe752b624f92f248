"""Sets EXCLUSIVE_PROCESS for the duration of a lease and restores the former mode afterwards, if configured.

In that mode the driver itself keeps a second process off a leased GPU. The mode outlives every gpulease process.
Therefore the former mode is on disk before it is changed, and any later worker that finds the record restores it as
soon as the lease has no GPU here any more, that is, when its GPUs are clean.

An administrator's change is never undone. A mode is changed only from the expected one, which is checked immediately
before; any other was set by someone else meanwhile, and stays.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import ComputeMode, GpuReading, LeaseState, Noun
from gpulease_worker.jobs import job_records
from gpulease_worker.probe.probe_protocol import ComputeModeChange, ComputeModeNotSet
from gpulease_worker.processes.lease_cache import CachedLease

FILE = "compute_modes.json"
LEASED_MODE = ComputeMode.EXCLUSIVE_PROCESS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedMode(Noun):
    """A GPU with a changed mode, or one that is about to be changed."""

    uuid: str
    """The GPU."""
    pci_bus_id: str
    """Its PCI bus id, by which the driver is asked."""
    mode: ComputeMode
    """Its former mode."""
    lease_id: str
    """The lease during which the mode is changed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SavedModes(Noun):
    """Content of the file."""

    gpus: tuple[SavedMode, ...] = ()
    """Every GPU with a changed mode."""


class ComputeModes:
    """The modes of a node's GPUs.

    Args:
        data_dir: The worker's data directory, which holds the record.
        manage: Whether to set the mode for new leases. Modes set by an earlier worker are restored in any case.
        change: Changes a GPU's mode if it is as expected, and returns the mode before. Raises ComputeModeNotSet.
    """

    def __init__(
        self, data_dir: Path, manage: bool, change: Callable[[ComputeModeChange], Awaitable[ComputeMode | None]]
    ) -> None:
        self._directory = data_dir
        self._manage = manage
        self._change = change
        self._former: dict[str, SavedMode] = {}
        self._is_recovered = False
        """True once the record is read. Until then no mode is changed: the next record would replace it unread."""
        self._done: set[str] = set()
        """GPUs that had the mode or got it from this worker: it is not set twice for the same lease."""
        self._seen_changed: set[str] = set()
        """GPUs that a reading has shown in the changed mode."""
        self._refused: dict[str, str] = {}
        """By UUID: the lease for which the GPU's mode could not be set; this is not retried."""
        self._warned: set[str] = set()

    def recover(self) -> None:
        """Load what an earlier worker has changed. While that cannot be read, this is tried again at each reading."""
        try:
            kept = job_records.read(self._directory, FILE, SavedModes)
        except ValueError as error:
            self._warn_once(
                "compute modes are neither set nor restored until what an earlier worker has set can be read, or its"
                f" record is removed: {error}"
            )
            return
        self._is_recovered = True
        self._former = {former.uuid: former for former in kept.gpus} if kept is not None else {}

    async def reconcile(self, leases: Sequence[CachedLease], gpus: Sequence[GpuReading]) -> None:
        """Adjust the modes to the leases that have GPUs here. `gpus`: a reading that is not older than the leases."""
        if not self._is_recovered:
            self.recover()
        if not self._is_recovered or not (self._manage or self._former):
            return
        lease_by_gpu = {uuid: lease for lease in leases for uuid in lease.gpus}
        for gpu in gpus:
            lease, former = lease_by_gpu.get(gpu.uuid), self._former.get(gpu.uuid)
            if former is not None and (lease is None or lease.id != former.lease_id):
                former = await self._hand_over(former, lease)
            if former is not None:
                await self._keep(former, gpu, lease)
            elif self._manage and lease is not None and lease.state is LeaseState.ACTIVE:
                await self._set_for_lease(gpu, lease)

    async def _set_for_lease(self, gpu: GpuReading, lease: CachedLease) -> None:
        """Set the mode of a newly leased GPU. Any mode but the default was set on purpose, and stays."""
        if gpu.pci_bus_id is None or gpu.compute_mode is not ComputeMode.DEFAULT:
            return
        if self._refused.get(gpu.uuid) == lease.id:
            return
        former = SavedMode(uuid=gpu.uuid, pci_bus_id=gpu.pci_bus_id, mode=gpu.compute_mode, lease_id=lease.id)
        try:
            self._record(former)
        except OSError as error:
            self._warn_once(f"the compute mode of {gpu.uuid} stays, because it cannot be recorded: {error}")
            return
        await self._set(former)

    async def _set(self, former: SavedMode) -> None:
        self._done.add(former.uuid)
        try:
            mode_before = await self._changed(former, former.mode, LEASED_MODE)
        except ComputeModeNotSet as error:
            self._warn_once(f"cannot set the compute mode of {former.uuid}: {error}")
            if error.refused:
                self._refused[former.uuid] = former.lease_id
                self._forget(former)
            else:
                self._done.discard(former.uuid)
            return
        if mode_before not in (former.mode, LEASED_MODE):
            self._leave_to_administrator(former, mode_before)

    async def _keep(self, former: SavedMode, gpu: GpuReading, lease: CachedLease | None) -> None:
        """Keep a leased GPU's mode; set it only if an earlier worker ended before it could."""
        if former.uuid not in self._done and lease is not None and lease.state is LeaseState.ACTIVE:
            await self._set(former)
        elif gpu.compute_mode is LEASED_MODE:
            self._seen_changed.add(former.uuid)
        elif former.uuid in self._seen_changed and gpu.compute_mode is not None:
            self._leave_to_administrator(former, gpu.compute_mode)

    async def _hand_over(self, former: SavedMode, lease: CachedLease | None) -> SavedMode | None:
        """The lease has ended: restore the mode, or keep it for the next lease. Returns the remaining record."""
        if self._manage and lease is not None and lease.state is LeaseState.ACTIVE:
            following = replace(former, lease_id=lease.id)
            try:
                self._record(following)
            except OSError as error:
                self._warn_once(f"cannot keep the compute mode of {former.uuid} for the next lease: {error}")
            else:
                self._done.discard(former.uuid)
                return following
        try:
            mode_before = await self._changed(former, LEASED_MODE, former.mode)
        except ComputeModeNotSet as error:
            self._warn_once(f"cannot restore the compute mode of {former.uuid} to {former.mode} yet: {error}")
            return former
        if mode_before not in (former.mode, LEASED_MODE):
            self._leave_to_administrator(former, mode_before)
        self._forget(former)
        return None

    async def _changed(self, former: SavedMode, expected: ComputeMode, mode: ComputeMode) -> ComputeMode:
        """Change a GPU's mode if it is as expected. Returns the mode before.

        Raises ComputeModeNotSet, also if the driver does not tell the mode before: then nothing was changed, and it is
        not known that someone else did.
        """
        mode_before = await self._change(ComputeModeChange(pci_bus_id=former.pci_bus_id, expected=expected, mode=mode))
        if mode_before is None:
            raise ComputeModeNotSet("the driver does not report the current mode")
        return mode_before

    def _leave_to_administrator(self, former: SavedMode, mode_before: ComputeMode) -> None:
        self._warn_once(
            f"the compute mode of {former.uuid} was set to {mode_before.value} by someone else, and stays so"
        )

    def _record(self, former: SavedMode) -> None:
        """Write the record, with fsync, before the mode is changed. Raises OSError."""
        self._write({**self._former, former.uuid: former})

    def _forget(self, former: SavedMode) -> None:
        for uuids in (self._done, self._seen_changed):
            uuids.discard(former.uuid)
        try:
            self._write({uuid: other for uuid, other in self._former.items() if uuid != former.uuid})
        except OSError as error:
            # This is retried at the next reading, which finds the mode restored.
            self._warn_once(f"cannot write the record of compute modes: {error}")

    def _write(self, former: dict[str, SavedMode]) -> None:
        job_records.write(self._directory, FILE, SavedModes(gpus=tuple(former.values())))
        self._former = former

    def _warn_once(self, warning: str) -> None:
        if warning not in self._warned:
            self._warned.add(warning)
            log.warning(warning)
