"""Preemption: leases that have opted in end, after a notice, so that the first request, which has not, can start.

Off unless `Policy.preemption`. See docs/design/0017-preemption.md for the rules, and for what each failure does.

    the first that waits cannot start soon -> the smallest set that lets it start -> notice, `preempt_at` is fixed
    a job gets SIGTERM at once, has its grace, and is queued again at its old place; a lease ends at `preempt_at`
    the GPUs drain, and are held for the request -> it is granted, or it leaves: then what has not ended goes on

What must always hold
---------------------
- No lease is preempted that did not opt in, or has held its GPUs for less than `preempt_after_s`.
- None is preempted for a request that has opted in itself.
- Nothing is preempted unless the request then starts or leaves, but for GPUs that fail meanwhile.
- One set at a time; a request has one set.
"""

from __future__ import annotations

import itertools
from datetime import timedelta

from gpulease_protocol.model import EndReason, GpuState, JobState, Lease, LeaseState
from gpulease_server.core.backfill import Reservations
from gpulease_server.core.eligibility import array_at_limit, divided_queue, is_eligible, min_gpus_of
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gpu import ends_too_soon, is_cordoned, state_of
from gpulease_server.core.job import change_job
from gpulease_server.core.lease_end import end_lease
from gpulease_server.core.place import place
from gpulease_server.core.placement import Blocked, min_gpus
from gpulease_server.core.preempted_gpus import preemptions_under_way
from gpulease_server.core.preemption_records import Preemption, PreemptionRemoved, is_preemptible
from gpulease_server.core.records import LeaseRecord
from gpulease_server.core.reservation_view import reservations_before
from gpulease_server.core.shadow_time import latest_s, shadow_time
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import usage_by_user
from gpulease_server.core.user_order import UserOrder
from gpulease_server.core.victim_choice import Victims, longest_notice_s, smallest_set, soon

LOOK_EVERY_S = 1.0
"""How often it is looked at whether something is to be preempted."""
MAX_CLASSES = 32
"""Kinds of requests that are looked at for the first one that the ends of leases would help."""
USABLE = (GpuState.FREE, GpuState.LEASED, GpuState.DRAINING)
"""States of a GPU on which the request can still start."""


def watch_preemptions(turn: Turn, stalled_s: float) -> None:
    """End what is due, withdraw what no one waits for any more, and choose whom to preempt next. `stalled_s`: for how
    long no holder could be heard, which is no part of their notice."""
    for known in list(turn.ledger.preemptions.values()):
        one, waiting = known, turn.ledger.leases.get(known.lease_id)
        if stalled_s > 0:
            one = replace(known, end_s=known.end_s + stalled_s)
            turn.put(one)
        if waiting is None or waiting.lease.state is not LeaseState.QUEUED:
            _withdraw(turn, one, f"{one.lease_id} waits no more")
            turn.put(PreemptionRemoved(one.lease_id))
        elif turn.now.mono_s >= one.end_s:
            _end_victims(turn, one, waiting)
    _preempt(turn)


def _victims(turn: Turn, one: Preemption) -> list[LeaseRecord]:
    """The leases without a job that are still to end."""
    found = (turn.ledger.leases.get(lease_id) for lease_id in one.victims)
    return [
        record
        for record in found
        if record is not None and record.lease.state is LeaseState.ACTIVE and record.lease.job_id is None
    ]


def _end_victims(turn: Turn, one: Preemption, waiting: LeaseRecord) -> None:
    """End leases at the moment that their holders were told; or withdraw it, where that would not help any more."""
    if (why := _why_useless(turn, one, waiting)) is not None:
        _withdraw(turn, one, why)
        return
    for record in _victims(turn, one):
        end_lease(turn, record, EndReason.PREEMPTED)
        turn.emit("lease.preempted", lease_id=record.lease.id, reason=_for_whom(waiting))


def _why_useless(turn: Turn, one: Preemption, waiting: LeaseRecord) -> str | None:
    """Why the request could not start on the GPUs; None where it could."""
    if not _victims(turn, one):
        return None
    ledger, lease, users = turn.ledger, waiting.lease, usage_by_user(turn.ledger, turn.policy.limits, turn.now)
    if (limit := users.limit_reached(lease, min_gpus_of(ledger, users, lease.demand))) is not None:
        return limit
    if (member := array_at_limit(ledger, waiting)) is not None:
        return f"array {member.array_id} runs as many jobs as it may at once"
    for lease_id in one.victims:
        job = ledger.live_jobs.get(ledger.leases[lease_id].lease.job_id or "") if lease_id in ledger.leases else None
        if job is not None and job.job.lease_id == lease_id and job.stuck_on:
            return f"job {job.job.id} does not end"
    reservations = Reservations(ledger, turn.now, turn.policy, users)
    return next((why for uuid in one.gpus if (why := _why_missing(reservations, one, lease, uuid)) is not None), None)


def _why_missing(reservations: Reservations, one: Preemption, lease: Lease, uuid: str) -> str | None:
    """Why a GPU would not be the request's soon after the leases have ended; None where it would."""
    ledger, gpu = reservations.ledger, reservations.ledger.gpus.get(uuid)
    if gpu is None:
        return f"GPU {uuid} is gone"
    state = state_of(ledger, gpu, reservations.now, reservations.policy)
    named, is_closed = f"GPU {gpu.device.index} of {gpu.device.node}", uuid in reservations.users.closed_to(lease)
    if state not in USABLE or is_cordoned(ledger, gpu) or is_closed:
        return f"{named} is {'reserved' if is_closed else 'cordoned' if is_cordoned(ledger, gpu) else state.value}"
    if ends_too_soon(ledger, lease.demand, gpu.device.node, reservations.now):
        return f"node {gpu.device.node} goes before the request would be done"
    if gpu.lease_id in one.victims and not gpu.draining:
        return None
    free_s = latest_s(reservations, lease.demand, gpu)
    is_late = free_s is None or free_s > one.held_until_s(reservations.policy)
    return f"{named} is {state.value}, and it is not known until when" if is_late else None


def _withdraw(turn: Turn, one: Preemption, why: str) -> None:
    """Let the leases go on that have not ended. Jobs were told to stop, and do. Without the GPUs of a lease that goes
    on the others do not suffice: they are held for the request no longer."""
    going_on = _victims(turn, one)
    for record in going_on:
        turn.emit("lease.preemption_withdrawn", lease_id=record.lease.id, reason=why)
    if going_on:
        ids = {record.lease.id for record in going_on}
        turn.put(replace(one, victims=tuple(lease_id for lease_id in one.victims if lease_id not in ids), gpus=()))


def _preempt(turn: Turn) -> None:
    """Give the leases notice that are to end for the first request, if there is a reason to."""
    ledger, now = turn.ledger, turn.now
    if not turn.policy.preemption or not ledger.preemptible or not ledger.queue:
        return
    if now.mono_s - ledger.preemption_looked_s < LOOK_EVERY_S:
        return
    ledger.preemption_looked_s = now.mono_s
    if any(preemptions_under_way(ledger, now, turn.policy)):
        return
    record = _first(turn)
    if record is None or record.lease.demand.nodes > 1 or record.lease.id in ledger.preemptions:
        return
    if is_preemptible(record.lease.demand):
        return  # two that have opted in would end each other in turns
    reservations = reservations_before(ledger, record, now, turn.policy)
    if (chosen := _set_for(reservations, record)) is not None:
        _give_notice(turn, record, chosen)


def _first(turn: Turn) -> LeaseRecord | None:
    """The first request in the queue that waits for nothing but the end of leases, and that no limit keeps out."""
    ledger = turn.ledger
    users = usage_by_user(ledger, turn.policy.limits, turn.now)
    order = UserOrder(Reservations(ledger, turn.now, turn.policy, users))
    classes = divided_queue(ledger, users, turn.policy)
    heads = [head[3] for head, _, _ in itertools.islice(classes.heads, MAX_CLASSES)]
    known = [ledger.leases[lease_id] for lease_id in dict.fromkeys([*ledger.alone, *heads])]
    for record in sorted(known, key=ledger.ordered_place):
        if record.lease.id in turn.pending or not is_eligible(ledger, record, turn.now):
            continue
        if not order.keeps_out(record) and order.waits_for_leases(record):
            return record
    return None


def _set_for(reservations: Reservations, record: LeaseRecord) -> Victims | None:
    """The leases that must end for a request; None where it can start soon, or would not start then either."""
    ledger, lease, users = reservations.ledger, record.lease, reservations.users
    if users.limit_reached(lease, min_gpus(ledger, lease.demand)) is not None:
        return None
    others = {uuid for uuid, lease_id in reservations.by_uuid.items() if lease_id != lease.id}
    found = place(
        ledger,
        lease.demand,
        others,
        reservations.now,
        reservations.policy,
        most_gpus=users.gpus_left(lease),
        closed=users.closed_to(lease),
    )
    if not isinstance(found, Blocked):
        return None
    start_s = shadow_time(reservations, record)
    return None if start_s is not None and start_s <= soon(reservations) else smallest_set(reservations, record)


def _give_notice(turn: Turn, record: LeaseRecord, chosen: Victims) -> None:
    """Tell the holders, once and for good, when they are to have ended."""
    now, notice_s = turn.now, turn.policy.preempt_notice_s
    end_s = longest_notice_s(chosen.leases, turn.policy)
    turn.put(
        Preemption(
            lease_id=record.lease.id,
            victims=tuple(one.lease.id for one in chosen.leases),
            gpus=tuple(gpu.device.uuid for gpu in chosen.gpus),
            noticed_at=now.at,
            preempt_at=now.at + timedelta(seconds=end_s),
            end_s=now.mono_s + end_s,
        )
    )
    for victim in chosen.leases:
        job = turn.ledger.live_jobs.get(victim.lease.job_id or "")
        at = now.at + timedelta(seconds=end_s if job is None else notice_s)
        turn.emit(
            "lease.preempting",
            lease_id=victim.lease.id,
            job_id=victim.lease.job_id,
            node=chosen.node,
            gpus=tuple(device.uuid for device in victim.lease.gpus),
            fencing_token=victim.lease.fencing_token,
            reason=f"{_for_whom(record)}, by {at:%Y-%m-%d %H:%M:%S} UTC",
        )
        if job is not None:
            stopping = replace(job, grace_s=notice_s, job=replace(job.job, preempt_at=at))
            reason = f"preempted {_for_whom(record)}; it ends by {at:%Y-%m-%d %H:%M:%S} UTC, and is queued again"
            change_job(turn, stopping, JobState.STOPPING, reason=reason)


def _for_whom(record: LeaseRecord) -> str:
    lease = record.lease
    return f"for {lease.id} of user {lease.holder.user}, whose priority is {lease.demand.priority}"
