"""What each request of the hot path does: from its body to its encoded answer, by the functions of its route."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping

from pydantic import TypeAdapter
from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive, Scope

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Lease, LeaseState
from gpulease_protocol.node_protocol import DesiredState
from gpulease_server.api import fair_share
from gpulease_server.api.auth.callers import Caller
from gpulease_server.api.auth.peer_credentials import PeerCredentials
from gpulease_server.api.daemon_state import DaemonState
from gpulease_server.api.direct_connection import DirectConnection
from gpulease_server.api.lease_encoder import LEASE, LeaseEncoder
from gpulease_server.api.lease_times import with_times
from gpulease_server.api.request_body import key_of
from gpulease_server.api.routes import lease_changes, leases, nodes
from gpulease_server.core.happenings import ReleaseRequested, RenewalRequested
from gpulease_server.core.records import LeaseRecord
from gpulease_server.runtime import clock

RENEWED = LeaseEncoder()
DESIRED_STATE: TypeAdapter[DesiredState] = TypeAdapter(DesiredState)
JSON = (b"content-type", b"application/json")


@dataclass(slots=True)
class Call:
    """A request that its caller may make."""

    name: str
    """The id of the lease, or the name of the node."""
    query: Mapping[str, bytes | None]
    headers: Mapping[bytes, bytes]
    daemon: DaemonState
    caller: Caller
    peer: PeerCredentials
    scope: Scope
    receive: Receive
    direct: DirectConnection | None
    received_s: float
    """When all of it had arrived."""

    async def body(self) -> bytes:
        """The whole body, which the hot path has a bound for. Raises `ClientDisconnect`."""
        body = None if self.direct is None else self.direct.take_body()
        if body is not None:
            return body
        async with fair_share.waiting():
            message = await self.receive()
            parts = [message]
            while message.get("more_body", False):
                message = await self.receive()
                parts.append(message)
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        self.received_s = clock.mono_s()
        return b"".join(part["body"] for part in parts)

    @property
    def connection(self) -> Request:
        """For those who wait: whether the client is still there."""
        return Request(self.scope, self.receive) if self.direct is None else _DirectRequest(self.scope, self.direct)

    @property
    def wait_s(self) -> float:
        """How long the answer may be held."""
        return float(self.query["wait_s"] or 0.0)


class _DirectRequest(Request):
    """As Starlette's, but one look suffices to see whether the client is there."""

    def __init__(self, scope: Scope, direct: DirectConnection) -> None:
        super().__init__(scope)
        self._direct = direct

    async def is_disconnected(self) -> bool:
        """True if the client has gone."""
        return self._direct.is_disconnected


@dataclass(slots=True)
class Answer:
    """An answer before it is sent."""

    status: int
    headers: list[tuple[bytes, bytes]]
    body: bytes


Operation = Callable[[Call], Awaitable[Answer]]


def _json(body: bytes, status: int = 200, *headers: tuple[bytes, bytes]) -> Answer:
    return Answer(status, [(b"content-length", b"%d" % len(body)), JSON, *headers], body)


async def request_lease(call: Call) -> Answer:
    """Request GPUs."""
    raw = await call.body()
    body = leases.REQUEST_BODY.read(raw)
    header = call.headers.get(b"idempotency-key")
    operation = f"{call.scope['method']} {call.scope['path']}"
    key = None if header is None else key_of(header.decode("latin-1"), call.caller, operation, raw)
    requested = await leases.lease_requested(body, key, call.daemon, call.caller, call.peer)
    lease = await leases.make_lease(requested, call.daemon, call.caller, call.connection, call.wait_s)
    status, place = leases.status_and_place(lease)
    return _json(LEASE.dump_json(lease), status, (b"location", place.encode()))


async def show_lease(call: Call) -> Answer:
    """Show a lease, or wait until it changes."""
    word = call.query["wait_while"]
    state = None if word is None else LeaseState(word.decode())
    lease = await leases.show_lease(call.name, call.daemon, call.caller, call.connection, call.wait_s, state)
    return _json(LEASE.dump_json(lease))


class LeaseChange(ABC):
    """What the writer decides of a lease. A call is the whole operation; without a task it is `happening`, the writer's
    answer, and `answer`."""

    has_body = True

    async def __call__(self, call: Call) -> Answer:
        """Carry it out."""
        token = self.token(call, await call.body() if self.has_body else b"")
        record = await lease_changes.find_lease(call.daemon, call.name)
        decided = lease_changes.decided(call.daemon, record, self.happening(call, record, token))
        return self.answer(call, record, await decided)

    def token(self, call: Call, body: bytes) -> int | None:
        """The fencing token that was sent. Raises what is wrong with the body."""
        return leases.PROOF_BODY.read(body).fencing_token

    @abstractmethod
    def happening(self, call: Call, record: LeaseRecord, token: int | None) -> RenewalRequested | ReleaseRequested:
        """What the writer decides."""

    def answer(self, call: Call, record: LeaseRecord, lease: Lease) -> Answer:
        """The answer with the lease as it was decided. `record`: as it was before."""
        return _json(LEASE.dump_json(lease))


class Renewal(LeaseChange):
    """Renew a lease."""

    def happening(self, call: Call, record: LeaseRecord, token: int | None) -> RenewalRequested:
        """What the writer decides."""
        return lease_changes.renewal(record, token)

    def answer(self, call: Call, record: LeaseRecord, lease: Lease) -> Answer:
        """The answer, with the times that the writer does not know."""
        return _json(RENEWED.encode(with_times(call.daemon, record, lease)))


class Release(LeaseChange):
    """Give the GPUs back."""

    def happening(self, call: Call, record: LeaseRecord, token: int | None) -> ReleaseRequested:
        """What the writer decides."""
        return lease_changes.release(record, token, call.caller)


class Deletion(Release):
    """The same, with the fencing token in the URL."""

    has_body = False

    def token(self, call: Call, body: bytes) -> int | None:
        """The fencing token that was sent."""
        token = call.query["token"]
        return None if token is None else int(token)


async def exchange_report(call: Call) -> Answer:
    """Take the report of a worker, and answer with what should be."""
    report = nodes.REPORT_BODY.read(await call.body())
    desired = await nodes.exchange(call.name, report, call.daemon, call.caller, call.peer)
    return _json(DESIRED_STATE.dump_json(desired))
