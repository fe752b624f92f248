"""Takes one reading after another from the probe, and describes the GPUs while one is late.

A driver may be busy for a second, for 45 s, or forever, and there is no way to tell which. A reading that exceeds its
limit makes the GPUs unknown but continues: killing the probe would not free the driver, and the next probe would wait
behind the same lock and initialize every GPU again. When the reading does arrive, it counts with the ticket that was
current when it began. Only the probe's own deadline ends a reading that never arrives (`probe_client.ProbeClient`).

A change of compute mode may take as long. It continues as well, and no reading begins before it has finished: the probe
answers one request after another.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import ComputeMode
from gpulease_protocol.node_protocol import NodeLease
from gpulease_worker.probe.probe_client import STARTING, ProbeClient
from gpulease_worker.probe.probe_protocol import ComputeModeChange, ComputeModeNotSet, Reading
from gpulease_worker.task_cancellation import cancel_and_wait

LATE_READING_WAIT_S = 0.5
"""How long to wait in each turn for a reading that is already late: the worker has jobs to look after meanwhile."""
MODE_CHANGE_WAIT_S = 0.5
"""How long to wait for a changed mode: there may be one per GPU between two reports."""


@dataclass(frozen=True, slots=True)
class TimedReading:
    """A reading with its ticket and duration."""

    reading: Reading
    """The reading, or why there is none."""
    ticket: int | None = None
    """The daemon's latest ticket when the reading began."""
    took_s: float | None = None
    """Duration; None if there is no reading."""


class ProbeReader:
    """Takes one reading at a time from a probe.

    Args:
        probe: The probe to read from.
        limit_s: How long a reading may take before the GPUs are reported as unknown.
        arrived: Called when a late reading arrives.
    """

    def __init__(self, probe: ProbeClient, limit_s: float, arrived: Callable[[], None]) -> None:
        self._probe = probe
        self._limit_s = limit_s
        self._arrived = arrived
        self._task: asyncio.Task[tuple[Reading, float]] | None = None
        """The reading that is under way, or has not been asked for yet, and when it ended."""
        self._mode_change: asyncio.Task[ComputeMode | None] | None = None
        self._some: asyncio.Task[Reading] | None = None
        """A reading of some GPUs; once it is late, its result is dropped."""
        self._ticket: int | None = None
        self._begun_s = 0.0
        self._late = False
        """True while a reading or mode change exceeds its limit."""

    async def read(
        self, ticket: int | None, leases: Sequence[NodeLease], complete: bool, reread: Collection[str] = ()
    ) -> TimedReading:
        """The next reading. If one is late, waits for that one, whatever the arguments are.

        Args:
            ticket: The daemon's latest ticket.
            leases: Those with GPUs on this node.
            complete: Whether everything must be read now.
            reread: UUIDs of GPUs; their processes and health must be read now in any case.
        """
        if not await self._others_finished():
            return self._late_reading()
        self.begin(ticket, leases, complete, reread)
        assert self._task is not None, "nothing else is under way"
        await asyncio.wait(
            {self._task}, timeout=min(LATE_READING_WAIT_S, self._limit_s) if self._late else self._limit_s
        )
        if not self._task.done():
            return self._late_reading()
        task, self._task, self._late = self._task, None, False
        reading, ended_s = await task
        # Not until now: a reading that waits to be asked for is older than it would seem.
        return TimedReading(reading, self._ticket, ended_s - self._begun_s if reading.problem is None else None)

    def begin(
        self,
        ticket: int | None,
        leases: Sequence[NodeLease],
        complete: bool,
        reread: Collection[str] = (),
        since_s: float | None = None,
    ) -> None:
        """Begin a reading for the next call of `read`, unless anything is under way, because the probe answers one
        request after another. The arguments are those of `read`.

        Args:
            since_s: When a reading of some GPUs was begun under the same ticket, on the monotonic clock. The duration
                counts from then, as the age of the ticket does.
        """
        if self._task is None and self._some is None and self._mode_change is None:
            self._ticket, self._begun_s = ticket, time.monotonic() if since_s is None else since_s
            self._task = asyncio.create_task(self._read(leases, complete, reread))
            self._task.add_done_callback(lambda _: self._notify_if_late())

    async def _read(
        self, leases: Sequence[NodeLease], complete: bool, reread: Collection[str]
    ) -> tuple[Reading, float]:
        reading = await self._probe.read(leases, complete, reread)
        return reading, time.monotonic()

    async def read_some(self, uuids: Collection[str], leases: Sequence[NodeLease]) -> Reading | None:
        """A reading of these GPUs alone; None where the probe is busy, or there is none within the limit."""
        if self._task is not None or self._mode_change is not None or self._some is not None:
            return None
        self._some = asyncio.create_task(self._probe.read_some(uuids, leases))
        self._some.add_done_callback(lambda _: self._notify_if_late())
        await asyncio.wait({self._some}, timeout=self._limit_s)
        if not self._some.done():
            self._late = True
            return None
        task, self._some = self._some, None
        reading = await task
        return reading if reading.problem is None else None

    async def change_compute_mode(self, change: ComputeModeChange) -> ComputeMode | None:
        """Change a GPU's mode; see `ProbeClient.change_compute_mode`.

        Raises ComputeModeNotSet, also if it is late: then it continues, and a repeated request finds the mode changed.
        """
        if self._task is not None or self._mode_change is not None or self._some is not None:
            raise ComputeModeNotSet("the driver is busy; this is retried when it is not")
        self._mode_change = asyncio.create_task(self._probe.change_compute_mode(change))
        self._mode_change.add_done_callback(lambda _: self._notify_if_late())
        await asyncio.wait({self._mode_change}, timeout=min(MODE_CHANGE_WAIT_S, self._limit_s))
        if not self._mode_change.done():
            self._late = True
            raise ComputeModeNotSet("the driver is still busy with the change; this is checked again when it is not")
        task, self._mode_change = self._mode_change, None
        return await task

    async def end(self) -> bool:
        """Cancel what is running and end the probe. True if NVML is closed; see `ProbeClient.end`."""
        await self._cancel()
        return await self._probe.end()

    async def close(self) -> None:
        """End the probe permanently."""
        await self._cancel()
        await self._probe.close()

    async def _cancel(self) -> None:
        for task in (self._task, self._mode_change, self._some):
            if task is not None:
                await cancel_and_wait(task)
        self._task, self._mode_change, self._some, self._late = None, None, None, False

    async def _others_finished(self) -> bool:
        """True if no change of mode and no reading of some GPUs is under way that was late."""
        for task, wait_s in ((self._mode_change, self._limit_s), (self._some, LATE_READING_WAIT_S)):
            if task is not None:
                await asyncio.wait({task}, timeout=min(wait_s, self._limit_s))
                if not task.done():
                    return False
                task.exception()  # the caller has been told that it was late
                self._late = False
        self._mode_change = self._some = None
        return True

    def _late_reading(self) -> TimedReading:
        self._late = True
        return TimedReading(Reading(problem=self._problem(), simulated=self._probe.simulated))

    def _notify_if_late(self) -> None:
        if self._late:
            self._arrived()

    def _problem(self) -> str:
        if self._probe.starting:
            return STARTING
        call = self._probe.under_way or "the GPU driver"
        return (
            f"{call} did not answer within {self._limit_s:g} s; the driver is busy or hangs, see `dmesg` for Xid lines"
        )
