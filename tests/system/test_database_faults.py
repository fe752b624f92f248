"""The database is away for a while: full, locked, moved, or failing. No lease is lost, and nothing is done twice."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess, events, eventually
from tests.system.outages import TTL_S, Clients, Holder, check, down, serves_again, still_serves

pytestmark = [pytest.mark.xdist_group("machine"), pytest.mark.timeout(300)]

SIZE_BYTES = 24 * 2**20


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 24 MiB of its own."""
    place = tmp_path / "disk"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={SIZE_BYTES}", "gpulease-test", str(place)]
    done = subprocess.run(mount, check=False, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"a small tmpfs takes the right to mount one: {done.stderr.strip()}")
    try:
        yield place
    finally:
        subprocess.run(["umount", "--lazy", str(place)], check=True)


def fill(place: Path) -> None:
    """Write until not one byte more fits."""
    with (place / "ballast").open("ab", buffering=0) as ballast:
        for size in (2**16, 2**12, 1):
            with contextlib.suppress(OSError):
                while ballast.write(b"x" * size):
                    pass


@contextlib.contextmanager
def serving(data_dir: Path, *options: str) -> Iterator[DaemonProcess]:
    process = DaemonProcess(data_dir, "--simulate", "8", *options)
    # What it prints goes elsewhere: the directory may be full.
    process.output = data_dir.parent.parent / "daemon.log"
    try:
        yield process.start()
    finally:
        process.stop()


@pytest.mark.parametrize("crash", [False, pytest.param(True, marks=pytest.mark.soak)])
def test_a_full_disk_costs_nobody_a_lease(small_disk: Path, crash: bool) -> None:
    with serving(small_disk / "d") as running:
        with Holder(running) as held, Clients(running) as clients:
            eventually(lambda: len(clients.released) >= 20, 60, running.story)
            fill(small_disk)
            eventually(down(running, "full"), 60, running.story)
            before = clients.refused
            eventually(lambda: clients.refused > before + 20, 30, running.story)
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
        if not crash:
            assert [event for event in events(running) if event["kind"] == "ledger.recovered"]


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
def test_a_database_that_is_moved_away_is_not_written_where_nobody_reads_it(tmp_path: Path) -> None:
    place, away = tmp_path / "db", tmp_path / "away"
    place.mkdir()
    with serving(tmp_path / "x" / "d", "--database-url", f"sqlite:///{place / 'gpulease.db'}") as running:
        with Holder(running) as held, Clients(running) as clients:
            eventually(lambda: len(clients.released) >= 5, 60, running.story)
            place.rename(away)
            eventually(down(running, "not there"), 60, running.story)
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
        eventually(down(running, "older than what was answered"), 30, running.story)
        assert running.call("GET", f"/v1/leases/{held['id']}").json["token"] == held["token"]
        place.rename(old)
        away.rename(place)
        eventually(lambda: running.answers("/readyz"), 30, running.story)
        assert running.call("POST", f"/v1/leases/{held['id']}/renew", {"token": held["token"]}).status == 200


@pytest.mark.soak
def test_an_outage_fills_no_log(tmp_path: Path) -> None:
    place, away = tmp_path / "db", tmp_path / "away"
    place.mkdir()
    with serving(tmp_path / "x" / "d", "--database-url", f"sqlite:///{place / 'gpulease.db'}") as running:
        place.rename(away)
        running.call("POST", "/v1/leases", {})
        eventually(down(running, "not there"), 30, running.story)
        before = running.output.read_bytes().count(b"\n")
        for _ in range(200):
            assert running.call("POST", "/v1/leases", {}).status == 503
            running.call("GET", "/v1/events")
        assert running.output.read_bytes().count(b"\n") - before < 20, running.story()
        away.rename(place)
        eventually(lambda: running.answers("/readyz"), 30, running.story)
