"""Requests of several users: real sockets, whose kernel credentials are those of another user.

Under root the effective user is changed for the time of the connect, which is when the kernel notes it.
"""

from __future__ import annotations

import http.client
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.daemon import Answer

OWNER, OTHER = 65534, 54321
"""Two users: `nobody`, and one without a name."""


@contextmanager
def acting_as(uid: int | None) -> Iterator[None]:
    """Be that user to the kernel meanwhile."""
    if uid is None or uid == os.geteuid():
        yield
        return
    os.seteuid(uid)
    try:
        yield
    finally:
        os.seteuid(0)


class Connection(http.client.HTTPConnection):
    """A connection of one user, to a Unix socket or to a port of loopback."""

    def __init__(self, to: Path | int, uid: int | None, timeout_s: float = 60.0) -> None:
        super().__init__("127.0.0.1", to if isinstance(to, int) else None, timeout=timeout_s)
        self.to = to
        self.uid = uid

    def connect(self) -> None:
        """Connect as the user."""
        with acting_as(self.uid):
            self.sock = socket.socket(socket.AF_INET if isinstance(self.to, int) else socket.AF_UNIX)
            self.sock.settimeout(self.timeout)
            self.sock.connect(("127.0.0.1", self.to) if isinstance(self.to, int) else str(self.to))


def call(
    to: Path | int,
    method: str,
    path: str,
    body: Any = None,
    *,
    uid: int | None = None,
    bearer: str | None = None,
    raw: bytes | None = None,
    **headers: str,
) -> Answer:
    """One request, over a Unix socket or to a port, of a user (None: of this process's) and with a token or without."""
    payload = raw if raw is not None or body is None else json.dumps(body).encode()
    if bearer is not None:
        headers["Authorization"] = f"Bearer {bearer}"
    connection = Connection(to, uid)
    try:
        connection.request(method, path, payload, headers)
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(), dict(answer.headers))
    finally:
        connection.close()
