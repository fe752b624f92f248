"""Promise 8 under whatever order of asking, releasing, cancelling and breaking: the queue against a model of its own.

The model knows the events and what each request asked for. It works out for itself which GPUs a request could use, who
was passed by whom and how often, and what could have been granted.
"""

from __future__ import annotations

from math import ceil, log2
from typing import Any

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from gpulease_protocol.model import Demand, Event, GpuState, Lease, LeaseState, Selection
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.policy import Policy
from tests.core.build import World, gpu, uuid

SIZES = {"a": 4, "b": 3, "c": 2}
MODELS = {"a": "NVIDIA H100", "b": "NVIDIA H100", "c": "NVIDIA A100"}
LONG_S = 1e6

demands = st.one_of(
    st.builds(dict, count=st.integers(1, 4)),
    st.builds(dict, count=st.integers(1, 2), node=st.sampled_from("abc")),
    st.builds(dict, count=st.integers(1, 4), gpu_model=st.sampled_from(["H100", "A100"])),
    st.builds(
        lambda uuids: {"selection": Selection.LISTED, "count": len(uuids), "uuids": tuple(uuids)},
        st.sets(st.sampled_from([uuid(index, "a") for index in range(4)]), min_size=1, max_size=3),
    ),
)


def usable(demand: Demand) -> dict[str, set[str]]:
    """By node, the GPUs that can serve a demand, on nodes that have enough of them."""
    found = {
        node: {
            uuid(index, node)
            for index in range(size)
            if demand.node in (None, node)
            and (demand.gpu_model or "") in MODELS[node]
            and (demand.selection is not Selection.LISTED or uuid(index, node) in demand.uuids)
        }
        for node, size in SIZES.items()
    }
    return {node: gpus for node, gpus in found.items() if len(gpus) >= demand.count}


def held_by(lease: Lease) -> set[str]:
    return {gpu.uuid for gpu in lease.gpus}


class Queue(RuleBasedStateMachine):
    """Three nodes of 4, 3 and 2 GPUs, of two models. No one dies, nothing expires: only the queue is at work."""

    def __init__(self) -> None:
        super().__init__()
        self.world = World(policy=Policy())
        self.seen = 0
        self.demand: dict[str, Demand] = {}
        self.number: dict[str, int] = {}
        self.waiting: list[str] = []
        """In order of arrival."""
        self.passed: dict[str, int] = {}
        self.breaks = False
        """Whether GPUs are cordoned in this run, which bounds nothing but what is held."""
        self.broken: set[str] = set()

    @initialize(max_bypass=st.integers(0, 4), breaks=st.sampled_from([False, False, True]))
    def start(self, max_bypass: int, breaks: bool) -> None:
        self.breaks = breaks
        self.world.policy = Policy(max_bypass=max_bypass, max_bypass_s=LONG_S)
        for node, size in SIZES.items():
            self.world.node(node, gpus=[gpu(index, node, name=MODELS[node]) for index in range(size)])

    @rule(asked=st.lists(demands, min_size=1, max_size=6))
    def ask(self, asked: list[dict[str, Any]]) -> None:
        for demand in asked:
            self.fresh()
            self.world.ask(ttl_s=LONG_S, **demand)

    @precondition(lambda self: self.active())
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.give_back(data.draw(st.sampled_from(self.active())))

    @precondition(lambda self: self.waiting)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        self.fresh()
        self.world.release(self.lease(data.draw(st.sampled_from(self.waiting))))

    @precondition(lambda self: self.breaks)
    @rule(node=st.sampled_from("abc"), index=st.integers(0, 3), cordoned=st.booleans())
    def cordon(self, node: str, index: int, cordoned: bool) -> None:
        if index < SIZES[node] and cordoned is not (uuid(index, node) in self.broken):
            self.fresh()
            self.world.cordon(index, node, cordoned=cordoned)
            self.broken ^= {uuid(index, node)}
            self.fresh()

    @precondition(lambda self: self.waiting and not self.breaks)
    @rule(data=st.data())
    def flood(self, data: st.DataObject) -> None:
        """Every request that can be granted is, after boundedly many releases, whatever comes after it."""
        target = data.draw(st.sampled_from(self.waiting))
        older_requests = self.waiting[: self.waiting.index(target) + 1]
        bound = sum(self.most_passes(one) + len(self.could_use([one])) for one in older_requests)
        for node in SIZES:
            self.fresh()
            self.world.ask(ttl_s=LONG_S, node=node)
        releases = 0
        while self.lease(target).state is LeaseState.QUEUED:
            gpus = self.could_use([one for one in older_requests if self.lease(one).state is LeaseState.QUEUED])
            in_the_way = [one for one in self.active() if not gpus.isdisjoint(held_by(self.lease(one)))]
            assert in_the_way, "it waits, and no one has anything that it or an older could use"
            one = in_the_way[data.draw(st.integers(0, len(in_the_way) - 1))]
            self.fresh()
            self.world.ask(ttl_s=LONG_S, node=self.lease(one).gpus[0].node)
            self.give_back(one)
            releases += 1
            assert releases <= bound, f"waits after {releases} releases of what it could use"

    def give_back(self, lease_id: str) -> None:
        self.fresh()
        lease = self.lease(lease_id)
        self.world.release(lease)
        self.fresh()

    def fresh(self) -> None:
        """Nothing here rests on the age of readings."""
        for node in SIZES:
            self.world.report(node)

    def lease(self, lease_id: str) -> Lease:
        return self.world.ledger.leases[lease_id].lease

    def could_use(self, requests: list[str]) -> set[str]:
        return set[str]().union(*(gpus for one in requests for gpus in usable(self.demand[one]).values()))

    def active(self) -> list[str]:
        return [one for one, record in self.world.ledger.leases.items() if record.lease.state is LeaseState.ACTIVE]

    def most_passes(self, lease_id: str) -> int:
        nodes = len(usable(self.demand[lease_id]))
        return self.world.policy.max_bypass * (1 + ceil(log2(max(nodes, 1))))

    @invariant()
    def follow(self) -> None:
        """Who waits, and who was passed how often, by the events."""
        self.world.check()
        for change in self.world.changes[self.seen :]:
            if not isinstance(change, Event) or change.lease_id is None:
                continue
            record = self.world.ledger.leases[change.lease_id]
            self.demand[change.lease_id], self.number[change.lease_id] = record.lease.demand, record.number
            if change.kind == "lease.queued":
                self.waiting.append(change.lease_id)
            elif change.kind in ("lease.granted", "lease.ended"):
                if change.lease_id in self.waiting:
                    self.waiting.remove(change.lease_id)
                if change.kind == "lease.granted":
                    self.granted(change)
        self.seen = len(self.world.changes)

    def granted(self, event: Event) -> None:
        for older in self.waiting:
            gpus = set().union(*usable(self.demand[older]).values())
            if self.number[older] < self.number[event.lease_id or ""] and gpus & set(event.gpus):
                self.passed[older] = self.passed.get(older, 0) + 1

    @invariant()
    def no_request_is_passed_more_often_than_that(self) -> None:
        for waiting in self.waiting:
            explanation = self.explain(waiting)
            assert explanation.passed == self.passed.get(waiting, 0)
            if not self.breaks:
                assert self.passed.get(waiting, 0) <= self.most_passes(waiting)

    @invariant()
    def nothing_is_idle_that_someone_could_have(self) -> None:
        """Unless it is held for an older, who then says so; and nothing is held for two."""
        free = {
            uuid(index, node)
            for node, size in SIZES.items()
            for index in range(size)
            if self.world.ledger.gpus and self.world.state(index, node) is GpuState.FREE
        }
        held: dict[str, str] = {}
        for waiting in self.waiting:
            possible = usable(self.demand[waiting])
            left = {node: gpus & free - held.keys() for node, gpus in possible.items()}
            for node, gpus in left.items():
                assert len(gpus) < self.demand[waiting].count, (
                    f"{waiting} waits although it could have {gpus} of {node}"
                )
            for one in self.explain(waiting).held:
                assert one in set().union(*left.values()), f"{one} is held for {waiting}, who cannot have it"
                held[one] = waiting

    @invariant()
    def nothing_is_held_uselessly(self) -> None:
        for waiting in self.waiting:
            held = set(self.explain(waiting).held)
            assert not held or self.passed.get(waiting, 0) >= self.world.policy.max_bypass, "held too early"
            for gpus in usable(self.demand[waiting]).values():
                if held & gpus:
                    assert len(gpus - self.broken) >= self.demand[waiting].count, "held beside a cordoned GPU"

    def explain(self, lease_id: str) -> Any:
        record = self.world.ledger.leases[lease_id]
        return explain(self.world.ledger, record, self.world.now, self.world.policy)


TestFairQueue = Queue.TestCase
TestFairQueue.settings = settings(
    max_examples=30,
    stateful_step_count=15,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    # It fails in few steps as it is; shrinking would take minutes.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
