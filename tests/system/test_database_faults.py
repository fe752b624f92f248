"""The database is away for a while: full, locked, moved, or failing. No lease is lost, and nothing is done twice."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease_server.store.disk_reserve import LOG_RESERVE_BYTES
from tests.daemon import PATIENT, DaemonProcess, eventually
from tests.small_disk import fill, mounted
from tests.system.outages import TTL_S, Clients, Holder, check, down, serves_again, still_serves

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

SIZE_BYTES = 64 * 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 MiB of its own."""
    with mounted(tmp_path / "disk", SIZE_BYTES) as place:
        yield place


@contextlib.contextmanager
def serving(data_dir: Path, *options: str) -> Iterator[DaemonProcess]:
    process = DaemonProcess(data_dir, "--simulate", "8", *options, environment=PATIENT)
    # What it prints goes elsewhere: the directory may be full.
    process.output = data_dir.parent.parent / "daemon.log"
    try:
        yield process.start()
    finally:
        process.stop()


@pytest.mark.parametrize("crash", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_full_disk_costs_no_one_a_lease(small_disk: Path, crash: bool) -> None:
    with serving(small_disk / "d") as running:
        with Holder(running) as held, Clients(running) as clients:
            eventually(lambda: len(clients.released) >= 20, 60, running.story)
            fill(small_disk)
            eventually(lambda: clients.refused, 60, running.story)
            before = clients.refused
            eventually(lambda: clients.refused > before + 20, 60, running.story)
            still_serves(running, held)
            held.renews(TTL_S + 1)
            fill(small_disk)  # whatever was freed meanwhile
            if crash:
                running.kill()
            (small_disk / "ballast").unlink()
            if crash:
                running.start()
            serves_again(running, clients, held, releases=20)
            held.renews(1.0)
        clients.granted[held.lease["id"]] = held.lease
        check(clients)


@pytest.mark.budget(90)
def test_a_job_that_prints_in_a_loop_is_cancelled_on_a_full_disk(small_disk: Path) -> None:
    # It ends by itself should the test fail: until then it takes a whole core.
    loop = (
        "import sys, time\nuntil_s = time.monotonic() + 600\nwhile time.monotonic() < until_s:\n"
        " try: sys.stdout.write('x' * 4096); sys.stdout.flush()\n except OSError: pass"
    )
    with serving(small_disk / "d") as running:
        lease = running.call("POST", "/v1/leases", {"ttl_s": 600}).json
        body = {"command": [sys.executable, "-c", loop], "launcher": "plain"}
        job = running.call("POST", "/v1/jobs", body).json["id"]
        eventually(lambda: running.call("GET", f"/v1/jobs/{job}").json["state"] == "running", 60, running.story)
        log = running.data_dir / "gpulease.db-wal"
        eventually(lambda: log.stat().st_blocks * 512 >= LOG_RESERVE_BYTES, 60, running.story)
        fill(small_disk)
        large = {"label": "x" * 4096}
        eventually(lambda: running.call("POST", "/v1/leases", large).status == 503, 240, running.story)
        fill(small_disk)
        assert running.answers("/readyz"), "the ledger is in its reserve"
        assert running.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]}).status == 200
        assert running.call("POST", f"/v1/jobs/{job}/cancel", {"grace_s": 0.5}).status == 200
        eventually(lambda: running.call("GET", f"/v1/jobs/{job}").json["state"] == "cancelled", 60, running.story)
        (small_disk / "ballast").unlink()
        eventually(lambda: running.call("POST", "/v1/leases", {}).status in (201, 202), 60, running.story)


@pytest.mark.soak
def test_a_database_that_another_program_locks_is_waited_for(tmp_path: Path) -> None:
    with serving(tmp_path / "x" / "d") as running:
        with Holder(running) as held, Clients(running) as clients:
            eventually(lambda: len(clients.released) >= 5, 60, running.story)
            with contextlib.closing(sqlite3.connect(running.data_dir / "gpulease.db", isolation_level=None)) as other:
                other.execute("BEGIN EXCLUSIVE")
                eventually(down(running, "locked"), 60, running.story)
                still_serves(running, held)
                held.renews(TTL_S)
                other.execute("ROLLBACK")
            serves_again(running, clients, held)
        clients.granted[held.lease["id"]] = held.lease
        check(clients)


@pytest.mark.soak
def test_a_database_that_is_moved_away_is_not_written_where_no_one_reads_it(tmp_path: Path) -> None:
    place, away = tmp_path / "db", tmp_path / "away"
    place.mkdir()
    with serving(tmp_path / "x" / "d", "--database-url", f"sqlite:///{place / 'gpulease.db'}") as running:
        with Holder(running) as held, Clients(running) as clients:
            eventually(lambda: len(clients.released) >= 5, 60, running.story)
            place.rename(away)
            eventually(down(running, "cannot be found"), 60, running.story)
            still_serves(running, held)
            held.renews(TTL_S + 1)
            away.rename(place)
            serves_again(running, clients, held)
        clients.granted[held.lease["id"]] = held.lease
        check(clients)


@pytest.mark.parametrize("crash", [True, pytest.param(False, marks=pytest.mark.soak)])
def test_writes_that_fail_are_tried_again_until_they_succeed(tmp_path: Path, crash: bool) -> None:
    with serving(tmp_path / "x" / "d") as running:
        assert running.process is not None
        with Holder(running) as held, Clients(running) as clients:
            eventually(lambda: len(clients.released) >= 5, 60, running.story)
            # No file may grow: a write fails in the kernel, as on a broken disk.
            pid = running.process.pid
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1, resource.RLIM_INFINITY))
            eventually(down(running, "I/O"), 60, running.story)
            still_serves(running, held)
            held.renews(TTL_S + 1)
            if crash:
                running.kill()
                running.start()
            else:
                limit = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
                resource.prlimit(pid, resource.RLIMIT_FSIZE, limit)
            serves_again(running, clients, held)
        clients.granted[held.lease["id"]] = held.lease
        check(clients)


def test_an_older_copy_is_not_taken_for_the_database(tmp_path: Path) -> None:
    place, away, old = tmp_path / "db", tmp_path / "away", tmp_path / "old.db"
    place.mkdir()
    with serving(tmp_path / "x" / "d", "--database-url", f"sqlite:///{place / 'gpulease.db'}") as running:
        source, copy = sqlite3.connect(place / "gpulease.db"), sqlite3.connect(old)
        source.backup(copy)
        source.close()
        copy.close()
        held = Holder(running).lease
        place.rename(away)
        place.mkdir()
        old.rename(place / "gpulease.db")
        running.call("POST", "/v1/leases", {})
        eventually(down(running, "older than this daemon's answers"), 60, running.story)
        assert running.call("GET", f"/v1/leases/{held['id']}").json["token"] == held["token"]
        place.rename(old)
        away.rename(place)
        eventually(lambda: running.answers("/readyz"), 60, running.story)
        assert running.call("POST", f"/v1/leases/{held['id']}/renew", {"token": held["token"]}).status == 200


@pytest.mark.soak
def test_an_outage_fills_no_log(tmp_path: Path) -> None:
    place, away = tmp_path / "db", tmp_path / "away"
    place.mkdir()
    with serving(tmp_path / "x" / "d", "--database-url", f"sqlite:///{place / 'gpulease.db'}") as running:
        place.rename(away)
        running.call("POST", "/v1/leases", {})
        eventually(down(running, "cannot be found"), 60, running.story)
        before = running.output.read_bytes().count(b"\n")
        for _ in range(200):
            assert running.call("POST", "/v1/leases", {}).status == 503
            running.call("GET", "/v1/events")
        assert running.output.read_bytes().count(b"\n") - before < 20, running.story()
        away.rename(place)
        eventually(lambda: running.answers("/readyz"), 60, running.story)
