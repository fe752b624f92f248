"""What a node reports, and what it is told."""

from __future__ import annotations

from dataclasses import fields
from operator import attrgetter

from gpulease_protocol.errors import NotAllowed
from gpulease_protocol.model import Device, GpuReading, LeaseState, NodeMode
from gpulease_protocol.node_protocol import (
    JUST_STARTED,
    LEASE_PORTS,
    ClaimedGpu,
    DesiredState,
    JobElsewhere,
    LogRequest,
    NodeLease,
    NodeReport,
)
from gpulease_server.core.draining import free_clean_gpus
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gang_run import takes_part
from gpulease_server.core.gpu import is_silent, is_unheard, mark_bystanders, node_mode, node_problem
from gpulease_server.core.gpu_observation import observe_gpus, observe_shown_gpus, remove_missing_gpus
from gpulease_server.core.happenings import NodeReported
from gpulease_server.core.job_orders import job_order
from gpulease_server.core.job_reports import on_job_reports
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.liveness import on_owner_reports, on_silence_over
from gpulease_server.core.maintenance import discard_if_paused
from gpulease_server.core.node_loss import SEEN_INTERVAL_S, on_node_left
from gpulease_server.core.node_topology import TopologyCache
from gpulease_server.core.records import GpuRecord, LeaseRecord, NodeObservation, NodeRecord
from gpulease_server.core.turn import Turn

MAX_READING_S = 120.0
"""No worker may take longer for a reading, or hold its peace for longer because of one."""
DEVICE_FIELDS = tuple(one.name for one in fields(Device))
DEVICE_VALUES = attrgetter(*DEVICE_FIELDS)
NODE_VALUES = attrgetter("host", "driver_version", "simulated", "realm")
"""Of a report, and of the record of its node."""
REPORT_MARGIN_S = 0.5
"""What a report may be late, beside its hold and its reading, before the node counts as silent."""
MAX_AVAILABLE_S = 3.2e8
"""An end of a node that is more than ten years away is none."""
AVAILABLE_JITTER_S = 5.0
"""An end of a node that is so much later is the same end, from a report that was on its way for longer."""


def on_node_reported(turn: Turn, reported: NodeReported) -> None:
    """Take in a node's full view, in this order, in which each step rests on those before it:

    1. refuse a report of a second worker, or of one that does not know a job that runs there, and ignore one that a
       newer report has overtaken;
    2. bring the node and its GPUs up to date, then the node's observation, with events for what has changed;
    3. end leases of dead owners, take in jobs, free GPUs that are clean: before `settle` grants anything;
    4. note which requested reading this report has answered.
    """
    report, name = discard_if_paused(turn.ledger, reported.node, reported.report), reported.node
    before = turn.ledger.node_observations.get(name)
    if before is not None and before.worker_id != report.worker_id and not is_silent(before, turn.now, turn.policy):
        where = turn.ledger.nodes[name].host + (f" ({before.address})" if before.address else "")
        detail = f"Another worker, on host {where}, reports for node {name}."
        remedy = "After a restart this passes in seconds. Otherwise stop one of them, or give this one another --node."
        turn.answer(reported.cause, NotAllowed(detail, remedy=remedy))
        return
    if (unknown := _job_elsewhere(turn.ledger, name, report)) is not None:
        detail = f"Job {unknown.job_id} runs on node {name} under another data directory, and would be lost."
        remedy = f"Start the worker with --data-dir {unknown.data_dir}, or wait until the job has ended."
        turn.answer(reported.cause, NotAllowed(detail, remedy=remedy))
        return
    if _is_overtaken(before, report, reported):
        turn.answer(reported.cause, None)  # the next report says everything again
        return
    if report.partial:
        if before is not None and not is_unheard(turn.ledger, name, turn.now, turn.policy):
            _take_partial(turn, reported, report, before)
        turn.answer(reported.cause, None)
        return
    if report.left:
        if before is not None and before.worker_id == report.worker_id:
            on_job_reports(turn, name, report.jobs)
            on_node_left(turn, name)
        turn.answer(reported.cause, None)
        return
    if is_unheard(turn.ledger, name, turn.now, turn.policy):
        on_silence_over(turn, name)
    problem_before = node_problem(turn.ledger, name, turn.now, turn.policy)
    _put_node(turn, reported)
    observation = _observe(turn, reported, report, before)
    turn.put(observation)
    first = before is None or before.problem == JUST_STARTED
    if report.problem != JUST_STARTED and (first or (problem_before is None) != (report.problem is None)):
        kind = "node.ready" if report.problem is None else "node.unknown"
        turn.emit(kind, node=name, reason=report.problem)
    on_owner_reports(turn, name, report)
    on_job_reports(turn, name, report.jobs)
    free_clean_gpus(turn, observation, observation.readings)
    remove_missing_gpus(turn, observation)
    _note_answered_request(turn, observation)
    turn.answer(reported.cause, None)


def _job_elsewhere(ledger: Ledger, node: str, report: NodeReport) -> JobElsewhere | None:
    """A job of the node that runs there, and of which the worker has no record."""
    if not report.jobs_elsewhere:
        return None
    live = {(job_id, ledger.live_jobs[job_id].job.attempts) for job_id in ledger.job_index.of_node.get(node, ())}
    known = {(job.job_id, job.attempt) for job in report.jobs}
    return next((one for one in report.jobs_elsewhere if (one.job_id, one.attempt) in live - known), None)


def _take_partial(turn: Turn, reported: NodeReported, report: NodeReport, before: NodeObservation) -> None:
    """Take in some GPUs alone, read at once after their leases have ended. It proves nothing of any other GPU, and does
    not answer the request for a reading: the next report does. Where it adds to no whole reading, nothing is taken in.
    """
    begun_at_s = reported.begun_at_s
    readable = report.problem is None and before.problem is None and before.observed_at_s is not None
    if begun_at_s is None or not readable or before.worker_id != report.worker_id:
        return
    shown = {
        uuid: one
        for uuid, one in _readings(turn, reported.node, report).items()
        if uuid in report.reread and uuid in before.readings
    }
    observation = replace(
        before,
        reported_at_s=turn.now.mono_s,
        reread_at_s=before.reread_at_s | dict.fromkeys(shown, begun_at_s),
        readings=before.readings | shown,
        newest_begun_at_s=begun_at_s,
        answers_request=False,
    )
    observation = replace(observation, gpus=before.gpus | observe_shown_gpus(turn, observation, shown))
    if not before.leaving:
        observation.find_clear(before, shown)
    turn.put(observation)
    free_clean_gpus(turn, observation, shown)


def _begun_at_s(reported: NodeReported) -> float | None:
    return reported.observed_at_s if reported.begun_at_s is None else reported.begun_at_s


def _is_overtaken(before: NodeObservation | None, report: NodeReport, reported: NodeReported) -> bool:
    """True for a reading that was begun before one that has been taken in already, or a start that was reported."""
    begun_at_s = _begun_at_s(reported)
    if before is not None and before.worker_id == report.worker_id and report.problem == JUST_STARTED:
        return before.problem != JUST_STARTED
    return (
        before is not None
        and report.problem is None
        and begun_at_s is not None
        and begun_at_s < before.newest_begun_at_s
    )


def _observe(turn: Turn, reported: NodeReported, report: NodeReport, before: NodeObservation | None) -> NodeObservation:
    """The node's observation after this report; brings the ledger's list of GPUs up to date first."""
    name, begun_at_s, observed_at_s = reported.node, _begun_at_s(reported), reported.observed_at_s
    limit_s = min(max(report.reading_limit_s, 0.0), MAX_READING_S)
    newest_begun_at_s = before.newest_begun_at_s if before is not None else float("-inf")
    readings: dict[str, GpuReading] = {}
    if readable := report.problem is None:
        readings = _readings(turn, name, report)
        _put_gpus(turn, name, readings, report.claimed_elsewhere, reported.may_take_over)
    observation = NodeObservation(
        node=name,
        worker_id=report.worker_id,
        reported_at_s=turn.now.mono_s,
        observed_at_s=observed_at_s if readable else None,
        reread_at_s=dict.fromkeys(report.reread, begun_at_s) if readable and begun_at_s is not None else {},
        newest_begun_at_s=begun_at_s if readable and begun_at_s is not None else newest_begun_at_s,
        answers_request=readable
        and observed_at_s is not None
        and observed_at_s > turn.requested_readings.get(name, float("inf")),
        problem=report.problem,
        readings=readings,
        links=report.links if readable else (),
        topology_cache=TopologyCache() if before is None else before.topology_cache,
        claimed_elsewhere={one.device.uuid: one.reason for one in report.claimed_elsewhere},
        ports_in_use=frozenset(report.ports_in_use),
        ports_reserved=_ports_reserved(report, before),
        read_s=report.read_s,
        reading_limit_s=limit_s,
        silence_s=min(max(report.hold_s, 0.0), MAX_READING_S) + limit_s + REPORT_MARGIN_S,
        gpus=before.gpus if before is not None else {},
        realm=report.realm,
        worker_version=report.worker_version,
        address=report.address,
        interface=report.interface,
        sends_logs=report.sends_logs,
        available_until_s=_available_until_s(turn, report, before),
        leaving=report.leaving,
        takes_gangs=report.takes_gangs,
    )
    if not readable or (
        report.repeated
        and before is not None
        and begun_at_s == before.newest_begun_at_s
        and readings == before.readings
        and before.gpus.keys() == set(turn.ledger.fleet.gpus_of_node.get(name, ()))
    ):
        return observation  # what a reading shows is learnt once, not again with each report that repeats it
    watches = observe_gpus(turn, observation)
    return observation if watches == observation.gpus else replace(observation, gpus=watches)


def _available_until_s(turn: Turn, report: NodeReport, before: NodeObservation | None) -> float | None:
    """When the node goes; as before where the report says the same but for what it took on its way."""
    if report.available_s is None or not report.available_s <= MAX_AVAILABLE_S:  # NaN is none either
        return None
    until_s = turn.now.mono_s + max(0.0, report.available_s)
    known = None if before is None else before.available_until_s
    return known if known is not None and 0.0 <= until_s - known < AVAILABLE_JITTER_S else until_s


def _readings(turn: Turn, node: str, report: NodeReport) -> dict[str, GpuReading]:
    """By UUID: what a report shows of each GPU."""
    return {
        one.uuid: marked if (marked := mark_bystanders(one, turn.policy)).node == node else replace(marked, node=node)
        for one in report.gpus
    }


def _ports_reserved(report: NodeReport, before: NodeObservation | None) -> tuple[int, ...]:
    """In order: the ports that a report names, as far as leases may have them."""
    if before is not None and report.ports_reserved == before.ports_reserved:
        return before.ports_reserved  # as nearly always
    return tuple(sorted({port for port in report.ports_reserved if port in LEASE_PORTS}))


def _note_answered_request(turn: Turn, observation: NodeObservation) -> None:
    if observation.answers_request:
        # A reading that took too long to count is requested again by the lease requests that lack it.
        del turn.requested_readings[observation.node]
    elif observation.problem is not None:
        # The worker has no reading, and reports by itself when it has one. Asked again at once for as long as it is
        # paused, or its driver is away, it would do nothing but answer.
        turn.requested_readings.pop(observation.node, None)


def _put_node(turn: Turn, reported: NodeReported) -> None:
    report, known = reported.report, turn.ledger.nodes.get(reported.node)
    seen_at = None if known is None else known.seen_at
    if seen_at is None or abs((turn.now.at - seen_at).total_seconds()) > SEEN_INTERVAL_S:
        seen_at = turn.now.at
    if known is None:
        known = NodeRecord(name=reported.node, host=report.host)
    elif NODE_VALUES(known) == NODE_VALUES(report) and known.seen_at is seen_at:
        return  # as nearly always
    turn.put(
        replace(
            known,
            host=report.host,
            driver_version=report.driver_version,
            simulated=report.simulated,
            realm=report.realm,
            seen_at=seen_at,
        )
    )


def _put_gpus(
    turn: Turn, node: str, readings: dict[str, GpuReading], claimed: tuple[ClaimedGpu, ...], may_take_over: bool
) -> None:
    """Bring the ledger's list of the node's GPUs up to date. One that is missing is forgotten only after a while, see
    `remove_missing_gpus`. `claimed`: those of another daemon's ledger. `may_take_over`: also abandoned ones of other
    nodes."""
    for reading in readings.values():
        known = turn.ledger.gpus.get(reading.uuid)
        if known is not None and DEVICE_VALUES(known.device) == DEVICE_VALUES(reading):
            continue  # as nearly always
        device = Device(**{name: getattr(reading, name) for name in DEVICE_FIELDS})
        if known is None:
            turn.put(GpuRecord(device=device))
        elif known.device.node == node or (may_take_over and _is_abandoned(turn, known)):
            turn.put(replace(known, device=device))
    for device in (replace(one.device, node=node) for one in claimed):
        known = turn.ledger.gpus.get(device.uuid)
        if known is None or (known.device.node == node and known.device != device):
            turn.put(GpuRecord(device=device) if known is None else replace(known, device=device))


def _is_abandoned(turn: Turn, gpu: GpuRecord) -> bool:
    """True when a GPU may move to another node: no lease holds it, and the node that showed it is silent, or says that
    another worker has claimed it."""
    unheld, node = gpu.lease_id is None or gpu.draining, gpu.device.node
    observation = turn.ledger.node_observations.get(node)
    claimed = observation is not None and gpu.device.uuid in observation.claimed_elsewhere
    return unheld and (claimed or node_problem(turn.ledger, node, turn.now, turn.policy) is not None)


def desired_state(
    ledger: Ledger,
    node: str,
    ticket: int,
    daemon_address: str | None = None,
    log_requests: tuple[LogRequest, ...] = (),
    database_id: str | None = None,
) -> DesiredState:
    """Everything that should be true on a node. What the ledger does not know of it is given."""
    held: dict[str, list[GpuRecord]] = {}
    if node in ledger.fleet.holders_of_node:
        for gpu in ledger.gpus_on(node):
            if gpu.lease_id is not None:
                held.setdefault(gpu.lease_id, []).append(gpu)
    leases = tuple(_node_lease(ledger, node, ledger.leases[lease_id], gpus) for lease_id, gpus in held.items())
    simulated = (known := ledger.nodes.get(node)) is not None and known.simulated
    jobs = tuple(
        job_order(ledger, ledger.live_jobs[job_id], node, simulated=simulated)
        for job_id in ledger.job_index.of_node.get(node, ())
        if not ledger.live_jobs[job_id].job.members or takes_part(ledger, node)
    )
    paused = node_mode(ledger, node) is NodeMode.PAUSED
    owners = tuple(ledger.watched_owners.get(node, ()))
    return DesiredState(
        ticket=ticket,
        takes_partial=True,
        database_id=database_id,
        daemon_address=daemon_address,
        leases=leases,
        paused=paused,
        jobs=jobs,
        owners=owners,
        log_requests=log_requests,
    )


def _node_lease(ledger: Ledger, node: str, record: LeaseRecord, gpus: list[GpuRecord]) -> NodeLease:
    lease, known = record.lease, ledger.nodes.get(node)
    # Who submitted a job does not run on its GPUs, and a pid means nothing in another realm or on another host.
    watched, seen = record.watched_owner, ledger.node_observations.get(node)
    if watched is not None and seen is not None and seen.realm is not None:
        same_place = watched.realm == seen.realm
    else:
        same_place = known is not None and lease.holder.host == known.host
    here = lease.job_id is None and same_place
    job = None if lease.job_id is None else ledger.jobs.get(lease.job_id)
    # GPUs that a lease has given back, see `core.elastic_jobs`. Its job goes on, perhaps under another worker of this
    # host, so what is left of it is not to be ended by the marker of the lease alone.
    given_back = lease.state is not LeaseState.ENDED and all(gpu.draining for gpu in gpus)
    return NodeLease(
        id=lease.id,
        state=LeaseState.ENDED if given_back else lease.state,
        gpus=tuple(gpu.device.uuid for gpu in gpus),
        owner_pid=lease.holder.owner_pid if here else None,
        owner_start_ticks=watched.owner.start_ticks if here and watched else None,
        owner_user=watched.owner.user if here and watched else None,
        job_id=None if given_back else lease.job_id,
        user=lease.holder.user,
        uid=None if job is None else job.uid,
    )
