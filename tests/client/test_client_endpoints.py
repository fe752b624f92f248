"""Both clients have a method for every endpoint of the real application's OpenAPI document."""

from __future__ import annotations

import asyncio
import inspect
import re
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from gpulease import AsyncClient, Client, GpuleaseError, JobRequest, LeaseRequest
from gpulease_protocol import endpoints as calls
from gpulease_protocol.limits import LimitKind, LimitsRequest
from gpulease_protocol.reservations import ReservationRequest
from gpulease_protocol.tokens import TokenRequest
from tests.api.documents import endpoints
from tests.client.fake_daemon import FakeDaemon

NOT_FOR_CLIENTS = {
    *("POST /v1/nodes/{name}/exchange", "POST /v1/nodes/{name}/logs", "POST /v1/nodes/{name}/join", "GET /v1/ca"),
    *("GET /metrics", "GET /v1", "DELETE /v1/leases/{lease_id}"),
}
"""Endpoints of workers and hosts, of Prometheus, and of people with curl: clients release by POST."""
NOT_ENDPOINTS = {"send", "close", "for_destination", "find_usable_cuda_devices"}
DAWN = datetime(2026, 1, 1, tzinfo=UTC)
GIVEN: dict[str, Any] = {
    "uuid": "x",
    "name": "x",
    "lease_id": "x",
    "job_id": "x",
    "fencing_token": 1,
    "token_id": "x",
    "reservation_id": "x",
    "kind": LimitKind.USER,
    "count": 1,
    "cordoned": True,
    "reason": "x",
    "for_s": 1.0,
}
TWICE: dict[str, dict[str, Any]] = {
    "cordon_gpu": {"cordoned": False},
    "explain_request": {"request": JobRequest(command=["x"])},
}
"""Methods for two endpoints, with the arguments for the second one."""


def methods(client: type) -> dict[str, Any]:
    """The public methods that call an endpoint."""
    found = inspect.getmembers(client, inspect.isroutine)
    return {name: method for name, method in found if not name.startswith("_") and name not in NOT_ENDPOINTS}


def arguments(name: str, method: Any) -> dict[str, Any]:
    requests = {
        "submit": JobRequest(command=["x"]),
        "request_lease": LeaseRequest(count=1),
        "explain_request": LeaseRequest(count=1),
        "create_token": TokenRequest(user="x"),
        "set_limits": LimitsRequest(max_gpus=1),
        "create_reservation": ReservationRequest(gpus=["x"], user="x", from_at=DAWN, to_at=DAWN + timedelta(days=1)),
    }
    wanted = [
        parameter.name
        for parameter in inspect.signature(method).parameters.values()
        if parameter.default is parameter.empty and parameter.name not in ("self", "choice")
    ]
    return {word: requests[name] if word == "request" else GIVEN[word] for word in wanted}


async def finished(outcome: Any) -> None:
    """Await or exhaust whatever a method returns."""
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
        return  # the fake daemon knows few of them; only the request counts


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_every_endpoint_has_a_method(daemon: FakeDaemon, kind: Any) -> None:
    async def work() -> None:
        client = kind(daemon.url, retry_s=0.1)  # it knows few requests, which looks like an outage
        for name, method in methods(kind).items():
            given = arguments(name, method)
            await ask(client, name, given)
            if name in TWICE:
                await ask(client, name, given | TWICE[name])
        closed = client.close()
        if inspect.isawaitable(closed):
            await closed

    asyncio.run(work())
    asked = {line.partition("?")[0] for line in daemon.request_lines}

    def is_asked(endpoint: str) -> bool:
        pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(endpoint))
        return any(re.fullmatch(pattern, line) for line in asked)

    known = set(endpoints()) - NOT_FOR_CLIENTS
    assert len(known) > 15, "the application's endpoints were not found"
    assert {endpoint for endpoint in known if not is_asked(endpoint)} == set()


@pytest.mark.parametrize("kinds", ["lease.granted", ["lease.granted"]], ids=["by itself", "in a list"])
def test_events_of_one_kind_are_asked_for_by_its_name(kinds: Any) -> None:
    assert ("kind", "lease.granted") in calls.events(0, kinds=kinds).query
