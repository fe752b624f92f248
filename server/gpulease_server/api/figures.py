"""What the ledger says at one moment, as Prometheus' metrics. Pure: a `Moment` in, metric families out.

A family of GPUs has one series for each GPU and no more; what is by user has `TOP_USERS` of them and `OTHER`. `uuid` is
NVML's, as in dcgm-exporter's label `UUID`.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.samples import Sample

from gpulease.model import GpuState, JobState, LeaseState, NodeMode, Process

from ..core.gpu import mode_of, node_problem, occupants, reading_of, state_of, strangers
from ..core.ledger import GpuRecord, Instant, Ledger
from ..core.turn import Policy
from ..runtime.usage import OTHER, TOP_USERS, UNKNOWN, Totals

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

    def state(self, gpu: GpuRecord) -> GpuState:
        """The state of a GPU."""
        return self.states[gpu.device.uuid]

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
    known = [gpu for gpu in all_of(moment) if moment.state(gpu) is not GpuState.UNKNOWN]
    strange = {gpu.device.uuid: found for gpu in known if (found := foreign(moment.ledger, gpu))}
    quiet_s = moment.quiet_s
    yield _streamed(
        InfoMetricFamily("gpulease_gpu", "What a GPU is."), ((_about(gpu), 1) for gpu in all_of(moment)), "_info"
    )
    text = "1 for the state that a GPU is in; the others are left out."
    yield _streamed(
        GaugeMetricFamily("gpulease_gpu_state", text),
        ((_which(gpu) | {"state": moment.state(gpu)}, 1) for gpu in all_of(moment)),
    )
    text = "Memory that foreign processes hold on a GPU, as far as the driver tells; left out while it is unknown."
    yield _streamed(
        GaugeMetricFamily("gpulease_gpu_foreign_memory_bytes", text),
        ((_which(gpu), _memory(strange.get(gpu.device.uuid, ()))) for gpu in known),
    )
    text = "Foreign processes on a GPU; left out while it is unknown."
    yield _streamed(
        GaugeMetricFamily("gpulease_gpu_foreign_processes", text),
        ((_which(gpu), len(strange.get(gpu.device.uuid, ()))) for gpu in known),
    )
    text = "How long ago a leased GPU was last seen to work, or was granted; left out while it is unknown."
    yield _streamed(
        GaugeMetricFamily("gpulease_gpu_quiet_seconds", text),
        ((_which(gpu), quiet_s[gpu.device.uuid]) for gpu in known if gpu.device.uuid in quiet_s),
    )
    yield holders(moment)


def holders(moment: Moment) -> Metric:
    """Who holds each leased GPU, for joins."""
    held = [(gpu, moment.user_of(gpu.lease_id)) for gpu in all_of(moment) if gpu.lease_id and not gpu.draining]
    names = named(Counter(user for _, user in held))
    return _streamed(
        GaugeMetricFamily("gpulease_gpu_holder", "1 for the user who holds a leased GPU; for joins on uuid."),
        ((_which(gpu) | {"user": user if user in names else OTHER}, 1) for gpu, user in held),
    )


def all_of(moment: Moment) -> Iterable[GpuRecord]:
    """Every GPU."""
    return moment.ledger.gpus.values()


def _streamed(family: Metric, rows: Iterable[tuple[dict[str, str], float]], suffix: str = "") -> Metric:
    """The family, whose samples are made of (labels, value) as they are written: tens of thousands at once would cost
    the whole process a long look of the garbage collector. They can be read once."""
    name = family.name + suffix
    family.samples = (Sample(name, labels, value) for labels, value in rows)  # type: ignore[assignment]
    return family


def _which(gpu: GpuRecord) -> dict[str, str]:
    return {"uuid": gpu.device.uuid, "node": gpu.device.node}


def _about(gpu: GpuRecord) -> dict[str, str]:
    device = gpu.device
    more = {"gpu": str(device.index), "pci_bus_id": device.pci_bus_id or "", "model": device.name or ""}
    return _which(gpu) | more


def _memory(processes: tuple[Process, ...]) -> int:
    return sum(process.memory_bytes or 0 for process in processes)


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
