"""Random worlds in which requests run ahead, and what the promise of EASY backfill is compared with: the same world
without the grant.

The promise is one about grants, see docs/design/0014. So each time that a grant runs ahead of a request, the world goes
on twice, without any newer request: with what was granted, and with that given back at once. The older request must
start at the same moment in both if leases are held until the end that they declared. What was granted in another way
may delay it: by priority or usage, within the bound of `core.backfill`, or while a limit, the calendar or a node that
is absent keeps it out.
"""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Collection
from dataclasses import dataclass, field, replace
from typing import Any

from gpulease_protocol.budgets import Budget
from gpulease_protocol.model import Demand, Holder, JobSpec, JobState, LeaseState, Priority, Selection
from gpulease_server.core.happenings import JobSubmitted, LeaseRequested, SubmittedJob, Ticked
from gpulease_server.core.ledger import Ledger
from gpulease_server.core.order_records import RanAhead
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import Deadline, LeaseRecord
from gpulease_server.core.shadow_time import settling_s
from gpulease_server.core.token_budgets import held_s
from gpulease_server.runtime.outage import reset_deadlines
from gpulease_server.store.ledger_store import is_stored
from tests.core.build import World, uuid

KINDS = (
    *("jobs", "early", "bypass", "limits", "faults", "reservations", "priorities", "fair_share", "preemption"),
    *("budgets", "restarts"),
)
"""What a world may have, beside leases of one to all GPUs of a node, of named ones, and of two nodes. `early`: some are
given back before their declared time, and some declare none. `budgets`: three of four users ask with a token
that has one. `restarts`: of the daemon, before what is judged and not after it, as that makes leases last longer."""
STEP_S = 20.0
STEPS = 400
TTL_S = 900.0
TIMES_S = (107.0, 207.0, 307.0, 607.0, 1207.0, 2507.0, 5007.0)
"""Not multiples of a step: then what a millisecond changes is no step."""


@dataclass
class RandomWorld:
    """A few nodes, on which requests arrive for a while; the seed decides everything."""

    seed: int
    kinds: frozenset[str] = frozenset()
    number: int = 0
    """Of the step."""
    early_s: dict[str, float] = field(default_factory=dict)
    """By lease, after how long it is given back: sooner than declared, or where nothing is declared."""
    silent: set[str] = field(default_factory=set)
    """Nodes that send nothing."""
    coming: dict[int, list[tuple[Any, ...]]] = field(default_factory=dict)
    """By step, what happens there."""

    def __post_init__(self) -> None:
        chance, kinds = random.Random(self.seed), self.kinds
        names, self.size = "abc"[: chance.choice([1, 2, 2, 3])], chance.choice([2, 3, 4])
        ordered = not kinds.isdisjoint({"priorities", "fair_share", "preemption"})
        self.world = World(
            policy=Policy(
                easy_backfill=True,
                max_bypass=chance.choice([1, 2, 4]) if "bypass" in kinds else 0,
                max_bypass_s=1e6,
                silence_s=STEP_S + 5.0,
                node_lost_after_s=0,
                fair_share="fair_share" in kinds,
                max_overtakes=5 if ordered else 50,
                preemption="preemption" in kinds,
                preempt_after_s=400.0,
            )
        )
        for name in names:
            self.world.node(name, gpus=self.size)
        if "limits" in kinds:
            self.world.limit("u0", max_gpus=self.size)
            self.world.limit("lab", "group", members=("u1", "u2"), max_gpus=self.size + 1)
        for _ in range(chance.randint(25, 45)):
            self._at(chance.randint(0, 60), "ask", chance.randrange(1 << 30))
        for _ in range(4 if "faults" in kinds else 0):
            gpu, since = (chance.randrange(self.size), chance.choice(names)), chance.randint(3, 70)
            self._at(since, "cordon", *gpu, True)
            self._at(since + chance.randint(2, 20), "cordon", *gpu, False)
        for _ in range(2 if "faults" in kinds else 0):
            node, since = chance.choice(names), chance.randint(3, 70)
            self._at(since, "silent", node)
            self._at(since + chance.randint(1, 12), "back", node)
        for _ in range(3 if "reservations" in kinds else 0):
            self._at(chance.randint(0, 40), "reserve", chance.randrange(1 << 30))

        for _ in range(3 if "restarts" in kinds else 0):
            self._at(chance.randint(5, 50), "restart")

    def _at(self, number: int, *what: Any) -> None:
        self.coming.setdefault(number, []).append(what)

    def step(self, *, arrivals: bool = True) -> None:
        """Some time later: nodes report, leases end, requests arrive."""
        world = self.world
        world.at_s += STEP_S
        world.turn(Ticked(cause=f"tick-{next(world.ids)}", since_last_s=0.25))
        self.report()
        for record in list(world.ledger.leases.values()):
            self._end_if_due(record)
        for record in world.ledger.leases.values():
            if record.lease.ended_at is None and record.lease.job_id is None:
                world.ledger.apply(Deadline(record.lease.id, world.at_s + TTL_S))  # all holders are there
        self.report()
        for place, what in enumerate(self.coming.get(self.number, ())):
            if what[0] != "ask":
                self._happen(*what)
            elif arrivals:
                self._ask(random.Random(what[1]), f"x{100 * self.number + place}")
        self._answer()
        self.number += 1

    def report(self) -> None:
        """Every node that is not silent sends a reading."""
        for node in self.world.nodes:
            if node not in self.silent:
                self.world.report(node)

    def _answer(self) -> None:
        for _ in range(3):
            for node in list(self.world.wanted):
                if node in self.world.nodes and node not in self.silent:
                    self.world.report(node)

    def _end_if_due(self, record: LeaseRecord) -> None:
        """End a job whose time has passed, and give back what is not held until its declared time."""
        world, lease = self.world, record.lease
        if lease.state is not LeaseState.ACTIVE or any(gpu.node in self.silent for gpu in lease.gpus):
            return
        time_held_s, early_s = held_s(record, world.now), self.early_s.get(lease.id)
        job = world.ledger.live_jobs.get(lease.job_id or "")
        if job is None:
            if early_s is not None and time_held_s >= early_s:
                world.release(lease)
            return
        is_spent = "budgets" in self.kinds and early_s is None and job.job.state is JobState.STOPPING
        if early_s is not None and time_held_s >= early_s and job.job.state is not JobState.STOPPING:
            world.cancel(job.job.id)
        ends_s = [one for one in (lease.demand.time_s, early_s and early_s + 2 * STEP_S) if one is not None]
        if is_spent or time_held_s >= min(ends_s):
            world.ended(job.job.id, node=lease.gpus[0].node)

    def _happen(self, what: str, *about: Any) -> None:
        if what == "restart":
            self._restart()
        elif what == "cordon":
            self.world.cordon(*about[:2], cordoned=about[2])
        elif what == "silent":
            self.silent.add(about[0])
        elif what == "back":
            self.silent.discard(about[0])
            self.world.report(about[0])
        else:
            chance, nodes = random.Random(about[0]), list(self.world.nodes)
            gpu = uuid(chance.randrange(self.size), chance.choice(nodes))
            after_s = chance.choice([600.0, 1500.0])
            self.world.reserve(gpu, after_s=after_s, for_s=600.0, user=f"u{chance.randrange(4)}")

    def _restart(self) -> None:
        """Another daemon begins with what is in the database, and the nodes that are not silent report to it."""
        world, ledger = self.world, Ledger()
        for change in filter(is_stored, world.changes):
            ledger.apply(replace(change, granted_at_s=None) if isinstance(change, LeaseRecord) else change)
        for name in ("next_number", "next_token", "next_seq"):
            setattr(ledger, name, getattr(world.ledger, name))
        reset_deadlines(ledger, world.now)
        world.ledger = ledger
        self.report()

    def _budget(self, user: str) -> Budget | None:
        """That of the token with which a user asks."""
        if "budgets" not in self.kinds:
            return None
        short, few = Budget(max_lease_s=907.0), Budget(max_gpus=self.size, max_lease_s=507.0)
        return {"u0": short, "u1": few, "u2": Budget(gpu_hours_per_day=20.0)}.get(user)

    def _ask(self, chance: random.Random, name: str) -> None:
        """A request of any kind arrives."""
        demand, user = self._demand(chance), f"u{chance.randrange(4)}"
        time_s = None if chance.random() < 0.1 else chance.choice(TIMES_S)
        is_early = "early" in self.kinds and (time_s is None or chance.random() < 0.5)
        if is_early:
            self.early_s[f"lease-{name}"] = (time_s or 2000.0) * chance.choice([0.05, 0.3, 0.7])
        elif time_s is None:
            time_s = 707.0
        is_job = "jobs" in self.kinds and chance.random() < 0.4 and demand == Demand(count=demand.count)
        demand, budget = replace(demand, time_s=time_s), self._budget(user)
        holder = Holder(user=user, token_id=None if budget is None else f"token-{user}")
        if is_job:
            spec = JobSpec(command=("train.py",), gpus=demand.count, timeout_s=time_s)
            job = SubmittedJob(job_id=f"job-{name}", lease_id=f"lease-{name}", spec=spec)
            self.world.turn(
                JobSubmitted(
                    cause=f"ask-{name}",
                    jobs=(job,),
                    name="",
                    demand=demand,
                    holder=holder,
                    budget=budget,
                    after=(),
                    after_live=frozenset(),
                )
            )
        else:
            self.world.turn(
                LeaseRequested(
                    cause=f"ask-{name}",
                    lease_id=f"lease-{name}",
                    demand=demand,
                    holder=holder,
                    budget=budget,
                    ttl_s=TTL_S,
                    queue=True,
                    key=None,
                    watched_owner=None,
                )
            )
        self._answer()

    def _demand(self, chance: random.Random) -> Demand:
        kind, size, nodes = chance.random(), self.size, list(self.world.nodes)
        count, what = chance.choice([1, 1, 1, 2, size, max(1, size - 1)]), dict[str, Any]()
        if kind < 0.15 and len(nodes) > 1:
            count, what = chance.choice([1, size]), {"nodes": 2}
        elif kind < 0.35:
            what = {"node": chance.choice(nodes)}
        elif kind < 0.45:
            indices = tuple(sorted(chance.sample(range(size), chance.randint(1, size))))
            count, what = (
                len(indices),
                {"selection": Selection.LISTED, "node": chance.choice(nodes), "indices": indices},
            )
        elif kind < 0.55:
            count, what = 1, {"selection": Selection.ALL if kind < 0.5 else Selection.AUTO}
        if "preemption" in self.kinds and chance.random() < 0.6:
            what["priority"] = Priority.SCAVENGE
        elif "priorities" in self.kinds and chance.random() < 0.4:
            what["priority"] = chance.choice([Priority.INTERACTIVE, Priority.SCAVENGE])
        return Demand(count=count, **what)

    def waiting(self) -> list[LeaseRecord]:
        """The queue, in order."""
        ledger = self.world.ledger
        return sorted(ledger.queued(), key=ledger.ordered_place)

    def without_others(self, lease_id: str, given_back: Collection[str] = (), *, early: bool = False) -> RandomWorld:
        """This world, where no one waits behind a request, and these leases have been given back. `early`: others will
        be before their declared time; else no sooner. No one waits before it either where a grant may delay those:
        they have been passed less often than they may be, or usage orders, of which what runs ahead is a part."""
        kept = self.world.changes, self.world.shown, self.world.answers, self.world.ids
        self.world.changes, self.world.shown, self.world.answers, self.world.ids = [], {}, {}, iter(())
        other = copy.deepcopy(self)
        self.world.changes, self.world.shown, self.world.answers, self.world.ids = kept
        other.world.ids = itertools.count(10**6)
        other.coming = {at: [one for one in what if one[0] != "restart"] for at, what in self.coming.items()}
        ledger = other.world.ledger
        if not early:
            undeclared = (one for one in other.early_s if one in ledger.leases)
            undeclared = (one for one in undeclared if ledger.leases[one].lease.demand.time_s is None)
            other.early_s = {one: other.early_s[one] for one in undeclared}
        waiting = [one.lease.id for one in other.waiting()]
        before = waiting.index(lease_id) if self.kinds.isdisjoint({"bypass", "fair_share"}) else 0
        for one in [*waiting[before:], *given_back]:
            if one != lease_id:
                other.give_back(one)
        return other

    def give_back(self, lease_id: str) -> None:
        """It has its GPUs no more, and waits for none."""
        world, lease = self.world, self.world.ledger.leases[lease_id].lease
        if lease.job_id is None:
            world.release(lease)
        else:
            world.cancel(lease.job_id)
            if lease.gpus:
                world.ended(lease.job_id, node=lease.gpus[0].node)
        for node in 2 * sorted({gpu.node for gpu in lease.gpus}):
            world.report(node)

    def starts_s(self, lease_id: str, until_s: float = float("inf")) -> float | None:
        """When it starts from now on, where no one else arrives; None if it does not by then."""
        for _ in range(STEPS):
            record = self.world.ledger.leases[lease_id]
            if record.lease.state is not LeaseState.QUEUED:
                return record.granted_at_s
            if self.world.at_s > until_s:
                return None
            self.step(arrivals=False)
        return None


def judge(seed: int, kinds: Collection[str] = (), most: int = 1000) -> tuple[int, list[str]]:
    """How many grants of a world were judged that ran ahead of a request, at most about so many, and what was late
    because of them."""
    world, judged, late = RandomWorld(seed, frozenset(kinds)), 0, list[str]()
    while world.number < STEPS and judged < most:
        seen = len(world.world.changes)
        world.step()
        leases, passed = world.world.ledger.leases, dict[str, list[LeaseRecord]]()
        for change in [change for change in world.world.changes[seen:] if isinstance(change, RanAhead)]:
            granted = leases[change.lease_id]
            if granted.lease.state is LeaseState.ACTIVE:
                for lease_id in change.passed:
                    passed.setdefault(lease_id, []).append(granted)
        waiting = [record.lease.id for record in world.waiting()]
        found = [lease_id for lease_id in waiting if lease_id in passed]
        for lease_id in dict.fromkeys([*found[:1], *found[-1:]]):  # the first and the last of them
            judged += 1
            late += (f"seed {seed}, step {world.number}: {what}" for what in _late(world, lease_id, passed[lease_id]))
        if not waiting and world.number > max(world.coming):
            break
    return judged, late


def _late(world: RandomWorld, lease_id: str, ahead: list[LeaseRecord]) -> list[str]:
    """What is wrong with leases that have just run ahead of a request."""
    found, ids = list[str](), [record.lease.id for record in ahead]
    for early in (False, True) if "early" in world.kinds else (False,):
        own_s = world.without_others(lease_id, ids, early=early).starts_s(lease_id)
        if own_s is None:
            continue
        if early:  # it may wait for those that ran ahead, until the end that they declared
            taken_s = [(one.lease.demand.time_s or 0.0) + settling_s(one, world.world.policy) for one in ahead]
            granted_s = [record.granted_at_s or 0.0 for record in ahead]
            ended_s = max(map(sum, zip(granted_s, taken_s, strict=True)))
            is_first = world.waiting()[0].lease.id == lease_id
            # Those before it may wait for them first, and it then for those.
            own_s = STEP_S + (max(own_s, ended_s) if is_first else own_s + ended_s - world.world.at_s)
        found_s = world.without_others(lease_id, early=early).starts_s(lease_id, own_s + 2 * STEP_S)
        if found_s is None or found_s > own_s + 1.0:
            at = "later" if found_s is None else f"at {found_s:.0f}"
            found.append(f"{lease_id} starts {at} instead of at {own_s:.0f} because of {', '.join(ids)} ({early=})")
    return found
