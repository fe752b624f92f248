"""What a worker and the daemon tell each other: the worker its full view, the daemon the full desired state.

Both sides are level-triggered: a message that is lost or comes twice does no harm, because the next one says
everything again. Body of `POST /v1/nodes/{name}/exchange`: `NodeReport`; answer: `DesiredState`.

The age of a reading is never judged by a clock of the node. Every answer carries a `ticket`; a report names the ticket
of the last answer that the worker had *before it began to read*. So a reading is at most as old as that answer, by the
daemon's own monotonic clock.

Not every reading is a whole one: process lists are expensive, and between two of them a report repeats the last. It
then names the older ticket, that of its oldest part, so it is never taken for younger than it is. The GPUs that were
read again all the same (`reread`: those that drain) are as recent as `reading_ticket`. An answer says with `complete`
(`fresh` in JSON) that the next reading must cover everything that a grant rests on.

News of a job or an owner is reported at once, without another reading: the report repeats the last one (`repeated`),
with its tickets, so it makes nothing younger than it is. When leases end, the worker reads their GPUs at once and
alone, and reports them in a `partial` report, ahead of the whole reading that it takes meanwhile. A partial report says
nothing of what it does not show. A daemon that takes both says so (`takes_partial`); any other gets none of them.
"""

from __future__ import annotations

from dataclasses import field
from datetime import datetime
from enum import StrEnum

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Device, GpuLink, GpuReading, Job, JobSpec, JobState, LeaseState, Noun


def attempt_name(job_id: str, attempt: int) -> str:
    """Name of one attempt of a job, and of its directory: the job's id, from the second on with a number."""
    return job_id if attempt == 1 else f"{job_id}.{attempt}"


def parse_attempt_name(name: str) -> tuple[str, int]:
    """Job id and attempt that such a name stands for."""
    job_id, dot, number = name.rpartition(".")
    return (job_id, int(number)) if dot and number.isdecimal() else (name, 1)


class RunState(StrEnum):
    """How far the worker has come with one attempt of a job. `prepared`: what its node needs is there, and it waits for
    the other nodes of the job."""

    STARTING = "starting"
    PREPARED = "prepared"
    RUNNING = "running"
    EXITED = "exited"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobReport(Noun):
    """What the worker knows of a job that it was told to run. Reported again until the daemon no longer asks for it."""

    job_id: str
    """The job."""
    attempt: int = 1
    """Which of its attempts, 1 is the first."""
    state: RunState
    """How far it is."""
    started_at: datetime | None = None
    """When its first rank was up, or its launcher if it ended before that."""
    ended_at: datetime | None = None
    """When its last process ended."""
    exit_code: int | None = None
    """Exit code once it has exited, of the rank that failed first where that is known, else of the launcher; 128 + N
    when signal N ended it; null if nothing could be started."""
    reason: str | None = None
    """A sentence that says why it could not start or how it failed; while some of it is `unkillable`, why that is."""
    timed_out: bool = False
    """True when the worker ended it because of its `timeout_s`."""
    node_left: bool = False
    """True when it was ended, or was not started, because its node leaves: it is tried again elsewhere, and this
    attempt does not count."""
    traceback: str | None = None
    """Traceback of the rank that failed first, where it left one; at most 4 KiB."""
    unkillable: tuple[int, ...] = ()
    """Processes that SIGKILL does not end, because they hang in the kernel or are another user's. It has not exited
    while there are any."""
    fence_s: float | None = None
    """The fence that its supervisor keeps, see `JobSpec.fence_s`; null where it keeps none, as one of an older release,
    and before the supervisor runs."""
    log_directory: str | None = None
    """Where its log files lie on the node: `launcher.log`, `rank-0.log`, `rank-1.log`, ..."""
    follows: bool = False
    """True where it failed because its part on another node had ended or could not be reached, as far as that can be
    told here."""
    fence_reached: bool = False
    """True when it was ended, or was not started, because no daemon had answered its node for `fence_s`. It may be
    tried again although it has not started."""


def final_state(report: JobReport, *, cancelled: bool) -> tuple[JobState, str | None]:
    """The final state and the reason of an attempt that has exited, unless it is tried again. A command that ended well
    before it was stopped has succeeded; one that was cancelled and ended well after that, once it had saved what it
    had, has not."""
    was_stopped = cancelled and report.reason is not None
    if report.exit_code == 0 and not report.timed_out and not was_stopped:
        return JobState.SUCCEEDED, None
    if report.timed_out:
        return JobState.TIMED_OUT, report.reason or "ran longer than its time limit"
    if cancelled:
        return JobState.CANCELLED, "cancelled"
    return JobState.FAILED, report.reason or f"exit code {report.exit_code}"


class OwnerState(StrEnum):
    """What a worker sees of a process that owns leases."""

    ALIVE = "alive"
    GONE = "gone"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaseOwner(Noun):
    """A process that owns leases: when it ends, they end. Its pid counts in one boot and one pid namespace, see
    `gpulease_protocol.host.process_id.realm`."""

    pid: int
    """Process id."""
    start_ticks: int
    """Start time in clock ticks since boot, field 22 of /proc/PID/stat."""
    user: str | None = None
    """Login name or uid that it must run under for the worker to accept it as the owner; null where the daemon
    has confirmed it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnerReport(Noun):
    """What the worker sees of one owner. What is `gone` stays so, because a start time comes with the pid."""

    owner: LeaseOwner
    """The process."""
    state: OwnerState
    """`alive` at the moment of the report; `gone` for good; `unknown` when this worker cannot watch it."""
    reason: str | None = None
    """Why it is unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobElsewhere(Noun):
    """An attempt of a job that runs on the node, with its records in another data directory than the worker's."""

    job_id: str
    """The job."""
    attempt: int
    """Which attempt it is, from 1."""
    data_dir: str
    """The data directory that it is in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClaimedGpu(Noun):
    """A GPU of the node that its worker does not offer for leases. Another worker of the host has claimed it (a GPU is
    in the ledger of one daemon), or a job runs on it that another database ordered."""

    device: Device
    """The GPU."""
    reason: str
    """Who has claimed it, why it could not be claimed, or which job; follows "GPU 0 of gpubox is unknown: "."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeReport(Noun):
    """A worker's full view of its node."""

    worker_id: str
    """New at every start of the worker."""
    host: str
    """Host name."""
    ticket: int | None = None
    """Ticket of the last answer that had arrived before the oldest part of this reading was begun; null if none had."""
    seen: int | None = None
    """Ticket of the last answer that has arrived; null when it is `ticket`."""
    reading_ticket: int | None = None
    """Ticket of the last answer that had arrived before this reading was begun, whole or not; null when it is `ticket`,
    and where there is no reading."""
    reread: tuple[str, ...] = ()
    """UUIDs of the GPUs with processes and health read again in it; those of all others are as old as `ticket`.
    Empty when it is a whole reading."""
    repeated: bool = False
    """True when the reading is the one of the report before, which the daemon has not answered: only jobs and owners
    are news."""
    partial: bool = False
    """True when it shows the GPUs in `reread` and nothing else: all other GPUs, jobs, owners and ports are as in the
    report before. The daemon answers at once, whatever `hold_s` is."""
    problem: str | None = None
    """Why there is no reading; the node's GPUs are unknown then, and `gpus` says nothing."""
    read_s: float | None = None
    """How long the reading took; null where there is none."""
    reading_limit_s: float = 0.9
    """How long a reading of this worker may take before it reports that there is none."""
    gpus: tuple[GpuReading, ...] = ()
    """Every GPU of the node that this worker has claimed, read after `ticket` arrived."""
    claimed_elsewhere: tuple[ClaimedGpu, ...] = ()
    """Every other GPU of the node, also one on which a job of another database runs: it is known, and never granted."""
    links: tuple[GpuLink, ...] = ()
    """How its GPUs are connected, each pair once, without pairs that the driver does not know."""
    driver_version: str | None = None
    """NVIDIA driver version."""
    worker_version: str | None = None
    """Version of gpulease that the worker is of."""
    address: str | None = None
    """IP address under which other nodes reach this one; null while the worker does not know it."""
    interface: str | None = None
    """Network interface that has this address; null where none of the node's has it."""
    simulated: bool = False
    """True when the readings come from a simulation."""
    ports_in_use: tuple[int, ...] = ()
    """TCP ports of the lease range on which something listens."""
    ports_reserved: tuple[int, ...] = ()
    """TCP ports of the lease range that no other worker of the host has; empty where it could reserve none."""
    jobs: tuple[JobReport, ...] = ()
    """Every job that the worker has a record of."""
    jobs_elsewhere: tuple[JobElsewhere, ...] = ()
    """Jobs that run on the node without a record of this worker. Reported until the daemon takes a report of this
    worker in: it takes none while one of them is a job of the node."""
    realm: str | None = None
    """Boot and pid namespace in which this worker sees processes; null where it cannot tell."""
    owners: tuple[OwnerReport, ...] = ()
    """What it sees of each owner that it was told to watch."""
    sends_logs: bool = False
    """True when this worker does what `DesiredState.log_requests` asks for."""
    takes_gangs: bool = False
    """True when this worker can run its part of a job that runs on several nodes."""
    hold_s: float = 1.0
    """How long the daemon may hold its answer while nothing has changed, at most 30."""
    available_s: float | None = None
    """For how long from now the node is there, such as until its allocation ends. Nothing is placed there that may take
    longer. Null: no end is known. A duration, because no clock of a node is trusted."""
    leaving: bool = False
    """True when the node is about to go for good: nothing is granted there any more, and its worker ends its jobs."""
    left: bool = False
    """True in the last report of a worker that leaves: no process of a job is left there. The node is forgotten."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeLease(Noun):
    """A lease with GPUs on this node: active, or ended and still draining."""

    id: str
    """The lease."""
    state: LeaseState
    """`active`, or `ended` while its GPUs drain."""
    gpus: tuple[str, ...]
    """UUIDs of its GPUs."""
    owner_pid: int | None = None
    """Process that owns the lease, where that is on this node's host and the daemon knows it."""
    owner_start_ticks: int | None = None
    """Start time of that process, where the daemon knows it."""
    owner_user: str | None = None
    """As `LeaseOwner.user`."""
    job_id: str | None = None
    """The job that the daemon launched under it; null for a lease of a user's own."""
    user: str | None = None
    """Login name of its holder: only their processes may claim it. Null where the daemon does not know the holder."""
    uid: int | None = None
    """User id of its job, where a job has it. If `user` and `uid` are both null, as from a daemon that is one release
    older, the claims of every user's processes count."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GangPlace(Noun):
    """Which part of a job that runs on several nodes is this node's. Every node has as many ranks as it has GPUs of the
    job, and all have the same number."""

    rank: int
    """Rank of the node, from 0: its first global rank is this times its number of GPUs."""
    nodes: tuple[str, ...]
    """Names of all nodes of the job, by rank."""
    addresses: tuple[str, ...]
    """Their addresses, by rank. The ranks rendezvous at the first one, on the port in the lease's environment."""

    @property
    def leader(self) -> str:
        """The address at which the others meet."""
        return self.addresses[0]


@dataclass(frozen=True, slots=True, kw_only=True)
class JobOrder(Noun):
    """A job that should run on this node."""

    job_id: str
    """The job."""
    attempt: int = 1
    """Which of its attempts, 1 is the first: each is launched at most once, and has a directory of its own."""
    lease_id: str
    """Its lease."""
    uid: int | None = None
    """User who submitted it, and that it runs as; null if the daemon does not know: then it runs nowhere."""
    gid: int | None = None
    """That user's group as of submission; null: the one of the node's user database."""
    gpus: tuple[str, ...]
    """UUIDs of the GPUs it is bound to, in the order of its lease."""
    indices: tuple[int, ...] = ()
    """Their places in the daemon's list of the node's GPUs, which are the labels of simulated GPUs. These are not
    CUDA's numbers, because CUDA leaves out GPUs that are lost."""
    simulated: bool = False
    """True when its GPUs are simulated: CUDA knows nothing of them, and a mask of indices has their labels."""
    spec: JobSpec
    """What to run."""
    env: dict[str, str]
    """The lease's environment, over the job's own."""
    stop: bool = False
    """True when it should end: SIGTERM to the launcher, `grace_s`, then SIGKILL to every process of it."""
    grace_s: float = 35.0
    """Seconds between SIGTERM and SIGKILL."""
    again: bool = False
    """True when it is to end so that it starts again, after another request or with a further node: no one is told of
    that end (`JobSpec.notify`)."""
    failure: str | None = None
    """Why it has failed, as a sentence, where it is to end because of its part on another node; else null."""
    job: Job | None = None
    """The job, where its supervisor is to tell someone of its end (`JobSpec.notify`)."""
    gang: GangPlace | None = None
    """This node's part of a job that runs on several nodes; null for one on this node alone. Only a worker that takes
    gangs is given one."""
    go: bool = True
    """False while a node of the job is not prepared: then it is to be prepared, and not launched. Once launched, it
    stays launched."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogRequest(Noun):
    """A log that the daemon asks a node for, while someone waits for it. The worker sends `LogPiece`s."""

    id: str = ""
    """Names this request; random."""
    job_id: str
    """The job."""
    attempt: int = 1
    """Which of its attempts."""
    name: str | None = None
    """Name of the file; null: those of all ranks, merged by lines."""
    label: str | None = None
    """The launcher's lines come after this name in brackets: that of the node, where the logs of several are merged."""
    offsets: dict[str, int] = field(default_factory=dict)
    """Where to begin in each file, by its rank or `launcher`."""
    tail: int | None = None
    """Begin with this number of last lines of each file."""
    follow: bool = True
    """Wait for more; false once the job has ended: send what is there, also lines that are not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogPiece(Noun):
    """Body of `POST /v1/nodes/{name}/logs`: the next bytes of a log. The answer is a `LogProgress`."""

    request_id: str
    """The request."""
    number: int
    """Counts the pieces of the request, from 0. The first one has no content: it says where the log begins."""
    offset: str
    """Where the log goes on after it: a number of bytes, or one for each file that is merged."""
    content: str = ""
    """The bytes, in base64."""
    total_bytes: int = 0
    """How long the log is now."""
    kept_bytes: int = 0
    """How much of that has not been dropped."""
    end: bool = False
    """True for the last one."""
    problem: str | None = None
    """Why there is no more of it; follows "the log of job-1 on n1: "."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LogProgress(Noun):
    """What the daemon has of a log. Answered when the piece was taken, or after a while where it could not be."""

    next_number: int
    """The piece that it waits for: the same again, the next one, or for a new worker a later one."""
    is_wanted: bool
    """False when no one waits for more."""
    offsets: dict[str, int] = field(default_factory=dict)
    """Where that piece begins in each file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredState(Noun):
    """Everything that should be true on a node."""

    ticket: int
    """To be named in the report of the next reading."""
    complete: bool = True
    """True when the next reading must be complete; false when the answer only came because its time ran out."""
    takes_partial: bool = False
    """True when the daemon takes partial reports, and knows those that repeat a reading."""
    database_id: str | None = None
    """Tells the daemon's database from all others, its own backups included; null for one that is a release older."""
    daemon_address: str | None = None
    """IP address at which other hosts reach the daemon, for a worker that reaches it without one; null where it
    listens on loopback alone."""
    leases: tuple[NodeLease, ...] = ()
    """Every lease with GPUs here that are held or draining."""
    paused: bool = False
    """True while an administrator wants NVML closed: the probe process ends, and the worker reports `PAUSED`."""
    jobs: tuple[JobOrder, ...] = ()
    """Every job that should run, or stop, here. A job that the worker knows and that is missing here is to be stopped
    at once if it still runs, and forgotten (its logs kept). One that was last ordered from another database goes on,
    because this daemon has not decided its end. Its GPUs are in `claimed_elsewhere` until it ends."""
    owners: tuple[LeaseOwner, ...] = ()
    """Every process to watch, each once however many leases it owns; those of queued leases too. One that is missing
    here is no longer to be watched."""
    log_requests: tuple[LogRequest, ...] = ()
    """Every log to be sent. One that is missing here is no longer wanted."""


JUST_STARTED = "the worker has just started"
"""`problem` of a worker's first report, which it sends to hear what is wanted before it reads anything."""
PAUSED = "paused by an administrator"
"""`problem` of a worker that was told to pause, once its probe has ended."""
MAX_OWNERS = 1024
"""Owners that one worker watches, at most: each takes a part of the report and a file descriptor."""
LEASE_PORTS = range(21000, 23000)
"""TCP ports that are leased with GPUs as `MASTER_PORT`: below the ephemeral range of Linux, which begins at 32768."""
