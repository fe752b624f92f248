"""What an address may carry after its `?`. A parameter that is not known is refused, because ignoring a typo such as
`?stat=active` would answer another question than was asked."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import Request
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from gpulease.errors import InvalidRequest
from gpulease.table import plain

VERSIONED = "/v1/"
"""Only here: `/healthz` and `/` may be asked with whatever a load balancer or a browser adds against caches."""
SHOWN = 5
"""Unknown parameters that are named, at most."""


async def only_known_parameters(request: Request) -> None:
    """Raise InvalidRequest for a query parameter that the route does not have, naming those it has, and for NUL."""
    if "\0" in request.scope["path"] or any(
        "\0" in text for item in request.query_params.multi_items() for text in item
    ):
        raise InvalidRequest("The address must not contain NUL.")  # no database would look it up
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute) or not request.url.path.startswith(VERSIONED):
        return
    known = sorted(set(_names(route.dependant)))
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
    if unknown:
        named = ", ".join(repr(plain(name, 40)) for name in unknown[:SHOWN])
        raise InvalidRequest(
            f"{named}: {request.url.path} has no such query parameter.",
            remedy=f"It takes {', '.join(known)}." if known else "It takes none.",
        )


def _names(dependant: Dependant) -> Iterator[str]:
    yield from (field.alias for field in dependant.query_params)
    for part in dependant.dependencies:
        yield from _names(part)
