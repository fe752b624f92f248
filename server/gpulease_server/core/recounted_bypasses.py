"""How many times each waiting request was bypassed, counted again after a restart.

It is counted from the leases: those newer than the request that were granted one of its GPUs, but for GPUs that the
calendar closes to it; where usage orders, those of its user alone. Of ended leases only the last `MAX_ENDED_IN_MEMORY`
are known, so a daemon that restarts may let a request be bypassed somewhat more often.
"""

from __future__ import annotations

from bisect import bisect_right

from gpulease_protocol.model import Demand
from gpulease_server.core.demand_classes import rank_of
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.placement import find_candidates
from gpulease_server.core.preemption_records import was_preempted
from gpulease_server.core.records import BypassCounts, LeaseRecord
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import usage_by_user

MAX_RECOUNTED_DEMANDS = 100
"""For how many different demands bypasses are counted again after a restart, oldest first."""


def recount_bypasses(turn: Turn) -> None:
    """Count again how many times each waiting request was bypassed, once after a ledger was read from the database."""
    ledger = turn.ledger
    if ledger.bypasses_recounted:
        return
    ledger.bypasses_recounted = True
    waiting = [record for record in ledger.queued() if not _waits_since_later(ledger, record)]
    if not waiting:
        return
    granted = [
        (
            record.arrival,
            rank_of(record.lease.demand),
            record.lease.holder.user,
            {gpu.uuid for gpu in record.lease.gpus},
        )
        for record in ledger.leases.values()
        if record.lease.fencing_token is not None and record.arrival > waiting[0].arrival
    ]
    users = usage_by_user(ledger, turn.policy.limits, turn.now)
    newer: dict[tuple[Demand, str | None, frozenset[str]], list[int]] = {}
    found: list[tuple[str, int]] = []
    for record in waiting:
        # Where usage orders it is not known which users came first: only grants to the same one are surely bypasses.
        demand, user = record.lease.demand, record.lease.holder.user if turn.policy.fair_share else None
        closed = users.closed_to(record.lease)  # who gets one of these does not pass it
        if (demand, user, closed) not in newer:
            if len(newer) == MAX_RECOUNTED_DEMANDS:
                continue
            usable, rank = find_candidates(ledger, demand).uuids - closed, rank_of(demand)
            newer[demand, user, closed] = sorted(
                number
                for number, its_rank, its_user, uuids in granted
                if its_rank >= rank
                and not uuids.isdisjoint(usable)
                and (its_user == user or not turn.policy.fair_share)
            )
        of_kind = newer[demand, user, closed]
        times = len(of_kind) - bisect_right(of_kind, record.arrival)
        if times:
            found.append((record.lease.id, times))
    if found:
        turn.put(BypassCounts(tuple(found), turn.now.mono_s))


def _waits_since_later(ledger: Ledger, record: LeaseRecord) -> bool:
    """True where newer requests that were granted may have passed no one: of a job of an array with a limit it is not
    known when it was eligible, and one that was preempted ran meanwhile."""
    found = ledger.jobs.get(record.lease.job_id or "")
    return found is not None and (found.job.array_at_most is not None or was_preempted(found.job))
