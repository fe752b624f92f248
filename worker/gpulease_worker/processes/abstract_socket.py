"""Names that one process of a host has at a time: abstract Unix sockets (unix(7)).

Binding one is atomic, needs no rights and no file, and the kernel frees the name when its process ends, however it
ends. The kernel tells everyone who connects which process listens. A name is valid in one network namespace.
"""

from __future__ import annotations

import errno
import os
import socket
import struct
from contextlib import suppress

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_worker.processes import procfs
from gpulease_worker.processes.user_names import USERS

BACKLOG = 16
"""Processes that may ask who holds a name between two calls of `answer`."""
PEER_CREDENTIALS = struct.Struct("=iII")
"""`struct ucred`: pid, user, group."""


@dataclass(frozen=True, slots=True)
class NameHolder:
    """The process that has a name, as far as the kernel tells."""

    pid: int | None = None
    """Its process id; None where this process cannot see it, as from a container."""
    uid: int | None = None
    """Its user."""

    @property
    def described(self) -> str:
        """Such as "pid 4242, user ada"."""
        pid = "a process that cannot be seen from here" if self.pid is None else f"pid {self.pid}"
        return pid if self.uid is None else f"{pid}, user {USERS.name_of(self.uid)}"


def bind(name: str) -> socket.socket | None:
    """Take a name until the returned socket is closed. None if another socket has it. Raises OSError."""
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK)
    try:
        listener.bind(f"\0{name}")
        listener.listen(BACKLOG)
    except OSError as error:
        listener.close()
        if error.errno == errno.EADDRINUSE:
            return None
        raise
    return listener


def answer(listener: socket.socket) -> None:
    """Hang up on those who have asked who holds a name: the kernel has told them."""
    with suppress(OSError):  # no one asks
        for _ in range(BACKLOG + 1):  # however many go on asking
            listener.accept()[0].close()


def holder_of(name: str) -> NameHolder | None:
    """The process that has a name; None if no socket listens there. Raises OSError where this process can have no
    socket."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK) as caller:
        try:
            caller.connect(f"\0{name}")
            found = caller.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
        except ConnectionRefusedError:
            return None
        except OSError:  # too many ask at once, or a security module forbids it
            return NameHolder()
    pid, uid, _ = PEER_CREDENTIALS.unpack(found)
    return NameHolder(pid=pid or None, uid=uid)


def names_are_of_the_host() -> bool | None:
    """Whether this process has the network namespace of the host's first process, so that each host has one set of
    names. None where that cannot be told, because this process does not see the host's processes."""
    if not procfs.sees_the_host():
        return None
    try:  # the kernel numbers the tables of each network namespace; its link in /proc/1/ns takes rights to read
        return os.stat("/proc/1/net/unix").st_ino == os.stat("/proc/self/net/unix").st_ino
    except OSError:
        return None
