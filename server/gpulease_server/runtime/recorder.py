"""Keeps what the GPUs of jobs showed, at the pace at which nodes report, beside the ledger.

Who is authoritative: a node's report for what a GPU showed; the ledger for which job held it then, and for how long (so
that GPU-hours held do not rest on readings); this module's memory for the series of a lease that is active; the row in
the database from then on. No decision rests on any of it, and no turn waits for it.

A report is taken in when the writer has accepted it. Each reading stands for the time since the one before it, by the
daemon's monotonic clock, counted from the grant. Every `SAVE_S` a series is written, and once more when its lease has
ended; one series at a time, in a thread, each a transaction of its own.

What each failure does
----------------------
- The driver hangs, the worker or the probe is away, a GPU is lost: that time is unknown, a gap. Where the driver cannot
  tell one measure, that measure is.
- Daemon, SIGKILL: unknown is what was not written yet, at most `SAVE_S` + `LOOK_S`, and the time until a node reports
  again. Of a job that ended within its first minute that may be everything.
- Daemon, SIGTERM: everything is written; unknown is the time it is away. Stopped and continued: the time between.
- A write fails, a full disk: it is tried again every `SAVE_S`. Leases that end meanwhile stay in memory, the newest
  `ENDED_KEPT` of them.
- A damaged row: that series is lost, the log says so, and it is kept anew from then on.
- The wall clock jumps: nothing while the daemon runs. GPU-hours held are wall-clock time, as the ledger's times are.
- Reports overtake each other: time counts once, by what was told first.

Memory: about 32 kB for each GPU of a running job, 126 MiB for 4,096 of them, however long the jobs run. Disk: a row for
each attempt of a job.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from dataclasses import dataclass, field

from gpulease.exchange import NodeReport
from gpulease.model import GpuReading, Lease, LeaseState

from ..core.ledger import Instant, Ledger
from ..store import metrics
from ..store.store import Store, StoreFailed
from . import clock
from .series import FIRST_S, GAP_S, MEASURES, DamagedSeries, Series
from .writer import Writer

log = logging.getLogger("gpulease.metrics")

SAVE_S = 60.0
"""Time between two writes of the series of one lease: what a daemon that is killed may lose."""
LOOK_S = 1.0
"""Time between two looks at what is due to be written."""
ENDED_KEPT = 1000
"""Leases that have ended and cannot be written, at most; the oldest go first."""
ABSURD = 2.0**60
"""No measure is so large in its unit, or below 0."""
_ENTRY = struct.Struct("<HI")


@dataclass(slots=True)
class History:
    """The series of one lease, by GPU."""

    series: dict[str, Series] = field(default_factory=dict)
    """By UUID."""
    read_s: dict[str, float] = field(default_factory=dict)
    """By UUID, when the last reading was taken in, in seconds since the grant."""
    granted_s: float | None = None
    """The grant, on the monotonic clock of this process; None until the first reading since its start."""
    saved_s: float | None = None
    """When it was last written, on the monotonic clock; None if it was not."""
    told: bool = False
    """True when it has something that is not written."""

    def add(self, reading: GpuReading, lease: Lease, now: Instant) -> None:
        """Take in a reading of one of its GPUs."""
        if self.granted_s is None:
            # What was known before this process started stays before what comes now, whatever the wall clock says.
            past_s = max((one.until_s for one in self.series.values()), default=0.0)
            age_s = (now.at - lease.granted_at).total_seconds() if lease.granted_at else 0.0
            self.granted_s = now.mono_s - max(age_s, past_s)
        at_s, last_s = now.mono_s - self.granted_s, self.read_s.get(reading.uuid)
        since_s = FIRST_S if last_s is None or at_s - last_s > GAP_S else at_s - last_s
        values = [_sane(getattr(reading, name)) for name in MEASURES]
        self.series.setdefault(reading.uuid, Series.empty()).add(at_s, since_s, values)
        self.read_s[reading.uuid] = at_s
        self.told = True


class Recorder:
    """The histories of every lease of a job that is active. Used from the event loop alone.

    Args:
        store: The ledger's database.
        writer: Says who holds what.
    """

    def __init__(self, store: Store, writer: Writer) -> None:
        self._store = store
        self._writer = writer
        self._histories: dict[str, History] = {}
        self._problem = ""

    def restore(self) -> None:
        """Take up what an earlier daemon kept of leases that are still active. Blocks; before the first report."""
        kept = metrics.load(self._store.engine, metrics.live_leases(self._store.engine))
        for lease_id, content in kept.items():
            try:
                self._histories[lease_id] = History(series=unpacked(content))
            except DamagedSeries as error:
                log.error("the metrics of lease %s cannot be read, and are kept anew: %s", lease_id, error)

    def take(self, node: str, report: NodeReport, ledger: Ledger, now: Instant) -> None:
        """Take in what a node has reported of GPUs that jobs hold. A report without a reading leaves a gap."""
        if report.problem is not None:
            return
        for reading in report.gpus:
            gpu = ledger.gpus.get(reading.uuid)
            if gpu is None or gpu.lease_id is None or gpu.draining or gpu.device.node != node:
                continue
            lease = ledger.leases[gpu.lease_id].lease
            if lease.job_id is not None and lease.state is LeaseState.ACTIVE:
                self._histories.setdefault(lease.id, History(saved_s=now.mono_s)).add(reading, lease, now)

    def content(self, lease_id: str) -> bytes | None:
        """The series of a lease as they are now; None if they are in the database only, or nowhere."""
        history = self._histories.get(lease_id)
        return None if history is None else packed(history.series)

    async def run(self) -> None:
        """Write what is due until cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            try:
                await self.save(clock.now().mono_s)
            except Exception:
                log.exception("metrics of jobs were not written; trying again")

    async def save(self, now_s: float, *, everything: bool = False) -> None:
        """Write what is due at this moment, or everything that is not written."""
        self._thin_out()
        for lease_id, history in list(self._histories.items()):
            ended = self._has_ended(lease_id)
            age_s = float("inf") if history.saved_s is None else now_s - history.saved_s
            due = everything or age_s >= SAVE_S or (ended and not self._problem)
            if not due:
                continue
            if history.told and not await self._save(lease_id, history):
                history.saved_s = now_s
                return  # the next would fail as well
            history.saved_s = now_s
            if ended and not history.told:
                del self._histories[lease_id]

    async def _save(self, lease_id: str, history: History) -> bool:
        history.told, content = False, packed(history.series)
        try:
            await asyncio.to_thread(metrics.save, self._store, lease_id, content)
        except StoreFailed as error:
            history.told = True
            self._say(f"metrics of jobs cannot be written: {error.detail} Trying again.")
            return False
        self._say("")
        return True

    def _has_ended(self, lease_id: str) -> bool:
        record = self._writer.committed.leases.get(lease_id)
        # While the ledger is being read again nobody knows; a lease that is no longer in memory has ended.
        return self._writer.problem is None and (record is None or record.lease.state is LeaseState.ENDED)

    def _thin_out(self) -> None:
        ended = [lease_id for lease_id in self._histories if self._has_ended(lease_id)]
        for lease_id in ended[:-ENDED_KEPT]:
            log.error("the metrics of lease %s are lost: they could not be written", lease_id)
            del self._histories[lease_id]

    def _say(self, problem: str) -> None:
        """Log what is wrong once, and once that it is over."""
        if problem and not self._problem:
            log.error(problem)
        elif self._problem and not problem:
            log.info("metrics of jobs are written again")
        self._problem = problem


def _sane(value: float | None) -> float | None:
    """The value, unless no driver can have said that: one absurd figure would spoil every bucket it is merged into."""
    return value if value is not None and 0 <= value < ABSURD else None


def packed(series: dict[str, Series]) -> bytes:
    """Series by GPU as bytes."""
    parts = []
    for uuid, one in series.items():
        name, content = uuid.encode(), one.to_bytes()
        parts += [_ENTRY.pack(len(name), len(content)), name, content]
    return b"".join(parts)


def unpacked(content: bytes) -> dict[str, Series]:
    """The series that `packed` wrote. Raises DamagedSeries."""
    found, place = {}, 0
    if not content:
        raise DamagedSeries("it cannot be unpacked")
    while place < len(content):
        try:
            name_size, size = _ENTRY.unpack_from(content, place)
            place += _ENTRY.size
            uuid = content[place : place + name_size].decode()
        except (struct.error, UnicodeDecodeError) as error:
            raise DamagedSeries(f"no GPU at byte {place}") from error
        place += name_size
        found[uuid] = Series.from_bytes(content[place : place + size])
        place += size
    return found
