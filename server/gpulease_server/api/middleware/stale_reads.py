"""Stale reads: answers that may be out of date are refused, or marked with `Gpulease-As-Of`.

- A standby answers requests that only read from its copy of the ledger. `Gpulease-Standby` names the writer, and
  `Gpulease-As-Of` says when the copy was read. It refuses everything else with 503 `unavailable`, which makes clients
  try the next address. That includes long polls: waiting keeps a queued request alive, and only the writer can do that.
- A writer answers once its lock is confirmed *after* the answer was made, because it may have been stopped at any
  instant. If its lock cannot be confirmed, it marks reads with `Gpulease-As-Of`. If another daemon has taken over, it
  refuses.
- Until the ledger is in memory, a daemon refuses as well: it would show no GPUs and no leases.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulease_protocol.errors import Unavailable
from gpulease_server.api.headers import AS_OF, STANDBY
from gpulease_server.api.problems import problem_response
from gpulease_server.runtime.leadership.status import Leadership, LeadershipStatus, StandbyCopy

OWN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"})
"""Paths with answers about this daemon itself."""
READ_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})


class StaleReadMiddleware:
    """Refuses or marks answers that may be stale."""

    def __init__(self, app: ASGIApp, leadership: LeadershipStatus, static_routes: Sequence[BaseRoute] = ()) -> None:
        self.app = app
        self.leadership = leadership
        self.static_routes = static_routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in OWN_PATHS or self._is_static(scope):
            await self.app(scope, receive, send)
        elif (copy := self.leadership.standby_copy) is not None:
            await self._from_copy(copy, scope, receive, send)
        elif not scope["app"].state.daemon.writer.has_loaded:
            problem = scope["app"].state.daemon.writer.problem
            error = Unavailable(f"The daemon has just started: {problem}.", remedy="Try again.")
            await problem_response(error)(scope, receive, send)
        else:
            await self._from_writer(scope, receive, send)

    def _is_static(self, scope: Scope) -> bool:
        """True for routes that always answer the same."""
        return any(route.matches(scope)[0] is Match.FULL for route in self.static_routes)

    async def _from_copy(self, copy: StandbyCopy, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in READ_METHODS or _waits(scope) or copy.as_of is None:
            detail = f"This daemon is a standby and answers only reads; the writer is {copy.writer}."
            remedy = "Send it to the writer, or give your client the addresses of both."
            error = Unavailable(detail, remedy=remedy, extra={"writer": copy.writer})
            error.retry_after_s = 0.0
            await problem_response(error, {STANDBY: copy.writer})(scope, receive, send)
            return
        as_of = copy.as_of

        async def send_marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                _mark(message, as_of)
                MutableHeaders(scope=message)[STANDBY] = copy.writer
            await send(message)

        await self.app(scope, receive, send_marked)

    async def _from_writer(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = False

        async def send_if_current(message: Message) -> None:
            nonlocal refused
            if refused:
                return
            is_start = message["type"] == "http.response.start" and message["status"] < 500
            if is_start and self.leadership.state() is not Leadership.CONFIRMED:
                try:
                    as_of = await stale_since(self.leadership, scope["method"])
                except Unavailable as error:
                    refused = True
                    await problem_response(error)(scope, receive, send)
                    return
                if as_of is not None:
                    _mark(message, as_of)
            await send(message)

        await self.app(scope, receive, send_if_current)


async def stale_since(leadership: LeadershipStatus, method: str) -> datetime | None:
    """As of when an answer that was just made may be stale; None if it is not. Raises `Unavailable` if it must not be
    sent."""
    as_of = leadership.confirmed_at
    verdict = await leadership.wait_for_state()
    reads = method in READ_METHODS
    if verdict is Leadership.SUPERSEDED or (verdict is Leadership.UNCONFIRMED and not reads):
        raise _refusal(verdict, reads)
    return as_of if verdict is Leadership.UNCONFIRMED else None


def _refusal(verdict: Leadership, reads: bool) -> Unavailable:
    superseded = verdict is Leadership.SUPERSEDED
    detail = "Another daemon has taken over." if superseded else "Another daemon may have taken over."
    error = Unavailable(detail, remedy="Try again, there or here.", extra={} if reads else {"outcome": "unknown"})
    if superseded:
        error.retry_after_s = 0.0  # another daemon serves; otherwise a client with one address would retry in a loop
    return error


def _mark(message: Message, as_of: datetime) -> None:
    MutableHeaders(scope=message)[AS_OF] = shown(as_of)


def shown(as_of: datetime) -> str:
    """A time as the header `Gpulease-As-Of` has it."""
    return as_of.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _waits(scope: Scope) -> bool:
    """True for a long poll or an event stream."""
    if scope["path"] == "/v1/events" and "text/event-stream" in Headers(scope=scope).get("accept", ""):
        return True
    wait_s = parse_qs(scope["query_string"].decode("latin-1")).get("wait_s", ["0"])
    return bool(wait_s[-1].strip("0."))
