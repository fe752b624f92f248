"""Sockets that systemd has opened for the daemon (sd_listen_fds(3)), and keeps open while the daemon restarts.

A connection that is made meanwhile waits in the socket's queue, and no one else can take the port or the path. The unit
is deploy/systemd/gpulease.socket. The protocol is three variables and the file descriptors from 3 on, so it needs no
library.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping

FIRST_FD = 3
VARIABLES = ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES")
"""Meant for this process only; not passed on to its children."""


def is_activated(environ: Mapping[str, str] = os.environ) -> bool:
    """True if systemd has passed sockets to this process."""
    return environ.get("LISTEN_PID") == str(os.getpid())


def inherited_sockets() -> list[socket.socket]:
    """The sockets passed to this process, once; none if they are meant for another. Raises ValueError for a file
    descriptor that is not a listening stream socket."""
    activated = is_activated()
    _, count, _ = (os.environ.pop(name, "") for name in VARIABLES)
    if not activated or not count.isdecimal():
        return []
    return [_listener(descriptor) for descriptor in range(FIRST_FD, FIRST_FD + int(count))]


def _listener(descriptor: int) -> socket.socket:
    try:
        os.set_inheritable(descriptor, False)
        inherited = socket.socket(fileno=descriptor)
        listens = inherited.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise ValueError(f"file descriptor {descriptor} of LISTEN_FDS is not a socket: {error.strerror}") from error
    if not listens or inherited.type != socket.SOCK_STREAM:
        raise ValueError(f"file descriptor {descriptor} of LISTEN_FDS is not a listening stream socket")
    return inherited
