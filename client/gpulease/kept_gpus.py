"""GPUs that a process cannot give back, because it has used CUDA: they go from one of its blocks to the next.

CUDA keeps memory and the device files of its GPUs until the process ends. If the lease ended before, its GPUs would
drain until then, and no one would get them, not even the next block of the same process. So the lease is kept, and the
blocks of the process share out its GPUs. What must always hold:

- A kept GPU is in one place: here, or in one block.
- No block waits in the daemon's queue for what is kept here. It is called back: its request is withdrawn, and it takes
  what is here, and asks for what it still lacks.
- One block at a time waits with kept GPUs in its hands. Two might wait for each other.

A forked child keeps nothing: its parent holds the leases.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping
from typing import ClassVar

from gpulease.device_reuse import DeviceRequirements
from gpulease.lease import HeldLease, LeaseClient
from gpulease.sansio.failover import Destination
from gpulease_protocol.errors import GpuleaseError, LeaseLost, NotFound, StaleToken
from gpulease_protocol.model import Device, Lease

Holding = Mapping[Device, HeldLease]
"""GPUs, and the lease that each is in."""


class CalledBack(Exception):
    """Raised in a waiting request, to withdraw it."""


class Waiter:
    """A block that waits for GPUs, and what it has of them. Called with its lease when that is queued."""

    announces = True
    """The wait is announced, as if there were no `on_queued`."""

    def __init__(self, count: int, uuids: frozenset[str], requirements: DeviceRequirements) -> None:
        self.count = count
        self.uuids = uuids
        self.requirements = requirements
        self.taken: dict[Device, HeldLease] = {}
        self.lease_id: str | None = None
        self.called_back = False
        self.keeper: GpuKeeper | None = None

    @property
    def lacks(self) -> int:
        """How many GPUs are still missing; 1 for a block that takes whatever there is and has nothing."""
        return self.count - len(self.taken) if self.count != -1 else int(not self.taken)

    def fits(self, gpu: Device) -> bool:
        """True if the block can use this GPU."""
        model, memory = self.requirements.gpu_model, self.requirements.min_free_memory_bytes
        return (
            gpu.uuid in self.uuids
            and (model is None or model.lower() in (gpu.name or "").lower())
            and (memory is None or memory <= (gpu.memory_total_bytes or 0))
        )

    def __call__(self, lease: Lease) -> None:
        assert self.keeper is not None
        self.keeper.queued(self, lease.id)


class GpuKeeper:
    """The GPUs that this process keeps of one daemon, and the blocks that wait for GPUs of it."""

    _of: ClassVar[dict[Destination, GpuKeeper]] = {}

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[Device, HeldLease] = {}
        self._waiters: list[Waiter] = []

    @classmethod
    def of(cls, destination: Destination) -> GpuKeeper:
        """That of one daemon."""
        return cls._of.setdefault(destination, cls())

    @classmethod
    def forget(cls) -> None:
        """Keep nothing, in a forked child."""
        cls._of.clear()

    @classmethod
    def give_back(cls) -> list[HeldLease]:
        """Take out the leases that no block uses, for the caller to release."""
        idle: list[HeldLease] = []
        for keeper in list(cls._of.values()):
            with keeper._lock:
                kept = keeper._kept
                found = {lease for lease in kept.values() if all(kept.get(gpu) is lease for gpu in lease.gpus)}
                keeper._kept = {gpu: lease for gpu, lease in kept.items() if lease not in found}
            idle += found
        return idle

    def kept(self) -> set[str]:
        """UUIDs of the GPUs that are kept for the next block."""
        with self._lock:
            return {gpu.uuid for gpu, lease in self._kept.items() if lease.active}

    def take(self, waiter: Waiter) -> int:
        """Give a block what is kept for it; how many GPUs it still lacks. It is among the waiters until `done`."""
        with self._lock:
            waiter.keeper, waiter.lease_id, waiter.called_back = self, None, False
            if waiter not in self._waiters:
                self._waiters.append(waiter)
            for gpu in self._usable(waiter):
                waiter.taken[gpu] = self._kept.pop(gpu)
            return waiter.lacks

    def queued(self, waiter: Waiter, lease_id: str) -> None:
        """Note the request of a block. Raises CalledBack if something is kept for it since it looked."""
        with self._lock:
            waiter.lease_id = lease_id
            waiter.called_back = bool(self._usable(waiter))
            if waiter.called_back:
                raise CalledBack

    def done(self, waiter: Waiter, client: LeaseClient) -> None:
        """A block waits no longer. Others may take what it did not."""
        with self._lock:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
        self._call_back(client)

    def keep(self, gpus: Holding, client: LeaseClient) -> None:
        """Keep GPUs for the next block, and call one back that waits for them."""
        with self._lock:
            self._kept.update(gpus)
        self._call_back(client)

    def _usable(self, waiter: Waiter) -> list[Device]:
        """Which kept GPUs a block would take now."""
        self._kept = {gpu: lease for gpu, lease in self._kept.items() if lease.active}
        usable = [gpu for gpu in self._kept if waiter.fits(gpu)]
        if waiter.count == -1:
            return usable
        if len(usable) < waiter.lacks and any(one.taken for one in self._waiters if one is not waiter):
            return []
        return sorted(usable, key=lambda gpu: gpu.index)[: waiter.lacks]

    def _call_back(self, client: LeaseClient) -> None:
        """Withdraw the request of the first block that could take something; the block looks again."""
        while True:
            with self._lock:
                waiter = next(
                    (
                        one
                        for one in self._waiters
                        if one.lease_id is not None and not one.called_back and self._usable(one)
                    ),
                    None,
                )
                if waiter is None or waiter.lease_id is None:
                    return
                waiter.called_back, lease_id = True, waiter.lease_id
            try:
                client.release(lease_id, None)
            except (StaleToken, LeaseLost, NotFound):
                continue  # it was granted meanwhile, or given up
            except GpuleaseError:
                return  # the request is withdrawn when the daemon is back
            return


os.register_at_fork(after_in_child=GpuKeeper.forget)
