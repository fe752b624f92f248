"""Plays recorded requests through the core under a virtual clock; the package's docstring says what is played."""

from __future__ import annotations

import heapq
import itertools
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import field, fields
from datetime import datetime, timedelta
from typing import Any

from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Device, EndReason, GpuReading, Holder, Lease, LeaseState
from gpulease_protocol.node_protocol import NodeReport
from gpulease_server.core.decide import decide
from gpulease_server.core.fair_share import RECOUNT_S
from gpulease_server.core.gpu_time import room_at
from gpulease_server.core.happenings import (
    Happening,
    LeaseRequested,
    LimitsChanged,
    NodeReported,
    ReleaseRequested,
    Ticked,
)
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.limit_records import LimitRecord
from gpulease_server.core.pending import PendingRequests
from gpulease_server.core.policy import Policy, undisturbed
from gpulease_server.core.queue import settle
from gpulease_server.core.records import Instant, LeaseRecord
from gpulease_server.core.turn import Turn
from gpulease_server.replay.recorded_requests import RecordedRequest, ReplayedNode

DRAIN_S = 0.05
"""From the end of a lease until its GPUs are seen clean, and what a reading that is asked for takes."""
TICK_S = RECOUNT_S
"""While requests wait and GPUs are free: time alone may change the order."""
LONGEST_TICK_S = 8 * 24 * 3600.0
"""Once nothing else will happen, ticks come ever later, up to this: what waits then waits for no time."""
FOREVER_S = 100 * 366 * 24 * 3600.0
DONE_WITHIN_S = 1.0
"""A lease that ends so soon before its time was done: the daemon ended the recorded one in the same way."""
PROGRESS_STEPS = 500
TIME_MARGIN_S = 1e-3
DEVICE_FIELDS = tuple(one.name for one in fields(Device))


@dataclass(slots=True)
class Outcome:
    """What became of one request."""

    request: RecordedRequest
    asked_at_s: float | None = None
    """When it was made in the replay; None for one whose predecessors never ended."""
    granted_at_s: float | None = None
    """When it was first granted."""
    ended_at_s: float | None = None
    """When it was done, or ended by a rule."""
    gpus: int = 0
    """How many it held."""
    lost_s: float = 0.0
    """How long it held them without effect."""
    refused: str | None = None
    """Code of the error with which it was refused."""


@dataclass(slots=True)
class _Running:
    outcome: Outcome
    lease: Lease
    granted_at_s: float


@dataclass(slots=True)
class _Array:
    """The requests of an array that are asked for or run, and those that wait for it."""

    begun: int = 0
    withheld: deque[Outcome] = field(default_factory=deque)


def replay(
    nodes: Sequence[ReplayedNode],
    requests: Iterable[RecordedRequest],
    policy: Policy,
    begin_at: datetime,
    drain_s: float = DRAIN_S,
    on_progress: Callable[[float], None] = lambda share: None,
    limits: Sequence[LimitRecord] = (),
) -> list[Outcome]:
    """What becomes of each request under this policy and these limits, in order of `asked_at_s`. `begin_at`: the time
    of second 0. `on_progress` is told the share that is done, now and then. Raises `InvalidRequest` for limits that
    contradict each other.

    Costs a millisecond or two for each request where many wait; memory for each request and its outcome.
    """
    return VirtualDaemon(nodes, policy, begin_at, drain_s, limits).run(requests, on_progress)


class VirtualDaemon:
    """A ledger, a clock that jumps from one happening to the next, nodes that report, and holders."""

    def __init__(
        self,
        nodes: Sequence[ReplayedNode],
        policy: Policy,
        begin_at: datetime,
        drain_s: float = DRAIN_S,
        limits: Sequence[LimitRecord] = (),
    ) -> None:
        self.policy = undisturbed(policy)
        self.ledger = Ledger()
        self._pending = PendingRequests()
        self._readings_asked_for: dict[str, float] = {}
        self._begin_at = begin_at
        self._drain_s = drain_s
        self._now_s = 0.0
        self._ticked_at_s = 0.0
        self._causes = itertools.count(1)
        self._order = itertools.count(1)
        self._due: list[tuple[float, int, str, Any]] = []
        """(when, order, what, of what): what will happen."""
        self._running: dict[str, _Running] = {}
        self._asked: dict[str, Outcome] = {}
        """By lease id: those that wait or run."""
        self._open: Counter[str] = Counter()
        """By name of a request, job or array: how many of its requests have not ended."""
        self._dependents: dict[str, list[Outcome]] = {}
        self._blockers: dict[str, int] = {}
        """By request: how many names it still waits for."""
        self._arrays: dict[str, _Array] = {}
        self._reading: set[str] = set()
        """Nodes that were asked for a reading, and will give it."""
        self._readings = {device.uuid: _clean_reading(device) for node in nodes for device in node.gpus}
        self._gpus = {node.name: tuple(device.uuid for device in node.gpus) for node in nodes}
        self._hosts = {node.name: node.host for node in nodes}
        self._addresses = {
            node.name: f"10.{at >> 16 & 255}.{at >> 8 & 255}.{at & 255}" for at, node in enumerate(nodes, start=1)
        }
        for _, answer in self._turn([*map(self._limit, limits), *(self._report(node.name) for node in nodes)]):
            if isinstance(answer, GpuleaseError):
                raise answer

    @property
    def now_s(self) -> float:
        """The virtual time."""
        return self._now_s

    def run(
        self, requests: Iterable[RecordedRequest], on_progress: Callable[[float], None] = lambda share: None
    ) -> list[Outcome]:
        """Play all of them until nothing more will happen."""
        outcomes = [Outcome(request) for request in sorted(requests, key=lambda one: one.asked_at_s)]
        self._note_dependencies(outcomes)
        arrivals = deque(one for one in outcomes if one.request.id not in self._blockers)
        idle_tick_s, steps = TICK_S, 0
        while True:
            steps += 1
            if steps % PROGRESS_STEPS == 0:
                on_progress(1 - len(arrivals) / len(outcomes))
            next_s = self._next_s(arrivals)
            if next_s is None:  # only time is left
                if not self.ledger.queue or idle_tick_s > LONGEST_TICK_S:
                    return outcomes
                next_s = self._room_s()
                if next_s is None:
                    next_s, idle_tick_s = self._now_s + idle_tick_s, 2 * idle_tick_s
            else:
                idle_tick_s = TICK_S
            self._now_s = max(next_s, self._now_s)
            self._step(arrivals)

    def _next_s(self, arrivals: deque[Outcome]) -> float | None:
        """When something happens next; None if nothing will but for the passing of time."""
        known = [one for one in (self._due[0][0] if self._due else None, *_first_s(arrivals)) if one is not None]
        if not known:
            return None
        if self.ledger.queue and self.ledger.fleet.free:
            known.append(self._now_s + TICK_S)
        return min(known)

    def _room_s(self) -> float | None:
        """When GPU time leaves the window of a limit that is used up, and so makes room first; None if there is none.
        Only if no lease is held."""
        index, now = self.ledger.limits, self._instant()
        hours = ((key, record.limits.gpu_hours) for key, record in index.records.items())
        rooms = [room_at(index, key, limit * 3600.0, now) for key, limit in hours if limit is not None]
        first = min((at for at in rooms if at is not None), default=None)
        return None if first is None else max((first - self._begin_at).total_seconds(), self._now_s + TIME_MARGIN_S)

    def _instant(self) -> Instant:
        return Instant(self._begin_at + timedelta(seconds=self._now_s), self._now_s)

    def _step(self, arrivals: deque[Outcome]) -> None:
        """One turn: everything that happens at this time. What ends comes before what is asked for."""
        happenings: list[Happening] = []
        drained: dict[str, list[str]] = {}
        read: list[str] = []
        asked: list[Outcome] = []
        while self._due and self._due[0][0] <= self._now_s:
            _, _, what, of_what = heapq.heappop(self._due)
            if what == "ask":
                asked.append(of_what)
            elif what == "read":
                read.append(of_what)
                self._reading.discard(of_what)
            elif what == "clean":
                for uuid in of_what:
                    drained.setdefault(self._readings[uuid].node, []).append(uuid)
            elif what == "end":
                lease: Lease = of_what.lease
                if self._running.get(lease.id) is of_what:
                    happenings.append(
                        ReleaseRequested(cause=self._cause(), lease_id=lease.id, fencing_token=lease.fencing_token)
                    )
        happenings += [self._report(node) for node in read]
        happenings += [self._report(node, uuids) for node, uuids in drained.items() if node not in read]
        happenings.append(Ticked(cause=self._cause(), since_last_s=self._now_s - self._ticked_at_s))
        self._ticked_at_s = self._now_s
        while arrivals and arrivals[0].request.asked_at_s <= self._now_s:
            asked.append(arrivals.popleft())
        happenings += [self._request(one) for one in asked if self._may_begin(one)]
        self._turn(happenings)

    def _turn(self, happenings: Sequence[Happening]) -> Sequence[tuple[str, Any]]:
        """Play one turn, and return its answers: (cause, answer)."""
        turn = Turn(self.ledger, self._instant(), self.policy, self._pending, self._readings_asked_for)
        for happening in happenings:
            decide(turn, happening)
        settle(turn)
        for node in sorted(self._readings_asked_for.keys() - self._reading):
            self._reading.add(node)
            self._plan(self._now_s + self._drain_s, "read", node)
        for change in turn.changes:
            if isinstance(change, LeaseRecord):
                self._follow(change.lease)
        for call, answer in turn.answers:
            if isinstance(answer, GpuleaseError) and call in self._asked:
                outcome = self._asked.pop(call)
                outcome.refused = answer.code
                self._finished(outcome)
        return turn.answers

    def _follow(self, lease: Lease) -> None:
        """Take in a change of a lease: its grant, its end, or that it waits again."""
        outcome, running = self._asked.get(lease.id), self._running.get(lease.id)
        if outcome is None:
            return
        if running is not None and (lease.state is not LeaseState.ACTIVE):
            self._end(running, lease)
        elif running is None and lease.state is LeaseState.ACTIVE:
            self._begin(outcome, lease)

    def _begin(self, outcome: Outcome, lease: Lease) -> None:
        running = self._running[lease.id] = _Running(outcome, lease, self._now_s)
        outcome.gpus = len(lease.gpus)
        if outcome.granted_at_s is None:
            outcome.granted_at_s = self._now_s
        self._plan(self._now_s + outcome.request.duration_s, "end", running)
        if self.ledger.queue and self.ledger.fleet.free:
            # By this grant a limit may keep out one that GPUs were held for in this turn.
            self._plan(self._now_s + self._drain_s, "tick", None)
        time_s = lease.demand.time_s
        if time_s is not None and time_s < outcome.request.duration_s:
            self._plan(self._now_s + time_s + TIME_MARGIN_S, "tick", None)

    def _end(self, running: _Running, lease: Lease) -> None:
        del self._running[lease.id]
        outcome, held_s = running.outcome, self._now_s - running.granted_at_s
        self._plan(self._now_s + self._drain_s, "clean", tuple(device.uuid for device in running.lease.gpus))
        is_done = lease.end_reason is EndReason.RELEASED or held_s >= outcome.request.duration_s - DONE_WITHIN_S
        if not is_done:
            outcome.lost_s += held_s
        if lease.state is LeaseState.ENDED:
            outcome.ended_at_s = self._now_s
            del self._asked[lease.id]
            self._finished(outcome)

    def _finished(self, outcome: Outcome) -> None:
        """Let those go on that waited for it."""
        request = outcome.request
        for name in (request.id, *request.part_of):
            self._open[name] -= 1
            if not self._open[name]:
                for dependent in self._dependents.pop(name, ()):
                    self._blockers[dependent.request.id] -= 1
                    if not self._blockers[dependent.request.id]:
                        del self._blockers[dependent.request.id]
                        self._plan(max(dependent.request.asked_at_s, self._now_s), "ask", dependent)
        if request.array_id is not None:
            array = self._arrays[request.array_id]
            array.begun -= 1
            if array.withheld:
                self._plan(self._now_s, "ask", array.withheld.popleft())

    def _note_dependencies(self, outcomes: list[Outcome]) -> None:
        for one in outcomes:
            self._open.update((one.request.id, *one.request.part_of))
        for one in outcomes:
            names = [name for name in dict.fromkeys(one.request.after) if self._open[name]]
            for name in names:
                self._dependents.setdefault(name, []).append(one)
            if names:
                self._blockers[one.request.id] = len(names)

    def _may_begin(self, outcome: Outcome) -> bool:
        """True if its array has room, which it then takes; otherwise it waits for its array."""
        request = outcome.request
        if request.array_id is None:
            return True
        array = self._arrays.setdefault(request.array_id, _Array())
        if array.begun < request.array_at_most:
            array.begun += 1
            return True
        array.withheld.append(outcome)
        return False

    def _request(self, outcome: Outcome) -> LeaseRequested:
        request = outcome.request
        outcome.asked_at_s = self._now_s
        self._asked[request.id] = outcome
        return LeaseRequested(
            cause=request.id,
            lease_id=request.id,
            demand=request.demand,
            holder=Holder(user=request.user, token_id=request.token_id),
            ttl_s=FOREVER_S,
            queue=True,
        )

    def _limit(self, record: LimitRecord) -> LimitsChanged:
        return LimitsChanged(cause=self._cause(), key=record.key, limits=record.limits, members=record.members)

    def _report(self, node: str, reread: Sequence[str] = ()) -> NodeReported:
        """A reading of the whole node, or of these GPUs alone after the end of their lease."""
        report = NodeReport(
            worker_id="replay",
            host=self._hosts[node],
            address=self._addresses[node],
            interface="eth0",
            takes_gangs=True,
            simulated=True,
            partial=bool(reread),
            reread=tuple(reread),
            gpus=tuple(self._readings[uuid] for uuid in reread or self._gpus[node]),
        )
        return NodeReported(
            cause=self._cause(), node=node, report=report, observed_at_s=self._now_s, begun_at_s=self._now_s
        )

    def _plan(self, at_s: float, what: str, of_what: Any) -> None:
        heapq.heappush(self._due, (at_s, next(self._order), what, of_what))

    def _cause(self) -> str:
        return f"replay-{next(self._causes)}"


def _first_s(arrivals: deque[Outcome]) -> Iterable[float]:
    return [arrivals[0].request.asked_at_s] if arrivals else []


def _clean_reading(device: Device) -> GpuReading:
    """The GPU with nothing on it."""
    known = {name: getattr(device, name) for name in DEVICE_FIELDS}
    return GpuReading(**known, memory_used_bytes=0, opened_by=(), unreadable_processes=0)
