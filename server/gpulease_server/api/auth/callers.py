"""Callers, identified by bearer token or by what the kernel shows of their connection."""

from __future__ import annotations

import os
from functools import lru_cache

from gpulease_protocol.budgets import Budget
from gpulease_protocol.errors import NotAuthenticated
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Holder, LeaseState
from gpulease_protocol.tokens import Role
from gpulease_server.api.access_settings import AccessSettings
from gpulease_server.api.auth.peer_credentials import ConnectionType, PeerCredentials
from gpulease_server.api.auth.user_names import refresh_user_name, user_name
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import LimitKey
from gpulease_server.runtime.bearer_tokens import BearerTokens
from gpulease_server.runtime.group_members import GroupMembers

PRIVILEGED_UIDS = frozenset({0, os.geteuid()})
"""Root and the daemon's own user."""
SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Who sends a request."""

    user: str | None = None
    """Login name, or the uid as text if there is none; of a token, the name that it was made for. None: unknown."""
    uid: int | None = None
    """User id on this host; None if unknown."""
    gid: int | None = None
    role: Role | None = None
    """None for an unknown caller."""
    identified_by: str | None = None
    """`socket`, `loopback` or `token`."""
    token_id: str | None = None
    """Id of the bearer token that identified the caller."""
    budget: Budget | None = None
    """What may be held with that token."""
    may_report: bool = False
    """True if they may report for nodes."""
    node: str | None = None
    """The only node that they may report for; None: any, or of a worker's token the first."""
    lease_id: str | None = None
    """The lease of a job that calls with its own token; None for everyone else."""
    job_id: str | None = None
    """That job."""

    @property
    def is_admin(self) -> bool:
        """True for an administrator."""
        return self.role is Role.ADMIN

    def owns(self, holder: Holder | None) -> bool:
        """True if the caller is this holder. A lease may name the uid, from a time when the name was not found."""
        if holder is None or holder.user is None or self.user is None:
            return False
        return holder.user == self.user or (self.uid is not None and holder.user == str(self.uid))

    def limit_keys(self, ledger: Ledger) -> tuple[LimitKey, ...]:
        """The limits that are the caller's own: of the user, the token and the group."""
        return ledger.limits.keys_of(Holder(user=self.user, token_id=self.token_id))

    def may_see(self, holder: Holder | None) -> bool:
        """True if the caller may see what is private to this holder."""
        return self.is_admin or self.owns(holder)


ANONYMOUS = Caller()


def trusted_peer(peer: PeerCredentials, access: AccessSettings) -> PeerCredentials:
    """The peer as far as it can be trusted: behind a proxy every TCP connection is the proxy's."""
    if access.behind_proxy and peer.connection is not ConnectionType.SOCKET:
        return PeerCredentials()
    return peer


async def caller_from_peer(peer: PeerCredentials, access: AccessSettings, admin_groups: GroupMembers) -> Caller:
    """The caller at the other end of a connection; `ANONYMOUS` if the kernel does not show its user."""
    if peer.uid is None:
        return ANONYMOUS
    await refresh_user_name(peer.uid)
    user, privileged = user_name(peer.uid), is_privileged(peer)
    admin = privileged or user in access.admins or await admin_groups.include(peer.uid)
    return _caller(user, peer, privileged, admin)


@lru_cache(1000)
def _caller(user: str, peer: PeerCredentials, privileged: bool, admin: bool) -> Caller:
    """The same object for each request of a connection, because it is made for each."""
    role = Role.ADMIN if admin else Role.USER
    return Caller(user, peer.uid, peer.gid, role, peer.connection.value, may_report=privileged)


def is_privileged(peer: PeerCredentials) -> bool:
    """True if the kernel shows that the peer is root or the daemon's own user, on the daemon's host."""
    return peer.uid in PRIVILEGED_UIDS


def bearer_in(header: str) -> str:
    """The bearer token in an Authorization header; empty if it has none."""
    return header[len(SCHEME) :].strip() if header.lower().startswith(SCHEME) else ""


async def caller_from_token(header: str, bearers: BearerTokens | None, ledger: Ledger) -> Caller:
    """The caller whom an Authorization header names. Raises `NotAuthenticated` unless it carries a valid token."""
    bearer_token = bearer_in(header)
    if bearers is not None and (lease_id := await bearers.lease_of_job(bearer_token)) is not None:
        return _caller_of_job(lease_id, ledger)
    token = await bearers.authenticate(bearer_token) if bearers is not None and bearer_token else None
    if token is None:
        raise invalid_token()
    may_report = token.role in (Role.ADMIN, Role.WORKER)
    return Caller(
        token.user,
        token.uid,
        token.gid,
        token.role,
        "token",
        token_id=token.token_id,
        budget=token.budget,
        may_report=may_report,
        node=token.node,
    )


def _caller_of_job(lease_id: str, ledger: Ledger) -> Caller:
    record = ledger.leases.get(lease_id)
    job = None if record is None else ledger.jobs.get(record.lease.job_id or "")
    if record is None or job is None or not _job_holds(lease_id, ledger):
        raise invalid_token()
    user = record.lease.holder.user or str(job.uid)
    return Caller(user, job.uid, job.gid, Role.JOB, "token", lease_id=lease_id, job_id=job.job.id)


def _job_holds(lease_id: str, ledger: Ledger) -> bool:
    """True while the attempt of a job under a lease has not ended."""
    record = ledger.leases.get(lease_id)
    job = None if record is None else ledger.jobs.get(record.lease.job_id or "")
    if record is None or job is None:
        return False
    return record.lease.state is LeaseState.ACTIVE and job.job.lease_id == lease_id


def is_still_valid(caller: Caller, daemon: DaemonState) -> bool:
    """False if the caller was identified by a token that has been revoked or has expired since."""
    if caller.lease_id is not None:
        return _job_holds(caller.lease_id, daemon.ledger)
    return caller.token_id is None or (
        daemon.bearer_tokens is not None and daemon.bearer_tokens.is_valid(caller.token_id)
    )


def require_still_valid(caller: Caller, daemon: DaemonState) -> None:
    """Raise `NotAuthenticated` if the caller's token became invalid; for long polls, before anything is sent."""
    if not is_still_valid(caller, daemon):
        raise invalid_token()


def invalid_token() -> NotAuthenticated:
    """The error for a wrong token, or for one that was revoked or has expired during a long poll."""
    return NotAuthenticated(
        "That token is not valid. It may have been revoked or have expired.",
        remedy="Send a valid one, or none where the connection identifies you; see `POST /v1/tokens`.",
    )
