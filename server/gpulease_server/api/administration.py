"""Taking nodes and GPUs out of use, and putting them back."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends

from gpulease.model import Gpu, Node, NodeMode
from gpulease.wire import PauseRequest, spell_uuid

from ..core.happenings import CordonSet, NodeModeSet
from ..runtime import ids
from .bodies import JsonBody
from .callers import Caller
from .daemon import Daemon, TheDaemon
from .gpus import show_gpu, show_node
from .identity import TheCaller
from .problems import documented
from .routers import new_router

router = new_router("/v1")
PAUSE = JsonBody(PauseRequest, empty=PauseRequest())
ANSWERS = documented("not_found", "unavailable")


@router.post("/nodes/{name}/drain", tags=["nodes"], responses=ANSWERS)
async def drain(name: str, daemon: TheDaemon, caller: TheCaller) -> Node:
    """Grant nothing of this node any more. What is leased there stays leased, and its jobs go on."""
    return await _set_mode(daemon, caller, name, NodeMode.DRAINING)


@router.post("/nodes/{name}/resume", tags=["nodes"], responses=ANSWERS)
async def resume(name: str, daemon: TheDaemon, caller: TheCaller) -> Node:
    """Put a node back into use. After a pause, everything on it is read anew before anything is granted."""
    return await _set_mode(daemon, caller, name, NodeMode.ACTIVE)


@router.post(
    "/nodes/{name}/pause",
    tags=["nodes"],
    openapi_extra=PAUSE.openapi(),
    responses=documented("not_found", "in_use", "invalid_request", "too_large", "unavailable"),
)
async def pause(
    name: str, asked: Annotated[PauseRequest, Depends(PAUSE)], daemon: TheDaemon, caller: TheCaller
) -> Node:
    """Drain a node and have its worker close NVML, for a GPU reset, a MIG change or a driver unload.

    Refused while a lease is active there, unless with `force`. NVML is closed once the node's `reason` no longer says
    that its worker has yet to close it.
    """
    return await _set_mode(daemon, caller, name, NodeMode.PAUSED, asked.force)


@router.post("/gpus/{uuid}/cordon", tags=["gpus"], responses=ANSWERS)
async def cordon(uuid: str, daemon: TheDaemon, caller: TheCaller) -> Gpu:
    """Grant this GPU to nobody any more. Who holds it keeps it."""
    return await _set_cordon(daemon, caller, uuid, True)


@router.post("/gpus/{uuid}/uncordon", tags=["gpus"], responses=ANSWERS)
async def uncordon(uuid: str, daemon: TheDaemon, caller: TheCaller) -> Gpu:
    """Put a GPU back into use."""
    return await _set_cordon(daemon, caller, uuid, False)


async def _set_mode(daemon: Daemon, caller: Caller, name: str, mode: NodeMode, force: bool = False) -> Node:
    happening = NodeModeSet(cause=ids.make("request"), node=name, mode=mode, force=force, by=caller.user)
    await daemon.writer.submit(happening)
    return await show_node(name, daemon)


async def _set_cordon(daemon: Daemon, caller: Caller, uuid: str, cordoned: bool) -> Gpu:
    happening = CordonSet(cause=ids.make("request"), uuid=spell_uuid(uuid), cordoned=cordoned, by=caller.user)
    await daemon.writer.submit(happening)
    return await show_gpu(uuid, daemon, caller)
