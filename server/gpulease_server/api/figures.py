"""What the ledger says at one moment, as Prometheus' metrics. Pure: a `Moment` in, metric families out.

A family of GPUs has one series for each GPU and no more; what is by user has `TOP_USERS` of them and `OTHER`. `uuid` is
NVML's, as in dcgm-exporter's label `UUID`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric

from gpulease.model import GpuState, JobState, LeaseState, NodeMode, Process

from ..core.gpu import mode_of, node_problem, occupants, reading_of, state_of, strangers
from ..core.ledger import GpuRecord, Instant, Ledger
from ..core.turn import Policy
from ..runtime.usage import OTHER, TOP_USERS, UNKNOWN, Totals

GPU = ("uuid", "node")
LIVE = [state for state in JobState if not state.final]
BY_USER: tuple[tuple[str, str, str], ...] = (
    ("gpulease_gpu_held_seconds", "held_s", "GPU time that leases of a user held."),
    ("gpulease_gpu_used_seconds", "used_s", "The part of it in which the GPUs worked: held time times utilization."),
    ("gpulease_gpu_idle_seconds", "idle_s", "The part of it in which utilization was 0."),
)


@dataclass(frozen=True)
class Moment:
    """Everything that the families are made of. Nobody changes it any more, so that any thread may read it."""

    ledger: Ledger
    """Of it leases, GPUs, nodes, sightings, queue and live jobs."""
    policy: Policy
    now: Instant
    totals: Mapping[str, Totals]
    """GPU time by user."""
    quiet_s: Mapping[str, float]
    """By UUID of leased GPUs: how long ago one was seen to work."""
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

    def user_of(self, lease_id: str | None) -> str:
        """Who holds or asks for a lease."""
        record = self.ledger.leases.get(lease_id or "")
        return (record.lease.holder.user if record else None) or UNKNOWN


def families(moment: Moment) -> Iterator[Metric]:
    """All of them."""
    yield from gpus(moment)
    yield from leases(moment)
    yield from nodes(moment)
    yield from usage(moment)


def gpus(moment: Moment) -> Iterator[Metric]:
    """By GPU, and how many there are in each state."""
    counts = Counter(moment.states.values())
    total = GaugeMetricFamily("gpulease_gpus", "GPUs by state.", labels=("state",))
    for state in GpuState:
        total.add_metric((state.value,), counts[state])
    yield total
    about = InfoMetricFamily("gpulease_gpu", "What a GPU is.", labels=(*GPU, "gpu", "pci_bus_id", "model"))
    states = GaugeMetricFamily(
        "gpulease_gpu_state", "1 for the state that a GPU is in; the others are left out.", labels=(*GPU, "state")
    )
    memory = GaugeMetricFamily(
        "gpulease_gpu_foreign_memory_bytes",
        "Memory that foreign processes hold on a GPU, as far as the driver tells; left out while it is unknown.",
        labels=GPU,
    )
    number = GaugeMetricFamily(
        "gpulease_gpu_foreign_processes",
        "Foreign processes on a GPU; left out while it is unknown.",
        labels=GPU,
    )
    quiet = GaugeMetricFamily(
        "gpulease_gpu_quiet_seconds",
        "How long ago a leased GPU was last seen to work, or was granted; left out while it is not leased.",
        labels=GPU,
    )
    for uuid, gpu in moment.ledger.gpus.items():
        device, state = gpu.device, moment.states[uuid]
        labels = (uuid, device.node)
        about.add_metric((*labels, str(device.index), device.pci_bus_id or "", device.name or ""), {})
        states.add_metric((*labels, state.value), 1)
        if state is GpuState.UNKNOWN:
            continue
        found = foreign(moment.ledger, gpu)
        memory.add_metric(labels, sum(process.memory_bytes or 0 for process in found))
        number.add_metric(labels, len(found))
        if uuid in moment.quiet_s:
            quiet.add_metric(labels, moment.quiet_s[uuid])
    yield from (about, states, memory, number, quiet, holders(moment))


def holders(moment: Moment) -> Metric:
    """Who holds each leased GPU, for joins."""
    held = {
        uuid: moment.user_of(gpu.lease_id)
        for uuid, gpu in moment.ledger.gpus.items()
        if gpu.lease_id is not None and not gpu.draining
    }
    names = named(Counter(held.values()))
    family = GaugeMetricFamily(
        "gpulease_gpu_holder", "1 for the user who holds a leased GPU; for joins on uuid.", labels=(*GPU, "user")
    )
    for uuid, user in held.items():
        family.add_metric((uuid, moment.ledger.gpus[uuid].device.node, user if user in names else OTHER), 1)
    return family


def foreign(ledger: Ledger, gpu: GpuRecord) -> tuple[Process, ...]:
    """Processes on a GPU that belong to no lease of it, without desktops and monitors."""
    reading = reading_of(ledger, gpu)
    if reading is None or not reading.processes:
        return ()
    if gpu.lease_id is not None and not gpu.draining:
        return strangers(ledger, gpu)
    return tuple(process for process in occupants(reading) if process.lease_id is None)


def leases(moment: Moment) -> Iterator[Metric]:
    """Leases and jobs that have not ended, and the queue."""
    ledger = moment.ledger
    counts: dict[str, Counter[LeaseState]] = defaultdict(Counter)
    for record in ledger.leases.values():
        if record.lease.state is not LeaseState.ENDED:
            counts[record.lease.holder.user or UNKNOWN][record.lease.state] += 1
    names = named(Counter({user: states.total() for user, states in counts.items()}))
    shown: dict[str, Counter[LeaseState]] = defaultdict(Counter)
    for user, states in counts.items():
        shown[user if user in names else OTHER].update(states)
    family = GaugeMetricFamily("gpulease_leases", "Leases that have not ended.", labels=("state", "user"))
    for user, states in shown.items():
        for state in (LeaseState.QUEUED, LeaseState.ACTIVE):
            family.add_metric((state.value, user), states[state])
    yield family
    queued = [ledger.leases[lease_id].lease for _, lease_id in ledger.queue]
    since = min((lease.created_at for lease in queued), default=moment.now.at)
    yield GaugeMetricFamily("gpulease_queue_length", "Requests that wait.", len(queued))
    yield GaugeMetricFamily(
        "gpulease_queue_gpus", "GPUs that they ask for.", sum(lease.demand.count for lease in queued)
    )
    yield GaugeMetricFamily(
        "gpulease_queue_oldest_seconds",
        "How long the oldest of them has waited; 0 for an empty queue.",
        max(0.0, (moment.now.at - since).total_seconds()),
    )
    jobs = Counter(record.job.state for record in ledger.live_jobs.values())
    family = GaugeMetricFamily("gpulease_jobs", "Jobs that have not ended.", labels=("state",))
    for live in LIVE:
        family.add_metric((live.value,), jobs[live])
    yield family


def nodes(moment: Moment) -> Iterator[Metric]:
    """By node: whether its readings count, and how old and how slow they are."""
    ready = GaugeMetricFamily("gpulease_node_ready", "1 while the last reading of a node counts.", labels=("node",))
    mode = GaugeMetricFamily(
        "gpulease_node_mode", "1 for what an administrator has made of a node.", labels=("node", "mode")
    )
    age = GaugeMetricFamily(
        "gpulease_probe_age_seconds", "Age of the last reading of a node, at most.", labels=("node",)
    )
    took = GaugeMetricFamily("gpulease_probe_duration_seconds", "How long that reading took.", labels=("node",))
    for name in moment.ledger.nodes:
        sighting = moment.ledger.sightings.get(name)
        problem = node_problem(moment.ledger, name, moment.now, moment.policy)
        ready.add_metric((name,), problem is None)
        current = mode_of(moment.ledger, name)
        for one in NodeMode:
            mode.add_metric((name, one.value), one is current)
        if sighting is not None and sighting.observed_at_s is not None:
            age.add_metric((name,), max(0.0, moment.now.mono_s - sighting.observed_at_s))
        if problem is None and name in moment.probe_s:
            took.add_metric((name,), moment.probe_s[name])
    yield from (ready, mode, age, took)


def usage(moment: Moment) -> Iterator[Metric]:
    """GPU time by user, since the start of the daemon."""
    for name, field, text in BY_USER:
        family = CounterMetricFamily(name, text, labels=("user",))
        for user, totals in moment.totals.items():
            family.add_metric((user,), getattr(totals, field))
        yield family


def named(counts: Counter[str]) -> set[str]:
    """Those who are shown by name: they have the most. Which of two equals it is does not change by itself."""
    if len(counts) <= TOP_USERS:
        return set(counts)
    return set(sorted(counts, key=lambda user: (-counts[user], user))[:TOP_USERS])
