"""Bounded bypass: how often a younger request may go first, and what is held for the elder after that.

A request that fits is granted although an elder one waits that does not. Each such grant of a GPU that the elder could
use has *passed* it. That may happen `max_bypass` times, or for `max_bypass_s` seconds from the first; then its patience
is used up and free GPUs are *held* for it: no younger request gets them. With 0 of either nobody is ever passed.

What is held
------------
All free GPUs of a node that the elder could use (its node, model, memory, list, as CUDA shows them to it), and only of
a node where enough such GPUs are free or become so when leases end. Nobody knows when a GPU comes back that is foreign,
cordoned, unhealthy, prohibited, on a silent node, or drains for longer than what the driver retains would take
(`2 * retained_memory_s`): where the elder would need one of those, nothing is held on its node, and the other GPUs
there go to others. So nothing is held for a request that can never be served, or whose node is away. What it was passed
is kept, and from the moment at which that GPU is back the others are held.

On several nodes: first on the one where the fewest GPUs are missing; each time that its patience is used up again, on
twice as many. So eight GPUs for one request leave at most seven idle at first, and yet no node's long leases can keep
it waiting for ever: a request that `n` nodes could serve is passed at most `max_bypass * (1 + ceil(log2(n)))` times,
that is `max_bypass` times where only one could. From then on every GPU that it could use and that is given back waits
for it: it is granted after as many releases as it lacks GPUs on some node.

Several elders hold in order of arrival; a GPU that is held for one is not held for the next. A request that takes no
part in the queue (its array is at its limit, its retry pauses) is neither passed nor held for. A holder that died while
it waited is held for until its request ends, which is at once where it is watched, and at `ttl_s` otherwise.

What is kept
------------
`Ledger.passed`, in memory. After a restart the number is counted again from the leases: those younger than the request
that were granted one of its GPUs. Of ended leases only the last `ENDED_KEPT` are known, so that a daemon that restarts
may let it be passed somewhat more often; the seconds begin anew.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from gpulease.model import Demand, GpuState, Selection

from .array import takes_part, under_way
from .gpu import is_cordoned, state_of
from .ledger import GpuRecord, Instant, LeaseRecord, Ledger, Passed
from .placement import Blocked, candidates, lacks_memory, least, place
from .quota import Had, had
from .turn import Policy, Turn

RECALLED = 100
"""Different demands whose passing is counted again after a restart, at most; the eldest."""
EVERY_NODE = 2**30
LOOKED_AT = 100
"""Different demands for which a list of GPUs tells what is held, at most; the eldest."""


@dataclass(slots=True)
class Claims:
    """The free GPUs that younger requests do not get, and for whom. Filled eldest first, anew in every turn."""

    ledger: Ledger
    now: Instant
    policy: Policy
    overdue: Collection[str] = ()
    """Nodes that owe a fresh reading for too long; nobody is granted anything there."""
    by_uuid: dict[str, str] = field(default_factory=dict)
    """The lease that each GPU is kept for."""
    _open: set[str] | None = None
    _dry: set[Demand] = field(default_factory=set)
    _held_on: dict[str, int] = field(default_factory=dict)

    @property
    def open(self) -> set[str]:
        """Free GPUs that are kept for nobody."""
        if self._open is None:
            free = (uuid for uuid, gpu in self.ledger.gpus.items() if self._is_free(gpu))
            self._open = {uuid for uuid in free if uuid not in self.by_uuid}
        return self._open

    def keep(self, record: LeaseRecord, gpus: Iterable[GpuRecord]) -> None:
        """Keep GPUs for a request."""
        for gpu in gpus:
            self.by_uuid.setdefault(gpu.device.uuid, record.lease.id)
            if self._open is not None:
                self._open.discard(gpu.device.uuid)

    def granted(self, gpus: Iterable[GpuRecord]) -> None:
        """Somebody has got these GPUs."""
        if self._open is not None:
            self._open -= {gpu.device.uuid for gpu in gpus}

    def hold_for(self, record: LeaseRecord) -> None:
        """Hold for a waiting request what is to be held, if its patience is used up."""
        lease = record.lease
        if lease.demand in self._dry:
            return
        times, since_s = self.ledger.passed.get(lease.id, (0, self.now.mono_s))
        most = nodes_to_hold(times, self.now.mono_s - since_s, self.policy)
        if most <= self._held_on.get(lease.id, 0):
            return
        held = self._worth_holding(record, most)
        self._held_on[lease.id] = most
        self.keep(record, held)
        if not held:
            # Its free GPUs are kept for elders, or of no use. That is so for a younger one that asks for the same.
            self._dry.add(lease.demand)

    def held_for(self, record: LeaseRecord) -> tuple[str, ...]:
        """The GPUs that are kept for a request."""
        return tuple(uuid for uuid, lease_id in self.by_uuid.items() if lease_id == record.lease.id)

    def _worth_holding(self, record: LeaseRecord, most_nodes: int) -> list[GpuRecord]:
        demand, found = record.lease.demand, []
        for node, gpus in candidates(self.ledger, demand).items():
            if node in self.overdue:
                continue
            needed = len(gpus) if demand.selection is Selection.ALL else demand.count
            usable = [gpu for gpu in gpus if self._is_free(gpu) and not lacks_memory(self.ledger, demand, gpu)]
            coming = sum(self._will_be_free(demand, gpu) for gpu in gpus)
            own = [gpu for gpu in usable if self.by_uuid.get(gpu.device.uuid, record.lease.id) == record.lease.id]
            if own and len(usable) + coming >= needed:
                found.append((needed - len(own), node, own))
        return [gpu for _, _, own in sorted(found, key=lambda one: one[:2])[:most_nodes] for gpu in own]

    def _is_free(self, gpu: GpuRecord) -> bool:
        return state_of(self.ledger, gpu, self.now, self.policy) is GpuState.FREE

    def _will_be_free(self, demand: Demand, gpu: GpuRecord) -> bool:
        """True when nothing but a lease, or what is left of one for a short time, keeps the GPU from the demand."""
        state = state_of(self.ledger, gpu, self.now, self.policy)
        if state not in (GpuState.LEASED, GpuState.DRAINING) or is_cordoned(self.ledger, gpu):
            return False
        since_s = self.ledger.draining_since.get(gpu.device.uuid, self.now.mono_s)
        if state is GpuState.DRAINING and self.now.mono_s - since_s > self.policy.retained_memory_s * 2:
            return False
        left = (gpu.device.memory_total_bytes or 0) - (gpu.baseline_bytes or 0)
        return left >= (demand.min_free_memory_bytes or 0)


def nodes_to_hold(times: int, for_s: float, policy: Policy) -> int:
    """On how many nodes GPUs are held for a request that was passed so often, the first time so long ago; 0 while it
    may be passed."""
    if policy.max_bypass == 0 or policy.max_bypass_s == 0:
        return EVERY_NODE
    used_up = max(times // policy.max_bypass, int(for_s // policy.max_bypass_s))
    return 0 if used_up == 0 else min(EVERY_NODE, 1 << min(used_up - 1, 30))


@dataclass(slots=True)
class Elders:
    """The requests that were found to wait in this turn, by what they ask for."""

    turn: Turn
    claims: Claims
    _usable: dict[Demand, frozenset[str]] = field(default_factory=dict)
    _waiting: dict[Demand, list[LeaseRecord]] = field(default_factory=dict)

    def knows(self, demand: Demand) -> bool:
        """True when an elder waits for the same, so that this cannot be granted either."""
        return demand in self._waiting

    def add(self, record: LeaseRecord, usable: Iterable[GpuRecord] = ()) -> None:
        """A request waits; `usable` are the GPUs that could serve it one day, where no elder asked for the same."""
        demand = record.lease.demand
        if demand not in self._waiting:
            self._usable[demand] = frozenset(gpu.device.uuid for gpu in usable)
        self._waiting.setdefault(demand, []).append(record)
        self.claims.hold_for(record)

    def passed_by(self, gpus: Iterable[GpuRecord]) -> None:
        """A younger request was granted these GPUs."""
        granted = {gpu.device.uuid for gpu in gpus}
        passed = [
            record
            for demand, waiting in self._waiting.items()
            if not granted.isdisjoint(self._usable[demand])
            for record in waiting
        ]
        if passed:
            self.turn.put(Passed(tuple((record.lease.id, 1) for record in passed), self.turn.now.mono_s))
            for record in sorted(passed, key=lambda one: one.number):
                self.claims.hold_for(record)


def kept_out(ledger: Ledger, users: Had, record: LeaseRecord) -> bool:
    """True while a limit of its user keeps a request out of the queue: it claims nothing, and is not passed."""
    if not users.limited:
        return False
    demand = record.lease.demand
    if demand not in users.least:
        users.least[demand] = least(ledger, demand)
    return users.limit_met(record.lease, users.least[demand]) is not None


def claims_before(ledger: Ledger, record: LeaseRecord, now: Instant, policy: Policy) -> Claims:
    """What is kept for the elders of a waiting request at this moment, and for itself."""
    return _claims(ledger, record, now, policy)


def claims_now(ledger: Ledger, now: Instant, policy: Policy) -> Claims:
    """What is kept at this moment, for whoever waits. One walk over the queue, while any free GPU is kept for nobody,
    and over the GPUs one for each of the `LOOKED_AT` eldest different demands and for each that something is kept for.
    """
    return _claims(ledger, None, now, policy)


def _claims(ledger: Ledger, until: LeaseRecord | None, now: Instant, policy: Policy) -> Claims:
    """What `settle` keeps for the requests up to one; for all where none is given."""
    claims, running, blocked = Claims(ledger, now, policy), under_way(ledger), set[Demand]()
    if not ledger.queue:
        return claims
    users = had(ledger, policy.limits)
    for elder in ledger.queued():
        if (until is not None and elder.number > until.number) or not claims.open:
            break
        if not takes_part(ledger, elder, now, running):
            continue
        demand = elder.lease.demand
        if kept_out(ledger, users, elder):
            continue
        if demand not in blocked:
            if until is None and len(blocked) == LOOKED_AT:
                continue
            placed = place(ledger, demand, claims.by_uuid.keys(), now, policy)
            if not isinstance(placed, Blocked):
                if elder is not until:
                    claims.keep(elder, placed.gpus)
                continue
            blocked.add(demand)
        claims.hold_for(elder)
    return claims


def recall(turn: Turn) -> None:
    """Count again how often each waiting request was passed, once for a ledger that was read from the database."""
    ledger = turn.ledger
    if ledger.recalled:
        return
    ledger.recalled = True
    # How often one of an array with a limit was passed while it might have begun, nobody can tell.
    waiting = [record for record in ledger.queued() if not _is_limited(ledger, record)]
    if not waiting:
        return
    granted = [
        (record.number, {device.uuid for device in record.lease.gpus})
        for record in ledger.leases.values()
        if record.lease.token is not None and record.number > waiting[0].number
    ]
    younger: dict[Demand, list[int]] = {}
    found: list[tuple[str, int]] = []
    for record in waiting:
        demand = record.lease.demand
        if demand not in younger:
            if len(younger) == RECALLED:
                continue
            usable = {gpu.device.uuid for gpus in candidates(ledger, demand).values() for gpu in gpus}
            younger[demand] = sorted(number for number, uuids in granted if not uuids.isdisjoint(usable))
        times = len(younger[demand]) - bisect_right(younger[demand], record.number)
        if times:
            found.append((record.lease.id, times))
    if found:
        turn.put(Passed(tuple(found), turn.now.mono_s))


def _is_limited(ledger: Ledger, record: LeaseRecord) -> bool:
    job = ledger.jobs.get(record.lease.job_id or "")
    return job is not None and job.job.array_at_most is not None
