"""Renewals and releases, in steps: the hot path takes the steps that need not wait without a task."""

from __future__ import annotations

import asyncio

from gpulease_protocol.errors import NotFound
from gpulease_protocol.model import Lease
from gpulease_server.api.auth.callers import Caller
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.problems import MAYBE_PRUNED
from gpulease_server.core.happenings import ReleaseRequested, RenewalRequested
from gpulease_server.core.lease import answer_for_old_lease
from gpulease_server.core.records import LeaseRecord
from gpulease_server.runtime import ids


def renewal(record: LeaseRecord, fencing_token: int | None) -> RenewalRequested:
    """The renewal of a lease."""
    return RenewalRequested(cause=ids.new_id("request"), lease_id=record.lease.id, fencing_token=fencing_token)


def release(record: LeaseRecord, fencing_token: int | None, caller: Caller) -> ReleaseRequested:
    """The release of a lease; by another than its holder it is revoked."""
    revoked_by = None if caller.owns(record.lease.holder) else caller.user
    return ReleaseRequested(
        cause=ids.new_id("request"), lease_id=record.lease.id, fencing_token=fencing_token, revoked_by=revoked_by
    )


async def find_lease(daemon: DaemonState, lease_id: str) -> LeaseRecord:
    """The record of a lease. Raises `NotFound`."""
    record = daemon.ledger.leases.get(lease_id) or await asyncio.to_thread(daemon.store.lease, lease_id)
    if record is None:
        raise NotFound(f"There is no lease {lease_id}.", remedy=MAYBE_PRUNED.format("leases"))
    return record


async def decided(daemon: DaemonState, record: LeaseRecord, happening: RenewalRequested | ReleaseRequested) -> Lease:
    """The lease after a renewal or release. Raises the error that the core answered, or `Unavailable`."""
    # A lease that is only in the database ended long ago, unless the ledger is still being read.
    if daemon.writer.problem is None and happening.lease_id not in daemon.ledger.leases:
        return answer_for_old_lease(record.lease, happening)
    answer = await daemon.submit(happening)
    assert isinstance(answer, Lease)
    return answer
