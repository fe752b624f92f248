"""When a waiting request starts, from the times that the leases in its way have declared: not sooner, and not later.

A declared time is enforced, so the end of such a lease is known from both sides. It is not sooner than its time allows
unless its holder gives it back, and the GPU is free not much later: what is held then ends within the grace of a job,
and drains. The bounds are kept apart. What a request is told rests on the late one; what another may use in the
meantime (`core.easy_backfill`) on the early one. What is not known is early *now*, and late never.

| a GPU | is not free sooner than | and not later than |
|---|---|---|
| free, with enough memory | now | now |
| leased for a declared time, or for that of a token's budget | that is over | `settling_s` after that |
| the same, by a token with GPU-hours a day | now: they may be used sooner | `settling_s` after that |
| the same, and it ran ahead of the request | now: it is not to be waited for in turn | `settling_s` after that |
| the same, of the user who is to run ahead | now: they may give it back at once | `settling_s` after that |
| the same, and it is to end for a request (`core.preemption`) | now | `settling_s` after that |
| the same, and it may be made to: it is preemptible | it has its GPUs for `preempt_after_s` | as without |
| the same, and it gives idle GPUs back (`core.reclaim`) | now: it may be idle from now on | `settling_s` after that |
| the same, of a job that is being stopped | now: it has been given back already | `settling_s` after that |
| draining | now | `2 * retained_memory_s` after the end of its lease; beyond that not known |
| leased without a time, or for longer than it could be | now | not known |
| foreign, cordoned, unhealthy, on a silent or paused node | now | not known |

A daemon that restarts gives a lease up to 5 minutes more, see `runtime.outage`; a late reading may delay a grant.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from gpulease_protocol.model import Demand, TopologyMode
from gpulease_server.core.backfill import Reservations
from gpulease_server.core.declared_ends import declared_end_s, free_at_s
from gpulease_server.core.gpu import ends_too_soon
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.placement import find_candidates, gpus_needed, has_enough, lacks_memory, reach_of
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import GpuRecord, Instant, LeaseRecord
from gpulease_server.core.token_budgets import held_s

JOB_START_S = 150.0
"""What passes from the grant to the start of a job, from which its time counts, at most: a session is opened, the
interpreter is tried, and the program starts from a slow disk. On several nodes it is `gang_start_s` more."""
JOB_GRACE_S = 35.0
"""What a job has between SIGTERM and SIGKILL when its time has passed, however it is being stopped."""
END_S = 5.0
"""What passes from the end of a declared time until its GPUs are seen clean, where nothing is left on them."""


def settling_s(record: LeaseRecord, policy: Policy) -> float:
    """For how long the GPUs of a lease, or of a request once it is granted, are not free after its declared time. What
    is left behind may take longer."""
    settling = 2 * policy.retained_memory_s + END_S
    if record.lease.job_id is None:
        return settling
    return settling + JOB_START_S + JOB_GRACE_S + (policy.gang_start_s if record.lease.demand.nodes > 1 else 0.0)


def earliest_s(
    reservations: Reservations, waiting: LeaseRecord, gpu: GpuRecord, at_once: Collection[str | None] = ()
) -> float:
    """Before this time a GPU is not free for a waiting request, unless a holder gives it back; now where that is not
    known. `at_once`: users whose leases count as free now."""
    ledger, now = reservations.ledger, reservations.now
    record = ledger.leases.get(gpu.lease_id or "")
    if record is None or record.lease.holder.user in at_once:
        return now.mono_s
    if record.lease.id in ledger.ran_ahead and (record.granted_at_s or now.mono_s) >= waiting.requested_at_s:
        return now.mono_s
    free_s = free_at_s(ledger, gpu, now)
    if reservations.policy.preemption and record.lease.id in ledger.preemptible:
        preemptible_s = now.mono_s - held_s(record, now) + reservations.policy.preempt_after_s
        return min(free_s, max(preemptible_s, now.mono_s))
    return free_s


def latest_s(reservations: Reservations, demand: Demand, gpu: GpuRecord) -> float | None:
    """By when a GPU is free for a demand; None where that is not known. It may be reserved all the same."""
    ledger, now, policy = reservations.ledger, reservations.now, reservations.policy
    if reservations.is_free(gpu):
        return None if lacks_memory(ledger, demand, gpu) else now.mono_s
    if not reservations.will_be_free(demand, gpu):
        return None
    if gpu.draining:
        found = ledger.draining_since.get(gpu.device.uuid, now.mono_s) + 2 * policy.retained_memory_s
    else:
        record = ledger.leases.get(gpu.lease_id or "")
        end_s = None if record is None else declared_end_s(ledger, record, now)
        if record is None or end_s is None:
            return None
        found = end_s + settling_s(record, policy)
    return found if found >= now.mono_s else None


def enough_at_s(
    ledger: Ledger, demand: Demand, node: str, times: Sequence[tuple[float, GpuRecord]], needed: int
) -> float | None:
    """When a node has enough GPUs for a demand, of those that are free at these times; None if it never has."""
    ordered = sorted(times, key=lambda one: (one[0], one[1].device.index))
    for number in range(max(needed, 1), len(ordered) + 1):
        at_s = ordered[number - 1][0]
        if demand.topology is not TopologyMode.REQUIRED:
            return at_s
        if has_enough(ledger, demand, node, [gpu for _, gpu in ordered[:number]], needed):
            return at_s
    return None


def serves_s(
    reservations: Reservations, waiting: LeaseRecord, node: str, at_once: Collection[str | None] = ()
) -> float:
    """Before this time a node cannot serve a waiting request, unless a holder gives GPUs back; infinity if it never
    can. Now where that is not known. `at_once`: users whose leases count as free now. Costs a look at the GPUs of the
    node."""
    ledger, demand = reservations.ledger, waiting.lease.demand
    found = [float("inf")]
    for by_node in find_candidates(ledger, demand).by_model.values():
        if uuids := by_node.get(node):
            gpus = (ledger.gpus[uuid] for uuid in uuids)
            times = [(earliest_s(reservations, waiting, gpu, at_once), gpu) for gpu in gpus]
            at_s = enough_at_s(ledger, demand, node, times, gpus_needed(demand, uuids))
            found.append(reservations.now.mono_s if at_s is None else at_s)
    return min(found)


def shadow_time(reservations: Reservations, record: LeaseRecord, *, of_held: bool = False) -> float | None:
    """By when a waiting request has its GPUs at the latest, on the monotonic clock, if nothing that is before it takes
    them; None where that is not known. `of_held`: of the free GPUs only those that are held for it count.

    GPUs that are reserved for others do not count. Costs a look at each GPU that could serve it: for readers.
    """
    ledger, demand = reservations.ledger, record.lease.demand
    most_gpus, found = reservations.users.demand_within(record.lease).most_gpus, list[float]()
    for by_node in find_candidates(ledger, demand).by_model.values():
        reached: dict[str, list[float]] = {}
        for node, uuids in by_node.items():
            reach = reach_of(ledger, demand, node)
            needed = gpus_needed(demand, uuids)
            if reach is None or (most_gpus is not None and needed * demand.nodes > most_gpus):
                continue
            times = [
                (free_s, gpu)
                for gpu in (ledger.gpus[uuid] for uuid in uuids)
                if _may_have(reservations, record, gpu, of_held=of_held)
                and (free_s := latest_s(reservations, demand, gpu)) is not None
            ]
            at_s = enough_at_s(ledger, demand, node, times, needed)
            if at_s is not None and not _is_node_gone(reservations, demand, node, at_s):
                reached.setdefault(reach, []).append(at_s)
        found += (sorted(some)[demand.nodes - 1] for some in reached.values() if len(some) >= demand.nodes)
    return min(found, default=None)


def _may_have(reservations: Reservations, record: LeaseRecord, gpu: GpuRecord, *, of_held: bool) -> bool:
    reserved_for = reservations.by_uuid.get(gpu.device.uuid)
    if reserved_for is None and of_held:
        return not reservations.is_free(gpu)
    return reserved_for in (None, record.lease.id)


def _is_node_gone(reservations: Reservations, demand: Demand, node: str, at_s: float) -> bool:
    """True where a node does not serve a demand that starts at this time, because it goes before the end of that."""
    ledger, now = reservations.ledger, reservations.now
    observation = ledger.node_observations.get(node)
    until_s = None if observation is None else observation.available_until_s
    later = Instant(now.at, max(at_s, now.mono_s))
    return (until_s is not None and at_s >= until_s) or ends_too_soon(ledger, demand, node, later)
