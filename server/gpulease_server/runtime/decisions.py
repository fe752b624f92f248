"""The log of decisions: a line for each event of a committed turn, and for each refusal in it.

An event is in the database, too, and `/v1/events` has it; a refusal is in the log alone, because it changes nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from gpulease.errors import GpuleaseError
from gpulease.log_lines import fields
from gpulease.model import Event, Holder

from ..core.ledger import Change, LeaseRecord
from ..core.turn import Answer

log = logging.getLogger("gpulease.decisions")

BAD = frozenset(
    {
        *("gpu.conflict", "gpu.foreign", "gpu.gone", "gpu.leftover", "gpu.unhealthy"),
        *("job.lost", "lease.lost", "lease.unwatched", "node.unknown"),
    }
)
"""Events that somebody may have to do something about."""
BAD_ENDS = frozenset({"node_lost", "holder_died", "expired"})
"""Reasons of `lease.ended` for which that holds."""


def say(changes: Sequence[Change], answers: Iterable[tuple[str, Answer]]) -> None:
    """Log what a turn has decided. To be called after its commit."""
    if not log.isEnabledFor(logging.WARNING):
        return
    holders = {change.lease.id: change.lease.holder for change in changes if isinstance(change, LeaseRecord)}
    for change in changes:
        if isinstance(change, Event):
            log.log(_level(change), change.kind, extra=_event(change, holders.get(change.lease_id or "")))
    if log.isEnabledFor(logging.INFO):
        for cause, answer in answers:
            if isinstance(answer, GpuleaseError):
                refusal = fields(event="refused", code=answer.code, cause=cause, reason=answer.detail)
                log.info("refused", extra=refusal)


def _event(event: Event, holder: Holder | None) -> dict[str, object]:
    return fields(
        event=event.kind,
        seq=event.seq,
        lease_id=event.lease_id,
        job_id=event.job_id,
        node=event.node,
        gpus=event.gpus,
        token=event.token,
        user=holder.user if holder else None,
        reason=event.reason,
        cause=event.cause,
    )


def _level(event: Event) -> int:
    bad = event.kind in BAD or (event.kind == "lease.ended" and event.reason in BAD_ENDS)
    bad = bad or (event.kind.startswith("node.") and event.kind not in ADMINISTRATION and event.reason is not None)
    return logging.WARNING if bad else logging.INFO


ADMINISTRATION = frozenset({"node.resumed", "node.drained", "node.paused"})
"""Events of a node whose reason is who wanted it."""
