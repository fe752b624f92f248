"""An outage: the time in which nothing can be recorded. The package docstring has the failure table."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable
from dataclasses import fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.model import Event, Lease, LeaseState, Liveness
from gpulease_server.core import gpu_time, token_budgets
from gpulease_server.core.calendar import Calendar
from gpulease_server.core.decide import decide
from gpulease_server.core.demand_classes import DemandClasses
from gpulease_server.core.due_leases import DueLeases
from gpulease_server.core.fleet import Fleet
from gpulease_server.core.happenings import RenewalRequested
from gpulease_server.core.job_index import JobIndex
from gpulease_server.core.kept_leases import kept_until_s
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_index import LimitIndex
from gpulease_server.core.policy import Policy
from gpulease_server.core.reclaim_records import ReclaimIndex
from gpulease_server.core.records import Change, Deadline, Instant, LeaseRecord
from gpulease_server.core.turn import Answer, Turn
from gpulease_server.runtime import clock
from gpulease_server.store.dialects import failure
from gpulease_server.store.fencing import OLDER
from gpulease_server.store.ledger_store import StoreFailed

log = logging.getLogger("gpulease.writer")

FIRST_PAUSE_S = 0.1
"""Pause before the first attempt after a failed commit; it doubles from one to the next."""
MAX_PAUSE_S = 2.0
"""The longest pause, except for a ledger that takes long to load."""
GRACE_S = 300.0
"""A lease whose declared time has ended, as the wall clock tells it, lasts so long yet; or its `ttl_s`, if less.
It does so after each load, but not into a window that is reserved for someone else."""


class Outage:
    """The time from a failed commit, or from the start of loading the ledger, until commits succeed again.

    Args:
        reason: Why nothing can be recorded; a sentence.
        failed: The changes that may or may not have been recorded.
        committed: The ledger before them.
        answers_renewals: Whether renewals are answered, because no other daemon can have taken over meanwhile.
        try_writing: Whether a commit, and not only loading, must succeed to end it.
    """

    def __init__(
        self,
        reason: str,
        *,
        failed: Iterable[Change] = (),
        committed: Ledger | None = None,
        answers_renewals: bool = False,
        try_writing: bool = True,
    ) -> None:
        self.reason = reason.rstrip(".")
        self.try_writing = try_writing
        self._answers_renewals = answers_renewals
        self._since_s = clock.now().mono_s
        self._first_reason = reason
        self._logged_reason = reason
        self._renewed_at: dict[str, datetime] = {}
        self._in_doubt = {
            change.lease.id
            for change in failed
            if isinstance(change, LeaseRecord) and not _is_renewal_at_most(change, committed)
        }

    def answer_renewal(self, ledger: Ledger, renewed: RenewalRequested, now: Instant, policy: Policy) -> Answer | None:
        """The answer to a renewal, from memory alone; None if only the database can tell.

        A holder relies on the lease being recorded and lasting a full `ttl_s`. It is recorded, and the end of the
        outage gives it at least that, as a restart does. The renewal itself is recorded then. Not answered are a lease
        in doubt, which the failed commit may have granted, ended or revived, and an unclaimed one: its holder is not
        told before that is recorded, so that a restart knows that its owner's life keeps it.
        """
        record = ledger.leases.get(renewed.lease_id)
        if not self._answers_renewals or record is None or record.lease.state is LeaseState.ENDED:
            return None
        if renewed.lease_id in self._in_doubt or renewed.lease_id in ledger.unclaimed:
            return None
        turn = Turn(ledger=ledger, now=now, policy=policy)
        decide(turn, renewed)
        answer = turn.answers[0][1]
        if not isinstance(answer, GpuleaseError):
            self._renewed_at[renewed.lease_id] = now.at
        return answer

    def closing_changes(self, ledger: Ledger, now: Instant) -> list[Change]:
        """The changes to record at its end: answered renewals, and the event. Applies them to `ledger`."""
        lasted_s = now.mono_s - self._since_s
        changes: list[Change] = []
        for lease_id, at in self._renewed_at.items():
            record = ledger.leases.get(lease_id)
            if record is not None and record.lease.state is not LeaseState.ENDED:
                changes.append(replace(record, renewed_at=at))
        reason = f"nothing could be recorded for {lasted_s:.1f} s: {self._first_reason}"
        changes.append(Event(seq=ledger.next_seq, at=now.at, kind="ledger.recovered", cause="recovery", reason=reason))
        for change in changes:
            ledger.apply(change)
        return changes

    def update(self, error: Exception) -> None:
        """Keep the newest reason, and log it if it has changed; with a traceback if this program is at fault."""
        reason = error.detail if isinstance(error, StoreFailed) else f"the ledger cannot be used: {failure(error)}"
        self.reason = reason.rstrip(".")
        if self.reason != self._logged_reason:
            self._logged_reason = self.reason
            ours = not isinstance(error, (StoreFailed, SQLAlchemyError, OSError))
            log.error("still nothing can be recorded: %s", self.reason, exc_info=error if ours else None)

    def log_end(self) -> None:
        """Log the end."""
        lasted_s = clock.now().mono_s - self._since_s
        if self.try_writing or self._logged_reason != self._first_reason:
            log.warning("the ledger is read and can be written again, after %.1f s", lasted_s)


def _is_renewal_at_most(change: LeaseRecord, committed: Ledger | None) -> bool:
    """True if a change can only be a renewal: the state and the grant of the lease are unchanged."""
    before = committed.leases.get(change.lease.id) if committed is not None else None
    return before is not None and (before.lease.state, before.lease.fencing_token) == (
        change.lease.state,
        change.lease.fencing_token,
    )


def reset_deadlines(ledger: Ledger, now: Instant) -> None:
    """Set what is not stored: every lease gets a full deadline, every draining GPU needs a reading begun after now."""
    for record in ledger.leases.values():
        if record.lease.ended_at is None and record.lease.liveness is not Liveness.JOB:
            ledger.apply(Deadline(record.lease.id, now.mono_s + record.lease.ttl_s))
    for budget in list(ledger.budgets.values()):
        ledger.apply(token_budgets.counted(ledger, budget, now))
    # From here on no step of the wall clock changes how long a lease has lasted.
    for record in [one for one in ledger.leases.values() if one.lease.state is LeaseState.ACTIVE]:
        granted_at_s = now.mono_s - token_budgets.held_s(record, now)
        ledger.apply(replace(record, granted_at_s=granted_at_s, kept_until_s=kept_until_s(record, now)))
    for lease_id in list(ledger.ends_s):
        record = ledger.leases[lease_id]
        time_s, held_s = record.lease.demand.time_s or 0.0, token_budgets.held_s(record, now)
        # The wall clock may have been set. A holder who renewed just before relies on `ttl_s`, or a part of it.
        given_s = min(record.lease.ttl_s, time_s, GRACE_S, _until_reserved_s(ledger, record.lease, now))
        left_s = max(time_s - held_s, given_s)
        ledger.put_end(lease_id, now.mono_s + left_s)
    for key, window in list(ledger.limits.gpu_time.items()):
        ledger.apply(gpu_time.counted(window, ledger.limits.gpus[key], now))
    for one in list(ledger.preemptions.values()):
        # The whole notice, as with deadlines: who was to be told may not have heard of it, and the wall clock may have
        # been set.
        ledger.apply(replace(one, end_s=now.mono_s + (one.preempt_at - one.noticed_at).total_seconds()))
    for gpu in ledger.gpus.values():
        if gpu.draining:
            ledger.draining_since[gpu.device.uuid] = now.mono_s


def carry_keeps(ledger: Ledger, before: Ledger) -> None:
    """Let idle GPUs be kept on purpose until the moment that this process has promised, whatever the wall clock shows.
    Before `reset_deadlines`, which has only that clock to go by."""
    for known in before.leases.values():
        record = ledger.leases.get(known.lease.id)
        if known.kept_until_s is not None and record is not None and record.lease.kept == known.lease.kept:
            ledger.apply(replace(record, kept_until_s=known.kept_until_s))


def _until_reserved_s(ledger: Ledger, lease: Lease, now: Instant) -> float:
    """What is left until a window of someone else begins on a GPU of a lease; not less than 0."""
    group = ledger.limits.group_of.get(lease.holder.user)
    found = ledger.calendar.next_of_others({one.uuid for one in lease.gpus}, lease.holder.user, group, now.at)
    return math.inf if found is None else max(0.0, (found.from_at - now.at).total_seconds())


def copy_ledger(ledger: Ledger) -> Ledger:
    """An independent copy of a ledger. The records are shared, since they are immutable."""
    copy: Ledger = _copy_parts(ledger)
    return copy


def _copy_parts(whole: Any) -> Any:
    return type(whole)(**{item.name: _copy_part(getattr(whole, item.name)) for item in fields(whole)})


def _copy_part(part: Any) -> Any:
    if isinstance(part, (Fleet, JobIndex, DueLeases, LimitIndex, Calendar, ReclaimIndex)):
        return _copy_parts(part)
    if isinstance(part, dict):
        made = part.copy()  # keeps the type: a Counter starts missing keys at 0
        for key, value in part.items():
            made[key] = _copy_part(value)
        return made
    return part.copy() if isinstance(part, (list, set, DemandClasses)) else part


def refuse_older_copy(
    ledger: Ledger, committed: Ledger, newest: Event | None = None, has_event: Callable[[int], bool] = lambda _: True
) -> None:
    """Raise `StoreFailed` if the database lacks what this process has answered: it is an older copy. So it is without
    the newest event of this process, although a commit that failed may have written a later one."""
    lacks_newest = newest is not None and not has_event(newest.seq)
    if lacks_newest or ledger.next_seq < committed.next_seq or ledger.next_token < committed.next_token:
        raise StoreFailed(
            f"The database is older than this daemon's answers: it lacks event {committed.next_seq - 1}; {OLDER}.",
            remedy="Ask again.",
        )
