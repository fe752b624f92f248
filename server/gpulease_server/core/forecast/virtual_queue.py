"""The queue played forward: when its first requests start if leases end as they are taken to end."""

from __future__ import annotations

import bisect
import copy
import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timedelta
from operator import attrgetter

from gpulease_protocol.model import EndReason, GpuReading, JobState, LeaseState
from gpulease_server.core.calendar import ReservationRemoved
from gpulease_server.core.eligibility import min_gpus_of
from gpulease_server.core.fair_share import RECOUNT_S, recount_usage
from gpulease_server.core.fast_replace import replace
from gpulease_server.core.forecast.lease_history import LeaseHistory, RemainingTime
from gpulease_server.core.gpu import node_problem
from gpulease_server.core.gpu_time import room_at, spent_at
from gpulease_server.core.lease_end import end_lease
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import LimitKey
from gpulease_server.core.order import in_order
from gpulease_server.core.order_records import Overtakes, PlacesKept, UsageSteps
from gpulease_server.core.policy import Policy, undisturbed
from gpulease_server.core.queue import settle
from gpulease_server.core.records import (
    BypassCounts,
    Change,
    GpuRecord,
    Instant,
    JobRecord,
    LeaseRecord,
    NodeObservation,
    NotBefore,
)
from gpulease_server.core.shadow_time import settling_s
from gpulease_server.core.token_budgets import held_s, lasts_s
from gpulease_server.core.turn import Turn
from gpulease_server.core.user_limits import usage_by_user

MAX_REQUESTS = 100
"""Of how many requests the starts are looked for: the next ones."""
MAX_OTHERS = 100
"""Of those behind them so many are played, too: the oldest of each kind, since it may pass them."""
MAX_TURNS = 1000
"""After so many turns no more is played: what has not started by then has no known start."""
STEP_CHANGES = 32
"""Of the copy, so many records are made in a step."""
MAX_DRAIN_S = 60.0
"""A GPU that has drained for longer is not expected back."""
MAX_LATE_S = 120.0
"""A lease that has outlasted its time for longer is not expected to end. A job begins later than its lease, by the
preparation of its nodes, and has a grace at its end."""

MAX_OPENINGS = 200
"""After so many turns that time alone brings on, only ends of leases do. A user who holds GPUs on at a limit of
GPU-hours brings on ever more of them, and no time would be left for the ranges."""
TICK_S = 0.01
"""After its end a reservation has ended: later than by the rounding of clocks."""
BUDGET_STEP_S = 1.0
"""An end by a budget that moves by less is taken not to move."""


class VirtualQueue:
    """A copy of the ledger as of now, with the first requests of its queue, that goes forward by itself.

    Making it takes the records of each GPU, node, active lease and job, and looks into none of them: the event loop
    waits for that. All else is done in `starts`, while the ledger may change.
    """

    def __init__(self, ledger: Ledger, now: Instant, policy: Policy) -> None:
        self._begun, self._policy, self._undisturbed = now, policy, undisturbed(policy)
        first = {record.lease.id: record for record in itertools.islice(in_order(ledger), MAX_REQUESTS)}
        heads = itertools.islice(ledger.demand_classes.heads, MAX_REQUESTS + MAX_OTHERS)
        others = [place[3] for place, _, _ in heads if place[3] not in first]
        self._asked_about = frozenset(first)
        """Ids of the requests to find a start for."""
        self._waiting = set(first)
        """Of these, those that have not started."""
        self._requests = [*first.values(), *(ledger.leases[one] for one in others[:MAX_OTHERS])]
        holders = itertools.chain.from_iterable(ledger.fleet.holders_of_node.values())
        self._leases = list(map(ledger.leases.__getitem__, holders))
        """Active leases; until `_fill` one on several nodes is there for each of them."""
        self._gpus = list(ledger.gpus.values())
        self._nodes, self._observations = ledger.nodes.copy(), ledger.node_observations.copy()
        self._leaves_at_s: dict[str, float] = {}
        """By node that goes: when, on the monotonic clock."""
        self._silent: set[str] = set()
        """Nodes of which nothing is known."""
        self._draining_since = ledger.draining_since.copy()
        self._ends_s = ledger.ends_s.copy()
        self._live_jobs, self._jobs = ledger.live_jobs.copy(), list[JobRecord]()
        self._before = [*self._nodes.values(), *_rules(ledger)]
        self._after = list(_waiting_state(ledger, {record.lease.id for record in self._requests}, policy.max_bypass))
        self._steps_counted_at_s = ledger.steps_counted_at_s
        self._reserved = list(ledger.calendar.in_order())
        self._preemptions = list(ledger.preemptions.values())
        self._preempts_at_s = float("inf")
        self._late_s: dict[str, float] = {}
        """By active lease: how much later than it is taken to start it may start."""
        self._history, self._level = LeaseHistory(), 0
        self._by_history: dict[str, tuple[float, RemainingTime]] = {}
        """By active lease, where history says when it ends: that, on the monotonic clock."""
        self.samples: int | None = None
        """The smallest sample of the leases that have ended by history; None while none has."""

    @property
    def waiting(self) -> frozenset[str]:
        """Ids of the requests to find a start for that have not started."""
        return frozenset(self._waiting)

    def by_history(self, history: LeaseHistory, level: int) -> VirtualQueue:
        """The same from the beginning, in which leases end as earlier ones did, at this level, and when they declared
        if that is sooner."""
        play = copy.copy(self)
        play._history, play._level, play._by_history, play.samples = history, level, {}, None
        play._waiting, play._leaves_at_s, play._silent = set(self._asked_about), {}, set()
        play._late_s = {}
        return play

    def starts(self) -> Iterator[tuple[str | None, float]]:
        """Play it: the ids of the requests that start, and when, on the monotonic clock, in this order; between them
        steps in which none does, with None. It ends where who starts depends on some seconds, see `may_differ`."""
        begun_s, ledger = self._begun.mono_s, Ledger(usage_recounted=True, bypasses_recounted=True)
        for _ in self._fill(ledger):
            yield None, begun_s
        ends = [(at_s, "") for at_s in ledger.not_before.values()]
        ends += [(self._mono_s(entry.to_at) + TICK_S, "") for entry in self._reserved]
        heapq.heapify(ends)
        for number, record in enumerate(self._leases):
            self._push_end(ends, ledger, record, self._begun)
            if number % STEP_CHANGES == 0:
                yield None, begun_s
        at_s, ending = begun_s, list[str]()
        late_s = 2 * self._policy.retained_memory_s if any(gpu.draining for gpu in self._gpus) else 0.0
        openings = 0
        for _ in range(MAX_TURNS):
            late_s = max([late_s, *(self._settled_late_s(ledger, one) for one in filter(None, ending))])
            if late_s and may_differ(ledger, self._policy, self._instant(at_s), late_s):
                return
            for turn in self._turns(ledger, at_s, ending):
                for record in _granted(turn):
                    self._late_s[record.lease.id] = late_s
                    self._push_end(ends, ledger, record, turn.now)
                    if record.lease.id in self._waiting:
                        self._waiting.remove(record.lease.id)
                        yield record.lease.id, at_s
                yield None, at_s
            ends_s = ends[0][0] if ends else math.inf
            opens_s = _opens_s(ledger, self._policy, self._instant(at_s)) if openings < MAX_OPENINGS else math.inf
            next_s, openings = min(ends_s, opens_s), openings + (opens_s < ends_s)
            if not self._waiting or next_s == math.inf or next_s >= self._preempts_at_s:
                return
            at_s = max(at_s, next_s)
            ending = [one for one in _pop_until(ends, at_s) if not self._lasts_longer(ends, ledger, one, at_s)]
            self._count_samples(ending, at_s)

    def _count_samples(self, ending: Iterable[str], at_s: float) -> None:
        """Note the smallest sample of those that end now by history."""
        ends = (self._by_history[one] for one in ending if one in self._by_history)
        found = [time.samples for end_s, time in ends if end_s <= at_s and time.samples is not None]
        self.samples = min(found if self.samples is None else [*found, self.samples], default=None)

    def _settled_late_s(self, ledger: Ledger, lease_id: str) -> float:
        """How much later than its end the GPUs of a lease may be free."""
        return self._late_s.get(lease_id, 0.0) + settling_s(ledger.leases[lease_id], self._policy)

    def _fill(self, ledger: Ledger) -> Iterator[None]:
        """Make the copy, a step at a time."""
        self._leases = list({record.lease.id: record for record in self._leases}.values())
        job_ids = [record.lease.job_id for record in (*self._leases, *self._requests)]
        self._jobs = [self._live_jobs[one] for one in job_ids if one in self._live_jobs]
        self._preempts_at_s = self._first_preempted_end_s()
        moment = Ledger(nodes=self._nodes, node_observations=self._observations)
        problems = ((name, node_problem(moment, name, self._begun, self._policy)) for name in self._nodes)
        self._silent = {name for name, problem in problems if problem is not None}
        goes = ((name, one.available_until_s) for name, one in self._observations.items())
        self._leaves_at_s = {name: at_s for name, at_s in goes if at_s is not None}
        for number, change in enumerate(self._changes()):
            ledger.apply(change)
            if number % STEP_CHANGES == 0:
                yield
        ledger.steps_counted_at_s = self._steps_counted_at_s
        ledger.ends_s |= self._ends_s

    def _changes(self) -> Iterator[Change]:
        """What makes the copy, in an order in which all that a change refers to is there before it."""
        held = {gpu.device.uuid: gpu for gpu in self._gpus if gpu.lease_id is not None}
        yield from self._before
        yield from self._reserved
        for observation in self._observations.values():
            yield self._observed(observation, held)
        for gpu in self._gpus:
            yield self._clean_soon(gpu) if gpu.draining else gpu
        yield from self._leases
        yield from self._requests
        yield from self._jobs
        yield from self._after

    def _observed(self, observation: NodeObservation, held: Mapping[str, GpuRecord]) -> NodeObservation:
        """What its node will report once the GPUs that leases hold now are given back."""
        if observation.node in self._silent:
            return replace(observation, problem=observation.problem or "silent", readings={})
        given_back = {uuid: held[uuid] for uuid in observation.readings if uuid in held}
        clean = {uuid: _clean(observation, gpu) for uuid, gpu in given_back.items()}
        return replace(observation, readings=observation.readings | clean) if clean else observation

    def _clean_soon(self, gpu: GpuRecord) -> GpuRecord:
        since_s = self._draining_since.get(gpu.device.uuid, self._begun.mono_s)
        lasts = self._begun.mono_s - since_s > MAX_DRAIN_S or gpu.device.node in self._silent
        return gpu if lasts else replace(gpu, lease_id=None, draining=False)

    def _turns(self, ledger: Ledger, at_s: float, ending: Iterable[str]) -> Iterator[Turn]:
        """The turn in which these leases end, then the one in which their GPUs are clean; nodes that have gone by then
        are out of use."""
        now, counted_s = self._instant(at_s), ledger.steps_counted_at_s
        if counted_s is not None and at_s - counted_s >= RECOUNT_S:  # the daemon has done so every `RECOUNT_S`
            recount_usage(Turn(ledger, self._instant(at_s - (at_s - counted_s) % RECOUNT_S), self._undisturbed))
        turn, clean = Turn(ledger, now, self._undisturbed), list[GpuRecord]()
        for name in [name for name, leaves_at_s in self._leaves_at_s.items() if leaves_at_s <= at_s]:
            del self._leaves_at_s[name]
            turn.put(replace(ledger.node_observations[name], leaving=True))
        for entry in [one for one in ledger.calendar.in_order() if one.to_at <= now.at]:
            turn.put(ReservationRemoved(entry.id))
        for lease_id in filter(None, ending):
            record = ledger.leases[lease_id]
            clean += ledger.held_by(record.lease)
            end_lease(turn, record, EndReason.TIME_OVER)
            job = ledger.live_jobs.get(record.lease.job_id or "")
            if job is not None:
                turn.put(replace(job, job=replace(job.job, state=JobState.SUCCEEDED)))
        settle(turn)
        yield turn
        if clean:
            turn = Turn(ledger, now, self._undisturbed)
            for gpu in clean:
                turn.put(replace(gpu, lease_id=None, draining=False))
            settle(turn)
            yield turn
        while any(_granted(turn)):  # with it a limit may keep out a request that GPUs were held for in that turn
            turn = Turn(ledger, now, self._undisturbed)
            settle(turn)
            yield turn

    def _first_preempted_end_s(self) -> float:
        """When the first lease or job is to have ended for a request (`core.preemption`). From then on it is not known
        who has what: jobs that have ended early wait at their old places."""
        jobs_s = (self._mono_s(job.job.preempt_at) for job in self._jobs if job.job.preempt_at is not None)
        found = (one_s for one_s in (*jobs_s, *(one.end_s for one in self._preemptions)))
        return min((one_s for one_s in found if one_s > self._begun.mono_s), default=float("inf"))

    def _mono_s(self, at: datetime) -> float:
        return self._begun.mono_s + (at - self._begun.at).total_seconds()

    def _instant(self, at_s: float) -> Instant:
        return Instant(self._begun.at + timedelta(seconds=at_s - self._begun.mono_s), at_s)

    def _lasts_longer(self, ends: list[tuple[float, str]], ledger: Ledger, lease_id: str, at_s: float) -> bool:
        """True for a lease whose end has moved since it was noted: its token has spent less of its budget, since other
        leases of it have ended. The later end is noted."""
        record = ledger.leases.get(lease_id)
        if record is None or record.lease.holder.token_id not in ledger.budgets:
            return False
        end_s = _end_s(ledger, record, self._instant(at_s), self._by_history.get(lease_id))
        if end_s is not None and end_s <= at_s + BUDGET_STEP_S:
            return False
        if end_s is not None:
            heapq.heappush(ends, (end_s, lease_id))
        return True

    def _push_end(self, ends: list[tuple[float, str]], ledger: Ledger, record: LeaseRecord, now: Instant) -> None:
        """Note when an active lease ends. On a node of which nothing is known it does not: its GPUs do not come
        back."""
        lease = record.lease
        if lease.state is not LeaseState.ACTIVE or any(gpu.node in self._silent for gpu in lease.gpus):
            return
        time = self._history.remaining(lease, held_s(record, now), self._level)
        if time is not None:
            self._by_history[lease.id] = now.mono_s + time.remaining_s, time
        end_s = _end_s(ledger, record, now, self._by_history.get(lease.id))
        if end_s is not None:
            heapq.heappush(ends, (end_s, lease.id))


def may_differ(ledger: Ledger, policy: Policy, now: Instant, late_s: float) -> bool:
    """True where the calendar closes something else to a request that waits if it is this moment than if it is up to so
    much later: a window ends in between, or the request fits before one at the first moment alone.

    What is taken to be at this moment may be so much later: the start of each job, its grace and what it leaves behind
    take some time. One that fits before a window by less would be told the moment before that, and start after it."""
    if not ledger.calendar.entries:
        return False
    later = Instant(now.at + timedelta(seconds=late_s), now.mono_s + late_s)
    if any(now.at < entry.to_at <= later.at for entry in ledger.calendar.in_order()):
        return True
    users, then = (usage_by_user(ledger, policy.limits, one) for one in (now, later))
    return any(users.closed_to(one.lease) != then.closed_to(one.lease) for one in ledger.queued())


def _opens_s(ledger: Ledger, policy: Policy, now: Instant) -> float:
    """When time alone may next let a request have a GPU that is free, on the monotonic clock; infinity where it does
    not: GPU-hours leave a window, or those of a request for which GPUs are held are used, a token has a new day, or a
    GPU that is held for a request closes to it."""
    if not ledger.fleet.free:
        return math.inf
    users, entries = usage_by_user(ledger, policy.limits, now), ledger.calendar.in_order()
    hours, found = dict[LimitKey, float](), set[datetime | None]()
    for lease in (record.lease for record in ledger.queued()):
        hours |= {one.key: one.limits.gpu_hours for one in users.applied(lease) if one.limits.gpu_hours is not None}
        if users.tokens is not None:
            found.add(users.tokens.hours_used_until(lease, min_gpus_of(ledger, users, lease.demand)))
        if entries and (end := users.latest_end(lease)) is not None:
            closes = bisect.bisect_left(entries, end, key=attrgetter("from_at"))
            found.update(now.at + (entry.from_at - end) for entry in entries[closes : closes + 1])
    for key, limit in hours.items():
        when = users.index, key, limit * 3600, now
        found.add(room_at(*when) or spent_at(*when))
    return min(
        ((at - now.at).total_seconds() + now.mono_s + TICK_S for at in found if at is not None), default=math.inf
    )


def _granted(turn: Turn) -> Iterator[LeaseRecord]:
    for change in turn.changes:
        if isinstance(change, LeaseRecord) and change.lease.state is LeaseState.ACTIVE:
            yield change


def _pop_until(ends: list[tuple[float, str]], at_s: float) -> list[str]:
    """What ends until then, taken out."""
    found = list[str]()
    while ends and ends[0][0] <= at_s:
        found.append(heapq.heappop(ends)[1])
    return found


def _end_s(
    ledger: Ledger, record: LeaseRecord, now: Instant, by_history: tuple[float, RemainingTime] | None = None
) -> float | None:
    """When an active lease ends, on the monotonic clock: by its declared time, the budget of its token, or history.

    None if nothing ends it, or should have done so long ago. What workers say does not count: their clocks are their
    own."""
    lease, found = record.lease, list[float]()
    job = ledger.live_jobs.get(lease.job_id or "")
    if job is not None and job.stuck_on:
        return None
    if (of_budget_s := lasts_s(ledger, record, now)) is not None:
        found.append(now.mono_s + of_budget_s)
    if lease.id in ledger.ends_s:
        found.append(ledger.ends_s[lease.id])
    elif lease.job_id is not None and lease.demand.time_s is not None:
        found.append(now.mono_s - held_s(record, now) + lease.demand.time_s)
    if by_history is not None:
        found.append(by_history[0])
    end_s = min(found, default=None)
    return None if end_s is None or end_s + MAX_LATE_S < now.mono_s else max(end_s, now.mono_s)


def _clean(observation: NodeObservation, gpu: GpuRecord) -> GpuReading:
    """What will be read of a GPU once nothing of its lease is left: what is not of that stays."""
    reading, watch = observation.readings[gpu.device.uuid], observation.gpus.get(gpu.device.uuid)
    strangers = () if watch is None or gpu.draining else watch.strangers
    return replace(
        reading,
        processes=tuple([one for one in reading.processes if one.pid in strangers]),
        opened_by=(),
        hidden_use=False,
        memory_used_bytes=gpu.baseline_bytes or 0,
    )


def _rules(ledger: Ledger) -> Iterator[Change]:
    """Limits, budgets and usage: what the order and the limits rest on."""
    yield from ledger.limits.records.values()
    yield from ledger.limits.gpu_time.values()
    yield from ledger.budgets.values()
    yield from ledger.usage.values()


def _waiting_state(ledger: Ledger, requests: set[str], most_missed: int) -> Iterator[Change]:
    """What is known of the requests beside themselves. `most_missed`: more missed grants make no difference."""
    classes = ledger.demand_classes
    yield from ledger.group_usage.values()
    if classes.steps or classes.lowest_step:
        yield UsageSteps(tuple(classes.steps.items()), classes.lowest_step)
    for within, counts in ((None, ledger.bypasses), *ledger.limit_bypasses.items()):
        for lease_id in counts.keys() & requests:
            times, since_s = counts[lease_id]
            yield BypassCounts(((lease_id, times),), since_s, within)
    for lease_id in ledger.not_before.keys() & requests:
        yield NotBefore(lease_id, ledger.not_before[lease_id])
    yield from ledger.ran_ahead.values()
    yield from (one for one in ledger.preemptions.values() if one.lease_id in requests)
    yield PlacesKept(tuple((one, step) for one, step in ledger.places_kept.items() if one in requests))
    first = {lease_id: missed for lease_id, missed in ledger.go_first.items() if lease_id in requests}
    yield Overtakes(ledger.overtakes, tuple(first))
    for times in range(min(most_missed, max(first.values(), default=0))):
        yield Overtakes(ledger.overtakes, missed=tuple(one for one, missed in first.items() if missed > times))
