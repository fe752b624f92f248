"""Limits are set and removed, and shown with what is used of them."""

from __future__ import annotations

from collections.abc import Callable

from gpulease_protocol.errors import InUse, InvalidRequest, NotFound
from gpulease_protocol.gpu_hours import plain_hours
from gpulease_protocol.limits import LimitKind, Limits, LimitUse
from gpulease_server.core.budget_records import count_window
from gpulease_server.core.gpu_time import new_gpu_time, resized, used_s
from gpulease_server.core.group_usage import shares
from gpulease_server.core.happenings import LimitsChanged
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_index import LimitIndex, counts_of
from gpulease_server.core.limit_records import GpuTimeRemoved, LimitKey, LimitRecord, LimitRemoved, UserLimits
from gpulease_server.core.records import Instant
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import valid_limits
from gpulease_server.core.wording import duration, some_of

MAX_RECORDS = 10_000
"""Users, groups and tokens with limits, at most."""


def on_limits_changed(turn: Turn, change: LimitsChanged) -> None:
    """Set the limits of a user, a group or a token, or remove them. They hold from this turn on, and end nothing."""
    index, key = turn.ledger.limits, change.key
    refused = _refusal(turn.ledger, change)
    if refused is not None:
        turn.answer(change.cause, refused)
        return
    before = index.records.get(key)
    if change.limits is not None and before is not None:
        same = (before.limits, set(before.members)) == (change.limits, set(change.members))
        if same:  # asked twice
            turn.answer(change.cause, None)
            return
    count_window(turn, key)
    by = f"by {change.by or 'an unknown user'}"
    if change.limits is None:
        turn.put(LimitRemoved(key))
        turn.emit("limits.removed", reason=f"{key}, {by}")
    else:
        record = LimitRecord(
            kind=key.kind,
            name=key.name or "",
            limits=change.limits,
            members=change.members,
            set_at=turn.now.at,
            set_by=change.by,
        )
        turn.put(record)
        turn.emit("limits.set", reason=f"{key}: {describe_limits(record)}, {by}")
    _keep_window(turn, key, change.limits)
    if key.kind is LimitKind.GROUP and key.name in shares(turn.policy.group_shares):
        turn.ledger.steps_counted_at_s = None  # its members may be others: all who wait are put on their steps
    turn.answer(change.cause, None)


def _refusal(ledger: Ledger, change: LimitsChanged) -> InvalidRequest | NotFound | InUse | None:
    index, key = ledger.limits, change.key
    if change.limits is None:
        if key not in index.records:
            return NotFound(f"No limits are set for {key}.", remedy="`GET /v1/limits` lists those that are set.")
        of_group = key.name if key.kind is LimitKind.GROUP else None
        kept = [one.id for one in ledger.calendar.in_order() if of_group is not None and one.group == of_group]
        if not kept:
            return None
        detail = f"GPUs are reserved for {key} ({some_of(kept)}), and without it no one could use them."
        return InUse(detail, remedy="Cancel these reservations first.")
    if change.members and key.kind is not LimitKind.GROUP:
        return InvalidRequest("members: are for limits of a group.", remedy="Leave members out.")
    for user in change.members:
        group = index.group_of.get(user, key.name)
        if group != key.name:
            detail = f"members: user {user} is in group {group}, and a user is in one group at most."
            return InvalidRequest(detail, remedy=f"Take {user} out of group {group} first.")
    if key not in index.records and len(index.records) >= MAX_RECORDS:
        return InvalidRequest(
            f"Limits are set for {MAX_RECORDS} users, groups and tokens already.", remedy="Remove some."
        )
    return None


def _keep_window(turn: Turn, key: LimitKey, limits: Limits | None) -> None:
    """Begin to count GPU time where there is a limit of it now, and stop where there is none any more."""
    record = turn.ledger.limits.gpu_time.get(key)
    if limits is not None and limits.gpu_hours is not None:
        known = new_gpu_time(key, limits.window_s, turn.now) if record is None else record
        turn.put(resized(known, limits.window_s))
    elif record is not None:
        turn.put(GpuTimeRemoved(key))


def describe_limits(record: LimitRecord) -> str:
    """Limits that were set, in words: "4 GPUs, 24 h for a lease"."""
    limits = record.limits
    said = [
        "" if limits.max_gpus is None else f"{limits.max_gpus} GPUs",
        "" if limits.max_leases is None else f"{limits.max_leases} leases",
        "" if limits.max_queued is None else f"{limits.max_queued} requests in the queue",
        "" if limits.max_lease_s is None else f"{duration(limits.max_lease_s)} for a lease",
        "" if limits.gpu_hours is None else f"{plain_hours(limits.gpu_hours)} GPU-hours in {duration(limits.window_s)}",
        f"members {some_of(record.members)}" if record.members else "",
    ]
    return ", ".join(filter(None, said)) or "none"


def limit_list(index: LimitIndex, defaults: UserLimits, now: Instant) -> Callable[[LimitKey], LimitUse]:
    """How the limits of each are shown: as they are at this moment, whatever the ledger becomes later."""
    moment = LimitIndex(
        records=index.records.copy(),
        gpu_time=index.gpu_time.copy(),
        leases=index.leases.copy(),
        gpus=index.gpus.copy(),
        queued=index.queued.copy(),
    )
    return lambda key: limit_use(moment, key, defaults, now)


def limit_use(index: LimitIndex, key: LimitKey, defaults: UserLimits, now: Instant) -> LimitUse:
    """The limits that hold for a user, a group or a token, and what is used of them."""
    limits, record = valid_limits(index, key, defaults), index.records.get(key)
    names = ("max_gpus", "max_leases", "max_queued")
    set_here = index.limits_set(key)
    return LimitUse(
        kind=key.kind,
        name=key.name or "",
        members=() if record is None else record.members,
        defaults=tuple(name for name in names if getattr(limits, name) is not None and getattr(set_here, name) is None),
        max_gpus=limits.max_gpus,
        max_leases=limits.max_leases,
        max_queued=limits.max_queued,
        max_lease_s=limits.max_lease_s,
        gpu_hours=limits.gpu_hours,
        window_s=limits.window_s,
        gpu_hours_used=None if limits.gpu_hours is None else used_s(index, key, now) / 3600,
        set_at=None if record is None else record.set_at,
        set_by=None if record is None else record.set_by,
        **counts_of(index, key),
    )
