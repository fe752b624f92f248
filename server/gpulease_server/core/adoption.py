"""Adoption: a lease for a process that already runs on GPUs. Until then its GPUs are `foreign`.

States
------
A request for adoption is undecided, like any other, until a reading that was begun after it; then it is active or
refused. It never waits in the queue: what would have to end first is named.

    request --> undecided --the process and those below it are alone on their GPUs--> active --it ends--> ended
                    +--anything else--> refused, nothing is recorded

What must always hold
---------------------
1. The verdict rests on a reading of the whole node that was begun after the request, and is recent (`core.gpu`).
2. The lease has every GPU on which that reading shows the process or one of its user below it, or there is none.
3. None of these is held by a lease, draining, cordoned, unhealthy, prohibited or unknown, and everything else that
   keeps it from being free is the process's own.
4. A process owns at most one lease that was made so, and none if it works under a lease already.
5. Only the user of the process, or an administrator, adopts it; the lease is that user's, and within their limits.
6. A worker watches the process, by pid and start time: the lease ends with it, and its GPUs drain.

A grant and an adoption never meet on a GPU. Both are decided by the one writer, one after the other, on the same
reading: a grant needs a GPU without a process, an adoption one with the process on it. What either has taken is held
from that moment on, also for what is decided later in the same turn. GPUs that are reserved for older requests are
free ones, so an adoption takes none of them.

| what happens | what is decided |
|---|---|
| the process ends before the reading | the reading does not show it: refused. Or its worker reports it gone: refused |
| it ends after the reading, before it is watched | its worker finds it gone: `holder_died`, the GPUs drain |
| its pid is used again before the reading | the lease names the former start time: the same |
| the pid of one below it is used again before the reading | `gpu.conflict` at the next reading |
| it starts on a further GPU after the reading | that GPU stays foreign |
| it forks after it was looked at, before the reading | the child is a stranger: refused, and may be asked for again |
| it forks afterwards | the child belongs to the lease by descent |
| a stranger starts on its GPU after the reading | `gpu.conflict`, as on any leased GPU |
| its node is silent, or does not read in time | refused: unknown is never granted |
| no worker can watch it | refused, or by heartbeat from then on: `expired`, and its GPUs drain until it ends |
| the daemon is killed before the commit | nothing was answered, and nothing is held |
| the daemon is killed after it | the lease is there again, and the process is watched again |
| the lease is released while the process runs | its GPUs drain until it has ended |
"""

from __future__ import annotations

from gpulease_protocol.errors import GpuleaseError, InUse, NotAllowed, NotNow, OverQuota
from gpulease_protocol.model import Demand, GpuState, LeaseState, Liveness, Priority, Selection
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.gpu import is_recent, node_problem, observed_at, reading_of, state_of
from gpulease_server.core.gpu_state import occupants
from gpulease_server.core.placement import NeedsReading, Placed
from gpulease_server.core.records import Adoption, GpuRecord, LeaseRecord, WatchedOwner
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import UserUsage, never_within_limits
from gpulease_server.core.wording import describe_processes


def place_adopted(
    turn: Turn, record: LeaseRecord, adoption: Adoption, users: UserUsage, *, waited_enough: bool
) -> Placed | NeedsReading | GpuleaseError:
    """The GPUs that the process uses, or why it cannot be adopted. `waited_enough`: no reading is awaited any more."""
    watched = record.watched_owner
    if watched is None or record.lease.liveness is not Liveness.PROCESS:
        return NotNow("Not now: no worker can watch the process.", remedy="`GET /v1/nodes` lists the workers.")
    problem = node_problem(turn.ledger, watched.node, turn.now, turn.policy)
    if problem is not None:
        return NotNow(f"Not now: {problem}.", remedy="Ask again when the node reports.")
    gpus = turn.ledger.gpus_on(watched.node)
    if not all(_is_read_since(turn, record, gpu) for gpu in gpus):
        if not waited_enough:
            return NeedsReading((watched.node,), ())
        return NotNow(f"Not now: node {watched.node} did not read its GPUs in time.", remedy="Ask again.")
    used = [gpu for gpu in sorted(gpus, key=lambda one: one.device.index) if _pids(turn, gpu) & adoption.pids]
    pid = watched.owner.pid
    if not used:
        remedy = "Ask again when it has started to use CUDA; `GET /v1/gpus` lists the processes of each GPU."
        return NotNow(f"Process {pid} uses no GPU of node {watched.node}.", remedy=remedy)
    refused = (
        _not_theirs(turn, adoption, pid, used)
        or _holds_a_lease(turn, record, watched)
        or next(filter(None, (_not_alone(turn, gpu, adoption, pid) for gpu in used)), None)
    )
    if refused is not None:
        return refused
    if (never := never_within_limits(users, record.lease, len(used))) is not None:
        return never
    closed = users.closed_to(record.lease)
    if reserved := [gpu for gpu in used if gpu.device.uuid in closed]:
        detail = f"Not now: GPU {reserved[0].device.index} of {reserved[0].device.node} is reserved for others."
        return NotNow(detail, remedy="`GET /v1/reservations` says when; declare a time that ends before that.")
    if (limit := users.limit_reached(record.lease, len(used))) is not None:
        return OverQuota(f"Not now: {limit}.", remedy="Give something back first.")
    return Placed(tuple(used))


def with_adopted_gpus(record: LeaseRecord, gpus: tuple[GpuRecord, ...]) -> LeaseRecord:
    """The request as if it had asked for the GPUs that the process was found on."""
    asked, uuids = record.lease.demand, tuple(gpu.device.uuid for gpu in gpus)
    demand = Demand(
        selection=Selection.LISTED,
        count=len(uuids),
        uuids=uuids,
        node=gpus[0].device.node,
        time_s=asked.time_s,
        # What runs already has not agreed to end for others.
        priority=Priority.NORMAL if asked.priority is Priority.SCAVENGE else asked.priority,
        reclaim_idle_after_s=asked.reclaim_idle_after_s,
    )
    return replace(record, lease=replace(record.lease, demand=demand))


def _is_read_since(turn: Turn, record: LeaseRecord, gpu: GpuRecord) -> bool:
    observation, uuid = turn.ledger.node_observations.get(gpu.device.node), gpu.device.uuid
    at_s = observed_at(observation, uuid)
    if at_s is None or at_s <= record.requested_at_s:
        return False
    return is_recent(observation, uuid, turn.now, turn.policy, record.requested_at_s)


def _pids(turn: Turn, gpu: GpuRecord) -> set[int]:
    reading = reading_of(turn.ledger, gpu)
    return set() if reading is None else {process.pid for process in occupants(reading)}


def _not_theirs(turn: Turn, adoption: Adoption, pid: int, used: list[GpuRecord]) -> NotAllowed | None:
    """Why the process is not the caller's, where only its node can say so."""
    if adoption.user is None:
        return None
    for gpu in used:
        reading = reading_of(turn.ledger, gpu)
        for process in occupants(reading) if reading is not None else ():
            if process.pid == pid and process.user != adoption.user:
                detail = f"Process {pid} belongs to user {process.user}, and you are {adoption.user}."
                return NotAllowed(detail, remedy="Its user can adopt it.")
    return None


def _holds_a_lease(turn: Turn, record: LeaseRecord, watched: WatchedOwner) -> InUse | None:
    for owner, leases in turn.ledger.watched_owners.get(watched.node, {}).items():
        if (owner.pid, owner.start_ticks) != (watched.owner.pid, watched.owner.start_ticks):
            continue
        for lease_id in leases:
            if lease_id != record.lease.id and turn.ledger.leases[lease_id].lease.state is LeaseState.ACTIVE:
                return InUse(f"Process {owner.pid} holds {lease_id} already.", remedy="Release that first.")
    return None


def _not_alone(turn: Turn, gpu: GpuRecord, adoption: Adoption, pid: int) -> GpuleaseError | None:
    """Why a GPU that the process uses cannot become its own; None if it can."""
    place, reading = f"GPU {gpu.device.index} of {gpu.device.node}", reading_of(turn.ledger, gpu)
    if gpu.lease_id is not None and reading is not None:
        if gpu.draining:
            detail = f"Not now: {place} drains after {gpu.lease_id}, and process {pid} is still on it."
            return NotNow(detail, remedy="It is free when that process has ended.")
        own = [one.pid for one in occupants(reading) if one.pid in adoption.pids and one.lease_id == gpu.lease_id]
        if own:
            return InUse(
                f"Process {own[0]} works under {gpu.lease_id} already, on {place}.", remedy="It needs no other."
            )
        holder = turn.ledger.leases[gpu.lease_id].lease.holder
        detail = f"Not now: {place} is leased to {holder.user} ({gpu.lease_id}), and process {pid} is a stranger on it."
        return NotNow(detail, remedy="End one of them: a GPU has one holder.")
    others = [one for one in occupants(reading) if one.pid not in adoption.pids] if reading is not None else []
    if others:
        detail = f"Not now: {place} is used by {describe_processes(others, turn.policy)}, too."
        return NotNow(detail, remedy="End one of them, or adopt the process that started them all, such as a launcher.")
    state = state_of(turn.ledger, gpu, turn.now, turn.policy)
    if state is not GpuState.FOREIGN or reading is None or reading.hidden_use:
        detail = f"Not now: {place} is {state}, and not only in use by process {pid}."
        return NotNow(detail, remedy="`GET /v1/gpus` says why.")
    return None
