"""The database is away for a while: full, locked, moved, or failing. No lease is lost, and nothing is done twice."""

from __future__ import annotations

import contextlib
import resource
import sqlite3
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import Answer, DaemonProcess, events, eventually
from tests.system.test_storm import check_events

pytestmark = [pytest.mark.xdist_group("machine"), pytest.mark.timeout(300)]

CLIENTS = 8
SIZE_BYTES = 24 * 2**20
TTL_S = 6.0
"""Of the lease that is held all the time: shorter than the outages, so that a holder who is not heard would lose it."""
PATIENT_S = 60.0


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


class Clients:
    """Threads that ask, renew and release through plain HTTP, and write down what they were told.

    Each sends a request that was answered with 503, or not at all, again under the same key.
    """

    def __init__(self, running: DaemonProcess) -> None:
        self.running = running
        self.granted: dict[str, dict[str, Any]] = {}
        self.released: set[str] = set()
        self.refused = 0
        self.renewed_in_outage = 0
        self.keys: dict[str, str] = {}
        self.wrong: list[str] = []
        self.stop = threading.Event()
        self.threads = [threading.Thread(target=self._live) for _ in range(CLIENTS)]

    def __enter__(self) -> Clients:
        for thread in self.threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop.set()
        for thread in self.threads:
            thread.join(PATIENT_S)
            assert not thread.is_alive(), "a client waits for ever"

    def until_answered(self, path: str, body: object, **headers: str) -> Answer | None:
        """The first answer that is no 503; each of those must be whole and say when to come again."""
        until_s = time.monotonic() + PATIENT_S
        while time.monotonic() < until_s:
            try:
                answer = self.running.call("POST", path, body, **headers)
            except OSError:  # killed, or on its way up again
                self.stop.wait(0.05)
                continue
            if answer.status != 503:
                return answer
            self.refused += 1
            if answer.problem()[1] != "unavailable" or int(answer.headers["retry-after"]) < 1:
                self.wrong.append(f"a 503 without what it takes: {answer.content!r}")
            self.stop.wait(0.05)
        self.wrong.append(f"{path} was refused for {PATIENT_S} s")
        return None

    def _live(self) -> None:
        try:
            while not self.stop.is_set():
                self._one()
        except Exception as error:
            self.wrong.append(repr(error))

    def _one(self) -> None:
        key = uuid.uuid4().hex
        answer = self.until_answered("/v1/leases?wait_s=20", {"ttl_s": 60}, **{"Idempotency-Key": key})
        while answer is not None and answer.status == 202:  # the same key asks for the same lease
            answer = self.until_answered("/v1/leases?wait_s=20", {"ttl_s": 60}, **{"Idempotency-Key": key})
        if answer is None or answer.status != 201:
            self.wrong.append(f"asked, and answered {answer and answer.content!r}")
            return
        lease = answer.json
        self.granted[lease["id"]] = lease
        self.keys[key] = lease["id"]
        for _ in range(3):
            self.stop.wait(0.05)
            renewed = self.until_answered(f"/v1/leases/{lease['id']}/renew", {"token": lease["token"]})
            if renewed is None or renewed.status != 200:
                self.wrong.append(f"a lease was lost: {renewed and renewed.content!r}")
                return
        done = self.until_answered(f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
        if done is None or done.status != 200:
            self.wrong.append(f"not released: {done and done.content!r}")
        else:
            self.released.add(lease["id"])


def check(clients: Clients) -> None:
    """What was acknowledged is there, and nothing is there twice."""
    running = clients.running
    assert not clients.wrong, (clients.wrong[:5], running.story())
    log = events(running)
    check_storm = [event for event in log if not (event["kind"] == "lease.ended" and not event["gpus"])]
    held = holders_at_the_end(check_storm)
    granted = {event["lease_id"]: event for event in log if event["kind"] == "lease.granted"}
    ended = {event["lease_id"]: event for event in log if event["kind"] == "lease.ended"}
    for lease_id, lease in clients.granted.items():
        assert granted[lease_id]["token"] == lease["token"]
        assert granted[lease_id]["gpus"] == [gpu["uuid"] for gpu in lease["gpus"]]
    for lease_id in clients.released:
        assert ended[lease_id]["reason"] == "released"
    assert not [event for event in log if event["kind"] == "lease.lost"], "the database was away, and a lease was lost"
    assert set(granted) == set(clients.granted), "a request that was sent again was granted a second time"
    assert held <= set(clients.granted)


def holders_at_the_end(log: list[dict[str, Any]]) -> set[str]:
    """Leases that hold GPUs at the end of the log; no GPU was ever in two."""
    ended = {event["lease_id"] for event in log if event["kind"] == "lease.ended"}
    held = {event["lease_id"] for event in log if event["kind"] == "lease.granted"} - ended
    closing = [
        {**event, "kind": "lease.ended", "seq": len(log) + 1 + number}
        for number, event in enumerate(e for e in log if e["kind"] == "lease.granted" and e["lease_id"] in held)
    ]
    check_events([*log, *closing])
    return held


def down(running: DaemonProcess, words: str) -> Callable[[], bool]:
    """True once `/readyz` says that nothing can be recorded, with these words."""

    def look() -> bool:
        answer = running.call("GET", "/readyz")
        return answer.status == 503 and words in answer.json["detail"]

    return look


class Holder:
    """Somebody who holds a lease all the time and renews it from a thread of his own."""

    def __init__(self, running: DaemonProcess) -> None:
        self.running = running
        self.lease: dict[str, Any] = running.call("POST", "/v1/leases?wait_s=20", {"ttl_s": TTL_S}).json
        assert self.lease["state"] == "active"
        self.renewals = 0
        self.lost: Answer | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._keep)

    def __enter__(self) -> Holder:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join(PATIENT_S)
        assert not self._thread.is_alive()

    def _keep(self) -> None:
        path, proof = f"/v1/leases/{self.lease['id']}/renew", {"token": self.lease["token"]}
        while not self._over.wait(0.2):
            with contextlib.suppress(OSError):  # killed, or on its way up again
                answer = self.running.call("POST", path, proof)
                self.renewals += answer.status == 200
                if answer.status not in (200, 503):
                    self.lost = answer
                    return

    def renews(self, for_s: float) -> None:
        """For so long, and once more: it is heard, as it must be to trust its lease."""
        until_s = time.monotonic() + for_s
        while (left_s := until_s - time.monotonic()) > 0 or left_s > -0.5:
            before = self.renewals
            eventually(lambda before=before: self.lost is not None or self.renewals > before, 25, self.running.story)
            assert self.lost is None, self.lost.content


def still_serves(running: DaemonProcess, held: Holder) -> None:
    """What must work while nothing can be recorded."""
    assert running.call("GET", "/healthz").status == 200
    assert running.call("GET", "/v1/gpus").status == 200
    assert running.call("GET", f"/v1/leases/{held.lease['id']}").json["state"] == "active"
    refused = running.call("POST", "/v1/leases", {})
    assert refused.problem() == (503, "unavailable")
    assert int(refused.headers["retry-after"]) >= 1


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
            eventually(lambda: running.answers("/readyz"), 30, running.story)
            held.renews(1.0)
            so_far = len(clients.released)
            eventually(lambda: len(clients.released) >= so_far + 20, 60, running.story)
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
            eventually(lambda: running.answers("/readyz"), 40, running.story)
            so_far = len(clients.released)
            eventually(lambda: len(clients.released) >= so_far + 5, 60, running.story)
            held.renews(0.1)
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
            eventually(lambda: running.answers("/readyz"), 30, running.story)
            so_far = len(clients.released)
            eventually(lambda: len(clients.released) >= so_far + 5, 60, running.story)
            held.renews(0.1)
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
            eventually(lambda: running.answers("/readyz"), 30, running.story)
            so_far = len(clients.released)
            eventually(lambda: len(clients.released) >= so_far + 5, 60, running.story)
            held.renews(0.1)
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
