"""Answers that may be out of date: refused, or marked as such.

- A daemon that stands by answers what only reads, from its copy. `Gpulease-Standby` names the writer, and
  `Gpulease-As-Of` says when the copy was read. It refuses all else with 503 `unavailable`, by which clients know to ask
  the next address; so also a long poll, because waiting keeps a request in the queue alive, and only at the writer.
- A writer answers when its lock is confirmed *after* the answer was made, because it may have been stopped at any
  instant. Where it cannot be, it answers what only reads with `Gpulease-As-Of`; where somebody else took over, nothing.
- Until the ledger is in memory it answers nothing either: there would be no GPU, and nobody's lease.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from urllib.parse import parse_qs

from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gpulease.errors import Unavailable

from ..runtime.standing import Copy, Standing, Verdict
from .problems import problem_response

AS_OF, STANDBY = "Gpulease-As-Of", "Gpulease-Standby"
OWN_PATHS = frozenset({"/healthz", "/readyz", "/metrics", "/openapi.json", "/docs"})
"""What a daemon says of itself."""
READING = frozenset({"GET", "HEAD", "OPTIONS"})


class OnlyCurrent:
    """Lets nobody take what may be out of date for what is."""

    def __init__(self, app: ASGIApp, standing: Standing, constant: Sequence[BaseRoute] = ()) -> None:
        self.app = app
        self.standing = standing
        self.constant = constant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or refuse it."""
        if scope["type"] != "http" or scope["path"] in OWN_PATHS or self._is_constant(scope):
            await self.app(scope, receive, send)
        elif (copy := self.standing.copy) is not None:
            await self._from_copy(copy, scope, receive, send)
        elif not scope["app"].state.daemon.writer.has_read:
            error = Unavailable("The daemon has just started, and reads its ledger.", remedy="Ask again.")
            await problem_response(error)(scope, receive, send)
        else:
            await self._from_writer(scope, receive, send)

    def _is_constant(self, scope: Scope) -> bool:
        """True for what is the same whatever has happened."""
        return any(route.matches(scope)[0] is Match.FULL for route in self.constant)

    async def _from_copy(self, copy: Copy, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] not in READING or _waits(scope) or copy.as_of is None:
            detail = f"This daemon stands by and only answers what is read; the writer is {copy.writer}."
            remedy = "Ask that one, or give your client the addresses of both."
            error = Unavailable(detail, remedy=remedy, extra={"writer": copy.writer})
            error.retry_after_s = 0.0
            await problem_response(error, {STANDBY: copy.writer})(scope, receive, send)
            return
        as_of = copy.as_of

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                _mark(message, as_of)
                MutableHeaders(scope=message)[STANDBY] = copy.writer
            await send(message)

        await self.app(scope, receive, marked)

    async def _from_writer(self, scope: Scope, receive: Receive, send: Send) -> None:
        refused = False

        async def judged(message: Message) -> None:
            nonlocal refused
            if refused:
                return
            begins = message["type"] == "http.response.start" and message["status"] < 500
            if begins and self.standing.verdict() is not Verdict.CURRENT:
                as_of = self.standing.confirmed_at
                verdict = await self.standing.settled()
                reads = scope["method"] in READING
                if verdict is Verdict.SUPERSEDED or (verdict is Verdict.DOUBTFUL and not reads):
                    refused = True
                    await problem_response(_refusal(verdict, reads))(scope, receive, send)
                    return
                if verdict is Verdict.DOUBTFUL:
                    _mark(message, as_of)
            await send(message)

        await self.app(scope, receive, judged)


def _refusal(verdict: Verdict, reads: bool) -> Unavailable:
    taken = verdict is Verdict.SUPERSEDED
    detail = "Another daemon has taken over." if taken else "It is not known whether another daemon has taken over."
    error = Unavailable(detail, remedy="Ask again, there or here.", extra={} if reads else {"outcome": "unknown"})
    if taken:
        error.retry_after_s = 0.0  # somebody else serves; else who knows one address would ask in a loop
    return error


def _mark(message: Message, as_of: datetime) -> None:
    MutableHeaders(scope=message)[AS_OF] = as_of.isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _waits(scope: Scope) -> bool:
    """True for a long poll, or a stream of events."""
    if scope["path"] == "/v1/events" and "text/event-stream" in Headers(scope=scope).get("accept", ""):
        return True
    wanted = parse_qs(scope["query_string"].decode("latin-1")).get("wait_s", ["0"])
    return bool(wanted[-1].strip("0."))
