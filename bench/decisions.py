"""What does one decision cost, and how does that grow with the fleet and the queue?

The core alone, in memory: no HTTP and no database. All GPUs are free for the first rows, and held for the others. The
limit is the same decision on one node of 8 GPUs with 10 requests waiting.
"""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from bench.table.rows import Row, Target
from gpulease_protocol.model import Demand, Holder, Lease, Priority, Selection
from gpulease_protocol.reservations import Reservation
from gpulease_server.core.explain.explain import explain
from gpulease_server.core.forecast.expected_start import StartForecast
from gpulease_server.core.happenings import LeaseRequested, RenewalRequested, Ticked
from gpulease_server.core.limit_records import UserLimits
from gpulease_server.core.policy import Policy
from gpulease_server.core.records import BypassCounts
from tests.core.build import GIB, World

SIZES = ((1, 10), (16, 100), (125, 1_000), (1_250, 10_000), (1_250, 100_000))
"""Nodes of 8 GPUs, and requests that wait."""
ROUNDS = 50
RESERVATIONS = 1000
RESERVERS = 50
"""Users whom the reservations are for, and who all wait for something else."""
BATCH = 500
USERS = 1000
MANY_USERS = f"renewal, while a GPU is free that none of up to {USERS:,} users can use, by fair share"
UNBOUNDED = UserLimits(queued=10**7, queued_bytes=2**50)


class Fleet:
    """Nodes of 8 GPUs with idle GPUs, or with all of them held and a queue."""

    def __init__(self, nodes: int, **rules: Any) -> None:
        self.world = World(policy=Policy(max_queued=10**7, max_queued_bytes=2**50, limits=UNBOUNDED, **rules))
        self.names = [chr(0x100 + number) for number in range(nodes)]
        for name in self.names:
            self.world.node(name)

    def read(self) -> None:
        """A new reading of every node, so that no grant has to wait for one."""
        for name in self.names:
            self.world.report(name)

    def grants(self) -> list[float]:
        """Requests for one GPU while all are free."""
        held: list[Lease] = []
        found = timed(lambda: held.append(self.world.lease(1)), min(ROUNDS, len(self.names) * 8))
        for lease in held:
            self.world.release(lease)
        self.read()
        self.read()
        return found

    def batch_of_requests(self) -> float:
        """Microseconds of one turn of 500 requests for a GPU each while all are free. What is not granted is queued."""
        requests = [
            LeaseRequested(
                cause=f"batch-{number}",
                lease_id=f"batch-{number}",
                demand=Demand(count=1),
                holder=Holder(user="ann"),
                ttl_s=60.0,
                queue=True,
            )
            for number in range(BATCH)
        ]
        (took_us,) = timed(lambda: self.world.turn(*requests), 1)
        return took_us

    def fill(self, waiting: int, gpus: int = 1) -> list[Lease]:
        """Lease every GPU, all but the last ones by the node, and let requests for so many wait; the leases."""
        leases = [self.world.lease(8) for _ in self.names[1:]] + [self.world.lease(1) for _ in range(8)]
        for _ in range(waiting):
            self.world.ask(gpus)
        return leases

    def give_back(self, leases: list[Lease]) -> None:
        """Release a GPU, and report that it is free, so that the next in the queue gets it."""
        lease = leases.pop()
        self.world.release(lease)
        self.world.report(lease.gpus[0].node)


def timed(action: Callable[[], object], rounds: int = ROUNDS) -> list[float]:
    """Microseconds of CPU time that each call took: other programs do not count."""
    found = []
    for _ in range(rounds):
        begun = time.process_time()
        action()
        found.append((time.process_time() - begun) * 1e6)
    return found


def measure(nodes: int, waiting: int) -> dict[str, float]:
    """Median microseconds of each decision at one size."""
    fleet = Fleet(nodes)
    world = fleet.world
    found = {"grant of 1 GPU, all free": fleet.grants()}
    leases = fleet.fill(waiting)
    found["tick"] = timed(lambda: world.turn(Ticked(cause="tick", since_last_s=0.25)))
    found["report of a node that changes nothing"] = timed(lambda: world.report(fleet.names[0]))
    found["renewal"] = timed(lambda: world.renew(leases[0]))
    found["request that must wait"] = timed(lambda: world.ask(1))
    renewals = [
        RenewalRequested(cause=f"renew-{number}", lease_id=lease.id, fencing_token=lease.fencing_token)
        for number, lease in enumerate(itertools.islice(itertools.cycle(leases), BATCH))
    ]
    found["500 renewals in one turn"] = timed(lambda: world.turn(*renewals), 5)
    found["release, report, grant to the next"] = timed(lambda: fleet.give_back(leases), 8)
    shared = by_fair_share(nodes, waiting)
    found["release, report, grant by fair share"] = shared["grant"]
    found[MANY_USERS] = shared["renewal"]
    found["report of a node while the GPUs of all others drain"] = while_others_drain(nodes)
    unusable = with_unusable_gpu(nodes, waiting)
    found["renewal, while a GPU is free that no one in the queue can use"] = unusable["renewal"]
    found["request that must wait, while a GPU is free that no one can use"] = unusable["request"]
    found["renewal, while a GPU is held for the oldest of them"] = unusable["held"]
    found["500 new requests of one kind in one turn"] = in_one_turn(nodes, waiting, [{}])
    kinds: list[dict[str, Any]] = [
        {},
        {"gpu_model": "H100"},
        {"min_free_memory_bytes": GIB},
        {"selection": Selection.LISTED, "indices": (0,)},
    ]
    found["500 new requests of four kinds in one turn"] = in_one_turn(nodes, waiting, kinds)
    return {what: statistics.median(values) for what, values in found.items()}


def growth_of_decisions(least: dict[str, float], most: dict[str, float]) -> dict[str, float]:
    """How many times as long each decision takes at the greater size; without turns of many requests, most of which are
    granted at one size and queued at the other, and without what depends on the number of users."""
    of_many = ("500 new ", MANY_USERS)
    return {what: most[what] / least[what] for what in least if not what.startswith(of_many)}


def while_others_drain(nodes: int) -> list[float]:
    """A report of a node that changes nothing there."""
    fleet = Fleet(nodes)
    leases = fleet.fill(0)
    reports = leases[-1].gpus[0].node
    for lease in leases:
        if lease.gpus[0].node != reports:
            fleet.world.release(lease)
    return timed(lambda: fleet.world.report(reports))


def by_fair_share(nodes: int, waiting: int) -> dict[str, list[float]]:
    """The same for requests of three priorities and up to 1,000 users, ordered by what these have used."""
    fleet = Fleet(nodes, fair_share=True)
    world = fleet.world
    leases = fleet.fill(0)
    for number in range(waiting):
        user = f"user {number % min(waiting, USERS)}"
        world.ask(1, user=user, priority=(Priority.NORMAL, Priority.SCAVENGE, Priority.NORMAL)[number % 3])
    found = {"grant": timed(lambda: fleet.give_back(leases), 8)}
    world = Fleet(nodes, fair_share=True).world
    fleet.world = world
    for name in fleet.names:
        world.node(name)
    leases = fleet.fill(0)
    for number in range(waiting):
        world.ask(2, user=f"user {number % min(waiting, USERS)}", node=fleet.names[0])
    fleet.give_back(leases)
    return found | {"renewal": timed(lambda: world.renew(leases[0]))}


def with_unusable_gpu(nodes: int, waiting: int) -> dict[str, list[float]]:
    """Turns while all wait for two GPUs and one is free; first for no one, then held for the oldest of them."""
    fleet = Fleet(nodes)
    world = fleet.world
    leases = fleet.fill(waiting, gpus=2)
    fleet.give_back(leases)
    found = {"renewal": timed(lambda: world.renew(leases[0])), "request": timed(lambda: world.ask(2))}
    oldest = world.ledger.queue[0][1]
    world.ledger.apply(BypassCounts(((oldest, world.policy.max_bypass),), world.at_s))
    return found | {"held": timed(lambda: world.renew(leases[0]))}


def in_one_turn(nodes: int, waiting: int, kinds: list[dict[str, Any]]) -> list[float]:
    """A turn of 500 new requests for one GPU each, half of the nodes being free and the others held; with a queue for
    a node that is held."""
    fleet = Fleet(nodes)
    world = fleet.world
    for name in fleet.names[nodes // 2 :]:
        world.lease(8, node=name)
    for _ in range(waiting):
        world.ask(8, node=fleet.names[-1])
    fleet.read()
    asked = [
        LeaseRequested(
            cause=f"new-{number}",
            lease_id=f"new-{number}",
            demand=Demand(**kinds[number % len(kinds)]),
            holder=Holder(user="ann"),
            ttl_s=60.0,
            queue=True,
        )
        for number in range(BATCH)
    ]
    return timed(functools.partial(world.turn, *asked), 1)


def begin_of_forecast(nodes: int) -> list[float]:
    """To begin a forecast of starts where each GPU runs a job and one more waits: for that the event loop waits."""
    world = Fleet(nodes).world
    for _ in range(nodes * 8 + 1):
        world.submit(timeout_s=3600.0)
    return timed(lambda: StartForecast(world.ledger, world.now, world.policy), 8)


def reserved(nodes: int, number: int) -> dict[str, float]:
    """Median microseconds of decisions where so many reservations have four nodes of five, over six weeks, for 50
    users; of requests without a time. All other GPUs are leased but for the first row, and all GPUs where none is
    reserved."""
    fleet = Fleet(nodes)
    world, names = fleet.world, fleet.names[: nodes * 4 // 5]
    entries = [_reservation(fleet, names[one % len(names)], one) for one in range(number)]
    found = {f"{number:,} reservations are read at the start": sum(timed(lambda: _put_all(world, entries), 1))}
    found["grant of 1 GPU"] = statistics.median(fleet.grants())
    renewed, *_ = [world.lease(8, node=name) for name in fleet.names[len(names) if number else 0 :]]
    for _ in range(100):
        world.ask(1, user="bob")
    found["request that must wait"] = statistics.median(timed(lambda: world.ask(1, user="bob"), 8))
    found["renewal, while all that is free is closed to who waits"] = statistics.median(
        timed(lambda: world.renew(renewed), 8)
    )
    for one in range(RESERVERS):
        world.ask(8, user=f"user {one}", node=fleet.names[-1])
    found[f"the same, while the {RESERVERS} with a reservation wait for other GPUs"] = statistics.median(
        timed(lambda: world.renew(renewed), 8)
    )
    record = next(world.ledger.queued())
    found["why one waits"] = sum(timed(lambda: explain(world.ledger, record, world.now, world.policy), 1))
    return found


def _put_all(world: World, entries: list[Reservation]) -> None:
    for entry in entries:
        world.ledger.apply(entry)


def _reservation(fleet: Fleet, node: str, number: int) -> Reservation:
    """All GPUs of a node for half an hour of the next 1,000 hours."""
    world = fleet.world
    from_at = world.now.at + timedelta(hours=1 + number * 7919 % 1000)
    return Reservation(
        id=f"reservation-{number}",
        gpus=tuple(gpu.device for gpu in world.ledger.gpus_on(node)),
        from_at=from_at,
        to_at=from_at + timedelta(minutes=30),
        user=f"user {number % RESERVERS}",
        made_at=world.now.at,
    )


def main() -> None:
    """Print the table of bench/README.md."""
    rows = [measure(nodes, waiting) for nodes, waiting in SIZES]
    sizes = " | ".join(f"{nodes * 8:,} GPUs, {waiting:,} waiting" for nodes, waiting in SIZES)
    print(f"\n| one turn with, in us | {sizes} | growth |\n|---|{'---|' * len(SIZES)}---|")
    for what, least in rows[0].items():
        figures = " | ".join(f"{row[what]:,.0f}" for row in rows)
        print(f"| {what} | {figures} | {rows[-1][what] / least:.1f} x |")
    print_reserved()


def print_reserved() -> None:
    """Print what reservations cost."""
    nodes = SIZES[-1][0]
    none, many = reserved(nodes, 0), reserved(nodes, RESERVATIONS)
    print(f"\n| one turn, {nodes * 8:,} GPUs, in us | no reservation | {RESERVATIONS:,} |\n|---|---|---|")
    for what, us in many.items():
        print(f"| {what} | {none[what]:,.0f} | {us:,.0f} |" if what in none else f"| {what} | | {us:,.0f} |")


def decisions(quick: bool) -> list[Row]:
    """The rows of the table: the decision that grows most, and 500 requests in one turn."""
    sizes = (SIZES[0], (125, 1_000)) if quick else (SIZES[0], SIZES[-1])
    least, most = (measure(*size) for size in sizes)
    size = f"{sizes[1][0] * 8:,} GPUs, {sizes[1][1]:,} waiting"
    growth = growth_of_decisions(least, most)
    rows = [
        Row(
            question=f"one decision, {size}: of the same with 8 GPUs, 10 waiting",
            formerly="1,697 x",
            target=Target(bound=2.0),
            figure=max(growth.values()),
            beside="; ".join(
                f"{what} {most[what]:,.0f} us, {times:.1f} x"
                for what, times in sorted(growth.items(), key=lambda item: -item[1])
            ),
        )
    ]
    rows.append(
        Row(
            question=f"one turn while none of {min(sizes[1][1], USERS):,} users by fair share can use a free GPU",
            formerly="",
            target=Target(bound=2.0),
            figure=most[MANY_USERS] / 1e3,
            unit="ms",
            beside=f"{least[MANY_USERS] / 1e3:.2f} ms with {sizes[0][1]} users",
        )
    )
    rows.append(
        Row(
            question=f"begin of a forecast of starts, {sizes[1][0] * 8:,} jobs run",
            target=Target(bound=5.0),
            figure=statistics.median(begin_of_forecast(sizes[1][0])) / 1e3,
            unit="ms",
        )
    )
    renewals_ms = most["500 renewals in one turn"] / 1e3
    requests_ms = Fleet(sizes[1][0]).batch_of_requests() / 1e3
    waiting = Fleet(sizes[1][0])
    waiting.fill(sizes[1][1])
    queued_ms = waiting.batch_of_requests() / 1e3
    for what, ms, formerly in (
        (f"500 renewals, {size}", renewals_ms, "37 ms"),
        (f"500 new requests, {sizes[1][0] * 8:,} GPUs, all free", requests_ms, "12,800 ms"),
        (f"500 new requests, {size}", queued_ms, ""),
    ):
        rows.append(
            Row(
                question=f"one turn of {what}",
                formerly=formerly,
                target=Target(bound=100.0),
                figure=ms,
                unit="ms",
                beside=f"{ms / BATCH * 1e3:,.0f} us each",
            )
        )
    return rows
