"""The state of a GPU by its node's last report, whatever time has passed since. `core.gpu` adds the time."""

from __future__ import annotations

from gpulease_protocol.model import ComputeMode, GpuReading, GpuState, NodeMode, Process
from gpulease_server.core.records import GpuRecord, NodeObservation, NodeRecord, awaits_memory


def occupants(reading: GpuReading) -> tuple[Process, ...]:
    """Processes that keep a GPU from others: all but the bystanders."""
    return tuple([process for process in reading.processes if not process.bystander]) if reading.processes else ()


def state_by_report(gpu: GpuRecord, observation: NodeObservation | None, node: NodeRecord | None) -> GpuState:
    """The first state that applies, in the order of `GpuState`."""
    uuid = gpu.device.uuid
    reading = None if observation is None else observation.readings.get(uuid)
    if observation is None or observation.problem is not None or reading is None:
        return GpuState.UNKNOWN
    if reading.health != "ok":
        return GpuState.UNHEALTHY
    if reading.compute_mode is ComputeMode.PROHIBITED:
        return GpuState.PROHIBITED
    if gpu.lease_id is not None:
        return GpuState.DRAINING if gpu.draining else GpuState.LEASED
    if is_cordoned(gpu, node) or observation.leaving:
        return GpuState.CORDONED
    used = occupants(reading) or reading.hidden_use or awaits_memory(observation, uuid)
    return GpuState.FOREIGN if used else GpuState.FREE


def is_cordoned(gpu: GpuRecord, node: NodeRecord | None) -> bool:
    """True when an administrator has taken the GPU, or all of its node, out of use."""
    return gpu.cordoned or (node is not None and node.mode is not NodeMode.ACTIVE)
