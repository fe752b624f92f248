"""The page that a browser is given at `/`: who has which GPU, who waits, and what runs, kept up to date.

It is constant bytes: one HTML file, one style sheet, and modules of JavaScript as they are written, without a build.
All that it shows it asks of the REST API of its own origin, as any caller would, so the rules for callers are the API's
and are written once. That is why the bytes need no identity: they tell nothing about anybody, and whoever comes from
another host must have the page before he can give it his token. It changes nothing: it sends no request but GET.

`curl localhost:8750/` goes on printing the table in text: the page is for those who name `text/html` in `Accept` and
prefer it, which browsers do and programs do not.

| what | how it is kept |
|---|---|
| nothing runs in the page but its own modules | `POLICY` allows scripts and styles of this origin, none inline |
| nothing is sent elsewhere | `POLICY` allows connections to this origin alone |
| labels, commands and logs of users stay text | the modules set `textContent` and read no markup (a test looks) |
| a token is forgotten with its tab | it is kept in `sessionStorage`, and sent as `Authorization` alone |
| a new version is seen at once | `Cache-Control: no-cache` with an `ETag` |

**How the modules hang together.** `dashboard.js` begins it all. `follow.js` decides what is asked when: everything at
the start, what an event concerns when it comes, and readings every few seconds; `api.js` sends it, `stream.js` reads
the events. What came is kept in one object, and drawn by `totals.js`, `gpus.js`, `queue.js`, `jobs.js` and `events.js`
into rows that stay the same elements while they show the same thing (`rows.js`), so that focus and selection survive.
`details.js` has the dialogs; `notice.js` says when what is shown is not current. `format.js` has the words of
`gpulease.table`, `clock.js` the daemon's time, which need not be the browser's.

| what happens | what the page does |
|---|---|
| the daemon does not answer | says since when, greys what it shows, asks again after 1 s, 2 s, up to 15 s |
| the stream of events ends | opens it again with Last-Event-ID; meanwhile asks for everything every few seconds |
| no stream is to be had | reads the last events in pages, as often as it tries to open one |
| something else answers, or the page fails | says so, and asks again as if nothing had come |
| 401 | stops, and asks for a token; asks again when the page is seen again |
| another token is given | forgets all that was seen under the former |
| 429, 503 | waits as long as Retry-After says, shows what the daemon said, and goes on with the page it was at |
| a standby answers | shows its copy, and says of whom and of when it is |
| the page is hidden | ends its stream and what is under way, asks for nothing; goes on when it is seen again |
| thousands of rows | draws a few hundred, and says how many more there are; of jobs it asks for a few hundred, too |
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from .accept import prefers_html

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE = "index.html"
TAG = re.compile(r'(?:W/)?("[^"]*")')


class Asset:
    """One file of the page, with all that is said of it."""

    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.media_type = MEDIA_TYPES[path.suffix]
        self.tag = f'"{hashlib.blake2b(self.body, digest_size=12).hexdigest()}"'

    def answer(self, request: Request, **more: str) -> Response:
        """The file; 304 for a caller who has it. The tag is weak, because the same file may come compressed."""
        headers = HEADERS | more | {"ETag": f"W/{self.tag}"}
        asked = request.headers.get("if-none-match", "")
        if asked.strip() == "*" or self.tag in TAG.findall(asked):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


ASSETS = {path.name: Asset(path) for path in sorted(Path(__file__).parent.iterdir()) if path.suffix in MEDIA_TYPES}
"""By name. Read once: a file that is replaced while the daemon runs would not fit the others."""


class OwnRoute(Route):
    """A route that says which one it is, as FastAPI's own do: requests are counted by that."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As `Route`."""
        match, found = super().matches(scope)
        found["route"] = self
        return match, found


class ForBrowsers(OwnRoute):
    """Matches only who prefers HTML; everybody else comes to the next route of the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As `Route`, but for nobody else and for no other method."""
        found = super().matches(scope)
        if found[0] is not Match.FULL or not prefers_html(Request(scope).headers.getlist("accept")):
            return Match.NONE, {}
        return found


async def page(request: Request) -> Response:
    """The page itself."""
    return ASSETS[PAGE].answer(request, Vary="Accept")


async def asset(request: Request) -> Response:
    """A file that the page loads. Raises `HTTPException` where there is none of that name."""
    name = request.path_params["name"]
    if name not in ASSETS or name == PAGE:
        raise HTTPException(404)
    return ASSETS[name].answer(request)


routes: list[BaseRoute] = [ForBrowsers("/", page), OwnRoute("/dashboard/{name}", asset)]
"""To be put before those of the API."""
