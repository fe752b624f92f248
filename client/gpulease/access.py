"""Who may ask: roles, and bearer tokens for callers whom no connection names. The `token` of a lease is another thing.

The bearer token itself is shown once, in `NewBearerToken.bearer`; a daemon keeps no more than its hash.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from enum import StrEnum
from typing import Annotated

from gpulease.bounds import Bounds
from gpulease.model import Noun
from gpulease.wire import Body, require

MAX_USER = 50
"""Characters in the name of a token's user, at most; Linux allows 32."""
MAX_NOTE = 200
"""Characters in a token's note, at most."""
MAX_EXPIRES_S = 36_500 * 24 * 3600.0


class Role(StrEnum):
    """What a caller may do. Each of the first three may do what the one before may; `worker` may report for nodes and
    nothing else."""

    VIEWER = "viewer"
    USER = "user"
    ADMIN = "admin"
    WORKER = "worker"


@dataclass(frozen=True, slots=True, kw_only=True)
class BearerToken(Noun):
    """A bearer token, without what makes it one."""

    id: str
    """Unique, never reused; names the token, and is no secret."""
    user: str
    """Whose it is: what is asked for with it is this user's."""
    uid: int | None = None
    """That user's number on the daemon's host when the token was made, as whom his jobs run; null where the host did
    not know him. Such a token submits no jobs that a worker would run."""
    role: Role
    """What it allows."""
    note: str = ""
    """Free text: what it is for."""
    created_at: datetime
    """When it was made."""
    created_by: str | None = None
    """Who made it."""
    expires_at: datetime | None = None
    """From when on it is refused; null: never."""
    last_used_on: date | None = None
    """The last day, in UTC, on which something was asked for with it; null: on none since this is recorded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBearerToken(BearerToken):
    """A bearer token as it is shown once."""

    bearer: str
    """What to send as `Authorization: Bearer ...`, or to put into GPULEASE_TOKEN. It is not shown again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest(Body):
    """Body of `POST /v1/tokens`."""

    user: Annotated[str, Bounds(minLength=1, maxLength=MAX_USER, pattern="^[^ :]*$")]
    """Whose it is to be: a login name of the daemon's host, or any other name for a caller who has none there."""
    role: Role = Role.USER
    """What it allows: `viewer`, `user`, `admin` or `worker`."""
    expires_s: Annotated[float | None, Bounds(exclusiveMinimum=0, maximum=MAX_EXPIRES_S)] = None
    """For how many seconds it is good; null: until it is revoked."""
    note: Annotated[str, Bounds(maxLength=MAX_NOTE)] = ""
    """Free text: what it is for."""

    def __post_init__(self) -> None:
        require(
            0 < len(self.user) <= MAX_USER and self.user.isprintable() and not {" ", ":"} & set(self.user),
            "user",
            f"must be a name of 1 to {MAX_USER} characters without spaces and colons",
        )
        require(self.role in tuple(Role), "role", f"must be {', '.join(Role)}")
        require(len(self.note) <= MAX_NOTE, "note", f"must be at most {MAX_NOTE} characters")
        require(
            self.expires_s is None or 0 < self.expires_s <= MAX_EXPIRES_S,
            "expires_s",
            f"must be over 0 seconds and at most 100 years, not {self.expires_s}",
        )
