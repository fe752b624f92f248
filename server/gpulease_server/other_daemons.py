"""Finds a daemon that serves this host already, to tell the user who starts a second one.

A second daemon is allowed: on hosts of its own, or with simulated GPUs. On the same GPUs it is a mistake that neither
side would notice, because a client prefers the daemon of its own user. What prevents harm are the workers' claims
(docs/design/0007); this only says early what to do. Whatever does not answer in time is no daemon here.
"""

from __future__ import annotations

import http.client
import json
import secrets
import socket
from collections.abc import Iterable
from contextlib import closing, suppress

from gpulease_protocol.host.addresses import DEFAULT_URL, SOCKET_NAME, SYSTEM_DATA_DIR, Address, parse, unix
from gpulease_protocol.host.server_owner import server_uid, user_name
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_server.api.headers import REQUEST_ID_HEADER

TIMEOUT_S = 1.0
"""How long one address may take."""


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
        connection.connect()
        uid, nonce = server_uid(connection.sock), secrets.token_hex(8)
        connection.request("GET", "/healthz", headers={REQUEST_ID_HEADER: nonce})
        answer = connection.getresponse()
        if answer.headers[REQUEST_ID_HEADER] == nonce and json.loads(answer.read(1000)) == {"status": "ok"}:
            return OtherDaemon(address.shown, described(uid))
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


def described(uid: int | None) -> str:
    """A user in words, such as "user ada"."""
    return "an unknown user" if uid is None else f"user {user_name(uid)}"
