"""Reservations: GPUs that are kept for a user or a group in a window of time.

An administrator makes them while the daemon runs. No lease of anyone else is granted such a GPU if it could last into
the window.
"""

from __future__ import annotations

from dataclasses import field
from datetime import datetime
from typing import Annotated

from gpulease_protocol.bounds import MAX_NAME, MAX_UUID, Bounds, check_bounds, check_field
from gpulease_protocol.device import Device
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.noun import Noun
from gpulease_protocol.requests import RequestBody

MAX_RESERVED_GPUS = 1024
"""GPUs of one reservation, at most."""
MAX_REASON = 500
"""Characters of its reason, at most."""
NO_NAME = f"must be a name of 1 to {MAX_NAME} characters that can be printed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation(Noun):
    """GPUs that are kept for a user or a group from one time to another."""

    id: str
    """Its id."""
    gpus: tuple[Device, ...]
    """Which GPUs. Those of a reservation for a number of GPUs were chosen when it was made."""
    from_at: datetime
    """From when on they are kept."""
    to_at: datetime
    """Until when."""
    user: str | None = None
    """For whom; null where it is for a group."""
    group: str | None = None
    """For the users of which group of limits; null where it is for a user."""
    reason: str | None = None
    """What for."""
    made_at: datetime
    """When it was made."""
    made_by: str | None = None
    """Who made it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ReservationRequest(RequestBody):
    """Body of `POST /v1/reservations`: GPUs by UUID, or so many of a node; for a user, or for a group of limits."""

    node: Annotated[str | None, Bounds(minLength=1, maxLength=MAX_NAME, rule=NO_NAME)] = None
    """The node where `count` GPUs are to be kept."""
    count: Annotated[int | None, Bounds(minimum=1, maximum=MAX_RESERVED_GPUS)] = None
    """How many GPUs of the node. The daemon chooses them."""
    gpus: Annotated[
        list[Annotated[str, Bounds(minLength=1, maxLength=MAX_UUID)]], Bounds(maxItems=MAX_RESERVED_GPUS)
    ] = field(default_factory=list)
    """UUIDs of the GPUs, instead of `node` and `count`."""
    from_at: datetime
    """From when on, with the offset of its time zone; a time that has passed means now."""
    to_at: datetime
    """Until when; at most 366 days ahead."""
    user: Annotated[str | None, Bounds(minLength=1, maxLength=MAX_NAME, rule=NO_NAME)] = None
    """For whom."""
    group: Annotated[str | None, Bounds(minLength=1, maxLength=MAX_NAME, rule=NO_NAME)] = None
    """Or for the users of which group: one that `PUT /v1/limits/group/{name}` has made."""
    reason: Annotated[str | None, Bounds(minLength=1, maxLength=MAX_REASON)] = None
    """What for; who is kept waiting is told."""

    def __post_init__(self) -> None:
        check_bounds(self)
        named = (self.node is not None, self.count is not None, bool(self.gpus))
        check_field(named in ((True, True, False), (False, False, True)), "gpus", "needs UUIDs, or else node and count")
        check_field(len(set(self.gpus)) == len(self.gpus), "gpus", "must name each GPU once")
        check_field((self.user is None) != (self.group is None), "user", "is needed, or else group, and not both")
        check_field((self.user or self.group or "").isprintable(), "user", NO_NAME)
        check_field((self.reason or "").isprintable(), "reason", "must have characters that can be printed alone")
        for name in ("from_at", "to_at"):
            check_field(getattr(self, name).tzinfo is not None, name, "must say its offset from UTC, as in +00:00")
        check_field(self.from_at < self.to_at, "to_at", "must be later than from_at")
