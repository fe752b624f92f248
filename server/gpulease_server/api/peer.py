"""Who is at the other end of a connection.

On a Unix socket the kernel says so (SO_PEERCRED). On loopback TCP `/proc/net/tcp` or `tcp6` names the user who owns the
peer's socket, within one network namespace (`connections`). Where neither says it, the peer is nobody, and a caller has
to send a token (`identity`). Whom a caller names as the owner of a lease is confirmed against that, because behind a
tunnel, in a container or on another host the number means another process.

uvicorn shows no socket to the application, so its protocol is subclassed; this rests on `app_state`, which uvicorn does
not document: its version is pinned and a test goes through a real connection.
"""

from __future__ import annotations

import asyncio
import os
import pwd
import socket
import struct
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any

from gpulease.exchange import LeaseOwner
from gpulease.owner import Stat, stat

from .connection import BoundedProtocol
from .connections import is_loopback, owner_of_connection, stands_for_others

CREDENTIALS = struct.Struct("3i")
"""pid, uid, gid."""
ANCESTORS = 16
"""How far up from the caller its owner is looked for: one short read of /proc each, on the event loop."""
MAX_NAMES = 10_000
"""Login names that are remembered."""
NAME_S = 60.0
"""For how long a name is believed, and that there is none."""


@dataclass(frozen=True, slots=True)
class Name:
    """What the directory of users has said of one."""

    name: str
    until_s: float
    """On the monotonic clock."""


_names: dict[int, Name] = {}
_directory = ThreadPoolExecutor(4, "users")
"""Its own threads, so that a directory that hangs holds up nothing else."""


class Way(StrEnum):
    """How a caller reached the daemon."""

    SOCKET = "socket"
    LOOPBACK = "loopback"
    NETWORK = "network"


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
    way: Way = Way.NETWORK
    """What it came through."""

    @property
    def user(self) -> str | None:
        """Login name, or the number where it has none."""
        return None if self.uid is None else user_name(self.uid)

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
        peer = peer_of(transport)
        self.app_state, self.whose = {**self.app_state, "peer": peer}, peer.uid
        super().connection_made(transport)


def peer_of(transport: asyncio.BaseTransport) -> Peer:
    """The peer of an open connection; without a uid where nothing says whose it is."""
    sock: Any = transport.get_extra_info("socket")
    if sock is None:
        return Peer()
    if sock.family == socket.AF_UNIX:
        pid, uid, gid = CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, CREDENTIALS.size))
        known = not stands_for_others(uid)
        # 0: a process that this pid namespace does not show
        return Peer(uid=uid if known else None, pid=pid or None, gid=gid if known else None, local=True, way=Way.SOCKET)
    address, own = transport.get_extra_info("peername"), transport.get_extra_info("sockname")
    if not address or not own or not is_loopback(address[0]):
        return Peer()
    try:
        uid = owner_of_connection(address[:2], own[:2])
    except OSError:
        uid = None
    # Whoever has hung up, or is in another network namespace, is nobody: what he asked for is refused.
    return Peer(uid=uid, local=True, way=Way.LOOPBACK)


def user_name(uid: int) -> str:
    """Login name of a user as far as it is known by now (`look_up`), or the number."""
    known = _names.get(uid)
    return str(uid) if known is None else known.name


async def look_up(uid: int) -> None:
    """See to it that the name of a user is known, and anew after `NAME_S`.

    A directory of users may be slow, and must hold up nobody but those whom it does not know yet. A name once known
    stays: when the directory does not answer for a while, nobody turns into a stranger to his own leases.
    """
    known = _names.get(uid)
    if known is not None and time.monotonic() < known.until_s:
        return
    asked = asyncio.get_running_loop().run_in_executor(_directory, _look_up, uid)
    if known is None:
        await asked
    else:
        _names[uid] = replace(known, until_s=time.monotonic() + NAME_S)


def _look_up(uid: int) -> None:
    """In a thread: ask the directory."""
    known = _names.get(uid)
    try:
        name = pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        name = str(uid) if known is None else known.name
    if known is not None or len(_names) < MAX_NAMES:
        _names[uid] = Name(name, time.monotonic() + NAME_S)
