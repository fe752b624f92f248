"""Records what GPUs show, as often as nodes report, beside the ledger: the series of each lease, and by
`history_recorder` the history of every GPU.

Authority: a node's report for the reading; the ledger for which lease held the GPU and for how long (so that GPU-hours
held do not depend on readings); memory for the series of an active lease; the database for an ended one. No
decision rests on any of it, and no turn waits for it.

A report is recorded after the writer has accepted it. Each reading covers the time since the previous one, by the
daemon's monotonic clock, counted from the grant. The series of a lease are written every `SAVE_S` and when the lease
has ended: of `CHUNK` leases in one transaction, in a thread.

What each failure does
----------------------
- The driver hangs, the worker or the probe is down, a GPU is lost: that time is a gap, and unknown. A measure that the
  driver does not report is unknown alone.
- SIGKILL of the daemon: what was not written yet is unknown, at most `SAVE_S` + `CHECK_S`, and so is the time until the
  node reports again. Of a lease that ended within its first minute that may be everything.
- SIGTERM of the daemon: everything is written; its downtime is unknown. SIGSTOP and SIGCONT: the time in between.
- A write fails (full disk): retried every `SAVE_S`. Leases that end meanwhile stay in memory, the newest
  `MAX_UNSAVED_LEASES` of them.
- A damaged row: that series is lost and logged; recording starts again.
- The wall clock jumps: no effect on series. GPU-hours held are wall-clock time, as the ledger's times are.
- Reports overtake each other: time counts once, by the report that arrived first.

Memory: about 32 kB for each leased GPU, 126 MiB for 4,096 GPUs, however long they are held. Disk: one row for each
lease that was read at least once.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Mapping
from dataclasses import field

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import GpuReading, Lease, LeaseState
from gpulease_protocol.node_protocol import NodeReport
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.records import Instant
from gpulease_server.runtime import clock
from gpulease_server.runtime.gpu_metrics.history_recorder import STOP_WAIT_S, HistoryRecorder
from gpulease_server.runtime.gpu_metrics.time_series import MEASURES, DamagedSeries, TimeSeries
from gpulease_server.runtime.reading_gaps import FIRST_READING_S, GAP_S
from gpulease_server.runtime.writer import Writer
from gpulease_server.store import gpu_metrics_table
from gpulease_server.store.ledger_store import Store, StoreFailed

log = logging.getLogger("gpulease.metrics")

SAVE_S = 60.0
"""Time between two writes of the series of one lease: what a killed daemon may lose."""
CHECK_S = 1.0
"""Time between two checks for what must be written."""
CHUNK = 50
"""The series of so many leases are written in one transaction."""
MAX_UNSAVED_LEASES = 1000
"""Ended leases that could not be written and stay in memory, at most; the oldest are dropped first."""
MAX_VALUE = 2.0**60
"""Readings above this, or below 0, are driver errors and count as unknown."""
_ENTRY = struct.Struct("<HI")


@dataclass(slots=True)
class LeaseSeries:
    """The series of one lease, by GPU."""

    series: dict[str, TimeSeries] = field(default_factory=dict)
    """By UUID."""
    read_s: dict[str, float] = field(default_factory=dict)
    """By UUID: time of the last reading, in seconds since the grant."""
    granted_s: float | None = None
    """The grant, on the monotonic clock of this process; None until the first reading since its start."""
    saved_s: float | None = None
    """When it was last written, on the monotonic clock; None if never."""
    unsaved: bool = False
    """True if some of it is not written yet."""

    def add(self, reading: GpuReading, lease: Lease, now: Instant) -> None:
        """Add a reading of one of its GPUs."""
        if self.granted_s is None:
            # New readings come after those of an earlier process, even if the wall clock went back.
            past_s = max((one.until_s for one in self.series.values()), default=0.0)
            age_s = (now.at - lease.granted_at).total_seconds() if lease.granted_at else 0.0
            self.granted_s = now.mono_s - max(age_s, past_s)
        at_s, last_s = now.mono_s - self.granted_s, self.read_s.get(reading.uuid)
        since_s = FIRST_READING_S if last_s is None or at_s - last_s > GAP_S else at_s - last_s
        values = [_valid_or_none(getattr(reading, name)) for name in MEASURES]
        self.series.setdefault(reading.uuid, TimeSeries.empty()).add(at_s, since_s, values)
        self.read_s[reading.uuid] = at_s
        self.unsaved = True


class GpuMetricsRecorder:
    """The metrics of every active lease. Used from the event loop only.

    Args:
        store: The ledger's database.
        writer: Knows which leases have ended.
    """

    def __init__(self, store: Store, writer: Writer) -> None:
        self._store = store
        self._writer = writer
        self._histories: dict[str, LeaseSeries] = {}
        self._problem = ""
        self.history = HistoryRecorder(store)
        """Of every GPU."""
        self._history_saved_s = float("-inf")

    def restore(self) -> None:
        """Load the metrics of leases that are still active. Blocks; call it before the first report."""
        kept = gpu_metrics_table.load(self._store.engine, gpu_metrics_table.active_leases(self._store.engine))
        for lease_id, content in kept.items():
            try:
                self._histories[lease_id] = LeaseSeries(series=decode_series(content))
            except DamagedSeries as error:
                log.error("the metrics of lease %s cannot be read, so recording starts again: %s", lease_id, error)

    def record(self, node: str, report: NodeReport, ledger: Ledger, now: Instant) -> None:
        """Record the readings of a node's report. A report without readings leaves a gap."""
        if report.problem is not None:
            return
        self.history.record(node, report, ledger, now)
        for reading in report.gpus:
            gpu = ledger.gpus.get(reading.uuid)
            if gpu is None or gpu.lease_id is None or gpu.draining or gpu.device.node != node:
                continue
            lease = ledger.leases[gpu.lease_id].lease
            if lease.state is LeaseState.ACTIVE:
                self._histories.setdefault(lease.id, LeaseSeries(saved_s=now.mono_s)).add(reading, lease, now)

    def encoded(self, lease_id: str) -> bytes | None:
        """The current series of a lease; None if they are not in memory."""
        history = self._histories.get(lease_id)
        return None if history is None else encode_series(history.series)

    async def run(self) -> None:
        """Write what is due, until cancelled."""
        while True:
            await asyncio.sleep(CHECK_S)
            try:
                await self.save(clock.now())
            except Exception:
                log.exception("metrics of GPUs could not be written; trying again")

    async def save(self, now: Instant, *, everything: bool = False) -> None:
        """Write what is due now, or everything that is not written yet."""
        await self._save_leases(now.mono_s, everything)
        if not self._problem and (everything or now.mono_s - self._history_saved_s >= SAVE_S):
            self._history_saved_s = now.mono_s
            await self.history.save(now, everything=everything)

    async def _save_leases(self, now_s: float, everything: bool) -> None:
        self._drop_unsaved()
        due = [
            lease_id
            for lease_id, series in self._histories.items()
            if self._is_due(lease_id, series, now_s, everything)
        ]
        for place in range(0, len(due), CHUNK):
            some = {lease_id: self._histories[lease_id] for lease_id in due[place : place + CHUNK]}
            ended = [lease_id for lease_id in some if self._has_ended(lease_id)]
            written = await self._save({lease_id: series for lease_id, series in some.items() if series.unsaved})
            for series in some.values():
                series.saved_s = now_s
            if not written:
                return  # the others would fail as well
            for lease_id in ended:
                if not some[lease_id].unsaved:
                    del self._histories[lease_id]

    def _is_due(self, lease_id: str, series: LeaseSeries, now_s: float, everything: bool) -> bool:
        if everything or series.saved_s is None or now_s - series.saved_s >= SAVE_S:
            return True
        return not self._problem and self._has_ended(lease_id)

    async def _save(self, histories: Mapping[str, LeaseSeries]) -> bool:
        if not histories:
            return True
        contents = {lease_id: encode_series(history.series) for lease_id, history in histories.items()}
        for history in histories.values():
            history.unsaved = False
        written = False
        writing = asyncio.create_task(asyncio.to_thread(gpu_metrics_table.save, self._store, contents))
        try:
            await asyncio.shield(writing)
            written = True
        except StoreFailed as error:
            self._log_problem(f"metrics of leases cannot be written: {error.detail} Trying again.")
            return False
        except asyncio.CancelledError:
            # The daemon stops, and writes next what is not written. This write must not come after that one.
            await asyncio.wait({writing}, timeout=STOP_WAIT_S)
            written = writing.done() and writing.exception() is None
            raise
        finally:
            for history in histories.values():
                history.unsaved = history.unsaved or not written
        self._log_problem("")
        return True

    def _has_ended(self, lease_id: str) -> bool:
        record = self._writer.committed.leases.get(lease_id)
        # Unknown while the ledger is being loaded. A lease that is no longer in memory has ended.
        return self._writer.problem is None and (record is None or record.lease.state is LeaseState.ENDED)

    def _drop_unsaved(self) -> None:
        ended = [lease_id for lease_id in self._histories if self._has_ended(lease_id)]
        for lease_id in ended[:-MAX_UNSAVED_LEASES]:
            log.error("the metrics of lease %s are lost: they could not be written", lease_id)
            del self._histories[lease_id]

    def _log_problem(self, problem: str) -> None:
        """Log a problem once, and its end once."""
        if problem and not self._problem:
            log.error(problem)
        elif self._problem and not problem:
            log.info("metrics of leases are written again")
        self._problem = problem


def _valid_or_none(value: float | None) -> float | None:
    """The value; None if it is a driver error, since one absurd value would spoil every bucket it is merged into."""
    return value if value is not None and 0 <= value < MAX_VALUE else None


def encode_series(series: dict[str, TimeSeries]) -> bytes:
    """The series of a lease, by UUID, as bytes."""
    parts = []
    for uuid, one in series.items():
        name, content = uuid.encode(), one.to_bytes()
        parts += [_ENTRY.pack(len(name), len(content)), name, content]
    return b"".join(parts)


def decode_series(content: bytes) -> dict[str, TimeSeries]:
    """The series that `encode_series` wrote. Raises DamagedSeries."""
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
        found[uuid] = TimeSeries.from_bytes(content[place : place + size])
        place += size
    return found
