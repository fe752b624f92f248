"""Which leases give idle GPUs back, what they are told, and how that is taken back. `core.reclaim` decides."""

from __future__ import annotations

from gpulease_protocol.model import Demand, Priority
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.reclaim_records import ReclaimNotice
from gpulease_server.core.records import Instant
from gpulease_server.core.timestamps import wall_clock
from gpulease_server.core.turn import Turn


def with_reclaim_rule(demand: Demand, policy: Policy) -> Demand:
    """What is asked for, with the administrator's rule for interactive leases: what holds is always in the record."""
    after_s, own_s = policy.reclaim_interactive_after_s, demand.reclaim_idle_after_s
    if after_s <= 0 or demand.priority is not Priority.INTERACTIVE:
        return demand
    return replace(demand, reclaim_idle_after_s=after_s if own_s is None else min(after_s, own_s))


def withdraw_notice(turn: Turn, lease_id: str, why: str) -> None:
    """Say that the idle GPUs of a lease are not taken back at the moment that was told."""
    turn.put(ReclaimNotice(lease_id, None))
    turn.emit("lease.reclaim_withdrawn", lease_id=lease_id, reason=why)


def describe_reclaim(ledger: Ledger, lease_id: str, now: Instant) -> str:
    """When idle GPUs are taken back, behind "held by lease-1"; empty where that was not told."""
    notice = ledger.reclaims.notices.get(lease_id)
    if notice is None or notice.at_s is None:
        return ""
    return (
        f", idle, and taken back at {wall_clock(now, notice.at_s):%Y-%m-%d %H:%M:%S} UTC unless one of its GPUs works"
    )


def reclaim_problems(ledger: Ledger, lease_id: str, now: Instant) -> tuple[str, ...]:
    """The same for the holder, as a problem of the lease."""
    notice = ledger.reclaims.notices.get(lease_id)
    if notice is None or notice.at_s is None:
        return ()
    at = f"{wall_clock(now, notice.at_s):%Y-%m-%d %H:%M:%S} UTC"
    keep = "or are kept on purpose (gpulease keep)"
    return (f"Its GPUs do nothing while others wait for them; they are taken back at {at} unless they work, {keep}.",)
