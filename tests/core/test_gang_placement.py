"""Placement of gangs beside one that tries every node, on random fleets."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from gpulease_protocol.model import Demand
from gpulease_server.core.node_ranking import NodeRankings
from gpulease_server.core.place import place
from gpulease_server.core.placement import Blocked, NeedsReading, Placed, Search, find_candidates
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import GpuRecord
from tests.core.build import World, gpu, uuid

Group = tuple[str, str]


@dataclass
class Fleet:
    """A few nodes of two models; some GPUs are in use, some reserved, some nodes out of reach. `seed` decides."""

    seed: int
    world: World = field(default_factory=World)
    free: dict[str, dict[str, list[str]]] = field(default_factory=dict)
    """By node and model: UUIDs of the GPUs that nothing is on, in PCI order."""
    known: dict[str, Counter[str]] = field(default_factory=dict)
    """By node and model: how many GPUs it has."""
    reach: dict[str, str | None] = field(default_factory=dict)
    reserved: set[str] = field(default_factory=set)
    demand: Demand = field(default_factory=Demand)

    def __post_init__(self) -> None:
        draw = random.Random(self.seed)
        models = draw.choice([["H100"], ["H100"], ["H100", "A100"]])
        for name in "abcdefgh"[: draw.randint(2, 8)]:
            address = draw.choice([f"10.0.0.{ord(name)}"] * 6 + ["127.0.0.1", None])
            self.world.addresses[name] = address
            self.reach[name] = None if address is None else name if address == "127.0.0.1" else ""
            readings = [
                gpu(index, name, name=draw.choice(models), pids=draw.choice([(), (), (), (9,)]))
                for index in range(draw.randint(1, 6))
            ]
            self.world.node(name, gpus=readings)
            self.known[name] = Counter(str(one.name) for one in readings)
            self.free[name] = {}
            for one in readings:
                if not one.processes:
                    self.free[name].setdefault(str(one.name), []).append(one.uuid)
        every = [one for models_of in self.free.values() for some in models_of.values() for one in some]
        self.reserved = {one for one in every if draw.random() < 0.15}
        self.demand = Demand(count=draw.randint(1, 3), nodes=draw.randint(2, 4))

    def groups(self) -> dict[Group, list[str]]:
        """The nodes that could take part in the gang now, tried one by one."""
        found: dict[Group, list[str]] = {}
        for node, models in self.free.items():
            for model, uuids in models.items():
                left = [one for one in uuids if one not in self.reserved]
                reach = self.reach[node]
                if reach is not None and len(left) >= self.demand.count and self.could_ever(model):
                    found.setdefault((model, reach), []).append(node)
        return {group: nodes for group, nodes in found.items() if len(nodes) >= self.demand.nodes}

    def could_ever(self, model: str) -> bool:
        nodes = [node for node, counts in self.known.items() if counts[model] >= self.demand.count]
        return len(nodes) >= self.demand.nodes

    def place(self) -> Placed | NeedsReading | Blocked:
        world = self.world
        return place(world.ledger, self.demand, self.reserved, world.now, world.policy)

    def total_free(self, node: str) -> int:
        return sum(map(len, self.free[node].values()))


def by_node(gpus: tuple[GpuRecord, ...]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for one in gpus:
        found.setdefault(one.device.node, []).append(one.device.uuid)
    return found


@pytest.mark.parametrize("seed", range(300))
def test_a_gang_is_placed_where_one_that_tries_every_node_finds_room(seed: int) -> None:
    fleet = Fleet(seed)
    groups, placed = fleet.groups(), fleet.place()
    if not groups:
        assert isinstance(placed, Blocked), f"{placed} for {fleet.demand}"
        assert bool(placed.candidates) is any(map(fleet.could_ever, ("H100", "A100")))
        return
    assert not isinstance(placed, Blocked), f"{groups} for {fleet.demand}"
    chosen, demand = by_node(placed.gpus), fleet.demand
    assert list(chosen) == sorted(chosen)
    assert [len(uuids) for uuids in chosen.values()] == [demand.count] * demand.nodes
    assert len({gpu.device.name for gpu in placed.gpus}) == 1
    group = str(placed.gpus[0].device.name), str(fleet.reach[placed.gpus[0].device.node])
    assert set(chosen) <= set(groups[group])
    for node, uuids in chosen.items():
        free = [one for one in fleet.free[node][group[0]] if one not in fleet.reserved]
        assert uuids == free[: demand.count], "in PCI order, and nothing that is reserved"
    smallest = sorted((fleet.total_free(node), node) for node in groups[group])[: demand.nodes]
    assert sorted(chosen) == sorted(node for _, node in smallest), "the nodes with the fewest free GPUs"


def test_the_fleets_have_what_a_placement_could_get_wrong() -> None:
    fleets = [Fleet(seed) for seed in range(300)]
    assert {len(fleet.groups()) for fleet in fleets} >= {0, 1, 2}
    assert any(fleet.reserved for fleet in fleets)
    assert any("127.0.0.1" in fleet.world.addresses.values() for fleet in fleets)


def test_nodes_with_recent_readings_are_taken_before_others() -> None:
    world = World().node("a", gpus=1).node("b", gpus=2).node("c", gpus=2)
    world.at_s += 0.6
    world.report("b")
    world.report("c")
    placed = place(world.ledger, Demand(nodes=2), (), world.now, world.policy)
    assert isinstance(placed, Placed)
    assert list(by_node(placed.gpus)) == ["b", "c"]
    world.at_s += 0.6
    world.report("c")
    unread = place(world.ledger, Demand(nodes=2), (), world.now, world.policy)
    assert isinstance(unread, NeedsReading)
    assert (unread.nodes, list(by_node(unread.gpus))) == (("a", "b"), ["a", "b"])


def test_a_gang_that_waits_costs_no_look_at_nodes_with_too_few_free_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World()
    names = [chr(ord("A") + number) for number in range(40)]
    for name in names:
        world.node(name, gpus=2)
        world.lease(1, node=name)
    world.node("z", gpus=2)
    looks: list[str] = []
    on_node = Search.on_node

    def counted(search: Search, node: str, *found: object) -> object:
        looks.append(node)
        return on_node(search, node, *found)

    monkeypatch.setattr(Search, "on_node", counted)
    for name in names:
        world.report(name)
    assert isinstance(place(world.ledger, Demand(count=2, nodes=2), (), world.now, world.policy), Blocked)
    assert looks == ["z"]
    looks.clear()
    assert not isinstance(place(world.ledger, Demand(count=1, nodes=2), (), world.now, world.policy), Blocked)
    assert len(looks) == 2


def test_many_gangs_of_one_turn_look_at_each_node_once(monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(policy=Policy(max_observation_age_s=60))
    names = [chr(ord("A") + number) for number in range(40)]
    for name in names:
        world.node(name, gpus=2)
    looks: list[str] = []
    on_node = Search.on_node

    def counted(search: Search, node: str, *found: object) -> object:
        looks.append(node)
        return on_node(search, node, *found)

    monkeypatch.setattr(Search, "on_node", counted)
    reserved: set[str] = set()
    taken: list[str] = []
    rankings = NodeRankings(taken)
    for number in range(20):
        placed = place(world.ledger, Demand(count=2, nodes=2), reserved, world.now, world.policy, rankings=rankings)
        assert isinstance(placed, Placed)
        assert list(by_node(placed.gpus)) == names[2 * number : 2 * number + 2]
        reserved |= {one.device.uuid for one in placed.gpus}
        taken += (one.device.node for one in placed.gpus)
    assert len(looks) <= 2 * len(names)


def test_candidates_of_a_gang_are_of_models_of_which_enough_nodes_have_enough() -> None:
    world = World()
    world.node("a", gpus=[gpu(0, "a"), gpu(1, "a", name="A100")])
    world.node("b", gpus=[gpu(0, "b"), gpu(1, "b", name="L4")])
    found = find_candidates(world.ledger, Demand(nodes=2))
    assert found.by_model == {"NVIDIA H100": {"a": (uuid(0, "a"),), "b": (uuid(0, "b"),)}}
    assert found.uuids == {uuid(0, "a"), uuid(0, "b")}
