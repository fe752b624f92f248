"""What the ledger does not know of a lease: for how long it has held GPUs, how long these have done nothing, and when a
request is expected to start."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from gpulease_protocol.model import Lease, LeaseState
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.forecast.expected_start import ExpectedStart
from gpulease_server.core.order import Positions
from gpulease_server.core.presentation import lease_view
from gpulease_server.core.records import LeaseRecord
from gpulease_server.runtime.lease_idle import idle_s


def timed_view(daemon: DaemonState, record: LeaseRecord, positions: Positions | None = None) -> Lease:
    """A lease as it is shown, with `held_for_s` and `idle_s`. `positions`: for one of many leases."""
    return with_times(daemon, record, lease_view(daemon.ledger, record, daemon.now(), daemon.policy, positions))


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


async def expected_starts(daemon: DaemonState, records: Iterable[LeaseRecord]) -> Mapping[str, ExpectedStart]:
    """By lease id, when these requests are expected to start. To be found before they are shown: they may be granted
    meanwhile."""
    if all(daemon.ledger.place_of(record) is None for record in records):
        return {}
    return await daemon.expected_starts()


def _whole(seconds: float) -> float:
    """Whole seconds: an answer that changes every millisecond would never be the one that the caller has (ETag)."""
    return float(max(int(seconds), 0))
