"""The worker's loop: read the GPUs, report, bring the jobs in line with the answer, again.

It is level-triggered: each message says everything, so one that is lost or comes twice does no harm. One request is in
flight at a time. A report names the ticket of the last answer that had arrived before the oldest part of its reading
was begun.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import uuid
from urllib.parse import quote

import httpx2

from gpulease import wire
from gpulease.exchange import JUST_STARTED, PAUSED, DesiredState, NodeReport
from gpulease.model import ComputeMode, LeaseState
from gpulease.owner import realm
from gpulease_worker import ports, processes
from gpulease_worker.compute_modes import ComputeModes
from gpulease_worker.daemons import Daemons
from gpulease_worker.holders import Holders
from gpulease_worker.jobs import Jobs
from gpulease_worker.leftovers import Leftovers
from gpulease_worker.occupancy import Probe
from gpulease_worker.owners import Owners
from gpulease_worker.readings import Readings, Taken
from gpulease_worker.settings import WorkerSettings
from gpulease_worker.source import ModeChange, Reading
from gpulease_worker.tasks import cancel

DRAIN_HOLD_S = (0.02, 1.0)
"""Shortest and longest time between two readings while a lease drains; it doubles from one to the next. A clean GPU is
free after the first of them."""
BACK_OFF_S, BACK_OFF_OF_SEVERAL_S = (0.1, 2.0), (0.1, 0.4)
"""First and longest pause while the daemon does not answer; the others where another one may take over."""
MIN_IN_FLIGHT_S = 0.02
"""A request has so long before news of a job or owner takes its place: a stream of news cannot starve the answers."""

log = logging.getLogger(__name__)


class Exchange:
    """Keeps one node and the daemon in agreement until `run` is cancelled."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._changed = asyncio.Event()
        self._readings = self._new_probe()
        self._jobs = Jobs(
            settings.data_dir.absolute(),
            ",".join(settings.urls),
            self._changed.set,
            settings.log_bytes,
            settings.keep_jobs,
        )
        self._holders = Holders(settings.data_dir.absolute())
        self._owners = Owners(self._changed.set)
        self._leftovers = Leftovers(settings.kill_leftovers, settings.leftover_grace_s)
        data_dir, manage = settings.data_dir.absolute(), settings.manage_compute_mode
        self._modes = ComputeModes(data_dir, manage, self._change_compute_mode)
        self._worker_id = uuid.uuid4().hex
        self._desired: DesiredState | None = None
        self._ports_in_use: tuple[int, ...] = ()
        self._whole_ticket: int | None = None
        """The ticket in hand when the last whole reading was begun."""
        self._draining: set[str] = set()
        """Leases that have ended and whose GPUs drain."""
        self._drain_hold_s = DRAIN_HOLD_S[0]
        self._trouble = ""

    async def run(self) -> None:
        """Exchange for ever. Raises OSError when the data directory cannot be used."""
        self._jobs.recover()
        self._holders.recover()
        self._modes.recover()
        first_s, longest_s = BACK_OFF_S if len(self._settings.urls) == 1 else BACK_OFF_OF_SEVERAL_S
        back_off_s = first_s
        try:
            async with Daemons(self._settings.urls, self._settings.token) as daemons:
                while True:
                    answered = await self._turn(daemons)
                    if answered:
                        back_off_s = first_s
                    else:
                        await asyncio.sleep(back_off_s)
                        back_off_s = min(back_off_s * 2, longest_s)
        finally:
            self._jobs.close()
            self._owners.close()
            await self._leftovers.close()
            await self._readings.close()

    async def _turn(self, daemons: Daemons) -> bool:
        """One reading and its report. False when the daemon did not answer as it should."""
        report = await self._report()
        asked_ticks = processes.ticks_now()
        # From here on, news of a job is news that this report does not have.
        sending = asyncio.create_task(self._send(daemons, report))
        try:
            await self._answer_or_news(sending)
            if not sending.done():
                return True
            self._desired = await sending
        except (httpx2.HTTPError, httpx2.InvalidURL, ValueError) as error:
            self._say(f"no exchange with {daemons.shown}: {str(error) or type(error).__name__}; trying again")
            return False
        finally:
            await cancel(sending)
        self._say("")
        self._pace_draining(self._desired)
        self._owners.watch(self._desired.owners)
        self._jobs.reconcile(self._desired.jobs)
        leases = self._holders.see(self._desired.leases, asked_ticks)
        self._leftovers.look(leases, report.gpus)
        if not self._desired.paused:
            await self._modes.reconcile(leases, report.gpus)
        return True

    async def _answer_or_news(self, sending: asyncio.Task[DesiredState]) -> None:
        await asyncio.wait({sending}, timeout=MIN_IN_FLIGHT_S)
        if sending.done():
            return
        news = asyncio.create_task(self._changed.wait())
        try:
            await asyncio.wait({sending, news}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await cancel(news)

    async def _report(self) -> NodeReport:
        desired = self._desired
        ticket = desired.ticket if desired else None
        taken = await self._read(desired)
        reading = taken.reading
        if reading.whole and reading.problem is None:
            self._whole_ticket = taken.ticket
        # The jobs are looked at after the reading: what changes them from here on sets the event again.
        self._changed.clear()
        self._ports_in_use = ports.in_use(self._ports_in_use)
        return NodeReport(
            worker_id=self._worker_id,
            host=socket.gethostname(),
            ticket=self._whole_ticket,
            seen=ticket,
            reading_ticket=taken.ticket if reading.problem is None else None,
            reread=reading.reread,
            problem=reading.problem,
            read_s=taken.took_s,
            reading_limit_s=self._settings.probe_deadline_s,
            gpus=reading.gpus,
            links=reading.links,
            driver_version=reading.driver_version,
            simulated=reading.simulated,
            ports_in_use=self._ports_in_use,
            jobs=self._jobs.reports(),
            realm=realm(),
            owners=self._owners.reports(),
            hold_s=self._hold_s(),
        )

    async def _read(self, desired: DesiredState | None) -> Taken:
        """A reading; while the daemon wants this node paused, none, and no process that has NVML open.

        Nothing is read before the daemon's first answer either: the node may be paused, and a GPU under reset.
        """
        if desired is None:
            return Taken(Reading(problem=JUST_STARTED, simulated=self._settings.simulate is not None))
        if desired.paused:
            closed = await self._readings.end()
            if closed:
                # Another takes its place, and starts with the first reading that is wanted again.
                self._readings = self._new_probe()
            problem = PAUSED if closed else f"{PAUSED}, but a probe that was killed has not ended yet"
            return Taken(Reading(problem=problem, simulated=self._settings.simulate is not None))
        leases = self._holders.see(desired.leases)
        draining = {uuid for lease in leases if lease.state is LeaseState.ENDED for uuid in lease.gpus}
        return await self._readings.take(desired.ticket, leases, desired.fresh, draining)

    async def _change_compute_mode(self, change: ModeChange) -> ComputeMode | None:
        """Through the probe of the moment: a pause puts another in its place."""
        return await self._readings.change_compute_mode(change)

    def _new_probe(self) -> Readings:
        settings = self._settings
        probe = Probe(
            settings.node,
            settings.simulate,
            settings.probe_deadline_s + settings.pace.call_deadline_s,
            settings.pace,
            self._changed.set,
            settings.start_deadline_s,
            settings.idle_memory_bytes,
        )
        return Readings(probe, settings.probe_deadline_s, self._changed.set)

    def _hold_s(self) -> float:
        return min(self._settings.poll_s, self._drain_hold_s) if self._draining else self._settings.poll_s

    async def _send(self, daemons: Daemons, report: NodeReport) -> DesiredState:
        path = f"/v1/nodes/{quote(self._settings.node, safe='')}/exchange"
        answer = await daemons.post(path, wire.to_json(report), report.hold_s)
        return wire.from_json(DesiredState, answer.json())

    def _pace_draining(self, desired: DesiredState) -> None:
        """Read again soon while something drains: at first very soon, later less so."""
        draining = {lease.id for lease in desired.leases if lease.state is LeaseState.ENDED}
        if draining - self._draining:
            self._drain_hold_s = DRAIN_HOLD_S[0]
        else:
            self._drain_hold_s = min(self._drain_hold_s * 2, DRAIN_HOLD_S[1])
        self._draining = draining

    def _say(self, trouble: str) -> None:
        """Log what is wrong with the daemon once, and once that it is over."""
        if trouble and trouble != self._trouble:
            log.warning(trouble)
        elif self._trouble and not trouble:
            log.info("the daemon answers again")
        self._trouble = trouble
