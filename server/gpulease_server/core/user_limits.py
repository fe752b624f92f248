"""What one user, group or token may have: leases and GPUs at a time, requests in the queue, the time of a lease, and
GPU-hours in a window.

Whose limits
------------
The configuration has a default for every user (`UserLimits`). An administrator sets limits for a user, a group or a
token while the daemon runs (`core.limit_index`). A request must be within the limits of its user, of the group of that
user, and of the bearer token that it was sent with: each counts all that its user, group or token has. For a user, a
number that was set stands in the place of the default, whether it is less or more. Where several limits apply the
tightest one decides. The budget that a token was made with (`core.token_budgets`) holds beside them.

Interactive requests go before all others, so the configuration lets each user have few GPUs by them at a time, and each
for a short time. That is one more limit of such a request. It counts the user's interactive leases alone.

What always holds
-----------------
1. With each grant, what a user, a group or a token has is within the limits of that moment.
2. A limit ends no lease, also where it is set while more is held than it allows: what is held goes on. The longest time
   of a lease is no exception: it becomes the `time_s` of a request when that arrives, and a lease ends after that.
3. Requests that a limit keeps out wait, as in Slurm: they are not eligible until something is given back, so they
   reserve no GPU and delay no one else. Newer requests of the same user or group may pass them, with a bound, see
   `core.user_order`; those of the same token may not. One that only the limit of interactive requests keeps out lets no
   newer interactive request of its user pass; the user's other requests do.
4. A request that exceeds a limit by itself could never be granted, and is refused for good. So is one for more time
   than a lease may last. One that exceeds the limit of queued requests is refused for now.

| what happens | what follows |
|---|---|
| a limit is set below what is held | nothing ends; nothing is granted until what is held is within it again |
| a limit is set below what a waiting request asks for | it waits, says that it never fits, and holds no one up |
| a limit is raised, or removed | what it kept out is granted in that turn |
| a user joins a group, or leaves it | their leases count for it from then on, or no longer |
| the daemon is killed, or another takes over | limits and GPU time are in the database; leases are too |
| a lease is revived by a late renewal | only within the limits of that moment |
| an elastic job takes a further node | only within the limits of that moment |

The limits apply to administrators too. GPUs that drain after a lease no longer count: the user has given them back.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import field
from datetime import datetime
from functools import lru_cache
from operator import itemgetter
from typing import NamedTuple

from gpulease_protocol.errors import OverQuota
from gpulease_protocol.gpu_hours import used_of
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.limits import LimitKind, Limits
from gpulease_protocol.model import Demand, Holder, Lease, Priority, Selection
from gpulease_server.core.calendar import NO_GPUS, Calendar, latest_end
from gpulease_server.core.demand_classes import UsersApart
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.footprint import records_bytes
from gpulease_server.core.gpu_time import room_at, used_s
from gpulease_server.core.happenings import JobSubmitted, LeaseRequested
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_index import LimitIndex
from gpulease_server.core.limit_records import LimitKey, UserLimits
from gpulease_server.core.pending import PendingRequest, PendingRequests
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant
from gpulease_server.core.token_budgets import TokenBudgets
from gpulease_server.core.wording import count_gpus, duration


class LimitedDemand(NamedTuple):
    """What a request asks for, and what its limits leave for it: what its place depends on."""

    demand: Demand
    most_gpus: int | None
    """None where no limit makes a difference between nodes: each takes as many GPUs."""
    closed: frozenset[str] = NO_GPUS
    """The GPUs that are reserved for others, see `core.calendar`."""


class Applied(NamedTuple):
    """Limits that apply to a request."""

    key: LimitKey
    limits: Limits

    def __str__(self) -> str:
        return f"the limit of {self.key}"


class NeverWithinLimits(OverQuota):
    """The request alone exceeds what may be had at a time. Ask for fewer GPUs."""

    status = 422


def valid_limits(index: LimitIndex, key: LimitKey, defaults: UserLimits) -> Limits:
    """The limits of a user, a group or a token: those that were set, and for a user else those of the configuration."""
    if key.interactive:
        return Limits(max_gpus=defaults.interactive_gpus or None, max_lease_s=defaults.interactive_s or None)
    found = index.limits_set(key)
    return _over_defaults(found, defaults) if key.kind is LimitKind.USER else found


@lru_cache(1000)
def _over_defaults(found: Limits, defaults: UserLimits) -> Limits:
    return replace(
        found,
        max_gpus=found.max_gpus or defaults.gpus or None,
        max_leases=found.max_leases or defaults.leases or None,
        max_queued=found.max_queued or defaults.queued or None,
    )


@dataclass
class UserUsage:
    """What each user, group and token has in active leases, and may have yet. The counts are those of a ledger, and go
    on as it does."""

    limits: UserLimits
    index: LimitIndex = field(default_factory=LimitIndex)
    min_gpus: dict[Demand, int] = field(default_factory=dict)
    """How many GPUs a demand gets at least, of those that were looked at."""
    kept: dict[LimitKey, dict[str, int]] = field(default_factory=dict)
    """By limit and lease id: the GPUs, and with each a lease, that are kept of it for older requests, oldest first."""
    tokens: TokenBudgets | None = None
    """The budgets of bearer tokens, which limit beside the limits."""
    now: Instant | None = None
    """For GPU-hours, which are not looked at without it."""
    calendar: Calendar = field(default_factory=Calendar)
    first_interactive: dict[LimitKey, str] = field(default_factory=dict)
    """By user: the oldest request that only the limit of interactive ones keeps out. Filled by who walks the queue."""
    _known: dict[tuple[str | None, str | None, bool], tuple[Applied, ...]] | None = None
    """What applies to whom, see `LimitIndex.known`. No limit changes while this is used."""
    _spent: dict[LimitKey, bool] = field(default_factory=dict)

    @property
    def limited_users(self) -> UsersApart:
        """The users for whom there is a limit on what they have; None for all."""
        return None if self.limits.leases or self.limits.gpus else self.index.limited_users

    @property
    def has_limits(self) -> bool:
        """True when there is a limit on what any user has."""
        return self.limited_users is None or bool(self.limited_users)

    def applied(self, lease: Lease) -> tuple[Applied, ...]:
        """The limits for which a request may have to wait: of its user, token, group, and that of interactive ones."""
        return self._applied_to(lease.holder.user, lease.holder.token_id, lease.demand.priority is Priority.INTERACTIVE)

    def ordered(self, user: str | None) -> tuple[Applied, ...]:
        """Those of a user, and of the group of that user, within which newer requests pass older ones."""
        return self._applied_to(user, None, is_interactive=False)

    def _applied_to(self, user: str | None, token_id: str | None, is_interactive: bool) -> tuple[Applied, ...]:
        if self._known is None:
            if not (is_interactive or self.index.records or self.limited_users is None):
                return ()
            self._known = self.index.known_for(self.limits)
        found = self._known.get((user, token_id, is_interactive))
        return self._find_applied(user, token_id, is_interactive) if found is None else found

    def _find_applied(self, user: str | None, token_id: str | None, is_interactive: bool) -> tuple[Applied, ...]:
        assert self._known is not None
        keys = self.index.keys_of(Holder(user=user, token_id=token_id))
        if is_interactive:
            keys += (LimitKey(LimitKind.USER, user, interactive=True),)
        every = (Applied(key, valid_limits(self.index, key, self.limits)) for key in keys)
        found = tuple(one for one in every if one.limits.limits_grants)
        self._known[user, token_id, is_interactive] = found
        return found

    def may_limit(self, lease: Lease) -> bool:
        """True when there is a limit that could keep a lease out, or a budget of its token."""
        return bool(self.applied(lease)) or (self.tokens is not None and self.tokens.of(lease) is not None)

    def keep(self, one: Applied, lease_id: str, gpus: int) -> None:
        """Keep so many GPUs of a limit, and a lease, for this request from those that are looked at after it."""
        if not self.is_all_kept(one):
            self.kept.setdefault(one.key, {}).setdefault(lease_id, gpus)

    def keep_all(self, lease: Lease, gpus: int) -> None:
        """The same of every limit that applies to a request, and of the budget of its token."""
        for one in self.applied(lease):
            self.keep(one, lease.id, gpus)
        if self.tokens is not None:
            self.tokens.keep(lease, gpus)

    def is_all_kept(self, one: Applied) -> bool:
        """True when nothing is left of a limit that could be kept."""
        kept, limits = self.kept.get(one.key, {}), one.limits
        if limits.max_gpus is not None and sum(kept.values()) >= limits.max_gpus:
            return True
        return limits.max_gpus is None if limits.max_leases is None else len(kept) >= limits.max_leases

    def kept_before(self, one: Applied, lease_id: str) -> tuple[int, int]:
        """How many GPUs, and for how many leases, are kept of a limit for older requests than this one."""
        if one.key not in self.kept:
            return 0, 0
        older = [*itertools.takewhile(lambda item: item[0] != lease_id, self.kept.get(one.key, {}).items())]
        return sum(gpus for _, gpus in older), len(older)

    def kept_for(self, lease: Lease) -> tuple[str, ...]:
        """The older requests for which GPUs of its limits, or of the budget of its token, are kept."""
        found: dict[str, None] = {}
        for one in self.applied(lease):
            kept = self.kept.get(one.key, {})
            found.update(dict.fromkeys(itertools.takewhile(lambda lease_id: lease_id != lease.id, kept)))
        of_token = () if self.tokens is None else self.tokens.kept_for(lease)
        return tuple(found | dict.fromkeys(of_token))

    def left(self, one: Applied, lease_id: str) -> tuple[int | None, bool]:
        """How many GPUs a limit leaves for a request, None for any number; and whether it leaves a lease."""
        (gpus, leases), limits = self.kept_before(one, lease_id), one.limits
        of_gpus = None if limits.max_gpus is None else max(0, limits.max_gpus - self.index.gpus[one.key] - gpus)
        is_lease = limits.max_leases is None or self.index.leases[one.key] + leases < limits.max_leases
        return of_gpus, is_lease and not self._is_spent(one)

    def gpus_left(self, lease: Lease) -> int | None:
        """How many GPUs more a request may have within its limits and the budget of its token; None for any number. The
        limits of leases are left out."""
        of_token = None if self.tokens is None else self.tokens.gpus_left(lease)
        found = [] if of_token is None else [of_token]
        for one in self.applied(lease):
            if one.limits.max_gpus is not None:
                found.append(self.left(one, lease.id)[0] or 0)
            if self._is_spent(one):
                return 0
        return min(found, default=None)

    def demand_within(self, lease: Lease) -> LimitedDemand:
        """The lease's demand, with what its limits leave where the choice of a node depends on it."""
        whole_node = lease.demand.selection is Selection.ALL
        closed = self.closed_to(lease) if self.calendar.entries else NO_GPUS
        return LimitedDemand(lease.demand, self.gpus_left(lease) if whole_node else None, closed)

    def closed_to(self, lease: Lease, held_s: float = 0.0) -> frozenset[str]:
        """The GPUs that are closed to a request, or to a lease that was held for so long; see `core.calendar`."""
        if not self.calendar.entries:
            return NO_GPUS
        user = lease.holder.user
        return self.calendar.closed_to(user, self.index.group_of.get(user), self.latest_end(lease, held_s))

    def latest_end(self, lease: Lease, held_s: float = 0.0) -> datetime | None:
        """By when the GPUs of a lease are free that is granted now, or was held for so long; None if that is open."""
        assert self.now is not None
        longest_s = lease.demand.time_s if self.tokens is None else self.tokens.longest_s(lease)
        return latest_end(self.now.at, longest_s, held_s)

    def limit_reached(self, lease: Lease, wanted: int) -> str | None:
        """The limit that stops a lease of `wanted` GPUs for now, first one below that, in words; None within all."""
        for one in sorted(self.applied(lease), key=lambda one: wanted <= (one.limits.max_gpus or wanted)):
            if (why := self._reached(one, lease, wanted)) is not None:
                return why
        return None if self.tokens is None else self.tokens.limit_reached(lease, wanted)

    def keeps_out(self, lease: Lease, wanted: int, *, can_be_served: Callable[[], bool]) -> bool:
        """True while a limit, or the budget of its token, keeps a request out. Newer requests of that token are then
        kept out too: call it for one request after the other, oldest first. Not where it could not be granted even if
        no one had anything: then they would wait for what never comes. Nor where an older one claims what it needs.

        `can_be_served`: whether the nodes can serve it once leases end."""
        short = [one.key for one in self.applied(lease) if self.is_short(one, lease.id, wanted)]
        tokens, token_id = None if lease.holder.token_id is None else self.tokens, lease.holder.token_id
        by_budget = tokens is not None and tokens.limit_reached(lease, wanted) is not None
        by_token = by_budget or LimitKey(LimitKind.TOKEN, token_id) in short
        alone = not by_token and len(short) == 1 and short[0].interactive
        if (by_token or alone) and never_within_limits(self, lease, wanted) is None and can_be_served():
            if tokens is not None and by_token and self._claims_leave(lease, wanted):
                tokens.first.setdefault(token_id or "", lease.id)
            elif not by_token:
                self.first_interactive.setdefault(short[0], lease.id)
        return by_budget or bool(short)

    def _claims_leave(self, lease: Lease, wanted: int) -> bool:
        """True where older requests leave enough of the limits and the budget of its token, once nothing is held."""
        for one in self.applied(lease):
            gpus, leases = self.kept_before(one, lease.id) if one.key.kind is LimitKind.TOKEN else (0, 0)
            if gpus and one.limits.max_gpus is not None and gpus + wanted > one.limits.max_gpus:
                return False
            if leases and one.limits.max_leases is not None and leases >= one.limits.max_leases:
                return False
        return self.tokens is None or self.tokens.claims_leave(lease, wanted)

    def is_short(self, one: Applied, lease_id: str, wanted: int) -> bool:
        """True where a limit leaves too little for a request of so many GPUs, or an older one comes before it."""
        if self.first_interactive.get(one.key, lease_id) != lease_id:
            return True
        gpus, is_lease = self.left(one, lease_id)
        return not is_lease or (gpus is not None and gpus < wanted)

    def _reached(self, one: Applied, lease: Lease, wanted: int) -> str | None:
        key, limits, has = one.key, one.limits, self.index.gpus[one.key]
        has_and_asks = f"{key} has {count_gpus(has)}{_how(key)} and {_asks(lease, key)} for {wanted} more"
        if limits.max_gpus is not None and wanted > limits.max_gpus:
            return f"{has_and_asks}; the limit is {limits.max_gpus} at a time, so it waits until that limit is raised"
        if limits.max_leases is not None and self.index.leases[key] >= limits.max_leases:
            return f"{key} has {_counted(self.index.leases[key], 'lease')}; the limit is {limits.max_leases} at a time"
        if limits.max_gpus is not None and has + wanted > limits.max_gpus:
            return f"{has_and_asks}; the limit is {limits.max_gpus} at a time"
        if self._is_spent(one):
            return self._spent_sentence(one)
        gpus, leases = self.kept_before(one, lease.id)
        if limits.max_gpus is not None and gpus and has + gpus + wanted > limits.max_gpus:
            share = f"{min(gpus, limits.max_gpus)} of the {limits.max_gpus} that {_one(key)} may have"
            return f"{has_and_asks}; {share} are kept for the older request {next(iter(self.kept[key]))}"
        if limits.max_leases is not None and leases and self.index.leases[key] + leases >= limits.max_leases:
            share = f"{min(leases, limits.max_leases)} of the {_counted(limits.max_leases, 'lease')} that {_one(key)}"
            return f"{share} may have are kept for the older request {next(iter(self.kept[key]))}"
        first = self.first_interactive.get(key, lease.id)
        return None if first == lease.id else f"the older interactive request {first} of {key} is granted first"

    def _is_spent(self, one: Applied) -> bool:
        """True when the GPU-hours of a limit are used."""
        if one.limits.gpu_hours is None or self.now is None:
            return False
        if one.key not in self._spent:
            self._spent[one.key] = used_s(self.index, one.key, self.now) >= one.limits.gpu_hours * 3600
        return self._spent[one.key]

    def hours_are_used(self, lease: Lease) -> bool:
        """True while the GPU-hours of one of its limits are used, whatever leases end."""
        return any(self._is_spent(one) for one in self.applied(lease))

    def _spent_sentence(self, one: Applied) -> str:
        assert self.now is not None
        hours, limits = used_s(self.index, one.key, self.now) / 3600, one.limits
        assert limits.gpu_hours is not None
        within = f"{used_of(hours, limits.gpu_hours)} in {duration(limits.window_s)} that {one.key}"
        until = room_at(self.index, one.key, limits.gpu_hours * 3600, self.now)
        assert until is not None
        held = self.index.gpus[one.key]
        more = f", and {count_gpus(held)} held count on" if held else ""
        return f"{within} may have are used; the first of them leave the window at {until:%Y-%m-%d %H:%M} UTC{more}"


def usage_by_user(ledger: Ledger, limits: UserLimits, now: Instant) -> UserUsage:
    """What each user, group and token has now, and from now on."""
    return UserUsage(limits, ledger.limits, tokens=TokenBudgets(ledger, now), now=now, calendar=ledger.calendar)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _how(key: LimitKey) -> str:
    return " by interactive requests" if key.interactive else ""


def _asks(lease: Lease, key: LimitKey) -> str:
    return "asks" if key.kind is LimitKind.USER else f"user {lease.holder.user} asks"


def _one(key: LimitKey) -> str:
    return "one user" if key.kind is LimitKind.USER else str(key)


def never_within_limits(users: UserUsage, lease: Lease, wanted: int) -> NeverWithinLimits | None:
    """Why a request of `wanted` GPUs can never be granted within its limits and the budget of its token; None where it
    can."""
    requested = count_gpus(wanted)
    for key, limits in users.applied(lease):
        if limits.max_gpus is not None and wanted > limits.max_gpus:
            detail = f"The request is for {requested}, and {key} may have {limits.max_gpus} at a time{_how(key)}."
            other = "for priority `normal`" if key.interactive else "an administrator for a higher limit"
            return NeverWithinLimits(detail, remedy=f"Ask for fewer GPUs, or {other}.")
    never = None if users.tokens is None else users.tokens.never(lease, wanted)
    if never is None:
        return None
    detail = f"The request is for {requested}, and {never}."
    return NeverWithinLimits(detail, remedy="Ask for fewer GPUs, or an administrator for a token with more.")


def timed_demand(ledger: Ledger, request: LeaseRequested | JobSubmitted, policy: Policy) -> Demand | NeverWithinLimits:
    """What a request asks for, with the longest time that its limits let it hold GPUs where it declares none; or why it
    is refused, as it declares more."""
    demand, index = request.demand, ledger.limits
    keys = index.keys_of(request.holder) if index.records else ()
    if demand.priority is Priority.INTERACTIVE:
        keys += (LimitKey(LimitKind.USER, request.holder.user, interactive=True),)
    every = ((valid_limits(index, key, policy.limits).max_lease_s, key) for key in keys)
    found = [(longest_s, key) for longest_s, key in every if longest_s is not None]
    if not found:
        return demand
    longest_s, key = min(found, key=itemgetter(0))
    if demand.time_s is None:
        return replace(demand, time_s=longest_s)
    if demand.time_s <= longest_s:
        return demand
    name = "time_s" if isinstance(request, LeaseRequested) else "timeout_s"
    what, other = "a lease", "an administrator for a higher limit"
    if key.interactive:
        what, other = "an interactive lease", "for priority `normal`"
    most = f"{what} of {key} may last {duration(longest_s)} ({longest_s:g} s)"
    return NeverWithinLimits(f"{name} is {demand.time_s:g} s, and {most}.", remedy=f"Ask for less time, or {other}.")


def queue_is_full(
    ledger: Ledger, holder: Holder, undecided: PendingRequests, further: int, limits: UserLimits, *, counted: int = 0
) -> str | None:
    """Why `further` requests more may not wait: their user, group or token has as many in the queue as it may. None
    where they may. Of the `undecided` ones it is not known yet whether they will wait. `counted`: how many of the
    requests that are asked about are in the queue by now."""
    for key in ledger.limits.keys_of(holder):
        most = valid_limits(ledger.limits, key, limits).max_queued
        if most is None:
            continue
        in_queue = ledger.limits.queued[key] - _count_undecided(undecided, ledger.limits, key)
        if in_queue - counted + further > most:
            whose, waits = str(key), _counted(in_queue - counted, "request")
            more = f" and asks for at least {further} more" if further > 1 else ""
            return f"{whose[0].upper()}{whose[1:]} has {waits} in the queue{more}; the limit is {most}."
    return None


def _count_undecided(undecided: PendingRequests, index: LimitIndex, key: LimitKey) -> int:
    """How many requests without a verdict count for a limit."""
    if key.kind is not LimitKind.GROUP:
        return undecided.count[key]
    record = index.records.get(key)
    return 0 if record is None else undecided.count_of_group(key, record.members)


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
