"""Refuses unknown query parameters: ignoring a typo such as `?stat=active` would answer a different question."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from gpulease_protocol.bounds import MAX_NAME
from gpulease_protocol.errors import InvalidRequest, NotFound
from gpulease_protocol.status_table import printable

STRICT_PREFIX = "/v1/"
"""Other routes, such as `/healthz` and `/`, accept anything that a load balancer or browser adds against caches."""
UUID_PATTERN = r"^[A-Za-z0-9:/._-]{1,96}$"
"""Of a GPU, or of a part of one (MIG)."""
MAX_NAMED = 5
"""Unknown parameters that are named, at most."""


async def refuse_unknown_parameters(request: Request) -> None:
    """Raise InvalidRequest for a query parameter that the route does not have, naming those it has, and for NUL; and
    NotFound for a path with a name in it that is too long for anything."""
    if "\0" in request.scope["path"] or any(
        "\0" in text for item in request.query_params.multi_items() for text in item
    ):
        raise InvalidRequest("The URL must not contain NUL.")  # a database cannot look it up
    if max(map(len, request.scope["path"].split("/"))) > MAX_NAME:
        raise NotFound(f"The URL has a name of more than {MAX_NAME} characters, and no name is that long.")
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute) or not request.url.path.startswith(STRICT_PREFIX):
        return
    known = sorted(set(_parameter_names(route.dependant)))
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
    if unknown:
        names = ", ".join(repr(printable(name, 40)) for name in unknown[:MAX_NAMED])
        raise InvalidRequest(
            f"{names}: {request.url.path} has no such query parameter.",
            remedy=f"It accepts {', '.join(known)}." if known else "It accepts none.",
        )


def _parameter_names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for part in dependant.dependencies:
        yield from _parameter_names(part)
