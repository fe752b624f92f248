"""A daemon keeps its database to its bounds, and says so when a client asks for what is gone."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import func, select

from gpulease import AsyncClient, Client
from gpulease_protocol.errors import EventsPruned, NotFound
from gpulease_server.store import tables
from gpulease_server.store.integrity_check import check_database
from gpulease_server.store.ledger_store import Store
from gpulease_server.store.retention import ALWAYS_KEPT
from tests.daemon import PATIENT, DaemonProcess, eventually
from tests.store.old_records import count, ended_lease, event, job, metrics, put

pytestmark = pytest.mark.slow

EACH = 3 * ALWAYS_KEPT
EVENTS = 12 * ALWAYS_KEPT
"""They go last, 500 at a time: enough that a kill after the first jobs comes before all are gone, however late."""
WITHIN_S = 120


def past(url: str) -> None:
    """Leases, jobs with a lease and metrics, and events: of yesterday, and too many."""
    store, at = Store(url), datetime.now(UTC) - timedelta(days=1)
    moments = [at + timedelta(seconds=number) for number in range(EACH)]
    of_jobs = [ended_lease(10 * n + 3, one, f"job-{10 * n + 2:016x}") for n, one in enumerate(moments)]
    put(store, (ended_lease(10 * n + 1, one) for n, one in enumerate(moments)))
    put(store, (job(10 * n + 2, one) for n, one in enumerate(moments)))
    put(store, of_jobs)
    metrics(store, (one.lease.id for one in of_jobs))
    put(store, (event(n + 1, at) for n in range(EVENTS)))
    store.close()


def gone(store: Store) -> int:
    """Up to which event they are gone."""
    with store.engine.connect() as connection:
        return connection.scalar(select(tables.pruned.c.seq)) or 0


def wrong(url: str) -> list[str]:
    return [found for found in check_database(url) if "fsync" not in found]


def test_a_daemon_prunes_what_is_too_much_though_it_is_killed_meanwhile(tmp_path: Path, sqlite_url: str) -> None:
    past(sqlite_url)
    store = Store(sqlite_url)
    bounds = {"GPULEASE_KEEP_ENDED": str(ALWAYS_KEPT), "GPULEASE_KEEP_EVENTS": str(ALWAYS_KEPT)}
    running = DaemonProcess(tmp_path / "d", "--no-worker", "--database-url", sqlite_url, environment=bounds)
    try:
        running.start()
        eventually(lambda: count(store)["job"] < EACH, WITHIN_S, running.story)
        running.kill()
        assert wrong(sqlite_url) == []
        assert count(store)["event"] > ALWAYS_KEPT, "the kill came too late to show anything"
        running.start()
        eventually(lambda: gone(store) >= EVENTS - ALWAYS_KEPT, WITHIN_S, running.story)
        eventually(lambda: count(store)["job"] == ALWAYS_KEPT, WITHIN_S, running.story)
        told_of_the_gap(running)
        newest = newest_seq(store)
        running.stop()
        assert wrong(sqlite_url) == []
        running.start()
        with running.client() as client:
            client.lease_by_id(ended_lease(10 * EACH - 9, datetime.now(UTC)).lease.id)  # the newest one is there
            assert [one.seq for one in client.events(newest - 1)] == [newest]
        assert store.load().next_seq > newest
    finally:
        running.stop()
        store.close()


def newest_seq(store: Store) -> int:
    with store.engine.connect() as connection:
        return connection.scalar(select(func.max(tables.event.c.seq))) or 0


def told_of_the_gap(running: DaemonProcess) -> None:
    """By curl, by both clients, and by the document."""
    page = running.call("GET", "/v1/events?limit=2").json
    assert page["items"][0]["seq"] == page["pruned_seq"] + 1
    refused = running.call("GET", f"/v1/events?after={page['pruned_seq'] - 1}")
    assert refused.problem() == (410, "events_pruned")
    assert refused.json["pruned_seq"] == page["pruned_seq"]
    assert running.call("GET", f"/v1/events?after={page['pruned_seq']}").status == 200
    with running.client() as client:
        kept = [one.seq for one in client.events()]
        assert kept == list(range(kept[0], kept[0] + len(kept)))
        with pytest.raises(EventsPruned) as pruned:
            list(client.events(after=7))
        assert [one.seq for one in client.events(after=pruned.value.pruned_seq)] == kept
        old = ended_lease(1, datetime.now(UTC)).lease.id
        with pytest.raises(NotFound, match="pruned"):
            client.lease_by_id(old)
        for path in (f"/v1/leases/{old}/explain", f"/v1/jobs/job-{2:016x}", f"/v1/jobs/job-{2:016x}/metrics"):
            missing = running.call("GET", path)
            assert missing.problem() == (404, "not_found")
            assert "pruned" in missing.json["remedy"]
    assert asyncio.run(refused_without_waiting(running)) == page["pruned_seq"]
    document = running.call("GET", "/openapi.json").json
    assert "events_pruned" in document["paths"]["/v1/events"]["get"]["responses"]["410"]["description"]
    assert document["components"]["schemas"]["EventPage"]["properties"]["pruned_seq"]["description"]


async def refused_without_waiting(running: DaemonProcess) -> int:
    """What AsyncClient says."""
    async with AsyncClient(running.url) as client:
        try:
            async for _ in client.events(after=7):
                pass
        except EventsPruned as error:
            return error.pruned_seq
    return 0


def test_a_client_without_a_past_follows_from_the_beginning(tmp_path: Path) -> None:
    running = DaemonProcess(tmp_path / "d", "--simulate", "2", environment=PATIENT)
    try:
        running.start()
        with Client(running.url) as client, client.lease(1, wait_s=60):
            pass
        page = running.call("GET", "/v1/events").json
        assert (page["items"][0]["seq"], page["pruned_seq"]) == (1, 0)
    finally:
        running.stop()


@pytest.mark.parametrize("option", ["--keep-events=999", "--keep-ended=10", "--keep-days=0"])
def test_less_than_the_ledger_has_in_memory_cannot_be_kept(tmp_path: Path, option: str) -> None:
    running = DaemonProcess(tmp_path / "d", option)
    with pytest.raises(AssertionError, match=r"must be [0-9]+ to"):
        running.start()
    assert running.process is not None
    assert running.process.wait(60) == 2
