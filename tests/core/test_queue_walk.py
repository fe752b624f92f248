"""A walk through the queue looks at one request of each kind and ranks the nodes once, and decides as one that looks at
everything for every request."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.limits import LimitKind
from gpulease_protocol.model import Demand, Holder, JobSpec, LeaseState, Priority, Selection
from gpulease_protocol.node_protocol import JobReport, RunState
from gpulease_server.core import queue, reservation_view
from gpulease_server.core.backfill import Undelayed
from gpulease_server.core.demand_classes import OrderedPlace
from gpulease_server.core.eligibility import is_eligible
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.happenings import Happening, JobSubmitted, LeaseRequested, SubmittedJob
from gpulease_server.core.limit_records import LimitKey, UserLimits
from gpulease_server.core.node_ranking import NodeRankings
from gpulease_server.core.order_records import Overtakes, PlacesKept
from gpulease_server.core.placement import RankedNode, Search
from gpulease_server.core.policy import Policy
from gpulease_server.core.queue_walk import QueueWalk
from gpulease_server.core.records import BypassCounts, Change, GpuRecord, LeaseRecord
from gpulease_server.core.turn import Turn
from tests.core.build import GIB, World, gpu, gpu_views


class EveryRequest(QueueWalk):
    """The same walk, with a look at each request."""

    def __iter__(self) -> Iterator[LeaseRecord]:
        apart = None if self.reservations.policy.fair_share else self.reservations.users.limited_users
        self.ledger.classes_by_user(apart)
        self._first = frozenset(self.ledger.alone)
        seen: set[str] = set()
        while True:
            only_new = self._is_over()
            ids = list(self.new) if only_new else [lease_id for _, lease_id in self.ledger.queue]
            records = [self.ledger.leases[one] for one in ids if one in self.ledger.leases and one not in seen]
            waiting = [record for record in records if self.ledger.place_of(record) is not None]
            record = min(waiting, key=self.ledger.ordered_place, default=None)
            if record is None:
                return
            if self.last is not None and self.ledger.ordered_place(record) > self.ledger.ordered_place(self.last):
                return
            seen.add(record.lease.id)
            if is_eligible(self.ledger, record, self.reservations.now):
                yield record

    def count_bypass(
        self,
        turn: Turn,
        granted: LeaseRecord,
        gpus: tuple[GpuRecord, ...],
        place: OrderedPlace,
        undelayed: Undelayed,
    ) -> None:
        is_before = self.is_before(granted.lease.holder.user, place)
        self.blocked.count_bypass(turn, gpus, is_before, undelayed)
        self.order.count_bypass(turn, granted, gpus, is_before)


class Story:
    """Random turns on a few nodes. The same seed makes the same story."""

    def __init__(self, seed: int, group_share: float | None = None) -> None:
        self.drawn = draw = random.Random(seed)
        interactive_gpus = draw.choice([0, 2, 3])
        limits = UserLimits(
            leases=draw.choice([0, 0, 2, 4]), gpus=draw.choice([0, 0, 3, 6]), interactive_gpus=interactive_gpus
        )
        self.priorities = draw.choice([[Priority.NORMAL], list(Priority)])
        policy = Policy(
            max_bypass=draw.choice([0, 1, 2, 10]),
            max_bypass_s=draw.choice([5.0, 300.0]),
            limits=limits,
            retry_pause_s=(1.0, 8.0),
            max_overtakes=draw.choice([1, 3, 10]),
            fair_share=draw.choice([False, True]),
            usage_half_life_s=draw.choice([100.0, 1e6]),
        )
        if group_share is not None:
            policy = replace(policy, fair_share=True, group_shares=(("lab", group_share),))
        self.world, self.names = World(policy=policy), "abc"[: draw.randint(1, 3)]
        for name in self.names:
            self.world.node(name, gpus=[self.gpu(index, name) for index in range(draw.randint(1, 5))])
        self.demands = [self.demand() for _ in range(draw.randint(1, 6))]
        self.users = ["ann", "bob", "cleo"][: draw.randint(1, 3)]
        self.number = 0
        self.limits, self.times = random.Random(seed + 1000), random.Random(seed + 2000)
        self.timed = self.times.random() < 0.5
        self.set_limits(0.3)
        if group_share is not None:
            self.world.limit("lab", "group", members=tuple(self.users[:2]), **draw.choice([{}, {"max_gpus": 3}]))

    def set_limits(self, share: float) -> None:
        """In some stories an administrator sets limits of a user, a group and a token, and removes them."""
        draw, index = self.limits, self.world.ledger.limits
        for name, kind in (("ann", "user"), ("lab", "group"), ("of bob", "token")):
            if draw.random() >= share:
                continue
            members = tuple(self.users[: draw.choice([2, 3, 3])]) if kind == "group" else ()
            numbers = {"max_gpus": draw.randint(2, 6), "max_leases": draw.randint(1, 4)}
            chosen = dict(draw.sample(sorted(numbers.items()), draw.randint(1, 2)))
            if LimitKey(LimitKind(kind), name) in index.records and draw.random() < 0.4:
                self.world.limit(name, kind)
            else:
                self.world.limit(name, kind, members=members, **chosen)

    def gpu(self, index: int, name: str) -> Any:
        return gpu(index, name, name=self.drawn.choice(["H100", "A100"]), memory_total_bytes=80 * GIB)

    def demand(self) -> Demand:
        draw = self.drawn
        name = draw.choice(self.names)
        size = len(self.world.nodes[name])
        indices = tuple(draw.sample(range(size), draw.randint(1, size)))
        return draw.choice(
            [
                Demand(count=draw.randint(1, size)),
                Demand(count=draw.randint(1, size)),
                Demand(count=draw.randint(1, size), node=name),
                Demand(selection=Selection.ALL, node=draw.choice([None, name])),
                Demand(selection=Selection.AUTO),
                Demand(selection=Selection.LISTED, count=len(indices), indices=indices, node=name),
                Demand(count=draw.randint(1, 2), gpu_model="H100", min_free_memory_bytes=60 * GIB),
                Demand(count=draw.randint(1, 2), nodes=draw.randint(2, 3)),
                Demand(count=1, nodes=2, gpu_model="A100"),
            ]
        )

    def chosen_demand(self) -> Demand:
        demand = replace(self.drawn.choice(self.demands), priority=self.drawn.choice(self.priorities))
        return replace(demand, time_s=self.times.choice([None, 1.0, 40.0, 2000.0, 2000.0])) if self.timed else demand

    def holder(self) -> tuple[Holder, Budget | None]:
        user = self.drawn.choice(self.users)
        if self.drawn.random() < 0.7:
            return Holder(user=user), None
        return Holder(user=user, token_id=f"of {user}"), Budget(max_gpus=len(user))

    def request(self) -> LeaseRequested:
        self.number += 1
        holder, budget = self.holder()
        return LeaseRequested(
            cause=f"ask-{self.number}",
            lease_id=f"lease-{self.number}",
            demand=self.chosen_demand(),
            holder=holder,
            budget=budget,
            ttl_s=self.drawn.choice([3.0, 1000.0]),
            queue=self.drawn.random() < 0.9,
        )

    def submission(self) -> JobSubmitted:
        self.number += 1
        (holder, budget), count = self.holder(), self.drawn.choice([1, 3, 6])
        demand, name = self.chosen_demand(), f"array-{self.number}"
        retries, is_array = self.drawn.choice([0, 2]), count > 1
        jobs = tuple(
            SubmittedJob(
                job_id=f"{name}-job-{index}",
                lease_id=f"{name}-lease-{index}",
                index=index,
                spec=JobSpec(command=("train.py",), gpus=demand.count, retries=retries, timeout_s=demand.time_s),
            )
            for index in range(count)
        )
        return JobSubmitted(
            cause=f"submit-{self.number}",
            jobs=jobs,
            name="",
            demand=demand,
            holder=holder,
            budget=budget,
            array_id=name if is_array else None,
            array_at_most=self.drawn.choice([None, 1, 2]) if is_array else None,
        )

    def step(self) -> None:
        draw, world = self.drawn, self.world
        name = draw.choice(self.names)
        leases = [one.lease for one in world.ledger.leases.values() if one.lease.state is not LeaseState.ENDED]
        match draw.choice(["ask", "ask", "submit", "release", "release", "end", "process", "cordon", "wait", "report"]):
            case "ask":
                asked: list[Happening] = [self.request() for _ in range(draw.choice([1, 2, 8]))]
                world.turn(*asked)
            case "submit":
                world.turn(self.submission(), self.request())
            case "release" if leases:
                world.release(draw.choice(leases))
            case "end" if world.ledger.live_jobs:
                self.end(draw.choice(list(world.ledger.live_jobs)))
            case "process":
                readings = world.nodes[name]
                index = draw.randrange(len(readings))
                pids = draw.choice([(), (), (7,)])
                readings[index] = replace(readings[index], processes=gpu(0, pids=pids).processes)
            case "cordon":
                world.cordon(draw.randrange(len(world.nodes[name])), name, cordoned=draw.random() < 0.3)
            case "wait":
                world.pass_time(draw.choice([0.3, 1.0, 6.0]), silent=(name,) if draw.random() < 0.2 else ())
            case _:
                world.report(name, age_s=draw.choice([0.0, 0.2, 0.7]))
        if draw.random() < 0.8:
            for one in self.names:
                world.report(one)

    def end(self, job_id: str) -> None:
        job = self.world.ledger.jobs[job_id].job
        if not job.gpus:
            self.world.cancel(job_id)
            return
        node, code = job.gpus[0].node, self.drawn.choice([0, 1])
        report = JobReport(job_id=job_id, attempt=job.attempts, state=RunState.EXITED, exit_code=code)
        self.world.jobs[node] = [report]
        self.world.report(node)
        self.world.jobs[node] = []

    def shown(self) -> list[object]:
        """What readers see: why each waits, and what is held."""
        world = self.world
        records = list(world.ledger.queued())[:8]
        reasons = [explain(world.ledger, record, world.now, world.policy) for record in records]
        return [*reasons, gpu_views(world), world.ledger.queue, world.wanted.copy()]


def tell(
    seed: int, steps: int, after_step: Callable[[World], None], group_share: float | None = None
) -> tuple[list[object], list[Change], str]:
    """A story's readings after each step, its changes and its answers."""
    story, shown = Story(seed, group_share), []
    for _ in range(steps):
        if story.world.ledger.limits.records:
            story.set_limits(0.05)
        story.step()
        shown.append(story.shown())
        after_step(story.world)
    return shown, story.world.changes, repr(story.world.answers)


@pytest.mark.parametrize("seed", [*range(24), 47, 68, 73])
def test_a_walk_decides_as_one_that_looks_at_every_request(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decides_as_one_that_looks_at_every_request(seed, None, monkeypatch)


@pytest.mark.parametrize("seed", [*range(5), 47, 66])
def test_so_does_one_in_which_each_grant_moves_a_group(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decides_as_one_that_looks_at_every_request(seed, 1.0 + seed % 2, monkeypatch)


def decides_as_one_that_looks_at_every_request(
    seed: int, group_share: float | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    shown, changes, answers = tell(seed, 40, World.check, group_share)
    for module in (queue, reservation_view):
        monkeypatch.setattr(module, "QueueWalk", EveryRequest)
    monkeypatch.setattr(NodeRankings, "of", lambda *_: None)
    all_shown, all_changes, all_answers = tell(seed, 40, lambda _: None, group_share)
    assert answers == all_answers
    assert changes == all_changes
    assert shown == all_shown


def test_the_stories_have_what_a_walk_could_get_wrong() -> None:
    changes = [change for seed in (*range(24), 47, 73) for change in tell(seed, 40, lambda _: None)[1]]
    bypasses = [change for change in changes if isinstance(change, BypassCounts)]
    assert any(change.go_first for change in changes if isinstance(change, Overtakes))
    assert any(change.kept for change in changes if isinstance(change, PlacesKept))
    assert {change.within for change in bypasses} == {LimitKind.USER, LimitKind.GROUP, None}
    assert max(len(change.times) for change in bypasses) > 2
    assert {change.lease.state for change in changes if isinstance(change, LeaseRecord)} == set(LeaseState)


class Looks:
    """Counts the requests that walks come to."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.count = 0
        look = QueueWalk._must_look_at

        def counted(*what: Any) -> bool:
            self.count += 1
            return look(*what)

        monkeypatch.setattr(QueueWalk, "_must_look_at", counted)


@pytest.mark.parametrize("limits", [UserLimits(), UserLimits(gpus=3), UserLimits(leases=1)])
def test_a_turn_with_a_free_gpu_costs_no_look_at_each_that_waits_for_two(
    limits: UserLimits, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(policy=Policy(max_bypass=3, limits=limits)).node(gpus=4)
    held = world.lease(3)
    for number in range(400):
        world.ask(2 + number % 2, user=f"user {number % 3}")
    looks = Looks(monkeypatch)
    world.renew(held)
    assert 0 < looks.count <= 2 * 2 * 3, "two kinds of requests, three users"


def test_a_turn_costs_no_look_at_each_that_was_bypassed_or_for_which_nothing_more_can_be_held(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(policy=Policy(max_bypass=2)).node(gpus=4)
    held = world.lease(3)
    waiting = [world.lease(2) for _ in range(200)]
    for times in (1, 2):
        newer = world.lease(1)
        assert newer.state is LeaseState.ACTIVE
        assert world.ledger.bypasses[waiting[-1].id][0] == times
        world.release(newer)
        world.report()
        looks = Looks(monkeypatch)
        world.renew(held)
        assert 0 < looks.count <= 6
    assert world.lease(1).state is LeaseState.QUEUED, "the GPU is held for the first of them"
    assert explain(world.ledger, world.ledger.leases[waiting[0].id], world.now, world.policy).held


def test_a_turn_costs_no_look_at_each_for_which_nothing_more_of_its_users_limit_can_be_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    world = World(policy=Policy(max_bypass=2, limits=UserLimits(gpus=4))).node(gpus=8)
    held = world.lease(3)
    waiting = [world.lease(4) for _ in range(200)]
    for _ in range(2):
        world.release(world.lease(1))
        world.report()
    assert len(world.ledger.limit_bypasses[LimitKind.USER]) == len(waiting)
    looks = Looks(monkeypatch)
    world.renew(held)
    assert 0 < looks.count <= 6


def test_a_turn_costs_no_look_at_each_job_of_an_array_that_is_at_its_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World().node(gpus=4)
    held = world.lease(1)
    jobs = tuple(
        SubmittedJob(job_id=f"j-{index}", lease_id=f"l-{index}", index=index, spec=JobSpec(command=("a",), gpus=1))
        for index in range(200)
    )
    world.turn(
        JobSubmitted(cause="s", jobs=jobs, name="", demand=Demand(), holder=Holder(), array_id="array", array_at_most=2)
    )
    world.answer_wanted()
    assert len(world.ledger.queue) == 198
    looks = Looks(monkeypatch)
    world.renew(held)
    assert looks.count == 1


def test_who_is_kept_out_since_a_grant_in_the_same_turn_is_not_bypassed_after_it() -> None:
    world = World(policy=Policy(limits=UserLimits(leases=1))).node(gpus=3)
    held = [world.lease(user=user) for user in ("bob", "dan", "eve")]
    older, skipped, small, kept_out = (world.lease(gpus) for gpus in (3, 3, 1, 3))
    other = world.lease(1, user="cleo")
    for lease in held[:2]:
        world.release(lease)
    world.report()
    assert [world.now_of(one).state.value for one in (small, other)] == ["active", "active"]
    assert {lease_id: times for lease_id, (times, _) in world.ledger.bypasses.items()} == {
        older.id: 2,
        skipped.id: 2,
    }
    assert world.now_of(kept_out).state is LeaseState.QUEUED


def test_many_requests_of_one_turn_that_ask_for_the_same_rank_the_nodes_once(monkeypatch: pytest.MonkeyPatch) -> None:
    names = [chr(ord("b") + number) for number in range(20)]
    world = World()
    for name in names:
        world.node(name, gpus=2)
    looks: list[str] = []
    on_node = Search.on_node

    def counted(search: Search, node: str, uuids: tuple[str, ...]) -> RankedNode | None:
        looks.append(node)
        return on_node(search, node, uuids)

    monkeypatch.setattr(Search, "on_node", counted)
    requests: list[Happening] = [
        LeaseRequested(
            cause=f"ask-{number}",
            lease_id=f"lease-{number}",
            demand=Demand(gpu_model="H100"),
            holder=Holder(),
            ttl_s=60.0,
            queue=True,
        )
        for number in range(30)
    ]
    world.turn(*requests)
    assert len(world.ledger.limits.leases) == 1
    assert world.ledger.limits.gpus.total() == 30
    assert len(looks) <= 2 * 20 + 3 * 30, "all nodes twice, and what each grant has changed"
