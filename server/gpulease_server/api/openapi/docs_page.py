"""`GET /docs`: the reference of the REST API as a static page.

`reference.html` is built from the OpenAPI document together with docs/rest.md (`python -m tests.api.test_rest_page`),
and a test fails if either is out of date. It contains no script and loads nothing, unlike FastAPI's own page: a machine
with GPUs may have no internet access, and a script in a page of this origin could release leases.
"""

from __future__ import annotations

from functools import cache
from pathlib import Path

from fastapi import Request
from fastapi.responses import HTMLResponse, Response

from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.openapi.static_document import StaticDocument

router = new_router()
PAGE = Path(__file__).with_name("reference.html")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"


@router.get("/docs", include_in_schema=False, response_class=HTMLResponse)
async def docs(request: Request) -> Response:
    """The reference of this API."""
    return _page().respond(request)


@cache
def _page() -> StaticDocument:
    return StaticDocument(PAGE.read_bytes(), "text/html; charset=utf-8", {"Content-Security-Policy": POLICY})
