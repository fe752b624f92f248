"""What a user has used lately; `core.fair_share` has the rules."""

from __future__ import annotations

import math
from collections.abc import Sequence

from gpulease_protocol.model import Device, Lease
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.order_records import UsageRecord
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Instant

ENTRY_S = 3600.0
"""The longest time that an entry charge is for."""
STEP = math.log2(1.05)
LOWEST_S = 3600.0
"""GPU-seconds: less usage is on the lowest step."""


def usage_of(ledger: Ledger, user: str | None, now: Instant, policy: Policy) -> UsageRecord:
    """What a user has used up to now."""
    known = ledger.usage.get(user or "")
    return counted(known, now, policy) if known else UsageRecord(user=user or "", counted_at=now.at)


def counted(record: UsageRecord, now: Instant, policy: Policy) -> UsageRecord:
    """A record brought up to this moment."""
    if record.counted_at_s == now.mono_s and record.counted_at == now.at:
        return record  # by an earlier grant of this turn
    if record.counted_at_s is None:
        passed_s = max(0.0, (now.at - record.counted_at).total_seconds())
    else:
        passed_s = now.mono_s - record.counted_at_s
    rate = math.log(2) / policy.usage_half_life_s
    gone = -math.expm1(-rate * passed_s)
    used_s = record.used_s * (1 - gone) + record.held * gone / rate
    return replace(record, used_s=used_s, counted_at=now.at, counted_at_s=now.mono_s)


def weight_of(devices: Sequence[Device], policy: Policy) -> float:
    """For how many GPUs these count."""
    if not policy.gpu_weights:
        return float(len(devices))
    return math.fsum(_weight(device.name or "", policy) for device in devices)


def _weight(name: str, policy: Policy) -> float:
    return next((weight for text, weight in policy.gpu_weights if text.lower() in name.lower()), 1.0)


def entry_time_s(lease: Lease) -> float:
    """The time that counts for each GPU of a lease beside the time that it has held them."""
    time_s = lease.demand.time_s
    return ENTRY_S if time_s is None else min(time_s, ENTRY_S)


def ordering_s(usage: UsageRecord) -> float:
    """By what a user's requests are ordered: what was used, and the entry charges; GPU-seconds."""
    return usage.used_s + usage.entry_s


def step_of(used_s: float, now_s: float, policy: Policy) -> int:
    """The step of this usage, which stays the same while the usage only decays."""
    return math.floor((math.log2(max(used_s, LOWEST_S)) + now_s / policy.usage_half_life_s) / STEP)
