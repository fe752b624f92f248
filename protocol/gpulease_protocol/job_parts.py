"""Parts of a job: which jobs it waits for, what runs on each of its nodes, and its earlier attempts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from gpulease_protocol.bounds import Bounds
from gpulease_protocol.noun import Noun
from gpulease_protocol.states import PartState

DEPENDENCY_PATTERN = "^(job|array)-[A-Za-z0-9._-]{1,64}$"
NO_DEPENDENCY = "must be the id of a job or an array"


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
    """True when it was ended so that a request of higher priority could start; it does not count as a retry either."""
