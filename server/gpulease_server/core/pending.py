"""Requests between their arrival and their verdict. Nothing of them is recorded yet.

While readings are awaited there may be thousands, so each question that a turn asks of them has an index.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, MutableMapping
from dataclasses import dataclass

from gpulease_protocol.model import Holder
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

    def with_key(self, key: str) -> tuple[str, PendingRequest] | None:
        """The request that was sent with this Idempotency-Key, and its lease id; None if there is none."""
        lease_id = self._lease_of_key.get(key)
        return None if lease_id is None else (lease_id, self._by_lease[lease_id])

    def __getitem__(self, lease_id: str) -> PendingRequest:
        return self._by_lease[lease_id]

    def __setitem__(self, lease_id: str, request: PendingRequest) -> None:
        self.pop(lease_id, None)
        self._by_lease[lease_id] = request
        if request.key is not None:
            self._lease_of_key[request.key.key] = lease_id
        for key in _counted(request.holder):
            self.count[key] += 1
        self.bytes_by_user[request.holder.user] += request.size_bytes

    def __delitem__(self, lease_id: str) -> None:
        request = self._by_lease.pop(lease_id)
        if request.key is not None:
            del self._lease_of_key[request.key.key]
        for key in _counted(request.holder):
            self.count[key] -= 1
            if not self.count[key]:
                del self.count[key]
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
