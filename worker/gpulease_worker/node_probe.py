"""Makes the probe of a node, by the worker's settings."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from gpulease_protocol.node_protocol import LeaseOwner
from gpulease_worker.probe.probe_client import ProbeClient
from gpulease_worker.probe.probe_protocol import Pace
from gpulease_worker.probe.probe_reader import ProbeReader
from gpulease_worker.settings import WorkerSettings


def new_probe(
    settings: WorkerSettings, changed: Callable[[], None], askers: Callable[[], Iterable[LeaseOwner]]
) -> ProbeReader:
    """A probe that starts with its first reading.

    Args:
        settings: The worker's.
        changed: Called when the probe has ended by itself, and when a late reading arrives.
        askers: As `ProbeClient`.
    """
    pace = Pace(processes_s=settings.processes_s, health_s=settings.health_s, call_deadline_s=settings.call_deadline_s)
    probe = ProbeClient(
        settings.node,
        settings.simulate,
        settings.probe_deadline_s + settings.call_deadline_s,
        pace,
        changed,
        settings.start_deadline_s,
        settings.idle_memory_bytes,
        askers,
    )
    return ProbeReader(probe, settings.probe_deadline_s, changed)
