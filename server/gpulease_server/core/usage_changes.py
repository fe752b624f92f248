"""What a change of a lease makes of the usage of its user, and of the order; `core.fair_share` has the rules."""

from __future__ import annotations

from gpulease_protocol.model import Device, LeaseState
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.group_usage import step_changes
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.order_records import GroupUsage, UsageRecord, UsageSteps
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant, LeaseRecord
from gpulease_server.core.usage import entry_time_s, usage_of, weight_of


def usage_changes(
    ledger: Ledger, record: LeaseRecord, now: Instant, policy: Policy
) -> list[UsageRecord | GroupUsage | UsageSteps]:
    """The usage of a lease's user up to now, if this record of the lease changes what it holds; else nothing.

    Also the new steps of the user and their group, if usage orders."""
    before = ledger.leases.get(record.lease.id)
    if before is not None and before.lease is record.lease:
        return []
    held, holds = _held_devices(before), _held_devices(record)
    if held == holds:
        return []
    user = record.lease.holder.user
    usage, more = usage_of(ledger, user, now, policy), weight_of(holds, policy) - weight_of(held, policy)
    entry_s = usage.entry_s + more * entry_time_s(record.lease)
    usage = replace(usage, held=max(0.0, usage.held + more), entry_s=max(0.0, entry_s))
    if not policy.fair_share:
        return [usage]
    return [usage, *step_changes(ledger, [user], now, policy, changed=usage)]


def _held_devices(record: LeaseRecord | None) -> tuple[Device, ...]:
    return record.lease.gpus if record is not None and record.lease.state is LeaseState.ACTIVE else ()
