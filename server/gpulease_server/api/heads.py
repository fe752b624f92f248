"""HEAD: what a GET would answer, without its body. For load balancers, `curl -I`, and who only wants an ETag."""

from __future__ import annotations

from starlette.types import ASGIApp, Message, Receive, Scope, Send


class Headed:
    """Asks the application with GET, and keeps what comes after the head to itself.

    An answer that would go on (a stream of events, a log that is followed) is over with its head: the application is
    then told that the caller has gone.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on."""
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self.app(scope, receive, send)
            return
        over = False

        async def bodiless(message: Message) -> None:
            nonlocal over
            if message["type"] != "http.response.body":
                await send(message)
            elif not over:
                over = True
                await send({"type": "http.response.body", "body": b"", "more_body": False})

        asked = {**scope, "method": "GET"}
        try:
            await self.app(asked, receive, bodiless)
        finally:
            if "route" in asked:
                scope["route"] = asked["route"]  # requests are counted by method and route
