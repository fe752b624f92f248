"""What one user may have: leases and GPUs at a time, and requests in the queue, by number and by size.

Requests of a user who is at a limit wait, as in Slurm: they are not eligible until the user gives something back, so
they reserve no GPU and delay no other user. Newer requests of the same user may pass them, with a bound, see
`core.user_order`. A request that exceeds the limit by itself could never be granted and is refused
for good; one that exceeds the limit of queued requests is refused for now. The limits apply to all users alike,
administrators included, and never end an active lease.

GPUs that drain after a lease no longer count: the user has given them back.

Interactive requests
--------------------
They go before all others, so a user may have few GPUs by them at a time, and each is for a short time. A request that
this limit keeps out lets no newer interactive request of its user pass; its user's other requests, and other users, do.
"""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from gpulease_protocol.errors import OverQuota
from gpulease_protocol.model import Demand, Lease, Priority, Selection
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
    interactive_gpus: int = 2
    """GPUs in active leases of priority `interactive`."""
    interactive_s: float = 4 * 3600.0
    """How long each of these may hold them."""
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
    interactive_gpus: Counter[str | None] = field(default_factory=Counter)
    """By user, the GPUs of interactive leases."""
    first_interactive: dict[str | None, str] = field(default_factory=dict)
    """By user: their oldest interactive request that the limit keeps out. Filled by who walks the queue."""

    @property
    def has_limits(self) -> bool:
        """True when there is any limit on what a user has."""
        return bool(self.limits.leases or self.limits.gpus)

    def may_limit(self, lease: Lease) -> bool:
        """True when there is a limit that could keep a lease out: of its user, or of its token."""
        by_priority = bool(self.limits.interactive_gpus) and is_interactive(lease)
        return self.has_limits or by_priority or (self.tokens is not None and self.tokens.of(lease) is not None)

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
        user, limits, found = lease.holder.user, self.limits, list[int]()
        if self.tokens is not None and (of_token := self.tokens.gpus_left(lease)) is not None:
            found.append(of_token)
        if limits.gpus:
            found.append(max(0, limits.gpus - self.gpus[user] - self.kept_before(lease)))
        if limits.interactive_gpus and is_interactive(lease):
            found.append(max(0, limits.interactive_gpus - self.interactive_gpus[user]))
        return min(found, default=None)

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
        of_token = None if self.tokens is None else self.tokens.limit_reached(lease, wanted)
        return of_token or self._interactive_limit_reached(lease, wanted)

    def _interactive_limit_reached(self, lease: Lease, wanted: int) -> str | None:
        user, most = lease.holder.user, self.limits.interactive_gpus
        if not most or not is_interactive(lease):
            return None
        held = self.interactive_gpus[user]
        if held + wanted > most:
            has = f"user {user} has {_counted(held, 'GPU')} by interactive requests and asks for {wanted} more"
            return f"{has}; the limit is {most} at a time"
        first = self.first_interactive.get(user, lease.id)
        return None if first == lease.id else f"the older interactive request {first} of user {user} is granted first"

    def keeps_out(self, lease: Lease, wanted: int) -> bool:
        """True while a limit keeps a request out. Newer requests of its token, and interactive ones of its user, are
        then kept out too: call it for one request after the other, in order."""
        if self.tokens is not None and self.tokens.keeps_out(lease, wanted):
            return True
        if self.limit_reached(lease, wanted) is None:
            return False
        if self._interactive_limit_reached(lease, wanted) is not None:
            self.first_interactive.setdefault(lease.holder.user, lease.id)
        return True

    def _has_and_asks(self, lease: Lease, wanted: int) -> str:
        user = lease.holder.user
        return f"user {user} has {_counted(self.gpus[user], 'GPU')} and asks for {wanted} more"


def usage_by_user(ledger: Ledger, limits: UserLimits, now: Instant) -> UserUsage:
    """What each user has now, and from now on."""
    tokens = TokenBudgets(ledger, now)
    return UserUsage(limits, ledger.active_leases, ledger.active_gpus, {}, {}, tokens, ledger.interactive_gpus)


def is_interactive(lease: Lease) -> bool:
    """True for a request of priority `interactive`."""
    return lease.demand.priority is Priority.INTERACTIVE


def with_interactive_time(demand: Demand, limits: UserLimits) -> Demand | OverQuota:
    """The demand with the time that an interactive request has where it declares none; or why it asks for too long."""
    if demand.priority is not Priority.INTERACTIVE or not limits.interactive_s:
        return demand
    if demand.time_s is None:
        return replace(demand, time_s=limits.interactive_s)
    if demand.time_s <= limits.interactive_s:
        return demand
    hours, most = demand.time_s / 3600, limits.interactive_s / 3600
    return NeverWithinLimits(
        f"The request is for {hours:g} h, and an interactive one may last {most:g} h.",
        remedy="Ask for less time, or for priority `normal`.",
    )


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
    if (most := users.limits.interactive_gpus) and is_interactive(lease) and wanted > most:
        detail = (
            f"The request is for {requested}, and user {lease.holder.user} may have {most} at a time interactively."
        )
        return NeverWithinLimits(detail, remedy="Ask for fewer GPUs, or for priority `normal`.")
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
