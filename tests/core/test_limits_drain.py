"""Whatever limits are set while requests wait: when all is given back, no request that could be granted still waits."""

from __future__ import annotations

import random
from typing import Any

import pytest

from gpulease_protocol.budgets import Budget
from gpulease_protocol.model import Lease, LeaseState, Priority, Selection
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.placement import min_gpus
from gpulease_server.core.policy import Policy
from gpulease_server.core.user_limits import never_within_limits, usage_by_user
from tests.core.build import World, gpu

WORLDS = 3
"""Random worlds of one test."""
USERS = "ada", "bob", "eve"
OWNERS = {"t0": "ada", "t1": "bob", "t2": "eve", "t3": "ada"}
"""By token, its user."""
PRIORITIES = [Priority.NORMAL] * 3 + [Priority.SCAVENGE, Priority.INTERACTIVE]


class Drained:
    """A world in which requests come, leases end and limits are set, at random; and then nothing but leases end."""

    def __init__(self, seed: int) -> None:
        self.random = pick = random.Random(seed)
        self.policy = Policy(
            max_bypass=pick.choice([1, 2, 5]),
            max_bypass_s=pick.choice([3.0, 300.0]),
            max_overtakes=pick.choice([1, 2, 4]),
            fair_share=pick.random() < 0.4,
            limits=UserLimits(
                interactive_gpus=pick.choice([0, 1, 2]), gpus=pick.choice([0, 0, 4]), leases=pick.choice([0, 0, 2])
            ),
        )
        self.world = World(policy=self.policy).node("a", gpus=4)
        self.world.node("b", gpus=[gpu(index, "b", name="H200") for index in range(pick.choice([2, 4]))])
        self.budgets = {
            "t0": Budget(max_gpus=pick.choice([2, 3, 4])),
            "t1": Budget(max_lease_s=1e6),
            "t2": Budget(max_gpus=pick.choice([1, 4]), max_lease_s=1e6),
        }

    def set_limits(self) -> None:
        pick, numbers = self.random, dict[str, int]()
        if pick.random() < 0.8:
            numbers["max_gpus"] = pick.choice([1, 2, 3, 4, 6])
        if pick.random() < 0.3:
            numbers["max_leases"] = pick.choice([1, 2, 3])
        kind = pick.choice(["user", "group", "token"])
        if kind == "group":
            self.world.limit("g", kind, members=USERS[: pick.choice([2, 3])], **numbers or {"max_gpus": 5})
        elif numbers:
            self.world.limit(pick.choice(USERS if kind == "user" else tuple(OWNERS)), kind, **numbers)

    def ask(self) -> None:
        pick, what = self.random, dict[str, Any]()
        token = pick.choice([None, None, *OWNERS])
        kind, count = pick.random(), pick.choice([1, 1, 1, 2, 3, 4])
        if kind < 0.15:
            what = {"gpu_model": "H200"}
        elif kind < 0.25:
            what, count = {"nodes": 2}, min(count, 2)
        elif kind < 0.33:
            what, count = {"selection": Selection.ALL}, 1
        what |= {"ttl_s": 1e9, "priority": pick.choice(PRIORITIES)}
        user = OWNERS[token] if token else pick.choice(USERS)
        self.world.ask(count, user=user, token=token, budget=self.budgets.get(token or ""), **what)
        self.world.answer_wanted()

    def active(self) -> list[Lease]:
        return [one.lease for one in self.world.ledger.leases.values() if one.lease.state is LeaseState.ACTIVE]

    def live(self, steps: int) -> None:
        pick, world, silent = self.random, self.world, ()
        for _ in range(steps):
            kind = pick.random()
            if kind < 0.55:
                self.ask()
            elif kind < 0.9 and (active := self.active()):
                world.release(pick.choice(active))
            elif 0.9 <= kind < 0.93:
                self.set_limits()
            elif 0.93 <= kind < 0.96:
                silent = pick.choice([(), ("b",)])
            world.pass_time(pick.choice([0.0, 0.25, 0.5]), silent=silent)
            world.answer_wanted()

    def drain(self) -> list[str]:
        """Give back one lease after the other. The requests that could be granted, and were not."""
        world, still = self.world, 0
        while world.ledger.queue and still < 25:
            waiting, active = len(world.ledger.queue), self.active()
            if active:
                world.release(self.random.choice(active))
            world.pass_time(0.5)
            world.answer_wanted()
            still = 0 if active or len(world.ledger.queue) < waiting else still + 1
        world.check()
        users = usage_by_user(world.ledger, self.policy.limits, world.now)
        return [
            record.lease.id
            for record in world.ledger.queued()
            if never_within_limits(users, record.lease, min_gpus(world.ledger, record.lease.demand)) is None
        ]


@pytest.mark.parametrize("seed", range(8))
def test_no_request_waits_forever_that_could_be_granted(seed: int) -> None:
    for number in range(WORLDS):
        drained = Drained(seed * WORLDS + number)
        for _ in range(drained.random.choice([1, 2, 3])):
            drained.set_limits()
        drained.live(drained.random.choice([30, 80, 150]))
        assert drained.drain() == []
