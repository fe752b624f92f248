"""Refuses query parameters that are unknown or given twice: ignoring a typo such as `?stat=active`, or one of two
users, would answer a different question."""

from __future__ import annotations

from collections.abc import Iterator
from typing import get_args, get_origin

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


async def refuse_wrong_parameters(request: Request) -> None:
    """Raise InvalidRequest for an unknown query parameter, for one that is given too often, and for NUL. Raise NotFound
    for a path with a name that is too long."""
    if "\0" in request.scope["path"] or any(
        "\0" in text for item in request.query_params.multi_items() for text in item
    ):
        raise InvalidRequest("The URL must not contain NUL.")  # a database cannot look it up
    if max(map(len, request.scope["path"].split("/"))) > MAX_NAME:
        raise NotFound(f"The URL has a name of more than {MAX_NAME} characters, and no name is that long.")
    route = request.scope.get("route")
    if not request.query_params or not isinstance(route, APIRoute) or not request.url.path.startswith(STRICT_PREFIX):
        return
    annotations = dict(_parameters(route.dependant))
    known = sorted(annotations)
    unknown = [name for name in dict.fromkeys(request.query_params) if name not in known]
    if unknown:
        names = ", ".join(repr(printable(name, 40)) for name in unknown[:MAX_NAMED])
        raise InvalidRequest(
            f"{names}: {request.url.path} has no such query parameter.",
            remedy=f"It accepts {', '.join(known)}." if known else "It accepts none.",
        )

    given = [name for name, _ in request.query_params.multi_items()]
    for name in dict.fromkeys(given):
        if given.count(name) > 1 and not _is_list(annotations[name]):
            raise InvalidRequest(f"{name}: is given {given.count(name)} times.", remedy="Give it once.")


def _parameters(dependant: Dependant) -> Iterator[tuple[str, object]]:
    """The names of the parameters, and their types."""
    yield from ((field.alias, field.field_info.annotation) for field in dependant.query_params)
    for part in dependant.dependencies:
        yield from _parameters(part)


def _is_list(annotation: object) -> bool:
    """True for `list[X]` and `list[X] | None`."""
    return any(get_origin(part) is list for part in (annotation, *get_args(annotation)))
