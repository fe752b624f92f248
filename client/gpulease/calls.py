"""Every endpoint as a `Call`: what to send and how to read the answer. Pure, so that any transport can carry it.

Every call that is made here may be sent again after a lost answer: reading changes nothing, a request for a lease or
job carries an idempotency key, renew and release are guarded by the token, and cancelling twice is cancelling once. A
`POST` that a user makes by hand is not, unless it says so.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar, cast
from urllib.parse import quote

from gpulease.access import BearerToken, NewBearerToken, TokenRequest
from gpulease.explanation import Explanation
from gpulease.history import EventPage
from gpulease.metrics import JobMetrics
from gpulease.model import Gpu, Job, Lease, LeaseState, Node, Page
from gpulease.wire import CancelRequest, JobRequest, LeaseRequest, PauseRequest, from_json, to_json

Answer = TypeVar("Answer")
Item = TypeVar("Item")


@dataclass(frozen=True, slots=True, kw_only=True)
class Call(Generic[Answer]):
    """One request of the REST API."""

    method: str
    """HTTP method."""
    path: str
    """Path from the root, with every id quoted."""
    read: Callable[[Any], Answer]
    """Makes the answer from the decoded JSON of a 2xx response. Raises ValueError if it is of another shape."""
    query: tuple[tuple[str, str], ...] = ()
    """Query parameters, in order."""
    body: Mapping[str, Any] | None = None
    """JSON body; null sends none."""
    idempotency_key: str | None = None
    """Sent as `Idempotency-Key`, so that the daemon does the same thing only once."""
    hold_s: float = 0.0
    """How long the daemon may hold its answer; comes on top of the transport's own time limit."""
    same_twice: bool = False
    """A POST without a key that does the same when it comes twice."""
    text: bool = False
    """`read` takes the text of the answer and not its JSON."""
    accept: str = "application/json, text/plain"
    """What kind of answer is asked for."""

    @property
    def repeatable(self) -> bool:
        """True when it may be sent again although it may have been carried out already."""
        return self.method == "GET" or self.idempotency_key is not None or self.same_twice


def gpus(cursor: str | None = None) -> Call[Page[Gpu]]:
    """`GET /v1/gpus`."""
    return _list("/v1/gpus", Gpu, cursor)


def gpu(uuid: str) -> Call[Gpu]:
    """`GET /v1/gpus/{uuid}`."""
    return _get(f"/v1/gpus/{_quoted(uuid)}", Gpu)


def nodes(cursor: str | None = None) -> Call[Page[Node]]:
    """`GET /v1/nodes`."""
    return _list("/v1/nodes", Node, cursor)


def node(name: str) -> Call[Node]:
    """`GET /v1/nodes/{name}`."""
    return _get(f"/v1/nodes/{_quoted(name)}", Node)


def drain_node(name: str) -> Call[Node]:
    """`POST /v1/nodes/{name}/drain`; draining twice is draining once."""
    return _post(f"/v1/nodes/{_quoted(name)}/drain", None, Node)


def pause_node(name: str, force: bool = False) -> Call[Node]:
    """`POST /v1/nodes/{name}/pause`; pausing twice is pausing once."""
    return _post(f"/v1/nodes/{_quoted(name)}/pause", to_json(PauseRequest(force=force)), Node)


def resume_node(name: str) -> Call[Node]:
    """`POST /v1/nodes/{name}/resume`; resuming twice is resuming once."""
    return _post(f"/v1/nodes/{_quoted(name)}/resume", None, Node)


def cordon_gpu(uuid: str, cordoned: bool = True) -> Call[Gpu]:
    """`POST /v1/gpus/{uuid}/cordon`, or `/uncordon`; twice is once."""
    return _post(f"/v1/gpus/{_quoted(uuid)}/{'cordon' if cordoned else 'uncordon'}", None, Gpu)


def leases(states: Iterable[str] = (), cursor: str | None = None) -> Call[Page[Lease]]:
    """`GET /v1/leases`, of these states, or of every state."""
    return _list("/v1/leases", Lease, cursor, [("state", str(state)) for state in states])


def lease(lease_id: str, wait_s: float = 0.0, wait_while: LeaseState | None = None) -> Call[Lease]:
    """`GET /v1/leases/{id}`, held for at most `wait_s` while the lease is in `wait_while`."""
    return _get(f"/v1/leases/{_quoted(lease_id)}", Lease, wait_s, wait_while)


def request_lease(request: LeaseRequest, idempotency_key: str, wait_s: float = 0.0) -> Call[Lease]:
    """`POST /v1/leases`: the lease, active or queued."""
    return Call(
        method="POST",
        path="/v1/leases",
        query=(("wait_s", _number(wait_s)),),
        body=to_json(request),
        idempotency_key=idempotency_key,
        read=_reader(Lease),
        hold_s=wait_s,
    )


def renew(lease_id: str, token: int | None) -> Call[Lease]:
    """`POST /v1/leases/{id}/renew`. The token makes it safe to repeat."""
    return _post(f"/v1/leases/{_quoted(lease_id)}/renew", {"token": token}, Lease)


def release(lease_id: str, token: int | None) -> Call[Lease]:
    """`POST /v1/leases/{id}/release`; cancels a queued lease. The token makes it safe to repeat."""
    return _post(f"/v1/leases/{_quoted(lease_id)}/release", {"token": token}, Lease)


def explain(lease_id: str) -> Call[Explanation]:
    """`GET /v1/leases/{id}/explain`."""
    return _get(f"/v1/leases/{_quoted(lease_id)}/explain", Explanation)


def submit(request: JobRequest, idempotency_key: str) -> Call[Job]:
    """`POST /v1/jobs`. A `mask` that is null is left out: a daemon that does not know the word would refuse it."""
    body = to_json(request)
    return Call(
        method="POST",
        path="/v1/jobs",
        body=body if request.mask else {name: value for name, value in body.items() if name != "mask"},
        idempotency_key=idempotency_key,
        read=_reader(Job),
    )


def jobs(
    states: Iterable[str] = (),
    cursor: str | None = None,
    limit: int | None = None,
    *,
    array: str | None = None,
    user: str | None = None,
) -> Call[Page[Job]]:
    """`GET /v1/jobs`, of these states or of every state, of one array and one user or of any; at most `limit`."""
    query = [("state", str(state)) for state in states]
    query += [] if array is None else [("array", array)]
    query += [] if user is None else [("user", user)]
    query += [] if limit is None else [("limit", str(limit))]
    return _list("/v1/jobs", Job, cursor, query)


def job(job_id: str, wait_s: float = 0.0, wait_while: str | None = None) -> Call[Job]:
    """`GET /v1/jobs/{id}`, held for at most `wait_s` while the job is in `wait_while`."""
    return _get(f"/v1/jobs/{_quoted(job_id)}", Job, wait_s, wait_while)


def cancel_job(job_id: str, grace_s: float | None = None) -> Call[Job]:
    """`POST /v1/jobs/{id}/cancel`; cancelling twice is cancelling once."""
    body = None if grace_s is None else to_json(CancelRequest(grace_s=grace_s))
    return _post(f"/v1/jobs/{_quoted(job_id)}/cancel", body, Job)


def job_logs(
    job_id: str,
    follow: bool = False,
    rank: int | str | None = None,
    tail: int | None = None,
    offset: str | int | None = None,
) -> Call[str]:
    """`GET /v1/jobs/{id}/logs`: a log in frames (`gpulease.log_frames`), to be streamed."""
    asked = (("rank", rank), ("tail", tail), ("offset", offset))
    query = [("frames", "1"), *([("follow", "1")] if follow else [])]
    query += [(name, str(value)) for name, value in asked if value is not None]
    return Call(method="GET", path=f"/v1/jobs/{_quoted(job_id)}/logs", query=tuple(query), read=str, text=True)


def job_metrics(job_id: str, points: int | None = None) -> Call[JobMetrics]:
    """`GET /v1/jobs/{id}/metrics`, with at most so many buckets for each GPU."""
    query = () if points is None else (("points", str(points)),)
    return Call(method="GET", path=_metrics_path(job_id), query=query, read=_reader(JobMetrics))


def job_metrics_csv(job_id: str, points: int | None = None) -> Call[str]:
    """`GET /v1/jobs/{id}/metrics` as CSV."""
    query = (("format", "csv"), *(() if points is None else (("points", str(points)),)))
    return Call(method="GET", path=_metrics_path(job_id), query=query, read=str, text=True)


def create_token(request: TokenRequest) -> Call[NewBearerToken]:
    """`POST /v1/tokens`. Sent once: the answer is the only one that shows the token."""
    return Call(method="POST", path="/v1/tokens", body=to_json(request), read=_reader(NewBearerToken))


def tokens(cursor: str | None = None) -> Call[Page[BearerToken]]:
    """`GET /v1/tokens`."""
    return _list("/v1/tokens", BearerToken, cursor)


def revoke_token(token_id: str) -> Call[BearerToken]:
    """`DELETE /v1/tokens/{id}`."""
    return Call(method="DELETE", path=f"/v1/tokens/{_quoted(token_id)}", read=_reader(BearerToken))


def events(after: int = 0, limit: int | None = None) -> Call[EventPage]:
    """`GET /v1/events`: what was recorded after `seq` number `after`, oldest first; after 0, all that is kept."""
    query = [("after", str(after))]
    if limit is not None:
        query.append(("limit", str(limit)))
    return Call(method="GET", path="/v1/events", query=tuple(query), read=_reader(EventPage))


def event_stream(after: int | None = None) -> Call[str]:
    """`GET /v1/events` as server-sent events (`gpulease.event_frames`), to be streamed; null: from now on."""
    query = () if after is None else (("after", str(after)),)
    return Call(method="GET", path="/v1/events", query=query, read=str, text=True, accept="text/event-stream")


def ready() -> Call[Mapping[str, Any]]:
    """`GET /readyz`."""
    return Call(method="GET", path="/readyz", read=dict)


def alive() -> Call[Mapping[str, Any]]:
    """`GET /healthz`."""
    return Call(method="GET", path="/healthz", read=dict)


def front_page() -> Call[str]:
    """`GET /`: GPUs, holders and the queue as a text table."""
    return Call(method="GET", path="/", read=str, text=True)


def _metrics_path(job_id: str) -> str:
    return f"/v1/jobs/{_quoted(job_id)}/metrics"


def _get(path: str, kind: type[Answer], wait_s: float = 0.0, wait_while: str | None = None) -> Call[Answer]:
    query = []
    if wait_s > 0:
        query.append(("wait_s", _number(wait_s)))
        if wait_while is not None:
            query.append(("wait_while", str(wait_while)))
    return Call(method="GET", path=path, query=tuple(query), read=_reader(kind), hold_s=max(wait_s, 0.0))


def _list(path: str, kind: type[Item], cursor: str | None, query: Iterable[tuple[str, str]] = ()) -> Call[Page[Item]]:
    where = (*query, ("cursor", cursor)) if cursor is not None else tuple(query)
    page = cast(type[Page[Item]], Page[kind])  # type: ignore[valid-type]
    return Call(method="GET", path=path, query=where, read=_reader(page))


def _post(path: str, body: Mapping[str, Any] | None, kind: type[Answer]) -> Call[Answer]:
    return Call(method="POST", path=path, body=body, read=_reader(kind), same_twice=True)


def _reader(kind: type[Answer]) -> Callable[[Any], Answer]:
    return lambda document: from_json(kind, document)


def _quoted(part: str) -> str:
    """One path segment; a dot alone would be resolved away by the transport."""
    return quote(part, safe="") if part.strip(".") else "%2E" * len(part)


def _number(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".")
