"""Idle GPUs of a lease that are kept on purpose."""

from __future__ import annotations

import asyncio
from typing import Annotated

from fastapi import Depends

from gpulease_protocol.errors import NotFound
from gpulease_protocol.keep import KeepRequest
from gpulease_protocol.model import Lease
from gpulease_server.api.auth.access_rules import CallerDep
from gpulease_server.api.auth.authenticated_router import new_router
from gpulease_server.api.daemon_state import DaemonDep
from gpulease_server.api.lease_times import with_times
from gpulease_server.api.problems import MAYBE_PRUNED, error_responses
from gpulease_server.api.request_body import JsonBody
from gpulease_server.core.happenings import KeepRequested
from gpulease_server.core.lease import lost_lease
from gpulease_server.runtime import ids

router = new_router("/v1/leases", "leases")
KEEP_BODY = JsonBody(KeepRequest)


@router.post(
    "/{lease_id}/keep",
    operation_id="keepLease",
    openapi_extra=KEEP_BODY.openapi(),
    responses=error_responses("invalid_request", "not_found", "lease_lost", "stale_token"),
)
async def keep(
    lease_id: str, body: Annotated[KeepRequest, Depends(KEEP_BODY)], daemon: DaemonDep, caller: CallerDep
) -> Lease:
    """Say that idle GPUs of the lease are kept on purpose, until when and why. While that lasts no one is told that the
    lease is idle, and who waits for its GPUs is told the reason. It may be said again; the last request counts.

    An administrator may say it of another user's lease, and needs no `token` for that.
    """
    record = daemon.ledger.leases.get(lease_id) or await asyncio.to_thread(daemon.store.lease, lease_id)
    if record is None:
        raise NotFound(f"There is no lease {lease_id}.", remedy=MAYBE_PRUNED.format("leases"))
    if daemon.writer.problem is None and lease_id not in daemon.ledger.leases:
        raise lost_lease(record.lease)  # it ended long ago
    asked = KeepRequested(
        cause=ids.new_id("request"),
        lease_id=lease_id,
        fencing_token=body.fencing_token,
        reason=body.reason,
        for_s=body.for_s,
        by=caller.user,
        of_another=not caller.owns(record.lease.holder),
    )
    answer = await daemon.submit(asked)
    assert isinstance(answer, Lease)
    return with_times(daemon, record, answer)
