"""Protects callers on loopback against web pages in their own browser (CSRF and DNS rebinding)."""

from __future__ import annotations

import re

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gpulease_protocol.errors import NotAllowed, shortened
from gpulease_server.api.auth.callers import trusted_peer
from gpulease_server.api.auth.peer_credentials import ConnectionType, PeerCredentials
from gpulease_server.api.problems import problem_response

LOOPBACK_HOST = re.compile(r"(?:localhost|127\.0\.0\.1|\[::1\])(?::[0-9]{1,5})?", re.IGNORECASE)
"""The whole of a `Host` that names this host, with any port: `ssh -L` and containers have others. There is no further
spelling: what a URL library would take for one of these names, such as `evil@127.0.0.1` or `127.1`, is refused."""


class LoopbackOriginMiddleware:
    """Refuses a request over loopback whose `Host` is not this host or whose `Origin` is not this daemon.

    A web page in a local browser could otherwise act as the browser's user, whom the connection identifies. Requests
    with an Authorization header pass: browsers do not add one by themselves. So do requests over the network, where the
    connection identifies no one.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        headers, daemon = Headers(scope=scope), scope["app"].state.daemon
        peer = trusted_peer(scope.get("state", {}).get("peer") or PeerCredentials(), daemon.access)
        hosts, origins = headers.getlist("host"), headers.getlist("origin")
        if "authorization" not in headers and not may_come_from(peer, hosts, origins):
            other = shortened(", ".join(origins or hosts) or "one that is not named")
            detail = f"Over loopback this daemon answers requests for this host only, not for {other}."
            remedy = "Use http://127.0.0.1, or send a token."
            await problem_response(NotAllowed(detail, remedy=remedy))(scope, receive, send)
            return
        await self.app(scope, receive, send)


def may_come_from(peer: PeerCredentials, hosts: list[str], origins: list[str]) -> bool:
    """True if a request without a token, with these `Host` and `Origin`, is no one else's than the peer's own."""
    identified = peer.connection is ConnectionType.LOOPBACK and peer.uid is not None
    return not identified or (_is_this_host(hosts) and _is_own_page(origins, hosts[0]))


def _is_this_host(hosts: list[str]) -> bool:
    """True for one `Host` that is a name of this host."""
    return len(hosts) == 1 and LOOPBACK_HOST.fullmatch(hosts[0]) is not None


def _is_own_page(origins: list[str], host: str) -> bool:
    """True for no `Origin`, and for that of this daemon's own pages; another port may be another user's server."""
    if not origins:
        return True
    own = (f"http://{host}".lower(), f"https://{host}".lower())
    return len(origins) == 1 and origins[0].lower() in own
