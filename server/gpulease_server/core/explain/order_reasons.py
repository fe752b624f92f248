"""Why a request has its place in the queue, in words."""

from __future__ import annotations

from gpulease_server.core.demand_classes import rank_of
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.order import position
from gpulease_server.core.records import LeaseRecord


def describe_place(ledger: Ledger, record: LeaseRecord) -> str:
    """The place of a request in the queue, to be put behind what it asks for: "; number 4 in the queue"."""
    place = position(ledger, record)
    if place is None:
        return ""
    if record.lease.id == ledger.goes_first:
        return "; it goes first, because it has waited longest"
    higher = ledger.demand_classes.count_before((rank_of(record.lease.demand), -1, 0, ""))
    behind = f", behind {higher} of higher priority" if higher else ""
    return f"; number {place} in the queue{behind}"
