"""A guard of what the table of `make bench` shows, short and by CPU time, which other programs hardly change.

A bound is about 1.6 times what a quiet machine shows. If you make something faster, lower it.
"""

from __future__ import annotations

import socket
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import decisions, idle, long_polls, node_reports
from bench.clients import http_answer, post
from bench.daemon import InstalledDaemon, installed
from bench.peers.empty_endpoint import empty_endpoint
from bench.requests import CLIENTS, Contender, Round, in_turns, lease_of
from bench.table.load import cpu_s

pytestmark = [pytest.mark.slow, pytest.mark.alone]

RENEWAL_CPU, LEASE_CPU, EXCHANGE_CPU = 2.8, 9.5, 10.0
"""CPU time of the daemon for a renewal, for one request of a lease (acquire or release), and for an exchange with a
node when nothing changes, in multiples of a request to an empty FastAPI endpoint."""
GROWTH = 4.0
"""What a decision may take with 1,000 GPUs and 1,000 waiting, in multiples of the same with 8 GPUs and 10 waiting."""
IDLE_REQUESTS, IDLE_MIB = 16.0, 125.0
"""Of daemon, worker and probe with 8 GPUs: CPU time, in rare requests to an empty endpoint a second, and PSS."""
LONG_POLL_KIB, LONG_POLL_REQUESTS = 27.0, 16.0
"""Of each of 500 waiting clients with its lease, and the CPU time of all of them, in rare requests a second."""
POLLS, POLLS_S, IDLE_S = 500, 12.0, 15.0
RARE_S = 0.1
"""How often a rare request comes. What works seldom finds cold caches, as an idle daemon does, and on a machine that is
shared that may cost three times as much at one hour as at another."""
NODES, NODES_S = 100, 8.0


@pytest.fixture
def running(tmp_path: Path) -> Iterator[InstalledDaemon]:
    """An executed daemon with 128 simulated GPUs."""
    with installed(tmp_path, "--simulate", "128") as found:
        yield found


def cpu_us(rounds: list[Round]) -> float:
    return statistics.median(one.cpu_us for one in rounds)


@pytest.mark.parametrize(("pattern", "bound"), [("renewals", RENEWAL_CPU), ("leases", LEASE_CPU)])
def test_a_durable_request_costs_a_few_empty_ones(
    running: InstalledDaemon, tmp_path: Path, pattern: str, bound: float
) -> None:
    with empty_endpoint(lease_of(running), tmp_path) as (port, pid):
        contenders = {"ours": Contender(pattern, running.port, running.pid), "empty": Contender(pattern, port, pid)}
        found = in_turns(contenders, CLIENTS, quick=True)
    times = cpu_us(found["ours"]) / cpu_us(found["empty"])
    assert times < bound, f"{cpu_us(found['ours']):.0f} us of CPU are {times:.1f} empty requests"


def test_a_decision_takes_as_long_however_many_gpus_and_requests_there_are() -> None:
    least, most = decisions.measure(1, 10), decisions.measure(125, 1_000)
    growth = decisions.growth_of_decisions(least, most)
    assert {what: times for what, times in growth.items() if times >= GROWTH} == {}


@dataclass(frozen=True)
class Waiting:
    """What three daemons pay that do next to nothing."""

    percent: dict[str, float]
    mib: dict[str, float]
    """Of an idle host."""
    polls: long_polls.Cost
    """Of clients that wait."""
    exchange_us: float
    empty_us: float
    """CPU time of an exchange with a node, and of an empty request."""
    rare_us: float
    """CPU time of an empty request that comes each `RARE_S`."""

    def rare_requests(self, percent: float) -> float:
        """So much of a core, in rare requests a second."""
        return percent / 100 * 1e6 / self.rare_us


def rare_request_us(directory: Path, seconds: float) -> float:
    """CPU time of a request to an empty endpoint that has nothing else to do."""
    with (
        empty_endpoint(b"{}", directory) as (port, pid),
        socket.create_connection(("127.0.0.1", port)) as connection,
    ):
        for _ in range(10):
            ask(connection)
        count, before_s = round(seconds / RARE_S), cpu_s(pid)
        for _ in range(count):
            time.sleep(RARE_S)
            ask(connection)
        return (cpu_s(pid) - before_s) / count * 1e6


def ask(connection: socket.socket) -> None:
    """One request and its answer."""
    connection.sendall(post("/v1/leases/one/renew", {"token": 1}))
    received = b""
    while http_answer(received) is None:
        received += connection.recv(4096)


@pytest.fixture(scope="module")
def waiting(tmp_path_factory: pytest.TempPathFactory) -> Waiting:
    """All at the same time, because each sleeps for most of it; the empty requests are measured while nodes join and
    clients come. Memory of the idle host is read at the end: pages that it shares with another daemon count in part."""
    place = tmp_path_factory.mktemp
    with installed(place("idle"), "--simulate", str(idle.GPUS)) as host, ThreadPoolExecutor(4) as pool:
        percent = pool.submit(idle.percent_of_a_core, host, IDLE_S)
        rare = pool.submit(rare_request_us, place("rare"), IDLE_S)
        with (
            installed(place("nodes"), "--no-worker") as other,
            installed(place("polls"), "--simulate", str(long_polls.GPUS)) as queue,
            empty_endpoint(b'{"id": "one", "token": 1, "state": "active"}', place("empty")) as (port, pid),
        ):
            reports = pool.submit(node_reports.measure, other.port, other.pid, NODES, NODES_S)
            empty = pool.submit(in_turns, {"empty": Contender("renewals", port, pid)}, CLIENTS, quick=True)
            polls = long_polls.measure(queue, POLLS, POLLS_S)
            exchange_us, empty_us = reports.result().cpu_s * 1e6, cpu_us(empty.result()["empty"])
        return Waiting(percent.result(), idle.mebibytes(host), polls, exchange_us, empty_us, rare.result())


def test_an_exchange_with_a_node_costs_a_few_empty_requests(waiting: Waiting) -> None:
    times = waiting.exchange_us / waiting.empty_us
    assert times < EXCHANGE_CPU, f"{waiting.exchange_us:.0f} us of CPU are {times:.1f} empty requests"


def test_an_idle_host_pays_next_to_nothing(waiting: Waiting) -> None:
    assert set(waiting.percent) == {"daemon", "worker", "probe"}
    assert waiting.rare_requests(sum(waiting.percent.values())) < IDLE_REQUESTS, waiting
    assert sum(waiting.mib.values()) < IDLE_MIB, waiting.mib


def test_a_client_that_waits_costs_little(waiting: Waiting) -> None:
    assert waiting.polls.bytes_each / 1024 < LONG_POLL_KIB, waiting.polls
    assert waiting.rare_requests(waiting.polls.percent) < LONG_POLL_REQUESTS, waiting
