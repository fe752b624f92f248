"""GPUs and nodes, as they are committed and last seen."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated

from fastapi import Depends

from gpulease.errors import InvalidRequest, NotFound
from gpulease.exchange import DesiredState, NodeReport
from gpulease.model import Gpu, Node, Page
from gpulease.wire import addressable, spell_uuid

from ..core.happenings import NodeReported
from ..core.node import desired_state
from ..core.view import gpu_view, gpu_views, node_view
from ..runtime import ids
from .bodies import JsonBody
from .daemon import Daemon, TheDaemon
from .identity import TheCaller
from .problems import documented
from .routers import new_router
from .visible import gpu_for

router = new_router("/v1")
REPORT = JsonBody(NodeReport)
MAX_HOLD_S = 30.0
OWNERS_S = 0.25
"""A worker learns within this whom to watch. Many short leases share one answer, which asks for no whole reading."""


@router.get("/gpus", tags=["gpus"])
async def list_gpus(daemon: TheDaemon, caller: TheCaller) -> Page[Gpu]:
    """Every GPU: its last reading, its state, who holds it, or whom it is held for."""
    views = gpu_views(daemon.ledger, daemon.now(), daemon.policy)
    return Page(items=tuple(gpu_for(caller, gpu, daemon.access) for gpu in views))


@router.get("/gpus/{uuid}", tags=["gpus"], responses=documented("not_found"))
async def show_gpu(uuid: str, daemon: TheDaemon, caller: TheCaller) -> Gpu:
    """One GPU."""
    record = daemon.ledger.gpus.get(spell_uuid(uuid))
    if record is None:
        raise NotFound(f"There is no GPU {uuid}.", remedy="gpulease status shows those there are.")
    return gpu_for(caller, gpu_view(daemon.ledger, record, daemon.now(), daemon.policy), daemon.access)


@router.get("/nodes", tags=["nodes"])
async def list_nodes(daemon: TheDaemon) -> Page[Node]:
    """Every node, and whether its readings can be trusted."""
    now = daemon.now()
    records = sorted(daemon.ledger.nodes.values(), key=lambda node: node.name)
    return Page(items=tuple(node_view(daemon.ledger, node, now, daemon.policy) for node in records))


@router.get("/nodes/{name}", tags=["nodes"], responses=documented("not_found"))
async def show_node(name: str, daemon: TheDaemon) -> Node:
    """One node."""
    record = daemon.ledger.nodes.get(name)
    if record is None:
        raise NotFound(f"There is no node {name}.", remedy="/v1/nodes lists those there are.")
    return node_view(daemon.ledger, record, daemon.now(), daemon.policy)


@router.post(
    "/nodes/{name}/exchange",
    tags=["nodes"],
    openapi_extra=REPORT.openapi(),
    responses=documented("invalid_request", "not_allowed", "too_large", "unavailable"),
)
async def exchange(
    name: str, report: Annotated[NodeReport, Depends(REPORT)], daemon: TheDaemon, caller: TheCaller
) -> DesiredState:
    """For workers: the node's full view, answered with everything that should be true on it.

    The answer is held while it would say nothing new, at most `hold_s` seconds.
    """
    _require_fitting(name, report)
    await daemon.writer.submit(
        NodeReported(
            cause=ids.make("report"),
            node=name,
            report=report,
            observed_at_s=daemon.tickets.issued_at_s(name, report.ticket),
            begun_at_s=daemon.tickets.issued_at_s(name, report.reading_ticket),
        )
    )
    daemon.recorder.take(name, report, daemon.ledger, daemon.now())
    daemon.writer.meters.reported(name, report, daemon.now())
    seen = report.ticket if report.seen is None else report.seen
    begun_s = daemon.now().mono_s
    until_s = begun_s + min(max(report.hold_s, 0.0), MAX_HOLD_S)
    slice_s = OWNERS_S if name == daemon.local_node else MAX_HOLD_S
    while True:
        daemon.require_known(caller)
        desired = desired_state(daemon.ledger, name, 0)
        told_owners, now_s = daemon.tickets.told_owners(name), daemon.now().mono_s
        news = _is_news(daemon, name, seen, replace(desired, owners=told_owners))
        if now_s >= until_s or news or (desired.owners != told_owners and now_s - begun_s >= OWNERS_S):
            break
        await daemon.writer.topics.wait(f"node:{name}", min(until_s - now_s, slice_s))
    return daemon.tickets.answer(name, replace(desired, fresh=news))


def _require_fitting(node: str, report: NodeReport) -> None:
    """Raise `InvalidRequest` for what no row has room for: one such report would undo the turn of everybody else. And
    for a GPU that nobody could name in an address."""
    texts = {"name of the node": (node, 255), "host": (report.host, 255), "driver_version": (report.driver_version, 64)}
    for place, (text, most) in texts.items():
        if text is not None and len(text) > most:
            raise InvalidRequest(f"{place}: must be at most {most} characters.")
    for number, reading in enumerate(report.gpus):
        if not addressable(reading.uuid):
            place = f"gpus.{number}.uuid"
            raise InvalidRequest(
                f"{place}: must be spelled as CUDA takes it (`GPU-`, lower-case hex), 1 to 96 characters."
            )
    if any(job.exit_code is not None and not -(2**31) <= job.exit_code < 2**31 for job in report.jobs):
        raise InvalidRequest("jobs: exit_code must be an integer of 32 bits.")


def _is_news(daemon: Daemon, node: str, ticket: int | None, desired: DesiredState) -> bool:
    wanted = node in daemon.writer.wanted
    return wanted or daemon.stopping.is_set() or not daemon.tickets.knows(node, ticket, desired)
