"""Nodes: their state, taking them out of use, and the exchange with their workers."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Container
from typing import Annotated

from fastapi import Depends, Response
from pydantic import TypeAdapter

from gpulease_protocol.bounds import MAX_NAME
from gpulease_protocol.errors import InvalidRequest, NotFound, Unavailable
from gpulease_protocol.gpu_uuid import is_valid_uuid
from gpulease_protocol.host.variables import TOKEN
from gpulease_protocol.model import Node, NodeMode, Page
from gpulease_protocol.node_protocol import DesiredState, LogPiece, LogProgress, NodeReport
from gpulease_protocol.node_requests import DrainRequest, PauseRequest
from gpulease_protocol.requests import MAX_TEXT
from gpulease_protocol.tokens import Role
from gpulease_server.api.auth.access_rules import CallerDep, PeerDep, other_node
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.callers import Caller, is_privileged, require_still_valid
from gpulease_server.api.auth.job_callers import may_see_node
from gpulease_server.api.daemon_state import DaemonDep, DaemonState
from gpulease_server.api.long_lists import list_response
from gpulease_server.api.problems import error_responses
from gpulease_server.api.report_body import ReportBody, with_trusted_logs
from gpulease_server.api.request_body import JsonBody
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.happenings import NodeForgetRequested, NodeModeRequested, NodeReported
from gpulease_server.core.node import desired_state
from gpulease_server.core.presentation import node_list, node_view
from gpulease_server.runtime import clock, ids

router = new_router("/v1/nodes", "nodes")
NODE_JSON: TypeAdapter[object] = TypeAdapter(Node)
REPORT_BODY = ReportBody()
PIECE_BODY = JsonBody(LogPiece)
DRAIN_BODY = JsonBody(DrainRequest, empty=DrainRequest())
PAUSE_BODY = JsonBody(PauseRequest, empty=PauseRequest())
INTERFACE = re.compile(r"[A-Za-z0-9._@-]{1,15}")
"""The name of a network interface on Linux, of the characters that mean nothing in the variables of NCCL and gloo."""
MAX_HOLD_S = 30.0
OWNERS_DELAY_S = 0.25
"""A worker learns within this time which processes to watch. Many short leases share one answer, which asks for no
complete reading."""


@router.get("", operation_id="listNodes", response_model=Page[Node])
async def list_nodes(daemon: DaemonDep, caller: CallerDep) -> Response:
    """All nodes, and whether their readings can be trusted."""
    records, view = node_list(daemon.ledger, daemon.now(), daemon.policy)
    if caller.lease_id is not None:
        records = [record for record in records if may_see_node(caller, record.name, daemon.ledger)]
    return await list_response(records, view, NODE_JSON)


@router.get("/{name}", operation_id="getNode", responses=error_responses("not_found"))
async def show_node(name: str, daemon: DaemonDep) -> Node:
    """One node."""
    record = daemon.ledger.nodes.get(name)
    if record is None:
        raise NotFound(f"There is no node {name}.", remedy="`GET /v1/nodes` lists all nodes.")
    return node_view(daemon.ledger, record, daemon.now(), daemon.policy)


@router.post(
    "/{name}/drain",
    operation_id="drainNode",
    openapi_extra=DRAIN_BODY.openapi(),
    responses=error_responses("not_found", "invalid_request"),
)
async def drain(
    name: str, body: Annotated[DrainRequest, Depends(DRAIN_BODY)], daemon: DaemonDep, caller: CallerDep
) -> Node:
    """Stop granting GPUs of this node. Its active leases and their jobs continue. Users who wait see the `reason`."""
    return await _set_mode(daemon, caller, name, NodeMode.DRAINING, reason=body.reason)


@router.post("/{name}/resume", operation_id="resumeNode", responses=error_responses("not_found"))
async def resume(name: str, daemon: DaemonDep, caller: CallerDep) -> Node:
    """Put a node back into use. After a pause, all its GPUs are read again before anything is granted."""
    return await _set_mode(daemon, caller, name, NodeMode.ACTIVE)


@router.post(
    "/{name}/pause",
    operation_id="pauseNode",
    openapi_extra=PAUSE_BODY.openapi(),
    responses=error_responses("not_found", "in_use", "invalid_request"),
)
async def pause(
    name: str, body: Annotated[PauseRequest, Depends(PAUSE_BODY)], daemon: DaemonDep, caller: CallerDep
) -> Node:
    """Drain a node and have its worker close NVML, for a GPU reset, a MIG change or a driver unload.

    Refused while a lease is active there, unless `force` is true. NVML is closed once the node's `reason` no longer
    says that its worker has yet to close it.
    """
    return await _set_mode(daemon, caller, name, NodeMode.PAUSED, body.force, body.reason)


@router.post("/{name}/forget", operation_id="forgetNode", responses=error_responses("not_found", "in_use"))
async def forget(name: str, daemon: DaemonDep, caller: CallerDep) -> Node:
    """Forget a node whose host is off, with its GPUs. Answers with the node as it last was.

    Its leases end (`node_lost`), its jobs too: those with a retry left are queued again and may start elsewhere, the
    others are `lost`. So make sure that nothing of it still runs. Refused while the node reports.
    """
    node = await show_node(name, daemon)
    await daemon.submit(NodeForgetRequested(cause=ids.new_id("request"), node=name, by=caller.user))
    return node


@router.post(
    "/{name}/exchange",
    operation_id="exchangeReport",
    openapi_extra=REPORT_BODY.openapi() | {"x-internal": True},
    responses=error_responses("invalid_request"),
)
async def exchange(
    name: str,
    report: Annotated[NodeReport, Depends(REPORT_BODY)],
    daemon: DaemonDep,
    caller: CallerDep,
    peer: PeerDep,
) -> DesiredState:
    """For workers: takes the node's full view and answers with the full desired state.

    The answer is held until the desired state changes, at most `hold_s` seconds.
    """
    _require_storable(name, report, daemon.ledger.gpus)
    await _bind_token(daemon, caller, name)
    if report.jobs:
        report = with_trusted_logs(name, report, is_privileged(peer))
    await daemon.submit(
        NodeReported(
            cause=ids.new_id("report"),
            node=name,
            report=report,
            observed_at_s=daemon.tickets.issued_at_s(name, report.ticket),
            begun_at_s=daemon.tickets.issued_at_s(name, report.reading_ticket),
            may_take_over=caller.role is not Role.WORKER,  # its token is for its node, and UUIDs are no secret
        )
    )
    now = daemon.now()
    if not (report.partial or report.repeated):
        daemon.recorder.record(name, report, daemon.ledger, now)
    if not report.partial:
        daemon.writer.metrics.count_report(name, report, now, daemon.ledger)
    seen = report.ticket if report.seen is None else report.seen
    started_s = now.mono_s
    until_s = started_s + (0.0 if report.partial else min(max(report.hold_s, 0.0), MAX_HOLD_S))
    while True:
        require_still_valid(caller, daemon)
        logs, database_id = daemon.log_relay.requests(name), daemon.store.fence.database_id
        desired = desired_state(daemon.ledger, name, 0, daemon.address, logs, database_id)
        if not is_privileged(peer):
            desired = _with_job_tokens(daemon, desired)
        sent_owners, now_s = daemon.tickets.sent_owners(name), clock.mono_s()
        has_news = _has_news(daemon, name, seen, desired)
        owners_s = until_s if desired.owners == sent_owners else started_s + OWNERS_DELAY_S
        left_s = min(until_s, owners_s) - now_s
        if has_news or left_s <= 0 or desired.log_requests != daemon.tickets.sent_log_requests(name):
            break
        await daemon.wait_for(f"node:{name}", left_s)
    return daemon.tickets.issue(name, desired, complete=has_news)


@router.post(
    "/{name}/logs",
    operation_id="sendLog",
    openapi_extra=PIECE_BODY.openapi() | {"x-internal": True},
    responses=error_responses("invalid_request"),
)
async def take_log(name: str, piece: Annotated[LogPiece, Depends(PIECE_BODY)], daemon: DaemonDep) -> LogProgress:
    """For workers: takes a piece of a log that the desired state asks for. The answer is held while the caller who
    waits for the log takes none."""
    if daemon.writer.problem is not None:
        raise Unavailable(f"This daemon asks for no logs: {daemon.writer.problem}.", remedy="Ask the one that serves.")
    return await daemon.log_relay.deliver(name, piece)


async def _set_mode(
    daemon: DaemonState, caller: Caller, name: str, mode: NodeMode, force: bool = False, reason: str | None = None
) -> Node:
    cause = ids.new_id("request")
    happening = NodeModeRequested(cause=cause, node=name, mode=mode, force=force, reason=reason, by=caller.user)
    await daemon.submit(happening)
    return await show_node(name, daemon)


def _with_job_tokens(daemon: DaemonState, desired: DesiredState) -> DesiredState:
    """The orders of a node of another host, with what its jobs show to be the holders of their leases."""
    if daemon.bearer_tokens is None or not desired.jobs:
        return desired
    tokens = daemon.bearer_tokens.of_jobs
    orders = (
        order
        if TOKEN in order.spec.environment or (bearer := tokens.bearer(order.lease_id)) is None
        else replace(order, env=order.env | {TOKEN: bearer})
        for order in desired.jobs
    )
    return replace(desired, jobs=tuple(orders))


async def _bind_token(daemon: DaemonState, caller: Caller, name: str) -> None:
    """Have a worker's token report for this node alone from now on. Raises `NotAllowed` if it is for another."""
    unbound = caller.role is Role.WORKER and caller.token_id is not None and caller.node is None
    if not unbound or daemon.bearer_tokens is None:
        return
    if not await daemon.bearer_tokens.bind(caller.token_id or "", name):
        require_still_valid(caller, daemon)
        raise other_node("that it reported for first")


def _require_address(address: str | None) -> None:
    """Raise `InvalidRequest` unless other nodes can be told to reach this one there."""
    if address is None:
        return
    try:
        if "%" in address or ipaddress.ip_address(address).is_unspecified:
            raise ValueError
    except ValueError:
        raise InvalidRequest("address: must be an IP address.") from None


def _require_storable(node: str, report: NodeReport, known: Container[str]) -> None:
    """Raise `InvalidRequest` for values that do not fit their database column, because one such report would fail the
    whole turn, and for a GPU that cannot be named in a URL. `known`: UUIDs of GPUs that were found in order."""
    texts = {
        "name of the node": (node, MAX_NAME),
        "host": (report.host, MAX_NAME),
        "driver_version": (report.driver_version, 64),
        "worker_id": (report.worker_id, MAX_NAME),
        "realm": (report.realm, 128),
        "worker_version": (report.worker_version, 64),
        "problem": (report.problem, MAX_TEXT),
    }
    for field, (text, max_length) in texts.items():
        if text is not None and len(text) > max_length:
            raise InvalidRequest(f"{field}: must be at most {max_length} characters.")
    _require_address(report.address)
    if report.interface is not None and not INTERFACE.fullmatch(report.interface):
        raise InvalidRequest("interface: must be the name of a network interface.")
    for name, devices in (
        ("gpus", report.gpus),
        ("claimed_elsewhere", [one.device for one in report.claimed_elsewhere]),
    ):
        for number, device in enumerate(devices):
            if device.uuid not in known and not is_valid_uuid(device.uuid):
                raise InvalidRequest(
                    f"{name}.{number}.uuid: must be spelled as CUDA spells it (`GPU-`, lower-case hex), 1 to 96"
                    " characters."
                )
    if any(job.exit_code is not None and not -(2**31) <= job.exit_code < 2**31 for job in report.jobs):
        raise InvalidRequest("jobs: exit_code must be a 32-bit integer.")


def _has_news(daemon: DaemonState, node: str, ticket: int | None, desired: DesiredState) -> bool:
    reading_wanted = node in daemon.writer.reading_requests
    return reading_wanted or daemon.stopping.is_set() or not daemon.tickets.is_up_to_date(node, ticket, desired)
