"""The history of one GPU: its last hour by the second, day by the minute, week by the quarter of an hour, and all by
hours.

Pure: time is an argument.

A resolution is cut into blocks of equal length, aligned to the calendar; a block is one row of the database. Readings
are written into the block of seconds. When a minute has passed, it is summed up, and with it the quarter and the hour
that it belongs to: a coarser bucket is always computed again from the finer ones, so doing it twice does no harm.

Values are 16-bit integers: 0.01 % of utilization, 16 MiB, 0.1 W, 0.1 degrees. `GAP` is what is not known.

The wall clock decides where a reading belongs. If it is set back, new readings replace what was recorded for the same
time before, and what lies after the new time in the blocks in memory is forgotten.
"""

from __future__ import annotations

import sys
from array import array
from collections.abc import Iterable, Sequence
from itertools import compress, pairwise
from math import ceil
from operator import mul

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import GpuReading
from gpulease_server.runtime.gpu_metrics.time_series import MEASURES, DamagedSeries
from gpulease_server.runtime.reading_gaps import GAP_S
from gpulease_server.store.gpu_metrics_table import MINUTES, RESOLUTIONS, SECONDS, Resolution

GAP = 65535
"""A value that is not known."""
SCALES = (10_000.0, 2.0**-24, 10.0, 10.0)
"""Steps in one unit of each of `MEASURES`."""
MOST_RATIO, MOST_BYTES, MOST_W, MOST_C = ((GAP - 1) / scale for scale in SCALES)
"""What is less than this can be kept."""
PER_RATIO, PER_BYTE, PER_W, PER_C = SCALES
WIDTHS_S = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400)
"""Lengths of a bucket in an answer; longer ones are whole days."""
MAX_BLOCKS = 24
"""Blocks of one GPU in memory, at most: more only while they cannot be written."""


class Block:
    """The buckets of one GPU over the time of one block.

    Of a second there is the value of each measure; of a longer bucket its mean, its maximum, and the seconds that are
    known.
    """

    __slots__ = ("cells", "loaded", "resolution", "saved_s", "start_s", "unsaved")

    def __init__(self, resolution: Resolution, start_s: int, cells: array[int] | None = None) -> None:
        count = resolution.buckets
        if cells is None:
            unknown = array("H", (GAP,)) * count
            known = array("H", (0,)) * count
            cells = unknown * len(MEASURES) if resolution is SECONDS else (unknown * 2 + known) * len(MEASURES)
        self.resolution, self.start_s, self.cells = resolution, start_s, cells
        self.loaded = False
        """True once what the database has of it is in it."""
        self.unsaved = False
        self.saved_s = float("-inf")
        """When it was last written, on the monotonic clock."""

    @property
    def end_s(self) -> int:
        """End of its time."""
        return self.start_s + self.resolution.block_s

    def to_bytes(self) -> bytes:
        """The cells, little-endian; see `from_bytes`."""
        return _little_endian(self.cells).tobytes()

    @classmethod
    def from_bytes(cls, resolution: Resolution, start_s: int, content: bytes) -> Block:
        """The block that `to_bytes` wrote. Raises DamagedSeries."""
        block = cls(resolution, start_s, array("H"))
        columns = len(MEASURES) * (1 if resolution is SECONDS else 3)
        if len(content) != 2 * columns * resolution.buckets:
            raise DamagedSeries(f"a block of {len(content)} bytes of buckets of {resolution.width_s} s")
        block.cells = _little_endian(array("H", content))
        return block

    def put(self, bucket: int, measure: int, known_s: int, total: int, high: int) -> None:
        """Replace one measure of a bucket that is longer than a second, unless more is known of it."""
        count = self.resolution.buckets
        place = 3 * measure * count + bucket
        if known_s < self.cells[place + 2 * count]:
            return  # of finer buckets, a killed daemon loses more
        self.cells[place] = round(total / known_s) if known_s else GAP
        self.cells[place + count] = high if known_s else GAP
        self.cells[place + 2 * count] = known_s

    def sum_up(self, measure: int, first: int, last: int) -> tuple[int, int, int]:
        """Of the buckets from `first` to before `last`: seconds known, integral, maximum (0 if none is known)."""
        count, cells = self.resolution.buckets, self.cells
        if self.resolution is SECONDS:
            place = measure * count
            some = cells[place + first : place + last]
            if (high := max(some, default=GAP)) != GAP:
                return len(some), sum(some), high
            if (gaps := some.count(GAP)) == len(some):
                return 0, 0, 0
            return len(some) - gaps, sum(some) - gaps * GAP, max([value for value in some if value != GAP])
        place = 3 * measure * count
        known = cells[place + 2 * count + first : place + 2 * count + last]
        known_s = sum(known)
        if not known_s:
            return 0, 0, 0
        means = cells[place + first : place + last]
        highs = cells[place + count + first : place + count + last]
        return known_s, sum(map(mul, means, known)), max(compress(highs, known))

    def forget(self, first_s: int, last_s: int) -> None:
        """Nothing is known any more of the buckets from one second to another."""
        count, width_s = self.resolution.buckets, self.resolution.width_s
        first, last = max(0, (first_s - self.start_s) // width_s), min(count - 1, (last_s - self.start_s) // width_s)
        for column in range(len(self.cells) // count):
            is_known = self.resolution is not SECONDS and column % 3 == 2
            for place in range(column * count + first, column * count + last + 1):
                self.cells[place] = 0 if is_known else GAP
        self.unsaved = True

    def merge(self, other: Block) -> None:
        """Take what another knows more of: of a second what is unknown here, of a bucket the one with more seconds."""
        count, cells, theirs = self.resolution.buckets, self.cells, other.cells
        if self.resolution is SECONDS:
            self.cells = array("H", (old if mine == GAP else mine for mine, old in zip(cells, theirs, strict=True)))
            return
        for place in range(0, len(cells), 3 * count):
            for bucket in range(place, place + count):
                if theirs[bucket + 2 * count] > cells[bucket + 2 * count]:
                    for column in (0, count, 2 * count):
                        cells[bucket + column] = theirs[bucket + column]


class GpuHistory:
    """The blocks of one GPU that are being filled, or are not written yet."""

    __slots__ = ("_minutes_summed_s", "_seconds", "blocks", "last_s", "summed_s")

    def __init__(self) -> None:
        self.blocks: dict[tuple[int, int], Block] = {}
        """By length of a bucket, and start."""
        self.last_s: int | None = None
        """The second of the last reading."""
        self.summed_s = 0
        """Seconds before this one are in quarters and hours."""
        self._minutes_summed_s = 0
        """As `summed_s`, in minutes."""
        self._seconds: Block | None = None
        """The block of seconds of the last reading: most belong to the same one."""

    def add(self, at_s: int, values: Sequence[int]) -> None:
        """Add a reading. It stands for the time since the previous one, unless that is too long ago."""
        first_s, before_s, block = at_s, self.last_s, self._seconds
        if before_s is not None and block is not None and at_s == before_s + 1 and at_s % MINUTES.width_s:
            first, second, third, fourth = values  # most readings come a second after the last one, in the same minute
            cells, place, count = block.cells, at_s - block.start_s, SECONDS.buckets
            cells[place], cells[place + count] = first, second
            cells[place + 2 * count], cells[place + 3 * count] = third, fourth
            block.unsaved = True
            self.last_s = at_s
            return
        if before_s is None:
            self.summed_s = self._minutes_summed_s = at_s
        elif at_s < before_s:
            self._forget(at_s, before_s)
            before_s = None
        elif at_s - before_s <= GAP_S:
            first_s = min(before_s + 1, at_s)
        for second in range(first_s, at_s + 1):
            if before_s is not None and second // MINUTES.width_s != before_s // MINUTES.width_s:
                self._sum_minute(before_s)
            if block is None or not block.start_s <= second < block.end_s:
                block = self._seconds = self.block(SECONDS, second)
            place = second - block.start_s
            for value in values:
                block.cells[place] = value
                place += SECONDS.buckets
            block.unsaved = True
            before_s = second
        self.last_s = at_s

    def block(self, resolution: Resolution, at_s: int) -> Block:
        """The block that a time belongs to; a new one if it is not in memory."""
        start_s = at_s - at_s % resolution.block_s
        found = self.blocks.get((resolution.width_s, start_s))
        if found is None:
            found = self.blocks[resolution.width_s, start_s] = Block(resolution, start_s)
        return found

    def summed_until_s(self, resolution: Resolution) -> int:
        """Seconds before this one are in the buckets of a resolution that is longer than a second."""
        return self._minutes_summed_s if resolution is MINUTES else self.summed_s

    def sum_up(self, *, minutes_only: bool = False) -> None:
        """Bring the longer buckets up to the last reading."""
        until_s = self._minutes_summed_s if minutes_only else self.summed_s
        if self.last_s is not None and until_s <= self.last_s:
            self._sum_minute(self.last_s, minutes_only=minutes_only)

    def _sum_minute(self, at_s: int, *, minutes_only: bool = False) -> None:
        """Compute the minute, the quarter and the hour of a time again."""
        for fine, coarse in pairwise(RESOLUTIONS[:2] if minutes_only else RESOLUTIONS):
            start_s = at_s - at_s % coarse.width_s
            self._sum_bucket(self.block(fine, start_s), coarse, start_s)
        self._minutes_summed_s = at_s + 1
        if not minutes_only:
            self.summed_s = at_s + 1

    def _sum_bucket(self, source: Block, coarse: Resolution, start_s: int) -> None:
        width_s = source.resolution.width_s
        first = (start_s - source.start_s) // width_s
        sums = [source.sum_up(measure, first, first + coarse.width_s // width_s) for measure in range(len(MEASURES))]
        if any([known_s for known_s, _, _ in sums]):
            target = self.block(coarse, start_s)
            for measure, each in enumerate(sums):
                target.put((start_s - target.start_s) // coarse.width_s, measure, *each)
            target.unsaved = True

    def sum_up_all(self) -> None:
        """Compute every longer bucket again: blocks have been completed."""
        for fine, coarse in pairwise(RESOLUTIONS):
            for block in [block for block in self.blocks.values() if block.resolution is fine]:
                for start_s in range(block.start_s, block.end_s, coarse.width_s):
                    self._sum_bucket(block, coarse, start_s)
        if self.last_s is not None:
            self.summed_s = self._minutes_summed_s = self.last_s + 1

    def _forget(self, at_s: int, last_s: int) -> None:
        """The clock was set back: what was recorded of the time to come is no longer known."""
        self.sum_up()
        for block in self.blocks.values():
            if at_s < block.end_s and block.start_s <= last_s:
                block.forget(at_s if block.resolution is not SECONDS else at_s + 1, last_s)
        self._sum_minute(at_s)

    def is_current(self, block: Block) -> bool:
        """Whether the last reading belongs to a block."""
        return self.last_s is not None and block.start_s <= self.last_s < block.end_s

    def drop_written(self) -> int:
        """Forget blocks that are written and full; of those that cannot be written the oldest, if they are too many.
        Returns how many of the latter."""
        for key, block in list(self.blocks.items()):
            if not block.unsaved and not self.is_current(block):
                del self.blocks[key]
        too_many = sorted(
            (key for key, block in self.blocks.items() if not self.is_current(block)), key=lambda key: key[1]
        )[: max(0, len(self.blocks) - MAX_BLOCKS)]
        for key in too_many:
            del self.blocks[key]
        return len(too_many)


@dataclass(frozen=True, slots=True)
class Window:
    """A period, and how an answer divides it."""

    from_s: int
    """Its begin, a multiple of `bucket_s`."""
    to_s: int
    """Its end: the end of the last second that counts."""
    bucket_s: int
    resolution: Resolution
    """What the buckets are made of."""

    @property
    def count(self) -> int:
        """Number of buckets."""
        return max(1, ceil((self.to_s - self.from_s) / self.bucket_s))


def window(from_s: float, to_s: float, now_s: float, points: int) -> Window:
    """The period in at most `points` (2 or more) buckets, of the finest resolution that reaches back so far.

    Times are in seconds since 1970, and none is before that.
    """
    end_s = int(to_s) + 1
    reaching = [one for one in RESOLUTIONS if one.keep_s is None or now_s - from_s <= one.keep_s]
    for bucket_s in _widths():
        begin_s = int(from_s) - int(from_s) % bucket_s
        if bucket_s >= reaching[0].width_s and end_s - begin_s <= bucket_s * points:
            break
    resolution = [one for one in reaching if bucket_s % one.width_s == 0][-1]
    return Window(begin_s, end_s, bucket_s, resolution)


def _widths() -> Iterable[int]:
    yield from WIDTHS_S
    days = 2
    while True:
        yield days * WIDTHS_S[-1]
        days *= 2


@dataclass(frozen=True, slots=True)
class Curve:
    """One measure of one GPU in the buckets of a window, in its own unit; None where nothing is known."""

    mean: tuple[float | None, ...]
    high: tuple[float | None, ...]
    known_s: tuple[float, ...]


def curve(measure: int, span: Window, blocks: Iterable[tuple[Block, int]]) -> Curve:
    """A measure over a window.

    Args:
        measure: Place in `MEASURES`.
        span: The window.
        blocks: What is known, no time twice: each block with the second from which on it counts.
    """
    count, scale = span.count, SCALES[measure]
    known, total, high = [0] * count, [0] * count, [0] * count
    for block, since_s in blocks:
        width_s = block.resolution.width_s
        at_s, end_s = max(block.start_s, span.from_s, since_s), min(block.end_s, span.from_s + count * span.bucket_s)
        if block.resolution is SECONDS:
            end_s = min(end_s, span.to_s)
        while at_s < end_s:
            bucket = (at_s - span.from_s) // span.bucket_s
            until_s = min(end_s, span.from_s + (bucket + 1) * span.bucket_s)
            first, last = (at_s - block.start_s) // width_s, ceil((until_s - block.start_s) / width_s)
            seconds, integral, most = block.sum_up(measure, first, last)
            known[bucket] += seconds
            total[bucket] += integral
            high[bucket] = max(high[bucket], most)
            at_s = until_s
    return Curve(
        mean=tuple(a / b / scale if b else None for a, b in zip(total, known, strict=True)),
        high=tuple(a / scale if b else None for a, b in zip(high, known, strict=True)),
        known_s=tuple(map(float, known)),
    )


def steps(reading: GpuReading) -> tuple[int, ...]:
    """A reading's measures as they are kept. Values that no driver can mean are unknown."""
    ratio, memory_bytes = reading.utilization_ratio, reading.memory_used_bytes
    power_w, temperature_c = reading.power_w, reading.temperature_c
    return (  # written out, because there is one for each GPU and second
        GAP if ratio is None or not 0 <= ratio < MOST_RATIO else int(ratio * PER_RATIO + 0.5),
        GAP if memory_bytes is None or not 0 <= memory_bytes < MOST_BYTES else int(memory_bytes * PER_BYTE + 0.5),
        GAP if power_w is None or not 0 <= power_w < MOST_W else int(power_w * PER_W + 0.5),
        GAP if temperature_c is None or not 0 <= temperature_c < MOST_C else int(temperature_c * PER_C + 0.5),
    )


def _little_endian(cells: array[int]) -> array[int]:
    if sys.byteorder == "big":
        cells = array("H", cells)
        cells.byteswap()
    return cells
