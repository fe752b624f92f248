"""Limits: what a user, a group or a bearer token may have at a time, and in a window of time.

An administrator sets them while the daemon runs. Those of a user stand over the defaults of the configuration; those of
a group count what all of its members have, and those of a token what is held with it. A request must be within all that
apply to it.
"""

from __future__ import annotations

from dataclasses import field
from datetime import datetime
from enum import StrEnum
from typing import Annotated

from gpulease_protocol.bounds import MAX_NAME, OVER_0, TIME, Bounds, check_bounds, check_field
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.noun import Noun
from gpulease_protocol.requests import RequestBody

MAX_LIMIT = 1_000_000
"""The greatest number of GPUs, leases or requests that a limit may name: as good as none."""
MAX_MEMBERS = 1000
"""Users in one group, at most."""
WEEK_S = 7 * 24 * 3600.0
NO_MEMBER = f"must be a name of 1 to {MAX_NAME} characters that can be printed"
NO_WINDOW = "must be 3600 to 7776000 seconds (an hour to 90 days)"


class LimitKind(StrEnum):
    """What a limit is set for."""

    USER = "user"
    GROUP = "group"
    TOKEN = "token"  # noqa: S105

    __hash__ = str.__hash__  # that of Enum takes three times as long, and these are parts of keys


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(Noun):
    """What may be had. Null limits nothing here."""

    max_gpus: int | None = None
    """GPUs in active leases at a time, those of jobs included. More wait."""
    max_leases: int | None = None
    """Active leases at a time, those of jobs included. More wait."""
    max_queued: int | None = None
    """Requests that wait at a time. More are refused."""
    max_lease_s: float | None = None
    """How long one lease, or one attempt of a job, may hold its GPUs. More in `time_s` or `timeout_s` is refused; what
    declares no time is given this one, and ends after it."""
    gpu_hours: float | None = None
    """GPU-hours in the last `window_s`. When they are used requests wait; nothing ends."""
    window_s: float = WEEK_S
    """How long the window is in which `gpu_hours` are counted."""

    @property
    def limits_grants(self) -> bool:
        """True where a request may have to wait for them."""
        return (self.max_gpus, self.max_leases, self.gpu_hours) != (None, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitUse(Limits):
    """The limits that hold for a user, a group or a token, and what is used of them."""

    kind: LimitKind
    """What they are set for."""
    name: str
    """The user, the group, or the id of the token."""
    members: tuple[str, ...] = ()
    """The users in the group; empty for others."""
    defaults: tuple[str, ...] = ()
    """Which of them are the configuration's, as no others are set for this user: names of fields."""
    gpus: int
    """GPUs held now."""
    leases: int
    """Active leases now."""
    queued: int
    """Requests that wait now."""
    gpu_hours_used: float | None = None
    """GPU-hours held in the last `window_s`, rounded up to a 24th of it; null while `gpu_hours` is."""
    set_at: datetime | None = None
    """When they were last set; null for defaults alone."""
    set_by: str | None = None
    """Who set them."""


LIMIT = Bounds(minimum=1, maximum=MAX_LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitsRequest(RequestBody):
    """Body of `PUT /v1/limits/{kind}/{name}`: all limits of a user, a group or a token. What is left out is not limited
    by them; for a user the default of the configuration holds then."""

    max_gpus: Annotated[int | None, LIMIT] = None
    """GPUs in active leases at a time, those of jobs included."""
    max_leases: Annotated[int | None, LIMIT] = None
    """Active leases at a time, those of jobs included."""
    max_queued: Annotated[int | None, LIMIT] = None
    """Requests that wait at a time."""
    max_lease_s: Annotated[float | None, TIME] = None
    """How long one lease, or one attempt of a job, may hold its GPUs; at most a year."""
    gpu_hours: Annotated[float | None, OVER_0] = None
    """GPU-hours in the last `window_s`."""
    window_s: Annotated[float, Bounds(minimum=3600, maximum=7776000, rule=NO_WINDOW)] = WEEK_S
    """How long the window is in which `gpu_hours` are counted."""
    members: Annotated[
        list[Annotated[str, Bounds(minLength=1, maxLength=MAX_NAME, rule=NO_MEMBER)]],
        Bounds(maxItems=MAX_MEMBERS),
    ] = field(default_factory=list)
    """Users of the group. A user is in one group at most."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_field(all(user.isprintable() for user in self.members), "members", NO_MEMBER)
        check_field(len(set(self.members)) == len(self.members), "members", "must name each user once")

    def limits(self) -> Limits:
        """What may be had."""
        return Limits(
            max_gpus=self.max_gpus,
            max_leases=self.max_leases,
            max_queued=self.max_queued,
            max_lease_s=self.max_lease_s,
            gpu_hours=self.gpu_hours,
            window_s=self.window_s,
        )
