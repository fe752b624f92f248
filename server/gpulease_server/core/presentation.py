"""Nouns as strangers see them: the records, completed by what follows from the moment."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime

from gpulease_protocol.model import Device, Gpu, GpuReading, GpuState, Job, Lease, LeaseState, Node, NodeState, Priority
from gpulease_protocol.obstacle_groups import gpu_ranges
from gpulease_server.core.explain.gpu_reasons import why_not_free, why_reserved
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gpu import (
    activity_of,
    conflicting_processes,
    is_cordoned,
    node_problem,
    observed_at,
    reading_of,
    state_of,
)
from gpulease_server.core.gpu_state import state_by_report
from gpulease_server.core.kept_leases import kept_now
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.node_topology import nvlink_islands
from gpulease_server.core.order import Positions, position
from gpulease_server.core.policy import Policy
from gpulease_server.core.reclaim_rule import reclaim_problems
from gpulease_server.core.records import GpuRecord, Instant, JobRecord, LeaseRecord, NodeRecord
from gpulease_server.core.reservation_view import current_reservations
from gpulease_server.core.timestamps import wall_clock
from gpulease_server.core.token_budgets import last_moment_s
from gpulease_server.core.wording import describe_processes

READING_FIELDS = [name for name in GpuReading.__dataclass_fields__ if name not in Device.__dataclass_fields__]
"""The fields of a GPU that come from its last reading."""
ASK_AGAIN_S = 2.0
"""How long a renewal lasts at least while a notice has not been acted on."""
JOB_VIEW_FIELDS = (
    *(
        "gpu_count",
        "nodes",
        "max_nodes",
        "timeout_s",
        "retries",
        "fence_s",
        "priority",
        "preemptible",
        "working_directory",
        "log_directory",
    ),
)
"""The fields of a job that come from the rest of its record."""
PEER_WARNINGS = {
    "drain_p2p": "the driver advises against exchanging data between it and other GPUs",
    "fabric_not_ready": "it is not on the host's NVLink fabric, and reaches the others over PCIe, if at all",
}
"""Warnings of a GPU that concern a holder of several, in words."""


def lease_view(
    ledger: Ledger, record: LeaseRecord, now: Instant, policy: Policy, positions: Positions | None = None
) -> Lease:
    """A lease with its place in the queue, the time it expires, and what is wrong with its GPUs. `positions`: for one
    of many leases."""
    lease, deadline = record.lease, ledger.deadlines.get(record.lease.id)
    if lease.state is LeaseState.ENDED:
        return lease if lease.kept is None else replace(lease, kept=None)
    # One that is past its deadline is spared, see `liveness.is_spared`: no time limit is known.
    expires_at = None if deadline is None or deadline <= now.mono_s else wall_clock(now, deadline)
    end_s, notice = last_moment_s(ledger, record, now), ledger.reclaims.notices.get(lease.id)
    ends_at = None if end_s is None else wall_clock(now, end_s)
    return replace(
        lease,
        expires_at=expires_at if expires_at is None or ends_at is None else min(expires_at, ends_at),
        ends_at=ends_at,
        position=position(ledger, record) if positions is None else positions.of(record),
        kept=kept_now(record, now),
        preempt_at=_preempt_at(ledger, lease),
        reclaim_at=None if notice is None or notice.at_s is None else wall_clock(now, notice.at_s),
        ends_in_s=_ends_in_s(ledger, lease, now, end_s),
        problems=lease_problems(ledger, lease, now, policy) + reclaim_problems(ledger, lease.id, now),
    )


def _preempt_at(ledger: Ledger, lease: Lease) -> datetime | None:
    """When a lease is to have ended so that a request that waits can start; None for any other."""
    job = ledger.live_jobs.get(lease.job_id or "")
    if job is not None and job.job.lease_id == lease.id:
        return job.job.preempt_at
    waiting = ledger.preemptions.get(ledger.preempting.get(lease.id, ""))
    return None if waiting is None else waiting.preempt_at


def _ends_in_s(ledger: Ledger, lease: Lease, now: Instant, end_s: float | None) -> float | None:
    """How long a lease still lasts, however often it is renewed; None for no end. In tenths of a second. `end_s`: when
    its time or budget ends. A notice may be withdrawn up to its moment, and while it is acted on. So a holder
    that reaches the daemon is told to ask again: it must not give up a lease that goes on."""
    if lease.job_id is not None:
        return None
    notice, waiting = ledger.reclaims.notices.get(lease.id), ledger.preemptions.get(ledger.preempting.get(lease.id, ""))
    if notice is None and waiting is None and end_s is None:
        return None  # as nearly always
    told = (None if notice is None else notice.at_s, None if waiting is None else waiting.end_s)
    told_s = [max(at_s, now.mono_s + ASK_AGAIN_S) for at_s in told if at_s is not None]
    first_s = min([*told_s, math.inf if end_s is None else end_s])
    return None if math.isinf(first_s) else max(0.0, math.floor((first_s - now.mono_s) * 10) / 10)


def lease_problems(ledger: Ledger, lease: Lease, now: Instant, policy: Policy) -> tuple[str, ...]:
    """What the last readings show to be wrong with the GPUs of an active lease; one sentence for each node or GPU."""
    if lease.state is not LeaseState.ACTIVE:
        return ()
    found: list[str] = []
    unknown: dict[str, bool] = {}  # by node: looked at once, because every renewal is answered with this
    for gpu in ledger.held_by(lease):
        node = gpu.device.node
        if node not in unknown:
            unknown[node] = node_problem(ledger, node, now, policy) is not None
            if unknown[node]:  # one sentence for all of its GPUs: after a restart of the daemon each holder is told
                indices = [held.device.index for held in ledger.held_by(lease) if held.device.node == node]
                why = why_not_free(ledger, gpu, GpuState.UNKNOWN, now, policy)
                found.append(f"{gpu_ranges(indices, node)} {'is' if len(indices) == 1 else 'are'} {why}.")
        if unknown[node]:
            continue
        observation, reading = ledger.node_observations.get(node), reading_of(ledger, gpu)
        state = state_by_report(gpu, observation, ledger.nodes.get(node))
        if state is GpuState.LEASED and reading is not None and not (reading.processes or reading.warnings):
            continue  # as nearly always
        name = f"GPU {gpu.device.index} of {node}"
        if state is not GpuState.LEASED:
            found.append(f"{name} is {why_not_free(ledger, gpu, state, now, policy)}.")
        elif others := conflicting_processes(ledger, gpu):
            found.append(f"{name} is also used by {describe_processes(others, policy)}, outside this lease.")
        elif len(lease.gpus) > 1 and reading is not None:
            warned = (PEER_WARNINGS[word] for word in reading.warnings if word in PEER_WARNINGS)
            found += [f"{name} is best used alone: {why}." for why in warned]
    return tuple(found)


def job_view(record: JobRecord) -> Job:
    """A job with what its holder asked for and where its logs are."""
    return replace(
        record.job,
        gpu_count=record.spec.gpus * record.spec.nodes,
        nodes=record.spec.nodes if record.spec.nodes > 1 else None,
        max_nodes=record.spec.max_nodes,
        timeout_s=record.spec.timeout_s,
        retries=record.spec.retries,
        fence_s=record.spec.fence_s,
        priority=record.spec.priority,
        preemptible=record.spec.preemptible or record.spec.priority is Priority.SCAVENGE,
        working_directory=record.spec.working_directory,
        log_directory=record.log_directory,
    )


class GpuList:
    """Every GPU, by node and index, at one moment: what the ledger becomes later does not show. What is held is found
    out once for all of them."""

    def __init__(self, ledger: Ledger, now: Instant, policy: Policy) -> None:
        self.now, self.policy = now, policy
        self.reserved_for = current_reservations(ledger, now, policy).by_uuid
        self.nodes = {node: list(gpus.values()) for node, gpus in ledger.fleet.gpus_of_node.items()}
        self.ledger = Ledger(
            leases=ledger.leases.copy(),
            jobs=ledger.jobs.copy(),
            gpus=ledger.gpus.copy(),
            nodes=ledger.nodes.copy(),
            node_observations=ledger.node_observations.copy(),
            draining_since=ledger.draining_since.copy(),
        )

    def records(self) -> Iterator[GpuRecord]:
        """The GPUs in their order."""
        for node in sorted(self.nodes):
            yield from sorted(self.nodes[node], key=lambda gpu: gpu.device.index)

    def view(self, gpu: GpuRecord) -> Gpu:
        """One of them as it is shown."""
        return gpu_view(self.ledger, gpu, self.now, self.policy, self.reserved_for)


def gpu_view(
    ledger: Ledger, gpu: GpuRecord, now: Instant, policy: Policy, reserved_for: Mapping[str, str] | None = None
) -> Gpu:
    """A GPU: its last reading, and what the ledger says of it. A stale reading is not shown.

    `reserved_for`: the waiting request that a free GPU is held for, by UUID, where that is known already.
    """
    state = state_of(ledger, gpu, now, policy)
    reason, waiting = why_not_free(ledger, gpu, state, now, policy), None
    if state is GpuState.FREE:
        reserved_for = current_reservations(ledger, now, policy).by_uuid if reserved_for is None else reserved_for
        waiting = reserved_for.get(gpu.device.uuid)
        reason = None if waiting is None else why_reserved(ledger, waiting)
    reading = None if state is GpuState.UNKNOWN else reading_of(ledger, gpu)
    seen_at_s = observed_at(ledger.node_observations.get(gpu.device.node), gpu.device.uuid)
    holding = ledger.leases.get(gpu.lease_id or "")
    holder = holding.lease.holder if holding else None
    device = gpu.device
    return Gpu(
        uuid=device.uuid,
        node=device.node,
        index=device.index,
        pci_bus_id=device.pci_bus_id,
        name=device.name,
        memory_total_bytes=device.memory_total_bytes,
        **({name: getattr(reading, name) for name in READING_FIELDS} if reading else {"health": "unknown"}),
        state=state,
        activity=activity_of(ledger, gpu, reading),
        reason=reason and reason[0].upper() + reason[1:],
        lease_id=gpu.lease_id,
        holder=holder,
        cordoned=is_cordoned(ledger, gpu),
        observed_at=None if seen_at_s is None else wall_clock(now, seen_at_s),
        reserved_for=waiting,
    )


def node_list(ledger: Ledger, now: Instant, policy: Policy) -> tuple[list[NodeRecord], Callable[[NodeRecord], Node]]:
    """All nodes by name, and how each is shown: as it is at this moment, whatever the ledger becomes later."""
    records = sorted(ledger.nodes.values(), key=lambda node: node.name)
    gpu_counts = {node: len(gpus) for node, gpus in ledger.fleet.gpus_of_node.items()}
    moment = Ledger(nodes=ledger.nodes.copy(), node_observations=ledger.node_observations.copy())
    return records, lambda node: _node_view(moment, node, now, policy, gpu_counts.get(node.name, 0))


def node_view(ledger: Ledger, node: NodeRecord, now: Instant, policy: Policy) -> Node:
    """A node, and whether its readings can be trusted at this moment."""
    return _node_view(ledger, node, now, policy, len(ledger.fleet.gpus_of_node.get(node.name, ())))


def _node_view(ledger: Ledger, node: NodeRecord, now: Instant, policy: Policy, gpu_count: int) -> Node:
    problem = node_problem(ledger, node.name, now, policy)
    observation = ledger.node_observations.get(node.name)
    observed_at_s = observation.observed_at_s if observation else None
    until_s = observation.available_until_s if observation else None
    return Node(
        name=node.name,
        state=NodeState.READY if problem is None else NodeState.UNKNOWN,
        mode=node.mode,
        mode_reason=node.mode_reason,
        mode_by=node.mode_by,
        reason=problem,
        host=node.host,
        gpu_count=gpu_count,
        driver_version=node.driver_version,
        worker_version=observation.worker_version if observation else None,
        address=observation.address if observation else None,
        interface=observation.interface if observation else None,
        simulated=node.simulated,
        observed_at=None if observed_at_s is None else wall_clock(now, observed_at_s),
        links=observation.links if observation else (),
        islands=nvlink_islands(observation.links) if observation else (),
        realm=node.realm,
        available_until=None if until_s is None else wall_clock(now, until_s).replace(microsecond=0),
        leaving=observation.leaving if observation else False,
    )
