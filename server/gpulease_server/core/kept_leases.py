"""Whether idle GPUs of a lease are kept on purpose at a moment. `core.keep` decides on what is said of it."""

from __future__ import annotations

from gpulease_protocol.model import LeaseKeep, LeaseState
from gpulease_server.core.records import Instant, LeaseRecord


def kept_now(record: LeaseRecord, now: Instant) -> LeaseKeep | None:
    """What holds of that now; None where nothing was said, or that has ended."""
    kept = record.lease.kept
    if kept is None or record.lease.state is not LeaseState.ACTIVE:
        return None
    return kept if now.mono_s < kept_until_s(record, now) else None


def kept_until_s(record: LeaseRecord, now: Instant) -> float:
    """The moment of what was said last, on the monotonic clock; before everything where nothing was said.

    Of what an earlier daemon process took in, the wall clock tells what is left: no more than was asked for.
    """
    kept = record.lease.kept
    if kept is None:
        return float("-inf")
    if record.kept_until_s is not None:
        return record.kept_until_s
    return now.mono_s + min((kept.until - now.at).total_seconds(), (kept.until - kept.at).total_seconds())


def describe_kept(record: LeaseRecord, now: Instant) -> str:
    """The same behind "held by lease-1"; empty where nothing is kept."""
    kept = kept_now(record, now)
    return "" if kept is None else f", kept idle on purpose until {kept.until:%Y-%m-%d %H:%M:%S} UTC: {kept.reason}"
