"""GPUs: their state, and cordoning them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fastapi import Request, Response
from pydantic import TypeAdapter

from gpulease_protocol.errors import NotFound
from gpulease_protocol.gpu_uuid import canonical_uuid
from gpulease_protocol.model import Gpu, GpuState, Page
from gpulease_server.api.auth.access_rules import CallerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.auth.callers import Caller
from gpulease_server.api.auth.job_callers import may_see_node, redact_for_job
from gpulease_server.api.auth.redaction import redact_gpu
from gpulease_server.api.daemon_state import DaemonDep, DaemonState
from gpulease_server.api.long_lists import list_json
from gpulease_server.api.problems import error_responses
from gpulease_server.core.happenings import CordonRequested
from gpulease_server.core.presentation import GpuList, gpu_view
from gpulease_server.core.records import GpuRecord
from gpulease_server.core.timestamps import wall_clock
from gpulease_server.runtime import ids

router = new_router("/v1/gpus", "gpus")
GPU_JSON: TypeAdapter[object] = TypeAdapter(Gpu)


def last_use(daemon: DaemonState) -> Callable[[Gpu], Gpu]:
    """What adds to a leased GPU when it was busy, and since when it does what it does: the ledger does not know it."""
    now = daemon.now()
    usage = daemon.writer.metrics.usage
    idle_s = usage.idle_s(now.mono_s)

    def add(gpu: Gpu) -> Gpu:
        if gpu.state is not GpuState.LEASED or gpu.uuid not in idle_s:
            return gpu
        held = usage.held.get(gpu.uuid)
        since_s = held.activity_since_s if held is not None and held.activity is gpu.activity else None
        return replace(
            gpu,
            last_busy_at=wall_clock(now, now.mono_s - idle_s[gpu.uuid]),
            idle_s=float(int(idle_s[gpu.uuid])),  # whole seconds, as of a lease: answers stay the same for a while
            activity_since=None if since_s is None else wall_clock(now, since_s),
        )

    return add


@router.get("", operation_id="listGpus", response_model=Page[Gpu])
async def list_gpus(request: Request, daemon: DaemonDep, caller: CallerDep) -> Response:
    """All GPUs: the last reading, the state, and who holds each or which request it is reserved for."""
    moment = (daemon.writer.published, id(daemon.policy), int(daemon.now().mono_s))
    sees_all = caller.lease_id is None and (daemon.access.show_commands or caller.is_admin)
    audience = "all" if sees_all else caller
    return await daemon.gpu_lists.respond(request, moment, audience, lambda: _list_json(daemon, caller))


async def _list_json(daemon: DaemonState, caller: Caller) -> bytes:
    gpus, add_last_use = GpuList(daemon.ledger, daemon.now(), daemon.policy), last_use(daemon)

    def view(gpu: GpuRecord) -> Gpu:
        return redact_for_job(caller, redact_gpu(caller, add_last_use(gpus.view(gpu)), daemon.access))

    records = gpus.records()
    if caller.lease_id is not None:
        records = (one for one in gpus.records() if may_see_node(caller, one.device.node, daemon.ledger))
    return await list_json(records, view, GPU_JSON)


@router.get("/{uuid}", operation_id="getGpu", responses=error_responses("not_found"))
async def show_gpu(uuid: str, daemon: DaemonDep, caller: CallerDep) -> Gpu:
    """One GPU."""
    record = daemon.ledger.gpus.get(canonical_uuid(uuid))
    if record is None:
        raise NotFound(f"There is no GPU {uuid}.", remedy="`GET /v1/gpus` lists all GPUs.")
    view = last_use(daemon)(gpu_view(daemon.ledger, record, daemon.now(), daemon.policy))
    return redact_for_job(caller, redact_gpu(caller, view, daemon.access))


@router.post("/{uuid}/cordon", operation_id="cordonGpu", responses=error_responses("not_found"))
async def cordon(uuid: str, daemon: DaemonDep, caller: CallerDep) -> Gpu:
    """Stop granting this GPU. Its current holder keeps it."""
    return await _set_cordon(daemon, caller, uuid, True)


@router.post("/{uuid}/uncordon", operation_id="uncordonGpu", responses=error_responses("not_found"))
async def uncordon(uuid: str, daemon: DaemonDep, caller: CallerDep) -> Gpu:
    """Put a GPU back into use."""
    return await _set_cordon(daemon, caller, uuid, False)


async def _set_cordon(daemon: DaemonState, caller: Caller, uuid: str, cordoned: bool) -> Gpu:
    happening = CordonRequested(
        cause=ids.new_id("request"), uuid=canonical_uuid(uuid), cordoned=cordoned, by=caller.user
    )
    await daemon.submit(happening)
    return await show_gpu(uuid, daemon, caller)
