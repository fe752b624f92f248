"""Which limits there are, and what each user, group and token has: an index of the ledger's leases, which it keeps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import field
from typing import Any, TypeVar

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.limits import LimitKind, Limits
from gpulease_protocol.model import Holder, Lease
from gpulease_server.core.limit_records import (
    NO_LIMITS,
    NO_USERS,
    GpuTimeRecord,
    GpuTimeRemoved,
    LimitKey,
    LimitRecord,
    LimitRemoved,
    UserLimits,
    interactive_key,
    token_key,
    user_key,
)

MAX_KNOWN = 10_000
"""Users and tokens for which it is kept what applies to them."""
Key = TypeVar("Key")
LimitChange = LimitRecord | LimitRemoved | GpuTimeRecord | GpuTimeRemoved


@dataclass(slots=True)
class LimitIndex:
    """The limits by user, group and token, and counts of what these have. Counts of 0 are left out."""

    records: dict[LimitKey, LimitRecord] = field(default_factory=dict)
    group_of: dict[str | None, str] = field(default_factory=dict)
    """By user."""
    gpu_time: dict[LimitKey, GpuTimeRecord] = field(default_factory=dict)
    """For each that has a limit of GPU-hours."""
    leases: Counter[LimitKey] = field(default_factory=Counter)
    """Active leases."""
    gpus: Counter[LimitKey] = field(default_factory=Counter)
    """GPUs that these have."""
    queued: Counter[LimitKey] = field(default_factory=Counter)
    """Requests that wait."""
    limiting: Counter[str | None] = field(default_factory=Counter)
    """By user: how many limits were set for that user and the group of that user for which a request may have to
    wait."""
    last_limited: frozenset[str | None] = field(default=NO_USERS, compare=False)
    """What `limited_users` was last."""
    has_changed: bool = field(default=False, compare=False)
    """Whether a limit was set or removed since then."""

    known: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)
    """What `user_limits` found to apply to whom, until a limit changes."""
    known_with: UserLimits | None = field(default=None, compare=False, repr=False)
    """With which defaults."""

    @property
    def limited_users(self) -> frozenset[str | None]:
        """Users whose requests may have to wait for a limit that was set for them or for their group. The same object
        while they are the same: the queue is grouped again for another one."""
        if self.has_changed:
            self.has_changed = False
            if self.limiting.keys() != self.last_limited:
                self.last_limited = frozenset(self.limiting)
        return self.last_limited

    def known_for(self, defaults: UserLimits) -> dict[Any, Any]:
        """What is known with these defaults."""
        if self.known_with is not defaults or len(self.known) > MAX_KNOWN:
            self.known, self.known_with = {}, defaults
        return self.known

    def keys_of(self, holder: Holder) -> tuple[LimitKey, ...]:
        """The user of a lease, its token and its group, as far as there are such."""
        found: tuple[LimitKey, ...] = (user_key(holder.user),)
        if (token := token_key(holder)) is not None:
            found += (token,)
        if (group := self.group_of.get(holder.user)) is not None:
            found += (LimitKey(LimitKind.GROUP, group),)
        return found

    def keys_of_lease(self, lease: Lease) -> tuple[LimitKey, ...]:
        """The same, and what its user has by interactive requests if it is one."""
        found, interactive = self.keys_of(lease.holder), interactive_key(lease)
        return found if interactive is None else (*found, interactive)

    def limits_set(self, key: LimitKey) -> Limits:
        """The limits that were set for a user, a group or a token."""
        record = self.records.get(key)
        return NO_LIMITS if record is None else record.limits

    def count_active(self, lease: Lease, leases: int) -> None:
        """A lease has begun to be active (1), or is so no longer (-1)."""
        for key in self.keys_of_lease(lease):
            add(self.leases, key, leases)
            add(self.gpus, key, leases * len(lease.gpus))

    def count_queued(self, holder: Holder, requests: int) -> None:
        """So many requests more wait, or fewer."""
        for key in self.keys_of(holder):
            add(self.queued, key, requests)

    def put(self, change: LimitChange) -> None:
        """Make one change of limits, or of the GPU time that counts against them."""
        match change:
            case GpuTimeRecord():
                self.gpu_time[change.key] = change
            case GpuTimeRemoved():
                self.gpu_time.pop(change.key, None)
            case LimitRecord():
                self._put_limits(change.key, change)
            case LimitRemoved():
                self._put_limits(change.key, None)

    def _put_limits(self, key: LimitKey, record: LimitRecord | None) -> None:
        """Costs what the two records name, however many others there are."""
        before = self.records.pop(key, None)
        self.known_with, self.has_changed = None, True
        for user in _limited_by(before):
            add(self.limiting, user, -1)
        for user in _limited_by(record):
            add(self.limiting, user, 1)
        if record is not None:
            self.records[key] = record
        if key.kind is LimitKind.GROUP:
            for user in () if before is None else before.members:
                if self.group_of.get(user) == key.name:
                    del self.group_of[user]
            members = () if record is None else record.members
            self.group_of.update(dict.fromkeys(members, key.name or ""))
            for counts in (self.leases, self.gpus, self.queued):
                add(counts, key, sum(counts[user_key(user)] for user in members) - counts[key])


def counts_of(index: LimitIndex, key: LimitKey) -> Mapping[str, int]:
    """What a user, a group or a token has, by the names of `LimitUse`."""
    return {"gpus": index.gpus[key], "leases": index.leases[key], "queued": index.queued[key]}


def _limited_by(record: LimitRecord | None) -> tuple[str, ...]:
    """The users with requests that may have to wait for these limits."""
    if record is None or not record.limits.limits_grants:
        return ()
    return (record.name,) if record.kind is LimitKind.USER else record.members


def add(counts: Counter[Key], key: Key, more: int) -> None:
    """Count so many more, or fewer. A count of 0 is left out."""
    if number := counts.get(key, 0) + more:
        counts[key] = number
    else:
        counts.pop(key, None)
