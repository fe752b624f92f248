"""Has each request wait for its user's turn, see `fair_share`."""

from __future__ import annotations

from collections.abc import Hashable

from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulease_server.api.auth.callers import bearer_in, is_privileged, trusted_peer
from gpulease_server.api.auth.peer_credentials import PeerCredentials
from gpulease_server.api.fair_share import TURN, FairShare, Turn
from gpulease_server.api.http_limits import ON_DISCONNECT
from gpulease_server.runtime.bearer_tokens import BearerTokens

KEEPING = ("/renew", "/release")
"""Requests to paths that end so have a share of their own."""


class FairTurnsMiddleware:
    """Lets one request of each user work at a time. Inside what measures requests, outside all that takes time."""

    def __init__(self, app: ASGIApp, share: FairShare) -> None:
        self.app = app
        self.share = share

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on when it may work."""
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        daemon = scope["app"].state.daemon
        peer = trusted_peer(scope.get("state", {}).get("peer") or PeerCredentials(), daemon.access)
        turn = turn_of(self.share, peer, daemon.bearer_tokens, scope)
        TURN.set(turn)
        if turn is None:
            await self.app(scope, receive, send)
            return

        async def send_outside(message: Message) -> None:
            if message["type"] == "http.response.body":
                turn.end()  # a client may take its time to read; a stream goes on with `fair_share.resume`
            await send(message)

        try:
            await turn.begin()
        except ClientDisconnect:
            return
        try:
            await self.app(scope, receive, send_outside)
        finally:
            turn.exempt()


def turn_of(share: FairShare, peer: PeerCredentials, bearers: BearerTokens | None, scope: Scope) -> Turn | None:
    """The turn that this request has to wait for; None if it has no limit."""
    user = _user_of(peer, bearers, scope)
    if not (scope["method"] == "POST" and scope["path"].endswith(("/exchange", "/logs"))):  # a worker asks all the time
        share.note_request(user)
    if is_privileged(peer):
        return None
    return Turn(share, user, "keeping" if scope["path"].endswith(KEEPING) else "other", scope.get(ON_DISCONNECT))


def _user_of(peer: PeerCredentials, bearers: BearerTokens | None, scope: Scope) -> Hashable:
    """The user whom the kernel shows; else the token that is sent, if it is one; else the host. The ids of tokens are
    no secret: by a wrong token with another's id no one takes that one's turns."""
    if peer.uid is not None:
        return peer.uid
    bearer = bearer_in(Headers(scope=scope).get("authorization", ""))
    token_id = bearers.known_id(bearer) if bearers is not None and bearer else None
    return token_id or (scope.get("client") or ("",))[0]
