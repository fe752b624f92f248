"""What declared times mean for a request: by when it starts, who runs ahead of it, and what it could declare."""

from __future__ import annotations

from collections.abc import Collection
from datetime import timedelta

from gpulease_server.core.backfill import Reservations
from gpulease_server.core.easy_backfill import EasyBackfill
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.place import place
from gpulease_server.core.placement import Blocked, NeedsReading, Placed, find_candidates
from gpulease_server.core.records import LeaseRecord
from gpulease_server.core.shadow_time import shadow_time
from gpulease_server.core.wording import count_gpus, duration, some_of


def describe_times(reservations: Reservations, record: LeaseRecord, position: int | None, start_known: bool) -> str:
    """The sentences for a request that waits, each after a space; empty where no declared time matters to it.
    `start_known`: it is told when the request is expected to start."""
    name = "timeout_s" if record.lease.job_id is not None else "time_s"
    return (
        _latest_start(reservations, record, position, start_known)
        + _closed_out(reservations, record)
        + _running_ahead(reservations.ledger, record)
        + _time_to_declare(reservations, record, name)
    )


def describe_run_ahead(ledger: Ledger, record: LeaseRecord) -> str:
    """Why an active lease was granted before older requests; empty where it was not, or where that is not known."""
    ahead = ledger.ran_ahead.get(record.lease.id)
    if ahead is None or not ahead.passed:
        return ""
    return f" It was granted before {some_of(ahead.passed)}, which it does not delay by what was declared."


def _latest_start(reservations: Reservations, record: LeaseRecord, position: int | None, start_known: bool) -> str:
    """By when the first in the queue starts: surely where GPUs are held for it on each node that could serve it, and
    no limit may keep it from them."""
    if position != 1 or reservations.ledger.calendar.entries:
        return ""
    lease, nodes = record.lease, find_candidates(reservations.ledger, record.lease.demand).by_node
    is_sure = reservations.held_for.get(lease.id, 0) >= len(nodes) and not reservations.users.may_limit(lease)
    held_s = shadow_time(reservations, record, of_held=True) if is_sure else None
    at_s = shadow_time(reservations, record) if held_s is None and not start_known else held_s
    if at_s is None:
        return ""
    left_s = max(0.0, at_s - reservations.now.mono_s)
    at = reservations.now.at + timedelta(seconds=left_s)
    started = f"{at:%Y-%m-%d %H:%M:%S} UTC, in {duration(left_s)}"
    if held_s is not None:
        return f" By the times that were declared it starts by {started}, at the latest, as long as it is the first."
    return f" By the times that were declared it could start by {started}, unless newer requests start first."


def _closed_out(reservations: Reservations, record: LeaseRecord) -> str:
    if record.lease.id not in reservations.closed_out or reservations.reserved_for(record):
        return ""
    return (
        " No GPUs are held for it, as by declared times a reservation keeps it out before it could start; a day after"
        " it was made they are."
    )


def _running_ahead(ledger: Ledger, record: LeaseRecord) -> str:
    ahead = [one.lease_id for one in ledger.ran_ahead.values() if record.lease.id in one.passed]
    if not ahead:
        return ""
    verb = "has" if len(ahead) == 1 else "have"
    return f" {some_of(ahead)} {verb} started ahead of it, with a declared time that by then did not delay it."


def _time_to_declare(reservations: Reservations, record: LeaseRecord, name: str) -> str:
    if not reservations.held_for or _is_followed(reservations.ledger, record):
        return ""  # who asks again comes behind all others

    def find(reserved: Collection[str]) -> Placed | NeedsReading | Blocked:
        ledger, demand = reservations.ledger, record.lease.demand
        users, now, policy = reservations.users, reservations.now, reservations.policy
        most_gpus, closed = users.gpus_left(record.lease), users.closed_to(record.lease)
        return place(ledger, demand, reserved, now, policy, most_gpus=most_gpus, closed=closed)

    others = {demand: one for demand, one in reservations.due.items() if one.lease.id != record.lease.id}
    longest_s = EasyBackfill(replace(reservations, due=others)).longest_s(record, find)
    time_s = record.lease.demand.time_s
    if longest_s is None or longest_s < 1.0 or (time_s is not None and time_s <= longest_s):
        return ""
    held = count_gpus(sum(lease_id != record.lease.id for lease_id in reservations.by_uuid.values()))
    return f" With a `{name}` of at most {int(longest_s)} s it could start now, on some of {held} held for others."


def _is_followed(ledger: Ledger, record: LeaseRecord) -> bool:
    """True where others of its priority and usage wait behind a request."""
    classes, lease = ledger.demand_classes, record.lease
    group = classes.group_of(lease.demand, lease.holder.user)
    asked = classes.count_before((*group, record.arrival + 1, ""))
    return classes.count_before((*group, ledger.next_number, "")) > asked
