"""Sums GPU-hours by user, label, node or day: held from the ledger, used from what was recorded of their GPUs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from datetime import datetime, timedelta
from heapq import heappush, heappushpop
from itertools import islice

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.usage import MAX_SHARES, Usage, UsageKey, UsageShare
from gpulease_server.runtime.gpu_metrics.recorder import decode_series
from gpulease_server.runtime.gpu_metrics.time_series import DamagedSeries
from gpulease_server.store import gpu_metrics_table
from gpulease_server.store.ledger_store import Store
from gpulease_server.store.usage import HeldTime, held_times

log = logging.getLogger("gpulease.metrics")

MAX_SERIES = 2000
"""Metrics of at most this many leases, those with the most GPU time, are read for one answer. That takes a second."""
AT_ONCE = 50
"""Metrics of at most this many leases are in memory at a time: about 32 kB for each GPU."""
DAY = timedelta(days=1)


@dataclass(slots=True)
class _Sum:
    """GPU time of one user, label, node or day, in seconds."""

    leases: int = 0
    held_s: float = 0.0
    used_s: float = 0.0
    idle_s: float = 0.0
    known_s: float = 0.0

    def add(self, other: _Sum) -> None:
        self.leases += other.leases
        self.held_s += other.held_s
        self.used_s += other.used_s
        self.idle_s += other.idle_s
        self.known_s += other.known_s

    def hours(self) -> dict[str, float | int | None]:
        """The fields of `GpuTime`."""
        known = self.known_s > 0
        return {
            "leases": self.leases,
            "gpu_hours_held": self.held_s / 3600,
            "gpu_hours_used": self.used_s / 3600 if known else None,
            "gpu_hours_idle": self.idle_s / 3600 if known else None,
            "gpu_hours_unknown": max(0.0, self.held_s - self.known_s) / 3600,
        }


@dataclass(frozen=True, slots=True)
class _Part:
    """The part of a lease that counts for one share."""

    share: _Sum
    begin: datetime
    end: datetime
    node: str | None
    """Only what it had on this node; None: all."""


def gpu_usage(store: Store, from_at: datetime, to_at: datetime, by: UsageKey, user: str | None = None) -> Usage:
    """GPU time in a period. Blocks, for seconds where there are hundreds of thousands of leases.

    Metrics of an active lease count as far as they are written, which is up to a minute ago.
    """
    sums: dict[str | None, _Sum] = {}
    found: list[tuple[float, int, HeldTime, list[_Part]]] = []
    leases = 0
    for lease in held_times(store.engine, from_at, to_at, user):
        leases += 1
        parts = list(_parts(lease, from_at, to_at, by, sums))
        for part in parts:
            part.share.leases += 1
            part.share.held_s += lease.gpu_seconds(part.begin, part.end, part.node)
        entry = (lease.gpu_seconds(from_at, to_at), leases, lease, parts)
        heappush(found, entry) if len(found) < MAX_SERIES else heappushpop(found, entry)
    for some in _chunks([(lease, parts) for *_, lease, parts in found]):
        contents = gpu_metrics_table.load(store.engine, [lease.lease_id for lease, _ in some])
        for lease, parts in some:
            _add_used(lease, parts, contents.get(lease.lease_id))
    whole = _Sum()
    for share in sums.values():
        whole.add(share)
    whole.leases = leases  # a gang counts on each of its nodes, a long one on each of its days
    ordered = sorted(sums.items(), key=lambda item: item[0] or "") if by is UsageKey.DAY else _largest(sums)
    shares = tuple(UsageShare(key=key, **share.hours()) for key, share in ordered)  # type: ignore[arg-type]
    return Usage(from_at=from_at, to_at=to_at, by=by, shares=shares, **whole.hours())  # type: ignore[arg-type]


def _parts(
    lease: HeldTime, from_at: datetime, to_at: datetime, by: UsageKey, sums: dict[str | None, _Sum]
) -> Iterator[_Part]:
    """The shares that a lease counts for."""
    if by is UsageKey.DAY:
        end = min(lease.ended_at or to_at, to_at)
        day = max(lease.granted_at, from_at).replace(hour=0, minute=0, second=0, microsecond=0)
        while day < end:
            share = sums.setdefault(day.date().isoformat(), _Sum())
            yield _Part(share, max(day, from_at), min(day + DAY, to_at), None)
            day += DAY
    elif by is UsageKey.NODE and lease.on_nodes:
        for node in dict.fromkeys(part.node for part in lease.on_nodes):
            if lease.gpu_seconds(from_at, to_at, node) > 0:
                yield _Part(sums.setdefault(node, _Sum()), from_at, to_at, node)
    else:
        yield _Part(sums.setdefault(getattr(lease, by.value) or None, _Sum()), from_at, to_at, None)


def _add_used(lease: HeldTime, parts: Iterable[_Part], content: bytes | None) -> None:
    """Add what the metrics of one lease show of the period."""
    if content is None:
        return
    try:
        series = decode_series(content)
    except DamagedSeries as error:
        log.error("the metrics of lease %s cannot be read: %s", lease.lease_id, error)
        return
    for part in parts:
        from_s, to_s = ((moment - lease.granted_at).total_seconds() for moment in (part.begin, part.end))
        uuids = None if part.node is None else lease.uuids_on(part.node)
        for one in (one for uuid, one in series.items() if uuids is None or uuid in uuids):
            used_s, idle_s, known_s = one.used_between(from_s, to_s)
            part.share.used_s += used_s
            part.share.idle_s += idle_s
            part.share.known_s += known_s


def _largest(sums: dict[str | None, _Sum]) -> Iterable[tuple[str | None, _Sum]]:
    """The shares, the largest first; beyond `MAX_SHARES` the others are one share without a key."""
    ordered = sorted(sums.items(), key=lambda item: (-item[1].held_s, item[0] or ""))
    if len(ordered) <= MAX_SHARES:
        return ordered
    named = [(key, share) for key, share in ordered if key is not None][: MAX_SHARES - 1]
    kept = {key for key, _ in named}
    others = _Sum()
    for key, share in ordered:
        if key not in kept:
            others.add(share)
    return [*named, (None, others)]


def _chunks(found: list[tuple[HeldTime, list[_Part]]]) -> Iterator[list[tuple[HeldTime, list[_Part]]]]:
    left = iter(found)
    while some := list(islice(left, AT_ONCE)):
        yield some
