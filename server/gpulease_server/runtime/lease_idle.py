"""For how long the GPUs of a lease have done nothing, as their readings show, which the ledger does not know."""

from __future__ import annotations

from gpulease_protocol.model import GpuState, Lease, LeaseState
from gpulease_server.core.gpu import state_of
from gpulease_server.core.records import Instant
from gpulease_server.runtime.writer import Writer


def idle_s(writer: Writer, lease: Lease, now: Instant) -> float | None:
    """The least idle time of the GPUs of a lease, in seconds; None unless it is active and all of them are known."""
    if lease.state is not LeaseState.ACTIVE or not lease.gpus:
        return None
    ledger, held, found = writer.committed, writer.metrics.usage.held, []
    for device in lease.gpus:
        gpu, used = ledger.gpus.get(device.uuid), held.get(device.uuid)
        if gpu is None or used is None or not used.read or used.lease_id != lease.id:
            return None
        if state_of(ledger, gpu, now, writer.policy) is not GpuState.LEASED:
            return None
        found.append(now.mono_s - used.idle_since_s)
    return min(found)
