"""What every router has: before anything of a request is read, it is known who asks, and whether he may."""

from __future__ import annotations

from fastapi import APIRouter, Depends

from .identity import allow
from .query import only_known_parameters


def new_router(prefix: str = "", *tags: str) -> APIRouter:
    """A router of the API. Its routes are the application's as they are (`app.create_app`): `include_router` would
    build each of them a second time, when the first request comes."""
    return APIRouter(prefix=prefix, tags=list(tags), dependencies=[Depends(allow), Depends(only_known_parameters)])
