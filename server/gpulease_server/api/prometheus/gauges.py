"""Prometheus metrics of the ledger at one moment. Pure: a `LedgerSnapshot` in, metric families out.

A family of GPU metrics has one series for each GPU; a family by user has one for each of the
`top_users`, and `OTHER_USERS`. The label `uuid` is NVML's, as in dcgm-exporter's label `UUID`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import GpuState, JobState, LeaseState, NodeMode, Process
from gpulease_server.core.gpu import conflicting_processes, node_mode, node_problem, reading_of, state_of
from gpulease_server.core.gpu_state import occupants
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import GpuRecord, Instant
from gpulease_server.runtime.gpu_hours import MAX_USERS, OTHER_USERS, UNKNOWN_USER, UserGpuTime

LIVE_JOB_STATES = [state for state in JobState if not state.final]
USAGE_METRICS: tuple[tuple[str, str, str], ...] = (
    ("gpulease_gpu_held_seconds", "held_s", "GPU time that leases of a user held."),
    ("gpulease_gpu_used_seconds", "used_s", "The part of it in which the GPUs worked: held time times utilization."),
    ("gpulease_gpu_idle_seconds", "idle_s", "The part of it in which utilization was 0."),
)
READINGS = (
    (
        "gpulease_gpu_utilization_ratio",
        "utilization_ratio",
        "Share of the last sample period in which a kernel ran; absent while it is not known.",
    ),
    (
        "gpulease_gpu_memory_used_bytes",
        "memory_used_bytes",
        "Memory in use, without what the driver reserves; absent while it is not known.",
    ),
    ("gpulease_gpu_temperature_celsius", "temperature_c", "Temperature of a GPU; absent while it is not known."),
    ("gpulease_gpu_power_watts", "power_w", "Power that a GPU draws; absent while it is not known."),
)
"""Gauges of the last reading of a GPU: name, field of the reading, meaning."""


@dataclass(frozen=True)
class LedgerSnapshot:
    """Everything that the metrics are made from. It does not change, so that any thread may read it."""

    ledger: Ledger
    """Only its leases, GPUs, nodes, sightings, queue and live jobs."""
    policy: Policy
    now: Instant
    totals: Mapping[str, UserGpuTime]
    """GPU time by user."""
    quiet_s: Mapping[str, float]
    """By UUID of leased GPUs: seconds since the GPU was last busy."""
    probe_s: Mapping[str, float]
    """By node: how long its last reading took."""

    @cached_property
    def states(self) -> dict[str, GpuState]:
        """The state of each GPU, by UUID."""
        ledger, now, policy = self.ledger, self.now, self.policy
        unknown = {name for name in ledger.nodes if node_problem(ledger, name, now, policy) is not None}
        return {
            uuid: GpuState.UNKNOWN if gpu.device.node in unknown else state_of(ledger, gpu, now, policy)
            for uuid, gpu in ledger.gpus.items()
        }

    def state(self, gpu: GpuRecord) -> GpuState:
        """The state of a GPU."""
        return self.states[gpu.device.uuid]

    def user_of(self, lease_id: str | None) -> str:
        """The user who holds or has requested a lease."""
        record = self.ledger.leases.get(lease_id or "")
        return (record.lease.holder.user if record else None) or UNKNOWN_USER


def metric_families(snapshot: LedgerSnapshot) -> Iterator[Metric]:
    """All metrics."""
    yield from gpu_metrics(snapshot)
    yield from lease_metrics(snapshot)
    yield agent_metric(snapshot)
    yield from node_metrics(snapshot)
    yield from usage_metrics(snapshot)


def gpu_metrics(snapshot: LedgerSnapshot) -> Iterator[Metric]:
    """Metrics by GPU, and the number of GPUs in each state."""
    counts = Counter(snapshot.states.values())
    total = GaugeMetricFamily("gpulease_gpus", "GPUs by state.", labels=("state",))
    for state in GpuState:
        total.add_metric((state.value,), counts[state])
    yield total
    known = [gpu for gpu in all_gpus(snapshot) if snapshot.state(gpu) is not GpuState.UNKNOWN]
    foreign = {gpu.device.uuid: processes for gpu in known if (processes := foreign_processes(snapshot.ledger, gpu))}
    quiet_s = snapshot.quiet_s
    yield _lazy_family(
        InfoMetricFamily("gpulease_gpu", "What a GPU is."),
        ((_gpu_identity(gpu), 1) for gpu in all_gpus(snapshot)),
        "_info",
    )
    text = "1 for the state of a GPU; absent for all other states."
    yield _lazy_family(
        GaugeMetricFamily("gpulease_gpu_state", text),
        ((_gpu_labels(gpu) | {"state": snapshot.state(gpu)}, 1) for gpu in all_gpus(snapshot)),
    )
    text = "Memory of foreign processes on a GPU, as far as the driver shows it; absent while the GPU is unknown."
    yield _lazy_family(
        GaugeMetricFamily("gpulease_gpu_foreign_memory_bytes", text),
        ((_gpu_labels(gpu), _memory_bytes(foreign.get(gpu.device.uuid, ()))) for gpu in known),
    )
    text = "Foreign processes on a GPU; absent while the GPU is unknown."
    yield _lazy_family(
        GaugeMetricFamily("gpulease_gpu_foreign_processes", text),
        ((_gpu_labels(gpu), len(foreign.get(gpu.device.uuid, ()))) for gpu in known),
    )
    text = "Time since a leased GPU was last busy, or was granted; absent while the GPU is unknown."
    yield _lazy_family(
        GaugeMetricFamily("gpulease_gpu_quiet_seconds", text),
        ((_gpu_labels(gpu), quiet_s[gpu.device.uuid]) for gpu in known if gpu.device.uuid in quiet_s),
    )
    for name, measure, text in READINGS:
        yield _lazy_family(
            GaugeMetricFamily(name, text),
            (
                (_gpu_labels(gpu), value)
                for gpu in known
                if (value := _last_reading(snapshot, gpu, measure)) is not None
            ),
        )
    yield holder_metric(snapshot)


def _last_reading(snapshot: LedgerSnapshot, gpu: GpuRecord, measure: str) -> float | None:
    reading = reading_of(snapshot.ledger, gpu)
    return None if reading is None else getattr(reading, measure)


def holder_metric(snapshot: LedgerSnapshot) -> Metric:
    """The user who holds each leased GPU, for joins."""
    held = [(gpu, snapshot.user_of(gpu.lease_id)) for gpu in all_gpus(snapshot) if gpu.lease_id and not gpu.draining]
    names = top_users(Counter(user for _, user in held))
    return _lazy_family(
        GaugeMetricFamily("gpulease_gpu_holder", "1 for the user who holds a leased GPU; for joins on uuid."),
        ((_gpu_labels(gpu) | {"user": user if user in names else OTHER_USERS}, 1) for gpu, user in held),
    )


def all_gpus(snapshot: LedgerSnapshot) -> Iterable[GpuRecord]:
    """Every GPU."""
    return snapshot.ledger.gpus.values()


def _lazy_family(family: Metric, rows: Iterable[tuple[dict[str, str], float]], suffix: str = "") -> Metric:
    """The family with samples that are made lazily from (labels, value), and can be read once: tens of thousands of
    them at the same time would cost the process a long garbage collection."""
    name = family.name + suffix
    family.samples = (Sample(name, labels, value) for labels, value in rows)  # type: ignore[assignment]
    return family


def _gpu_labels(gpu: GpuRecord) -> dict[str, str]:
    return {"uuid": gpu.device.uuid, "node": gpu.device.node}


def _gpu_identity(gpu: GpuRecord) -> dict[str, str]:
    device = gpu.device
    labels = {"gpu": str(device.index), "pci_bus_id": device.pci_bus_id or "", "model": device.name or ""}
    return _gpu_labels(gpu) | labels


def _memory_bytes(processes: tuple[Process, ...]) -> int:
    return sum(process.memory_bytes or 0 for process in processes)


def foreign_processes(ledger: Ledger, gpu: GpuRecord) -> tuple[Process, ...]:
    """Processes on a GPU that belong to no lease of it, except desktops and monitors."""
    reading = reading_of(ledger, gpu)
    if reading is None or not reading.processes:
        return ()
    if gpu.lease_id is not None and not gpu.draining:
        return conflicting_processes(ledger, gpu)
    return tuple(process for process in occupants(reading) if process.lease_id is None)


def lease_metrics(snapshot: LedgerSnapshot) -> Iterator[Metric]:
    """Leases and jobs that have not ended, and the queue."""
    ledger = snapshot.ledger
    counts: dict[str, Counter[LeaseState]] = defaultdict(Counter)
    for record in ledger.leases.values():
        if record.lease.state is not LeaseState.ENDED:
            counts[record.lease.holder.user or UNKNOWN_USER][record.lease.state] += 1
    names = top_users(Counter({user: states.total() for user, states in counts.items()}))
    shown: dict[str, Counter[LeaseState]] = defaultdict(Counter)
    for user, states in counts.items():
        shown[user if user in names else OTHER_USERS].update(states)
    family = GaugeMetricFamily("gpulease_leases", "Leases that have not ended.", labels=("state", "user"))
    for user, states in shown.items():
        for state in (LeaseState.QUEUED, LeaseState.ACTIVE):
            family.add_metric((state.value, user), states[state])
    yield family
    queued = [ledger.leases[lease_id].lease for _, lease_id in ledger.queue]
    since = min((lease.created_at for lease in queued), default=snapshot.now.at)
    yield GaugeMetricFamily("gpulease_queue_length", "Queued requests.", len(queued))
    yield GaugeMetricFamily(
        "gpulease_queue_gpus", "GPUs that queued requests ask for.", sum(lease.demand.count for lease in queued)
    )
    yield GaugeMetricFamily(
        "gpulease_queue_oldest_seconds",
        "How long the oldest queued request has waited; 0 if the queue is empty.",
        max(0.0, (snapshot.now.at - since).total_seconds()),
    )
    jobs = Counter(record.job.state for record in ledger.live_jobs.values())
    family = GaugeMetricFamily("gpulease_jobs", "Jobs that have not ended.", labels=("state",))
    for live in LIVE_JOB_STATES:
        family.add_metric((live.value,), jobs[live])
    yield family


def agent_metric(snapshot: LedgerSnapshot) -> Metric:
    """GPUs by agent and session; those beyond `MAX_USERS` together."""
    held: Counter[tuple[str, str]] = Counter()
    for gpu in all_gpus(snapshot):
        record = snapshot.ledger.leases.get(gpu.lease_id or "")
        if record is not None and not gpu.draining and record.lease.holder.agent:
            held[record.lease.holder.agent, record.lease.holder.session] += 1
    ordered = sorted(held.items(), key=lambda item: (-item[1], item[0]))
    text = "GPUs leased by agents, by agent and session."
    family = GaugeMetricFamily("gpulease_agent_gpus", text, labels=("agent", "session"))
    for labels, gpus in ordered[:MAX_USERS]:
        family.add_metric(labels, gpus)
    if ordered[MAX_USERS:]:
        family.add_metric((OTHER_USERS, ""), sum(gpus for _, gpus in ordered[MAX_USERS:]))
    return family


def node_metrics(snapshot: LedgerSnapshot) -> Iterator[Metric]:
    """Metrics by node: whether its readings are valid, how old they are, and how long they took."""
    ready = GaugeMetricFamily("gpulease_node_ready", "1 while the last reading of a node is valid.", labels=("node",))
    mode = GaugeMetricFamily(
        "gpulease_node_mode", "1 for the mode that an administrator has set for a node.", labels=("node", "mode")
    )
    age = GaugeMetricFamily("gpulease_probe_age_seconds", "Maximum age of a node's last reading.", labels=("node",))
    took = GaugeMetricFamily(
        "gpulease_probe_duration_seconds", "How long a node's last reading took.", labels=("node",)
    )
    for name in snapshot.ledger.nodes:
        sighting = snapshot.ledger.node_observations.get(name)
        problem = node_problem(snapshot.ledger, name, snapshot.now, snapshot.policy)
        ready.add_metric((name,), problem is None)
        current = node_mode(snapshot.ledger, name)
        for one in NodeMode:
            mode.add_metric((name, one.value), one is current)
        if sighting is not None and sighting.observed_at_s is not None:
            age.add_metric((name,), max(0.0, snapshot.now.mono_s - sighting.observed_at_s))
        if problem is None and name in snapshot.probe_s:
            took.add_metric((name,), snapshot.probe_s[name])
    yield from (ready, mode, age, took)


def usage_metrics(snapshot: LedgerSnapshot) -> Iterator[Metric]:
    """GPU time by user, since the start of the daemon."""
    for name, field, text in USAGE_METRICS:
        family = CounterMetricFamily(name, text, labels=("user",))
        for user, totals in snapshot.totals.items():
            family.add_metric((user,), getattr(totals, field))
        yield family


def top_users(counts: Counter[str]) -> set[str]:
    """The users shown by name: those with the highest counts; ties are broken by name, so that they are stable."""
    if len(counts) <= MAX_USERS:
        return set(counts)
    return set(sorted(counts, key=lambda user: (-counts[user], user))[:MAX_USERS])
