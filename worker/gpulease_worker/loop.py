"""The worker's loop: read the GPUs, report to the daemon, reconcile jobs with its answer, repeat.

It is level-triggered: each message carries the full state, so losing or repeating one does no harm. One request is in
flight at a time. A report names the ticket of the last answer that had arrived before the oldest part of its reading
was begun.
"""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import time
import uuid
from dataclasses import replace
from importlib import metadata
from urllib.parse import quote

from gpulease_protocol import codec
from gpulease_protocol.endpoints import ApiCall
from gpulease_protocol.errors import DaemonUnavailable, GpuleaseError, NotAuthenticated
from gpulease_protocol.host.process_id import realm
from gpulease_protocol.model import ComputeMode, LeaseState
from gpulease_protocol.node_protocol import JUST_STARTED, PAUSED, DesiredState, JobElsewhere, NodeReport
from gpulease_worker.allocation import MIN_LEAVE_S, allocation_of, grace_within
from gpulease_worker.daemon_connection import DaemonConnection
from gpulease_worker.desired_state import read_desired_state
from gpulease_worker.drain_pace import DrainPace
from gpulease_worker.gpu_claims import GpuClaims, set_aside
from gpulease_worker.host_faults import HostFaults, is_of_host
from gpulease_worker.jobs import jobs_elsewhere, listening_ports
from gpulease_worker.jobs.fence import ContactFile, since_boot_s
from gpulease_worker.jobs.log_sender import LogSenders
from gpulease_worker.jobs.port_reservation import PortReservation
from gpulease_worker.jobs.reconciler import JobReconciler
from gpulease_worker.node_address import NodeAddress
from gpulease_worker.node_probe import new_probe
from gpulease_worker.probe.compute_modes import ComputeModes
from gpulease_worker.probe.probe_protocol import ComputeModeChange, Reading
from gpulease_worker.probe.probe_reader import ProbeReader, TimedReading
from gpulease_worker.processes import procfs
from gpulease_worker.processes.lease_cache import CachedLease, LeaseCache
from gpulease_worker.processes.leftover_cleanup import LeftoverCleanup
from gpulease_worker.processes.owner_descendants import DescendantWatcher
from gpulease_worker.processes.owner_watch import OwnerWatcher
from gpulease_worker.settings import WorkerSettings
from gpulease_worker.shown_gpus import ShownGpus
from gpulease_worker.task_cancellation import cancel_and_wait, wait_for_either

BACKOFF_S, FAILOVER_BACKOFF_S = (0.1, 2.0), (0.1, 0.4)
"""First and longest pause while the daemon does not answer; the latter where another daemon may take over."""
ANSWER_TIMEOUT_S = 10.0
"""How long an answer may take beyond the time that the daemon may hold it; 2 s where another daemon may take over
(`failover.FAILOVER_TIMEOUT_S`)."""
STALE_ANSWER_S = 60.0
"""An answer that is taken in so long after its report was sent is dropped: the worker or its host was stopped,
and the daemon may have given up what it ordered."""
LEAVING_POLL_S = 0.2
"""Time between two readings of a node that leaves."""
MIN_IN_FLIGHT_S = 0.02
"""How long a request is left in flight before a change in a job or owner replaces it, so that a stream of changes
cannot starve the answers."""

log = logging.getLogger(__name__)


class WorkerLoop:
    """Keeps one node and the daemon in agreement until `run` is cancelled."""

    def __init__(self, settings: WorkerSettings) -> None:
        self._settings = settings
        self._changed = asyncio.Event()
        """Set when a job, an owner or the probe has changed since the last report."""
        self._probe_changed = False
        """True when it was the probe: it has ended, or a late reading has arrived."""
        self._unanswered: NodeReport | None = None
        """The last report, where a change has replaced it before the daemon answered."""
        self._hold_until_s = 0.0
        """How long the daemon may hold its answer to that, by the monotonic clock."""
        self._daemon = DaemonConnection(settings, ANSWER_TIMEOUT_S)
        self._readings = self._new_probe()
        self._jobs = JobReconciler(
            settings.data_dir.absolute(),
            ",".join(settings.urls),
            self._changed.set,
            settings.of_jobs,
            settings.keep_jobs,
            self._daemon.ca_file and os.path.abspath(self._daemon.ca_file),
            may_leave=settings.leaves_within_s > 0,
        )
        self._logs = LogSenders(settings.data_dir.absolute() / "jobs", self._daemon.logs.send)
        self._contact = ContactFile(settings.data_dir.absolute())
        self._leases = LeaseCache(settings.data_dir.absolute())
        self._owners = OwnerWatcher(self._changed.set)
        self._descendants = DescendantWatcher(self._leases)
        self._leftovers = LeftoverCleanup(settings.kill_leftovers, settings.leftover_grace_s)
        data_dir, manage = settings.data_dir.absolute(), settings.manage_compute_mode
        self._modes = ComputeModes(data_dir, manage, self._change_compute_mode)
        self._claims = GpuClaims()
        self._ports = PortReservation(data_dir)
        self._worker_id = uuid.uuid4().hex
        self._version = metadata.version("gpulease")
        self._address = NodeAddress(settings.address)
        self._desired: DesiredState | None = None
        self._ports_in_use: tuple[int, ...] = ()
        self._complete_ticket: int | None = None
        """The last ticket received before the last complete reading was begun."""
        self._drain_pace = DrainPace()
        self._has_released = False
        """True when leases have ended since the answer before: their GPUs are to be read at once."""
        self._logged_error = ""
        self._faults = HostFaults()
        self._unfollowed: str | None = None
        """Why the last answer could not be followed as a whole; None where it was."""
        self._shown = ShownGpus(settings.gpus, os.environ if settings.allocation else {})
        self._allocation = allocation_of(settings, self.leave)
        self._running: asyncio.Task[None] | None = None
        self._leaves, self._has_left, self._grace_s = False, False, 0.0
        self._leaving_is_known = False
        """The daemon has answered a report that says so: it grants nothing here any more."""

    def leave(self, grace_s: float | None = None) -> None:
        """Begin to leave, see `gpulease_worker.allocation`; `run` returns once the daemon knows that the node has left.

        Args:
            grace_s: What jobs have between SIGTERM and SIGKILL; None: as much as `leave_s` allows. A later call can
                only shorten it, as when the allocation is gone meanwhile.
        """
        within_s = self._settings.leaves_within_s
        of_jobs_s = grace_within(within_s) if grace_s is None else grace_s
        if self._leaves and of_jobs_s >= self._grace_s:
            return
        self._leaves, self._grace_s = True, of_jobs_s
        self._jobs.leave(of_jobs_s)
        give_up_s = max(within_s, MIN_LEAVE_S) if grace_s is None else grace_s + MIN_LEAVE_S
        asyncio.get_running_loop().call_later(give_up_s, self._give_up_leaving)
        self._changed.set()

    def _give_up_leaving(self) -> None:
        log.warning("this node leaves, and the daemon may not know it, or not how its jobs have ended")
        if self._running is not None:
            self._running.cancel()

    def recover(self) -> None:
        """Load what an earlier worker has left. Raises OSError when the data directory cannot be used."""
        self._jobs.recover()
        self._leases.load()
        self._modes.recover()

    async def run(self) -> None:
        """Run until cancelled, or until this node has left. Errors of the host do not end it (`host_faults`)."""
        self._running = asyncio.current_task()
        watching = None if self._allocation is None else asyncio.create_task(self._allocation.watch())
        first_s, longest_s = BACKOFF_S if self._daemon.is_single else FAILOVER_BACKOFF_S
        backoff_s = first_s
        try:
            while not self._has_left:
                if await self._turn():
                    backoff_s = first_s
                else:
                    await asyncio.sleep(backoff_s)
                    backoff_s = min(backoff_s * 2, longest_s)
        finally:
            if watching is not None:
                await cancel_and_wait(watching)
            await self._logs.close()
            await self._daemon.close()
            self._jobs.close()
            self._owners.close()
            await self._leftovers.close()
            await self._descendants.close()
            await self._readings.close()
            self._ports.close()
            self._claims.close()

    async def _turn(self) -> bool:
        """One reading and its report. False when no daemon answered as expected, and while the host has a fault."""
        report = await self._next_report()
        of_reading = self._faults.take()
        sent_at_ticks, sent_at_s = procfs.ticks_now(), since_boot_s()
        # Whatever changes in a job or owner from here on is missing in this report.
        sending = asyncio.create_task(self._send(report))
        try:
            await wait_for_either(sending, self._changed, MIN_IN_FLIGHT_S)
            if not sending.done():
                self._unanswered = None if report.partial else report
                return True
            desired = await sending
        except Exception as error:
            if not isinstance(error, GpuleaseError) and not is_of_host(error):
                raise
            if self._allocation is not None and isinstance(error, NotAuthenticated):
                self._allocation.look_soon()
            self._address.look_soon()
            why = error.detail if isinstance(error, DaemonUnavailable) else error
            self._log_error(f"cannot report to the daemon at {self._daemon}, trying again: {why}")
            return False
        finally:
            await cancel_and_wait(sending)
        self._log_error("")
        self._address.refresh(self._daemon.address, desired.daemon_address)
        if since_boot_s() - sent_at_s > STALE_ANSWER_S:
            log.warning("an answer of the daemon is dropped: it is from before this worker or its host was stopped")
            return True
        self._has_left = report.left
        self._leaving_is_known = self._leaving_is_known or report.leaving
        self._desired = desired
        if not report.partial:  # which the daemon may leave out, and then has not heard the node
            self._note_contact(desired, sent_at_s)
        has_released = self._drain_pace.take(desired.leases)
        with self._faults.noted("watching the owners of leases"):
            self._owners.watch(desired.owners)
        with self._faults.noted("starting and stopping jobs"):
            self._jobs.reconcile(desired.jobs, desired.database_id)
        with self._faults.noted("sending logs"):
            self._logs.reconcile(desired.log_requests)
        with self._faults.noted("looking after leases"):
            leases = self._leases.update(desired.leases, sent_at_ticks)
            if not report.partial:
                self._descendants.look()
                self._leftovers.clean_up(leases, report.gpus)
                if not desired.paused:
                    await self._modes.reconcile(leases, report.gpus)
        self._has_released = has_released and desired.takes_partial and not desired.paused
        self._unfollowed = self._faults.take()
        return self._faults.end_turn(of_reading, self._unfollowed)

    async def _next_report(self) -> NodeReport:
        """What is to be reported now. Without a reading while the host keeps the last answer from being followed."""
        problem, self._unfollowed = self._unfollowed, None
        if (last := self._last_report()) is not None:
            return last
        if problem is None:
            with self._faults.noted("reading its GPUs"):
                return self._repeated_report() or await self._partial_report() or await self._report()
            problem = self._faults.problem
        return self._report_without_reading(str(problem))

    def _note_contact(self, desired: DesiredState, sent_at_s: float) -> None:
        """For jobs with a fence, before they are started. Without it they end there."""
        if not any(order.spec.fence_s is not None for order in desired.jobs):
            return
        try:
            self._contact.note(sent_at_s)
        except OSError as error:
            self._log_error(f"jobs with a fence will end, because contact cannot be noted: {error}")

    def _repeated_report(self) -> NodeReport | None:
        """The report that a change of a job or an owner has replaced, with that change: it needs no other reading, and
        none is put off by it. None when a reading is due."""
        report, left_s = self._unanswered, self._hold_until_s - time.monotonic()
        self._unanswered = None
        if report is None or report.problem is not None or self._probe_changed or left_s <= 0:
            return None
        if self._desired is None or not self._desired.takes_partial:
            return None
        self._changed.clear()
        return replace(
            report,
            repeated=True,
            jobs=self._jobs.reports(),
            owners=self._owners.reports(),
            hold_s=left_s,
            available_s=self._available_s(),
            leaving=self._leaves,
        )

    def _last_report(self) -> NodeReport | None:
        """That this node has left; None before all jobs have ended, and the daemon knows how."""
        if not (self._leaving_is_known and self._jobs.have_ended) or self._desired is None or self._desired.jobs:
            return None
        return self._report_without_reading("the node has left", has_left=True)

    def _report_without_reading(self, problem: str, *, has_left: bool = False) -> NodeReport:
        """Jobs and owners as they are now, and why there is no reading."""
        self._changed.clear()
        return replace(self._own_report(), problem=problem, left=has_left)

    def _own_report(self) -> NodeReport:
        """What each report says, whatever was read."""
        return NodeReport(
            worker_id=self._worker_id,
            host=socket.gethostname(),
            worker_version=self._version,
            address=self._address.address,
            interface=self._address.interface,
            simulated=self._settings.simulate is not None,
            jobs=self._jobs.reports(),
            jobs_elsewhere=self._jobs_elsewhere(),
            realm=realm(),
            owners=self._owners.reports(),
            sends_logs=True,
            takes_gangs=True,
            hold_s=0.0,
            available_s=self._available_s(),
            leaving=self._leaves,
        )

    def _jobs_elsewhere(self) -> tuple[JobElsewhere, ...]:
        return () if self._desired is not None else jobs_elsewhere.find(self._settings.data_dir.absolute())

    def _available_s(self) -> float | None:
        return None if self._allocation is None else self._allocation.available_s()

    def _on_probe_changed(self) -> None:
        self._probe_changed = True
        self._changed.set()

    async def _partial_report(self) -> NodeReport | None:
        """A report of the GPUs that drain, which are read at once and alone when a lease has ended; None where there is
        nothing to tell of them. The reading of all GPUs begins as soon as theirs has ended.

        It shows all of them, because the scan of open files is for all: what it found would be lost.
        """
        desired, is_due, self._has_released = self._desired, self._has_released, False
        if desired is None or not is_due:
            return None
        leases, draining = self._node_leases(desired)
        since_s = time.monotonic()
        reading = await self._readings.read_some(draining, leases)
        self._readings.begin(desired.ticket, leases, desired.complete, draining, since_s)
        gpus = () if reading is None else tuple(gpu for gpu in reading.gpus if gpu.opened_by is not None)
        if self._settings.simulate is None:
            gpus = tuple(gpu for gpu in gpus if self._claims.has(gpu.uuid))
        gpus, _ = set_aside(gpus, (), self._jobs.kept_gpus())
        if not gpus:
            return None  # the scan of open files takes longer: they drain until it has ended
        return NodeReport(
            worker_id=self._worker_id,
            host=socket.gethostname(),
            seen=desired.ticket,
            reading_ticket=desired.ticket,
            reread=tuple(gpu.uuid for gpu in gpus),
            partial=True,
            gpus=gpus,
            hold_s=0.0,
        )

    async def _report(self) -> NodeReport:
        desired = self._desired
        taken = await self._read(desired)
        reading = taken.reading
        if reading.whole and reading.problem is None:
            self._complete_ticket = taken.ticket
        # Jobs and owners are reported as of now; any later change sets the event again.
        self._changed.clear()
        hold_s, self._probe_changed = self._hold_s(), False
        self._hold_until_s = time.monotonic() + hold_s
        self._ports_in_use = listening_ports.in_use(self._ports_in_use)
        simulated = self._settings.simulate is not None
        shown = self._shown.of(reading.gpus)
        own = (shown, ()) if simulated else self._claims.claim(shown)
        gpus, others = set_aside(*own, self._jobs.kept_gpus())
        return replace(
            self._own_report(),
            ticket=self._complete_ticket,
            seen=desired.ticket if desired else None,
            reading_ticket=taken.ticket if reading.problem is None else None,
            reread=reading.reread,
            problem=reading.problem,
            read_s=taken.took_s,
            reading_limit_s=self._settings.probe_deadline_s,
            gpus=gpus,
            claimed_elsewhere=others,
            links=self._shown.links_between(gpus, reading.links),
            driver_version=reading.driver_version,
            simulated=reading.simulated,
            ports_in_use=self._ports_in_use,
            ports_reserved=self._ports.reserve(len(gpus), self._ports_in_use),
            hold_s=hold_s,
        )

    async def _read(self, desired: DesiredState | None) -> TimedReading:
        """A reading, or none while the daemon wants this node paused: then no process has NVML open.

        Nothing is read before the daemon's first answer either: the node may be paused, and a GPU may be in reset.
        """
        if desired is None:
            return TimedReading(Reading(problem=JUST_STARTED, simulated=self._settings.simulate is not None))
        if desired.paused:
            closed = await self._readings.end()
            if closed:
                # A new probe replaces it, and starts with the first reading after the pause.
                self._readings = self._new_probe()
            problem = PAUSED if closed else f"{PAUSED}, but a probe that was killed has not ended yet"
            return TimedReading(Reading(problem=problem, simulated=self._settings.simulate is not None))
        leases, draining = self._node_leases(desired)
        return await self._readings.read(desired.ticket, leases, desired.complete, draining)

    def _node_leases(self, desired: DesiredState) -> tuple[tuple[CachedLease, ...], frozenset[str]]:
        """The leases with GPUs on this node, and the UUIDs of the GPUs that drain."""
        leases = self._leases.update(desired.leases)
        return leases, frozenset(uuid for lease in leases if lease.state is LeaseState.ENDED for uuid in lease.gpus)

    async def _change_compute_mode(self, change: ComputeModeChange) -> ComputeMode | None:
        """Change it through the current probe, which a pause replaces."""
        return await self._readings.change_compute_mode(change)

    def _new_probe(self) -> ProbeReader:
        return new_probe(self._settings, self._on_probe_changed, lambda: self._owners.watched)

    def _hold_s(self) -> float:
        poll_s = min(self._settings.poll_s, LEAVING_POLL_S) if self._leaves else self._settings.poll_s
        return self._drain_pace.hold_s(poll_s)

    async def _send(self, report: NodeReport) -> DesiredState:
        """Send a report to the daemon that serves. Raises GpuleaseError."""
        call = ApiCall(
            method="POST",
            path=f"/v1/nodes/{quote(self._settings.node, safe='')}/exchange",
            body=codec.to_json(report),
            read=read_desired_state,
            hold_s=report.hold_s,
            # A daemon at another address may take it for a whole one: it has not said what it takes.
            idempotent=not report.partial,
        )
        return await self._daemon.send(call)

    def _log_error(self, error: str) -> None:
        """Log an error of the daemon once, and once that it has ended ("")."""
        if error and error != self._logged_error:
            log.warning(error)
        elif self._logged_error and not error:
            log.info("the daemon answers again")
        self._logged_error = error
