"""What a reading changes beside the state of a GPU: conflicts, health, the memory of a free GPU.

Each is told by an event once, when it changes. What was told last is in the node's observation and so in memory only: a
daemon that restarts reports again what still holds.
"""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median_low

from gpulease_protocol.model import GpuReading
from gpulease_server.core.draining import follow_memory, observe_draining
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gpu import observed_at
from gpulease_server.core.gpu_state import occupants
from gpulease_server.core.idle import observe_idle
from gpulease_server.core.records import GpuObservation, GpuRecord, GpuRemoved, NodeObservation
from gpulease_server.core.turn import Turn
from gpulease_server.core.wording import describe_processes

UNOBSERVED = GpuObservation()
FOREIGN_AFTER_S = 10.0
"""How long a GPU is used outside any lease before `gpu.foreign` tells of it: someone's short look is no news."""
BASELINE_READINGS = 9
"""Readings of a free GPU that its baseline is learnt from."""


def observe_gpus(turn: Turn, observation: NodeObservation) -> dict[str, GpuObservation]:
    """The node's watches after this reading, by UUID; with an event for everything that has changed."""
    watches = observe_shown_gpus(turn, observation, observation.readings)
    for uuid in turn.ledger.fleet.gpus_of_node.get(observation.node, ()):
        if uuid not in observation.readings:
            known = observation.gpus.get(uuid, UNOBSERVED)
            since_s = known.missing_since_s if known.missing_since_s is not None else observation.observed_at_s
            claimed = uuid in observation.claimed_elsewhere  # by another worker of its host: it is there
            watches[uuid] = replace(known, missing_since_s=None if claimed else since_s)
    return watches


def observe_shown_gpus(
    turn: Turn, observation: NodeObservation, readings: Mapping[str, GpuReading]
) -> dict[str, GpuObservation]:
    """The watches of the GPUs that these readings of an observation show, by UUID; with an event for each change."""
    watches, gpus = {}, turn.ledger.fleet.gpus_of_node.get(observation.node, {})
    for uuid, reading in readings.items():
        gpu = gpus.get(uuid)
        if gpu is not None:
            known = observation.gpus.get(uuid, UNOBSERVED)
            if _is_free_as_before(gpu, reading, known):
                watches[uuid] = known
                continue
            if known.missing_since_s is not None:
                known = replace(known, missing_since_s=None)
            watches[uuid] = _observe_gpu(
                turn, gpu, reading, known, observed_at(observation, uuid), observation.newest_begun_at_s
            )
    return watches


def _is_free_as_before(gpu: GpuRecord, reading: GpuReading, known: GpuObservation) -> bool:
    """True where a reading changes nothing of what is known: of most GPUs that no lease holds. `_observe_gpu` would
    find the same, for four times the time."""
    used = reading.memory_used_bytes
    return (
        gpu.lease_id is known.lease_id is None
        and not (reading.processes or reading.hidden_use or known.unhealthy or known.memory_awaited)
        and reading.health == "ok"
        and known.missing_since_s is known.foreign_since_s is None
        and (used is None or known.free_bytes.count(used) == BASELINE_READINGS)
    )


def remove_missing_gpus(turn: Turn, observation: NodeObservation) -> None:
    """Forget each GPU that its node has not shown for `gone_after_s`: it was taken out, with all that was on it.

    Until then it is `unknown`, and may be waited for: a driver that restarts leaves out a GPU that it cannot reach for
    a moment. One that an active lease holds stays. So does a cordoned one: it is cordoned when it comes back.
    """
    for uuid, watch in observation.gpus.items():
        if watch.missing_since_s is None or observation.observed_at_s is None:
            continue
        gpu = turn.ledger.gpus[uuid]
        held = gpu.lease_id is not None and not gpu.draining
        kept = gpu.cordoned and not gpu.draining
        if held or kept or observation.observed_at_s - watch.missing_since_s < turn.policy.gone_after_s:
            continue
        _emit(turn, gpu, "gpu.gone", None)
        turn.put(replace(gpu, lease_id=None, draining=False) if gpu.cordoned else GpuRemoved(uuid))


def _observe_gpu(
    turn: Turn,
    gpu: GpuRecord,
    reading: GpuReading,
    known: GpuObservation,
    observed_at_s: float | None,
    begun_at_s: float,
) -> GpuObservation:
    known = _observe_health(turn, gpu, reading, known)
    if gpu.lease_id != known.lease_id:
        # This reading may have been begun before the lease was: its processes are not judged by it.
        _end_foreign(turn, gpu, known)
        known = GpuObservation(
            unhealthy=known.unhealthy,
            lease_id=gpu.lease_id,
            since_s=turn.now.mono_s,
            free_bytes=() if gpu.lease_id or gpu.baseline_bytes is None else (gpu.baseline_bytes,),
        )
    if gpu.lease_id is None:
        return _observe_foreign(turn, gpu, reading, _observe_unheld(turn, gpu, reading, known, observed_at_s))
    known = observe_idle(turn, gpu, reading, known, begun_at_s)
    if observed_at_s is None:
        return known
    if not gpu.draining:
        return known if observed_at_s <= known.since_s else _observe_conflict(turn, gpu, reading, known)
    if observed_at_s > turn.ledger.draining_since[gpu.device.uuid]:
        known = replace(known, strangers=()) if known.strangers else known
        return observe_draining(turn, gpu, reading, known, observed_at_s)
    return known


def _observe_health(turn: Turn, gpu: GpuRecord, reading: GpuReading, known: GpuObservation) -> GpuObservation:
    unhealthy = reading.health != "ok"
    if unhealthy == known.unhealthy:
        return known
    kind, reason = ("gpu.unhealthy", reading.health) if unhealthy else ("gpu.recovered", None)
    _emit(turn, gpu, kind, reason)
    return replace(known, unhealthy=unhealthy)


def _observe_unheld(
    turn: Turn, gpu: GpuRecord, reading: GpuReading, known: GpuObservation, observed_at_s: float | None
) -> GpuObservation:
    """Learn the baseline from a GPU that is neither held nor used.

    A process without a lease leaves its memory behind for a moment, as one with a lease does: the GPU stays foreign
    until its memory is back, or has fallen no further for `retained_memory_s`. Then that is its baseline.
    """
    if reading.health != "ok" or reading.hidden_use:
        return known
    if occupants(reading):
        return replace(known, memory_awaited=True, quiet_since_s=None, lowest_bytes=None)
    used = reading.memory_used_bytes
    if known.memory_awaited:
        if observed_at_s is None:
            return known
        known, back = follow_memory(known, used, observed_at_s, turn.policy), _memory_is_back(gpu, known, used, turn)
        if not back and observed_at_s - (known.quiet_since_s or 0.0) < turn.policy.retained_memory_s:
            return known
        known = replace(known, memory_awaited=False, quiet_since_s=None, lowest_bytes=None)
        known = known if back else replace(known, free_bytes=())
    free_bytes = known.free_bytes if used is None else (*known.free_bytes, used)[-BASELINE_READINGS:]
    return known if free_bytes == known.free_bytes else replace(known, free_bytes=free_bytes)


def _observe_foreign(turn: Turn, gpu: GpuRecord, reading: GpuReading, known: GpuObservation) -> GpuObservation:
    """Tell of a GPU that is used outside any lease, once it has been for a while, and of the end of that."""
    if reading.health != "ok":
        return known
    found = occupants(reading)
    if not (found or reading.hidden_use or known.memory_awaited):
        _end_foreign(turn, gpu, known)
        return known if known.foreign_since_s is None else replace(known, foreign_since_s=None, foreign=False)
    if known.foreign_since_s is None:
        return replace(known, foreign_since_s=turn.now.mono_s)
    if known.foreign or turn.now.mono_s - known.foreign_since_s < FOREIGN_AFTER_S:
        return known
    by = f"used by {describe_processes(found, turn.policy)}, outside any lease" if found else None
    _emit(turn, gpu, "gpu.foreign", by)
    return replace(known, foreign=True)


def _end_foreign(turn: Turn, gpu: GpuRecord, known: GpuObservation) -> None:
    if known.foreign:
        _emit(turn, gpu, "gpu.foreign_over", None)


def _memory_is_back(gpu: GpuRecord, known: GpuObservation, used: int | None, turn: Turn) -> bool:
    """True when a GPU has no more memory in use than while it was free; where that was never seen, hardly any."""
    idle = median_low(known.free_bytes) if known.free_bytes else gpu.baseline_bytes
    if used is None:
        return idle is None  # its driver never told
    return used <= (idle or 0) + turn.policy.memory_tolerance_bytes


def _observe_conflict(turn: Turn, gpu: GpuRecord, reading: GpuReading, known: GpuObservation) -> GpuObservation:
    found = [process for process in occupants(reading) if process.lease_id != gpu.lease_id]
    pids = tuple(sorted(process.pid for process in found))
    if pids and pids != known.strangers:
        _emit(turn, gpu, "gpu.conflict", f"used by {describe_processes(found, turn.policy)}, outside its lease")
    elif known.strangers and not pids:
        _emit(turn, gpu, "gpu.conflict_over", None)
    return replace(known, strangers=pids, leftovers=()) if pids or known.strangers or known.leftovers else known


def baseline_of(observation: NodeObservation | None, gpu: GpuRecord) -> int | None:
    """Memory in use on a GPU that is free; None if unknown.

    The middle one of its last readings: one that still showed the memory of a process that had ended, or already that
    of one to come, does not count. The baseline before the last lease counts as one of them, so that what each lease
    leaves within the tolerance does not add up.
    """
    reading = observation.readings.get(gpu.device.uuid) if observation else None
    if reading is not None and reading.memory_used_bytes is None:
        return None
    known = observation.gpus.get(gpu.device.uuid) if observation else None
    if known is None or known.lease_id is not None or not known.free_bytes:
        return gpu.baseline_bytes  # it was found clean in this very turn, or its memory is not known
    return median_low(known.free_bytes)


def _emit(turn: Turn, gpu: GpuRecord, kind: str, reason: str | None) -> None:
    turn.emit(kind, lease_id=gpu.lease_id, node=gpu.device.node, gpus=(gpu.device.uuid,), reason=reason)
