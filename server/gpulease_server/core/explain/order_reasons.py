"""Why a request has its place in the queue, in words and numbers."""

from __future__ import annotations

from gpulease_protocol.explanation import RecentUsage
from gpulease_server.core.demand_classes import rank_of
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.order import position
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant, LeaseRecord
from gpulease_server.core.usage import ordering_s, usage_of

MAX_NAMED = 3
"""Users with less usage that are named."""


def describe_place(ledger: Ledger, record: LeaseRecord, usage: tuple[RecentUsage, ...]) -> str:
    """The place of a request in the queue, to be put behind what it asks for: "; number 4 in the queue". `usage`: what
    `recent_usage` says."""
    place = position(ledger, record)
    if place is None:
        return ""
    if record.lease.id in ledger.go_first:
        return "; it goes first, because it has waited longest"
    higher = ledger.demand_classes.count_before((rank_of(record.lease.demand), -1, 0, ""))
    said = f"; number {place} in the queue" + (f", behind {higher} of higher priority" if higher else "")
    if record.lease.id in ledger.places_kept:
        return f"{said}, and keeps this place, because GPUs were held for it"
    own_place, rank = ledger.ordered_place(record), rank_of(record.lease.demand)
    before = [one for one in map(ledger.ordered_place, _kept(ledger)) if one[0] == rank and one < own_place]
    said += f", behind {len(before)} that GPUs were held for" if before else ""
    own, *less = usage
    if not less:
        return said
    others = ", ".join(f"{one.user} has {one.gpu_hours:.1f}" for one in less)
    return f"{said}; of recent GPU-hours {others}, and {own.user} {own.gpu_hours:.1f}, so those go first"


def recent_usage(ledger: Ledger, record: LeaseRecord, now: Instant, policy: Policy) -> tuple[RecentUsage, ...]:
    """The usage of a request's user, and of users with less whose requests go before it for that; the user alone where
    usage does not order."""
    user = record.lease.holder.user
    own = RecentUsage(user=user or "", gpu_hours=ordering_s(usage_of(ledger, user, now, policy)) / 3600)
    rank, group = rank_of(record.lease.demand), ledger.ordered_place(record)[:2]
    heads = ledger.demand_classes.heads
    before = {members.key.user: None for _, _, members in heads if (rank, -1) < members.group < group}
    found = (
        RecentUsage(user=name or "", gpu_hours=ordering_s(usage_of(ledger, name, now, policy)) / 3600)
        for name in before
        if name != user
    )
    less = [one for one in found if one.gpu_hours < own.gpu_hours]  # others are before it for what they had used
    return (own, *sorted(less, key=lambda one: (one.gpu_hours, one.user))[:MAX_NAMED])


def _kept(ledger: Ledger) -> list[LeaseRecord]:
    return [ledger.leases[lease_id] for lease_id in ledger.places_kept]
