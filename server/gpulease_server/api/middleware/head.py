"""HEAD requests: the head of what a GET would answer. For load balancers, `curl -I`, and clients that want an ETag."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class HeadMiddleware:
    """Turns HEAD into GET, and drops the body of the answer.

    An answer without an end (an event stream, a followed log) ends with its head: the application then sees that the
    client has disconnected.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        ended = False

        async def send_head(message: Message) -> None:
            nonlocal ended
            if message["type"] != "http.response.body":
                await send(message)
            elif not ended:
                ended = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        get_scope = {**scope, "method": "GET"}
        try:
            await self.app(get_scope, receive, send_head)
        finally:
            if "route" in get_scope:
                scope["route"] = get_scope["route"]  # HttpMetricsMiddleware counts requests by route
