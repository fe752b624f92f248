"""For how long a lease has held GPUs, and how long these have done nothing, which the ledger does not know."""

from __future__ import annotations

from dataclasses import replace

from gpulease_protocol.model import Lease, LeaseState
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.core.records import LeaseRecord
from gpulease_server.runtime.lease_idle import idle_s


def with_times(daemon: DaemonState, record: LeaseRecord, lease: Lease) -> Lease:
    """The lease with `held_for_s` and `idle_s`."""
    if lease.granted_at is None:
        return lease
    now = daemon.now()
    if lease.state is LeaseState.ACTIVE and record.granted_at_s is not None:
        held_for_s = now.mono_s - record.granted_at_s
    else:
        held_for_s = ((lease.ended_at or now.at) - lease.granted_at).total_seconds()
    idle = idle_s(daemon.writer, lease, now)
    return replace(lease, held_for_s=_whole(held_for_s), idle_s=None if idle is None else _whole(idle))


def _whole(seconds: float) -> float:
    """Whole seconds: an answer that changes every millisecond would never be the one that the caller has (ETag)."""
    return float(max(int(seconds), 0))
