"""Parts of a job: which jobs it waits for, and its earlier attempts."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal

from gpulease_protocol.bounds import Bounds
from gpulease_protocol.noun import Noun

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
