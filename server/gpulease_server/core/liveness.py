"""How long a lease lasts from each sign of life, and what a worker's report about owners means for it.

A process lives on when its user gives up a request: Ctrl-C in a notebook, a shell that runs curl. So the life of the
owner keeps only what its holder is known to have. In the queue, waiting keeps a request. A lease that was granted out
of the queue while its holder did not wait is *unclaimed* until its holder asks about it, and lasts `ttl_s` until then;
so is one whose client had gone before it was told. A client that goes away before it is answered leaves its request, or
the grant, for a minute at most (`ANSWER_LOST_S`), unless it comes back.

The failure table is in the package's essay (`gpulease_server.core`).
"""

from __future__ import annotations

from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.model import EndReason, Lease, LeaseState, Liveness
from gpulease_protocol.node_protocol import MAX_OWNERS, NodeReport, OwnerReport, OwnerState
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gpu import is_unheard, silence_limit_s
from gpulease_server.core.lease_end import end_lease
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import Deadline, LeaseRecord, WatchedOwner
from gpulease_server.core.turn import Turn

ANSWER_LOST_S = 60.0
"""How long a request lasts after its client has gone away, at most: time to fix a connection or restart a client. Its
`ttl_s` may be hours, as that of `gpulease acquire`, and is meant for the time after the grant."""
MAX_OWNERS_PER_USER = MAX_OWNERS // 4
"""Owners of one user that a worker watches: processes of one user must not take what those of others need."""
MIN_EXTENSION_S = 0.25
"""Sights of an owner that would move a deadline by less than this, or by less than a tenth, leave it where it is."""


def initial_liveness(ledger: Ledger, watched_owner: WatchedOwner | None, user: str | None) -> Liveness:
    """How the holder of a new lease is known to live: by its process, unless its worker watches too many already, or
    too many of this user's."""
    if watched_owner is None:
        return Liveness.HEARTBEAT
    owners = ledger.watched_owners.get(watched_owner.node, {})
    if watched_owner.owner in owners:
        return Liveness.PROCESS
    has_room = len(owners) < MAX_OWNERS
    if has_room and len(owners) >= MAX_OWNERS_PER_USER:
        has_room = sum(_user_of(ledger, leases) == user for leases in owners.values()) < MAX_OWNERS_PER_USER
    return Liveness.PROCESS if has_room else Liveness.HEARTBEAT


def _user_of(ledger: Ledger, leases: dict[str, None]) -> str | None:
    """The user of a process, which owns these leases: they are all of that user."""
    return ledger.leases[next(iter(leases))].lease.holder.user


def extend_deadline(turn: Turn, lease: Lease) -> None:
    """The holder has been heard: the lease lasts a full `ttl_s` from now, and no less than it would have anyway.

    One whose owner is watched lasts until its worker has reported once more, or counts as silent, see `is_spared`.
    """
    until_s = turn.now.mono_s + lease.ttl_s
    if lease.liveness is Liveness.PROCESS:
        until_s = max(until_s, turn.ledger.deadlines.get(lease.id, until_s))
        record = turn.ledger.leases[lease.id]
        if record.watched_owner is not None and _is_held(turn, record.lease):
            until_s = max(until_s, _silent_from_s(turn, record.watched_owner.node))
    turn.put(Deadline(lease.id, until_s))


def extend_unclaimed(turn: Turn, lease: Lease) -> None:
    """A lease is granted out of the queue. Where no one has waited for so long that the request would soon have ended,
    it lasts no longer than after a lost answer."""
    left_s = turn.ledger.deadlines.get(lease.id, float("inf")) - turn.now.mono_s
    shortest_s = min(lease.ttl_s, ANSWER_LOST_S)
    if left_s <= shortest_s:
        turn.put(Deadline(lease.id, turn.now.mono_s + shortest_s))
    else:
        extend_deadline(turn, lease)


def shorten_deadline(turn: Turn, lease: Lease) -> None:
    """The client has gone away before it was answered."""
    until_s = turn.now.mono_s + min(lease.ttl_s, ANSWER_LOST_S)
    turn.put(Deadline(lease.id, min(until_s, turn.ledger.deadlines[lease.id])))


def _silent_from_s(turn: Turn, node: str) -> float:
    """When a node counts as silent unless it reports; in the past for one that has not reported yet."""
    observation = turn.ledger.node_observations.get(node)
    reported_s = float("-inf") if observation is None else observation.reported_at_s
    return reported_s + silence_limit_s(observation, turn.policy) + 2 * MIN_EXTENSION_S


def extend_watched_deadline(turn: Turn, lease: Lease, node: str) -> None:
    """The owner has been seen by this node's worker: a full `ttl_s` from now, in memory only.

    A lease whose `ttl_s` is shorter than the time between two reports lasts until its worker counts as silent, because
    the worker would have told of a death at once.
    """
    silent_after_s = silence_limit_s(turn.ledger.node_observations.get(node), turn.policy)
    lasts_s = max(lease.ttl_s, silent_after_s + 2 * MIN_EXTENSION_S)  # by then the node counts as silent
    until_s = turn.now.mono_s + lasts_s
    if until_s - turn.ledger.deadlines.get(lease.id, 0.0) >= min(MIN_EXTENSION_S, lasts_s / 10):
        turn.put(Deadline(lease.id, until_s))


def is_spared(turn: Turn, record: LeaseRecord) -> bool:
    """True while time does not end a lease: the worker that watches its owner is silent, and may find it alive.

    Ending it would free nothing, because no GPU of a silent node is granted. A request that waits has its client.
    """
    lease, watched = record.lease, record.watched_owner
    if not _is_held(turn, lease) or lease.liveness is not Liveness.PROCESS or watched is None:
        return False
    return is_unheard(turn.ledger, watched.node, turn.now, turn.policy)


def on_silence_over(turn: Turn, node: str) -> None:
    """A node reports again: leases of owners that it watches last until its worker has had time to find them."""
    for leases in turn.ledger.watched_owners.get(node, {}).values():
        for lease_id in leases:
            lease = turn.ledger.leases[lease_id].lease
            if _is_held(turn, lease):
                extend_watched_deadline(turn, lease, node)


def stop_watching(turn: Turn, node: str, reason: str) -> None:
    """The holders of all leases with an owner that the node watches must renew from here on."""
    for leases in list(turn.ledger.watched_owners.get(node, {}).values()):
        for lease_id in list(leases):
            _fall_back_to_heartbeat(turn, turn.ledger.leases[lease_id], reason)


OTHER_REALM = "its worker sees processes of another boot or another pid namespace"


def on_owner_reports(turn: Turn, node: str, report: NodeReport) -> None:
    """End what belongs to the dead, before anything is granted in this turn; keep what belongs to the living.

    An owner of which the report says nothing was not yet known to the worker: that decides nothing.
    """
    watched = turn.ledger.watched_owners.get(node)
    if not watched or report.realm is None:
        return
    reports = {owner_report.owner: owner_report for owner_report in report.owners}
    for owner, leases in list(watched.items()):
        for lease_id in list(leases):
            record = turn.ledger.leases[lease_id]
            if record.watched_owner is not None and record.watched_owner.realm != report.realm:
                _fall_back_to_heartbeat(turn, record, OTHER_REALM)
            elif (owner_report := reports.get(owner)) is not None:
                _apply_owner_report(turn, record, owner_report, node)


def _apply_owner_report(turn: Turn, record: LeaseRecord, owner_report: OwnerReport, node: str) -> None:
    undecided = record.lease.id in turn.pending
    match owner_report.state:
        case OwnerState.GONE if undecided:
            _refuse_request(turn, record)
        case OwnerState.GONE:
            end_lease(turn, record, EndReason.HOLDER_DIED)
        case OwnerState.ALIVE if _is_held(turn, record.lease):
            extend_watched_deadline(turn, record.lease, node)
        case OwnerState.UNKNOWN:
            _fall_back_to_heartbeat(turn, record, owner_report.reason or "its worker cannot watch it")


def _is_held(turn: Turn, lease: Lease) -> bool:
    """True if the life of the owner is a sign of the holder's: it knows of the grant."""
    return lease.state is LeaseState.ACTIVE and lease.id not in turn.ledger.unclaimed


def _refuse_request(turn: Turn, record: LeaseRecord) -> None:
    """Nothing of the request is recorded yet, so nothing is left of it."""
    detail = f"owner_pid: process {record.lease.holder.owner_pid} has ended."
    for cause in turn.pending.pop(record.lease.id).causes:
        turn.answer(cause, InvalidRequest(detail, remedy="Name a process that lives as long as the lease should."))
    turn.ledger.withdraw(record)


def _fall_back_to_heartbeat(turn: Turn, record: LeaseRecord, reason: str) -> None:
    """From here on the holder must renew, for good: a watch that comes and goes is none to rely on."""
    changed = replace(record, lease=replace(record.lease, liveness=Liveness.HEARTBEAT))
    if record.lease.id in turn.pending:
        turn.ledger.apply(changed)
        return
    turn.put(changed)
    lease = record.lease
    turn.emit(
        "lease.unwatched",
        lease_id=lease.id,
        node=record.watched_owner.node if record.watched_owner else None,
        reason=reason,
    )
