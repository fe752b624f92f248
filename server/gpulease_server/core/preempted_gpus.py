"""The GPUs that are held for a request which has had others end for it, see `core.preemption`."""

from __future__ import annotations

from collections.abc import Iterator

from gpulease_protocol.model import LeaseState
from gpulease_server.core.backfill import Reservations
from gpulease_server.core.eligibility import min_gpus_of
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.preemption_records import Preemption
from gpulease_server.core.records import Instant, LeaseRecord


def preemptions_under_way(ledger: Ledger, now: Instant, policy: Policy) -> Iterator[tuple[Preemption, LeaseRecord]]:
    """Leases with GPUs that are held, and the requests that they are held for."""
    for one in ledger.preemptions.values():
        record = ledger.leases.get(one.lease_id)
        waits = record is not None and record.lease.state is LeaseState.QUEUED
        if record is not None and waits and one.gpus and now.mono_s < one.held_until_s(policy):
            yield one, record


def preemptions_held(reservations: Reservations) -> Iterator[tuple[Preemption, LeaseRecord]]:
    """Those with GPUs that are still held: not if the calendar has closed one to the request, which needs them all."""
    for one, record in preemptions_under_way(reservations.ledger, reservations.now, reservations.policy):
        if reservations.users.closed_to(record.lease).isdisjoint(one.gpus):
            yield one, record


def hold_preempted_gpus(reservations: Reservations) -> None:
    """Hold what is free of these GPUs, before anything is held for others; and keep what the request needs of its
    limits, so that it can start once the others come."""
    ledger, users = reservations.ledger, reservations.users
    for one, record in preemptions_held(reservations):
        needed = min_gpus_of(ledger, users, record.lease.demand)
        if users.limit_reached(record.lease, needed) is None:
            users.keep_all(record.lease, needed)
        known = (ledger.gpus.get(uuid) for uuid in one.gpus)
        reservations.reserve(record, (gpu for gpu in known if gpu is not None and gpu.lease_id is None))
