"""A lease's life: asked for, granted, renewed, released, expired."""

from __future__ import annotations

from gpulease_protocol.errors import (
    GpuleaseError,
    IdempotencyMismatch,
    LeaseLost,
    NotAllowed,
    NotFound,
    StaleToken,
)
from gpulease_protocol.model import EndReason, Lease, LeaseState, Liveness
from gpulease_server.core.budget_records import enter_budget
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.footprint import lease_bytes, records_bytes
from gpulease_server.core.grant import can_revive, revive
from gpulease_server.core.happenings import (
    AnswerLost,
    IdempotencyKey,
    LeaseRequested,
    ReleaseRequested,
    RenewalRequested,
    WaiterPolled,
)
from gpulease_server.core.lease_end import end_lease
from gpulease_server.core.liveness import extend_deadline, initial_liveness, is_spared, shorten_deadline
from gpulease_server.core.pending import PendingRequest
from gpulease_server.core.preemption_records import with_consent
from gpulease_server.core.presentation import lease_view
from gpulease_server.core.reclaim_rule import with_reclaim_rule
from gpulease_server.core.records import Adoption, Change, KeyRecord, LeaseRecord, WatchedOwner
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import timed_demand, too_much_undecided


class MadeLongAgo(NotFound):
    """What was made for an Idempotency-Key ended so long ago that only the database may still know it."""

    def __init__(self, result_id: str) -> None:
        super().__init__(f"What was made for this Idempotency-Key ({result_id}) ended long ago.")
        self.result_id = result_id


REVIVABLE_ENDS = (EndReason.EXPIRED, EndReason.NODE_LOST)
"""Ends for want of a sign of life, which a late renewal gives."""


def on_lease_requested(turn: Turn, request: LeaseRequested) -> None:
    """Take a request in; `settle` gives the verdict."""
    if answer_repeated(turn, request.cause, request.key):
        return
    if isinstance(demand := timed_demand(turn.ledger, request, turn.policy), GpuleaseError):
        turn.answer(request.cause, demand)
        return
    demand = with_consent(with_reclaim_rule(demand, turn.policy))
    enter_budget(turn, request.holder.token_id, request.budget)
    watched_owner = request.watched_owner if request.watch_owner else None
    lease = Lease(
        id=request.lease_id,
        state=LeaseState.QUEUED,
        holder=request.holder,
        demand=demand,
        ttl_s=request.ttl_s,
        liveness=initial_liveness(turn.ledger, watched_owner, request.holder.user),
        created_at=turn.now.at,
    )
    enqueue(
        turn,
        lease,
        request.cause,
        queue=request.queue,
        key=request.key,
        watched_owner=request.watched_owner,
        adoption=request.adoption,
    )


def enqueue(
    turn: Turn,
    lease: Lease,
    cause: str,
    *,
    queue: bool,
    key: IdempotencyKey | None,
    changes: tuple[Change, ...] = (),
    watched_owner: WatchedOwner | None = None,
    adoption: Adoption | None = None,
) -> None:
    """Put a lease at the end of the queue, undecided. Nothing is recorded before the verdict.

    A user with too much undecided is refused at once.
    """
    user, size_bytes = lease.holder.user, lease_bytes(lease) + records_bytes(changes)
    refused = too_much_undecided(turn.pending, user, size_bytes, turn.policy.limits)
    if refused is not None:
        turn.answer(cause, refused)
        return
    result_id = lease.job_id or lease.id
    key_record = None
    if key is not None:
        key_record = KeyRecord(key=key.key, fingerprint=key.fingerprint, result_id=result_id, at=turn.now.at)
    number, now_s = turn.ledger.next_number, turn.now.mono_s
    turn.ledger.apply(
        LeaseRecord(lease=lease, number=number, cause=cause, watched_owner=watched_owner, requested_at_s=now_s)
    )
    turn.pending[lease.id] = PendingRequest(
        causes=[cause],
        queue=queue,
        changes=changes,
        key=key_record,
        since_s=turn.now.mono_s,
        holder=lease.holder,
        size_bytes=size_bytes,
        adoption=adoption,
    )


def answer_repeated(turn: Turn, cause: str, key: IdempotencyKey | None) -> bool:
    """True when this key was seen before; the caller then gets what was made for it, or a refusal."""
    if key is None:
        return False
    if (undecided := turn.pending.with_key(key.key)) is not None:
        lease_id, pending = undecided
        if pending.key is not None and pending.key.fingerprint != key.fingerprint:
            turn.answer(cause, _mismatch(key, lease_id))
        else:
            pending.causes.append(cause)
        return True
    known = turn.ledger.keys.get(key.key)
    if known is None:
        return False
    if known.fingerprint != key.fingerprint:
        turn.answer(cause, _mismatch(key, known.result_id))
    elif known.result_id in turn.ledger.jobs:
        turn.answer(cause, turn.ledger.jobs[known.result_id].job)
    elif known.result_id in turn.ledger.leases:
        turn.answer(cause, turn.ledger.leases[known.result_id].lease)
    else:
        turn.answer(cause, MadeLongAgo(known.result_id))
    return True


def _mismatch(key: IdempotencyKey, result_id: str) -> IdempotencyMismatch:
    return IdempotencyMismatch(
        f"Idempotency-Key {key.key!r} was used with another request.",
        remedy="Use a new key for a new request.",
        extra={"made": result_id},
    )


def on_renewal_requested(turn: Turn, renewal: RenewalRequested) -> None:
    """Let a lease last a full `ttl_s` from now. A late renewal revives it while none of its GPUs was granted again."""
    record = find_as_holder(turn, renewal.lease_id, renewal.fencing_token)
    if isinstance(record, GpuleaseError):
        turn.answer(renewal.cause, record)
        return
    if record.lease.state is LeaseState.ENDED:
        may_revive = record.lease.end_reason in REVIVABLE_ENDS and record.lease.job_id is None
        if not may_revive or not can_revive(turn, record.lease):
            turn.answer(renewal.cause, lost_lease(record.lease))
            return
        record = revive(turn, record)
    lease = record.lease
    if lease.liveness is not Liveness.JOB:
        turn.put(replace(record, renewed_at=turn.now.at))
        extend_deadline(turn, lease)
    turn.answer(renewal.cause, lease_view(turn.ledger, turn.ledger.leases[lease.id], turn.now, turn.policy))


def answer_for_old_lease(lease: Lease, happening: RenewalRequested | ReleaseRequested) -> Lease:
    """The answer about a lease that ended so long ago that it is no longer in memory. Raises LeaseLost, StaleToken."""
    revoked = isinstance(happening, ReleaseRequested) and happening.revoked_by is not None
    if lease.fencing_token != happening.fencing_token and not (revoked and happening.fencing_token is None):
        raise _stale(lease.id, happening.fencing_token)
    if isinstance(happening, RenewalRequested) or not _ended_as_requested(lease, revoked):
        raise lost_lease(lease)
    return lease


def _ended_as_requested(lease: Lease, revoked: bool) -> bool:
    """True when a lease has already ended in the way that is asked for, so that asking twice gives the same answer."""
    ends = (EndReason.RELEASED, EndReason.CANCELLED)
    return lease.end_reason in ((*ends, EndReason.REVOKED) if revoked else ends)


def on_release_requested(turn: Turn, release: ReleaseRequested) -> None:
    """Take GPUs back from their holder or an administrator, or a request out of the queue. May be repeated."""
    revoked = release.revoked_by is not None
    record: LeaseRecord | NotFound | StaleToken
    if revoked and release.fencing_token is None:
        record = find_lease(turn, release.lease_id)
    else:
        record = find_as_holder(turn, release.lease_id, release.fencing_token)
    if isinstance(record, GpuleaseError):
        turn.answer(release.cause, record)
        return
    lease = record.lease
    if lease.job_id is not None and lease.state is not LeaseState.ENDED:
        detail = f"Lease {lease.id} belongs to job {lease.job_id}."
        turn.answer(release.cause, NotAllowed(detail, remedy=f"Cancel the job: `POST /v1/jobs/{lease.job_id}/cancel`."))
        return
    if lease.state is LeaseState.ENDED and not _ended_as_requested(lease, revoked):
        turn.answer(release.cause, lost_lease(lease))
        return
    if lease.state is not LeaseState.ENDED:
        by_holder = EndReason.RELEASED if lease.state is LeaseState.ACTIVE else EndReason.CANCELLED
        if revoked:
            turn.emit("lease.revoked", lease_id=lease.id, reason=f"by user {release.revoked_by}")
        end_lease(turn, record, EndReason.REVOKED if revoked else by_holder)
    turn.answer(release.cause, lease_view(turn.ledger, turn.ledger.leases[lease.id], turn.now, turn.policy))


def on_waiter_polled(turn: Turn, polled: WaiterPolled) -> None:
    """The holder waits for a queued lease. One that was granted meanwhile is theirs when they have been told."""
    record = turn.ledger.leases.get(polled.lease_id)
    if record is None or polled.lease_id not in turn.ledger.deadlines:
        return
    if record.lease.state is LeaseState.QUEUED:
        extend_deadline(turn, record.lease)


def on_answer_lost(turn: Turn, lost: AnswerLost) -> None:
    """No one waits for a request any more, or was told of its grant: that is unclaimed, unless its holder has been
    heard since."""
    record = turn.ledger.leases.get(lost.lease_id)
    if record is None or lost.lease_id not in turn.ledger.deadlines:
        return
    if record.lease.state is LeaseState.ACTIVE:
        if record.renewed_at not in (None, record.lease.granted_at):
            return
        turn.put(replace(record, renewed_at=None))
    shorten_deadline(turn, record.lease)


def expire(turn: Turn) -> None:
    """End every lease with a deadline that has passed, except those that are spared."""
    ledger = turn.ledger
    for lease_id in ledger.due.pop(turn.now.mono_s, ledger.deadlines):
        record = ledger.leases[lease_id]
        if is_spared(turn, record):
            ledger.due.push(lease_id, ledger.deadlines)  # the next tick looks at it again
            continue
        waited = record.lease.state is LeaseState.QUEUED
        end_lease(turn, record, EndReason.HOLDER_DIED if waited else EndReason.EXPIRED)


def end_timed(turn: Turn) -> None:
    """End every lease that has held its GPUs for the time that it declared."""
    ledger = turn.ledger
    for lease_id in ledger.ends_due.pop(turn.now.mono_s, ledger.ends_s):
        end_lease(turn, ledger.leases[lease_id], EndReason.TIME_OVER)


def find_lease(turn: Turn, lease_id: str) -> LeaseRecord | NotFound:
    """The lease, or that there is none in memory."""
    record = turn.ledger.leases.get(lease_id)
    return record or NotFound(f"There is no lease {lease_id}.", remedy="`GET /v1/leases` lists those that are kept.")


def find_as_holder(turn: Turn, lease_id: str, fencing_token: int | None) -> LeaseRecord | NotFound | StaleToken:
    """The lease, or why the caller is refused: it is unknown, or was granted under another fencing token."""
    record = find_lease(turn, lease_id)
    if isinstance(record, LeaseRecord) and record.lease.fencing_token != fencing_token:
        return _stale(lease_id, fencing_token)
    return record


def _stale(lease_id: str, fencing_token: int | None) -> StaleToken:
    return StaleToken(
        f"Token {fencing_token} is not the token of lease {lease_id}.", remedy="Send the token that the grant showed."
    )


def lost_lease(lease: Lease) -> LeaseLost:
    """The answer to the holder of an ended lease."""
    return LeaseLost(ended_sentence(lease), remedy="Stop using them and ask for a new lease.")


def ended_sentence(lease: Lease) -> str:
    """What is wrong with acting on a lease that was granted and has ended."""
    return f"Lease {lease.id} has ended ({lease.end_reason}) and its GPUs may be someone else's."
