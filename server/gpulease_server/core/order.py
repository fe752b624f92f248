"""Who goes first: the order in which requests are looked at.

    priority, then usage (where that counts), then arrival

The order is strict: no request gets a GPU that one before it could have had, but for backfill, which is bounded
(`core.backfill`). It says who is next, and takes nothing from those that run.

No request starves
------------------
Later requests of a higher priority, or of users with less usage, may arrive without end. So the ledger counts the
grants that were made while a later group waits. When there were `max_overtakes`, the requests are looked at in order
of arrival, and the first that waits for nothing but the end of leases *goes first* from then on: before every priority,
until it is granted or leaves the queue. Then the count begins again. Several go first in order of arrival.

A request that goes first *claims* what it needs of each limit of its user, group and token, and of the GPUs of its
token's budget: others under that limit get what is left. Everyone else is not delayed by that. While others have the
GPUs that it could use it claims nothing, unless its limits have kept it from these as often as it may be bypassed; see
`core.user_order`.

So one that its limit keeps out goes first like any other; as it may wait for long, the search goes on behind it, to one
that no limit keeps out. No one is chosen whom a limit keeps out that is claimed already, nor who waits for the same
GPUs as one that goes first: each is considered again when that one is granted or leaves.

A request with `n` older ones therefore goes first, or waits only for those that do, after at most
`(n + 1) * (max_overtakes + 1)` grants. From then on others get GPUs that it could use `max_bypass` times because of its
limits; then no newer one takes anything of these that it needs, and `core.backfill` bounds how many pass it.

Once GPUs are held for a request it keeps its place
---------------------------------------------------
Usage falls when a lease ends, by its entry charge (`core.usage`): just then a GPU comes free. So a user who is behind
for what they hold would be before the next moment, take a GPU that is held, and be behind again, and the others that
are held would wait without effect. Therefore a request that GPUs are held for (`core.backfill`) stays on the step on
which its user was at that moment, and no user who is behind it falls to a step before it. Others still go before it who
had used less all along, as do higher priorities, and the one that goes first. It keeps the place until it is granted or
leaves, or no end of a lease of others would help it. One request of each user and priority keeps a place: one who asks
for many gets the others in order of what they have used by then. What its user uses meanwhile, without entry charges,
moves its step: who holds a GPU for a week and waits for the rest of its node does not keep that from all others.

The same holds for a request that a limit of its group is claimed for (`core.user_order`): the others of the group would
take that back in turns.

| what happens | what follows |
|---|---|
| all requests are of one priority and usage does not count | the order is that of arrival, and nothing is counted |
| the request that goes first needs a node that goes silent | it claims nothing, and delays no one; others are chosen |
| it waits for GPUs that leases hold | it is passed as often as `core.backfill` allows, then GPUs are held for it |
| others hold them for long | who is under its limits goes on; its turn comes when they are given back |
| its limit is set below what it asks for, or its GPU-hours are used | it is not chosen, and claims nothing |
| the daemon restarts, or another takes over | the count begins again, as bypasses do, and places are kept again |
| one that keeps its place needs a node that goes silent | it lets the place go, and another of its user may keep one |
| the limit of its user or token, or its array, keeps out one that keeps its place | it lets the place go |
| the limit of its group keeps out one that keeps its place | the place stays; no GPU is held for it |
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

from gpulease_server.core.backfill import Reservations
from gpulease_server.core.demand_classes import Group, OrderedPlace, Place, rank_of
from gpulease_server.core.eligibility import divided_queue, is_eligible
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.group_usage import used_step
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.order_records import Overtakes, PlacesKept
from gpulease_server.core.records import LeaseRecord
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import LimitedDemand, usage_by_user
from gpulease_server.core.user_order import Out, UserOrder


def position(ledger: Ledger, record: LeaseRecord) -> int | None:
    """Place in the queue, 1 is next; None for a request that is not in it. Costs one look at each class of requests
    where the order is not that of arrival, and at each user with retries; for those of many see `Positions`."""
    classes, by_arrival = ledger.demand_classes, ledger.position_by_arrival(record)
    if by_arrival is None or _are_all_by_arrival(ledger):
        return by_arrival
    place = ledger.ordered_place(record)
    before = classes.count_before(place)
    for group, places in _paused(ledger):
        if group <= place[:2]:
            before += len(places) if group < place[:2] else bisect.bisect_left(places, place[2:])
    for one in (ledger.leases[lease_id] for lease_id in ledger.alone):
        # It was counted at the place that it would have among others of its user.
        group = classes.group_of(one.lease.demand, one.lease.holder.user)
        before += (ledger.ordered_place(one) < place) - ((*group, one.arrival, one.lease.id) < place)
    return before + 1


def _are_all_by_arrival(ledger: Ledger) -> bool:
    """True while the order is that of arrival, of those too that pause before a retry or go first."""
    if not ledger.is_by_arrival:
        return False
    groups = {group for group, _ in _paused(ledger)} | {place[:2] for place, _, _ in ledger.demand_classes.heads[:1]}
    return len(groups.union(ledger.ordered_place(ledger.leases[one])[:2] for one in ledger.go_first)) <= 1


def _paused(ledger: Ledger) -> list[tuple[Group, list[Place]]]:
    """The requests that pause before a retry, for each user and priority: their group, and their places."""
    step_of = ledger.demand_classes.step_of
    return [((rank, step_of(user)), places) for (rank, user), places in ledger.paused.items()]


class Positions:
    """The places in the queue of many requests, as of one moment: what `position` says of each. The first one costs a
    look at the whole queue where the order is not that of arrival, and the others next to nothing."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._are_all_by_arrival = _are_all_by_arrival(ledger)
        self._places: list[OrderedPlace] | None = None

    def of(self, record: LeaseRecord) -> int | None:
        """Place in the queue, 1 is next; None for a request that is not in it."""
        by_arrival = self._ledger.position_by_arrival(record)
        if by_arrival is None or self._are_all_by_arrival:
            return by_arrival
        if self._places is None:
            self._places = sorted(map(self._ledger.ordered_place, self._ledger.queued()))
        return bisect.bisect_left(self._places, self._ledger.ordered_place(record)) + 1


def in_order(ledger: Ledger) -> Iterator[LeaseRecord]:
    """The requests in the queue, the next one first; those that pause before a retry last where the order is not that
    of arrival."""
    if _are_all_by_arrival(ledger):
        yield from ledger.queued()
        return
    ids = ledger.alone
    alone = sorted((ledger.leases[lease_id] for lease_id in ids), key=ledger.ordered_place)
    others = (ledger.leases[lease_id] for lease_id in ledger.demand_classes.in_order() if lease_id not in ids)
    yield from heapq.merge(alone, others, key=ledger.ordered_place)
    for lease_id in ledger.not_before:
        record = ledger.leases.get(lease_id)
        if record is not None and ledger.place_of(record) is not None:
            yield record


def count_overtake(turn: Turn, place: OrderedPlace) -> None:
    """Count a grant that was made at this place, if others wait behind it in a later group. None to a request that goes
    first."""
    ledger, heads = turn.ledger, turn.ledger.demand_classes.heads
    if place[0] >= 0 and heads and heads[-1][0][:2] > place[:2]:
        turn.put(Overtakes(min(ledger.overtakes + 1, turn.policy.max_overtakes)))


def keep_places(turn: Turn, order: UserOrder) -> None:
    """After a walk: requests keep their places, moved back by what their users have used since.

    One request of each user and priority does, if GPUs are held for it or it claims a limit of its group. A request
    that the end of no lease would help does so no longer."""
    ledger, held_at = turn.ledger, order.reservations.held_at
    if not turn.policy.fair_share or not (held_at or ledger.places_kept):
        return
    kept, askers, let_go = dict[str, int](), set[tuple[str | None, int]](), list[str]()
    for lease_id, step in ledger.places_kept.items():
        record = ledger.leases[lease_id]
        if lease_id not in held_at and not _waits_for_others(turn, order, record):
            let_go.append(lease_id)
            continue
        askers.add(_asker(record))
        if (used := used_step(ledger, record.lease.holder.user, turn.now, turn.policy)) > step:
            kept[lease_id] = used
    for lease_id, step in held_at.items():
        asker = _asker(ledger.leases[lease_id])
        if lease_id not in ledger.go_first and asker not in askers:
            kept[lease_id] = step
            askers.add(asker)
    if kept or let_go:
        turn.put(PlacesKept(tuple(kept.items()), tuple(let_go)))


def _waits_for_others(turn: Turn, order: UserOrder, record: LeaseRecord) -> bool:
    """True for a request that the ends of leases would help, and that nothing of its own user keeps out."""
    if not is_eligible(turn.ledger, record, turn.now) or order.is_kept_out_alone(record):
        return False
    return order.waits_for_leases(record)


def _asker(record: LeaseRecord) -> tuple[str | None, int]:
    return record.lease.holder.user, rank_of(record.lease.demand)


def choose_first(turn: Turn, reservations: Reservations) -> None:
    """Have the request go first that has waited longest, if enough others were granted before it; and those that have
    waited even longer, and that a limit keeps out which no one claims."""
    ledger, policy = turn.ledger, turn.policy
    if ledger.overtakes < policy.max_overtakes or ledger.is_by_arrival:
        return
    # By arrival, so with counts of its own of what older requests claim.
    order = UserOrder(replace(reservations, users=usage_by_user(ledger, policy.limits, turn.now)))
    divided_queue(ledger, order.users, policy)
    found, wait_for_gpus = list[str](), set[LimitedDemand]()
    for record in _oldest_of_each_class(ledger):
        if record.lease.id in turn.pending or not is_eligible(ledger, record, turn.now):
            continue
        if not order.waits_for_leases(record):
            continue
        kept_out, limited = order.kept_out(record), order.users.demand_within(record.lease)
        if record.lease.id in ledger.go_first:
            if kept_out is None:
                wait_for_gpus.add(limited)
            order.claim(record)
            continue
        if kept_out is Out.BEHIND or (kept_out is None and limited in wait_for_gpus):
            continue
        found.append(record.lease.id)
        if kept_out is None:
            break
        order.claim(record, always=True)  # one of each limit at a time is enough
    turn.put(Overtakes(0, tuple(found)))


def _oldest_of_each_class(ledger: Ledger) -> list[LeaseRecord]:
    """The oldest request of each class, in order of arrival; of a class with one that goes first, that one."""
    classes = ledger.demand_classes
    chosen = {members: members.places[0] for members in classes.classes.values()}
    for lease_id in ledger.go_first:
        if (members := classes.class_of.get(lease_id)) is not None:
            chosen[members] = (ledger.leases[lease_id].arrival, lease_id)
    return [ledger.leases[lease_id] for _, lease_id in sorted(chosen.values())]
