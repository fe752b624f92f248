"""The network between a daemon and its PostgreSQL server is cut: packets are lost, and no one says so."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import events, eventually
from tests.databases import PostgresServer
from tests.failover_pair import WITHIN_S, Load, pair
from tests.failover_pair import check as check_failover
from tests.network_namespace import Cable
from tests.system.outages import PATIENT_S, TTL_S, Clients, Holder, check, down, serves_again
from tests.system.test_database_faults import serving

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

ANSWERED_WITHIN_S = 30.0
"""What a request that cannot be recorded may take: more than `PATIENCE_S`, after which a silent server is given up."""


@pytest.fixture
def cable(postgres: PostgresServer) -> Iterator[Cable]:
    with Cable(postgres) as plugged:
        yield plugged


def test_a_daemon_that_is_cut_off_refuses_within_a_bound_and_goes_on_by_itself(
    tmp_path: Path, postgres_url: str, cable: Cable
) -> None:
    with serving(tmp_path / "x" / "d", "--database-url", cable.url(postgres_url)) as running:
        with Holder(running) as held, Clients(running) as clients:
            eventually(lambda: len(clients.released) >= 5, PATIENT_S, running.story)
            cable.pull()
            eventually(down(running, "ledger"), PATIENT_S, running.story)
            begun_s = time.monotonic()
            while time.monotonic() < begun_s + TTL_S:
                asked_s = time.monotonic()
                refused = running.call("POST", "/v1/leases", {})
                assert refused.problem() == (503, "unavailable")
                assert int(refused.headers["retry-after"]) >= 1
                assert time.monotonic() - asked_s < ANSWERED_WITHIN_S
                assert running.call("GET", "/healthz").status == 200
            cable.plug()
            serves_again(running, clients, held)
        clients.granted[held.lease["id"]] = held.lease
        check(clients)


@pytest.mark.parametrize("rounds", [1, pytest.param(20, marks=[pytest.mark.soak, pytest.mark.timeout(3000)])])
def test_a_short_cut_costs_nothing_but_time(tmp_path: Path, postgres_url: str, cable: Cable, rounds: int) -> None:
    with serving(tmp_path / "x" / "d", "--database-url", cable.url(postgres_url)) as running:
        with Holder(running) as held, Clients(running) as clients:
            for number in range(rounds):
                eventually(lambda: len(clients.released) >= 5, PATIENT_S, running.story)
                cable.pull()
                # Shorter than any patience, about as long as the server keeps the lock, and longer than that.
                clients.stop.wait((1.0, 3.0, 5.0)[number % 3])
                cable.plug()
                serves_again(running, clients, held)
        clients.granted[held.lease["id"]] = held.lease
        check(clients)


def test_the_standby_takes_over_from_a_writer_that_is_cut_off_and_that_steps_down(
    tmp_path: Path, postgres_url: str, cable: Cable
) -> None:
    with pair(tmp_path, postgres_url, first=cable.url(postgres_url)) as two:
        with Load(two.urls) as load:
            load.everyone_goes_on(two.story)
            cut_off = two.writer
            assert cut_off.process is not None
            since_s = time.monotonic()
            cable.pull()
            eventually(lambda: two.standby.answers("/readyz"), WITHIN_S, two.story)
            two.swap()
            load.everyone_goes_on(two.story)
            print(f"nobody was answered for {load.seen.gap_s(since_s, time.monotonic()):.2f} s")
            assert cut_off.process.poll() is None, "it cannot know yet"
            assert cut_off.call("POST", "/v1/leases", {}).status == 503
            cable.plug()
            assert cut_off.process.wait(WITHIN_S) == 1
            printed = cut_off.output.read_text().lower()
            assert "another daemon has taken over" in printed
            assert "traceback" not in printed, printed[-4000:]
            load.everyone_goes_on(two.story)
        check_failover(events(two.writer), load)
