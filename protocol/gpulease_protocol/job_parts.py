"""Parts of a job: what it runs, which jobs it waits for, what runs on each of its nodes, and its earlier attempts."""

from __future__ import annotations

from dataclasses import field
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from gpulease_protocol.bounds import Bounds
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.noun import Noun
from gpulease_protocol.states import Launcher, Mask, PartState, Priority

DEPENDENCY_PATTERN = "^(job|array)-[A-Za-z0-9._-]{1,64}$"
NO_DEPENDENCY = "must be the id of a job or an array"


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec(Noun):
    """What a job runs, fixed when it is submitted."""

    command: tuple[str, ...]
    """Script and arguments; with launcher `plain`, the program and its arguments."""
    gpus: int
    """How many GPUs; a launcher that starts ranks starts one on each. With several nodes, on each of them."""
    nodes: int = 1
    """On how many nodes it runs, with a launcher on each."""
    max_nodes: int | None = None
    """For an elastic job: it runs on `nodes` to this many nodes. Null: exactly on `nodes`."""
    launcher: Launcher = Launcher.TORCHRUN
    """What starts the ranks."""
    environment: dict[str, str] = field(default_factory=dict)
    """The job's variables. PATH, locale and library paths are the worker's where these do not set them."""
    working_directory: str | None = None
    """Where the command runs; the job's own directory when null."""
    interpreter: str | None = None
    """Python that runs launcher and script; when null that of VIRTUAL_ENV in `environment`, else the worker's own."""
    timeout_s: float | None = None
    """End the job after it has run for this long; null for no limit."""
    max_restarts: int = 0
    """How many times the launcher itself may start all ranks again, under the same lease."""
    retries: int = 0
    """How many times the job is started again after it failed, each time under a new lease."""
    umask: int | None = None
    """File mode creation mask; when null 0o022 under a root worker, else the worker's."""
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Resource limits, soft and hard, by name: `nofile` is RLIMIT_NOFILE of setrlimit(2). -1 is unlimited."""
    mask: Mask | None = None
    """How CUDA_VISIBLE_DEVICES names its GPUs; null: as its launcher and command need it."""
    notify: str | None = None
    """URL that the job's supervisor calls, or command that it runs, when the job has ended; null for none."""
    fence_s: float | None = None
    """Its node ends it after so many seconds without an answer of any daemon; null: it survives every cut."""
    priority: Priority = Priority.NORMAL
    """Requests of a higher priority go first. It means nothing to its node."""
    preemptible: bool = False
    """Whether it may end for others. It means nothing to its node, either."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobDependency(Noun):
    """A job or array that must end before another job may start."""

    __pydantic_config__: ClassVar[dict[str, Any]] = Noun.__pydantic_config__ | {"extra": "forbid"}

    job: Annotated[str, Bounds(pattern=DEPENDENCY_PATTERN, rule=NO_DEPENDENCY)]
    """Id of the job, or of an array for all of its jobs."""
    when: Literal["succeeded", "ended"] = "succeeded"
    """`succeeded`: it must end well; if it does not, the job that waits is cancelled. `ended`: any end will do. A job
    that is tried again has not ended."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobMember(Noun):
    """The part of a job on one of its nodes, where it runs on several."""

    rank: int
    """Rank of the node: its first global rank is this times the GPUs of a node."""
    node: str
    """Its name."""
    address: str
    """IP address at which the other nodes reach it."""
    state: PartState = PartState.STARTING
    """How far it is."""
    exit_code: int | None = None
    """As `Job.exit_code`, of this part; null before its end, and if nothing could be started."""
    reason: str | None = None
    """A sentence that says what it waits for, or why it failed."""
    failure: int | None = None
    """Which of the parts it was to fail, as the daemon learned of it: 1 for the first; null if it has not failed."""
    follows: bool = False
    """True where it failed because another part had ended or was out of reach, as far as that can be told on its
    node."""
    timed_out: bool = False
    """True when it was ended because of the job's `timeout_s`."""
    node_left: bool = False
    """True where it ended because its node left."""
    fenced: bool = False
    """True once its node has said that it keeps the job's `fence_s`."""
    fence_reached: bool = False
    """True where it was ended because no daemon had answered its node for `fence_s`."""
    joined_later: bool = False
    """True where its node joined an elastic job that ran already. If such a part fails, the job goes on without it."""
    log_directory: str | None = None
    """Where its log files are on its node; null until it starts, and for other users."""


@dataclass(frozen=True, slots=True, kw_only=True)
class JobAttempt(Noun):
    """One attempt of a job that failed and was tried again."""

    number: int
    """1 is the first."""
    lease_id: str
    """Its lease."""
    node: str | None = None
    """Where it ran."""
    exit_code: int | None = None
    """As `Job.exit_code`."""
    reason: str | None = None
    """Why it failed."""
    started_at: datetime | None = None
    """When its first rank was up; null if none was."""
    ended_at: datetime
    """When it ended."""
    log_directory: str | None = None
    """Directory of its log files, on its node."""
    node_left: bool = False
    """True when its node left, such as at the end of its allocation; it then does not count as one of `retries`."""
    regrouped: bool = False
    """True when an elastic job went on with other nodes, under the same lease; it does not count as a retry either."""
    preempted: bool = False
    """True when it was ended so that a request that waited could start; it does not count as a retry either."""
