"""Why a request has its place in the queue, in words and numbers."""

from __future__ import annotations

import math

from gpulease_protocol.explanation import RecentUsage
from gpulease_server.core.demand_classes import rank_of
from gpulease_server.core.group_usage import group_of, group_usage, shares
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.order import position
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant, LeaseRecord
from gpulease_server.core.usage import STEP, ordering_s, usage_of

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
    peers = [one for one in less if _are_peers(one, own)]
    others = ", ".join(dict.fromkeys(_said(one, "has ") for one in less if one not in peers))
    said += f"; of recent GPU-hours {others}, and {_said(own)}, so those go first" if others else ""
    if not peers:
        return said
    where = (
        f"in group {own.group}" if {one.group for one in peers} == {own.group} else "where groups have about as much"
    )
    alike = ", ".join(f"{one.user} has {one.gpu_hours:.1f}" for one in peers)
    return f"{said}; of recent GPU-hours {where} {alike}, and {own.user} {own.gpu_hours:.1f}, so those go first"


def recent_usage(ledger: Ledger, record: LeaseRecord, now: Instant, policy: Policy) -> tuple[RecentUsage, ...]:
    """The usage of a request's user, and of users with less whose requests go before it for that; the user alone where
    usage does not order."""
    user = record.lease.holder.user
    own = _usage(ledger, user, now, policy)
    rank, group = rank_of(record.lease.demand), ledger.ordered_place(record)[:2]
    heads = ledger.demand_classes.heads
    before = {members.key.user: None for _, _, members in heads if (rank, -1) < members.group < group}
    found = (_usage(ledger, name, now, policy) for name in before if name != user)
    less = [one for one in found if _is_less(one, own)]  # others are before it for what they had used
    return (own, *sorted(less, key=lambda one: (_level(one), one.gpu_hours, one.user))[:MAX_NAMED])


def _usage(ledger: Ledger, user: str | None, now: Instant, policy: Policy) -> RecentUsage:
    hours = ordering_s(usage_of(ledger, user, now, policy)) / 3600
    group = group_of(ledger, user, policy) if policy.fair_share else None
    if group is None:
        return RecentUsage(user=user or "", gpu_hours=hours)
    return RecentUsage(
        user=user or "",
        gpu_hours=hours,
        group=group,
        group_gpu_hours=ordering_s(group_usage(ledger, group, now, policy)) / 3600,
        group_share=shares(policy.group_shares)[group],
    )


def _level(one: RecentUsage) -> float:
    """What is compared first: GPU-hours of a group by its share, or of a user in none."""
    return one.gpu_hours if one.group_gpu_hours is None else one.group_gpu_hours / (one.group_share or 1.0)


def _is_less(one: RecentUsage, own: RecentUsage) -> bool:
    return _level(one) < _level(own) or (_are_peers(one, own) and one.gpu_hours < own.gpu_hours)


def _are_peers(one: RecentUsage, own: RecentUsage) -> bool:
    """True where their own usages are compared, and at least one of them is in a group."""
    if one.group is None and own.group is None:
        return False
    return one.group == own.group or abs(math.log2(max(_level(one), 1.0) / max(_level(own), 1.0))) < STEP


def _said(one: RecentUsage, verb: str = "") -> str:
    """The usage that is compared first, in words: "group vision has 120.0"."""
    if one.group_gpu_hours is None:
        return f"{one.user} {verb}{one.gpu_hours:.1f}"
    each = "" if one.group_share == 1.0 else f" ({_level(one):.1f} for each of {one.group_share:g} users)"
    return f"group {one.group} {verb}{one.group_gpu_hours:.1f}{each}"


def _kept(ledger: Ledger) -> list[LeaseRecord]:
    return [ledger.leases[lease_id] for lease_id in ledger.places_kept]
