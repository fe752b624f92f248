"""The hot path in front of the application, see the package."""

from __future__ import annotations

from fastapi import FastAPI
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

from gpulease_server.api.auth.callers import trusted_peer
from gpulease_server.api.auth.peer_credentials import PeerCredentials
from gpulease_server.api.fair_share import FairShare
from gpulease_server.api.hot_path.exchange import Exchange, Shared
from gpulease_server.api.hot_path.hot_requests import recognize
from gpulease_server.api.http_limits import LimitedHttpProtocol
from gpulease_server.api.middleware.http_metrics import HttpMetrics
from gpulease_server.api.middleware.loopback_origin import may_come_from
from gpulease_server.runtime.leadership.status import LeadershipStatus


class HotPath:
    """Answers the requests that it recognizes, as the application would.

    Args:
        app: The application, for its state.
        leadership: Of its daemon.
        share: The turns of its users.
        metrics: Its metrics by route.
    """

    def __init__(self, app: FastAPI, leadership: LeadershipStatus, share: FairShare, metrics: HttpMetrics) -> None:
        self._shared = Shared(app, leadership, share, metrics)
        self.share = share
        self.metrics = metrics

    async def answers(self, scope: Scope, receive: Receive, send: Send) -> bool:
        """Answer a request. False if it is not one for the hot path: then nothing was done."""
        exchange = self._recognized(scope)
        if exchange is not None:
            await exchange.run(scope, receive, send)
        return exchange is not None

    def begins(self, cycle: RequestResponseCycle, protocol: LimitedHttpProtocol) -> bool:
        """Answer a request that has arrived as a whole, without a task where it need not wait. False as `answers`."""
        exchange = self._recognized(cycle.scope)  # type: ignore[arg-type]
        if exchange is not None:
            exchange.begin(cycle, protocol)
        return exchange is not None

    def _recognized(self, scope: Scope) -> Exchange | None:
        hot = recognize(scope)
        if hot is None:
            return None
        daemon = self._shared.app.state.daemon
        peer = trusted_peer(scope.get("state", {}).get("peer") or PeerCredentials(), daemon.access)
        host = hot.headers.get(b"host")
        hosts = [] if host is None else [host.decode("latin-1")]
        if b"authorization" not in hot.headers and not may_come_from(peer, hosts, []):
            return None
        if self._shared.leadership.standby_copy is not None or not daemon.writer.has_loaded:
            return None
        return Exchange(self._shared, hot, peer, scope)
