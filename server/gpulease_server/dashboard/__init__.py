"""The dashboard: the page that a browser gets at `/`, with who has which GPU, who waits, and which jobs run, live.

It is static files: one HTML file, one style sheet, and JavaScript modules as they are written. The libraries in
`page/vendor` (Preact, htm, uPlot) are fetched by the build (`hatch_build.py`), as `libraries.json` pins them.
The page requests all its data from the REST API of its own origin, as any caller would, so access rules exist only in
the API. The files contain no data, so they need no authentication: a caller from another host must have the page before
they can sign in with a token. What the page may do (cancel, release, submit, drain) the API decides as for any caller;
the page shows only the buttons of those who may (`parts/action.js`), and asks first.

`curl 127.0.0.1:8750/` still prints the text table: the page is for clients whose `Accept` prefers `text/html`, as that
of browsers does.

| property | mechanism |
|---|---|
| only its own modules run in the page | `POLICY` allows scripts and styles of this origin, none inline |
| nothing is sent elsewhere | `POLICY` allows connections to this origin only |
| labels, commands and logs of users stay text | values of a template become text, never markup (a test checks) |
| a token is forgotten with its tab | it is kept in `sessionStorage`, and sent only as `Authorization` |
| only a viewer's token outlasts the tab | `localStorage` has it, if its user asked for that |
| a new version appears at once | `Cache-Control: no-cache` with an `ETag` |

**The modules.** `main.js` is the entry point (`loading.js` loads the page again if that fails): it holds all data in
one object, and draws the page whenever some arrive. `follow.js` decides when to fetch what: everything at the start,
what an event concerns when it arrives, and readings every few seconds. `api.js` sends requests, `stream.js` reads
events, and `shared_stream.js` lets the windows of a browser share one stream. `model.js` says what the lists mean
together, in pure functions. `shell.js` is the bar at the top and chooses the view: one module of `views/` for each,
made of `parts/`. Views are functions of the data that return templates (htm), so Preact changes only what differs, and
focus and selection survive. What only one view shows, such as the metrics of a job, it fetches itself
(`parts/answers.js`). `parts/diagnosis.js` names stragglers and stalls. The timeline may have thousands of bars, so it
is drawn on a canvas (`parts/timeline_canvas.js`), of what `parts/timeline_layout.js` computes; one link lies on the bar
that the pointer or the keyboard is at. `route.js` has the addresses (`#/jobs/ID?q=ada`), `format.js` the words of
`gpulease_protocol.status_table`, `clock.js` the daemon's time, which may differ from the browser's.

| what happens | what the page does |
|---|---|
| the daemon does not answer | says since when, stops all countdowns, retries after 1 s, 2 s, up to 15 s |
| the event stream ends | reconnects with Last-Event-ID; meanwhile fetches everything every few seconds |
| no stream can be opened | reads the last events in pages, whenever it tries to open one |
| a file does not arrive or is of another release | says so, loads itself again once the server answers (`loading.js`) |
| another server answers (a proxy whose session has ended), or the page fails | says so, and retries as with no answer |
| the daemon is of another version than the page | says so within a minute, with a button that loads it again |
| a proxy keeps the version to itself | is current all the same |
| 401 | stops, and asks for a token; retries when the page is visible again |
| the user signs in with another token | removes all data of the former one |
| 429, 503 | waits as Retry-After says (10 minutes at most), shows the message, and continues with the page it was at |
| a standby answers | shows its copy, and says which daemon the writer is and how old the copy is |
| the page is hidden | ends its stream and all requests until it is visible again, but for a bell |
| logs are followed in three windows | reads others every 3 s: a browser has six connections to a host |
| a log is silent for 45 s, or its connection ends | asks for it again from where it was; after 5 minutes for its end |
| a request of one view fails | it keeps what it had, and says of when that is (`parts/answers.js`) |
| an event tells of a change | fetches what it concerns at once, three times in a row; then once a second |
| there is a stream | fetches lists of whose changes events tell once a minute |
| 429 or 503 once | asks one by one from then on |
| the daemon keeps no history of readings | draws no sparklines |
| the browser's clock is set back | begins again with all times of its own: they are in the future |
| the browser lets it keep nothing | keeps token, theme and bells until it is closed (`storage.js`) |
| thousands of rows | draws a few hundred, and says how many more there are; of jobs it fetches only a few hundred |
"""

from __future__ import annotations

import hashlib
import html
import json
import re
from pathlib import Path

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Match, Route
from starlette.types import Scope

from gpulease_server.dashboard.content_negotiation import prefers_html

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:;"
    " base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Cache-Control": "no-cache",
    "Content-Security-Policy": POLICY,
    "Cross-Origin-Resource-Policy": "same-origin",
    "Referrer-Policy": "no-referrer",
}
MEDIA_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
PAGE = "index.html"
MISSING = (
    "The dashboard of this installation is not complete: {} is missing. Install gpulease again, in a checkout with"
    " `make setup` or `python hatch_build.py`, and restart the daemon. `gpulease status` shows the GPUs meanwhile."
)
TAG = re.compile(r'(?:W/)?("[^"]*")')


class Asset:
    """One file of the page, with its headers."""

    def __init__(self, path: Path) -> None:
        self.body = path.read_bytes()
        self.media_type = MEDIA_TYPES[path.suffix]
        self.tag = f'"{hashlib.blake2b(self.body, digest_size=12).hexdigest()}"'

    def respond(self, request: Request, **extra_headers: str) -> Response:
        """The file; 304 if the caller has it. The tag is weak, because the file may be compressed."""
        headers = HEADERS | extra_headers | {"ETag": f"W/{self.tag}"}
        if_none_match = request.headers.get("if-none-match", "")
        if if_none_match.strip() == "*" or self.tag in TAG.findall(if_none_match):
            return Response(status_code=304, headers=headers)
        return Response(self.body, headers=headers, media_type=self.media_type)


def read_assets(folder: Path) -> dict[str, Asset]:
    """The files of the page, by their path below its folder."""
    return {
        path.relative_to(folder).as_posix(): Asset(path)
        for path in sorted(folder.rglob("*"))
        if path.suffix in MEDIA_TYPES
    }


def missing_libraries(assets: dict[str, Asset]) -> list[str]:
    """Files that the build hook should have fetched and that are not there, as `vendor/preact.js`."""
    libraries = json.loads((Path(__file__).parent / "libraries.json").read_text())
    wanted = [f"vendor/{file['as']}" for library in libraries for file in library["files"]]
    return [name for name in wanted if Path(name).suffix in MEDIA_TYPES and name not in assets]


ASSETS = read_assets(Path(__file__).parent / "page")
"""Read once: a file that is replaced while the daemon runs would not match the others."""


class NamedRoute(Route):
    """A route that adds itself to the scope, as FastAPI's do: HTTP metrics are counted by route."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As `Route`."""
        match, child_scope = super().matches(scope)
        child_scope["route"] = self
        return match, child_scope


class HtmlRoute(NamedRoute):
    """Matches only callers who prefer HTML; all others get the next route of the same path."""

    def matches(self, scope: Scope) -> tuple[Match, Scope]:
        """As `Route`, but only for these callers and methods."""
        result = super().matches(scope)
        if result[0] is not Match.FULL or not prefers_html(Request(scope).headers.getlist("accept")):
            return Match.NONE, {}
        return result


async def serve_page(request: Request) -> Response:
    """The page itself; where its libraries are missing, 503 with what to do."""
    missing = missing_libraries(ASSETS)
    if missing:
        text = f"<!doctype html><title>gpulease</title><p>{html.escape(MISSING.format(', '.join(missing)))}</p>"
        return Response(text, 503, HEADERS | {"Vary": "Accept"}, MEDIA_TYPES[".html"])
    return ASSETS[PAGE].respond(request, Vary="Accept")


async def serve_asset(request: Request) -> Response:
    """A file that the page loads. Raises `HTTPException` if there is none of that name."""
    name = request.path_params["name"]
    if name not in ASSETS or name == PAGE:
        raise HTTPException(404)
    return ASSETS[name].respond(request)


routes: list[BaseRoute] = [HtmlRoute("/", serve_page), NamedRoute("/dashboard/{name:path}", serve_asset)]
"""These have to come before the routes of the API."""
