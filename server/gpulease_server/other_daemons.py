"""Finds a daemon that serves this host already, to tell the user who starts a second one.

A second daemon is allowed: on hosts of its own, or with simulated GPUs. On the same GPUs it is a mistake that neither
side would notice, because a client prefers the daemon of its own user. What prevents harm are the workers' claims
(docs/design/0007); this only says early what to do. Whatever does not answer in time is no daemon here.
"""

from __future__ import annotations

import http.client
import json
import pwd
import secrets
import socket
import struct
from collections.abc import Iterable
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path

from gpulease_protocol.host.addresses import DEFAULT_URL, SOCKET_NAME, SYSTEM_DATA_DIR, Address, parse, unix
from gpulease_server.api.headers import REQUEST_ID_HEADER

TIMEOUT_S = 1.0
"""How long one address may take."""
LISTEN = "0A"
"""State of a listening socket in /proc/net/tcp (`TCP_LISTEN` of the kernel's `tcp_states.h`)."""
PEER_CREDENTIALS = struct.Struct("=iII")
"""`struct ucred`: pid, user, group."""


@dataclass(frozen=True, slots=True)
class OtherDaemon:
    """A daemon that answers."""

    url: str
    """Where."""
    user: str
    """Such as "user ada"."""

    def __str__(self) -> str:
        return f"a gpulease daemon of {self.user} answers at {self.url} already"


def first_of(addresses: Iterable[Address]) -> OtherDaemon | None:
    """The first of these addresses at which a daemon answers."""
    return next((found for address in addresses if (found := at(address)) is not None), None)


def usual_addresses() -> tuple[Address, ...]:
    """Where clients of any user look for a daemon of this host."""
    return unix(SYSTEM_DATA_DIR / SOCKET_NAME), parse(DEFAULT_URL)


def at(address: Address) -> OtherDaemon | None:
    """The daemon at one address of this host, http or unix; None where none answers."""
    with suppress(OSError, http.client.HTTPException, ValueError), closing(_Connection(address)) as connection:
        nonce = secrets.token_hex(8)
        connection.request("GET", "/healthz", headers={REQUEST_ID_HEADER: nonce})
        answer = connection.getresponse()
        if answer.headers[REQUEST_ID_HEADER] == nonce and json.loads(answer.read(1000)) == {"status": "ok"}:
            return OtherDaemon(address.shown, _described(connection.listener_uid()))
    return None


class _Connection(http.client.HTTPConnection):
    """HTTP to a TCP port or a Unix socket of this host."""

    def __init__(self, address: Address) -> None:
        super().__init__(address.origin.partition("://")[2], timeout=TIMEOUT_S)
        self._path = address.socket

    def connect(self) -> None:
        if self._path is None:
            super().connect()
            return
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(TIMEOUT_S)
        self.sock.connect(str(self._path))

    def listener_uid(self) -> int | None:
        """The user whose process listens."""
        if self.sock.family == socket.AF_UNIX:
            found = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, PEER_CREDENTIALS.size)
            return int(PEER_CREDENTIALS.unpack(found)[1])
        return _listener_uid(self.sock.getpeername()[1])


def _listener_uid(port: int) -> int | None:
    for name in ("tcp", "tcp6"):
        with suppress(OSError):
            for line in Path(f"/proc/net/{name}").read_text().splitlines()[1:]:
                _, local, _, state, _, _, _, uid, *_ = line.split()
                if state == LISTEN and int(local.rpartition(":")[2], 16) == port:
                    return int(uid)
    return None


def _described(uid: int | None) -> str:
    if uid is None:
        return "an unknown user"
    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"
