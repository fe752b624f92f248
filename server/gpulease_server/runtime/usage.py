"""Sums GPU-hours by user, label or node: held from the ledger, used from the recorded metrics of jobs."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice

from gpulease_protocol.usage import MAX_SHARES, Usage, UsageKey, UsageShare
from gpulease_server.runtime.job_metrics.recorder import decode_series
from gpulease_server.runtime.job_metrics.time_series import DamagedSeries
from gpulease_server.store import job_metrics_table
from gpulease_server.store.ledger_store import Store
from gpulease_server.store.usage import HeldTime, held_times

log = logging.getLogger("gpulease.metrics")

MAX_SERIES = 2000
"""Metrics of at most this many leases, the newest, are read for one answer. That takes about a second."""
AT_ONCE = 50
"""Metrics of at most this many leases are in memory at a time: about 32 kB for each GPU."""


@dataclass(slots=True)
class _Sum:
    """GPU time of one user, label or node, in seconds."""

    leases: int = 0
    held_s: float = 0.0
    used_s: float = 0.0
    known_s: float = 0.0

    def add(self, other: _Sum) -> None:
        self.leases += other.leases
        self.held_s += other.held_s
        self.used_s += other.used_s
        self.known_s += other.known_s

    def hours(self) -> dict[str, float | int | None]:
        """The fields of `GpuTime`."""
        return {
            "leases": self.leases,
            "gpu_hours_held": self.held_s / 3600,
            "gpu_hours_used": self.used_s / 3600 if self.known_s > 0 else None,
            "gpu_hours_unknown": max(0.0, self.held_s - self.known_s) / 3600,
        }


def gpu_usage(store: Store, from_at: datetime, to_at: datetime, by: UsageKey, user: str | None = None) -> Usage:
    """GPU time in a period. Blocks, for seconds where there are hundreds of thousands of leases.

    Metrics of a running job count as far as they are written, which is up to a minute ago.
    """
    sums: dict[str | None, _Sum] = {}
    jobs: list[tuple[HeldTime, _Sum]] = []
    leases = 0
    for lease in held_times(store.engine, from_at, to_at, user):
        leases += 1
        begin, end = max(lease.granted_at, from_at), min(lease.ended_at or to_at, to_at)
        for held in lease.by_node() if by is UsageKey.NODE else (lease,):
            share = sums.setdefault(getattr(held, by.value) or None, _Sum())
            share.leases += 1
            share.held_s += max(0.0, (end - begin).total_seconds()) * held.gpus
            if held.is_job and len(jobs) < MAX_SERIES:
                jobs.append((held, share))
    for some in _chunks(jobs):
        contents = job_metrics_table.load(store.engine, [held.lease_id for held, _ in some])
        for held, share in some:
            _add_used(share, held, contents.get(held.lease_id), from_at, to_at)
    whole = _Sum()
    for share in sums.values():
        whole.add(share)
    whole.leases = leases  # a gang counts on each of its nodes
    shares = tuple(UsageShare(key=key, **share.hours()) for key, share in _largest(sums))  # type: ignore[arg-type]
    return Usage(from_at=from_at, to_at=to_at, by=by, shares=shares, **whole.hours())  # type: ignore[arg-type]


def _add_used(share: _Sum, held: HeldTime, content: bytes | None, from_at: datetime, to_at: datetime) -> None:
    """Add what the metrics of one lease show of the period."""
    if content is None:
        return
    try:
        series = decode_series(content)
    except DamagedSeries as error:
        log.error("the metrics of lease %s cannot be read: %s", held.lease_id, error)
        return
    from_s, to_s = (from_at - held.granted_at).total_seconds(), (to_at - held.granted_at).total_seconds()
    for one in (one for uuid, one in series.items() if held.uuids is None or uuid in held.uuids):
        used_s, known_s = one.used_between(from_s, to_s)
        share.used_s += used_s
        share.known_s += known_s


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


def _chunks(jobs: list[tuple[HeldTime, _Sum]]) -> Iterator[list[tuple[HeldTime, _Sum]]]:
    left = iter(jobs)
    while some := list(islice(left, AT_ONCE)):
        yield some
