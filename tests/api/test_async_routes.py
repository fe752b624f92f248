"""What every request passes runs on the event loop: a hop to a thread takes longer than most answers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from inspect import iscoroutinefunction
from types import SimpleNamespace
from typing import Any

import pytest
from fastapi.dependencies.models import Dependant
from fastapi.routing import APIRoute

from gpulease_server.api.app import create_app
from gpulease_server.api.auth.access_rules import authorize

ROUTES = {
    f"{'|'.join(route.methods)} {route.path}": route
    for route in create_app(SimpleNamespace(leadership=None)).routes  # type: ignore[arg-type]
    if isinstance(route, APIRoute)
}


def calls(dependant: Dependant) -> Iterator[Callable[..., Any]]:
    """The endpoint, and all that it depends on."""
    assert dependant.call is not None
    yield dependant.call
    for part in dependant.dependencies:
        yield from calls(part)


@pytest.mark.parametrize("name", ROUTES)
def test_no_route_runs_in_a_thread_of_the_framework(name: str) -> None:
    called = list(calls(ROUTES[name].dependant))
    in_threads = [
        call for call in called if not iscoroutinefunction(call) and not iscoroutinefunction(type(call).__call__)
    ]
    assert not in_threads, "async def, even where nothing is awaited"
    assert authorize in called
