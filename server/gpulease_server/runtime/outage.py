"""The time in which nothing can be recorded, and what is read after it. The package's essay has the failure table."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import fields, replace
from datetime import datetime
from typing import Any

from sqlalchemy.exc import SQLAlchemyError

from gpulease.errors import GpuleaseError
from gpulease.model import Event, LeaseState, Liveness

from ..core.decide import decide
from ..core.happenings import LeaseRenewed
from ..core.ledger import Change, Deadline, Instant, LeaseRecord, Ledger
from ..core.turn import Answer, Policy, Turn
from ..store.dialects import why
from ..store.store import StoreFailed
from . import clock

log = logging.getLogger("gpulease.writer")

FIRST_PAUSE_S = 0.1
"""Pause before the first attempt after a failed commit; it doubles from one to the next."""
MAX_PAUSE_S = 2.0
"""The longest one, but for a ledger that takes long to read."""


class Outage:
    """From the moment at which a commit failed, or the ledger was to be read, to the one at which all is well.

    Args:
        reason: Why nothing can be recorded, in words.
        failed: The changes that may or may not have been recorded.
        committed: The ledger before them.
        answers_renewals: Whether no other daemon can have taken over meanwhile.
        try_writing: Whether it takes a commit, and not only a reading, to end it.
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
        self.reason = reason
        self.try_writing = try_writing
        self._answers_renewals = answers_renewals
        self._since_s = clock.now().mono_s
        self._first = reason
        self._said = reason
        self._renewed_at: dict[str, datetime] = {}
        self._in_doubt = {
            change.lease.id
            for change in failed
            if isinstance(change, LeaseRecord) and not _same_life(change, committed)
        }

    def renewed(self, ledger: Ledger, renewed: LeaseRenewed, now: Instant, policy: Policy) -> Answer | None:
        """The answer to a renewal, from memory alone; None for what only the database can tell.

        What a holder relies on is that the lease is recorded and lasts a full `ttl_s`. It is, and the end of the outage
        gives it at least that, as does a restart. That it was renewed is recorded when that can be done. A lease that
        the failed commit may have granted, ended or revived is in doubt.
        """
        record = ledger.leases.get(renewed.lease_id)
        if not self._answers_renewals or record is None or record.lease.state is LeaseState.ENDED:
            return None
        if renewed.lease_id in self._in_doubt:
            return None
        turn = Turn(ledger=ledger, now=now, policy=policy)
        decide(turn, renewed)
        answer = turn.answers[0][1]
        if not isinstance(answer, GpuleaseError):
            self._renewed_at[renewed.lease_id] = now.at
        return answer

    def closing(self, ledger: Ledger, now: Instant) -> list[Change]:
        """What to record at its end, made in `ledger` already: renewals that were answered, and that it is over."""
        lasted_s = now.mono_s - self._since_s
        changes: list[Change] = []
        for lease_id, at in self._renewed_at.items():
            record = ledger.leases.get(lease_id)
            if record is not None and record.lease.state is not LeaseState.ENDED:
                changes.append(replace(record, renewed_at=at))
        reason = f"nothing could be recorded for {lasted_s:.1f} s: {self._first}"
        changes.append(Event(seq=ledger.next_seq, at=now.at, kind="ledger.recovered", cause="recovery", reason=reason))
        for change in changes:
            ledger.apply(change)
        return changes

    def say(self, error: Exception) -> None:
        """Keep why it goes on, and log it when that is news; with its traceback where the fault is in this program."""
        self.reason = error.detail if isinstance(error, StoreFailed) else f"the ledger cannot be read: {why(error)}"
        if self.reason != self._said:
            self._said = self.reason
            ours = not isinstance(error, (StoreFailed, SQLAlchemyError, OSError))
            log.error("still nothing can be recorded: %s", self.reason, exc_info=error if ours else None)

    def over(self) -> None:
        """Log that it is over."""
        lasted_s = clock.now().mono_s - self._since_s
        if self.try_writing or self._said != self._first:
            log.warning("the ledger is read and can be written again, after %.1f s", lasted_s)


def _same_life(change: LeaseRecord, committed: Ledger | None) -> bool:
    """True when a lease was renewed at most: its state and its grant are as they were."""
    before = committed.leases.get(change.lease.id) if committed is not None else None
    return before is not None and (before.lease.state, before.lease.token) == (change.lease.state, change.lease.token)


def start_anew(ledger: Ledger, now: Instant) -> None:
    """Set what is not stored: full deadlines, and draining GPUs that need a reading begun after now."""
    for record in ledger.leases.values():
        if record.lease.ended_at is None and record.lease.liveness is not Liveness.JOB:
            ledger.apply(Deadline(record.lease.id, now.mono_s + record.lease.ttl_s))
    for gpu in ledger.gpus.values():
        if gpu.draining:
            ledger.draining_since[gpu.device.uuid] = now.mono_s


def twin(ledger: Ledger) -> Ledger:
    """A second ledger that says the same and changes alone. The records are shared, since nothing changes them."""
    return Ledger(**{item.name: _apart(getattr(ledger, item.name)) for item in fields(Ledger)})


def _apart(part: Any) -> Any:
    if isinstance(part, dict):
        made = part.copy()  # of its own kind: a Counter counts what it has not counted before
        for key, value in part.items():
            made[key] = _apart(value)
        return made
    return part.copy() if isinstance(part, (list, set)) else part


def refuse_older(ledger: Ledger, told: Ledger) -> None:
    """Raise `StoreFailed` when the database lacks what this process has answered: an old copy was put in its place."""
    if ledger.next_seq < told.next_seq or ledger.next_token < told.next_token:
        raise StoreFailed(
            f"The database is older than what was answered (event {ledger.next_seq - 1} of {told.next_seq - 1}).",
            remedy="Put the newer one back, or restart the daemon to go on with the old one.",
        )
