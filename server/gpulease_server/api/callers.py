"""Callers, and how they are told apart: by token, or by what the kernel shows of a connection."""

from __future__ import annotations

import os
from dataclasses import dataclass, field

from gpulease.access import Role
from gpulease.errors import NotAuthenticated
from gpulease.model import Holder

from ..runtime.bearers import Bearers
from .peer import Peer, Way, user_name
from .rates import Rates

ROOT = 0
SCHEME = "bearer "


@dataclass(frozen=True, slots=True)
class Caller:
    """Who asks."""

    user: str | None = None
    """Login name, or the number where it has none; of a token, the name that it was made for. None: not known."""
    uid: int | None = None
    """User id on this host; None where it is not known."""
    gid: int | None = None
    role: Role | None = None
    """None where he is not known."""
    how: str | None = None
    """`socket`, `loopback` or `token`."""
    token_id: str | None = None
    """Id of the token by which he is known."""
    reports: bool = False
    """True where he may speak for nodes."""

    @property
    def admin(self) -> bool:
        """True for an administrator."""
        return self.role is Role.ADMIN

    def owns(self, holder: Holder | None) -> bool:
        """True when this holder is he. A lease may be under his number, from when his name could not be looked up."""
        if holder is None or holder.user is None or self.user is None:
            return False
        return holder.user == self.user or (self.uid is not None and holder.user == str(self.uid))

    def sees(self, holder: Holder | None) -> bool:
        """True when he may be shown what is for this holder alone."""
        return self.admin or self.owns(holder)


NOBODY = Caller()


@dataclass(frozen=True, slots=True, kw_only=True)
class Access:
    """What an administrator has set about callers."""

    admins: frozenset[str] = frozenset()
    """Login names of administrators, beside root and the daemon's own user."""
    behind_proxy: bool = False
    """TCP callers are known by token alone: the connection is the proxy's."""
    show_commands: bool = True
    """Everybody sees the command lines of everybody's processes, as `ps` shows them; else only his own."""
    origins: frozenset[str] = frozenset()
    """Origins whose web pages may read what they are answered, in the spelling of a browser."""
    max_rps_per_user: float = 0.0
    """Requests per second of one user, over time; 0: any number."""
    rates: Rates = field(default_factory=Rates)
    """How many requests each user has left."""

    def believed(self, peer: Peer) -> Peer:
        """The peer as far as it can be believed: behind a proxy every TCP connection is the proxy's."""
        return Peer() if self.behind_proxy and peer.way is not Way.SOCKET else peer

    def by_connection(self, peer: Peer) -> Caller:
        """Who is at the other end of a connection; `NOBODY` where that cannot be told."""
        if peer.uid is None:
            return NOBODY
        user, own = user_name(peer.uid), peer.uid in (ROOT, os.geteuid())
        role = Role.ADMIN if own or user in self.admins else Role.USER
        return Caller(user, peer.uid, peer.gid, role, peer.way.value, reports=own)


async def by_token(header: str, bearers: Bearers | None) -> Caller:
    """Whose token an Authorization header carries. Raises `NotAuthenticated` unless it is one that is in force."""
    bearer = header[len(SCHEME) :].strip() if header.lower().startswith(SCHEME) else ""
    known = await bearers.find(bearer) if bearers is not None and bearer else None
    if known is None:
        raise no_token_in_force()
    reports = known.role in (Role.ADMIN, Role.WORKER)
    return Caller(known.user, known.uid, known.gid, known.role, "token", known.token_id, reports)


def no_token_in_force() -> NotAuthenticated:
    """What to say to who sends a wrong token, or one that was revoked or has expired while he waited."""
    return NotAuthenticated(
        "The Authorization header carries no token that is in force: it is unknown, was revoked, or has expired.",
        remedy="Send a valid one, or none at all where the daemon knows you without; see `gpulease token create`.",
    )
