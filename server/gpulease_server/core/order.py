"""Who goes first: the order in which requests are looked at.

    priority, then usage (where that counts), then arrival

The order is strict: no request gets a GPU that one before it could have had, but for backfill, which is bounded
(`core.backfill`). It says who is next, and takes nothing from those that run.

No request starves
------------------
Later requests of a higher priority, or of users with less usage, may arrive without end. So of every
`max_overtakes + 1` grants that are made while the order is not that of arrival, at least one goes to the request that
has waited longest. The ledger counts the grants that were made while a later group waits; when there were
`max_overtakes`, the request that arrived first of all that could be served *goes first*, before every priority, until
it is granted, leaves the queue, or cannot be served any more. Then the count begins again.

A request with `n` older ones is therefore granted after at most `(n + 1) * (max_overtakes + 1)` grants, and as many
more as `core.backfill` lets pass each of the `n + 1`. A request that is not eligible, or that no node can serve, is
passed over: it delays no one, and is considered again after the next `max_overtakes` grants.

| what happens | what follows |
|---|---|
| all requests are of one priority and usage does not count | the order is that of arrival, and nothing is counted |
| the request that goes first needs a node that goes silent | another one goes first |
| it waits for GPUs that leases hold | it is passed as often as `core.backfill` allows, then GPUs are held for it |
| the daemon restarts, or another takes over | the count begins again, as bypasses do |
"""

from __future__ import annotations

from collections.abc import Iterator

from gpulease_server.core.backfill import Reservations
from gpulease_server.core.demand_classes import OrderedPlace
from gpulease_server.core.eligibility import is_eligible, min_gpus_of
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.order_records import Overtakes
from gpulease_server.core.records import LeaseRecord
from gpulease_server.core.turn import Turn


def position(ledger: Ledger, record: LeaseRecord) -> int | None:
    """Place in the queue, 1 is next; None for a request that is not in it. Costs one look at each class of requests
    where the order is not that of arrival."""
    classes, by_arrival = ledger.demand_classes, ledger.position_by_arrival(record)
    if by_arrival is None or classes.is_one_group:
        return by_arrival
    place, first = ledger.ordered_place(record), ledger.leases.get(ledger.goes_first or "")
    if first is record:
        return 1
    paused = (ledger.leases.get(lease_id) for lease_id in ledger.not_before)
    in_queue = (one for one in paused if one is not None and ledger.place_of(one) is not None)
    before = classes.count_before(place) + sum(ledger.ordered_place(one) < place for one in in_queue)
    if first is not None:
        # Where `count_before` has it: at the place that it would have without going first.
        group = classes.group_of(first.lease.demand, first.lease.holder.user)
        before += (*group, first.number, first.lease.id) > place
    return before + 1


def in_order(ledger: Ledger) -> Iterator[LeaseRecord]:
    """The requests in the queue, the next one first; those that pause before a retry last where the order is not that
    of arrival."""
    if ledger.demand_classes.is_one_group:
        yield from ledger.queued()
        return
    first = ledger.leases.get(ledger.goes_first or "")
    if first is not None:
        yield first
    for lease_id in ledger.demand_classes.in_order():
        if lease_id != ledger.goes_first:
            yield ledger.leases[lease_id]
    for lease_id in ledger.not_before:
        record = ledger.leases.get(lease_id)
        if record is not None and ledger.place_of(record) is not None:
            yield record


def count_overtake(turn: Turn, place: OrderedPlace) -> None:
    """Count a grant that was made at this place, if others wait behind it in a later group. One to the request that
    goes first begins the count again."""
    ledger, heads = turn.ledger, turn.ledger.demand_classes.heads
    if place[0] < 0:
        turn.put(Overtakes(0, None))
    elif heads and heads[-1][0][:2] > place[:2]:
        turn.put(Overtakes(min(ledger.overtakes + 1, turn.policy.max_overtakes), ledger.goes_first))


def choose_first(turn: Turn, reservations: Reservations) -> None:
    """Have the request go first that has waited longest, if enough others were granted before it."""
    ledger, policy = turn.ledger, turn.policy
    if ledger.goes_first is not None:
        if _takes_part(ledger.leases[ledger.goes_first], reservations):
            return
        turn.put(Overtakes(ledger.overtakes, None))
    if ledger.overtakes < policy.max_overtakes or ledger.demand_classes.is_one_group:
        return
    by_arrival = sorted(members.places[0] for members in ledger.demand_classes.classes.values())
    records = (ledger.leases[lease_id] for _, lease_id in by_arrival if lease_id not in turn.pending)
    first = next((record for record in records if _takes_part(record, reservations)), None)
    turn.put(Overtakes(0 if first is None else ledger.overtakes, None if first is None else first.lease.id))


def _takes_part(record: LeaseRecord, reservations: Reservations) -> bool:
    """True for a request that waits for nothing but GPUs which will be free when leases end."""
    ledger, users, lease = reservations.ledger, reservations.users, record.lease
    if not is_eligible(ledger, record, reservations.now):
        return False
    if users.may_limit(lease) and users.limit_reached(lease, min_gpus_of(ledger, users, lease.demand)) is not None:
        return False
    return reservations.can_be_served(lease.demand, users.gpus_left(lease))
