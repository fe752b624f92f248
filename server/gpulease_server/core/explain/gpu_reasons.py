"""Why a GPU is not free, as a phrase: a GPU's `reason`, an obstacle and a problem of a lease are made of it."""

from __future__ import annotations

from gpulease_protocol.model import GpuReading, GpuState, JobState, NodeMode
from gpulease_protocol.node_protocol import PAUSED
from gpulease_server.core.draining import describe_leftovers
from gpulease_server.core.gpu import (
    claimed_elsewhere,
    conflicting_processes,
    node_mode,
    node_problem,
    reading_of,
)
from gpulease_server.core.gpu_state import occupants
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import GpuRecord, Instant
from gpulease_server.core.wording import describe_processes, gibibytes

_MODES = {NodeMode.DRAINING: "is being drained", NodeMode.PAUSED: "is paused"}


def why_not_free(ledger: Ledger, gpu: GpuRecord, state: GpuState, now: Instant, policy: Policy) -> str | None:
    """What follows "GPU 0 of gpubox is ...", such as "held by lease-1 (user ann)"; None when the GPU is free."""
    reading = reading_of(ledger, gpu)
    who = _describe_lease(ledger, gpu.lease_id)
    match state:
        case GpuState.UNKNOWN:
            problem = node_problem(ledger, gpu.device.node, now, policy) or claimed_elsewhere(ledger, gpu)
            if node_mode(ledger, gpu.device.node) is NodeMode.PAUSED:
                more = (problem or "").removeprefix(PAUSED)
                return f"{on_node_out_of_use(ledger, gpu.device.node)}{more}"
            return f"unknown: {problem or 'its node no longer shows it'}"
        case GpuState.UNHEALTHY:
            return f"unhealthy: {reading.health if reading else 'lost'}"
        case GpuState.PROHIBITED:
            return "in compute mode PROHIBITED: nvidia-smi -c DEFAULT allows processes again"
        case GpuState.LEASED:
            others = describe_processes(conflicting_processes(ledger, gpu), policy)
            used = f", and also used by {others}, outside that lease" if others else ""
            return f"held by {who}{_stopping(ledger, gpu.lease_id)}{used}"
        case GpuState.DRAINING:
            return f"being cleaned after {who}{describe_leftovers(ledger, gpu, policy)}"
        case GpuState.CORDONED:
            if gpu.cordoned:
                return "cordoned by an administrator"
            return on_node_out_of_use(ledger, gpu.device.node)
        case GpuState.FOREIGN:
            return _why_foreign(reading, policy)
        case _:
            return None


def on_node_out_of_use(ledger: Ledger, name: str) -> str:
    """What an administrator has made of a node, who that is, and why: "on node a, which is being drained by ada: new
    driver"."""
    node = ledger.nodes[name]
    if node.mode is NodeMode.ACTIVE:
        return f"on node {name}, which leaves"
    by = f" by {node.mode_by}" if node.mode_by else ""
    return f"on node {name}, which {_MODES[node.mode]}{by}{f': {node.mode_reason}' if node.mode_reason else ''}"


def _why_foreign(reading: GpuReading | None, policy: Policy) -> str:
    if reading is None or occupants(reading):
        return f"in use without a lease by {_processes(reading, policy)}"
    if reading.hidden_use:
        return (
            "in use, as memory or utilization shows, by processes that its worker cannot see; start the worker in"
            " the host's PID namespace (docker run --pid=host); see docs/operations.md, also for WSL2"
        )
    used = reading.memory_used_bytes
    amount = "an unknown amount" if used is None else gibibytes(used)
    return f"being left by a process without a lease: no process is left, but {amount} of memory is in use"


def why_reserved(ledger: Ledger, lease_id: str, which: str = "") -> str:
    """The same for a free GPU that is held for a waiting request."""
    return f"held for {which}{_describe_lease(ledger, lease_id)}"


def _describe_lease(ledger: Ledger, lease_id: str | None) -> str:
    record = ledger.leases.get(lease_id or "")
    if record is None:
        return lease_id or "no lease"
    holder = record.lease.holder
    parts = [
        f"user {holder.user}" if holder.user else "",
        f"pid {holder.owner_pid}" if holder.owner_pid else "",
        record.lease.job_id or "",
        f'"{holder.label}"' if holder.label else "",
    ]
    known = ", ".join(filter(None, parts))
    return f"{lease_id}{f' ({known})' if known else ''}"


def _stopping(ledger: Ledger, lease_id: str | None) -> str:
    """That the job of a lease is stopping, and what delays it; empty when it is not."""
    record = ledger.leases.get(lease_id or "")
    known = ledger.jobs.get(record.lease.job_id or "") if record is not None else None
    if known is None or known.job.state is not JobState.STOPPING:
        return ""
    return f" and its job is stopping: {(known.job.reason or 'no reason is known').rstrip('.')}"


def _processes(reading: GpuReading | None, policy: Policy) -> str:
    if reading is None:
        return ""
    return describe_processes(occupants(reading), policy)
