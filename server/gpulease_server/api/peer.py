"""Who is at the other end of a connection.

On a Unix socket the kernel says so (SO_PEERCRED). On loopback TCP `/proc/net/tcp` names the user who owns the peer's
socket, within one network namespace. Whom a caller names as the owner of a lease is confirmed against that, because
behind a tunnel, in a container or on another host the number means another process.

uvicorn shows no socket to the application, so its protocol is subclassed; this rests on `app_state`, which uvicorn does
not document: its version is pinned and a test goes through a real connection.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import pwd
import socket
import struct
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpulease.exchange import LeaseOwner
from gpulease.owner import Stat, stat

from . import socket_diag
from .connection import BoundedProtocol

CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid."""
CONNECTIONS = Path("/proc/net/tcp")
ANCESTORS = 16
"""How far up from the caller its owner is looked for: one short read of /proc each, on the event loop."""


@dataclass(frozen=True, slots=True)
class NamedOwner:
    """Whom a request names as the owner of its lease, as far as it can be believed."""

    pid: int | None
    """Whose descendants belong to the lease; None where nobody knows."""
    watchable: LeaseOwner | None = None
    """That process with its start time, where it was named and is confirmed: its end is the end of the lease."""


@dataclass(frozen=True, slots=True)
class Peer:
    """What the connection shows of the caller; None where it shows nothing."""

    uid: int | None = None
    pid: int | None = None
    gid: int | None = None
    local: bool = False
    """True when the caller is on this host."""

    @property
    def user(self) -> str | None:
        """Login name, or the number where it has none."""
        if self.uid is None:
            return None
        try:
            return pwd.getpwuid(self.uid).pw_name
        except KeyError:
            return str(self.uid)

    def owner(self, pid: int | None, start_ticks: int | None = None) -> NamedOwner:
        """Whom the caller names as the owner of a lease.

        What a caller of this host names must exist here and be his own, else a tunnel or a container lies between and
        the number means another process. Then it is the caller as the kernel sees it, or None. A caller from
        elsewhere is taken at his word, which nobody here acts on.

        To be watched, a process of this host must moreover be named with its start time, which no other process that
        ever has its pid shares, or be the caller or an ancestor of it. One that nobody named is not: curl ends with its
        answer. At most `ANCESTORS` + 3 short reads of /proc; 0.1 ms.
        """
        if pid is None or not self.local:
            return NamedOwner(self.pid if pid is None else pid)
        seen = stat(pid) if self._may_name(pid) else None
        if seen is None or (start_ticks is not None and seen.start_ticks != start_ticks):
            return NamedOwner(self.pid)
        confirmed = not seen.dead and (start_ticks is not None or self._descends_from(pid))
        return NamedOwner(pid, LeaseOwner(pid=pid, start_ticks=seen.start_ticks) if confirmed else None)

    def _may_name(self, pid: int) -> bool:
        try:
            if self.pid is not None and os.readlink(f"/proc/{self.pid}/ns/pid") != os.readlink("/proc/self/ns/pid"):
                return False
            return self.uid in (0, os.stat(f"/proc/{pid}").st_uid)
        except OSError:
            return False

    def _descends_from(self, pid: int) -> bool:
        """True when the caller is this process or one below it, as the kernel sees it."""
        current = self.pid
        for _ in range(ANCESTORS):
            if current is None or current <= 0 or current == pid:
                return current == pid
            seen: Stat | None = stat(current)
            current = None if seen is None else seen.parent
        return False


class PeerProtocol(BoundedProtocol):
    """uvicorn's protocol, which also puts the `Peer` into `request.state.peer`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Find out who connected, once per connection."""
        try:
            peer = peer_of(transport)
        except ConnectionResetError:
            # What it asked for would be done as nobody, so that asking again under the same Idempotency-Key would not
            # find it; and nobody waits for the answer.
            super().connection_made(transport)
            transport.abort()
            return
        self.app_state = {**self.app_state, "peer": peer}
        super().connection_made(transport)


def peer_of(transport: asyncio.BaseTransport) -> Peer:
    """The peer of an open connection. Raises ConnectionResetError when it has hung up."""
    sock: Any = transport.get_extra_info("socket")
    if sock is None:
        return Peer()
    if sock.family == socket.AF_UNIX:
        pid, uid, gid = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        return Peer(uid=uid, pid=pid or None, gid=gid, local=True)  # 0: a process that this pid namespace does not show
    address, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    if not address or not own or not address[0].startswith("127."):
        return Peer(local=bool(address) and address[0] == "::1")
    try:
        uid = owner_of_connection(address, own)
    except OSError:
        return Peer(local=True)
    if uid is None:
        raise ConnectionResetError(f"{address[0]}:{address[1]} has hung up")
    return Peer(uid=uid, local=True)


def owner_of_connection(peer: tuple[str, int], own: tuple[str, int], table: Path = CONNECTIONS) -> int | None:
    """The user whose socket is the other end of a TCP connection of this host; None where nobody holds it any more.

    Both ends are compared, because one local port may be in use towards several remote ones at once. A socket that its
    process has closed shows user 0 and inode 0, and whoever sends and hangs up is not root: it counts for nobody.
    Raises OSError where the table cannot be read.
    """
    for _ in range(2):
        found = _row(peer, own, table)
        if found is None or found[1] == 0:
            return None
        # The kernel does not read the two numbers in one step: root's are read again, and closed stays closed.
        if found[0] != 0:
            return found[0]
    return 0


def _row(peer: tuple[str, int], own: tuple[str, int], table: Path) -> tuple[int, int] | None:
    """User and inode of the socket that goes from `peer` to `own`: from the kernel, else from `/proc/net/tcp`."""
    if table is CONNECTIONS:
        with contextlib.suppress(OSError):
            return socket_diag.owner(peer, own)
    wanted = f": {_spelled(*peer)} {_spelled(*own)} "
    # Only the line that is looked for is taken apart: there may be thousands, and the event loop waits.
    rows = (line.split() for line in table.read_text().splitlines() if wanted in line)
    return next(((int(words[7]), int(words[9])) for words in rows if len(words) > 9), None)


def _spelled(host: str, port: int) -> str:
    """An address as the kernel prints it."""
    return f"{int.from_bytes(socket.inet_aton(host), sys.byteorder):08X}:{port:04X}"
