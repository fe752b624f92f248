"""What a reading changes beside the state of a GPU: conflicts, health, the memory of a free GPU.

Each is told by an event once, when it changes. What was told last is in the node's sighting and so in memory only: a
daemon that starts anew tells again what is still so.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import median_low

from gpulease.model import GpuReading

from .gpu import observed_at, occupants
from .ledger import GpuRecord, GpuWatch, Sighting
from .remains import named, watch_draining
from .turn import Turn

BASELINE_READINGS = 9
"""Readings of a free GPU that its baseline is learnt from."""


def watch(turn: Turn, sighting: Sighting) -> dict[str, GpuWatch]:
    """The node's watches after this reading, by UUID; with an event for everything that has changed."""
    watches = {}
    for uuid, reading in sighting.readings.items():
        gpu = turn.ledger.gpus.get(uuid)
        if gpu is not None and gpu.device.node == sighting.node:
            known = sighting.watches.get(uuid, GpuWatch())
            shown = replace(known, missing_since_s=None)
            watches[uuid] = _watched(turn, gpu, reading, shown, observed_at(sighting, uuid))
    for uuid in turn.ledger.draining_since.keys() - sighting.readings.keys():
        if turn.ledger.gpus[uuid].device.node == sighting.node:
            known = sighting.watches.get(uuid, GpuWatch())
            since_s = known.missing_since_s if known.missing_since_s is not None else sighting.observed_at_s
            watches[uuid] = replace(known, missing_since_s=since_s)
    return watches


def _watched(turn: Turn, gpu: GpuRecord, reading: GpuReading, known: GpuWatch, observed_at_s: float | None) -> GpuWatch:
    known = _health(turn, gpu, reading, known)
    if gpu.lease_id != known.lease_id:
        # This reading may have been begun before the lease was: its processes are not judged by it.
        known = GpuWatch(
            unhealthy=known.unhealthy,
            lease_id=gpu.lease_id,
            since_s=turn.now.mono_s,
            free_bytes=() if gpu.lease_id or gpu.baseline_bytes is None else (gpu.baseline_bytes,),
        )
    if gpu.lease_id is None:
        return _free(reading, known)
    if observed_at_s is None:
        return known
    if not gpu.draining:
        return _conflict(turn, gpu, reading, known) if observed_at_s > known.since_s else known
    if observed_at_s > turn.ledger.draining_since[gpu.device.uuid]:
        return watch_draining(turn, gpu, reading, replace(known, strangers=()), observed_at_s)
    return known


def _health(turn: Turn, gpu: GpuRecord, reading: GpuReading, known: GpuWatch) -> GpuWatch:
    unhealthy = reading.health != "ok"
    if unhealthy != known.unhealthy:
        kind, reason = ("gpu.unhealthy", reading.health) if unhealthy else ("gpu.recovered", None)
        _tell(turn, gpu, kind, reason)
    return replace(known, unhealthy=unhealthy)


def _free(reading: GpuReading, known: GpuWatch) -> GpuWatch:
    """Learn from a GPU that nobody holds and nobody uses."""
    if reading.health != "ok" or occupants(reading) or reading.hidden_use or reading.memory_used_bytes is None:
        return known
    return replace(known, free_bytes=(*known.free_bytes, reading.memory_used_bytes)[-BASELINE_READINGS:])


def _conflict(turn: Turn, gpu: GpuRecord, reading: GpuReading, known: GpuWatch) -> GpuWatch:
    found = [process for process in occupants(reading) if process.lease_id != gpu.lease_id]
    pids = tuple(sorted(process.pid for process in found))
    if pids and pids != known.strangers:
        _tell(turn, gpu, "gpu.conflict", "used outside its lease by " + named(found, turn.policy))
    elif known.strangers and not pids:
        _tell(turn, gpu, "gpu.conflict_over", None)
    return replace(known, strangers=pids, leftovers=())


def baseline_of(sighting: Sighting | None, gpu: GpuRecord) -> int | None:
    """Memory in use on a GPU that is free; None if unknown.

    The middle one of its last readings: one that still showed the memory of a process that had ended, or already that
    of one to come, does not count. The baseline before the last lease counts as one of them, so that what each lease
    leaves within the tolerance does not add up.
    """
    reading = sighting.readings.get(gpu.device.uuid) if sighting else None
    if reading is not None and reading.memory_used_bytes is None:
        return None
    known = sighting.watches.get(gpu.device.uuid) if sighting else None
    if known is None or known.lease_id is not None or not known.free_bytes:
        return gpu.baseline_bytes  # it was found clean in this very turn, or its memory is not to be had
    return median_low(known.free_bytes)


def _tell(turn: Turn, gpu: GpuRecord, kind: str, reason: str | None) -> None:
    turn.event(kind, lease_id=gpu.lease_id, node=gpu.device.node, gpus=(gpu.device.uuid,), reason=reason)
