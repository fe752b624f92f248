"""The queue: one pass gives each waiting request its GPUs, or the reason why not."""

from __future__ import annotations

from collections.abc import Collection

from gpulease_protocol.errors import GpuleaseError, NeverFits, NotNow, OverQuota
from gpulease_protocol.model import JobMember, JobState
from gpulease_server.core.adoption import place_adopted, with_adopted_gpus
from gpulease_server.core.backfill import NONE_UNDELAYED, BlockedRequests, Reservations, Undelayed
from gpulease_server.core.easy_backfill import EasyBackfill
from gpulease_server.core.eligibility import is_eligible, min_gpus_of
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.explain.never_fits import is_never
from gpulease_server.core.fair_share import recount_usage
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gang_readings import nodes_to_ask
from gpulease_server.core.grant import grant
from gpulease_server.core.liveness import extend_deadline
from gpulease_server.core.node_ranking import NodeRankings
from gpulease_server.core.order import choose_first, count_overtake, keep_places
from gpulease_server.core.order_records import RanAhead
from gpulease_server.core.pending import PendingRequest
from gpulease_server.core.place import place
from gpulease_server.core.placement import Blocked, NeedsReading, Placed, find_candidates, min_gpus
from gpulease_server.core.preempted_gpus import hold_preempted_gpus, preemptions_under_way
from gpulease_server.core.queue_walk import QueueWalk
from gpulease_server.core.records import Adoption, GpuRecord, JobRecord, LeaseRecord, NotBefore
from gpulease_server.core.recounted_bypasses import recount_bypasses
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import never_within_limits, queue_is_full, too_many_bytes, usage_by_user
from gpulease_server.core.user_order import UserOrder


def settle(turn: Turn) -> None:
    """Grant what can be granted, and give new requests their verdicts. Closes every turn."""
    turn.busy_ports.clear()  # a lease may have been revived, or a port taken, since a job on several nodes got one
    recount_bypasses(turn)
    recount_usage(turn)
    for lease_id in turn.ledger.demand_classes.pauses_over(turn.now.mono_s):
        turn.put(NotBefore(lease_id, None))
    if turn.pending or (turn.ledger.queue and turn.ledger.fleet.free):
        _walk_queue(turn)


def _walk_queue(turn: Turn) -> None:  # noqa: C901 - one case for each outcome
    """Go through the queue once, in the order of `core.order`.

    A request that fits may pass one that does not, within the bounds of `core.backfill`; no newer request
    gets what is held for an older one. One that lacks only a recent reading keeps the GPUs that it is about to get.
    """
    latest_s = turn.now.mono_s - turn.policy.reading_deadline_s
    late_nodes = {node for node, since_s in turn.requested_readings.items() if since_s < latest_s}
    users = usage_by_user(turn.ledger, turn.policy.limits, turn.now)
    reservations = Reservations(turn.ledger, turn.now, turn.policy, users, late_nodes)
    ahead = EasyBackfill(reservations)
    blocked, order = BlockedRequests(reservations, ahead.chance), UserOrder(reservations)
    choose_first(turn, reservations)
    _start_preempting(turn, reservations)
    rankings = NodeRankings(reservations.taken)
    walk = QueueWalk(turn.ledger, reservations, blocked, order, turn.pending)
    for record in walk:
        pending = turn.pending.get(record.lease.id)
        if pending is not None and pending.adoption is not None:
            _adopt(turn, record, pending, reservations, waited_enough=pending.since_s < latest_s)
            continue
        if order.keeps_out(record):
            # It reserves no GPU. A new one gets its verdict.
            if pending is None or _answer_waiting(turn, record, turn.pending.pop(record.lease.id), reservations):
                order.add(record)
            continue
        if pending is None and blocked.has(record):
            blocked.add(record)
            order.add(record)
            continue
        # A verdict does not rest on an old reading, whether it is yes or no; what waits is looked at again in any case.
        allow_reread = pending is not None and pending.since_s >= latest_s
        match _place_or_ahead(turn, record, ahead, rankings, allow_reread):
            case Placed(gpus):
                pending = turn.pending.pop(record.lease.id, None)
                if pending is not None and (full := _too_many_with(turn, record, pending)) is not None:
                    _refuse(turn, record, pending, full)
                    continue
                reservations.taken += (gpu.device.node for gpu in gpus)
                in_order, undelayed = turn.ledger.ordered_place(record), ahead.undelayed(record, gpus, blocked)
                _grant(turn, record, gpus, pending, undelayed)
                walk.count_bypass(turn, record, gpus, in_order, undelayed)
                count_overtake(turn, in_order)
            case NeedsReading(nodes, gpus):
                for node in nodes_to_ask(turn, nodes, gpus):
                    turn.request_reading(node)
                waited_enough = pending is not None and pending.since_s < latest_s
                if not waited_enough or _answer_waiting(turn, record, turn.pending.pop(record.lease.id), reservations):
                    reservations.reserve(record, gpus)
                    ahead.take(record, gpus)
                    users.keep_all(record.lease, len(gpus))
            case Blocked(candidates):
                if pending is None or _answer_waiting(turn, record, turn.pending.pop(record.lease.id), reservations):
                    blocked.add(record, candidates)
                    order.add(record)
    keep_places(turn, order)


def _start_preempting(turn: Turn, reservations: Reservations) -> None:
    """Grant the requests that others have ended for, on the GPUs that are held for them; and hold what is free of these
    for those that still lack some."""
    for one, record in list(preemptions_under_way(turn.ledger, turn.now, turn.policy)):
        demand = replace(record.lease.demand, among=one.gpus)
        needed = min_gpus_of(turn.ledger, reservations.users, record.lease.demand)
        # `UserOrder.keeps_out` would claim what is left of a limit, before the older requests of the walk.
        limit = reservations.users.limit_reached(record.lease, needed)
        if limit is not None or not is_eligible(turn.ledger, record, turn.now):
            continue
        match place(
            turn.ledger,
            demand,
            (),
            turn.now,
            turn.policy,
            reservations.late_nodes,
            most_gpus=reservations.users.gpus_left(record.lease),
            requested_at_s=record.requested_at_s,
            closed=reservations.users.closed_to(record.lease),
        ):
            case Placed(gpus):
                reservations.taken += (gpu.device.node for gpu in gpus)
                in_order = turn.ledger.ordered_place(record)
                _grant(turn, record, gpus, None)
                count_overtake(turn, in_order)
            case NeedsReading(nodes, gpus):
                for node in nodes_to_ask(turn, nodes, gpus):
                    turn.request_reading(node)
    hold_preempted_gpus(reservations)


def _place_or_ahead(
    turn: Turn, record: LeaseRecord, ahead: EasyBackfill, rankings: NodeRankings, allow_reread: bool
) -> Placed | NeedsReading | Blocked:
    """GPUs for a request, no more than its user may have: of those that are not held for others, or that these do not
    need before it has ended."""
    reservations = ahead.reservations

    def find(reserved: Collection[str], rankings: NodeRankings | None = None) -> Placed | NeedsReading | Blocked:
        return _place(turn, record, reservations, reserved, allow_reread, rankings)

    found: Placed | NeedsReading | Blocked
    if record.lease.id in turn.ledger.preemptions:
        # It may have what is held for it with others that have come, and then nothing more ends for it.
        found = find({uuid for uuid, lease_id in reservations.by_uuid.items() if lease_id != record.lease.id})
    elif reservations.is_any_left or allow_reread:
        found = find(reservations.by_uuid.keys(), rankings)
    else:
        found = Blocked(find_candidates(turn.ledger, record.lease.demand).uuids)
    return (ahead.place(record, find) or found) if isinstance(found, Blocked) else found


def _place(
    turn: Turn,
    record: LeaseRecord,
    reservations: Reservations,
    reserved: Collection[str],
    allow_reread: bool,
    rankings: NodeRankings | None,
) -> Placed | NeedsReading | Blocked:
    return place(
        turn.ledger,
        record.lease.demand,
        reserved,
        turn.now,
        turn.policy,
        reservations.late_nodes,
        most_gpus=reservations.users.gpus_left(record.lease),
        requested_at_s=record.requested_at_s,
        allow_reread=allow_reread,
        closed=reservations.users.closed_to(record.lease),
        rankings=rankings,
    )


def _adopt(
    turn: Turn, record: LeaseRecord, pending: PendingRequest, reservations: Reservations, *, waited_enough: bool
) -> None:
    """Give the verdict on a process that is to be adopted, once its node has read."""
    adoption = pending.adoption or Adoption(pids=frozenset())
    match place_adopted(turn, record, adoption, reservations.users, waited_enough=waited_enough):
        case Placed(gpus):
            _grant(turn, with_adopted_gpus(record, gpus), gpus, turn.pending.pop(record.lease.id))
        case NeedsReading(nodes):
            for node in nodes:
                turn.request_reading(node)
        case refused:
            _refuse(turn, record, turn.pending.pop(record.lease.id), refused)


def _grant(
    turn: Turn,
    record: LeaseRecord,
    gpus: tuple[GpuRecord, ...],
    pending: PendingRequest | None,
    undelayed: Undelayed = NONE_UNDELAYED,
) -> None:
    """Grant a request. `undelayed`: older ones that it passes, and does not delay."""
    if pending is not None:
        turn.cause = record.cause
        _record_pending(turn, pending)
    adopted = pending is not None and pending.adoption is not None
    reason = f"adopted process {record.lease.holder.owner_pid}" if adopted else None
    if undelayed.told:
        reason = f"runs ahead of {', '.join(undelayed.told)}, with no delay for them"
        turn.put(RanAhead(record.lease.id, undelayed.told, frozenset(one.demand for one in undelayed.demands)))
    is_told = pending is not None or record.lease.id in turn.waiting_holders
    grant(turn, record, gpus, unclaimed=not is_told and record.lease.job_id is None, reason=reason)
    if is_told and pending is None:
        turn.told.append(record.lease.id)
    job = turn.ledger.jobs.get(record.lease.job_id or "")
    if job is not None:
        lease = turn.ledger.leases[record.lease.id].lease
        attempts = job.job.attempts + 1
        starting = replace(
            job.job,
            state=JobState.STARTING,
            gpus=lease.gpus,
            members=tuple(JobMember(rank=one.rank, node=one.node, address=one.address) for one in lease.members),
            reason=None,
            attempts=attempts,
        )
        turn.put(replace(job, job=starting))
        turn.emit("job.starting", job_id=job.job.id, lease_id=lease.id, node=lease.gpus[0].node)
    if pending is not None:
        _answer(turn, record, pending)


def admit_waiting(turn: Turn, lease_id: str) -> None:
    """Give the verdict on a request whose job waits for other jobs, which needs no reading: it is never granted now."""
    record, pending = turn.ledger.leases[lease_id], turn.pending.pop(lease_id)
    _answer_waiting(turn, record, pending, None)


def _answer_waiting(
    turn: Turn, record: LeaseRecord, pending: PendingRequest, reservations: Reservations | None
) -> bool:
    """Give the verdict on a new request that cannot be granted. True when it stays in the queue."""
    never = is_never(turn.ledger, record.lease.demand)
    refused = None if never else _over_quota(turn, record, pending)
    if refused is not None:
        return _refuse(turn, record, pending, refused)
    if never or not pending.queue:
        explanation = explain(turn.ledger, record, turn.now, turn.policy, reservations=reservations, stays_queued=False)
        kind, remedy = (
            (NeverFits, "Ask for fewer or other GPUs; `GET /v1/gpus` lists all GPUs.")
            if never
            else (NotNow, 'Ask again later, or wait in the queue with `"queue": true`.')
        )
        error = kind(explanation.sentence, remedy=remedy, extra={"explanation": explanation})
        return _refuse(turn, record, pending, error)
    turn.cause = record.cause
    turn.put(replace(record, renewed_at=turn.now.at))
    if record.lease.job_id is None:
        extend_deadline(turn, record.lease)
    _record_pending(turn, pending)
    turn.emit("lease.queued", lease_id=record.lease.id, job_id=record.lease.job_id)
    _answer(turn, record, pending)
    return True


def _refuse(turn: Turn, record: LeaseRecord, pending: PendingRequest, error: GpuleaseError) -> bool:
    turn.ledger.withdraw(record)
    for cause in pending.causes:
        turn.answer(cause, error)
    return False


def _over_quota(turn: Turn, record: LeaseRecord, pending: PendingRequest) -> OverQuota | None:
    """Why a request that cannot be granted now may not even wait; None where it may, or does not want to."""
    users = usage_by_user(turn.ledger, turn.policy.limits, turn.now)
    never = never_within_limits(users, record.lease, min_gpus(turn.ledger, record.lease.demand))
    if never is not None or not pending.queue:
        return never
    return _too_many_wait(turn, record, pending, 1 + pending.further)


def _too_many_with(turn: Turn, record: LeaseRecord, pending: PendingRequest) -> OverQuota | None:
    """Why a request that can be granted is refused all the same: it is the first of an array, whose others may not
    wait."""
    return _too_many_wait(turn, record, pending, pending.further) if pending.further else None


def _too_many_wait(turn: Turn, record: LeaseRecord, pending: PendingRequest, further: int) -> OverQuota | None:
    """Why so many requests, of this one and those of its array, may not wait; None where they may. This one is in the
    queue by now, and so counted as waiting."""
    policy, holder = turn.policy, record.lease.holder
    waiting = turn.ledger.waiting_count - len(turn.pending) - 1
    if waiting + further > policy.max_queued:
        detail = f"The queue has {waiting} requests; the limit is {policy.max_queued}."
        return OverQuota(detail, remedy="Try again later.")
    if (full := queue_is_full(turn.ledger, holder, turn.pending, further, policy.limits, counted=1)) is not None:
        return OverQuota(full, remedy="Try again when some of them are granted, or cancel some.")
    return too_many_bytes(turn.ledger, holder.user, pending, policy.limits, policy.max_queued_bytes)


def _record_pending(turn: Turn, pending: PendingRequest) -> None:
    for change in (*pending.changes, *filter(None, [pending.key])):
        turn.put(change)
        if isinstance(change, JobRecord):
            turn.emit("job.submitted", job_id=change.job.id, lease_id=change.job.lease_id)


def _answer(turn: Turn, record: LeaseRecord, pending: PendingRequest) -> None:
    current = turn.ledger.leases[record.lease.id]
    job = turn.ledger.jobs.get(current.lease.job_id or "")
    for cause in pending.causes:
        turn.answer(cause, job.job if job else current.lease)
