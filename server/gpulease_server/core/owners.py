"""What a worker sees of the processes that own leases. The failure table is in the package's essay."""

from __future__ import annotations

from dataclasses import replace

from gpulease.errors import InvalidRequest
from gpulease.exchange import NodeReport, OwnerReport, OwnerState
from gpulease.model import EndReason, Liveness

from .lease import end
from .ledger import LeaseRecord
from .signs import seen_alive
from .turn import Turn

OTHER_REALM = "its worker sees processes of another boot or another pid namespace"


def on_owner_reports(turn: Turn, node: str, report: NodeReport) -> None:
    """End what belongs to the dead, before anything is granted in this turn; keep what belongs to the living.

    An owner of which the report says nothing was not yet known to the worker: that decides nothing.
    """
    watched = turn.ledger.watched.get(node)
    if not watched or report.realm is None:
        return
    told = {one.owner: one for one in report.owners}
    for owner, leases in list(watched.items()):
        for lease_id in list(leases):
            record = turn.ledger.leases[lease_id]
            if record.watched is not None and record.watched.realm != report.realm:
                _unwatched(turn, record, OTHER_REALM)
            elif (one := told.get(owner)) is not None:
                _seen(turn, record, one, node)


def _seen(turn: Turn, record: LeaseRecord, one: OwnerReport, node: str) -> None:
    undecided = record.lease.id in turn.pending
    match one.state:
        case OwnerState.GONE if undecided:
            _refuse(turn, record)
        case OwnerState.GONE:
            end(turn, record, EndReason.HOLDER_DIED)
        case OwnerState.ALIVE if not undecided:
            seen_alive(turn, record.lease, node)
        case OwnerState.UNKNOWN:
            _unwatched(turn, record, one.reason or "its worker cannot watch it")


def _refuse(turn: Turn, record: LeaseRecord) -> None:
    """Nothing of the request is recorded yet, so nothing remains of it."""
    detail = f"owner_pid: process {record.lease.holder.owner_pid} has ended."
    for call in turn.pending.pop(record.lease.id).calls:
        turn.answer(call, InvalidRequest(detail, remedy="Name a process that lives as long as the lease should."))
    turn.ledger.withdraw(record)


def _unwatched(turn: Turn, record: LeaseRecord, reason: str) -> None:
    """From here on the holder must renew, for good: a watch that comes and goes is none to rely on."""
    changed = replace(record, lease=replace(record.lease, liveness=Liveness.HEARTBEAT))
    if record.lease.id in turn.pending:
        turn.ledger.apply(changed)
        return
    turn.put(changed)
    lease = record.lease
    turn.event(
        "lease.unwatched", lease_id=lease.id, node=record.watched.node if record.watched else None, reason=reason
    )
