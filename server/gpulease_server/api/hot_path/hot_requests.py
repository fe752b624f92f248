"""Recognizes the requests that take the hot path, from their head alone."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import field

from starlette.types import Scope

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import LeaseState
from gpulease_server.api.hot_path import operations
from gpulease_server.api.hot_path.operations import Operation
from gpulease_server.api.request_body import LARGE_BYTES, MAX_BODY_BYTES
from gpulease_server.api.streams.long_poll import MAX_WAIT_S

NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
"""An ordinary id or name in a path."""
NO_QUERY = re.compile(rb"")
WAIT = re.compile(rb"(?:wait_s=(?P<wait_s>[0-9]{1,4}(?:\.[0-9]{1,9})?))?")
WAIT_WHILE = re.compile(
    rb"(?:wait_s=(?P<wait_s>[0-9]{1,4}(?:\.[0-9]{1,9})?)(?:&wait_while=(?P<wait_while>%b))?)?"
    % "|".join(LeaseState).encode()
)
"""As every client of gpulease waits: in this order."""
TOKEN = re.compile(rb"(?:token=(?P<token>[0-9]{1,18}))?")
UNUSUAL_FIELDS = frozenset({b"origin", b"if-none-match", b"transfer-encoding", b"expect", b"upgrade"})
"""Fields of a head that need what the hot path does not have."""
MAX_DIGITS = 18
"""Of an ordinary Content-Length. One with leading zeros may have thousands, which `int` refuses."""


@dataclass(frozen=True, slots=True)
class HotRoute:
    """A route that has a hot path."""

    method: str
    path: str
    """The template, as the router has it."""
    answer: Operation
    parameter: str = ""
    """What the path leaves open."""
    query: re.Pattern[bytes] = NO_QUERY
    max_body_bytes: int = 0

    operation: str = field(init=False)
    """Method and path, as the access rules name it."""
    no_parameters: Mapping[str, None] = field(init=False)
    """What a request without a query has."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "operation", f"{self.method} {self.path}")
        object.__setattr__(self, "no_parameters", dict.fromkeys(self.query.groupindex))


HOT_ROUTES = (
    HotRoute("POST", "/v1/leases", operations.request_lease, "", WAIT, LARGE_BYTES),
    HotRoute("GET", "/v1/leases/{lease_id}", operations.show_lease, "lease_id", WAIT_WHILE),
    HotRoute("DELETE", "/v1/leases/{lease_id}", operations.Deletion(), "lease_id", TOKEN),
    HotRoute("POST", "/v1/leases/{lease_id}/renew", operations.Renewal(), "lease_id", NO_QUERY, LARGE_BYTES),
    HotRoute("POST", "/v1/leases/{lease_id}/release", operations.Release(), "lease_id", NO_QUERY, LARGE_BYTES),
    HotRoute("POST", "/v1/nodes/{name}/exchange", operations.exchange_report, "name", NO_QUERY, MAX_BODY_BYTES),
)


def _shape(method: str, parts: list[str]) -> tuple[str, str, int, str]:
    """What tells the paths apart: `/v1/leases/ID/renew` is a POST of leases, of five parts, the last one renew."""
    return method, parts[2], len(parts), parts[4] if len(parts) > 4 else ""


BY_SHAPE = {_shape(route.method, route.path.split("/")): route for route in HOT_ROUTES}


@dataclass(slots=True)
class HotRequest:
    """A request that takes the hot path."""

    route: HotRoute
    name: str
    """What the path has where its template leaves it open."""
    query: Mapping[str, bytes | None]
    headers: dict[bytes, bytes]


def recognize(scope: Scope) -> HotRequest | None:
    """The request, if it takes the hot path."""
    if not scope["path"].startswith("/v1/"):
        return None
    parts = scope["path"].split("/")
    route = BY_SHAPE.get(_shape(scope["method"], parts))
    if route is None:
        return None
    name = parts[3] if route.parameter else ""
    if route.parameter and NAME.fullmatch(name) is None:
        return None
    if (query := _query(route, scope["query_string"])) is None:
        return None
    fields = scope["headers"]
    headers = dict(fields)
    if len(headers) != len(fields) or not UNUSUAL_FIELDS.isdisjoint(headers):
        return None
    length = headers.get(b"content-length", b"0")
    if len(length) > MAX_DIGITS or int(length) > route.max_body_bytes:
        return None
    return HotRequest(route, name, query, headers)


def _query(route: HotRoute, query_string: bytes) -> Mapping[str, bytes | None] | None:
    """The parameters of a route by name; None if something is unusual in the query."""
    if not query_string:
        return route.no_parameters
    found = route.query.fullmatch(query_string)
    if found is None or float(found.groupdict().get("wait_s") or 0.0) > MAX_WAIT_S:
        return None
    return found.groupdict()
