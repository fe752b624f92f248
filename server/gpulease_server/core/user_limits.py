"""What one user may have: leases and GPUs at a time, and requests in the queue, by number and by size.

Requests of a user who is at a limit wait, as in Slurm: they are not eligible until the user gives something back, so
they reserve no GPU and delay no other user. Newer requests of the same user may pass them, with a bound, see
`core.user_order`. A request that exceeds the limit by itself could never be granted and is refused
for good; one that exceeds the limit of queued requests is refused for now. The limits apply to all users alike,
administrators included, and never end an active lease.

GPUs that drain after a lease no longer count: the user has given them back.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field
from typing import NamedTuple

from gpulease_protocol.errors import OverQuota
from gpulease_protocol.model import Demand, Lease, Selection
from gpulease_server.core.footprint import records_bytes
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.pending import PendingRequest, PendingRequests
from gpulease_server.core.records import Instant
from gpulease_server.core.token_budgets import TokenBudgets


@dataclass(frozen=True, slots=True, kw_only=True)
class UserLimits:
    """What one user may have at a time. 0 means no limit."""

    leases: int = 0
    """Active leases, those of jobs included."""
    gpus: int = 0
    """GPUs in active leases."""
    queued: int = 8000
    """Requests that wait; of all users together there may be `Policy.max_queued`."""
    queued_bytes: int = 128 * 2**20
    """Memory that requests keep while they wait, see `core.footprint`; those without a verdict may keep as much
    again."""


class LimitedDemand(NamedTuple):
    """What a request asks for, and what its user's limit leaves for it: what its place depends on."""

    demand: Demand
    most_gpus: int | None
    """None where the limit makes no difference between nodes: each takes as many GPUs."""


class NeverWithinLimits(OverQuota):
    """The request alone exceeds what its user may have at a time. Ask for fewer GPUs."""

    status = 422


@dataclass
class UserUsage:
    """What each user has in active leases. The counts are those of a ledger, and go on as it does."""

    limits: UserLimits
    leases: Counter[str | None] = field(default_factory=Counter)
    gpus: Counter[str | None] = field(default_factory=Counter)
    min_gpus: dict[Demand, int] = field(default_factory=dict)
    """How many GPUs a demand gets at least, of those that were looked at."""
    kept: dict[str | None, dict[str, int]] = field(default_factory=dict)
    """By user and lease id: the GPUs of the user's limit that are kept for their older requests, oldest first."""
    tokens: TokenBudgets | None = None
    """The budgets of bearer tokens, which limit beside the user's limits."""

    @property
    def has_limits(self) -> bool:
        """True when there is any limit on what a user has."""
        return bool(self.limits.leases or self.limits.gpus)

    def may_limit(self, lease: Lease) -> bool:
        """True when there is a limit that could keep a lease out: of its user, or of its token."""
        return self.has_limits or (self.tokens is not None and self.tokens.of(lease) is not None)

    def keep(self, lease: Lease, gpus: int) -> None:
        """Keep so many GPUs of the user's limit for this waiting request, from those that are looked at after it."""
        kept = self.kept.setdefault(lease.holder.user, {})
        if sum(kept.values()) < self.limits.gpus:  # else nothing is left to keep
            kept.setdefault(lease.id, gpus)

    def kept_before(self, lease: Lease) -> int:
        """How many GPUs of its user's limit are kept for older requests than this one."""
        return sum(self.kept[lease.holder.user][lease_id] for lease_id in self.kept_for(lease))

    def kept_for(self, lease: Lease) -> tuple[str, ...]:
        """The older requests for which GPUs of its user's limit are kept."""
        kept = self.kept.get(lease.holder.user, {})
        return tuple(itertools.takewhile(lambda lease_id: lease_id != lease.id, kept))

    def gpus_left(self, lease: Lease) -> int | None:
        """How many GPUs more a lease's user and token may have for it; None for any number."""
        of_token = None if self.tokens is None else self.tokens.gpus_left(lease)
        if not self.limits.gpus:
            return of_token
        of_user = max(0, self.limits.gpus - self.gpus[lease.holder.user] - self.kept_before(lease))
        return of_user if of_token is None else min(of_user, of_token)

    def demand_within(self, lease: Lease) -> LimitedDemand:
        """The lease's demand, with what its user's limit leaves where the choice of a node depends on it."""
        whole_node = lease.demand.selection is Selection.ALL
        return LimitedDemand(lease.demand, self.gpus_left(lease) if whole_node else None)

    def limit_reached(self, lease: Lease, wanted: int) -> str | None:
        """The limit that stops a lease of `wanted` GPUs for now, in words; None when it is within the limits."""
        user, limits = lease.holder.user, self.limits
        if limits.leases and self.leases[user] >= limits.leases:
            return f"user {user} has {_counted(self.leases[user], 'lease')}; the limit is {limits.leases} at a time"
        if limits.gpus and self.gpus[user] + wanted > limits.gpus:
            return f"{self._has_and_asks(lease, wanted)}; the limit is {limits.gpus} at a time"
        kept = self.kept_before(lease)
        if limits.gpus and kept and self.gpus[user] + kept + wanted > limits.gpus:
            older = next(iter(self.kept[user]))
            share = f"{min(kept, limits.gpus)} of the {limits.gpus} that one user may have"
            return f"{self._has_and_asks(lease, wanted)}; {share} are kept for the older request {older}"
        return None if self.tokens is None else self.tokens.limit_reached(lease, wanted)

    def _has_and_asks(self, lease: Lease, wanted: int) -> str:
        user = lease.holder.user
        return f"user {user} has {_counted(self.gpus[user], 'GPU')} and asks for {wanted} more"


def usage_by_user(ledger: Ledger, limits: UserLimits, now: Instant) -> UserUsage:
    """What each user has now, and from now on."""
    return UserUsage(limits, ledger.active_leases, ledger.active_gpus, tokens=TokenBudgets(ledger, now))


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def never_within_limits(users: UserUsage, lease: Lease, wanted: int) -> NeverWithinLimits | None:
    """Why a request of `wanted` GPUs can never be granted within the limits of its user and the budget of its token;
    None where it can."""
    limit, requested = users.limits.gpus, _counted(wanted, "GPU")
    if limit and wanted > limit:
        detail = f"The request is for {requested}, and user {lease.holder.user} may have {limit} at a time."
        remedy = "Ask for fewer GPUs, or an administrator for a higher --max-gpus-per-user."
        return NeverWithinLimits(detail, remedy=remedy)
    never = None if users.tokens is None else users.tokens.never(lease, wanted)
    if never is None:
        return None
    detail = f"The request is for {requested}, and {never}."
    return NeverWithinLimits(detail, remedy="Ask for fewer GPUs, or an administrator for a token with more.")


def user_queue_is_full(
    ledger: Ledger, user: str | None, undecided: PendingRequests, further: int, limits: UserLimits
) -> bool:
    """True when `further` requests more would exceed what a user may have in the queue. Of the `undecided` ones it is
    not known yet whether they will wait."""
    own = undecided.count_by_user[user]
    return bool(limits.queued) and ledger.queued_by_user[user] - own + further > limits.queued


def too_many_bytes(
    ledger: Ledger, user: str | None, pending: PendingRequest, limits: UserLimits, most_bytes: int
) -> OverQuota | None:
    """Why a request whose lease is in the queue may not wait: its user's requests keep too much memory, or those of all
    users do. None where they do not."""
    jobs_bytes = records_bytes(pending.changes)
    if limits.queued_bytes and ledger.queued_bytes_by_user[user] + jobs_bytes > limits.queued_bytes:
        return _too_large(f"The waiting requests of user {user} would", limits.queued_bytes)
    if ledger.queued_bytes_by_user.total() + jobs_bytes > most_bytes:
        return _too_large("The waiting requests of all users would", most_bytes)
    return None


def too_much_undecided(
    undecided: PendingRequests, user: str | None, size_bytes: int, limits: UserLimits
) -> OverQuota | None:
    """Why one more request may not even wait for its verdict; None where it may."""
    if not limits.queued_bytes or undecided.bytes_by_user[user] + size_bytes <= limits.queued_bytes:
        return None
    return _too_large(f"The new requests of user {user} would", limits.queued_bytes)


def _too_large(whose: str, limit_bytes: int) -> OverQuota:
    return OverQuota(
        f"{whose} take more memory than the limit of {limit_bytes / 2**20:.0f} MiB.",
        remedy="Submit jobs with a smaller environment and command, or try again when some have started.",
    )
