"""Reservations are made, cancelled, and end. `core.calendar` has the rule."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import UTC

from gpulease_protocol.errors import GpuleaseError, InUse, InvalidRequest, NeverFits, NotFound
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import Demand, GpuState, LeaseState
from gpulease_protocol.reservations import Reservation
from gpulease_server.core.calendar import MAX_AHEAD, MAX_RESERVATIONS, ReservationRemoved, is_for
from gpulease_server.core.declared_ends import spec_of_attempt
from gpulease_server.core.explain.reserved_gpus import describe_reservation
from gpulease_server.core.gpu import is_cordoned, state_of
from gpulease_server.core.gpu_choice import choose_gpus
from gpulease_server.core.happenings import ReservationCancelled, ReservationRequested
from gpulease_server.core.limit_records import LimitKey
from gpulease_server.core.records import GpuRecord, LeaseRecord
from gpulease_server.core.token_budgets import held_s
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import UserUsage, usage_by_user
from gpulease_server.core.wording import count_gpus

MAX_SAID = 8
"""For so many GPUs an answer says who is in the way."""
WORKING = (GpuState.FREE, GpuState.LEASED, GpuState.DRAINING)
"""States of GPUs that are chosen before others."""
BUSY = (GpuState.FOREIGN,)
"""Of the others these are chosen first: someone else's process may have ended by then."""


def on_reservation_requested(turn: Turn, asked: ReservationRequested) -> None:
    """Make a reservation, or say why not."""
    chosen = _checked(turn, asked) or _chosen(turn, asked)
    if isinstance(chosen, GpuleaseError):
        turn.answer(asked.cause, chosen)
        return
    entry = Reservation(
        id=asked.reservation_id,
        gpus=tuple(gpu.device for gpu in chosen),
        from_at=max(asked.from_at, turn.now.at).astimezone(UTC),
        to_at=asked.to_at.astimezone(UTC),
        user=asked.user,
        group=asked.group,
        reason=asked.reason,
        made_at=turn.now.at,
        made_by=asked.by,
    )
    turn.put(entry)
    _emit(turn, "reservation.created", entry, f", by {asked.by or 'an unknown user'}")
    turn.answer(asked.cause, None)


def on_reservation_cancelled(turn: Turn, asked: ReservationCancelled) -> None:
    """Take a reservation out of the calendar."""
    entry = turn.ledger.calendar.entries.get(asked.reservation_id)
    if entry is None:
        detail = f"There is no reservation {asked.reservation_id}, or it has ended."
        turn.answer(asked.cause, NotFound(detail, remedy="`GET /v1/reservations` lists all."))
        return
    turn.put(ReservationRemoved(entry.id))
    _emit(turn, "reservation.cancelled", entry, f", by {asked.by or 'an unknown user'}")
    turn.answer(asked.cause, None)


def end_reservations(turn: Turn) -> None:
    """Take out of the calendar what has passed."""
    for entry in [one for one in turn.ledger.calendar.in_order() if one.to_at <= turn.now.at]:
        turn.put(ReservationRemoved(entry.id))
        _emit(turn, "reservation.ended", entry, "")


def _emit(turn: Turn, kind: str, entry: Reservation, by: str) -> None:
    nodes = {device.node for device in entry.gpus}
    whom = f"user {entry.user}" if entry.group is None else f"group {entry.group}"
    times = f"{entry.from_at:%Y-%m-%d %H:%M:%S} UTC to {entry.to_at:%Y-%m-%d %H:%M:%S} UTC"
    why = f", {entry.reason}" if entry.reason else ""
    turn.emit(
        kind,
        node=nodes.pop() if len(nodes) == 1 else None,
        gpus=tuple(device.uuid for device in entry.gpus),
        reason=f"{entry.id} for {whom}, {times}{why}{by}",
    )


def _checked(turn: Turn, asked: ReservationRequested) -> GpuleaseError | None:
    """Why what was asked for is refused, whatever GPUs it is about; None if it is not."""
    ledger, now = turn.ledger, turn.now.at
    if asked.to_at <= now:
        return InvalidRequest("to_at: must not have passed.", remedy=f"The daemon's clock shows {now:%Y-%m-%d %H:%M}Z.")
    if asked.to_at > now + MAX_AHEAD:
        return InvalidRequest(f"to_at: must be within {MAX_AHEAD.days} days.", remedy="Choose an earlier time.")
    if asked.group is not None and LimitKey(LimitKind.GROUP, asked.group) not in ledger.limits.records:
        remedy = "`gpulease limits set @GROUP --member USER` makes one; `gpulease limits list` shows them."
        return NotFound(f"There is no group {asked.group}.", remedy=remedy)
    if len(ledger.calendar.entries) >= MAX_RESERVATIONS:
        return InvalidRequest(f"There are {MAX_RESERVATIONS} reservations.", remedy="Cancel some.")
    if asked.node is not None and asked.node not in ledger.nodes:
        return NotFound(f"There is no node {asked.node}.", remedy="`GET /v1/nodes` lists all nodes.")
    for uuid in asked.uuids:
        if uuid not in ledger.gpus:
            return NotFound(f"There is no GPU {uuid}.", remedy="`GET /v1/gpus` lists all GPUs.")
    return None


def _chosen(turn: Turn, asked: ReservationRequested) -> Sequence[GpuRecord] | GpuleaseError:
    """The GPUs for a reservation, if nothing is in the way; else who is."""
    ledger, users = turn.ledger, usage_by_user(turn.ledger, turn.policy.limits, turn.now)
    on_node = [] if asked.node is None else ledger.gpus_on(asked.node)
    gpus = [ledger.gpus[uuid] for uuid in asked.uuids] or sorted(on_node, key=lambda gpu: gpu.device.index)
    needed = asked.count or len(gpus)
    if needed > len(gpus):
        detail = f"{count_gpus(needed)} of node {asked.node} cannot be reserved: it has {len(gpus)}."
        return NeverFits(detail, remedy="Reserve fewer, and the others of another node.")
    in_the_way = {gpu.device.uuid: _in_the_way(turn, users, asked, gpu) for gpu in gpus}
    open_gpus = [gpu for gpu in gpus if in_the_way[gpu.device.uuid] is None]
    if len(open_gpus) < needed:
        said = [why for why in in_the_way.values() if why is not None][:MAX_SAID]
        where = f" of node {asked.node}" if asked.node is not None else ""
        detail = f"{count_gpus(needed)}{where} cannot be reserved: {len(open_gpus)} of {len(gpus)} could be."
        remedy = "Choose a later time or other GPUs, or have these leases end first."
        return InUse(" ".join([detail, *said]), remedy=remedy)
    if asked.node is None:
        return open_gpus
    able = [gpu for gpu in open_gpus if _is_in(WORKING, turn, gpu)]
    if len(able) >= needed:
        uuids = [gpu.device.uuid for gpu in able]
        return [ledger.gpus[uuid] for uuid in choose_gpus(ledger, Demand(count=needed), asked.node, uuids, needed)]
    others = sorted((gpu for gpu in open_gpus if gpu not in able), key=lambda gpu: not _is_in(BUSY, turn, gpu))
    return [*able, *others[: needed - len(able)]]


def _is_in(states: Collection[GpuState], turn: Turn, gpu: GpuRecord) -> bool:
    return not is_cordoned(turn.ledger, gpu) and state_of(turn.ledger, gpu, turn.now, turn.policy) in states


def _in_the_way(turn: Turn, users: UserUsage, asked: ReservationRequested, gpu: GpuRecord) -> str | None:
    """What keeps one GPU from being reserved, as a sentence; None if nothing does."""
    ledger, name = turn.ledger, f"GPU {gpu.device.index} of {gpu.device.node}"
    entry = ledger.calendar.within(gpu.device.uuid, max(asked.from_at, turn.now.at), asked.to_at)
    if entry is not None:
        return f"{name} is {describe_reservation(entry)}."
    record = ledger.leases.get(gpu.lease_id or "")
    if record is None or gpu.draining or record.lease.state is not LeaseState.ACTIVE:
        return None
    holder = record.lease.holder
    if is_for(asked, holder.user, ledger.limits.group_of.get(holder.user)):
        return None
    end = users.latest_end(record.lease, _time_used_s(turn, record))
    if end is not None and end <= asked.from_at:
        return None
    lasts = "declares no time" if end is None else f"may last until {end:%Y-%m-%d %H:%M} UTC"
    return f"{name} is leased to {holder.user or 'an unknown user'} ({record.lease.id}), which {lasts}."


def _time_used_s(turn: Turn, record: LeaseRecord) -> float:
    """How much of its time an active lease has used. That of a job counts from its start; for one that is yet to start
    all of it is to come, or what earlier attempts under the lease have left of it."""
    used_s, job = held_s(record, turn.now), turn.ledger.live_jobs.get(record.lease.job_id or "")
    if job is None:
        return used_s
    left_s, started_at = spec_of_attempt(job, record.lease).timeout_s, job.job.started_at
    before_s = 0.0 if job.spec.timeout_s is None or left_s is None else job.spec.timeout_s - left_s
    since_s = 0.0 if started_at is None else max(0.0, (turn.now.at - started_at).total_seconds())
    return min(used_s, before_s + since_s)
