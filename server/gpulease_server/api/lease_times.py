"""For how long a lease has held GPUs, and how long these have done nothing, which the ledger does not know."""

from __future__ import annotations

from dataclasses import replace

from gpulease_protocol.model import GpuState, Lease, LeaseState
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.core.gpu import state_of
from gpulease_server.core.records import Instant, LeaseRecord


def with_times(daemon: DaemonState, record: LeaseRecord, lease: Lease) -> Lease:
    """The lease with `held_for_s` and `idle_s`."""
    if lease.granted_at is None:
        return lease
    now = daemon.now()
    if lease.state is LeaseState.ACTIVE and record.granted_at_s is not None:
        held_for_s = now.mono_s - record.granted_at_s
    else:
        held_for_s = ((lease.ended_at or now.at) - lease.granted_at).total_seconds()
    return replace(lease, held_for_s=_whole(held_for_s), idle_s=_idle_s(daemon, lease, now))


def _idle_s(daemon: DaemonState, lease: Lease, now: Instant) -> float | None:
    """The least idle time of its GPUs; None unless it is known of each of them."""
    if lease.state is not LeaseState.ACTIVE or not lease.gpus:
        return None
    ledger, held, found = daemon.ledger, daemon.writer.metrics.usage.held, []
    for device in lease.gpus:
        gpu, used = ledger.gpus.get(device.uuid), held.get(device.uuid)
        if gpu is None or used is None or not used.read or used.lease_id != lease.id:
            return None
        if state_of(ledger, gpu, now, daemon.policy) is not GpuState.LEASED:
            return None
        found.append(now.mono_s - used.idle_since_s)
    return _whole(min(found))


def _whole(seconds: float) -> float:
    """Whole seconds: an answer that changes every millisecond would never be the one that the caller has (ETag)."""
    return float(max(int(seconds), 0))
