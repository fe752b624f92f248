"""Readings of one GPU over any length of time, in a bounded number of buckets. Pure: time is an argument.

A reading covers the time since the previous one: the series is a step function, and a bucket keeps its integral, its
maximum and for how many seconds it is known. Integrals and maxima survive merging, so the mean of a bucket is that of
its readings, however often buckets were merged. Time without a reading is not known, and nothing is interpolated.

Buckets are 1 s wide and begin at 0, when the GPU was granted. When there are `MAX_BUCKETS`, each pair is merged and the
width doubles: never more than 600 buckets, never fewer than 300 again (1024 s each after a week).
"""

from __future__ import annotations

import math
import struct
import sys
from array import array
from collections.abc import Iterator, Sequence

from gpulease_protocol.lazy_dataclass import dataclass

MAX_BUCKETS = 600
"""Buckets of one series, at most; even, because they are merged by pairs."""
MEASURES = ("utilization_ratio", "memory_used_bytes", "power_w", "temperature_c")
"""The fields of `GpuReading` that are recorded, in this order."""
DIGITS = {"utilization_ratio": 5, "memory_used_bytes": 0, "power_w": 2, "temperature_c": 2}
"""Decimal places in answers; drivers report no more, and a time series keeps no more than 24 bits."""

_HEAD = struct.Struct("<ddI")
_OPEN = struct.Struct("<ddd")


class DamagedSeries(ValueError):
    """Bytes that do not encode a series."""


@dataclass(slots=True)
class MeasureBuckets:
    """The buckets of one measure; 0 s known where there was no reading.

    Single precision holds a closed bucket to 24 bits: 0.00001 %, and memory in whole pages of 2 MiB exactly.
    """

    known_s: array[float]
    """Seconds of each bucket that are known."""
    total: array[float]
    """Integral of the measure over that time, in its unit times seconds."""
    high: array[float]
    """Its maximum."""
    open_s: float = 0.0
    """The same three of the open bucket, in double precision."""
    open_total: float = 0.0
    open_high: float = float("-inf")

    @classmethod
    def empty(cls) -> MeasureBuckets:
        """No buckets yet."""
        return cls(array("f"), array("f"), array("f"))

    def add(self, seconds: float, value: float) -> None:
        """Add to the open bucket: the measure had this value for this many seconds."""
        self.open_s += seconds
        self.open_total += seconds * value
        self.open_high = max(self.open_high, value)

    def close(self) -> None:
        """Close the open bucket and open the next."""
        self.known_s.append(self.open_s)
        self.total.append(self.open_total)
        self.high.append(self.open_high)
        self.open_s, self.open_total, self.open_high = 0.0, 0.0, float("-inf")

    def merge(self) -> None:
        """Merge the closed buckets in pairs."""
        self.known_s = array("f", (a + b for a, b in _pairs(self.known_s)))
        self.total = array("f", (a + b for a, b in _pairs(self.total)))
        self.high = array("f", (max(a, b) for a, b in _pairs(self.high)))

    def columns(self) -> tuple[list[float], list[float | None], list[float | None]]:
        """Seconds known, mean and maximum of every bucket, the open one last; None where none is known."""
        known = [*self.known_s, self.open_s]
        totals, highs = [*self.total, self.open_total], [*self.high, self.open_high]
        means = [total / seconds if seconds > 0 else None for total, seconds in zip(totals, known, strict=True)]
        return known, means, [high if seconds > 0 else None for high, seconds in zip(highs, known, strict=True)]


@dataclass(slots=True)
class TimeSeries:
    """The four measures of one GPU, in the same buckets. About 32 kB when full."""

    width_s: float
    """Length of a bucket, a power of two."""
    until_s: float
    """End of the time that was added; a reading that reaches back before it counts from here only."""
    tracks: tuple[MeasureBuckets, ...]
    """One for each of `MEASURES`."""

    @classmethod
    def empty(cls) -> TimeSeries:
        """A series without readings."""
        return cls(1.0, 0.0, tuple(MeasureBuckets.empty() for _ in MEASURES))

    @property
    def closed(self) -> int:
        """Number of closed buckets; the open one comes after them."""
        return len(self.tracks[0].known_s)

    def add(self, until_s: float, seconds: float, values: Sequence[float | None]) -> None:
        """The measures were `values` during the `seconds` up to `until_s`; None of them is not known.

        Seconds count from the grant. Time that is covered twice counts once, by the first reading.
        """
        now_s = max(until_s - seconds, self.until_s)
        if now_s >= until_s:
            return
        while now_s >= (self.closed + 1) * self.width_s:
            self._close()
        while now_s < until_s:
            edge_s = (self.closed + 1) * self.width_s
            end_s = min(until_s, edge_s)
            for track, value in zip(self.tracks, values, strict=True):
                if value is not None:
                    track.add(end_s - now_s, value)
            if end_s == edge_s:
                self._close()
            now_s = end_s
        self.until_s = until_s

    def _close(self) -> None:
        for track in self.tracks:
            track.close()
        if self.closed >= MAX_BUCKETS:
            self._merge_pairs()

    def _merge_pairs(self) -> None:
        for track in self.tracks:
            track.merge()
        self.width_s *= 2

    def downsample(self, buckets: int) -> TimeSeries:
        """Merge this series into at most `buckets` (1 or more) buckets, in place; returns it."""
        while self.closed + 1 > buckets:
            if self.closed % 2:
                # The open bucket is the second half of one that is not closed yet.
                for track in self.tracks:
                    track.open_s += track.known_s.pop()
                    track.open_total += track.total.pop()
                    track.open_high = max(track.open_high, track.high.pop())
            self._merge_pairs()
        return self

    def known_s(self) -> float:
        """Seconds for which utilization is known."""
        track = self.tracks[0]
        return sum(track.known_s) + track.open_s

    def used_s(self) -> float:
        """Integral of utilization over the known time, in seconds."""
        track = self.tracks[0]
        return sum(track.total) + track.open_total

    def used_between(self, from_s: float, to_s: float) -> tuple[float, float, float]:
        """As `used_s`, and of the known time how much was idle and how much there is, for a part of the time. A bucket
        of which only a part belongs to it counts in proportion; it is idle where utilization was 0 in all of it."""
        track, used_s, idle_s, known_s = self.tracks[0], 0.0, 0.0, 0.0
        if from_s <= 0 and self.until_s <= to_s:
            idle_s = sum([seconds for seconds, high in zip(track.known_s, track.high, strict=True) if high <= 0])
            return self.used_s(), idle_s + (track.open_s if track.open_high <= 0 else 0.0), self.known_s()
        first = max(0, min(int(from_s // self.width_s), self.closed))
        last = max(first, min(math.ceil(to_s / self.width_s), self.closed + 1))
        opened = ((track.total, track.open_total), (track.known_s, track.open_s), (track.high, track.open_high))
        columns = ([*closed[first:last], one][: last - first] for closed, one in opened)
        for place, (total, seconds, high) in enumerate(zip(*columns, strict=True), first):
            start_s, end_s = place * self.width_s, min((place + 1) * self.width_s, self.until_s)
            inside_s = min(end_s, to_s) - max(start_s, from_s)
            if inside_s > 0:
                part = inside_s / (end_s - start_s)
                used_s += total * part
                known_s += seconds * part
                idle_s += seconds * part if high <= 0 else 0.0
        return used_s, idle_s, known_s

    def to_bytes(self) -> bytes:
        """The encoded series, little-endian; see `from_bytes`."""
        parts = [_HEAD.pack(self.width_s, self.until_s, self.closed)]
        for track in self.tracks:
            parts.append(_OPEN.pack(track.open_s, track.open_total, track.open_high))
            parts.extend(_little_endian(column).tobytes() for column in (track.known_s, track.total, track.high))
        return b"".join(parts)

    @classmethod
    def from_bytes(cls, content: bytes) -> TimeSeries:
        """The series that `to_bytes` wrote. Raises DamagedSeries."""
        try:
            width_s, until_s, closed = _HEAD.unpack_from(content)
        except struct.error as error:
            raise DamagedSeries(f"a series of {len(content)} bytes") from error
        size = _HEAD.size + len(MEASURES) * (_OPEN.size + 3 * 4 * closed)
        if closed > MAX_BUCKETS or len(content) != size or not 1.0 <= width_s < float("inf"):
            raise DamagedSeries(f"a series of {len(content)} bytes that says it has {closed} buckets of {width_s} s")
        place, tracks = _HEAD.size, []
        for _ in MEASURES:
            opened = _OPEN.unpack_from(content, place)
            place += _OPEN.size
            columns = []
            for _ in range(3):
                columns.append(_little_endian(array("f", content[place : place + 4 * closed])))
                place += 4 * closed
            tracks.append(MeasureBuckets(columns[0], columns[1], columns[2], *opened))
        return cls(width_s, until_s, tuple(tracks))


def _little_endian(column: array[float]) -> array[float]:
    if sys.byteorder == "big":
        column = array("f", column)
        column.byteswap()
    return column


def _pairs(column: array[float]) -> Iterator[tuple[float, float]]:
    halves = iter(column)
    return zip(halves, halves, strict=True)
