"""One reading after the other, and what is said of the GPUs while one is late.

A driver may be busy for a second, for three quarters of a minute, or for good, and nobody can tell which. So a reading
that takes longer than its limit makes the GPUs unknown and goes on: killing the probe would not free the driver, and
the next probe would stand behind the same lock and set every GPU up anew. When it does arrive it counts as what it is,
by the ticket with which it was begun. Only the probe's own deadline ends one that never does (`occupancy.Probe`).

An order to change a compute mode may take as long. It goes on as well, and no reading is begun before it is over: the
probe answers one question after the other.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from gpulease.exchange import NodeLease
from gpulease.model import ComputeMode
from gpulease_worker.occupancy import STARTING, Probe
from gpulease_worker.source import ModeChange, ModeNotSet, Reading
from gpulease_worker.tasks import cancel

LATE_S = 0.5
"""How long a reading that is late already is waited for in each turn: the worker has jobs to look after meanwhile."""
ORDER_S = 0.5
"""How long the worker waits for a changed mode: there may be one for each GPU between two reports."""


@dataclass(frozen=True, slots=True)
class Taken:
    """A reading as it is reported."""

    reading: Reading
    """The reading, or why there is none."""
    ticket: int | None = None
    """The ticket in hand when it was begun."""
    took_s: float | None = None
    """How long it took; None where there is none."""


class Readings:
    """Takes one reading at a time from a probe.

    Args:
        probe: Whom to ask.
        limit_s: How long a reading may take before it is said that there is none.
        arrived: Called when one arrives that was late.
    """

    def __init__(self, probe: Probe, limit_s: float, arrived: Callable[[], None]) -> None:
        self._probe = probe
        self._limit_s = limit_s
        self._arrived = arrived
        self._task: asyncio.Task[Reading] | None = None
        self._order: asyncio.Task[ComputeMode | None] | None = None
        self._ticket: int | None = None
        self._begun_s = 0.0
        self._late = False
        """True while a reading or an order is under way that is past its limit."""

    async def take(
        self, ticket: int | None, leases: Sequence[NodeLease], fresh: bool, anew: Collection[str] = ()
    ) -> Taken:
        """The next reading; one that is late is waited for again, whatever is asked for now.

        Args:
            ticket: The one in hand now.
            leases: Those with GPUs on this node.
            fresh: Whether all of it must be read anew.
            anew: UUIDs of the GPUs that must be read anew in any case.
        """
        if not await self._order_is_over():
            return self._none()
        if self._task is None:
            self._ticket, self._begun_s = ticket, time.monotonic()
            self._task = asyncio.create_task(self._probe.read(leases, fresh, anew))
            self._task.add_done_callback(lambda _: self._tell())
        await asyncio.wait({self._task}, timeout=min(LATE_S, self._limit_s) if self._late else self._limit_s)
        if not self._task.done():
            return self._none()
        task, self._task, self._late = self._task, None, False
        reading, took_s = await task, time.monotonic() - self._begun_s
        return Taken(reading, self._ticket, took_s if reading.problem is None else None)

    async def change_compute_mode(self, change: ModeChange) -> ComputeMode | None:
        """Change a GPU's mode, see `Probe.change_compute_mode`. Raises ModeNotSet, also for one that is late: it goes
        on, and whoever gives the order again finds it done."""
        if self._task is not None or self._order is not None:
            raise ModeNotSet("the driver is busy, and is asked again when it is not")
        self._order = asyncio.create_task(self._probe.change_compute_mode(change))
        self._order.add_done_callback(lambda _: self._tell())
        await asyncio.wait({self._order}, timeout=min(ORDER_S, self._limit_s))
        if not self._order.done():
            self._late = True
            raise ModeNotSet("the driver is busy with it, and is asked again when it is not")
        order, self._order = self._order, None
        return await order

    async def end(self) -> bool:
        """Give up what is under way, and end the probe. True when NVML is closed, see `Probe.end`."""
        await self._give_up()
        return await self._probe.end()

    async def close(self) -> None:
        """End the probe for good."""
        await self._give_up()
        await self._probe.close()

    async def _give_up(self) -> None:
        for task in (self._task, self._order):
            if task is not None:
                await cancel(task)
        self._task, self._order, self._late = None, None, False

    async def _order_is_over(self) -> bool:
        if self._order is not None:
            await asyncio.wait({self._order}, timeout=self._limit_s)
            if not self._order.done():
                return False
            self._order.exception()  # who gave it has been told that it was late
            self._order, self._late = None, False
        return True

    def _none(self) -> Taken:
        self._late = True
        return Taken(Reading(problem=self._why(), simulated=self._probe.simulated))

    def _tell(self) -> None:
        if self._late:
            self._arrived()

    def _why(self) -> str:
        if self._probe.starting:
            return STARTING
        call = self._probe.under_way or "the GPU driver"
        return (
            f"{call} did not answer within {self._limit_s:g} s; the driver is busy or hangs, see `dmesg` for Xid lines"
        )
