"""A router that authenticates and authorizes the caller before every route."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from gpulease_server.api.auth.access_rules import authorize
from gpulease_server.api.query_parameters import refuse_wrong_parameters


def new_router(prefix: str = "", *tags: str) -> APIRouter:
    """A router of the API. `app.create_app` takes over its routes as they are: `include_router` would build each of
    them a second time, at the first request."""
    return APIRouter(
        prefix=prefix, tags=list(tags), dependencies=[Depends(authorize), Depends(refuse_wrong_parameters)]
    )
