"""The end of a lease: its GPUs begin to drain."""

from __future__ import annotations

from gpulease_protocol.model import EndReason, LeaseState
from gpulease_server.core.budget_records import count_gpu_time
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.records import Deadline, LeaseRecord
from gpulease_server.core.turn import Turn

INVOLUNTARY_ENDS = (
    EndReason.EXPIRED,
    EndReason.HOLDER_DIED,
    EndReason.REVOKED,
    EndReason.NODE_LOST,
    EndReason.BUDGET_SPENT,
    EndReason.TIME_OVER,
    EndReason.PREEMPTED,
    EndReason.RECLAIMED_IDLE,
)
"""Ends that the holder of an active lease did not ask for: `lease.lost` tells of them."""


def end_lease(turn: Turn, record: LeaseRecord, why: EndReason) -> None:
    """End a lease. Its GPUs drain from this moment, and their node is asked at once whether they are clean."""
    lease = record.lease
    held = turn.ledger.held_by(lease)
    turn.put(Deadline(lease.id, None))
    count_gpu_time(turn, lease)
    for gpu in held:
        turn.put(replace(gpu, draining=True, drains_since_s=turn.now.mono_s))
        turn.request_reading(gpu.device.node)
    turn.put(replace(record, lease=replace(lease, state=LeaseState.ENDED, end_reason=why, ended_at=turn.now.at)))
    turn.emit(
        "lease.ended",
        lease_id=lease.id,
        job_id=lease.job_id,
        node=lease.gpus[0].node if lease.gpus else None,
        gpus=tuple(device.uuid for device in lease.gpus),
        fencing_token=lease.fencing_token,
        reason=why.value,
    )
    if lease.state is LeaseState.ACTIVE and why in INVOLUNTARY_ENDS:
        turn.emit(
            "lease.lost",
            lease_id=lease.id,
            node=lease.gpus[0].node,
            gpus=tuple(device.uuid for device in lease.gpus),
            fencing_token=lease.fencing_token,
            reason=why.value,
        )
