"""Protects callers on loopback against web pages in their own browser (CSRF and DNS rebinding)."""

from __future__ import annotations

from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from gpulease_protocol.errors import NotAllowed, shortened
from gpulease_server.api.auth.callers import trusted_peer
from gpulease_server.api.auth.peer_credentials import ConnectionType, PeerCredentials
from gpulease_server.api.problems import problem_response

LOOPBACK_NAMES = {"localhost", "127.0.0.1", "::1"}


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
        if peer.connection is ConnectionType.LOOPBACK and peer.uid is not None and "authorization" not in headers:
            host, origin = headers.get("host", ""), headers.get("origin")
            if _host_name(f"//{host}") not in LOOPBACK_NAMES or (origin and not _is_own_origin(origin, host)):
                other = shortened(origin or host)
                detail = f"Over loopback this daemon answers requests for this host only, not for {other}."
                remedy = "Use http://127.0.0.1, or send a token."
                await problem_response(NotAllowed(detail, remedy=remedy))(scope, receive, send)
                return
        await self.app(scope, receive, send)


def _is_own_origin(origin: str, host: str) -> bool:
    """True for the origin of this daemon's own pages; another port of this host may be another user's server."""
    try:
        return urlsplit(origin).netloc.lower() == host.lower()
    except ValueError:
        return False


def _host_name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
