"""Who may ask: roles, and bearer tokens for callers whom no connection names. The `token` of a lease is another thing.

The bearer token itself is shown once, in `NewBearerToken.bearer`; a daemon keeps no more than its hash.
"""

from __future__ import annotations

from datetime import date, datetime
from enum import StrEnum
from typing import Annotated

from gpulease_protocol.bounds import MAX_NAME, OVER_0, TIME, Bounds, check_bounds, check_field
from gpulease_protocol.budgets import Budget, BudgetUse
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Noun
from gpulease_protocol.requests import MAX_COUNT, RequestBody

MAX_USER = 50
"""Characters in the name of a token's user, at most; Linux allows 32."""
MAX_NOTE = 200
"""Characters in a token's note, at most."""
MAX_EXPIRES_S = 36_500 * 24 * 3600.0
NO_USER = f"must be a name of 1 to {MAX_USER} characters without spaces and colons"
MAX_JOIN_S = 7 * 24 * 3600.0
"""For how long a token of role `join` may be valid."""
NO_EXPIRY = "must be over 0 seconds and at most 100 years"


class Role(StrEnum):
    """What a caller may do. Each of the first three may do what the one before may; `worker` may report for nodes and
    nothing else; `job` is a job on another host, which may look at itself and its lease, and no token is made for it;
    `join` may become the worker of one node, once."""

    VIEWER = "viewer"
    USER = "user"
    ADMIN = "admin"
    WORKER = "worker"
    JOB = "job"
    JOIN = "join"


MADE_ROLES = tuple(role for role in Role if role is not Role.JOB)
"""The roles that a token can be made for."""


class IdentifiedBy(StrEnum):
    """How the daemon knows who calls. `socket` and `loopback`: the kernel shows the user. `token`: by the
    bearer token that was sent."""

    SOCKET = "socket"
    LOOPBACK = "loopback"
    TOKEN = "token"  # noqa: S105


@dataclass(frozen=True, slots=True, kw_only=True)
class Identity(Noun):
    """How the daemon identifies the caller."""

    user: str
    """Login name, or the uid as text where it has none; with a bearer token, the user that the token is for."""
    uid: int | None = None
    """Uid of that user on the daemon's host; null where the host does not know the user."""
    role: Role
    """What the caller may do."""
    identified_by: IdentifiedBy
    """How the daemon knows."""
    token_id: str | None = None
    """Id of the bearer token that was sent; null without one."""
    node: str | None = None
    """The only node that the caller may report for, with a token of role `worker`, or join as, with one of role `join`;
    else null."""
    worker_host: str | None = None
    """Host of the worker that reports for `node`; null without a node, and while none reports."""
    may: tuple[str, ...] = ()
    """What the caller may do to whatever it is, beyond looking: each the `operationId` of an operation in the OpenAPI
    document, such as `createLease` or `cordonGpu`. Empty from a daemon that does not tell."""
    may_own: tuple[str, ...] = ()
    """What the caller may do to leases and jobs of their own alone, such as `releaseLease`."""
    budget: BudgetUse | None = None
    """What may be held with the token that was sent, and what is used of it; null without a budget."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BearerToken(Noun):
    """A bearer token, without its secret."""

    id: str
    """Unique, never reused; names the token, and is no secret."""
    user: str
    """Its user: requests with this token are made as this user."""
    uid: int | None = None
    """Uid of that user on the daemon's host when the token was created: jobs submitted with the token run under it.
    Null where the host did not know the user; then no worker runs such jobs, and the token is revoked as soon as that
    host has a user of this name, unless its role is `worker`."""
    role: Role
    """What it allows."""
    node: str | None = None
    """With role `worker` the only node that it may report for, null until its first report; with role `join` the one
    that it may join as; null for other roles."""
    note: str = ""
    """Free text: what it is for."""
    created_at: datetime
    """When it was made."""
    created_by: str | None = None
    """Who made it."""
    expires_at: datetime | None = None
    """From when on it is refused; null: never."""
    last_used_on: date | None = None
    """The last day, in UTC, on which it was used; null: not since use has been recorded."""
    max_gpus: int | None = None
    """GPUs that may be held with it at a time; null for no limit."""
    max_lease_s: float | None = None
    """For how long a lease, or an attempt of a job, that is asked for with it may hold GPUs; null for no limit."""
    gpu_hours_per_day: float | None = None
    """GPU-hours that may be held with it in one day, which begins at 00:00 UTC; null for no limit."""

    @property
    def budget(self) -> Budget | None:
        """What may be held with it; None where nothing is limited."""
        budget = Budget(max_gpus=self.max_gpus, max_lease_s=self.max_lease_s, gpu_hours_per_day=self.gpu_hours_per_day)
        return budget if budget.limits_anything else None


@dataclass(frozen=True, slots=True, kw_only=True)
class NewBearerToken(BearerToken):
    """A bearer token with its secret, which is shown only once."""

    bearer: str
    """What to send as `Authorization: Bearer ...`, or to put into GPULEASE_TOKEN. It is not shown again."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TokenRequest(RequestBody):
    """Body of `POST /v1/tokens`."""

    user: Annotated[str, Bounds(minLength=1, maxLength=MAX_USER, pattern="^[^ :]*$", rule=NO_USER)]
    """Its user: a login name of the daemon's host, or any other name for a caller who has none there."""
    role: Role = Role.USER
    """What it allows: `viewer`, `user`, `admin`, `worker` or `join`."""
    expires_s: Annotated[float | None, Bounds(exclusiveMinimum=0, maximum=MAX_EXPIRES_S, rule=NO_EXPIRY)] = None
    """For how many seconds it is valid; null: until it is revoked."""
    node: Annotated[str | None, Bounds(minLength=1, maxLength=MAX_NAME)] = None
    """With role `worker`, the only node that it may report for; when null, the first that it reports for. With role
    `join`, the node that it may join as, once."""
    note: Annotated[str, Bounds(maxLength=MAX_NOTE)] = ""
    """Free text: what it is for."""
    max_gpus: Annotated[int | None, Bounds(minimum=1, maximum=MAX_COUNT)] = None
    """With role `user`: GPUs that may be held with it at a time; null for no limit."""
    max_lease_s: Annotated[float | None, TIME] = None
    """With role `user`: for how long a lease, or an attempt of a job, may hold GPUs, at most a year; null for no
    limit."""
    gpu_hours_per_day: Annotated[float | None, OVER_0] = None
    """With role `user`: GPU-hours that may be held with it in one day, which begins at 00:00 UTC; null for no limit."""

    def __post_init__(self) -> None:
        check_bounds(self)
        check_field(self.user.isprintable(), "user", NO_USER)
        check_field(self.role in MADE_ROLES, "role", f"must be {', '.join(MADE_ROLES)}")
        of_node = self.role in (Role.WORKER, Role.JOIN)
        check_field(self.node is None or of_node, "node", "is for tokens of role worker and join")
        if self.role is Role.JOIN:
            check_field(self.node is not None, "node", "must be given for a token of role join")
            is_short = self.expires_s is not None and self.expires_s <= MAX_JOIN_S
            check_field(is_short, "expires_s", "must be at most 7 days for a token of role join")
        for name in ("max_gpus", "max_lease_s", "gpu_hours_per_day"):
            check_field(getattr(self, name) is None or self.role is Role.USER, name, "is for tokens of role user")
