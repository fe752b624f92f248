"""EASY backfill: a request that declares its time starts before older ones that it does not delay.

It is on trial, and off unless `Policy.easy_backfill` says otherwise: docs/design/0014 says what is not good yet.

It runs beside the bounded backfill of `core.backfill`, and needs times that are declared and enforced: that of the
request, and those of the leases whose GPUs the older ones wait for.

The rule
--------
A node cannot *serve* a waiting request before some time: before the declared times of so many leases have ended that
enough of its GPUs are free (`core.shadow_time`). A GPU without such an end counts as free now. A grant **does not
delay** an older request if its own GPUs are free again before that time, on each node of the grant that could serve the
older one. Until then none of these nodes can serve it, with the grant or without; a gang cannot start on them either.
So it starts as soon, on whichever nodes, unless a holder gives GPUs back before its declared time ends. Then it waits
for those who ran ahead, at the longest until that time, and no one else runs ahead of it there: leases that did count
as free now.

- A grant counts no bypass for those that it does not delay, and one for all others, as any grant.
- It may take GPUs that are held, if it delays none of the requests that were bypassed as often or as long as they may
  be. So the bound of `core.backfill` protects all others, as if no one declared a time.
- Leases of the user who is to run ahead count as free now, unless no one else waits: they could be given back at once.
- Who takes longer than `MAX_AHEAD_S` runs ahead of no one.
- Who shares a limit counts as delayed: the older one may need what is used of that on other nodes.
- A request under a limit of GPU-hours, or of a token with a budget, is granted as any other: what it uses is not given
  back.
- Nothing ends the processes of a plain lease with its time. While what is left of one that ran ahead keeps a GPU from
  being clean, what is held for those that it passed stays held for `MAX_LEFTOVER_S`, and its user runs ahead of no one.
- Priorities and usage decide who waits first, and go on doing so.

Bounds: with nothing left that is not held, a turn comes to `MAX_AHEAD` requests or kinds of these and no more; who is
behind runs ahead of no one. `MAX_HELD` held GPUs are looked at.

| what happens | what follows |
|---|---|
| a GPU that is needed is leased without a time, foreign, cordoned or unhealthy | bounded bypass, as without times |
| a lease outlasts its time, as its node is silent | that end is not known any more |
| a holder gives back before its time | the older one waits for those who ran ahead, and for no others |
| a limit keeps the older one out | it waits for no GPU, and is passed as always |
| a daemon restarts | the ends survive; what was granted in this way counts as bypasses, and its ends as any |
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import field

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import Demand, LeaseState
from gpulease_server.core.backfill import NONE_UNDELAYED, BlockedRequests, Reservations, Undelayed
from gpulease_server.core.limit_records import LimitKey, user_key
from gpulease_server.core.placement import Blocked, NeedsReading, Placed, find_candidates, of_anyone
from gpulease_server.core.records import GpuRecord, LeaseRecord
from gpulease_server.core.shadow_time import serves_s, settling_s
from gpulease_server.core.user_limits import LimitedDemand

MAX_AHEAD = 64
"""How many requests, or kinds of them, a turn comes to when all free GPUs are held; and for how many demands, oldest
first, it is looked at whether a grant delays them."""
MAX_AHEAD_S = 24 * 3600.0
"""For how long a lease that runs ahead may have its GPUs, with all that passes until they are free: so long it may be
in the way of those that it passed, if others give back before their time."""
MAX_HELD = 256
"""How many GPUs that are held for others are looked at."""
MAX_LOOKS = 8192
"""How many GPUs are looked at, and how often a node is looked up, to find when nodes serve those who were bypassed as
often as they may be. Beyond that, what is held opens for no one."""
MAX_TOLD = 8
"""How many requests that a grant passes are named."""
MAX_TIMES = 8
"""How many durations are looked at for one who asks why."""
Find = Callable[[Collection[str]], Placed | NeedsReading | Blocked]
"""GPUs for a request, where these are reserved."""


@dataclass(slots=True)
class EasyBackfill:
    """What requests that declare their time may have in a turn, beside what is left for everyone."""

    reservations: Reservations
    _serves_s: dict[tuple[Demand, str, tuple[str | None, ...], float], float] = field(default_factory=dict)
    """By kind, node, users whose leases count as free now, and where some ran ahead on the node, when the older one was
    made."""
    _users_on: dict[str, frozenset[str | None]] = field(default_factory=dict)
    """By node, the users who have leases there."""
    _usable: dict[str, frozenset[str]] = field(default_factory=dict)
    """By lease id, the GPUs that could serve an older request."""
    _kinds: dict[str, Demand] = field(default_factory=dict)
    """By lease id, what an older request asks for, without its time and priority."""
    _first_made: dict[Demand, LeaseRecord] = field(default_factory=dict)
    """By what they ask for, the request that was made first; where usage orders."""
    _due: list[LeaseRecord] = field(default_factory=list)
    """Of those that were bypassed as often as they may be, the one of each kind that was made first, and others that
    were looked at before it."""
    _due_seen: int = 0
    _asked_at_s: dict[Demand, float] = field(default_factory=dict)
    """By kind, when the first of these was made."""
    _until_s: dict[tuple[str | None, ...], dict[str, tuple[int, float]]] = field(default_factory=dict)
    """By user who has leases, and by held GPU: until when it may be had, and of how many of them that is known."""
    _looks: int = 0
    """See `MAX_LOOKS`."""
    _no_room: set[Demand] = field(default_factory=set)
    """Kinds for which no node has enough GPUs, with all that is held."""
    _held: list[str] = field(default_factory=list)
    _seen: int = 0
    """How many GPUs were reserved when these were found."""
    _late_users: frozenset[str | None] | None = None
    _limited_with: dict[str | tuple[LimitKey, ...] | None, frozenset[Demand]] = field(default_factory=dict)
    """By user, or by their group, what those ask for who share a limit with them."""

    def end_s(self, record: LeaseRecord) -> float | None:
        """By when the GPUs of a request are free again if it is granted now, on the monotonic clock; None where that
        is not known, or where it is granted as any other."""
        time_s, reservations = record.lease.demand.time_s, self.reservations
        if time_s is None or not reservations.policy.easy_backfill or not self._may_run_ahead(record):
            return None
        taken_s = time_s + settling_s(record, reservations.policy)
        return reservations.now.mono_s + taken_s if taken_s <= MAX_AHEAD_S else None

    def chance(self, record: LeaseRecord) -> tuple[bool | str | None, ...] | None:
        """What a request that may run ahead shares with those for which the same GPUs open: whether it is a lease or a
        job, which ends later, and who asks, if they have leases or limits. None for one that may not run ahead."""
        if self.end_s(record) is None:
            return None
        ledger, user = self.reservations.ledger, record.lease.holder.user
        has_some = ledger.limits.leases[user_key(user)] or self.reservations.users.applied(record.lease)
        return (record.lease.job_id is None, user) if has_some else (record.lease.job_id is None,)

    def place(self, record: LeaseRecord, find: Find) -> Placed | NeedsReading | None:
        """GPUs for a request that is blocked, also of those that are held for others whom it does not delay; None if
        there are none."""
        end_s, demand = self.end_s(record), record.lease.demand
        if end_s is None or not self._may_have_held(record):
            return None
        kind, held = self._kind(record), self._find_held()
        if kind in self._no_room or not self._may_fit(demand, held):
            self._no_room.add(kind)
            return None
        until_s = self._until_by_gpu(held, record.lease.holder.user)
        opened = {uuid for uuid in held if end_s <= until_s[uuid][1]}
        if not self._may_fit(demand, opened):
            return None
        found = find(self.reservations.by_uuid.keys() - opened)
        return None if isinstance(found, Blocked) else found

    def longest_s(self, record: LeaseRecord, find: Find) -> float | None:
        """How long a blocked request could declare to take, at most, so that it starts now; None where that would not
        help. For readers."""
        reservations, times, opened = self.reservations, dict[float, set[str]](), set[str]()
        if not reservations.policy.easy_backfill or not self._may_run_ahead(record) or not self._may_have_held(record):
            return None
        held = [uuid for uuid in self._find_held() if reservations.by_uuid[uuid] != record.lease.id]
        until_by_gpu = self._until_by_gpu(held, record.lease.holder.user)
        for uuid in held:
            times.setdefault(until_by_gpu[uuid][1], set()).add(uuid)
        for until_s in sorted(times, reverse=True)[:MAX_TIMES]:
            opened |= times[until_s]
            left_s = min(until_s - reservations.now.mono_s, MAX_AHEAD_S) - settling_s(record, reservations.policy)
            if left_s <= 0:
                return None
            fits = self._may_fit(record.lease.demand, opened)
            if fits and not isinstance(find(reservations.by_uuid.keys() - opened), Blocked):
                return None if until_s == math.inf else left_s
        return None

    def take(self, record: LeaseRecord, gpus: Iterable[GpuRecord]) -> None:
        """Keep GPUs, held or not, for the rest of the turn for a request that has them after a reading."""
        self.reservations.by_uuid.update((gpu.device.uuid, record.lease.id) for gpu in gpus)

    def undelayed(self, record: LeaseRecord, gpus: Iterable[GpuRecord], blocked: BlockedRequests) -> Undelayed:
        """The older requests that a grant of these GPUs passes, and does not delay. To be asked before it is made."""
        end_s, gpus, user = self.end_s(record), tuple(gpus), record.lease.holder.user
        if end_s is None:
            self._forget(gpus, user)
            return NONE_UNDELAYED
        found, told, limited = set[LimitedDemand](), list[str](), self._demands_limited_with(record)
        for demand in itertools.islice(blocked.could_use(gpus), MAX_AHEAD):
            oldest = blocked.oldest(demand)
            nodes = {gpu.device.node for gpu in gpus if gpu.device.uuid in self._usable_for(oldest)}
            if demand.demand in limited or any(end_s > self._node_serves_s(oldest, node, user) for node in nodes):
                continue
            found.add(demand)
            if len(told) < MAX_TOLD:
                told.append(oldest.lease.id)
        self._forget(gpus, user)
        return Undelayed(frozenset(found), tuple(told))

    def _forget(self, gpus: Iterable[GpuRecord], user: str | None) -> None:
        """Before a grant: nothing is kept that holds only while this user has no lease on its nodes."""
        for node in {gpu.device.node for gpu in gpus}:
            if user not in self._users_on.pop(node, (user,)):
                self._until_s.pop((user,), None)

    def _may_run_ahead(self, record: LeaseRecord) -> bool:
        """False where what a request uses may be missing for an older one later, or its user is late."""
        lease, users = record.lease, self.reservations.users
        if users.tokens is not None and users.tokens.of(lease) is not None:
            return False
        if any(one.limits.gpu_hours is not None for one in users.applied(lease)):
            return False
        if self._late_users is None:
            self._late_users = frozenset(self._find_late_users())
        return lease.holder.user not in self._late_users

    def _find_late_users(self) -> Iterable[str | None]:
        """The users of leases that ran ahead and have ended, and have left something behind."""
        ledger, reservations = self.reservations.ledger, self.reservations
        since_s = reservations.now.mono_s - reservations.policy.leftover_after_s
        for record in filter(None, map(ledger.leases.get, ledger.ran_ahead)):
            drains = ledger.held_by(record.lease) if record.lease.state is LeaseState.ENDED else ()
            if any(ledger.draining_since.get(gpu.device.uuid, math.inf) <= since_s for gpu in drains):
                yield record.lease.holder.user

    def _may_have_held(self, record: LeaseRecord) -> bool:
        """True where GPUs are held, and this request may have some without delaying one that shares a limit with it."""
        reservations = self.reservations
        if not reservations.held_for or not reservations.is_complete:
            return False
        limited = self._demands_limited_with(record)
        return not limited or limited.isdisjoint(due.demand for due in reservations.due)

    def _demands_limited_with(self, record: LeaseRecord) -> frozenset[Demand]:
        """What those ask for who wait and have a limit in common with this request."""
        applied, user = self.reservations.users.applied(record.lease), record.lease.holder.user
        if not applied:
            return frozenset()
        groups = tuple(one.key for one in applied if one.key.kind is LimitKind.GROUP)
        shared = groups or user  # a group is looked at once, and not for each of its members
        if shared not in self._limited_with:
            ledger, users = self.reservations.ledger, {user}
            for key in groups:
                users.update(ledger.limits.records[key].members)
            of_user = ledger.demand_classes.of_user
            demands = (members.key.demand for one in users for members in of_user.get(one, ()))
            self._limited_with[shared] = frozenset(demands)
        return self._limited_with[shared]

    def _find_held(self) -> set[str]:
        """The GPUs that are held for others. Within a turn more are held, and none is let go."""
        reserved, held_for = self.reservations.by_uuid, self.reservations.held_for
        if len(reserved) != self._seen:
            self._seen = len(reserved)
            held = (uuid for uuid, lease_id in reserved.items() if lease_id in held_for)
            self._held = list(itertools.islice(held, MAX_HELD))
        return {uuid for uuid in self._held if reserved[uuid] in held_for}  # others were taken after a reading

    def _until_by_gpu(self, held: Iterable[str], user: str | None) -> dict[str, tuple[int, float]]:
        """Until when a user may have held GPUs without delay for those that were bypassed as often as they may be."""
        ledger, due = self.reservations.ledger, self.reservations.due
        for older in itertools.islice(due.values(), self._due_seen, None):
            kind = self._kind(older)
            if older.requested_at_s < self._asked_at_s.get(kind, math.inf):
                self._asked_at_s[kind] = older.requested_at_s
                self._due.append(older)  # leases that ran ahead of another of this kind ran ahead of it too
        self._due_seen = len(due)
        known = self._until_s.setdefault((user,) if ledger.limits.leases[user_key(user)] else (), {})
        for uuid in held:
            looked_at, until_s = known.get(uuid, (0, math.inf))
            if looked_at < len(self._due):
                known[uuid] = len(self._due), self._free_until_s(uuid, user, looked_at, until_s)
        return known

    def _free_until_s(self, uuid: str, user: str | None, looked_at: int, until_s: float) -> float:
        """The same of one GPU. `until_s`: what is known with the first `looked_at` of them."""
        now_s, node = self.reservations.now.mono_s, self.reservations.ledger.gpus[uuid].device.node
        for older in itertools.islice(self._due, looked_at, None):
            self._looks += 1
            if until_s <= now_s or self._looks > MAX_LOOKS:
                return now_s
            if uuid in self._usable_for(older):
                until_s = min(until_s, self._node_serves_s(older, node, user))
        return until_s

    def _node_serves_s(self, older: LeaseRecord, node: str, user: str | None) -> float:
        """Before this time a node cannot serve an older request if this user runs ahead. Grants of the turn only make
        it later."""
        reservations, at_once, older = self.reservations, self._at_once(node, user), self._made_first(older)
        key = self._kind(older), node, at_once, older.requested_at_s if node in reservations.lent_on() else math.inf
        if key not in self._serves_s:
            self._looks += len(reservations.ledger.fleet.gpus_of_node.get(node, ()))
            self._serves_s[key] = serves_s(reservations, older, node, at_once)
        return self._serves_s[key]

    def _made_first(self, older: LeaseRecord) -> LeaseRecord:
        """Of those that ask for the same, the one that was made first: most leases have run ahead of it. Where usage
        orders, it may come behind this one."""
        classes, demand = self.reservations.ledger.demand_classes, older.lease.demand
        if not self.reservations.policy.fair_share or demand not in classes.of_demand:
            return older
        if demand not in self._first_made:
            first = min((members.places[0] for members in classes.of_demand[demand]), default=(0, older.lease.id))
            self._first_made[demand] = self.reservations.ledger.leases[first[1]]
        return self._first_made[demand]

    def _kind(self, record: LeaseRecord) -> Demand:
        """What a request asks for, without its time and priority: which nodes can serve it, and when."""
        lease = record.lease
        if lease.id not in self._kinds:
            self._kinds[lease.id] = of_anyone(lease.demand)
        return self._kinds[lease.id]

    def _at_once(self, node: str, user: str | None) -> tuple[str | None, ...]:
        """The user, if they have leases on a node, which they could give back at once, and others wait."""
        ledger = self.reservations.ledger
        if ledger.limits.queued[user_key(user)] == ledger.waiting_count:
            return ()
        if node not in self._users_on:
            found = (ledger.leases.get(gpu.lease_id or "") for gpu in ledger.fleet.gpus_of_node.get(node, {}).values())
            self._users_on[node] = frozenset(one.lease.holder.user for one in found if one is not None)
        return (user,) if user in self._users_on[node] else ()

    def _usable_for(self, older: LeaseRecord) -> frozenset[str]:
        if older.lease.id not in self._usable:
            self._usable[older.lease.id] = find_candidates(self.reservations.ledger, older.lease.demand).uuids
        return self._usable[older.lease.id]

    def _may_fit(self, demand: Demand, opened: set[str]) -> bool:
        """False where no node with these GPUs has enough of them, and of those that are not reserved."""
        ledger, reserved = self.reservations.ledger, self.reservations.by_uuid
        usable = find_candidates(ledger, demand).uuids
        for node in {ledger.gpus[uuid].device.node for uuid in opened if uuid in usable}:
            free = ledger.fleet.free.get(node, ())
            if sum(uuid in usable and (uuid in opened or uuid not in reserved) for uuid in free) >= demand.count:
                return True
        return False
