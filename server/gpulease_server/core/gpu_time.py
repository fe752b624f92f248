"""GPU time in a rolling window, for limits of GPU-hours.

The window has `PARTS` parts, and the one that is going on. GPU time is counted into the part in which it is held, and a
part leaves the window as a whole. So what counts is the GPU time of the last window and of at most one part before it:
never too little, and too much by what was held in 1/24 of the window.

Time is counted on the monotonic clock. Only the time while the daemon is away is told by the wall clock.

| what happens | what follows |
|---|---|
| a limit of GPU-hours is set | its window begins empty; leases that are held count from then on |
| the length of the window is changed | what was counted is kept, each part where it ended |
| a user joins a group, or leaves it | what was counted stays with the group; their leases count for it from then on |
| the wall clock is set | nothing: the time that has passed counts |
| the daemon is killed, or another takes over | the time between counts for what is still held |
| GPUs drain after the end | they do not count: they were given back |
"""

from __future__ import annotations

from datetime import datetime, timedelta

from gpulease_server.core.fast_replace import replace
from gpulease_server.core.limit_index import LimitIndex
from gpulease_server.core.limit_records import GpuTimeRecord, LimitKey
from gpulease_server.core.records import Instant

PARTS = 24


def new_gpu_time(key: LimitKey, window_s: float, now: Instant) -> GpuTimeRecord:
    """A window in which nothing was held."""
    return GpuTimeRecord(
        kind=key.kind,
        name=key.name or "",
        width_s=window_s / PARTS,
        parts=(0.0,),
        counted_at=now.at,
        counted_at_s=now.mono_s,
    )


def counted(record: GpuTimeRecord, gpus: int, now: Instant) -> GpuTimeRecord:
    """A window with the GPU time up to now, while so many GPUs were held since it was last counted."""
    if record.counted_at_s is None:
        passed_s = max(0.0, (now.at - record.counted_at).total_seconds())
    else:
        passed_s = max(0.0, now.mono_s - record.counted_at_s)
    begun_s, width_s, parts = record.counted_at.timestamp(), record.width_s, list(record.parts)
    until_s, first = begun_s + passed_s, _part(begun_s, width_s)
    last = _part(until_s, width_s)
    for number in range(max(first, last - PARTS), last + 1):
        if number > first:
            parts.append(0.0)
        within_s = min(until_s, (number + 1) * width_s) - max(begun_s, number * width_s)
        parts[-1] += gpus * max(0.0, within_s)
    return replace(
        record,
        parts=tuple(parts[-PARTS - 1 :]),
        counted_at=record.counted_at + timedelta(seconds=passed_s),
        counted_at_s=now.mono_s,
    )


def resized(record: GpuTimeRecord, window_s: float) -> GpuTimeRecord:
    """The same GPU time in a window of another length."""
    width_s, last = window_s / PARTS, _part(record.counted_at.timestamp(), window_s / PARTS)
    if width_s == record.width_s:
        return record
    first_s = (_part(record.counted_at.timestamp(), record.width_s) - len(record.parts) + 1) * record.width_s
    parts = [0.0] * (PARTS + 1)
    for number, held in enumerate(record.parts):
        place = PARTS - last + min(last, _part(first_s + (number + 1) * record.width_s, width_s))
        if place >= 0:
            parts[place] += held
    return replace(record, width_s=width_s, parts=tuple(parts))


def used_s(index: LimitIndex, key: LimitKey, now: Instant) -> float:
    """GPU-seconds held in the window of a user, a group or a token."""
    record = index.gpu_time.get(key)
    return 0.0 if record is None else sum(counted(record, index.gpus[key], now).parts)


def room_at(index: LimitIndex, key: LimitKey, limit_s: float, now: Instant) -> datetime | None:
    """When less than `limit_s` GPU-seconds are in the window if nothing is held from now on; None if they are now."""
    record = index.gpu_time.get(key)
    if record is None or sum((record := counted(record, index.gpus[key], now)).parts) < limit_s:
        return None
    left_s, oldest = sum(record.parts), _part(record.counted_at.timestamp(), record.width_s) - len(record.parts) + 1
    for number, held in enumerate(record.parts, oldest):
        left_s -= held
        if left_s < limit_s:
            gone_at_s = (number + PARTS + 1) * record.width_s
            return now.at + timedelta(seconds=gone_at_s - record.counted_at.timestamp())
    raise AssertionError("an empty window is over a limit")


def spent_at(index: LimitIndex, key: LimitKey, limit_s: float, now: Instant) -> datetime | None:
    """When there are `limit_s` GPU-seconds in the window if all that is held is held on, at the earliest; None without
    any."""
    if not index.gpus[key] or key not in index.gpu_time:
        return None
    return now.at + timedelta(seconds=max(0.0, limit_s - used_s(index, key, now)) / index.gpus[key])


def _part(at_s: float, width_s: float) -> int:
    return int(at_s // width_s)
