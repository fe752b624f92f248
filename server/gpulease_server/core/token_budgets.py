"""Budgets of bearer tokens: GPUs at a time, time of one lease, and GPU-hours a day.

What is authoritative
---------------------
A budget is fixed when its token is created, and comes with each request that is sent with the token. From the first
request on the ledger has it as a `BudgetRecord`, with the GPU time that was held on the day; both are written in the
transaction of the grant or end that changes them. How many GPUs a token has follows from its leases
(`Ledger.leases_of_tokens`), so that requests of one turn are counted one by one.

What always holds
-----------------
1. The leases of a token have at most `max_gpus` GPUs.
2. A lease of a token holds GPUs for at most `max_lease_s`, however often it is renewed, and also while its owner is
   watched and lives. It is then ended as `budget_spent`, and a late renewal does not revive it. A job is stopped, as
   if cancelled; one that was cancelled with a longer grace has 35 s from then on.
3. On one day, from 00:00 UTC, the leases of a token hold at most `gpu_hours_per_day`. When these are spent all of its
   leases end in that tick. A request waits until the day ends. A lease is granted only if what is left of the day lasts
   for `MIN_USE_S`.
4. Each token has a budget of its own. Two tokens of one user do not share one; the limits of the user
   (`core.user_limits`) count both.
5. A request that its token's budget keeps out lets no newer request of the same token pass, unless it could not be
   granted even if no one had anything, or what is kept for older ones (6) leaves too little. It reserves no GPU, and
   delays no one else.
6. One that goes first (`core.order`) and waits for GPUs has so many of `max_gpus` as it needs *kept* for it; newer
   requests of the token have the rest. Nothing else of a budget is kept.

Time is counted on the monotonic clock. Only which day it is, and the time while the daemon is away, are told by the
wall clock.

| what happens | what follows |
|---|---|
| many requests in one turn | each is decided after the grant of the one before |
| a lease is renewed, or its owner lives on | `max_lease_s` counts from the grant |
| a request is sent again with its Idempotency-Key | it is the same lease |
| the daemon is killed, or another takes over | the budget goes on; the time between counts for what is still held |
| the wall clock is put forward in between | that counts, too: a lease may end at once (no grace as for `time_s`) |
| the wall clock is put back, or forward within a day | nothing: the time that has passed counts |
| it is put back over midnight | the day that began is still the day |
| it is put forward over midnight | a new day begins |
| the day ends while leases are held | they go on; what they hold from then on counts for the next day |
| the token is revoked | what it has goes on within the budget; nothing more can be asked for |
| a job is tried again | each attempt is a lease of the same token |
| GPUs drain after the end | they do not count: they were given back |
| someone with the token has a job ask on the daemon's socket | the budget does not see it: the job is the user |
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import field
from datetime import UTC, date, datetime, time, timedelta

from gpulease_protocol.budgets import Budget, BudgetUse
from gpulease_protocol.gpu_hours import plain_hours, used_of
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Lease, LeaseState
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import BudgetRecord, Instant, LeaseRecord

MIN_USE_S = 60.0
"""Nothing is granted that the day's GPU-hours would end sooner."""


@dataclass(slots=True)
class TokenBudgets:
    """What each token may still have, at one moment."""

    ledger: Ledger
    now: Instant
    unmade: BudgetRecord | None = None
    """Of the token of a request that is not made, see `explain.dry_run`."""
    first: dict[str, str] = field(default_factory=dict)
    """By token: the oldest request that its budget, or its limits, keep out. Filled by who walks the queue."""
    kept: dict[str, dict[str, int]] = field(default_factory=dict)
    """By token and lease id: the GPUs of its budget that are kept for older requests, oldest first."""

    def of(self, lease: Lease) -> BudgetRecord | None:
        """The budget of a lease's token, counted up to now; None for a lease without one."""
        known = self.ledger.budgets.get(lease.holder.token_id or "")
        if known is None and self.unmade is not None and self.unmade.token_id == lease.holder.token_id:
            known = self.unmade
        return None if known is None else counted(self.ledger, known, self.now)

    def longest_s(self, lease: Lease) -> float | None:
        """How long a lease may hold its GPUs, by its declared time and its token's budget; None for any time."""
        budget = self.of(lease)
        found = (lease.demand.time_s, None if budget is None else budget.budget.max_lease_s)
        return min((time_s for time_s in found if time_s is not None), default=None)

    def gpus_left(self, lease: Lease) -> int | None:
        """How many GPUs more a lease's token may have for it; None for any number."""
        record = self.of(lease)
        if record is None:
            return None
        budget, found = record.budget, []
        if budget.max_gpus is not None:
            found.append(budget.max_gpus - held_gpus(self.ledger, record.token_id) - self.kept_before(lease))
        if (left_s := _left_s(record)) is not None:
            found.append(int(left_s // MIN_USE_S))
        return max(0, min(found)) if found else None

    def limit_reached(self, lease: Lease, wanted: int) -> str | None:
        """Why the budget of its token keeps a lease of `wanted` GPUs out for now, in words; None where it does not."""
        record = self.of(lease)
        if record is None:
            return self._behind(lease)
        budget, token = record.budget, record.token_id
        held, left_s = held_gpus(self.ledger, token), _left_s(record)
        if budget.max_gpus is not None and held + wanted > budget.max_gpus:
            with_it = f"{_gpus(held)} are held with token {token}, and {wanted} more are asked for"
            return f"{with_it}; its budget is {budget.max_gpus} at a time"
        kept = self.kept_before(lease)
        if budget.max_gpus is not None and kept and held + kept + wanted > budget.max_gpus:
            share = f"{kept} of the {budget.max_gpus} that token {token} may have"
            return f"{share} are kept for the older request {self.kept_for(lease)[0]}"
        if left_s is not None and left_s < wanted * MIN_USE_S:
            until = f"{_midnight(record.day + timedelta(days=1)):%Y-%m-%d %H:%M} UTC"
            daily = budget.gpu_hours_per_day or 0.0
            used = f"{used_of(record.used_s / 3600, daily)} a day of token {token}"
            return f"{used} are used; the next day begins at {until}"
        return self._behind(lease)

    def hours_used_until(self, lease: Lease, wanted: int) -> datetime | None:
        """When the day ends, where its token's GPU-hours are used up for a lease of so many GPUs; None elsewhere."""
        if (record := self.of(lease)) is None or (left_s := _left_s(record)) is None or left_s >= wanted * MIN_USE_S:
            return None
        return _midnight(record.day + timedelta(days=1))

    def keep(self, lease: Lease, gpus: int) -> None:
        """Keep so many GPUs of its token's budget for this request from those that are looked at after it."""
        record, token_id = self.of(lease), lease.holder.token_id
        if record is None or record.budget.max_gpus is None or token_id is None:
            return
        if self.kept_of(token_id) < record.budget.max_gpus:
            self.kept.setdefault(token_id, {}).setdefault(lease.id, gpus)

    def kept_of(self, token_id: str | None) -> int:
        """How many GPUs of a token's budget are kept."""
        return sum(self.kept.get(token_id or "", {}).values())

    def kept_for(self, lease: Lease) -> tuple[str, ...]:
        """The older requests for which GPUs of its token's budget are kept."""
        kept = self.kept.get(lease.holder.token_id or "", {})
        return tuple(itertools.takewhile(lambda lease_id: lease_id != lease.id, kept))

    def kept_before(self, lease: Lease) -> int:
        """How many GPUs of its token's budget are kept for older requests than this one."""
        kept = self.kept.get(lease.holder.token_id or "", {})
        return sum(kept[lease_id] for lease_id in self.kept_for(lease))

    def claims_leave(self, lease: Lease, wanted: int) -> bool:
        """True where what is kept for older requests leaves so many GPUs of a budget, once nothing is held."""
        kept = self.kept_before(lease)
        most = None if not kept or (record := self.of(lease)) is None else record.budget.max_gpus
        return most is None or kept + wanted <= most

    def _behind(self, lease: Lease) -> str | None:
        """The older request of its token that a lease waits behind, in words."""
        first = self.first.get(lease.holder.token_id or "", lease.id)
        token = lease.holder.token_id
        return None if first == lease.id else f"the older request {first} of token {token} is granted first"

    def never(self, lease: Lease, wanted: int) -> str | None:
        """Why a lease of `wanted` GPUs can never be within the budget of its token, in words; None where it can."""
        record = self.of(lease)
        if record is None:
            return None
        budget, token = record.budget, record.token_id
        if budget.max_gpus is not None and wanted > budget.max_gpus:
            return f"token {token} may have {budget.max_gpus} at a time"
        if budget.gpu_hours_per_day is not None and budget.gpu_hours_per_day * 3600 < wanted * MIN_USE_S:
            return (
                f"the {plain_hours(budget.gpu_hours_per_day)} GPU-hours a day of token {token} would not last a minute"
            )
        return None


def new_budget(token_id: str, budget: Budget, now: Instant) -> BudgetRecord:
    """An unused budget."""
    return BudgetRecord(token_id=token_id, budget=budget, day=now.at.date(), counted_at=now.at, counted_at_s=now.mono_s)


def counted(ledger: Ledger, record: BudgetRecord, now: Instant) -> BudgetRecord:
    """A budget with the GPU time up to now."""
    if record.counted_at_s is None:
        passed_s = max(0.0, (now.at - record.counted_at).total_seconds())
    else:
        passed_s = now.mono_s - record.counted_at_s
    today, day, used_s = now.at.date(), record.day, record.used_s
    if not day - timedelta(days=1) <= today <= day:
        day, used_s = today, 0.0
        passed_s = min(passed_s, (now.at - _midnight(today)).total_seconds())
    used_s += passed_s * held_gpus(ledger, record.token_id)
    return replace(record, day=day, used_s=used_s, counted_at=now.at, counted_at_s=now.mono_s)


def held_gpus(ledger: Ledger, token_id: str) -> int:
    """How many GPUs the leases of a token have."""
    return sum(ledger.leases_of_tokens.get(token_id, {}).values())


def budget_use(ledger: Ledger, token_id: str, budget: Budget, now: Instant) -> BudgetUse:
    """A budget, and what is used of it."""
    record = counted(ledger, ledger.budgets.get(token_id) or new_budget(token_id, budget, now), now)
    return BudgetUse(
        max_gpus=budget.max_gpus,
        max_lease_s=budget.max_lease_s,
        gpu_hours_per_day=budget.gpu_hours_per_day,
        gpus=held_gpus(ledger, token_id),
        gpu_hours_today=record.used_s / 3600,
        day_ends_at=_midnight(record.day + timedelta(days=1)),
    )


def held_s(record: LeaseRecord, now: Instant) -> float:
    """For how long a lease has had its GPUs."""
    if record.granted_at_s is not None:
        return now.mono_s - record.granted_at_s
    granted_at = record.lease.granted_at
    return 0.0 if granted_at is None else max(0.0, (now.at - granted_at).total_seconds())


def lasts_s(ledger: Ledger, record: LeaseRecord, now: Instant) -> float | None:
    """For how long the budget of its token lets an active lease last, from now on and if nothing changes; None for no
    end."""
    known = ledger.budgets.get(record.lease.holder.token_id or "")
    if known is None or record.lease.state is not LeaseState.ACTIVE:
        return None
    found = []
    if known.budget.max_lease_s is not None:
        found.append(known.budget.max_lease_s - held_s(record, now))
    current, gpus = counted(ledger, known, now), held_gpus(ledger, known.token_id)
    left_s, daily = _left_s(current), known.budget.gpu_hours_per_day
    if left_s is not None and daily is not None:
        day_s = (_midnight(current.day + timedelta(days=1)) - now.at).total_seconds()
        if left_s / gpus < day_s:
            found.append(left_s / gpus)
        elif daily * 3600 / gpus < 86400:
            found.append(day_s + daily * 3600 / gpus)
    return max(0.0, min(found)) if found else None


def last_moment_s(ledger: Ledger, record: LeaseRecord, now: Instant) -> float | None:
    """When an active lease ends however often it is renewed, on the monotonic clock: by its declared time, or by the
    budget of its token. None for no end."""
    of_budget_s, ends_s = lasts_s(ledger, record, now), []
    if of_budget_s is not None:
        ends_s.append(now.mono_s + of_budget_s)
    if record.lease.id in ledger.ends_s:
        ends_s.append(max(now.mono_s, ledger.ends_s[record.lease.id]))
    return min(ends_s, default=None)


def is_time_over(ledger: Ledger, record: LeaseRecord, now: Instant) -> bool:
    """True when a lease has held its GPUs for the time that it declared, or that the budget of its token gives it."""
    budget = ledger.budgets.get(record.lease.holder.token_id or "")
    ends = (record.lease.demand.time_s, None if budget is None else budget.budget.max_lease_s)
    longest_s = min((end_s for end_s in ends if end_s is not None), default=None)
    return longest_s is not None and held_s(record, now) >= longest_s


def spent_leases(ledger: Ledger, now: Instant) -> Iterator[tuple[LeaseRecord, str]]:
    """The leases that the budgets of their tokens end now, each with the reason. Costs one walk over the leases of
    tokens."""
    for token_id, leases in ledger.leases_of_tokens.items():
        known = ledger.budgets.get(token_id)
        if known is None:
            continue
        left_s, longest_s = _left_s(counted(ledger, known, now)), known.budget.max_lease_s
        for record in [ledger.leases[lease_id] for lease_id, gpus in leases.items() if gpus]:
            if left_s is not None and left_s <= 0:
                daily = plain_hours(known.budget.gpu_hours_per_day or 0.0)
                yield record, f"the {daily} GPU-hours a day of token {token_id} are used"
            elif longest_s is not None and held_s(record, now) >= longest_s:
                yield record, f"the {longest_s:g} s that a lease of token {token_id} may last are over"


def _left_s(record: BudgetRecord) -> float | None:
    """GPU-seconds that are left of the day; None without a limit."""
    daily = record.budget.gpu_hours_per_day
    return None if daily is None else daily * 3600 - record.used_s


def _midnight(day: date) -> datetime:
    return datetime.combine(day, time(), UTC)


def _gpus(number: int) -> str:
    return f"{number} GPU{'' if number == 1 else 's'}"
