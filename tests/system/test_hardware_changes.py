"""The hardware changes while the daemon runs: promises 3, 4, 5 and 10, from outside."""

from __future__ import annotations

import http.client
import json
import random
import statistics
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import USUAL, DaemonProcess, daemon, eventually
from tests.system.hardware import BAD, HANGS_S, Hardware

MAX_OBSERVATION_AGE_S = 0.5
READ_S = 2.0
"""What a reading may take (`--probe-deadline-s`). One that was asked for counts as recent although it took so long."""
POLL_S = 1.0
"""Time between two readings when no one asks for one (`WorkerSettings.poll_s`)."""
SLACK_S = 0.6
"""What a reading and its report may take on a machine with other work."""
UNKNOWN_WITHIN_S = 2.0 + SLACK_S
"""How long a reading may take, and what its report may."""
CLOCKS_S = 0.01
"""How far apart the daemon's wall clock and this process's monotonic one may be read."""
CHANGES = 500
NODE = "n1"


class Connection:
    """A raw keep-alive connection: what a call takes here is what the daemon takes, and little else."""

    def __init__(self, running: DaemonProcess) -> None:
        self.wire = http.client.HTTPConnection("127.0.0.1", running.port, timeout=60)

    def call(self, method: str, path: str, body: Any = None) -> tuple[int, Any]:
        payload = None if body is None else json.dumps(body).encode()
        self.wire.request(method, path, payload, {"Content-Type": "application/json"})
        answer = self.wire.getresponse()
        content = answer.read()
        return answer.status, json.loads(content)

    def __enter__(self) -> Connection:
        return self

    def __exit__(self, *_: object) -> None:
        self.wire.close()


@pytest.fixture
def hardware(tmp_path: Path) -> Hardware:
    return Hardware(tmp_path / "hardware.json", gpus=6)


@pytest.fixture
def running(tmp_path: Path, hardware: Hardware) -> Iterator[DaemonProcess]:
    with daemon(tmp_path, "--simulate", str(hardware.path), "--node", NODE, **USUAL) as process:
        yield process


def gpu(connection: Connection, index: int) -> dict[str, Any]:
    shown: dict[str, Any] = connection.call("GET", "/v1/gpus")[1]["items"][index]
    return shown


def becomes(connection: Connection, index: int, state: str, changed_s: float) -> float:
    """Seconds from the change until `GET /v1/gpus` shows the state."""
    eventually(lambda: gpu(connection, index)["state"] == state, 30)
    return time.monotonic() - changed_s


@pytest.mark.alone
@pytest.mark.budget(25)
def test_what_changes_on_the_hardware_is_shown_within_two_polls(running: DaemonProcess, hardware: Hardware) -> None:
    with Connection(running) as connection:

        def late() -> list[str]:
            """The states that were shown too late."""
            found = []
            for wrong, state in [
                ({"processes": [{"pid": 3999999}]}, "foreign"),
                ({"health": "lost"}, "unhealthy"),
                ({"compute_mode": "prohibited"}, "prohibited"),
                (None, "free"),
                ({"health": "xid:79"}, "unhealthy"),
                (None, "free"),
            ]:
                hardware.wrong = {} if wrong is None else {3: wrong}
                found += [state] if becomes(connection, 3, state, hardware.show()) >= 2 * POLL_S + SLACK_S else []
            hardware.hang_s = HANGS_S
            # One poll until the call that hangs is made, and then the probe's deadline.
            is_late = becomes(connection, 3, "unknown", hardware.show()) >= POLL_S + UNKNOWN_WITHIN_S
            eventually(lambda: "did not answer" in (gpu(connection, 3)["reason"] or ""), 30)
            hardware.hang_s = 0.0
            becomes(connection, 3, "free", hardware.show())
            return [*found, "unknown"] if is_late else found

        # What the machine delays once it does not delay three times.
        assert not (late() and late() and (found := late())), found


@dataclass
class Grant:
    """A lease as it was granted and given back, with every time on the monotonic clock."""

    lease_id: str
    gpus: set[str]
    at_s: float
    ended_s: float = float("inf")


@dataclass
class Clients:
    """Threads that ask, hold and give back, each with a chance of its own, until they are told to stop."""

    running: DaemonProcess
    hardware: Hardware
    stop: threading.Event = field(default_factory=threading.Event)
    quiet: threading.Event = field(default_factory=threading.Event)
    """Set while no one is to ask, so that the last reading grows old."""
    grants: list[Grant] = field(default_factory=list)
    refused: int = 0
    left_behind: int = 0
    failures: list[BaseException] = field(default_factory=list)

    def one(self, seed: int, *, queue: bool) -> None:
        chance = random.Random(seed)
        try:
            with Connection(self.running) as connection:
                while not self.stop.is_set():
                    self.ask(connection, chance, queue=queue)
        except BaseException as error:
            self.failures.append(error)
            raise

    def ask(self, connection: Connection, chance: random.Random, *, queue: bool) -> None:
        body = {"count": chance.choice((1, 1, 2)), "ttl_s": 60, "queue": queue}
        while self.quiet.is_set() and not self.stop.is_set():
            self.stop.wait(0.01)
        status, lease = connection.call("POST", "/v1/leases?wait_s=1", body)
        if status == 409:
            self.refused += 1
            self.stop.wait(chance.uniform(0, 0.05))
            return
        assert status in (201, 202), lease
        while status == 202 and not self.stop.is_set() and lease["state"] == "queued":
            _, lease = connection.call("GET", f"/v1/leases/{lease['id']}?wait_s=1&wait_while=queued")
        grant = None
        if lease["state"] == "active":
            grant = Grant(lease["id"], {item["uuid"] for item in lease["gpus"]}, mono(lease["granted_at"]))
            self.grants.append(grant)
            self.stop.wait(chance.uniform(0, 0.2))
        self.give_back(connection, chance, lease, grant)

    def give_back(self, connection: Connection, chance: random.Random, lease: Any, grant: Grant | None) -> None:
        left = None
        if grant is not None and chance.random() < 0.2:
            left = self.hardware.uuids.index(min(grant.gpus))
            self.hardware.leave_memory(left, True)
        status, ended = connection.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
        if status == 412:  # granted between the last look and the release
            _, lease = connection.call("GET", f"/v1/leases/{lease['id']}")
            status, ended = connection.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})
        assert status == 200, ended
        if grant is not None:
            grant.ended_s = mono(ended["ended_at"])
        if left is not None:
            self.left_behind += 1
            self.stop.wait(chance.uniform(0.1, 0.8))
            self.hardware.leave_memory(left, False)


def mono(text: str) -> float:
    """A recent wall-clock time of the daemon on this process's monotonic clock."""
    while True:
        before_s, wall_s, after_s = time.monotonic(), time.time(), time.monotonic()
        if after_s - before_s < CLOCKS_S / 4:  # else this process was stopped between the two
            return datetime.fromisoformat(text).timestamp() - wall_s + after_s


def change_at_random(clients: Clients, hardware: Hardware, chance: random.Random) -> None:
    """Mostly in quick succession. Now and then no one asks for a while, every GPU goes bad, and only when the last
    reading of how it was is too old does everyone ask at once: then any grant is wrong."""
    for number in range(CHANGES):
        hardware.change(chance)
        if number % 160 == 100:
            hardware.hang_s = HANGS_S
            hardware.show()
            time.sleep(2.0)
        elif number % 50 == 10:
            hardware.set_wrong({})
            time.sleep(0.3)  # everyone has GPUs
            clients.quiet.set()
            time.sleep(0.3)  # no one has, and the last to give back had the node read
            hardware.set_wrong({index: chance.choice(BAD) for index in range(len(hardware.uuids))})
            time.sleep(MAX_OBSERVATION_AGE_S + READ_S + chance.uniform(0.05, 0.3))
            clients.quiet.clear()
            time.sleep(0.1)
            hardware.set_wrong({0: chance.choice(BAD)})
        else:
            time.sleep(chance.uniform(0.002, 0.05))


def broken_promises(grants: list[Grant], hardware: Hardware) -> list[str]:
    """Every grant that no content of the file allowed, or that met another on the same GPU."""
    found = []
    last: dict[str, Grant] = {}
    for grant in sorted(grants, key=lambda grant: grant.at_s):
        former = [last[held] for held in grant.gpus if held in last]
        ended_s = max((item.ended_s for item in former), default=0.0)
        if grant.at_s < ended_s - CLOCKS_S:
            found.append(f"promise 1: {grant} while {former} had not ended")
        since_s = max(grant.at_s - MAX_OBSERVATION_AGE_S - READ_S, ended_s)
        if not hardware.showed_fit(grant.gpus, since_s - CLOCKS_S, grant.at_s + CLOCKS_S):
            found.append(f"promise 3, 4 or 5: {grant}: no content since {since_s:.3f} showed these GPUs fit")
        last |= dict.fromkeys(grant.gpus, grant)
    return found


@pytest.mark.busy
@pytest.mark.budget(30)
@pytest.mark.timeout(300)
def test_no_grant_rests_on_hardware_that_is_no_more(running: DaemonProcess, hardware: Hardware) -> None:
    clients = Clients(running, hardware)
    threads = [threading.Thread(target=clients.one, args=(seed,), kwargs={"queue": seed % 2 == 0}) for seed in range(5)]
    begun_s = time.monotonic()
    for thread in threads:
        thread.start()
    try:
        change_at_random(clients, hardware, random.Random(20261120))
        took_s = time.monotonic() - begun_s
    finally:
        clients.stop.set()
        hardware.wrong, hardware.hang_s, hardware.broken = {}, 0.0, False
        hardware.show()
        for thread in threads:
            thread.join(60)
    print(f"{CHANGES} changes in {took_s:.1f} s, {len(hardware.versions)} contents, {len(clients.grants)} grants,")
    print(f"{clients.refused} refusals, memory left behind {clients.left_behind} times")
    assert not clients.failures
    assert broken_promises(clients.grants, hardware) == []
    assert len(clients.grants) >= 30, "too few grants to say anything"
    assert clients.refused >= 20
    assert clients.left_behind >= 3
    with Connection(running) as connection:
        eventually(lambda: {gpu(connection, index)["state"] for index in range(6)} == {"free"}, 60, running.story)


def test_the_search_for_broken_promises_would_find_them(hardware: Hardware) -> None:
    """A check that finds nothing is worth something only if it finds what is there."""
    first, second = hardware.uuids[:2]
    hardware.wrong = {0: {"health": "lost"}}
    spoilt_s = hardware.show()
    hardware.leave_memory(1, True)
    old = Grant("old", {first}, spoilt_s + MAX_OBSERVATION_AGE_S + READ_S + 0.1)
    good = Grant("good", {first}, spoilt_s + 0.1, spoilt_s + 0.2)
    too_early = Grant("too early", {first}, spoilt_s + 0.3)
    dirty = Grant("dirty", {second}, spoilt_s + 5)
    both = Grant("both", {second}, spoilt_s + 0.1, spoilt_s + 9)
    assert broken_promises([good], hardware) == []
    for wrong in ([old], [good, too_early], [dirty], [both, dirty]):
        assert broken_promises(wrong, hardware), wrong


def hang(connection: Connection, hardware: Hardware) -> float:
    """Hang a driver that answers, have the node read, and wait until it is unknown; how long that took."""
    hardware.hang_s = 0.0
    becomes(connection, 1, "free", hardware.show())
    hardware.hang_s = HANGS_S
    changed_s = hardware.show()
    ask_and_release(connection)
    return becomes(connection, 0, "unknown", changed_s)


def ask_and_release(connection: Connection) -> None:
    """Make the node read: for a grant, or, when that rests on a reading of just before, for the release."""
    status, lease = connection.call("POST", "/v1/leases", {"count": 1, "queue": False})
    if status == 201:
        connection.call("POST", f"/v1/leases/{lease['id']}/release", {"token": lease["token"]})


def measure(connection: Connection, rounds: int) -> dict[str, list[float]]:
    """How long each kind of call took, in milliseconds, over so many rounds of all of them."""
    took: dict[str, list[float]] = {}

    def timed(kind: str, method: str, path: str, body: Any = None, *, expect: int = 200) -> Any:
        begun_s = time.perf_counter()
        status, content = connection.call(method, path, body)
        took.setdefault(kind, []).append((time.perf_counter() - begun_s) * 1000)
        assert status == expect, (kind, content)
        return content

    for _ in range(rounds):
        held = timed("list leases", "GET", "/v1/leases?state=active")["items"][0]
        timed("list gpus", "GET", "/v1/gpus")
        timed("one gpu", "GET", f"/v1/gpus/{held['gpus'][0]['uuid']}")
        timed("nodes", "GET", "/v1/nodes")
        timed("events", "GET", "/v1/events?limit=20")
        timed("refused", "POST", "/v1/leases", {"count": 1, "queue": False}, expect=409)
        queued = timed("queued", "POST", "/v1/leases", {"count": 1}, expect=202)
        timed("explain", "GET", f"/v1/leases/{queued['id']}/explain")
        timed("one lease", "GET", f"/v1/leases/{queued['id']}")
        timed("renew", "POST", f"/v1/leases/{held['id']}/renew", {"token": held["token"]})
        timed("release", "POST", f"/v1/leases/{queued['id']}/release", {"token": None})
    return took


def p90(values: list[float]) -> float:
    """Of few calls: the host may take the processor away from one of them."""
    return statistics.quantiles(values, n=10, method="inclusive")[8]


@pytest.mark.alone
@pytest.mark.budget(20)
def test_with_the_probe_hung_every_call_is_answered_at_once(running: DaemonProcess, hardware: Hardware) -> None:
    with Connection(running) as connection:
        assert connection.call("POST", "/v1/leases", {"count": 1, "ttl_s": 600})[0] == 201
        # What the machine delays once it does not delay three times.
        assert any(hang(connection, hardware) < UNKNOWN_WITHIN_S + SLACK_S for _ in range(3))
        slow = {"not measured": 0.0}
        for _ in range(3):
            took = measure(connection, rounds=150)
            assert gpu(connection, 1)["state"] == "unknown", "the driver did not hang all the while"
            every = [value for values in took.values() for value in values]
            print({kind: f"p50 {statistics.median(one):.1f} p90 {p90(one):.1f} ms" for kind, one in took.items()})
            print(f"all {len(every)}: p90 {p90(every):.1f} ms, worst {max(every):.1f} ms")
            if not (slow := {kind: p90(values) for kind, values in took.items() if p90(values) >= 50}):
                break
        assert slow == {}


@pytest.mark.alone
def test_who_only_reads_never_waits_for_a_driver_that_begins_to_hang(
    running: DaemonProcess, hardware: Hardware
) -> None:
    """From the change on: no one knows yet that the driver hangs, and a request waits for its reading."""
    with Connection(running) as asking, Connection(running) as reading:
        waited: list[float] = []

        def ask() -> None:
            begun_s = time.monotonic()
            ask_and_release(asking)
            waited.append(time.monotonic() - begun_s)

        for _ in range(3):  # what the machine delays once it does not delay three times
            hardware.hang_s = 0.0
            becomes(reading, 0, "free", hardware.show())
            hardware.hang_s = HANGS_S
            hardware.show()
            eventually(
                lambda: time.monotonic() - mono(gpu(reading, 0)["observed_at"]) > MAX_OBSERVATION_AGE_S + CLOCKS_S, 30
            )
            asker = threading.Thread(target=ask)
            asker.start()
            took = []
            while asker.is_alive():
                sent_s = time.perf_counter()
                reading.call("GET", "/v1/gpus")
                took.append((time.perf_counter() - sent_s) * 1000)
            asker.join()
            print(f"a request waited {waited[-1]:.2f} s; {len(took)} reads beside it: p90 {p90(took):.1f} ms")
            if 0.5 < waited[-1] < UNKNOWN_WITHIN_S + SLACK_S and len(took) > 30 and p90(took) < 50:
                break
        assert 0.5 < waited[-1] < UNKNOWN_WITHIN_S + SLACK_S, "a request waited for longer than the probe has"
        assert len(took) > 30
        assert p90(took) < 50
