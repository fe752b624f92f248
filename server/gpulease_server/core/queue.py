"""The queue: one pass gives each waiting request its GPUs, or the reason why not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from gpulease.errors import NeverFits, NotNow, OverQuota
from gpulease.model import JobState, Selection

from .array import array_of, takes_part, under_way
from .bypass import Claims, Elders, kept_out, recall
from .explain import explain, is_never
from .lease import grant
from .ledger import GpuRecord, JobRecord, LeaseRecord
from .placement import Blocked, NeedsReading, Placed, least, place
from .quota import Had, had, never_within, queue_is_full
from .signs import live_on
from .turn import Pending, Turn
from .view import lease_view


def settle(turn: Turn) -> None:  # noqa: C901 - one case for each outcome
    """Go through the queue once, eldest first. Closes every turn.

    A request that fits may pass one that does not, within the bounds of `core.bypass`; what is held for an elder no
    younger one gets. One that lacks only a fresh reading keeps the GPUs that it is about to get.
    """
    recall(turn)
    latest_s = turn.now.mono_s - turn.policy.reading_deadline_s
    overdue = {node for node, since_s in turn.wanted.items() if since_s < latest_s}
    claims = Claims(turn.ledger, turn.now, turn.policy, overdue)
    elders = Elders(turn, claims)
    undecided = len(turn.pending)
    running, users = under_way(turn.ledger), had(turn.ledger, turn.policy.limits)
    for record in _taking_part(turn, running):
        pending, demand = turn.pending.get(record.lease.id), record.lease.demand
        if pending is None and not claims.open:
            if not undecided:
                break
            continue
        if pending is None and elders.knows(demand):
            if not kept_out(turn.ledger, users, record):
                elders.add(record)
            continue
        undecided -= pending is not None
        # A verdict does not rest on an old reading, whether it is yes or no; what waits is looked at again in any case.
        hopeful = pending is not None and pending.since_s >= latest_s
        match _place(turn, record, users, claims, overdue, hopeful):
            case None:
                _keep_out(turn, record, claims)
            case Placed(gpus):
                _granted(turn, record, gpus, turn.pending.pop(record.lease.id, None))
                users.granted(record.lease, len(gpus))
                running[array_of(turn.ledger, record) or ""] += 1
                claims.granted(gpus)
                elders.passed_by(gpus)
            case NeedsReading(node, gpus):
                turn.want_reading(node)
                waited_enough = pending is not None and pending.since_s < latest_s
                if not waited_enough or _must_wait(turn, record, turn.pending.pop(record.lease.id), claims):
                    claims.keep(record, gpus)
            case Blocked(candidates):
                if pending is None or _must_wait(turn, record, turn.pending.pop(record.lease.id), claims):
                    elders.add(record, candidates)


def _taking_part(turn: Turn, running: Counter[str]) -> Iterator[LeaseRecord]:
    """Who waits and may begin, eldest first. `running` is looked at anew for each, as grants change it."""
    return (record for record in list(turn.ledger.queued()) if takes_part(turn.ledger, record, turn.now, running))


def _place(
    turn: Turn, record: LeaseRecord, users: Had, claims: Claims, overdue: set[str], hopeful: bool
) -> Placed | NeedsReading | Blocked | None:
    """GPUs for a request, no more than its user may have; None where that keeps it from any."""
    demand = record.lease.demand
    if kept_out(turn.ledger, users, record):
        return None
    taken, since_s = claims.by_uuid.keys(), record.asked_at_s
    found = place(turn.ledger, demand, taken, turn.now, turn.policy, overdue, since_s=since_s, hopeful=hopeful)
    room = users.room(record.lease)
    if room is None or not isinstance(found, Placed) or len(found.gpus) <= room:
        return found
    return Placed(found.gpus[:room]) if demand.selection is Selection.AUTO else None


def _keep_out(turn: Turn, record: LeaseRecord, claims: Claims) -> None:
    """Pass over a request whose user is at his limit; it claims nothing. If it is new it gets its verdict."""
    pending = turn.pending.pop(record.lease.id, None)
    if pending is not None:
        _must_wait(turn, record, pending, claims)


def _granted(turn: Turn, record: LeaseRecord, gpus: tuple[GpuRecord, ...], pending: Pending | None) -> None:
    if pending is not None:
        turn.cause = record.cause
        _record_rest(turn, pending)
    grant(turn, record, gpus)
    job = turn.ledger.jobs.get(record.lease.job_id or "")
    if job is not None:
        lease = turn.ledger.leases[record.lease.id].lease
        attempts = job.job.attempts + 1
        starting = replace(job.job, state=JobState.STARTING, gpus=lease.gpus, reason=None, attempts=attempts)
        turn.put(replace(job, job=starting))
        turn.event("job.starting", job_id=job.job.id, lease_id=lease.id, node=lease.gpus[0].node)
    if pending is not None:
        _tell(turn, record, pending)


def _must_wait(turn: Turn, record: LeaseRecord, pending: Pending, claims: Claims) -> bool:
    """Give the verdict on a new request that cannot be granted. True when it stays in the queue."""
    never = is_never(turn.ledger, record.lease.demand)
    refused = None if never else _over_quota(turn, record, pending)
    if refused is not None:
        turn.ledger.withdraw(record)
        for call in pending.calls:
            turn.answer(call, refused)
        return False
    if never or not pending.queue:
        explanation = explain(turn.ledger, record, turn.now, turn.policy, claims=claims, stays=False)
        turn.ledger.withdraw(record)
        kind, remedy = (
            (NeverFits, "Ask for fewer or other GPUs; gpulease status shows those there are.")
            if never
            else (NotNow, "Ask again later, or wait in the queue with queue=true.")
        )
        for call in pending.calls:
            turn.answer(call, kind(explanation.sentence, remedy=remedy, extra={"explanation": explanation}))
        return False
    turn.cause = record.cause
    turn.put(replace(record, renewed_at=turn.now.at))
    if record.lease.job_id is None:
        live_on(turn, record.lease)
    _record_rest(turn, pending)
    turn.event("lease.queued", lease_id=record.lease.id, job_id=record.lease.job_id)
    _tell(turn, record, pending)
    return True


def _over_quota(turn: Turn, record: LeaseRecord, pending: Pending) -> OverQuota | None:
    """Why a request that cannot be granted now may not even wait; None where it may, or does not want to."""
    limits, lease = turn.policy.limits, record.lease
    never = never_within(limits, lease, least(turn.ledger, lease.demand))
    if never is not None or not pending.queue:
        return never
    if len(turn.ledger.queue) - len(turn.pending) > turn.policy.max_queued:
        return OverQuota(f"{turn.policy.max_queued} requests wait already.", remedy="Ask again later.")
    # It is in the queue by now, and so counted as waiting.
    if queue_is_full(turn.ledger, lease.holder.user, turn.pending, 0, limits):
        detail = f"{limits.queued} requests of user {lease.holder.user} wait already, as many as one user may have."
        return OverQuota(detail, remedy="Ask again when some of them are granted, or withdraw some.")
    return None


def _record_rest(turn: Turn, pending: Pending) -> None:
    for change in pending.changes:
        turn.put(change)
        if isinstance(change, JobRecord):
            turn.event("job.submitted", job_id=change.job.id, lease_id=change.job.lease_id)


def _tell(turn: Turn, record: LeaseRecord, pending: Pending) -> None:
    current = turn.ledger.leases[record.lease.id]
    job = turn.ledger.jobs.get(current.lease.job_id or "")
    for call in pending.calls:
        turn.answer(call, job.job if job else lease_view(turn.ledger, current, turn.now, turn.policy))
