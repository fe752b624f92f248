"""What a node reports, and what it is told."""

from __future__ import annotations

from dataclasses import replace

from gpulease.errors import NotAllowed
from gpulease.exchange import JUST_STARTED, DesiredState, JobOrder, NodeLease
from gpulease.model import Device, GpuReading, NodeMode

from .administration import while_paused
from .gpu import is_silent, mode_of, node_problem, tell_apart
from .happenings import NodeReported
from .job import on_job_reports
from .ledger import GpuGone, GpuRecord, LeaseRecord, Ledger, NodeGone, NodeRecord, Sighting
from .owners import on_owner_reports
from .remains import free_clean
from .turn import Turn
from .watch import watch

MAX_READING_S = 120.0
"""No worker may take longer for a reading, or hold its peace for longer because of one."""
MARGIN_S = 0.5
"""What a report may be late, beside its hold and its reading, before the node counts as silent."""
SEEN_S = 24 * 3600.0
"""How often it is recorded that a node is still there."""


def on_reported(turn: Turn, reported: NodeReported) -> None:
    """Take in a node's full view: its GPUs, its jobs. Frees draining GPUs that it shows clean."""
    report, name = while_paused(turn.ledger, reported.node, reported.report), reported.node
    before = turn.ledger.sightings.get(name)
    silent = before is None or is_silent(before, turn.now, turn.policy)
    if before is not None and before.worker_id != report.worker_id and not silent:
        detail = f"Another worker ({before.worker_id}) reports for node {name}."
        turn.answer(reported.cause, NotAllowed(detail, remedy="Stop one of them, or give this one another --node."))
        return
    observed_at_s = reported.observed_at_s
    begun_at_s = observed_at_s if reported.begun_at_s is None else reported.begun_at_s
    newest_s = before.newest_s if before is not None else float("-inf")
    if report.problem is None and begun_at_s is not None and begun_at_s < newest_s:
        # It came late, after one that is newer; the next one says everything again.
        turn.answer(reported.cause, None)
        return
    problem_before = node_problem(turn.ledger, name, turn.now, turn.policy)
    _put_node(turn, reported)
    readings = {one.uuid: replace(tell_apart(one, turn.policy), node=name) for one in report.gpus}
    if report.problem is None:
        _put_gpus(turn, name, readings)
    limit_s = min(max(report.reading_limit_s, 0.0), MAX_READING_S)
    sighting = Sighting(
        node=name,
        worker_id=report.worker_id,
        reported_at_s=turn.now.mono_s,
        observed_at_s=None,
        problem=report.problem,
        ports_in_use=frozenset(report.ports_in_use),
        newest_s=newest_s,
        read_s=report.read_s,
        reading_limit_s=limit_s,
        silence_s=min(max(report.hold_s, 0.0), MAX_READING_S) + limit_s + MARGIN_S,
        watches=before.watches if before is not None else {},
    )
    if report.problem is None:
        sighting = replace(
            sighting,
            observed_at_s=observed_at_s,
            reread_at_s={} if begun_at_s is None else dict.fromkeys(report.reread, begun_at_s),
            readings=readings,
            links=report.links,
            newest_s=newest_s if begun_at_s is None else begun_at_s,
            answers=observed_at_s is not None and observed_at_s > turn.wanted.get(name, float("inf")),
        )
        sighting = replace(sighting, watches=watch(turn, sighting))
    turn.put(sighting)
    first = before is None or before.problem == JUST_STARTED
    if report.problem != JUST_STARTED and (first or (problem_before is None) != (report.problem is None)):
        kind = "node.ready" if report.problem is None else "node.unknown"
        turn.event(kind, node=name, reason=report.problem)
    on_owner_reports(turn, name, report)
    on_job_reports(turn, name, report.jobs)
    free_clean(turn, sighting)
    if sighting.answers:
        del turn.wanted[name]  # one that took too long to count is asked for again by whom it lacks
    elif report.problem is not None:
        # It has answered that there is none to be had, and says by itself when there is: asked again at once for as
        # long as it is paused, or its driver is away, it would do nothing but answer.
        turn.wanted.pop(name, None)
    turn.answer(reported.cause, None)


def _put_node(turn: Turn, reported: NodeReported) -> None:
    report, known = reported.report, turn.ledger.nodes.get(reported.node)
    seen_at = None if known is None else known.seen_at
    if seen_at is None or abs((turn.now.at - seen_at).total_seconds()) > SEEN_S:
        seen_at = turn.now.at
    node = NodeRecord(
        name=reported.node,
        host=report.host,
        driver_version=report.driver_version,
        simulated=report.simulated,
        mode=mode_of(turn.ledger, reported.node),
        seen_at=seen_at,
    )
    if known != node:
        turn.put(node)


def forget_nodes(turn: Turn) -> None:
    """Forget nodes that have reported nothing for `node_lifetime_s`, with their GPUs: hosts whose names do not come
    back, such as containers. One that an administrator has taken out of use stays, as does one that is referred to;
    should a forgotten one come back, it is a new one."""
    oldest_s, now = turn.policy.node_lifetime_s, turn.now
    for node in list(turn.ledger.nodes.values()):
        seen = turn.ledger.sightings.get(node.name)
        if seen is not None and now.mono_s - seen.reported_at_s < oldest_s:
            continue
        if node.seen_at is None:
            turn.put(replace(node, seen_at=now.at))  # of an earlier version: its time begins now
        elif (now.at - node.seen_at).total_seconds() > oldest_s + SEEN_S and not _referred_to(turn.ledger, node):
            for gpu in [gpu for gpu in turn.ledger.gpus.values() if gpu.device.node == node.name]:
                turn.put(GpuGone(gpu.device.uuid))
            turn.put(NodeGone(node.name))
            turn.event("node.forgotten", node=node.name)


def _referred_to(ledger: Ledger, node: NodeRecord) -> bool:
    if node.mode is not NodeMode.ACTIVE or ledger.watched.get(node.name):
        return True
    gpus = (gpu for gpu in ledger.gpus.values() if gpu.device.node == node.name)
    return any(gpu.lease_id is not None or gpu.cordoned for gpu in gpus)


def _put_gpus(turn: Turn, node: str, readings: dict[str, GpuReading]) -> None:
    """Bring the ledger's list of the node's GPUs up to date. One that is held stays, whatever the node shows, and
    so does one that is cordoned, lest it come back as one that is not."""
    for reading in readings.values():
        device = Device(
            uuid=reading.uuid,
            node=node,
            index=reading.index,
            pci_bus_id=reading.pci_bus_id,
            name=reading.name,
            memory_total_bytes=reading.memory_total_bytes,
        )
        known = turn.ledger.gpus.get(reading.uuid)
        if known is None:
            turn.put(GpuRecord(device=device))
        elif known.device != device and (known.device.node == node or _is_abandoned(turn, known)):
            turn.put(replace(known, device=device))
    gone = [
        gpu.device.uuid
        for gpu in turn.ledger.gpus.values()
        if gpu.device.node == node and gpu.device.uuid not in readings and gpu.lease_id is None and not gpu.cordoned
    ]
    for uuid in gone:
        turn.put(GpuGone(uuid))


def _is_abandoned(turn: Turn, gpu: GpuRecord) -> bool:
    """True when a GPU may move to another node: nobody holds it, and the node that showed it is silent."""
    unheld = gpu.lease_id is None or gpu.draining
    return unheld and node_problem(turn.ledger, gpu.device.node, turn.now, turn.policy) is not None


def desired_state(ledger: Ledger, node: str, ticket: int) -> DesiredState:
    """Everything that should be true on a node."""
    held: dict[str, list[GpuRecord]] = {}
    for gpu in ledger.gpus.values():
        if gpu.lease_id is not None and gpu.device.node == node:
            held.setdefault(gpu.lease_id, []).append(gpu)
    leases = tuple(_node_lease(ledger, node, ledger.leases[lease_id], gpus) for lease_id, gpus in held.items())
    simulated = (known := ledger.nodes.get(node)) is not None and known.simulated
    jobs = tuple(
        JobOrder(
            job_id=record.job.id,
            attempt=record.job.attempts,
            lease_id=record.job.lease_id,
            uid=record.uid,
            gid=record.gid,
            gpus=tuple(device.uuid for device in record.job.gpus),
            indices=tuple(device.index for device in record.job.gpus),
            simulated=simulated,
            spec=record.spec,
            env=ledger.leases[record.job.lease_id].lease.env,
            stop=record.cancelled_at is not None,
            grace_s=record.grace_s,
        )
        for record in ledger.live_jobs.values()
        if record.job.gpus and record.job.gpus[0].node == node
    )
    paused = mode_of(ledger, node) is NodeMode.PAUSED
    owners = tuple(ledger.watched.get(node, ()))
    return DesiredState(ticket=ticket, leases=leases, jobs=jobs, paused=paused, owners=owners)


def _node_lease(ledger: Ledger, node: str, record: LeaseRecord, gpus: list[GpuRecord]) -> NodeLease:
    lease, known = record.lease, ledger.nodes.get(node)
    # Who submitted a job does not run on its GPUs, and a pid means nothing on another host.
    here = lease.job_id is None and known is not None and lease.holder.host == known.host
    return NodeLease(
        id=lease.id,
        state=lease.state,
        gpus=tuple(gpu.device.uuid for gpu in gpus),
        owner_pid=lease.holder.owner_pid if here else None,
        owner_start_ticks=record.watched.owner.start_ticks if here and record.watched else None,
        job_id=lease.job_id,
    )
