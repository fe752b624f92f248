"""Looks at who serves a connection, once for each connection and before anything is sent on it.

A token, the environment of a job and what a lease is to be used for must reach the daemon alone, and its answers decide
what runs as this user. So a connection within this host must be served by root, this user, or who is configured
(`gpulease_protocol.host.server_owner`). For https the certificate decides, on this host too.

httpcore2 reports a new connection to the `trace` extension of the request that needs it, before it sends anything
(https://www.encode.io/httpcore/extensions/#trace). An exception that is raised there ends the request.
"""

from __future__ import annotations

import os
import socket
from typing import Any
from urllib.parse import urlsplit

from gpulease.sansio.effects import NotConnected, NotTrusted
from gpulease.sansio.failover import Destination
from gpulease_protocol.host import variables
from gpulease_protocol.host.addresses import Address
from gpulease_protocol.host.config_file import SYSTEM
from gpulease_protocol.host.server_owner import (
    daemon_users,
    is_on_this_host,
    may_be_daemon,
    server_uid,
    user_name,
)
from gpulease_protocol.host.sock_diag import TCP_ESTABLISHED

NEW_CONNECTIONS = ("connection.connect_tcp.complete", "connection.connect_unix_socket.complete")
"""What httpcore2 calls a new connection."""
HUNG_UP = "it hung up at once"
UNKNOWN_REMEDY = (
    f"Use the daemon's Unix socket, or https. If only the daemon can listen there, set {variables.DAEMON_USER}='*'."
)


class ServerCheck:
    """Checks the connections that one request opens; as its trace, or `asynchronous` in an event loop."""

    def __init__(self, address: Address, destination: Destination) -> None:
        self._address = address
        self._destination = destination
        self._direct = True
        """False while a proxy is connected to."""

    def __call__(self, event: str, info: dict[str, Any]) -> None:
        """Raise NotTrusted after closing a new connection that a stranger serves."""
        stream = self._new_connection(event, info)
        if stream is not None:
            try:
                check_server(stream.get_extra_info("socket"), self._destination)
            except BaseException:
                stream.close()
                raise

    async def asynchronous(self, event: str, info: dict[str, Any]) -> None:
        """The same."""
        stream = self._new_connection(event, info)
        if stream is not None:
            try:
                check_server(stream.get_extra_info("socket"), self._destination)
            except BaseException:
                await stream.aclose()
                raise

    def _new_connection(self, event: str, info: dict[str, Any]) -> Any:
        if event == "connection.connect_tcp.started" and self._destination.use_proxies and not self._address.local:
            self._direct = info["host"] == urlsplit(self._address.origin).hostname
        return info["return_value"] if event in NEW_CONNECTIONS and self._direct else None


def check_server(connection: socket.socket, destination: Destination) -> None:
    """Raise NotTrusted unless a daemon may be at the other end of a connection in plain HTTP; NotConnected if that has
    ended meanwhile."""
    try:
        uid = server_uid(connection)
        is_elsewhere = uid is None and not is_on_this_host(connection)
    except OSError as error:  # it was reset, so it has no other end
        raise NotConnected(HUNG_UP) from error
    if is_elsewhere:
        if destination.plain_http:
            return
        raise NotTrusted(
            "it is on another host, and plain HTTP does not show who answers there; nothing was sent to it",
            remedy="Serve with --tls-cert and --tls-key there, and use https.",
        )
    if may_be_daemon(uid, obeyed=destination.obeys):
        return
    if uid is None and not _is_connected(connection):
        raise NotConnected(HUNG_UP)
    if uid is None:
        raise NotTrusted("the kernel does not show who serves it; nothing was sent to it", UNKNOWN_REMEDY)
    name, accepted = user_name(uid), ["root", *(["you"] if os.geteuid() else []), *daemon_users()]
    raise NotTrusted(
        f"served by user {name}, not by {' or '.join(accepted)}; nothing was sent to it",
        remedy=f"If the daemon is to run as {name}, set {variables.DAEMON_USER}={name}, or daemon_user under [client]"
        f" in {SYSTEM}. If not, tell an administrator.",
    )


def _is_connected(connection: socket.socket) -> bool:
    if connection.family == socket.AF_UNIX:
        return True
    (state,) = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)
    return state == TCP_ESTABLISHED
