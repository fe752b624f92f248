"""Which leases would have to end so that a request can start: the smallest set of one node, see `core.preemption`."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import JobState, LeaseState
from gpulease_server.core.backfill import Reservations
from gpulease_server.core.gpu import conflicting_processes, ends_too_soon, node_problem
from gpulease_server.core.gpu_choice import set_to_wait_for
from gpulease_server.core.placement import find_candidates, gpus_needed, grant_size, has_enough
from gpulease_server.core.policy import Policy
from gpulease_server.core.preemption_records import MAX_PREEMPTED
from gpulease_server.core.records import GpuRecord, Instant, LeaseRecord
from gpulease_server.core.shadow_time import END_S, latest_s
from gpulease_server.core.token_budgets import held_s

MAX_TTL_S = 900.0
"""The holder of a lease with a longer `ttl_s` might hear too late that it ends: it renews after a third of that."""
MAX_SETS = 50_000
"""Sets of leases that are looked at, of all nodes together; beyond that it is not the smallest that is chosen."""


@dataclass(frozen=True, slots=True)
class Victims:
    """The leases that would end, and the GPUs on which the request would start."""

    lost_s: float
    """GPU-seconds for which they have held their GPUs."""
    node: str
    leases: tuple[LeaseRecord, ...]
    """By id."""
    gpus: tuple[GpuRecord, ...]

    def order(self) -> tuple[int, float, str, tuple[str, ...]]:
        """The set that is taken comes first."""
        return len(self.leases), self.lost_s, self.node, tuple(one.lease.id for one in self.leases)


def smallest_set(reservations: Reservations, record: LeaseRecord) -> Victims | None:
    """The leases that end for a request on one node; None where none need to, or where that would not help.
    `reservations`: what is kept for those before it."""
    ledger, demand, users = reservations.ledger, record.lease.demand, reservations.users
    nodes = {device.node for lease_id in ledger.preemptible for device in ledger.leases[lease_id].lease.gpus}
    most_gpus, found, looks = users.gpus_left(record.lease), list[Victims](), iter(range(MAX_SETS))
    for node, uuids in find_candidates(ledger, demand).by_node.items():
        if node not in nodes or (most_gpus is not None and grant_size(demand, uuids) > most_gpus):
            continue
        if node_problem(ledger, node, reservations.now, reservations.policy) is not None:
            continue
        if ends_too_soon(ledger, demand, node, reservations.now):
            continue
        most = min((len(one.leases) for one in found), default=len(ledger.preemptible))
        victims = _smallest_on(reservations, record, node, [ledger.gpus[uuid] for uuid in uuids], most, looks)
        if victims is not None and not _is_too_late(reservations, record, victims):
            found.append(victims)
    best = min(found, key=Victims.order, default=None)
    return best if best is not None and best.leases else None


def longest_notice_s(leases: Sequence[LeaseRecord], policy: Policy) -> float:
    """When the last of these leases ends that are told now, from now on.

    A holder hears of it with its next renewal, and has the whole notice from then on. One that cannot reach a daemon
    may trust its lease for `ttl_s` from the last renewal, which was before this moment."""
    notice_s, ttls_s = policy.preempt_notice_s, [one.lease.ttl_s for one in leases if one.lease.job_id is None]
    return max([notice_s, *(max(ttl_s, notice_s + ttl_s / 3) for ttl_s in ttls_s)])


def may_be_preempted(reservations: Reservations, victim: LeaseRecord) -> bool:
    """True for a lease that has opted in and has held its GPUs for long enough, if its holder can be told."""
    ledger, now, policy, lease = reservations.ledger, reservations.now, reservations.policy, victim.lease
    if lease.state is not LeaseState.ACTIVE or lease.id not in ledger.preemptible:
        return False
    if lease.id in ledger.preempting or held_s(victim, now) < policy.preempt_after_s:
        return False
    if any(node_problem(ledger, node, now, policy) is not None for node in {one.node for one in lease.gpus}):
        return False
    if lease.job_id is None:
        return lease.ttl_s <= MAX_TTL_S
    job = ledger.live_jobs.get(lease.job_id)
    if job is None or job.job.state is not JobState.RUNNING or job.cancelled_at is not None:
        return False
    return job.job.preempt_at is None and job.job.preempted < MAX_PREEMPTED


def _smallest_on(
    reservations: Reservations,
    record: LeaseRecord,
    node: str,
    candidates: Sequence[GpuRecord],
    most: int,
    looks: Iterator[int],
) -> Victims | None:
    """The smallest set of a node; None where no set of at most `most` leases is enough. `looks`: one for each set."""
    ledger, lease = reservations.ledger, record.lease
    own, of_victims = list[GpuRecord](), dict[str, list[GpuRecord]]()
    soon_s, closed = soon(reservations), reservations.users.closed_to(lease)
    for gpu in candidates:
        uuid = gpu.device.uuid
        if uuid in closed or reservations.by_uuid.get(uuid, lease.id) != lease.id:
            continue
        if (at_s := latest_s(reservations, lease.demand, gpu)) is not None and at_s <= soon_s:
            own.append(gpu)
            continue
        victim = ledger.leases.get(gpu.lease_id or "")
        if victim is None or gpu.draining or not reservations.will_be_free(lease.demand, gpu):
            continue
        if not conflicting_processes(ledger, gpu) and may_be_preempted(reservations, victim):
            of_victims.setdefault(victim.lease.id, []).append(gpu)
    needed = gpus_needed(lease.demand, candidates)
    every = [*own, *itertools.chain.from_iterable(of_victims.values())]
    if not has_enough(ledger, lease.demand, node, every, needed):
        return None
    leases = _fewest(reservations, record, node, own, of_victims, needed, most, looks)
    if leases is None:
        return None
    gpus = [*own, *(gpu for one in leases for gpu in of_victims[one.lease.id])]
    wanted = set_to_wait_for(ledger, lease.demand, node, gpus, needed)
    gpus = [gpu for gpu in gpus if gpu.device.uuid in wanted][:needed]
    return Victims(sum(_lost_s(reservations, one) for one in leases), node, leases, tuple(gpus))


def _is_too_late(reservations: Reservations, record: LeaseRecord, victims: Victims) -> bool:
    """True where the node goes, or GPUs are closed to the request, before it would be done if it starts once they have
    come."""
    ledger, now, policy, lease = reservations.ledger, reservations.now, reservations.policy, record.lease
    ended_s = max(longest_notice_s(victims.leases, policy), 2 * policy.preempt_notice_s)  # a job may take so long
    drained_s = ended_s + END_S + 2 * policy.retained_memory_s
    wait_s = max(drained_s, soon(reservations) - now.mono_s)
    if ends_too_soon(ledger, lease.demand, victims.node, Instant(now.at, now.mono_s + wait_s)):
        return True
    closed = reservations.users.closed_to(lease, -wait_s)
    return any(gpu.device.uuid in closed for gpu in victims.gpus)


def _fewest(
    reservations: Reservations,
    record: LeaseRecord,
    node: str,
    own: list[GpuRecord],
    of_victims: dict[str, list[GpuRecord]],
    needed: int,
    most: int,
    looks: Iterator[int],
) -> tuple[LeaseRecord, ...] | None:
    """The fewest leases that have enough GPUs together with the request's own; of several such sets the one that loses
    the least."""
    ledger = reservations.ledger
    leases = [ledger.leases[lease_id] for lease_id in sorted(of_victims)]
    leases.sort(key=lambda one: _lost_s(reservations, one))
    sizes = sorted((len(gpus) for gpus in of_victims.values()), reverse=True)
    for number in range(min(len(leases), most) + 1):
        if len(own) + sum(sizes[:number]) < needed:
            continue
        best: tuple[float, tuple[str, ...]] | None = None
        for at, some in enumerate(itertools.combinations(leases, number)):
            if next(looks, None) is None:
                break
            gpus = [*own, *(gpu for one in some for gpu in of_victims[one.lease.id])]
            if len(gpus) < needed:
                continue
            found = (sum(_lost_s(reservations, one) for one in some), tuple(sorted(one.lease.id for one in some)))
            if (best is not None and best <= found) or not has_enough(ledger, record.lease.demand, node, gpus, needed):
                continue
            best = found
            if at == 0:
                break  # of no other set of so many is less lost
        if best is not None:
            return tuple(ledger.leases[lease_id] for lease_id in best[1])
    return None


def _lost_s(reservations: Reservations, record: LeaseRecord) -> float:
    return len(record.lease.gpus) * held_s(record, reservations.now)


def soon(reservations: Reservations) -> float:
    """What comes by then by itself is waited for, on the monotonic clock."""
    return reservations.now.mono_s + 2 * reservations.policy.preempt_notice_s
