"""Which GPUs of a node a request gets, by how they are connected."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import combinations
from typing import Any
from unittest import mock

import pytest

from gpulease_protocol.errors import NeverFits
from gpulease_protocol.explanation import Explanation
from gpulease_protocol.model import Demand, GpuLink, Holder, Lease, LeaseState, Liveness, Selection, TopologyMode
from gpulease_server.core import topology as topologies
from gpulease_server.core.explain.dry_run import dry_run
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.node_topology import nvlink_islands
from gpulease_server.core.topology import Topology, best_set
from tests.core.build import NOON, World, uuid
from tests.core.topologies import (
    A100_BRIDGES,
    BRIDGES_ACROSS,
    DGX_1V,
    HGX,
    HOSTS,
    NOTHING_KNOWN,
    PATHS,
    RTX,
    Host,
    oracle,
)


def best(topology: Topology | None, usable: list[int], free: list[int], count: int) -> tuple[int, ...]:
    """The set that the daemon takes."""
    if topology is None:
        return tuple(usable[:count])
    return best_set(topology, as_mask(usable), as_mask(free), count).positions


def as_mask(positions: list[int]) -> int:
    return sum(1 << one for one in positions)


def random_host(rng: random.Random, size: int) -> Host:
    """A host of which some pairs may be unknown."""
    words = [["X"] * size for _ in range(size)]
    choices = rng.sample([*PATHS, "NV1", "NV2", "NV4", "?"], rng.randint(1, 5))
    for one, other in combinations(range(size), 2):
        words[one][other] = words[other][one] = rng.choice(choices)
    return Host(tuple(map(tuple, words)), tuple(rng.choice([0, 0, 1, None]) for _ in range(size)))


@pytest.mark.parametrize("name", HOSTS)
def test_every_request_on_a_known_host_gets_the_best_set(name: str) -> None:
    host, rng = HOSTS[name], random.Random(name)
    topology, everyone = host.topology(), list(range(len(host.words)))
    for bits in range(1, 2 ** len(everyone)):
        free = [one for one in everyone if bits >> one & 1]
        kept = set(rng.sample(free, rng.randint(0, len(free) // 3)))  # for other requests
        usable = [one for one in free if one not in kept]
        for count in range(1, len(usable) + 1):
            assert best(topology, usable, free, count) == oracle(host, usable, free, count), (free, usable)


@pytest.mark.parametrize("seed", range(40))
def test_a_random_host_gives_the_best_set(seed: int) -> None:
    rng = random.Random(seed)
    host = random_host(rng, rng.randint(2, 9))
    topology, everyone = host.topology(), list(range(len(host.words)))
    for _ in range(10):
        free = sorted(rng.sample(everyone, rng.randint(1, len(everyone))))
        usable = sorted(rng.sample(free, rng.randint(1, len(free))))
        count = rng.randint(1, len(usable))
        assert best(topology, usable, free, count) == oracle(host, usable, free, count)


@pytest.mark.parametrize("seed", range(20))
def test_another_order_of_the_gpus_gives_a_set_that_is_as_good(seed: int) -> None:
    rng = random.Random(seed)
    host = rng.choice([random_host(rng, 8), *HOSTS.values()])
    order = list(range(len(host.words)))
    rng.shuffle(order)
    count, everyone = rng.randint(1, len(order)), list(range(len(order)))
    one, other = host.topology(), host.relabelled(order).topology()
    if one is None or other is None:
        assert one is other
        return
    assert (
        best_set(one, as_mask(everyone), as_mask(everyone), count)[:5]
        == (best_set(other, as_mask(everyone), as_mask(everyone), count)[:5])
    )


@pytest.mark.parametrize(("size", "count"), [(24, 12), (26, 4), (32, 9)])
def test_no_exchange_makes_a_set_of_a_large_host_better(size: int, count: int) -> None:
    rng = random.Random(size)
    topology, everyone = random_host(rng, size).topology(), list(range(size))
    assert topology is not None
    found = best_set(topology, as_mask(everyone), as_mask(everyone), count)
    assert len(set(found.positions)) == count
    for at in range(count):
        for other in set(everyone).difference(found.positions):
            exchanged = [*found.positions[:at], other, *found.positions[at + 1 :]]
            assert topology.score(exchanged, everyone) <= found


@pytest.mark.parametrize("name", ["DGX-1V", "A100 with bridges", "RTX on two NUMA nodes"])
def test_a_set_that_was_grown_on_a_known_host_keeps_to_the_first_rule(name: str) -> None:
    host = HOSTS[name]
    topology, everyone = host.topology(), list(range(len(host.words)))
    assert topology is not None
    with mock.patch.object(topologies, "MAX_SETS", 0):
        grown = [
            best_set.__wrapped__(topology, as_mask(everyone), as_mask(everyone), count).worst for count in (1, 2, 4)
        ]
    assert grown == [best_set(topology, as_mask(everyone), as_mask(everyone), count).worst for count in (1, 2, 4)]


@pytest.mark.parametrize(
    ("host", "free", "count", "expected"),
    [
        pytest.param(A100_BRIDGES, [1, 2, 3], 2, [2, 3], id="a whole pair, not the first two"),
        pytest.param(A100_BRIDGES, [0, 1, 3], 1, [3], id="one GPU: what is left of a broken pair"),
        pytest.param(BRIDGES_ACROSS, [0, 1, 2, 3], 2, [0, 2], id="a pair that is not side by side"),
        pytest.param(BRIDGES_ACROSS, [0, 1, 2, 3], 3, [0, 1, 2], id="three: one pair and one of the other"),
        pytest.param(DGX_1V, [0, 1, 2, 3, 4, 5, 6, 7], 2, [0, 3], id="two NVLinks, not one"),
        pytest.param(DGX_1V, [1, 3, 4, 5, 6, 7], 4, [4, 5, 6, 7], id="a clique, not a clique broken"),
        pytest.param(HGX, [2, 3, 4, 5, 6, 7], 4, [4, 5, 6, 7], id="NVSwitch: all equal, so one NUMA node"),
        pytest.param(HGX, [1, 3, 5, 7], 3, [1, 3, 5], id="NVSwitch: all equal, so the first ones"),
        pytest.param(RTX, [1, 3, 4, 5, 6, 7], 2, [4, 5], id="PCIe: two behind one switch"),
        pytest.param(RTX, [1, 2, 3, 4, 5, 6, 7], 1, [1], id="PCIe: one that is alone behind its switch"),
        pytest.param(RTX, [0, 1, 2, 3, 4, 5], 4, [0, 1, 2, 3], id="PCIe: four on one NUMA node"),
        pytest.param(NOTHING_KNOWN, [2, 5, 6], 2, [2, 5], id="nothing known: the first ones"),
    ],
)
def test_a_request_gets(host: Host, free: list[int], count: int, expected: list[int]) -> None:
    world = on(host)
    for index in set(range(len(host.words))).difference(free):
        world.lease(1, uuids=(uuid(index),), selection=Selection.LISTED)
    world.report(links=host.links())
    assert indices(world.lease(count)) == expected
    world = on(host)
    for index in set(range(len(host.words))).difference(free):
        world.lease(1, uuids=(uuid(index),), selection=Selection.LISTED)
    world.report(links=host.links())
    assert indices(world.lease(count, gpu_model="H100")) == expected, "with a condition"


def test_a_request_for_all_that_are_free_up_to_a_limit_gets_the_best_ones() -> None:
    world = on(BRIDGES_ACROSS)
    world.policy = replace(world.policy, limits=replace(world.policy.limits, gpus=2))
    assert indices(world.lease(1, selection=Selection.AUTO)) == [0, 2]


def test_what_is_held_for_an_older_request_counts_as_left_for_others() -> None:
    topology = BRIDGES_ACROSS.topology()
    assert best(topology, [0, 3], [0, 1, 3], 1) == (0,), "GPU 1, held for another, needs GPU 3"


def test_links_that_come_later_count_from_then_on() -> None:
    world = World().node(gpus=BRIDGES_ACROSS.readings())
    first = world.lease(2)
    assert indices(first) == [0, 1]
    world.release(first)
    world.report(links=BRIDGES_ACROSS.links())
    world.report(partial=True, reread=(0, 1))
    assert indices(world.lease(2)) == [0, 2]


def test_words_and_numbers_that_this_version_does_not_know_are_not_trusted() -> None:
    world = World().node(gpus=4)
    odd = [
        GpuLink(first=uuid(0), second=uuid(3), path="telepathy", nvlinks=10**9),
        GpuLink(first=uuid(1), second=uuid(2), path="nvlink", nvlinks=-5),
        GpuLink(first=uuid(0), second="GPU-none", path="nvlink"),
        GpuLink(first=uuid(0), second=uuid(0), path="nvlink"),
    ]
    world.report(links=tuple(odd))
    assert indices(world.lease(2)) == [1, 2]


@pytest.mark.parametrize("host", [A100_BRIDGES, BRIDGES_ACROSS])
def test_pairs_stay_whole_as_often_as_the_oracle_manages(host: Host) -> None:
    """A thousand random requests for one GPU or two on four GPUs with two bridges."""
    kept = pairs_kept(host, "daemon")
    assert kept == pairs_kept(host, "oracle")
    assert kept > pairs_kept(host, "first ones")


def pairs_kept(host: Host, who: str) -> tuple[int, int]:
    """How many requests for two got a pair with a bridge, and how many GPUs were taken while they left a pair whole."""
    rng, world = random.Random(4), on(host)
    held: list[tuple[int, Lease | tuple[int, ...]]] = []
    whole = left_whole = 0
    for now in range(1000):
        held, ended = [one for one in held if one[0] > now], [one for one in held if one[0] <= now]
        for _, lease in ended:
            if isinstance(lease, Lease):
                world.release(lease)
                world.report(links=host.links())
        count, until = rng.choice([1, 1, 2]), now + rng.randint(1, 6)
        taken = {one for _, lease in held for one in (indices(lease) if isinstance(lease, Lease) else lease)}
        free = [one for one in range(4) if one not in taken]
        if len(free) < count:
            continue
        lease = world.lease(count) if who == "daemon" else ()
        got = indices(lease) if isinstance(lease, Lease) else free[:count]
        if who == "oracle":
            got = list(oracle(host, free, free, count))
        held.append((until, lease if isinstance(lease, Lease) else tuple(got)))
        bridged = [pair for pair in combinations(free, 2) if host.words[pair[0]][pair[1]].startswith("NV")]
        whole += tuple(got) in bridged
        left_whole += sum(not set(pair) & set(got) for pair in bridged)
    return whole, left_whole


def on(host: Host) -> World:
    """A world with this host as node `a`."""
    world = World().node(gpus=host.readings(), report=False)
    world.report(links=host.links())
    return world


def indices(lease: Lease) -> list[int]:
    return [one.index for one in lease.gpus]


def occupied(host: Host, taken: list[int]) -> tuple[World, dict[int, Lease]]:
    """A world with this host, and the leases of the GPUs that are taken."""
    world = on(host)
    leases = {index: world.lease(1, selection=Selection.LISTED, uuids=(uuid(index),)) for index in taken}
    world.report(links=host.links())
    return world, leases


def give_back(world: World, lease: Lease, host: Host) -> None:
    world.release(lease)
    world.report(links=host.links())


def test_a_request_that_requires_nvlink_waits_for_it_and_others_do_not() -> None:
    world, leases = occupied(A100_BRIDGES, [0, 2])
    asked = world.ask(2, topology=TopologyMode.REQUIRED)
    waits = world.answers[asked]
    assert isinstance(waits, Lease)
    assert waits.state is LeaseState.QUEUED
    said = explain(world.ledger, world.ledger.leases[waits.id], world.now, world.policy).sentence
    assert "GPUs 1, 3 of a are free, but no 2 of them are all connected by NVLink" in said
    assert indices(world.lease(2, topology=TopologyMode.PREFERRED)) == [1, 3], "never a delay unless required"
    give_back(world, leases[0], A100_BRIDGES)
    assert world.ledger.leases[waits.id].lease.state is LeaseState.QUEUED
    give_back(world, leases[2], A100_BRIDGES)
    assert world.ledger.leases[waits.id].lease.state is LeaseState.QUEUED


def test_it_is_granted_when_the_lease_on_the_other_end_of_a_pair_ends() -> None:
    world, leases = occupied(BRIDGES_ACROSS, [0, 1])
    waits = world.answers[world.ask(2, topology=TopologyMode.REQUIRED)]
    assert isinstance(waits, Lease)
    give_back(world, leases[1], BRIDGES_ACROSS)
    assert indices(world.ledger.leases[waits.id].lease) == [1, 3]


@pytest.mark.parametrize(
    ("host", "what", "said"),
    [
        (A100_BRIDGES, {"count": 3}, "No 3 GPUs of one node are all connected by NVLink"),
        (A100_BRIDGES, {"count": 3}, "the most are 2"),
        (
            A100_BRIDGES,
            {"count": 2, "selection": Selection.LISTED, "indices": (1, 2)},
            "These GPUs are not all connected by NVLink",
        ),
        (A100_BRIDGES, {"count": 1, "selection": Selection.ALL}, "On no node are all GPUs connected by NVLink"),
        (DGX_1V, {"count": 5}, "the most are 4"),
        (RTX, {"count": 2}, "no two are"),
        (NOTHING_KNOWN, {"count": 2}, "Of a no connections are known: the driver does not tell."),
    ],
)
def test_what_no_node_can_ever_satisfy_is_refused_at_once(host: Host, what: dict[str, Any], said: str) -> None:
    world = on(host)
    answer = world.answers[world.ask(**what, topology=TopologyMode.REQUIRED)]
    assert isinstance(answer, NeverFits)
    assert said in str(answer)


@pytest.mark.parametrize("host", [HGX, HOSTS["GB200"], HOSTS["two 3090"]])
def test_a_host_with_nvlink_between_all_has_the_whole_of_it(host: Host) -> None:
    world = on(host)
    size = len(host.words)
    assert len(world.lease(size, topology=TopologyMode.REQUIRED).gpus) == size


def test_a_single_gpu_needs_no_connection() -> None:
    assert indices(on(RTX).lease(1, topology=TopologyMode.REQUIRED)) == [0]


def test_a_node_that_has_not_reported_yet_may_have_nvlink() -> None:
    """After a restart the daemon knows the GPUs, and not yet how they are connected."""
    world = on(RTX)
    assert isinstance(world.answers[world.ask(2, topology=TopologyMode.REQUIRED)], NeverFits)
    world.report(problem="NVML does not answer")
    waits = world.answers[world.ask(2, topology=TopologyMode.REQUIRED)]
    assert isinstance(waits, Lease)
    world.report(links=A100_BRIDGES.links())
    assert indices(world.ledger.leases[waits.id].lease) == [0, 1]


def test_nothing_is_held_where_the_gpus_that_will_be_free_are_not_connected() -> None:
    """GPUs 1 and 3 are cordoned: each pair lacks one, so the other two GPUs go to newer requests, however many."""
    world, leases = occupied(A100_BRIDGES, [0, 2])
    waits = world.answers[world.ask(2, topology=TopologyMode.REQUIRED)]
    assert isinstance(waits, Lease)
    for index in (1, 3):
        world.cordon(index)
    for _ in range(30):
        give_back(world, leases[0], A100_BRIDGES)
        leases[0] = world.lease(1)
        assert indices(leases[0]) == [0]
        world.report(links=A100_BRIDGES.links())


def test_no_stream_of_newer_requests_keeps_it_waiting() -> None:
    """Requests for one GPU come and go; after the bound what is given back waits for the pair."""
    world, leases = occupied(A100_BRIDGES, [0, 2])
    waits = world.answers[world.ask(2, topology=TopologyMode.REQUIRED)]
    assert isinstance(waits, Lease)
    for _ in range(40):
        newer = world.answers[world.ask(1, queue=False)]
        oldest = min(leases)
        give_back(world, leases.pop(oldest), A100_BRIDGES)
        if isinstance(newer, Lease):
            leases[indices(newer)[0]] = newer
        if world.ledger.leases[waits.id].lease.state is LeaseState.ACTIVE:
            break
        if not leases:
            leases[0] = world.lease(1)
    assert indices(world.ledger.leases[waits.id].lease) in ([0, 1], [2, 3])


@pytest.mark.parametrize("what", [{}, {"nodes": 2}])
@pytest.mark.parametrize("count", [1, 2])
def test_a_node_that_was_never_heard_since_a_restart_fails_no_request(what: dict[str, Any], count: int) -> None:
    """The daemon knows its GPUs from the ledger, and has no reading of it."""
    world = on(A100_BRIDGES).node("b", gpus=A100_BRIDGES.readings("b"), report=False)
    world.report("b", links=A100_BRIDGES.links("b"))
    del world.ledger.node_observations["b"]
    asked = world.ask(count, topology=TopologyMode.REQUIRED, **what)
    waits = world.answers[asked]
    assert isinstance(waits, Lease)
    assert (waits.state is LeaseState.ACTIVE) is ("nodes" not in what)
    world.report("b", links=A100_BRIDGES.links("b"))
    assert world.ledger.leases[waits.id].lease.state is LeaseState.ACTIVE


def test_what_is_held_for_a_request_is_what_it_can_use() -> None:
    """Pairs 0-1 and 2-3; 2 and 3 end soon, 1 never does: GPU 0 is not held, and 2 is, until 3 is free."""
    world, leases = occupied(A100_BRIDGES, [1, 2, 3])
    world.cordon(1)
    waits = world.answers[world.ask(2, topology=TopologyMode.REQUIRED)]
    assert isinstance(waits, Lease)
    for _ in range(40):
        newer = world.lease(1)
        assert indices(newer) == [0], "what can never serve it goes to others"
        give_back(world, newer, A100_BRIDGES)
    give_back(world, leases[2], A100_BRIDGES)
    for _ in range(40):
        newer = world.lease(1)
        assert indices(newer) == [0], "GPU 2 is held until GPU 3 is free"
        give_back(world, newer, A100_BRIDGES)
    give_back(world, leases[3], A100_BRIDGES)
    assert indices(world.ledger.leases[waits.id].lease) == [2, 3]


def test_any_takes_the_first_ones() -> None:
    assert indices(on(BRIDGES_ACROSS).lease(2, topology=TopologyMode.ANY)) == [0, 1]


def test_a_gang_that_requires_nvlink_has_it_on_each_node() -> None:
    world = World()
    for name, host in (("a", BRIDGES_ACROSS), ("b", RTX), ("c", A100_BRIDGES)):
        world.node(name, gpus=host.readings(name), report=False)
        world.report(name, links=host.links(name))
    lease = world.lease(2, nodes=2, topology=TopologyMode.REQUIRED)
    assert [(one.node, one.index) for one in lease.gpus] == [("a", 0), ("a", 2), ("c", 0), ("c", 1)]
    assert isinstance(world.answers[world.ask(2, nodes=3, topology=TopologyMode.REQUIRED)], NeverFits)


@pytest.mark.parametrize(
    ("host", "count", "what", "said"),
    [
        (BRIDGES_ACROSS, 2, {}, "Granted: GPUs 0, 2. They are all connected by NVLink, the best that was free."),
        (HGX, 8, {"selection": Selection.ALL}, "They are all connected by NVLink."),
        (
            A100_BRIDGES,
            3,
            {},
            "GPUs 0 and 2 of a are connected from one NUMA node to another at worst, the best that was",
        ),
        (RTX, 2, {}, "GPUs 0 and 1 of a are connected through one PCIe switch at worst, the best that was free."),
        (BRIDGES_ACROSS, 2, {"topology": TopologyMode.ANY}, "through the PCIe host bridges of a NUMA node at worst."),
        (BRIDGES_ACROSS, 1, {}, "Granted: GPU 0. Of the free GPUs it was the one that breaks the least for others."),
        (BRIDGES_ACROSS, 1, {"selection": Selection.LISTED, "indices": (3,)}, "Granted: GPU 3."),
        (NOTHING_KNOWN, 2, {}, "How they are connected is not known: the driver does not tell, so the first free ones"),
        (NOTHING_KNOWN, 1, {}, "Granted: GPU 0."),
        (HOSTS["half known"], 3, {}, "How GPUs 0 and 2 of a are connected is not known."),
    ],
)
def test_explain_says_why_these_gpus(host: Host, count: int, what: dict[str, Any], said: str) -> None:
    world = on(host)
    would = fits(world, Demand(count=count, **what))
    lease = world.lease(count, **what)
    sentence = explain(world.ledger, world.ledger.leases[lease.id], world.now, world.policy).sentence
    assert said in sentence
    assert sentence.endswith(said) or not said.startswith("Granted")
    assert sentence.partition(". ")[2] in would


def fits(world: World, demand: Demand) -> str:
    """What a dry run says."""
    lease = Lease(
        id="lease-dry",
        state=LeaseState.QUEUED,
        holder=Holder(user="ann"),
        demand=demand,
        ttl_s=60.0,
        liveness=Liveness.HEARTBEAT,
        created_at=NOON,
    )
    found = dry_run(world.ledger, lease, world.now, world.policy)
    assert isinstance(found, Explanation)
    return found.sentence


def test_a_node_shows_the_islands_that_nvlink_makes() -> None:
    def islands(host: Host) -> list[list[int]]:
        shown = nvlink_islands(host.links())
        return [[int(one[-12:], 16) for one in island] for island in shown]

    assert islands(A100_BRIDGES) == [[0, 1], [2, 3]]
    assert islands(BRIDGES_ACROSS) == [[0, 2], [1, 3]]
    assert islands(DGX_1V) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert islands(HGX) == [[0, 1, 2, 3, 4, 5, 6, 7]]
    assert islands(RTX) == islands(NOTHING_KNOWN) == []
