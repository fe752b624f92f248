"""Peer credentials: which user and process is at the other end of a connection.

On a Unix socket the kernel says so (SO_PEERCRED). On loopback TCP it names the user who owns the peer's socket, within
one network namespace (`tcp_socket_owner`). Elsewhere the peer is unknown, and the caller has to send a token
(`access_rules`). A process that a caller names as owner of a lease is checked against the peer, because behind a
tunnel, in a container or on another host its pid means another process.

uvicorn does not show the socket to the application, so its protocol class is subclassed, which relies on the
undocumented attribute `app_state`: uvicorn's version is pinned, and a test goes through a real connection.
"""

from __future__ import annotations

import asyncio
import os
import socket
from enum import StrEnum
from typing import Any

from gpulease_protocol.host.process_id import Stat, stat
from gpulease_protocol.host.server_owner import unix_peer
from gpulease_protocol.host.tcp_socket_owner import is_loopback, is_overflow_uid, owner_of_connection
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.node_protocol import LeaseOwner
from gpulease_server.api.auth.user_names import user_name
from gpulease_server.api.http_limits import LimitedHttpProtocol

TCP_ESTABLISHED, TCP_CLOSE_WAIT = 1, 8
"""States of a TCP socket, as in linux/tcp_states.h."""
MAX_ANCESTORS = 16
"""How many ancestors of the caller are searched for the owner: one short read of /proc each, on the event loop."""


class ConnectionType(StrEnum):
    """How a caller reached the daemon."""

    SOCKET = "socket"
    LOOPBACK = "loopback"
    NETWORK = "network"


@dataclass(frozen=True, slots=True)
class OwnerClaim:
    """The process that a request names as owner of its lease, as far as it can be trusted."""

    pid: int | None
    """The process with the descendants that belong to the lease; None if unknown."""
    watchable: LeaseOwner | None = None
    """The same process with its start time, if it was named and is confirmed: the lease ends when it does."""


@dataclass(frozen=True, slots=True)
class PeerCredentials:
    """What the kernel shows of the other end of a connection; a field is None if it shows nothing."""

    uid: int | None = None
    pid: int | None = None
    gid: int | None = None
    local: bool = False
    """True if the peer is on this host."""
    connection: ConnectionType = ConnectionType.NETWORK

    @property
    def user(self) -> str | None:
        """Login name, or the uid as text if it has none."""
        return None if self.uid is None else user_name(self.uid)

    def check_owner(self, pid: int | None, start_ticks: int | None = None) -> OwnerClaim:
        """Check a process that the peer names as owner of a lease.

        A process of this host must exist here and belong to the peer's user; otherwise a tunnel or a container lies in
        between and the pid means another process, so the owner is the peer itself, or None. The pid that a peer on
        another host names is taken as given; nothing here acts on it.

        To be watched, a process of this host must also be named with its start time, which no other process with the
        same pid ever shares, or be the peer or an ancestor of it. A peer that was not named is not watched: curl exits
        with its answer. At most `MAX_ANCESTORS` + 3 short reads of /proc; 0.1 ms.
        """
        if pid is None or not self.local:
            return OwnerClaim(self.pid if pid is None else pid)
        process = stat(pid) if self._may_name(pid) else None
        if process is None or (start_ticks is not None and process.start_ticks != start_ticks):
            return OwnerClaim(self.pid)
        confirmed = not process.dead and (start_ticks is not None or self._descends_from(pid))
        return OwnerClaim(pid, LeaseOwner(pid=pid, start_ticks=process.start_ticks) if confirmed else None)

    def _may_name(self, pid: int) -> bool:
        try:
            if self.pid is not None and os.readlink(f"/proc/{self.pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
                return False
            return self.uid in (0, os.stat(f"/proc/{pid}").st_uid)
        except OSError:
            return False

    def _descends_from(self, pid: int) -> bool:
        """True if the peer is this process or a descendant of it, as the kernel sees it."""
        current = self.pid
        for _ in range(MAX_ANCESTORS):
            if current is None or current <= 0 or current == pid:
                return current == pid
            process: Stat | None = stat(current)
            current = None if process is None else process.parent
        return False


class PeerCredentialsProtocol(LimitedHttpProtocol):
    """uvicorn's protocol, which also puts the `PeerCredentials` into `request.state.peer`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Find out who connected, once for each connection."""
        peer = peer_credentials_of(transport)
        self.app_state, self.peer_uid = {**self.app_state, "peer": peer}, peer.uid
        super().connection_made(transport)


def peer_credentials_of(transport: asyncio.BaseTransport) -> PeerCredentials:
    """The peer of an open connection; without a uid if its user is not known."""
    sock: Any = transport.get_extra_info("socket")
    if sock is None:
        return PeerCredentials()
    return peer_credentials(sock, transport.get_extra_info("peername"), transport.get_extra_info("sockname"))


def peer_credentials(sock: Any, address: Any, own_address: Any) -> PeerCredentials:
    """The same of a connected socket, with the addresses of its ends."""
    if sock.family == socket.AF_UNIX:
        pid, owner, gid = unix_peer(sock)
        is_known = not is_overflow_uid(owner)
        return PeerCredentials(
            uid=owner if is_known else None,
            pid=pid or None,  # 0: a process that this pid namespace does not show
            gid=gid if is_known else None,
            local=True,
            connection=ConnectionType.SOCKET,
        )
    if not address or not own_address or not is_loopback(address[0]):
        return PeerCredentials()
    try:
        uid = owner_of_connection(address[:2], own_address[:2])
        # Looked at last: a client that had hung up may have left its port to another user's socket.
        if not _is_connected(sock):
            uid = None
    except OSError:
        uid = None
    # A peer that has hung up, or is in another network namespace, has no uid: its request is refused.
    return PeerCredentials(uid=uid, local=True, connection=ConnectionType.LOOPBACK)


def _is_connected(sock: Any) -> bool:
    """True while this end of a TCP connection is up, also after the peer has sent its last byte. Raises OSError."""
    state: int = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0]  # the first byte of struct tcp_info
    return state in (TCP_ESTABLISHED, TCP_CLOSE_WAIT)
