"""The public nouns: what the API returns, the client decodes, the CLI prints and the core computes with.

Each class is written once, here. Names end in their unit: ``_at`` (aware UTC), ``_s`` (seconds), ``_bytes``,
``_ratio`` (0 to 1), ``_w``, ``_c``. A value that the driver does not report is ``None``, never 0.
"""

from __future__ import annotations

from dataclasses import field
from datetime import datetime

from gpulease_protocol.device import Device
from gpulease_protocol.events import Event, EventPage
from gpulease_protocol.holder import Holder
from gpulease_protocol.job_parts import JobAttempt, JobDependency, JobMember, JobSpec
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.lease_parts import LeaseKeep, LeaseMember
from gpulease_protocol.node_parts import GpuLink
from gpulease_protocol.noun import Noun
from gpulease_protocol.page import Page
from gpulease_protocol.states import (
    Activity,
    ComputeMode,
    EndReason,
    ExpectedBasis,
    GpuState,
    JobState,
    Launcher,
    LeaseState,
    Liveness,
    Mask,
    NodeMode,
    NodeState,
    PartState,
    Priority,
    ProcessType,
    Selection,
    TopologyMode,
)

__all__ = [
    "Activity",
    "ComputeMode",
    "Demand",
    "Device",
    "EndReason",
    "Event",
    "EventPage",
    "ExpectedBasis",
    "Gpu",
    "GpuLink",
    "GpuReading",
    "GpuState",
    "Holder",
    "Job",
    "JobAttempt",
    "JobDependency",
    "JobMember",
    "JobSpec",
    "JobState",
    "Launcher",
    "Lease",
    "LeaseKeep",
    "LeaseMember",
    "LeaseState",
    "Liveness",
    "Mask",
    "Node",
    "NodeMode",
    "NodeState",
    "Noun",
    "Page",
    "PartState",
    "Priority",
    "Process",
    "ProcessType",
    "Selection",
    "TopologyMode",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Process(Noun):
    """A process that NVML shows on a GPU."""

    pid: int
    """Process id in the node's namespace."""
    type: ProcessType = ProcessType.COMPUTE
    """Through which interface it uses the GPU."""
    user: str | None = None
    """Login name of its owner."""
    command: str | None = None
    """Command line, cut at 200 characters."""
    memory_bytes: int | None = None
    """GPU memory it holds; null where the driver cannot tell."""
    lease_id: str | None = None
    """The lease it works under; null for a process outside any lease."""
    bystander: bool = False
    """True for a desktop's or a monitor's process and for an MPS server: it does not keep the GPU from others."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReading(Device):
    """What the hardware showed of one GPU at one moment."""

    memory_used_bytes: int | None = None
    """Memory in use, without what the driver reserves."""
    utilization_ratio: float | None = None
    """Share of the last sample period in which a kernel ran, 0 to 1."""
    temperature_c: float | None = None
    """Core temperature in degrees Celsius."""
    power_w: float | None = None
    """Power draw in watts."""
    compute_mode: ComputeMode | None = None
    """Whether the driver admits any number of processes (`default`), one at a time (`exclusive_process`) or none
    (`prohibited`: the GPU is never granted)."""
    health: str = "ok"
    """`ok`, or what keeps it from being granted: `lost`, `reset_required`, `reboot_required`, `xid:N`,
    `row_remap_failed`, `mig`, `fabric_not_ready`, `processes_unknown`, `compute_mode_unknown`, `unreadable`; see
    docs/glossary.md."""
    warnings: tuple[str, ...] = ()
    """Problems that do not keep it from being granted: `row_remap_pending` and others, see docs/glossary.md."""
    processes: tuple[Process, ...] = ()
    """Processes on the GPU, every type."""
    hidden_use: bool = False
    """True when memory or utilization shows that an unlisted process uses it, or its memory is not known, and
    others could not be listed: the worker runs in a PID namespace of its own, from which the driver hides them, or the
    driver has no process lists (WSL2). Never true beside a process with the marker of a lease."""
    minor_number: int | None = None
    """N of its device file `/dev/nvidiaN`; not the index."""
    numa_node: int | None = None
    """NUMA node it is attached to; null if the host has only one, or the kernel does not say."""
    mig: bool | None = None
    """True when it is split by MIG; null for a GPU without MIG."""
    fabric: str | None = None
    """State of joining its NVLink fabric: `not_started`, `in_progress`, `completed`, `failed`; null without one."""
    recovery_action: str | None = None
    """Recovery action that the driver asks for, such as `none` or `gpu_reset`; null before driver 570."""
    ecc_corrected: int | None = None
    """Memory errors corrected since the driver was loaded; null without ECC."""
    ecc_uncorrected: int | None = None
    """Memory errors that could not be corrected since the driver was loaded; null without ECC."""
    remapped_rows: int | None = None
    """Memory rows replaced by spare ones, ever; null before Ampere."""
    throttle_reasons: tuple[str, ...] | None = None
    """What holds its clocks down, such as `sw_power_cap`; empty when nothing does."""
    opened_by: tuple[Process, ...] | None = None
    """Processes that have its device file open or mapped and count: with `lease_id` of the lease that has ended its
    own, which keep the GPU; others only delay it. Processes that work under another lease or on another
    GPU, or were there before the lease, are left out. Null unless the GPU drains, and until the scan has ended."""
    unreadable_processes: int | None = None
    """How many processes' open files it cannot read, so that `opened_by` may lack some; null if not checked."""
    unreadable_process: Process | None = None
    """One of them, by pid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Gpu(GpuReading):
    """A GPU as `GET /v1/gpus` shows it: its last reading, and its state in the ledger."""

    state: GpuState
    """What the GPU can be used for now."""
    activity: Activity | None = None
    """What happens on it while it is leased; null otherwise."""
    reason: str | None = None
    """Why it is not free, or for which waiting request it is held, as "Held by lease-1 (user ann)"; else null."""
    lease_id: str | None = None
    """The lease that holds it, or after which it is being cleaned."""
    holder: Holder | None = None
    """Who holds that lease."""
    cordoned: bool = False
    """True when an administrator keeps it from being granted; its present holder keeps it."""
    observed_at: datetime | None = None
    """When the reading was taken, at the earliest."""
    last_busy_at: datetime | None = None
    """While it is leased: when a reading under this lease last showed a kernel on it, or else when it was granted; null
    before the first reading."""
    idle_s: float | None = None
    """While it is leased: seconds since `last_busy_at`, or the daemon's start; null before the first reading."""
    activity_since: datetime | None = None
    """Since when each reading has shown this `activity`. Null where that is not known, as after a daemon's start."""
    reserved_for: str | None = None
    """The waiting request that a free GPU is held for; null for one that anyone may have."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand(Noun):
    """Which GPUs a lease asks for. All of them are granted, or none: on one node, or on so many as it asks for."""

    selection: Selection = Selection.COUNT
    """`count`: any that many; `listed`: exactly these; `all`: every GPU of a node; `auto`: all that are free now."""
    count: int = 1
    """How many GPUs; at least this many for `auto`. With several nodes, on each of them."""
    nodes: int = 1
    """On how many nodes; all of their GPUs are of one model."""
    max_nodes: int | None = None
    """With this it takes as many nodes as are free when it is granted, from `nodes` to this. Null: exactly `nodes`."""
    indices: tuple[int, ...] = ()
    """Listed GPUs by index on the node."""
    uuids: tuple[str, ...] = ()
    """Listed GPUs by UUID."""
    among: tuple[str, ...] | None = None
    """Only GPUs of this list of UUIDs."""
    node: str | None = None
    """Only GPUs of this node."""
    gpu_model: str | None = None
    """Only GPUs with this text in their product name; case does not matter."""
    min_free_memory_bytes: int | None = None
    """Only GPUs with at least this much free memory."""
    time_s: float | None = None
    """How long it may take, null for no end: `time_s`, of a job `timeout_s`. A node that ends before is passed over."""
    topology: TopologyMode = TopologyMode.PREFERRED
    """How its GPUs on one node must be connected: see `topology` of the request."""
    priority: Priority = Priority.NORMAL
    """Requests of a higher priority go first."""
    preemptible: bool = False
    """Whether it may end, after a notice, for the first request that waits; always with priority `scavenge`. It takes
    effect where the administrator has switched preemption on."""
    reclaim_idle_after_s: float | None = None
    """Its GPUs are taken back once none has worked for so long, and others wait for them. Null: they are not."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Lease(Noun):
    """A request for GPUs from `queued` through `active` to `ended`, with one id for its whole life."""

    id: str
    """Unique, never reused."""
    state: LeaseState
    """Where it is in its life."""
    end_reason: EndReason | None = None
    """Why it ended; null before."""
    holder: Holder
    """Who asked for it."""
    demand: Demand
    """What was asked for."""
    gpus: tuple[Device, ...] = ()
    """The GPUs granted, in the order of `devices` or else in PCI order, node by node; empty while queued."""
    members: tuple[LeaseMember, ...] = ()
    """The nodes of a gang, by rank; empty while queued, and for a lease on one node."""
    env: dict[str, str] = field(default_factory=dict)
    """Every variable that a training run needs in its environment, of a gang the one of rank 0; empty while queued."""
    fencing_token: int | None = None
    """A number that rises with every grant and proves which one is meant; null while queued. It is no bearer token."""
    ttl_s: float
    """How long the lease lasts after its last renewal."""
    liveness: Liveness
    """How the daemon knows that the holder lives."""
    job_id: str | None = None
    """The job that runs under it, if the daemon launched one."""
    created_at: datetime
    """When it was asked for."""
    granted_at: datetime | None = None
    """When its GPUs were granted."""
    expires_at: datetime | None = None
    """When it ends unless it is renewed; null where no time limit runs. With liveness `process` each sight of the
    living owner renews it once it is granted, so that it stays in the future for as long as the owner is watched and
    lives. In the queue only waiting renews it, and after a wait the first request that asks for the lease."""
    ended_at: datetime | None = None
    """When it ended."""
    ends_at: datetime | None = None
    """When it ends even if it is renewed, unless something changes: its `time_s` has passed, or the budget of its token
    is spent. Null without either, and while it waits."""
    position: int | None = None
    """Place in the queue, 1 is next; null unless queued."""
    expected_at: datetime | None = None
    """About when it is expected to be granted, in `GET /v1/leases` and `GET /v1/leases/{id}` without a wait: if every
    lease lasts as long as was declared, and no newer request passes. No promise. Null for all but the next 100
    requests, and from a standby; also if an end that it needs is not declared or on a silent node, or a second does not
    suffice to find it, as on 10,000 GPUs."""
    expected_basis: ExpectedBasis | None = None
    """On what that rests; null where it is not known."""
    expected_from: datetime | None = None
    """With basis `history`, without `expected_at`: it probably starts between this and `expected_until`. No promise.
    Null where fewer than 20 earlier leases tell how long a lease in the way lasts."""
    expected_until: datetime | None = None
    """The end of that range; null without one."""
    expected_samples: int | None = None
    """How many earlier leases tell, at least, how long each lease in the way lasts; null without that range."""
    held_for_s: float | None = None
    """Seconds from grant to now or its end, in answers to a renewal and to `GET`; null before the grant."""
    idle_s: float | None = None
    """There too: seconds for which none of its GPUs has done any work; null unless it is active and all are known."""
    kept: LeaseKeep | None = None
    """Until when its idle GPUs are kept on purpose, and why; null where nothing was said, or that has ended."""
    preempt_at: datetime | None = None
    """When it ends so that a request that waits can start; a job is told by SIGTERM before. Null unless it is to be
    preempted. Never moved, but it may be withdrawn."""
    reclaim_at: datetime | None = None
    """When its idle GPUs are taken back, unless one works, they are kept, or no one waits; null without that notice."""
    ends_in_s: float | None = None
    """In how many seconds from this answer on the first of `ends_at`, `preempt_at` and `reclaim_at` comes, by the
    daemon's own clock: a holder needs no clock that agrees with it. A renewal lasts no longer than this, however long
    `ttl_s` is. The last two may still be withdrawn when they come, so 2 s before them and afterwards it is 2: renew
    again within these. Null without any of them, and for a lease of a job, which is told by SIGTERM."""
    problems: tuple[str, ...] = ()
    """What is wrong with its GPUs at this moment, a sentence each: someone else's process on one, a GPU that is not
    healthy, a node about which nothing is known. Empty unless active."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job(Noun):
    """A command that a worker launches under a lease."""

    id: str
    """Unique, never reused."""
    name: str = ""
    """Free text of the submitter's own; empty where none was given."""
    state: JobState
    """Where it is in its life."""
    reason: str | None = None
    """A sentence that says why it waits or how it ended."""
    lease_id: str
    """The lease it runs under."""
    user: str | None = None
    """Login name of its user, the same as its lease's holder; null if it is not known."""
    launcher: Launcher
    """What starts the ranks."""
    command: tuple[str, ...]
    """Script and arguments."""
    gpus: tuple[Device, ...] = ()
    """The GPUs it is bound to; empty while queued."""
    members: tuple[JobMember, ...] = ()
    """Its parts on its nodes, by rank, where it runs on several; empty while queued."""
    exit_code: int | None = None
    """Exit code of the rank that failed first, else of the launcher; 128 + N when signal N ended it; null before."""
    traceback: str | None = None
    """Traceback of the rank that failed first, its end where it is long; null where it left none."""
    attempts: int = 0
    """How many times it was started."""
    attempt_history: tuple[JobAttempt, ...] = ()
    """Its attempts before the last one, oldest first; the last one is in the other fields. At most 21."""
    after: tuple[JobDependency, ...] = ()
    """The jobs and arrays that had to end before it joined the queue."""
    array_id: str | None = None
    """The array that it was submitted with; null for a job of its own."""
    array_index: int | None = None
    """Its index in that array."""
    array_at_most: int | None = None
    """How many jobs of that array may run at once; null for no limit."""
    gpu_count: int | None = None
    """How many GPUs it asks for, at least."""
    nodes: int | None = None
    """On how many nodes it runs, at least; null for one."""
    max_nodes: int | None = None
    """For an elastic job: on how many nodes it runs at most. Null: always on as many as when it started."""
    timeout_s: float | None = None
    """It ends after it has run for this long; null for no limit."""
    retries: int | None = None
    """How many times it is started again after it failed."""
    priority: Priority = Priority.NORMAL
    """Requests of a higher priority go first."""
    preemptible: bool = False
    """Whether an attempt may end, after a notice, for the first request that waits; then it is queued again."""
    fence_s: float | None = None
    """Its node ends it after so many seconds without an answer of any daemon. After 30 s more (and 0.2 %) the daemon
    counts it as lost, and starts its next attempt if it has one. Null: it survives every cut."""
    preempt_at: datetime | None = None
    """By when its attempt has ended so that a request that waits can start; null unless it is preempted."""
    preempted: int = 0
    """How many times it was preempted, and queued again; after two it goes first, and is not preempted again."""
    working_directory: str | None = None
    """Where its command runs; null for its own directory, and for other users."""
    log_directory: str | None = None
    """Where the logs of its last attempt are on its node; null until it starts, and for other users."""
    created_at: datetime
    """When it was submitted."""
    started_at: datetime | None = None
    """When the first rank of the last attempt was up."""
    ended_at: datetime | None = None
    """When it ended."""

    @property
    def ended(self) -> bool:
        """True when it will never change again, also where a newer daemon has another word for that."""
        return self.state.final or self.ended_at is not None


@dataclass(frozen=True, slots=True, kw_only=True)
class Node(Noun):
    """A host with GPUs, under one worker."""

    name: str
    """Unique name, the host name unless the worker was told another."""
    state: NodeState
    """`ready`, or `unknown` while there is no fresh reading."""
    mode: NodeMode = NodeMode.ACTIVE
    """Whether an administrator has taken the node out of use."""
    mode_reason: str | None = None
    """Why, in the words of the administrator; null if they gave no reason."""
    mode_by: str | None = None
    """Login name of the administrator; null while the node is in use, and where it is not known."""
    reason: str | None = None
    """Why the node is unknown; null when it is ready."""
    host: str | None = None
    """Host name that the worker reported."""
    gpu_count: int
    """GPUs of the node."""
    driver_version: str | None = None
    """NVIDIA driver version."""
    worker_version: str | None = None
    """Version of gpulease that its worker is of; null if it has not reported, or is older than this field."""
    address: str | None = None
    """IP address under which other nodes reach this one, a loopback address while the daemon listens there alone."""
    interface: str | None = None
    """Network interface that has this address; null where it is not known."""
    simulated: bool = False
    """True when the readings come from a simulation."""
    observed_at: datetime | None = None
    """When the last reading was taken, at the earliest."""
    links: tuple[GpuLink, ...] = ()
    """How its GPUs are connected, each pair once, without pairs that the driver does not know."""
    islands: tuple[tuple[str, ...], ...] = ()
    """Its GPUs that NVLink connects, directly or through others: the UUIDs of each island of two or more."""
    realm: str | None = None
    """`BOOT/NAMESPACE`: /proc/sys/kernel/random/boot_id of its host, /proc/self/ns/pid of its worker. Where the same
    boot is found is its host. Null where the worker cannot tell."""
    available_until: datetime | None = None
    """When the node goes; a job with a later end by its `timeout_s` is not placed there. Null where no end is known."""
    leaving: bool = False
    """True while it is about to go: nothing is granted there, and its jobs are ended and tried elsewhere."""
