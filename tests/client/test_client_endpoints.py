"""Every endpoint that the daemon has, both clients have: what the real application's OpenAPI says is asked for."""

from __future__ import annotations

import asyncio
import inspect
import re
from types import SimpleNamespace
from typing import Any

import pytest

from gpulease import AsyncClient, Client, GpuleaseError, JobRequest, LeaseRequest
from gpulease.access import TokenRequest
from gpulease_server.api.app import create_app

from .stand_in import StandIn

NOT_FOR_CLIENTS = {"POST /v1/nodes/{name}/exchange", "GET /metrics"}
"""What workers and Prometheus ask for."""
NOT_ENDPOINTS = {"send", "close", "to", "find_usable_cuda_devices"}
GIVEN: dict[str, Any] = {
    "uuid": "x",
    "name": "x",
    "lease_id": "x",
    "job_id": "x",
    "token": 1,
    "token_id": "x",
    "count": 1,
    "cordoned": True,
}
TWICE = {"cordon_gpu": {"cordoned": False}}
"""Methods that stand for two endpoints, and what makes them ask the second."""


def endpoints() -> set[str]:
    """`METHOD /path` of every operation in the application's OpenAPI document."""
    document = create_app(SimpleNamespace(standing=None)).openapi()  # type: ignore[arg-type]
    return {f"{verb.upper()} {path}" for path, verbs in document["paths"].items() for verb in verbs} - NOT_FOR_CLIENTS


def methods(client: type) -> dict[str, Any]:
    """The public methods that ask for something."""
    found = inspect.getmembers(client, inspect.isroutine)
    return {name: method for name, method in found if not name.startswith("_") and name not in NOT_ENDPOINTS}


def arguments(name: str, method: Any) -> dict[str, Any]:
    requests = {
        "submit": JobRequest(command=["x"]),
        "request_lease": LeaseRequest(count=1),
        "create_token": TokenRequest(user="x"),
    }
    wanted = [
        parameter.name
        for parameter in inspect.signature(method).parameters.values()
        if parameter.default is parameter.empty and parameter.name != "self"
    ]
    return {word: requests[name] if word == "request" else GIVEN[word] for word in wanted}


async def finished(outcome: Any) -> None:
    """Whatever kind of thing a method returns, brought to its end."""
    if inspect.isawaitable(outcome):
        outcome = await outcome
    if hasattr(outcome, "__aiter__"):
        async for _ in outcome:
            pass
    elif inspect.isgenerator(outcome):
        list(outcome)


async def ask(client: Client | AsyncClient, name: str, given: dict[str, Any]) -> None:
    try:
        await finished(getattr(client, name)(**given))
    except GpuleaseError:
        return  # the stand-in knows few of them; what counts is what was asked


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_every_endpoint_has_a_method(daemon: StandIn, kind: Any) -> None:
    async def work() -> None:
        client = kind(daemon.url)
        for name, method in methods(kind).items():
            given = arguments(name, method)
            await ask(client, name, given)
            if name in TWICE:
                await ask(client, name, given | TWICE[name])
        closed = client.close()
        if inspect.isawaitable(closed):
            await closed

    asyncio.run(work())
    asked = {line.partition("?")[0] for line in daemon.seen}

    def is_asked(endpoint: str) -> bool:
        pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(endpoint))
        return any(re.fullmatch(pattern, line) for line in asked)

    known = endpoints()
    assert len(known) > 15, "the application's endpoints were not found"
    assert {endpoint for endpoint in known if not is_asked(endpoint)} == set()


def test_both_clients_have_the_same_methods_with_the_same_arguments() -> None:
    ours, theirs = methods(Client), methods(AsyncClient)
    assert set(ours) == set(theirs)
    differing = {
        name
        for name in ours
        if [*inspect.signature(ours[name]).parameters] != [*inspect.signature(theirs[name]).parameters]
    }
    assert differing == set()
