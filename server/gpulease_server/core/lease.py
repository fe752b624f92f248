"""A lease's life: asked for, granted, renewed, released, expired."""

from __future__ import annotations

import zlib
from dataclasses import replace

from gpulease.errors import GpuleaseError, IdempotencyMismatch, LeaseLost, NotAllowed, NotFound, StaleToken
from gpulease.exchange import LEASE_PORTS
from gpulease.model import EndReason, GpuState, Lease, LeaseState, Liveness

from .gpu import state_of
from .happenings import Key, LeaseAsked, LeaseReleased, LeaseRenewed, WaiterSeen
from .ledger import Change, Deadline, GpuRecord, KeyRecord, LeaseRecord, Ledger, OwnerWatch
from .quota import had
from .signs import live_on, liveness_of
from .turn import Pending, Turn
from .view import lease_view
from .watch import baseline_of

AGAINST_ITS_HOLDER = (EndReason.EXPIRED, EndReason.HOLDER_DIED, EndReason.REVOKED, EndReason.NODE_LOST)
"""Ends that the holder of an active lease did not ask for: `lease.lost` tells of them."""


def on_asked(turn: Turn, asked: LeaseAsked) -> None:
    """Take a request in; `settle` gives the verdict."""
    if answered_before(turn, asked.cause, asked.key):
        return
    lease = Lease(
        id=asked.lease_id,
        state=LeaseState.QUEUED,
        holder=asked.holder,
        demand=asked.demand,
        ttl_s=asked.ttl_s,
        liveness=liveness_of(turn.ledger, asked.watched),
        created_at=turn.now.at,
    )
    take_in(turn, lease, asked.cause, queue=asked.queue, key=asked.key, watched=asked.watched)


def take_in(
    turn: Turn,
    lease: Lease,
    cause: str,
    *,
    queue: bool,
    key: Key | None,
    changes: tuple[Change, ...] = (),
    watched: OwnerWatch | None = None,
) -> None:
    """Put a lease at the end of the queue, undecided. Nothing is recorded before the verdict."""
    if key is not None:
        made = lease.job_id or lease.id
        changes += (KeyRecord(key=key.key, fingerprint=key.fingerprint, made=made, at=turn.now.at),)
    number, now_s = turn.ledger.next_number, turn.now.mono_s
    turn.ledger.apply(LeaseRecord(lease=lease, number=number, cause=cause, watched=watched, asked_at_s=now_s))
    turn.pending[lease.id] = Pending([cause], queue, changes, turn.now.mono_s)


def answered_before(turn: Turn, call: str, key: Key | None) -> bool:
    """True when this key was seen before; the caller then gets what was made for it, or a refusal."""
    if key is None:
        return False
    for lease_id, pending in turn.pending.items():
        kept = next((item for item in pending.changes if isinstance(item, KeyRecord) and item.key == key.key), None)
        if kept is not None:
            if kept.fingerprint != key.fingerprint:
                turn.answer(call, _mismatch(key, lease_id))
            else:
                pending.calls.append(call)
            return True
    known = turn.ledger.keys.get(key.key)
    if known is None:
        return False
    if known.fingerprint != key.fingerprint:
        turn.answer(call, _mismatch(key, known.made))
    elif known.made in turn.ledger.jobs:
        turn.answer(call, turn.ledger.jobs[known.made].job)
    elif known.made in turn.ledger.leases:
        turn.answer(call, lease_view(turn.ledger, turn.ledger.leases[known.made], turn.now, turn.policy))
    else:
        turn.answer(call, NotFound(f"What was made for this Idempotency-Key ({known.made}) ended long ago."))
    return True


def _mismatch(key: Key, made: str) -> IdempotencyMismatch:
    return IdempotencyMismatch(
        f"Idempotency-Key {key.key!r} was used with another request.",
        remedy="Use a new key for a new request.",
        extra={"made": made},
    )


def grant(turn: Turn, record: LeaseRecord, gpus: tuple[GpuRecord, ...]) -> None:
    """Give these GPUs to a queued lease: one token, one port, all of them or a broken invariant."""
    ledger, lease = turn.ledger, record.lease
    token, node = ledger.next_token, gpus[0].device.node
    port = _free_port(turn, node, lease.id)
    env = {
        "CUDA_VISIBLE_DEVICES": ",".join(gpu.device.uuid for gpu in gpus),
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "GPULEASE_LEASE_ID": lease.id,
        "GPULEASE_LEASE_TOKEN": str(token),
    }
    granted = replace(
        lease,
        state=LeaseState.ACTIVE,
        gpus=tuple(gpu.device for gpu in gpus),
        env=env,
        token=token,
        granted_at=turn.now.at,
    )
    turn.put(replace(record, lease=granted, port=port, renewed_at=turn.now.at))
    for gpu in gpus:
        if gpu.lease_id is not None:
            raise AssertionError(f"GPU {gpu.device.uuid} is still held by {gpu.lease_id}")
        baseline = baseline_of(ledger.sightings.get(node), gpu)
        turn.put(replace(gpu, lease_id=lease.id, draining=False, token=token, baseline_bytes=baseline))
    if lease.liveness is Liveness.JOB:
        turn.put(Deadline(lease.id, None))
    else:
        live_on(turn, lease)
    turn.event(
        "lease.granted",
        lease_id=lease.id,
        job_id=lease.job_id,
        node=node,
        gpus=tuple(gpu.device.uuid for gpu in gpus),
        token=token,
    )


def _free_port(turn: Turn, node: str, lease_id: str) -> int:
    """A port that no lease of the node's host holds and nothing there listens on.

    The search begins at a place that follows from the lease's random id, so that two daemons on one host, which do not
    know of each other, hardly ever choose the same port before somebody listens on it.
    """
    ledger = turn.ledger
    here = _same_host(ledger, node) & ledger.sightings.keys()
    busy = {port for name in here for port in ledger.sightings[name].ports_in_use}
    busy |= {ledger.leases[holder].port or 0 for holder in _holders(ledger, node)}
    begin = zlib.crc32(lease_id.encode())
    order = (LEASE_PORTS[(begin + step) % len(LEASE_PORTS)] for step in range(len(LEASE_PORTS)))
    return next((port for port in order if port not in busy), LEASE_PORTS[begin % len(LEASE_PORTS)])


def _same_host(ledger: Ledger, node: str) -> set[str]:
    """The nodes on a node's host: two simulated ones may share it."""
    host = ledger.nodes[node].host
    return {name for name, record in ledger.nodes.items() if record.host == host}


def _holders(ledger: Ledger, node: str) -> set[str]:
    """The leases that hold GPUs, or whose remains drain, on the host of a node."""
    here = _same_host(ledger, node)
    return {gpu.lease_id for gpu in ledger.gpus.values() if gpu.lease_id and gpu.device.node in here}


def end(turn: Turn, record: LeaseRecord, why: EndReason) -> None:
    """End a lease. Its GPUs drain from this moment, and their node is asked at once whether they are clean."""
    lease = record.lease
    held = turn.ledger.held_by(lease)
    turn.put(Deadline(lease.id, None))
    for gpu in held:
        turn.put(replace(gpu, draining=True))
        turn.ledger.draining_since[gpu.device.uuid] = turn.now.mono_s
        turn.want_reading(gpu.device.node)
    turn.put(replace(record, lease=replace(lease, state=LeaseState.ENDED, end_reason=why, ended_at=turn.now.at)))
    turn.event(
        "lease.ended",
        lease_id=lease.id,
        job_id=lease.job_id,
        node=lease.gpus[0].node if lease.gpus else None,
        gpus=tuple(device.uuid for device in lease.gpus),
        token=lease.token,
        reason=why.value,
    )
    if lease.state is LeaseState.ACTIVE and why in AGAINST_ITS_HOLDER:
        turn.event(
            "lease.lost",
            lease_id=lease.id,
            node=lease.gpus[0].node,
            gpus=tuple(device.uuid for device in lease.gpus),
            token=lease.token,
            reason=why.value,
        )


def on_renewed(turn: Turn, renewed: LeaseRenewed) -> None:
    """The holder lives: a full `ttl_s` from now. A late renewal revives while none of the GPUs was granted again."""
    record = turn.ledger.leases.get(renewed.lease_id)
    refusal = _refusal(record, renewed.token, renewed.lease_id)
    if refusal is not None or record is None:
        turn.answer(renewed.cause, refusal)
        return
    lease = record.lease
    if lease.state is LeaseState.ENDED:
        if lease.end_reason is not EndReason.EXPIRED or not _can_revive(turn, lease):
            turn.answer(renewed.cause, _lost(lease))
            return
        record = _revive(turn, record)
        lease = record.lease
    if lease.liveness is not Liveness.JOB:
        live_on(turn, lease)
        turn.put(replace(record, renewed_at=turn.now.at))
    turn.answer(renewed.cause, lease_view(turn.ledger, turn.ledger.leases[lease.id], turn.now, turn.policy))


def _can_revive(turn: Turn, lease: Lease) -> bool:
    """True while every GPU remembers this grant as its last, and either still drains of it or is free; and its user
    has not taken what he may have meanwhile."""
    ledger = turn.ledger
    for device in lease.gpus:
        gpu = ledger.gpus.get(device.uuid)
        if gpu is None or gpu.token != lease.token:
            return False
        if gpu.lease_id is None and state_of(ledger, gpu, turn.now, turn.policy) is not GpuState.FREE:
            return False
    within = had(ledger, turn.policy.limits).limit_met(lease, len(lease.gpus)) is None
    return within and _port_is_free(turn, lease)


def _port_is_free(turn: Turn, lease: Lease) -> bool:
    """True while no other lease of the host was given the port of this one."""
    port = turn.ledger.leases[lease.id].port
    others = _holders(turn.ledger, lease.gpus[0].node) - {lease.id}
    return all(turn.ledger.leases[holder].port != port for holder in others)


def _revive(turn: Turn, record: LeaseRecord) -> LeaseRecord:
    lease = replace(record.lease, state=LeaseState.ACTIVE, end_reason=None, ended_at=None)
    revived = replace(record, lease=lease)
    turn.put(revived)
    for device in lease.gpus:
        turn.put(replace(turn.ledger.gpus[device.uuid], lease_id=lease.id, draining=False))
    turn.event(
        "lease.revived",
        lease_id=lease.id,
        node=lease.gpus[0].node,
        gpus=tuple(device.uuid for device in lease.gpus),
        token=lease.token,
    )
    return revived


def long_ended(lease: Lease, happening: LeaseRenewed | LeaseReleased) -> Lease:
    """The answer about a lease that ended so long ago that it is no longer in memory. Raises LeaseLost, StaleToken."""
    revoked = isinstance(happening, LeaseReleased) and happening.revoked_by is not None
    if lease.token != happening.token and not (revoked and happening.token is None):
        raise _stale(lease.id, happening.token)
    if isinstance(happening, LeaseRenewed) or not _given_up(lease, revoked):
        raise _lost(lease)
    return lease


def _given_up(lease: Lease, revoked: bool) -> bool:
    """True when a lease has ended as the one who says so now would have ended it."""
    ends = (EndReason.RELEASED, EndReason.CANCELLED)
    return lease.end_reason in ((*ends, EndReason.REVOKED) if revoked else ends)


def on_released(turn: Turn, released: LeaseReleased) -> None:
    """The holder gives back, or stops waiting. Saying it twice is answered the same twice."""
    record = turn.ledger.leases.get(released.lease_id)
    refusal = _refusal(record, released.token, released.lease_id)
    revoked = released.revoked_by is not None
    if record is None or (refusal is not None and not (revoked and released.token is None)):
        turn.answer(released.cause, refusal)
        return
    lease = record.lease
    if lease.job_id is not None and lease.state is not LeaseState.ENDED:
        detail = f"Lease {lease.id} belongs to job {lease.job_id}."
        turn.answer(released.cause, NotAllowed(detail, remedy=f"Cancel the job: gpulease cancel {lease.job_id}"))
        return
    if lease.state is LeaseState.ENDED and not _given_up(lease, revoked):
        turn.answer(released.cause, _lost(lease))
        return
    if lease.state is not LeaseState.ENDED:
        by_holder = EndReason.RELEASED if lease.state is LeaseState.ACTIVE else EndReason.CANCELLED
        if revoked:
            turn.event("lease.revoked", lease_id=lease.id, reason=f"by user {released.revoked_by}")
        end(turn, record, EndReason.REVOKED if revoked else by_holder)
    turn.answer(released.cause, lease_view(turn.ledger, turn.ledger.leases[lease.id], turn.now, turn.policy))


def on_waiter_seen(turn: Turn, seen: WaiterSeen) -> None:
    """Somebody waits for a queued lease, so its holder lives."""
    record = turn.ledger.leases.get(seen.lease_id)
    if record is not None and record.lease.state is LeaseState.QUEUED and seen.lease_id in turn.ledger.deadlines:
        live_on(turn, record.lease)


def expire(turn: Turn) -> None:
    """End every lease whose deadline has passed."""
    due = [lease_id for lease_id, at_s in turn.ledger.deadlines.items() if at_s <= turn.now.mono_s]
    for lease_id in due:
        record = turn.ledger.leases[lease_id]
        waited = record.lease.state is LeaseState.QUEUED
        end(turn, record, EndReason.HOLDER_DIED if waited else EndReason.EXPIRED)


def _refusal(record: LeaseRecord | None, token: int | None, lease_id: str) -> GpuleaseError | None:
    if record is None:
        return NotFound(f"There is no lease {lease_id}.", remedy="gpulease leases shows those there are.")
    return None if record.lease.token == token else _stale(lease_id, token)


def _stale(lease_id: str, token: int | None) -> StaleToken:
    return StaleToken(
        f"Token {token} is not the token of lease {lease_id}.", remedy="Send the token that the grant showed."
    )


def _lost(lease: Lease) -> LeaseLost:
    return LeaseLost(
        f"Lease {lease.id} has ended ({lease.end_reason}) and its GPUs may be someone else's.",
        remedy="Stop using them and ask for a new lease.",
    )
