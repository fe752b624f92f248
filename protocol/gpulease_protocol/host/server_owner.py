"""Which user is at the other end of a connection that this process has made, and whether that may be a daemon's user.

Any user can take a port above 1023, and most paths. So a client looks at who serves a connection before it sends
anything on it: on a Unix socket by SO_PEERCRED, on TCP within this host by the owner of the other end
(`tcp_socket_owner`). docs/security.md says what is accepted.
"""

from __future__ import annotations

import os
import pwd
import socket
import stat
import struct
from collections.abc import Mapping

from gpulease_protocol.host import config_file, variables
from gpulease_protocol.host.addresses import owner_of_system_data_dir
from gpulease_protocol.host.tcp_socket_owner import is_loopback, is_overflow_uid, owner_of_server

UCRED = struct.Struct("=iII")
"""struct ucred: pid, uid, gid."""
ANY_USER = "*"
"""In GPULEASE_DAEMON_USER: trust any server, even if the kernel does not show its user."""


def unix_peer(sock: socket.socket) -> tuple[int, int, int]:
    """pid, uid and gid of the other end of a Unix socket; for a client those of the process that began to listen."""
    pid, uid, gid = UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
    return pid, uid, gid


def is_on_this_host(sock: socket.socket) -> bool:
    """True if the other end of a connected socket must be on this host: a Unix socket, or TCP over loopback."""
    return sock.family == socket.AF_UNIX or is_loopback(sock.getpeername()[0])


def server_uid(sock: socket.socket) -> int | None:
    """The user who serves a connection; None for one on another host, and if the kernel does not show it.

    It shows no user in another network namespace (a container's port that the kernel forwards), and none whom this
    user namespace does not map. Then the owner of a Unix socket's directory counts, if no one else may write to it.
    Some 0.05 ms.
    """
    if sock.family == socket.AF_UNIX:
        uid = unix_peer(sock)[1]
        return _owner_of_closed_directory(sock.getpeername()) if is_overflow_uid(uid) else uid
    peer, own = sock.getpeername()[:2], sock.getsockname()[:2]
    try:
        return owner_of_server(peer, own)
    except (OSError, ValueError):
        return None


def _owner_of_closed_directory(path: str | bytes) -> int | None:
    """The owner of the directory of a socket, if no one else may write to it; None for others and abstract sockets."""
    try:
        found = os.stat(os.path.dirname(os.path.abspath(path)))
    except (OSError, ValueError):
        return None
    is_closed = not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not is_overflow_uid(found.st_uid)
    return found.st_uid if path and is_closed else None


def may_be_daemon(uid: int | None, *, obeyed: bool = False) -> bool:
    """True for root, this process's user, the owner of the system's data directory, and who is configured.

    `obeyed`: this process does what the daemon says, as a worker does. Then the owner of the data directory does not
    count: a root worker would be theirs. Only root can have made that owner: /var/lib is root's. Raises
    ConfigurationRefused.
    """
    if uid is not None and (uid in (0, os.geteuid()) or (not obeyed and uid == owner_of_system_data_dir())):
        return True
    names = daemon_users()
    return ANY_USER in names or (uid is not None and any(uid == _uid_of(name) for name in names))


def daemon_users(environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """The users named by GPULEASE_DAEMON_USER, else by `daemon_user` in a configuration file. Raises
    ConfigurationRefused, also for a file that is neither root's nor this user's."""
    text = environ.get(variables.DAEMON_USER) or config_file.trusted_client_value("daemon_user", environ) or ""
    return tuple(name for word in text.split(",") if (name := word.strip()))


def user_name(uid: int) -> str:
    """The login name, or the number."""
    try:
        return pwd.getpwuid(uid).pw_name
    except (KeyError, OSError):
        return str(uid)


def _uid_of(name: str) -> int | None:
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, OSError):
        return None
