"""The closed sets of words in the public nouns: states, reasons, modes. Import them from `gpulease_protocol.model`."""

from __future__ import annotations

from enum import StrEnum


class GpuState(StrEnum):
    """What a GPU can be used for now. The first that applies, in this order."""

    UNKNOWN = "unknown"
    UNHEALTHY = "unhealthy"
    PROHIBITED = "prohibited"
    LEASED = "leased"
    DRAINING = "draining"
    CORDONED = "cordoned"
    FOREIGN = "foreign"
    FREE = "free"


class Activity(StrEnum):
    """What happens on a leased GPU."""

    STARTING = "starting"
    ACTIVE = "active"
    IDLE = "idle"
    CONFLICT = "conflict"


class ComputeMode(StrEnum):
    """NVML's compute mode: how many processes may use the GPU at once."""

    DEFAULT = "default"
    EXCLUSIVE_PROCESS = "exclusive_process"
    PROHIBITED = "prohibited"


class ProcessType(StrEnum):
    """Through which interface a process uses a GPU."""

    COMPUTE = "compute"
    GRAPHICS = "graphics"
    MPS = "mps"


class LeaseState(StrEnum):
    """Where a lease is in its life; it only ever moves to the right, except that a late renewal revives it."""

    QUEUED = "queued"
    ACTIVE = "active"
    ENDED = "ended"


class EndReason(StrEnum):
    """Why a lease ended."""

    RELEASED = "released"
    EXPIRED = "expired"
    HOLDER_DIED = "holder_died"
    CANCELLED = "cancelled"
    REVOKED = "revoked"
    JOB_FINISHED = "job_finished"
    NODE_LOST = "node_lost"
    BUDGET_SPENT = "budget_spent"
    TIME_OVER = "time_over"
    PREEMPTED = "preempted"
    RECLAIMED_IDLE = "reclaimed_idle"


class Liveness(StrEnum):
    """How the daemon knows that a holder lives. `process`: a worker watches its owner. The lease ends as soon as
    the owner does, and lasts as long as it lives; in the queue, as long as its holder waits. `heartbeat`: it renews.
    `job`: the daemon launched it."""

    PROCESS = "process"
    HEARTBEAT = "heartbeat"
    JOB = "job"


class JobState(StrEnum):
    """Where a job is in its life. The last five are final."""

    QUEUED = "queued"
    STARTING = "starting"
    RUNNING = "running"
    STOPPING = "stopping"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"
    TIMED_OUT = "timed_out"
    LOST = "lost"

    @property
    def final(self) -> bool:
        """True when the job will never change again. False for a word of a newer daemon: see `Job.ended`."""
        return self in (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.TIMED_OUT, JobState.LOST)


class ExpectedBasis(StrEnum):
    """On what it rests when a waiting request is expected to start. `declared`: every lease lasts as long as was
    declared. `history`: leases last as long as earlier ones of the same users, or of all, did."""

    DECLARED = "declared"
    HISTORY = "history"


class PartState(StrEnum):
    """How far the part of a job on one of its nodes is. `starting`: it is being prepared, or was launched just now;
    `prepared`: it waits for the others; `lost`: how it ended is not known."""

    STARTING = "starting"
    PREPARED = "prepared"
    RUNNING = "running"
    EXITED = "exited"
    LOST = "lost"

    @property
    def final(self) -> bool:
        """True when nothing of it runs any more."""
        return self in (PartState.EXITED, PartState.LOST)


class NodeState(StrEnum):
    """Whether a node's readings can be trusted."""

    READY = "ready"
    UNKNOWN = "unknown"


class NodeMode(StrEnum):
    """How an administrator uses a node. `draining`: nothing is granted there, what runs goes on. `paused`: the
    same, and NVML is closed, so that a GPU reset, a MIG change or a driver unload is possible."""

    ACTIVE = "active"
    DRAINING = "draining"
    PAUSED = "paused"


class Launcher(StrEnum):
    """What starts a job's ranks. With `lightning` and `fabric` the script does, with `plain` no one or the script."""

    TORCHRUN = "torchrun"
    ACCELERATE = "accelerate"
    DEEPSPEED = "deepspeed"
    LIGHTNING = "lightning"
    FABRIC = "fabric"
    HOROVODRUN = "horovodrun"
    BAGUA = "bagua"
    PLAIN = "plain"


class Mask(StrEnum):
    """How CUDA_VISIBLE_DEVICES names the GPUs of a lease. `uuids`: by UUID. `indices`: by CUDA's own numbers in PCI
    order, for programs that read nothing else."""

    UUIDS = "uuids"
    INDICES = "indices"


class TopologyMode(StrEnum):
    """What a request asks of the connections between the GPUs that it gets on a node."""

    REQUIRED = "required"
    PREFERRED = "preferred"
    ANY = "any"


class Priority(StrEnum):
    """Which requests go first. `interactive`: for people who wait in front of a screen; of this a user may have little
    at a time, and not for long. `scavenge`: for work that may wait for hours."""

    INTERACTIVE = "interactive"
    NORMAL = "normal"
    SCAVENGE = "scavenge"


class Selection(StrEnum):
    """How a request names its GPUs."""

    COUNT = "count"
    LISTED = "listed"
    ALL = "all"
    AUTO = "auto"
