"""EXCLUSIVE_PROCESS for the time of a lease, and the former mode after it, where the administrator wants that.

In that mode the driver itself keeps a second process off a leased GPU. The mode outlives every process of ours, so what
it was is on disk before it is changed, and whoever finds the record later puts it back: once the lease has no GPU here
any more, that is when its GPUs are clean.

An administrator is never fought. A mode is changed only from the one that is expected, which is looked at in the same
breath; any other was set by somebody else in the meantime, and stays.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from gpulease.model import ComputeMode, GpuReading, LeaseState, Noun
from gpulease_worker import records
from gpulease_worker.holders import SeenLease
from gpulease_worker.source import ModeChange, ModeNotSet

FILE = "compute_modes.json"
OURS = ComputeMode.EXCLUSIVE_PROCESS

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerMode(Noun):
    """A GPU whose mode was changed, or is about to be."""

    uuid: str
    """The GPU."""
    pci_bus_id: str
    """Where it is: the driver is asked by this."""
    mode: ComputeMode
    """What its mode was."""
    lease_id: str
    """The lease for whose time it is another."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FormerModes(Noun):
    """The file."""

    gpus: tuple[FormerMode, ...] = ()
    """Every GPU whose mode is not its former one."""


class ComputeModes:
    """The modes of a node's GPUs.

    Args:
        data_dir: The worker's; the record lies in it.
        manage: Whether to set the mode for new leases. What an earlier worker has set is put back in any case.
        change: Changes a GPU's mode if it is as expected; answers what it was. Raises ModeNotSet.
    """

    def __init__(
        self, data_dir: Path, manage: bool, change: Callable[[ModeChange], Awaitable[ComputeMode | None]]
    ) -> None:
        self._directory = data_dir
        self._manage = manage
        self._change = change
        self._former: dict[str, FormerMode] = {}
        self._done: set[str] = set()
        """GPUs whose mode was set by this worker, or found set: it is not set a second time for the same lease."""
        self._seen_ours: set[str] = set()
        """GPUs that a reading has shown in our mode."""
        self._refused: dict[str, str] = {}
        """Leases for which a GPU's mode could not be set, by UUID: that is not tried again."""
        self._said: set[str] = set()

    def recover(self) -> None:
        """Take up what an earlier worker has changed."""
        try:
            kept = records.read(self._directory, FILE, FormerModes)
        except ValueError as error:
            self._say(f"compute modes that an earlier worker has set cannot be put back: {error}")
            return
        self._former = {former.uuid: former for former in kept.gpus} if kept is not None else {}

    async def reconcile(self, leases: Sequence[SeenLease], gpus: Sequence[GpuReading]) -> None:
        """Bring the modes in line with the leases that have GPUs here. `gpus`: a reading, not older than the leases."""
        if not self._manage and not self._former:
            return
        holding = {uuid: lease for lease in leases for uuid in lease.gpus}
        for gpu in gpus:
            lease, former = holding.get(gpu.uuid), self._former.get(gpu.uuid)
            if former is not None and (lease is None or lease.id != former.lease_id):
                former = await self._hand_over(former, lease)
            if former is not None:
                await self._hold(former, gpu, lease)
            elif self._manage and lease is not None and lease.state is LeaseState.ACTIVE:
                await self._take(gpu, lease)

    async def _take(self, gpu: GpuReading, lease: SeenLease) -> None:
        """Set the mode of a GPU that has just been leased; any mode but the default is somebody's wish, and stays."""
        if gpu.pci_bus_id is None or gpu.compute_mode is not ComputeMode.DEFAULT:
            return
        if self._refused.get(gpu.uuid) == lease.id:
            return
        former = FormerMode(uuid=gpu.uuid, pci_bus_id=gpu.pci_bus_id, mode=gpu.compute_mode, lease_id=lease.id)
        try:
            self._record(former)
        except OSError as error:
            self._say(f"the compute mode of {gpu.uuid} stays, for want of a record of it: {error}")
            return
        await self._set(former)

    async def _set(self, former: FormerMode) -> None:
        self._done.add(former.uuid)
        try:
            found = await self._changed(former, former.mode, OURS)
        except ModeNotSet as error:
            self._say(f"the compute mode of {former.uuid} cannot be set: {error}")
            if error.refused:
                self._refused[former.uuid] = former.lease_id
                self._forget(former)
            else:
                self._done.discard(former.uuid)
            return
        if found not in (former.mode, OURS):
            self._leave(former, found)

    async def _hold(self, former: FormerMode, gpu: GpuReading, lease: SeenLease | None) -> None:
        """Leave a leased GPU as it is; set its mode only where an earlier worker ended before it could."""
        if former.uuid not in self._done and lease is not None and lease.state is LeaseState.ACTIVE:
            await self._set(former)
        elif gpu.compute_mode is OURS:
            self._seen_ours.add(former.uuid)
        elif former.uuid in self._seen_ours and gpu.compute_mode is not None:
            self._leave(former, gpu.compute_mode)

    async def _hand_over(self, former: FormerMode, lease: SeenLease | None) -> FormerMode | None:
        """The lease is gone: put the mode back, or keep it for the next lease. The record that is left, if any."""
        if self._manage and lease is not None and lease.state is LeaseState.ACTIVE:
            following = replace(former, lease_id=lease.id)
            try:
                self._record(following)
            except OSError as error:
                self._say(f"the compute mode of {former.uuid} cannot be kept for the next lease: {error}")
            else:
                self._done.discard(former.uuid)
                return following
        try:
            found = await self._changed(former, OURS, former.mode)
        except ModeNotSet as error:
            self._say(f"the compute mode of {former.uuid} cannot be put back to {former.mode} yet: {error}")
            return former
        if found not in (former.mode, OURS):
            self._leave(former, found)
        self._forget(former)
        return None

    async def _changed(self, former: FormerMode, expected: ComputeMode, mode: ComputeMode) -> ComputeMode:
        """Change a GPU's mode if it is as expected; what it was. Raises ModeNotSet, also where the driver does not tell
        what it was: then nothing was changed, and it is not known that somebody else did."""
        found = await self._change(ModeChange(pci_bus_id=former.pci_bus_id, expected=expected, mode=mode))
        if found is None:
            raise ModeNotSet("the driver does not tell what it is")
        return found

    def _leave(self, former: FormerMode, found: ComputeMode) -> None:
        self._say(f"the compute mode of {former.uuid} was set to {found.value} by somebody else, and is left so")

    def _record(self, former: FormerMode) -> None:
        """Have it on disk, with fsync, before anything is changed. Raises OSError."""
        self._write({**self._former, former.uuid: former})

    def _forget(self, former: FormerMode) -> None:
        for known in (self._done, self._seen_ours):
            known.discard(former.uuid)
        try:
            self._write({uuid: other for uuid, other in self._former.items() if uuid != former.uuid})
        except OSError as error:
            # It is tried again at the next reading; a mode that was put back is found so.
            self._say(f"the record of compute modes cannot be written: {error}")

    def _write(self, former: dict[str, FormerMode]) -> None:
        records.write(self._directory, FILE, FormerModes(gpus=tuple(former.values())))
        self._former = former

    def _say(self, trouble: str) -> None:
        """Log it once."""
        if trouble not in self._said:
            self._said.add(trouble)
            log.warning(trouble)
