"""Which leases give idle GPUs back by themselves, and which of them have been told when. See `core.reclaim`."""

from __future__ import annotations

from dataclasses import field

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Lease, LeaseState


@dataclass(frozen=True, slots=True)
class ReclaimNotice:
    """When the idle GPUs of a lease are taken back. In memory only, as the readings are that it rests on."""

    lease_id: str
    at_s: float | None
    """On the monotonic clock; None withdraws it."""
    for_id: str = ""
    """The request that waits for them."""


@dataclass(slots=True)
class ReclaimIndex:
    """A part of the ledger, which keeps it up to date."""

    leases: dict[str, None] = field(default_factory=dict)
    """Ids of active leases with a rule."""
    notices: dict[str, ReclaimNotice] = field(default_factory=dict)
    """By lease id."""

    def put_lease(self, lease: Lease) -> None:
        """Bring up to date whether a lease is one of them."""
        if lease.demand.reclaim_idle_after_s is None:
            return
        if lease.state is LeaseState.ACTIVE:
            self.leases[lease.id] = None
        else:
            self.leases.pop(lease.id, None)
            self.notices.pop(lease.id, None)

    def put_notice(self, notice: ReclaimNotice) -> None:
        """Note when GPUs are taken back, or that they are not."""
        if notice.at_s is None:
            self.notices.pop(notice.lease_id, None)
        else:
            self.notices[notice.lease_id] = notice
