"""Requests between their arrival and their verdict. Nothing of them is recorded yet.

While readings are awaited there may be thousands, so each question that a turn asks of them has an index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, MutableMapping

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Holder
from gpulease_server.core.limit_index import add
from gpulease_server.core.limit_records import LimitKey, token_key, user_key
from gpulease_server.core.records import Adoption, Change, KeyRecord, LeaseRecord


@dataclass(frozen=True, slots=True, kw_only=True)
class PendingRequest:
    """A request that has no verdict yet."""

    causes: list[str]
    """Everyone who waits for the verdict; more than one when a key was sent again."""
    queue: bool
    """Whether it waits if it cannot be granted."""
    changes: tuple[Change, ...]
    """What to record with the verdict, beside the lease: its jobs."""
    key: KeyRecord | None
    """Its Idempotency-Key, to be recorded with the verdict."""
    since_s: float
    """When it arrived."""
    holder: Holder
    """Who asks."""
    size_bytes: int
    """Memory that it keeps, see `core.footprint`."""
    adoption: Adoption | None = None
    """The process that it adopts."""

    @property
    def further(self) -> int:
        """How many requests join the queue with it: those of the other jobs of an array."""
        return sum(isinstance(change, LeaseRecord) for change in self.changes)


class PendingRequests(MutableMapping[str, PendingRequest]):
    """The undecided requests by lease id, in order of arrival; also by key, and counted by user."""

    def __init__(self) -> None:
        self._by_lease: dict[str, PendingRequest] = {}
        self._lease_of_key: dict[str, str] = {}
        self.count: Counter[LimitKey] = Counter()
        """By user, and by token."""
        self.bytes_by_user: Counter[str | None] = Counter()
        self._groups: dict[LimitKey, tuple[tuple[str, ...], int]] = {}
        """By group that was asked about: its members then, and how many requests they have."""
        self._group_of: dict[str | None, LimitKey] = {}
        """By user: which of these groups."""

    def count_of_group(self, group: LimitKey, members: tuple[str, ...]) -> int:
        """How many requests the members of a group have. Costs a sum over them once for each change of the members."""
        known = self._groups.get(group)
        if known is None or known[0] is not members:
            self._forget(group)
            for user in members:
                if (other := self._group_of.get(user)) is not None:
                    self._forget(other)  # they were its before, and it has not been asked about since
                self._group_of[user] = group
            known = self._groups[group] = (members, sum(self.count[user_key(user)] for user in members))
        return known[1]

    def _forget(self, group: LimitKey) -> None:
        members, _ = self._groups.pop(group, ((), 0))
        for user in members:
            if self._group_of.get(user) == group:
                del self._group_of[user]

    def _count(self, holder: Holder, requests: int) -> None:
        for key in _counted(holder):
            add(self.count, key, requests)
        if (group := self._group_of.get(holder.user)) is not None:
            members, number = self._groups[group]
            self._groups[group] = (members, number + requests)

    def with_key(self, key: str) -> tuple[str, PendingRequest] | None:
        """The request that was sent with this Idempotency-Key, and its lease id; None if there is none."""
        lease_id = self._lease_of_key.get(key)
        return None if lease_id is None else (lease_id, self._by_lease[lease_id])

    def __getitem__(self, lease_id: str) -> PendingRequest:
        return self._by_lease[lease_id]

    def __setitem__(self, lease_id: str, request: PendingRequest) -> None:
        if lease_id in self._by_lease:
            del self[lease_id]
        self._by_lease[lease_id] = request
        if request.key is not None:
            self._lease_of_key[request.key.key] = lease_id
        self._count(request.holder, 1)
        self.bytes_by_user[request.holder.user] += request.size_bytes

    def __delitem__(self, lease_id: str) -> None:
        request = self._by_lease.pop(lease_id)
        if request.key is not None:
            del self._lease_of_key[request.key.key]
        self._count(request.holder, -1)
        user = request.holder.user
        self.bytes_by_user[user] -= request.size_bytes
        if not self.count[user_key(user)]:
            del self.bytes_by_user[user]

    def __iter__(self) -> Iterator[str]:
        return iter(self._by_lease)

    def __len__(self) -> int:
        return len(self._by_lease)


def _counted(holder: Holder) -> tuple[LimitKey, ...]:
    token = token_key(holder)
    return (user_key(holder.user),) if token is None else (user_key(holder.user), token)
