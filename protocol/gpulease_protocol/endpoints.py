"""The endpoint table: each endpoint as an `ApiCall`, which says what to send and how to decode the response.

Pure, so that any transport can send it. Every call except those that create or revoke a bearer token may be sent again
after a lost response (`ApiCall.is_repeatable`): reading changes nothing, a request for a lease or a job carries an
idempotency key, the fencing token guards renew and release, and cancelling twice is the same as cancelling once.

A call imports what only it needs: to make the classes of all bodies and answers takes longer than `gpulease status`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from datetime import datetime
from typing import TYPE_CHECKING, Any, Generic, TypeVar, Unpack, cast
from urllib.parse import quote

from gpulease_protocol.codec import from_json, to_body
from gpulease_protocol.errors import InvalidRequest
from gpulease_protocol.event_choice import EventChoice, query_of
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import EventPage, Gpu, Job, Lease, LeaseState, Node, Page

if TYPE_CHECKING:
    from gpulease_protocol.gpu_history import FleetHistory, GpuHistory, HistoryChoice
    from gpulease_protocol.job_metrics import JobMetrics, LeaseMetrics
    from gpulease_protocol.joining import Authority
    from gpulease_protocol.requests import JobRequest, LeaseRequest
    from gpulease_protocol.timeline import Timeline, TimelineChoice
    from gpulease_protocol.tokens import BearerToken, Identity, NewBearerToken, TokenRequest
    from gpulease_protocol.usage import Usage

Answer = TypeVar("Answer")
Item = TypeVar("Item")
OUT_OF_USE_FIELDS = frozenset({"reason"})
"""Fields of `DrainRequest` and `PauseRequest` that an older daemon does not know."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ApiCall(Generic[Answer]):
    """One request of the REST API."""

    method: str
    """HTTP method."""
    path: str
    """Path from the root, with every id percent-encoded."""
    read: Callable[[Any], Answer]
    """Makes the answer from the decoded JSON of a 2xx response. Raises ValueError if its shape is wrong."""
    query: tuple[tuple[str, str], ...] = ()
    """Query parameters, in order."""
    body: Mapping[str, Any] | None = None
    """JSON body; null sends none."""
    idempotency_key: str | None = None
    """Sent as `Idempotency-Key`, so that the daemon acts on the request only once."""
    hold_s: float = 0.0
    """How long the daemon may hold its response (long poll); added to the transport's own time limit."""
    idempotent: bool = False
    """True for a POST without a key that does the same when it is sent twice."""
    text: bool = False
    """True if `read` takes the text of the response, not its JSON."""
    optional_fields: frozenset[str] = frozenset()
    """Fields of the body that an older daemon can do without: one that refuses them is asked again without."""
    accept: str = "application/json, text/plain"
    """Media types that are accepted."""

    @property
    def is_repeatable(self) -> bool:
        """True if it is safe to send again although the daemon may have acted on it already."""
        return self.method == "GET" or self.idempotency_key is not None or self.idempotent


def without_refused_fields(call: ApiCall[Answer], refusal: str) -> ApiCall[Answer] | None:
    """The call for a daemon that refused it with this text; None unless only optional fields were in its way."""
    body = call.body or {}
    refused = {name for name in call.optional_fields & body.keys() if f"{name}: is not a field" in refusal}
    if not refused:
        return None
    return replace(call, body={name: value for name, value in body.items() if name not in refused})


def me() -> ApiCall[Identity]:
    """`GET /v1/me`."""
    from gpulease_protocol.tokens import Identity

    return get("/v1/me", Identity)


def gpus(cursor: str | None = None) -> ApiCall[Page[Gpu]]:
    """`GET /v1/gpus`."""
    return list_page("/v1/gpus", Gpu, cursor)


def gpu(uuid: str) -> ApiCall[Gpu]:
    """`GET /v1/gpus/{uuid}`."""
    return get(f"/v1/gpus/{encoded(uuid)}", Gpu)


def nodes(cursor: str | None = None) -> ApiCall[Page[Node]]:
    """`GET /v1/nodes`."""
    return list_page("/v1/nodes", Node, cursor)


def node(name: str) -> ApiCall[Node]:
    """`GET /v1/nodes/{name}`."""
    return get(f"/v1/nodes/{encoded(name)}", Node)


def drain_node(name: str, reason: str | None = None) -> ApiCall[Node]:
    """`POST /v1/nodes/{name}/drain`; idempotent."""
    from gpulease_protocol.node_requests import DrainRequest

    body = to_body(DrainRequest(reason=reason)) or None
    return replace(_post(f"/v1/nodes/{encoded(name)}/drain", body, Node), optional_fields=OUT_OF_USE_FIELDS)


def pause_node(name: str, force: bool = False, reason: str | None = None) -> ApiCall[Node]:
    """`POST /v1/nodes/{name}/pause`; idempotent."""
    from gpulease_protocol.node_requests import PauseRequest

    body = to_body(PauseRequest(force=force, reason=reason))
    return replace(_post(f"/v1/nodes/{encoded(name)}/pause", body, Node), optional_fields=OUT_OF_USE_FIELDS)


def resume_node(name: str) -> ApiCall[Node]:
    """`POST /v1/nodes/{name}/resume`; idempotent."""
    return _post(f"/v1/nodes/{encoded(name)}/resume", None, Node)


def forget_node(name: str) -> ApiCall[Node]:
    """`POST /v1/nodes/{name}/forget`."""
    return _post(f"/v1/nodes/{encoded(name)}/forget", None, Node)


def cordon_gpu(uuid: str, cordoned: bool = True) -> ApiCall[Gpu]:
    """`POST /v1/gpus/{uuid}/cordon`, or `/uncordon`; idempotent."""
    return _post(f"/v1/gpus/{encoded(uuid)}/{'cordon' if cordoned else 'uncordon'}", None, Gpu)


def leases(
    states: Iterable[str] = (),
    cursor: str | None = None,
    *,
    id_prefix: str | None = None,
    user: str | None = None,
    label: str | None = None,
    node: str | None = None,
) -> ApiCall[Page[Lease]]:
    """`GET /v1/leases`, in these states, or in any; those with this beginning of an id, of one user, with one label
    or on one node."""
    only = {"id_prefix": id_prefix, "user": user, "label": label, "node": node}
    return list_page("/v1/leases", Lease, cursor, _filters(states, only))


def lease(lease_id: str, wait_s: float = 0.0, wait_while: LeaseState | None = None) -> ApiCall[Lease]:
    """`GET /v1/leases/{id}`, held for at most `wait_s` while the lease is in state `wait_while`."""
    return get(f"/v1/leases/{encoded(lease_id)}", Lease, wait_s, wait_while)


def request_lease(request: LeaseRequest, idempotency_key: str, wait_s: float = 0.0) -> ApiCall[Lease]:
    """`POST /v1/leases`: the lease, active or queued."""
    from gpulease_protocol.requests import OWNER_FIELDS

    return ApiCall(
        method="POST",
        path="/v1/leases",
        query=(("wait_s", _seconds(wait_s)),),
        body=to_body(request),
        optional_fields=OWNER_FIELDS,
        idempotency_key=idempotency_key,
        read=_reader(Lease),
        hold_s=wait_s,
    )


def renew(lease_id: str, fencing_token: int | None) -> ApiCall[Lease]:
    """`POST /v1/leases/{id}/renew`. The fencing token makes it safe to repeat."""
    return _post(f"/v1/leases/{encoded(lease_id)}/renew", {"token": fencing_token}, Lease)


def keep(lease: Lease) -> ApiCall[Lease]:
    """`renew` for its holder: the daemon that says 2xx about this lease has renewed it, whatever else it says.

    The answer is the lease as it was where it is of a shape that this version cannot read. An answer that is not about
    this lease does not count: a proxy's page is not a renewal.
    """

    def read(document: Any) -> Lease:
        if not isinstance(document, dict) or document.get("id") != lease.id:
            raise ValueError(f"not about lease {lease.id}")
        try:
            return from_json(Lease, document)
        except ValueError:
            return lease

    return replace(renew(lease.id, lease.fencing_token), read=read)


def release(lease_id: str, fencing_token: int | None) -> ApiCall[Lease]:
    """`POST /v1/leases/{id}/release`; cancels a queued lease. The fencing token makes it safe to repeat."""
    return _post(f"/v1/leases/{encoded(lease_id)}/release", {"token": fencing_token}, Lease)


def explain(lease_id: str) -> ApiCall[Explanation]:
    """`GET /v1/leases/{id}/explain`."""
    return get(f"/v1/leases/{encoded(lease_id)}/explain", Explanation)


def explain_request(request: LeaseRequest | JobRequest) -> ApiCall[Explanation]:
    """`POST /v1/leases/explain` or `/v1/jobs/explain`: whether it fits now. Reserves and records nothing."""
    from gpulease_protocol.requests import OWNER_FIELDS, JobRequest

    if isinstance(request, JobRequest):
        return _post("/v1/jobs/explain", _job_body(request), Explanation)
    return replace(_post("/v1/leases/explain", to_body(request), Explanation), optional_fields=OWNER_FIELDS)


def _job_body(request: JobRequest) -> dict[str, Any]:
    """The body with its launcher: an older daemon would take torchrun for every command."""
    return to_body(request) | {"launcher": request.effective_launcher.value}


def submit(request: JobRequest, idempotency_key: str) -> ApiCall[Job]:
    """`POST /v1/jobs`."""
    body = _job_body(request)
    return ApiCall(method="POST", path="/v1/jobs", body=body, idempotency_key=idempotency_key, read=_reader(Job))


def jobs(
    states: Iterable[str] = (),
    cursor: str | None = None,
    limit: int | None = None,
    *,
    array: str | None = None,
    user: str | None = None,
    id_prefix: str | None = None,
    name: str | None = None,
) -> ApiCall[Page[Job]]:
    """`GET /v1/jobs`, in these states or in any, of one array, user or name or of all; at most `limit`. `id_prefix` is
    how its id or its array's begins."""
    only = {"id_prefix": id_prefix, "array": array, "user": user, "name": name, "limit": limit}
    return list_page("/v1/jobs", Job, cursor, _filters(states, only))


def job(job_id: str, wait_s: float = 0.0, wait_while: str | None = None) -> ApiCall[Job]:
    """`GET /v1/jobs/{id}`, held for at most `wait_s` while the job is in state `wait_while`."""
    return get(f"/v1/jobs/{encoded(job_id)}", Job, wait_s, wait_while)


def cancel_job(job_id: str, grace_s: float | None = None) -> ApiCall[Job]:
    """`POST /v1/jobs/{id}/cancel`; idempotent."""
    from gpulease_protocol.requests import CancelRequest

    body = None if grace_s is None else to_body(CancelRequest(grace_s=grace_s))
    return _post(f"/v1/jobs/{encoded(job_id)}/cancel", body, Job)


def job_logs(
    job_id: str,
    follow: bool = False,
    rank: int | str | None = None,
    tail: int | None = None,
    offset: str | int | None = None,
    node: str | None = None,
    attempt: int | None = None,
) -> ApiCall[str]:
    """`GET /v1/jobs/{id}/logs`: the log as a stream of frames (`gpulease_protocol.log_frames`)."""
    options = (("rank", rank), ("node", node), ("tail", tail), ("offset", offset), ("attempt", attempt))
    query = [("frames", "1"), *([("follow", "1")] if follow else [])]
    query += [(name, str(value)) for name, value in options if value is not None]
    return ApiCall(method="GET", path=f"/v1/jobs/{encoded(job_id)}/logs", query=tuple(query), read=str, text=True)


def gpu_history(uuid: str, choice: HistoryChoice) -> ApiCall[GpuHistory]:
    """`GET /v1/gpus/{uuid}/history`."""
    from gpulease_protocol.gpu_history import GpuHistory, query_of

    path = f"/v1/gpus/{encoded(uuid)}/history"
    return ApiCall(method="GET", path=path, query=query_of(choice), read=_reader(GpuHistory))


def gpu_histories(choice: HistoryChoice) -> ApiCall[FleetHistory]:
    """`GET /v1/gpus/history`."""
    from gpulease_protocol.gpu_history import FleetHistory, query_of

    return ApiCall(method="GET", path="/v1/gpus/history", query=query_of(choice), read=_reader(FleetHistory))


def lease_metrics(lease_id: str, points: int | None = None) -> ApiCall[LeaseMetrics]:
    """`GET /v1/leases/{id}/metrics`, with at most `points` buckets for each GPU."""
    from gpulease_protocol.job_metrics import LeaseMetrics

    query = () if points is None else (("points", str(points)),)
    path = f"/v1/leases/{encoded(lease_id)}/metrics"
    return ApiCall(method="GET", path=path, query=query, read=_reader(LeaseMetrics))


def job_metrics(job_id: str, points: int | None = None) -> ApiCall[JobMetrics]:
    """`GET /v1/jobs/{id}/metrics`, with at most `points` buckets for each GPU."""
    from gpulease_protocol.job_metrics import JobMetrics

    query = () if points is None else (("points", str(points)),)
    return ApiCall(method="GET", path=_metrics_path(job_id), query=query, read=_reader(JobMetrics))


def job_metrics_csv(job_id: str, points: int | None = None) -> ApiCall[str]:
    """`GET /v1/jobs/{id}/metrics` as CSV."""
    query = (("format", "csv"), *(() if points is None else (("points", str(points)),)))
    return ApiCall(method="GET", path=_metrics_path(job_id), query=query, read=str, text=True)


def create_token(request: TokenRequest) -> ApiCall[NewBearerToken]:
    """`POST /v1/tokens`. Not repeatable: only this response shows the token."""
    from gpulease_protocol.tokens import NewBearerToken

    return ApiCall(method="POST", path="/v1/tokens", body=to_body(request), read=_reader(NewBearerToken))


def tokens(cursor: str | None = None) -> ApiCall[Page[BearerToken]]:
    """`GET /v1/tokens`."""
    from gpulease_protocol.tokens import BearerToken

    return list_page("/v1/tokens", BearerToken, cursor)


def revoke_token(token_id: str) -> ApiCall[BearerToken]:
    """`DELETE /v1/tokens/{id}`. Not repeatable: the second one raises NotFound."""
    from gpulease_protocol.tokens import BearerToken

    return ApiCall(method="DELETE", path=f"/v1/tokens/{encoded(token_id)}", read=_reader(BearerToken))


def authority() -> ApiCall[Authority]:
    """`GET /v1/ca`."""
    from gpulease_protocol.joining import Authority

    return ApiCall(method="GET", path="/v1/ca", read=_reader(Authority))


def join_node(name: str) -> ApiCall[NewBearerToken]:
    """`POST /v1/nodes/{name}/join`, with a token of role `join`. Not repeatable: that is used up."""
    from gpulease_protocol.tokens import NewBearerToken

    return ApiCall(method="POST", path=f"/v1/nodes/{encoded(name)}/join", read=_reader(NewBearerToken))


def events(
    after: int = 0,
    limit: int | None = None,
    *,
    before: int | None = None,
    newest_first: bool = False,
    **choice: Unpack[EventChoice],
) -> ApiCall[EventPage]:
    """`GET /v1/events`: a page of those events that have `after` < `seq` < `before`; after 0, all that are kept."""
    place = {"after": after, "limit": limit, "before": before, "order": "desc" if newest_first else None}
    query = [(name, str(value)) for name, value in place.items() if value is not None] + query_of(choice)
    return ApiCall(method="GET", path="/v1/events", query=tuple(query), read=_reader(EventPage))


def event_stream(after: int | None = None) -> ApiCall[str]:
    """`GET /v1/events` as server-sent events (`gpulease_protocol.sse`); with null, those from now on."""
    query = () if after is None else (("after", str(after)),)
    return ApiCall(method="GET", path="/v1/events", query=query, read=str, text=True, accept="text/event-stream")


def usage(
    from_at: datetime | None = None, to_at: datetime | None = None, by: str | None = None, user: str | None = None
) -> ApiCall[Usage]:
    """`GET /v1/usage`; None is the daemon's default."""
    from gpulease_protocol.usage import Usage

    given = (("from", from_at and from_at.isoformat()), ("to", to_at and to_at.isoformat()), ("by", by), ("user", user))
    query = tuple((name, str(value)) for name, value in given if value is not None)
    return ApiCall(method="GET", path="/v1/usage", query=query, read=_reader(Usage))


def timeline(**choice: Unpack[TimelineChoice]) -> ApiCall[Timeline]:
    """`GET /v1/timeline`: a page; what is not given is the daemon's default."""
    from gpulease_protocol.timeline import Timeline

    given = ((name.removesuffix("_at"), value) for name, value in choice.items() if value is not None)
    query = tuple((name, value.isoformat() if isinstance(value, datetime) else str(value)) for name, value in given)
    return ApiCall(method="GET", path="/v1/timeline", query=query, read=_reader(Timeline))


def ready() -> ApiCall[Mapping[str, Any]]:
    """`GET /readyz`."""
    return ApiCall(method="GET", path="/readyz", read=dict)


def alive() -> ApiCall[Mapping[str, Any]]:
    """`GET /healthz`."""
    return ApiCall(method="GET", path="/healthz", read=dict)


def front_page() -> ApiCall[str]:
    """`GET /`: GPUs, holders and the queue as a text table."""
    return ApiCall(method="GET", path="/", read=str, text=True)


def _filters(states: Iterable[str], only: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Query parameters of a list; those that are null are left out."""
    given = [(name, str(value)) for name, value in only.items() if value is not None]
    return [("state", str(state)) for state in states] + given


def _metrics_path(job_id: str) -> str:
    return f"/v1/jobs/{encoded(job_id)}/metrics"


def get(path: str, kind: type[Answer], wait_s: float = 0.0, wait_while: str | None = None) -> ApiCall[Answer]:
    query = []
    if wait_s > 0:
        query.append(("wait_s", _seconds(wait_s)))
        if wait_while is not None:
            query.append(("wait_while", str(wait_while)))
    return ApiCall(method="GET", path=path, query=tuple(query), read=_reader(kind), hold_s=max(wait_s, 0.0))


def list_page(
    path: str, kind: type[Item], cursor: str | None = None, query: Iterable[tuple[str, str]] = ()
) -> ApiCall[Page[Item]]:
    parameters = (*query, ("cursor", cursor)) if cursor is not None else tuple(query)
    page = cast(type[Page[Item]], Page[kind])  # type: ignore[valid-type]
    return ApiCall(method="GET", path=path, query=parameters, read=_reader(page))


def _post(path: str, body: Mapping[str, Any] | None, kind: type[Answer]) -> ApiCall[Answer]:
    return ApiCall(method="POST", path=path, body=body, read=_reader(kind), idempotent=True)


def _reader(kind: type[Answer]) -> Callable[[Any], Answer]:
    return lambda document: from_json(kind, document)


def encoded(part: str) -> str:
    """One path segment, percent-encoded. The transport would resolve a segment of dots only.

    Raises InvalidRequest if it is empty, or not UTF-8 text, as an argument of a program may be.
    """
    if not isinstance(part, str) or not part:
        raise InvalidRequest(f"An id or a name must be text, not {part!r}.")
    if any("\ud800" <= character <= "\udfff" for character in part):
        raise InvalidRequest(f"{part!a} is not UTF-8 text, so nothing has this name.")
    return quote(part, safe="") if part.strip(".") else "%2E" * len(part)


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f}".rstrip("0").rstrip(".")
