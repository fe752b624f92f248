"""Idle GPUs that are kept on purpose: said by the holder of a lease, until a moment. See docs/design/0016."""

from __future__ import annotations

from datetime import timedelta

from gpulease_protocol.errors import GpuleaseError, InvalidRequest, NotAllowed
from gpulease_protocol.model import LeaseKeep, LeaseState
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.happenings import KeepRequested
from gpulease_server.core.lease import find_as_holder, find_lease, lost_lease
from gpulease_server.core.presentation import lease_view
from gpulease_server.core.reclaim_rule import withdraw_notice
from gpulease_server.core.records import LeaseRecord
from gpulease_server.core.turn import Turn
from gpulease_server.core.wording import duration


def on_keep_requested(turn: Turn, asked: KeepRequested) -> None:
    """Note until when idle GPUs of a lease are kept, in the place of what was said before."""
    found = _find(turn, asked)
    if isinstance(found, GpuleaseError):
        turn.answer(asked.cause, found)
        return
    now, until_s = turn.now, turn.now.mono_s + asked.for_s
    kept = LeaseKeep(until=now.at + timedelta(seconds=asked.for_s), reason=asked.reason, by=asked.by, at=now.at)
    turn.put(replace(found, lease=replace(found.lease, kept=kept), kept_until_s=until_s))
    turn.emit(
        "lease.kept",
        lease_id=found.lease.id,
        job_id=found.lease.job_id,
        node=found.lease.gpus[0].node,
        gpus=tuple(device.uuid for device in found.lease.gpus),
        fencing_token=found.lease.fencing_token,
        reason=f"{f'by user {asked.by} ' if asked.by else ''}until {kept.until:%Y-%m-%d %H:%M:%S} UTC: {asked.reason}",
    )
    if found.lease.id in turn.ledger.reclaims.notices:
        withdraw_notice(turn, found.lease.id, "they are kept on purpose")
    record = turn.ledger.leases[found.lease.id]
    turn.answer(asked.cause, lease_view(turn.ledger, record, now, turn.policy))


def _find(turn: Turn, asked: KeepRequested) -> LeaseRecord | GpuleaseError:
    """The lease, or why nothing of it is kept."""
    if asked.of_another and asked.fencing_token is None:
        record: LeaseRecord | GpuleaseError = find_lease(turn, asked.lease_id)
    else:
        record = find_as_holder(turn, asked.lease_id, asked.fencing_token)
    if isinstance(record, GpuleaseError):
        return record
    longest_s = turn.policy.max_keep_s
    if record.lease.state is LeaseState.ENDED:
        return lost_lease(record.lease)
    if record.lease.state is LeaseState.QUEUED:
        return InvalidRequest(f"Lease {asked.lease_id} waits for GPUs, so there are none to keep.")
    if longest_s <= 0:
        detail = "Idle GPUs may not be kept here."
        return NotAllowed(detail, remedy="Ask the administrator, who may start the daemon with `--max-keep-s`.")
    if asked.for_s > longest_s:
        remedy = "Ask for less, and ask again before it has ended."
        return InvalidRequest(f"for_s: must be at most {longest_s:g} seconds ({duration(longest_s)}).", remedy=remedy)
    return record
