"""The decision log: one line for each event of a committed turn, and for each request that it refused.

Events are also in the database and at `/v1/events`; refusals are only logged, because they change nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Sequence

from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.host.logging import fields
from gpulease_protocol.model import Event, Holder, JobState
from gpulease_server.core.records import Change, JobRecord, LeaseRecord
from gpulease_server.core.turn import Answer

log = logging.getLogger("gpulease.decisions")

WARNING_EVENTS = frozenset(
    {
        *("gpu.conflict", "gpu.gone", "gpu.leftover", "gpu.unhealthy"),
        *("lease.lost", "lease.unwatched", "node.unknown"),
    }
)
"""Events that may need attention; also `job.ended` of a job that is lost."""
WARNING_END_REASONS = frozenset({"node_lost", "holder_died", "expired"})
"""Reasons of `lease.ended` that may need attention."""
NODE_MODES = frozenset({"node.resumed", "node.drained", "node.paused"})
"""Events of a node that only say which administrator changed its mode."""


def log_turn(changes: Sequence[Change], answers: Iterable[tuple[str, Answer]]) -> None:
    """Log what a turn decided. Call it after the commit."""
    if not log.isEnabledFor(logging.WARNING):
        return
    holders = {change.lease.id: change.lease.holder for change in changes if isinstance(change, LeaseRecord)}
    jobs = (change.job for change in changes if isinstance(change, JobRecord))
    lost_jobs = {job.id for job in jobs if job.state is JobState.LOST}
    for change in changes:
        if isinstance(change, Event):
            level, shown = _level(change, lost_jobs), _log_fields(change, holders.get(change.lease_id or ""))
            if log.isEnabledFor(level):  # as `log.log`, without a search for who calls it
                log.handle(log.makeRecord(log.name, level, __file__, 0, change.kind, (), None, extra=shown))
    if log.isEnabledFor(logging.INFO):
        for cause, answer in answers:
            if isinstance(answer, GpuleaseError):
                refusal = fields(event="refused", code=answer.code, cause=cause, reason=answer.detail)
                log.info("refused", extra=refusal)


def _log_fields(event: Event, holder: Holder | None) -> dict[str, object]:
    return fields(
        event=event.kind,
        seq=event.seq,
        lease_id=event.lease_id,
        job_id=event.job_id,
        node=event.node,
        gpus=event.gpus,
        token=event.fencing_token,
        user=holder.user if holder else None,
        reason=event.reason,
        cause=event.cause,
    )


def _level(event: Event, lost_jobs: Collection[str]) -> int:
    warns = event.kind in WARNING_EVENTS
    warns = warns or (event.kind == "lease.ended" and event.reason in WARNING_END_REASONS)
    warns = warns or (event.kind == "job.ended" and event.job_id in lost_jobs)
    warns = warns or (event.kind.startswith("node.") and event.kind not in NODE_MODES and event.reason is not None)
    return logging.WARNING if warns else logging.INFO
