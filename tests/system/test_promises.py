"""Promises that strangers rely on, with real processes; `tests/PROMISES.md` lists the tests of all of them."""

from __future__ import annotations

import os
import subprocess
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, daemon, events, eventually
from tests.system.hardware import BAD, Hardware
from tests.system.test_storm import check_events

CLIENTS, ROUNDS = 6, 5


def cycle(running: DaemonProcess, failures: list[BaseException]) -> None:
    """Ask for GPUs, hold them for a moment and give them back, a few times."""
    try:
        for number in range(ROUNDS):
            lease = running.request_lease(1 + number % 2, wait_s=60, ttl_s=60)
            assert lease["state"] == "active", lease
            running.release(lease)
    except BaseException as error:
        failures.append(error)


def test_many_clients_at_once_never_share_a_gpu(tmp_path: Path) -> None:
    failures: list[BaseException] = []
    with daemon(tmp_path, "--simulate", "2") as running:
        clients = [threading.Thread(target=cycle, args=(running, failures)) for _ in range(CLIENTS)]
        for client in clients:
            client.start()
        for client in clients:
            client.join(120)
        assert not failures, (failures, running.story())
        log = events(running)
    check_events(log)
    assert sum(event["kind"] == "lease.granted" for event in log) == CLIENTS * ROUNDS


def test_a_lease_is_granted_whole_or_not_at_all(running: DaemonProcess) -> None:
    first, second = running.request_lease(2, wait_s=60), running.request_lease(1, wait_s=60)
    gang = running.request_lease(4)
    assert (gang["state"], gang["gpus"]) == ("queued", [])
    running.release(first)
    eventually(lambda: running.gpu_states().count("free") == 3, 60, running.story)
    assert running.lease(gang["id"])["gpus"] == [], "a part of it was granted"
    running.release(second)
    assert len(running.wait_active(gang["id"])["gpus"]) == 4


@pytest.fixture
def hardware(tmp_path: Path) -> Hardware:
    return Hardware(tmp_path / "hardware.json", gpus=2)


@pytest.fixture
def changing(tmp_path: Path, hardware: Hardware) -> Iterator[DaemonProcess]:
    """A daemon whose hardware the test changes."""
    with daemon(tmp_path, "--simulate", str(hardware.path)) as started:
        yield started


def test_a_gpu_that_must_not_be_granted_is_not_from_the_moment_it_shows(
    changing: DaemonProcess, hardware: Hardware
) -> None:
    for wrong in BAD:
        hardware.set_wrong({0: wrong, 1: wrong})
        time.sleep(0.6)  # the last reading is older than max_observation_age_s now: the daemon has to ask for another
        refused = changing.call("POST", "/v1/leases", {"count": 1, "queue": False})
        assert refused.problem() == (409, "not_now"), wrong
        hardware.set_wrong({})
        changing.wait_free()
    assert changing.request_lease(2, wait_s=60)["state"] == "active"


@pytest.mark.budget(25)
def test_what_was_acknowledged_survives_kills_of_the_daemon(running: DaemonProcess) -> None:
    acknowledged: dict[str, dict[str, Any]] = {}
    stop = threading.Event()

    def ask() -> None:
        while not stop.wait(0.05):
            with suppress(OSError, AssertionError):  # killed, or not ready again
                lease = running.request_lease(1, ttl_s=600)
                acknowledged[lease["id"]] = lease

    clients = [threading.Thread(target=ask) for _ in range(3)]
    for client in clients:
        client.start()
    try:
        for number in range(1, 4):
            eventually(lambda number=number: len(acknowledged) >= 5 * number, 60, running.story)
            running.kill()
            running.start()
    finally:
        stop.set()
        for client in clients:
            client.join(60)
    eventually(lambda: len(running.leases("active")) == 4, 60, running.story)
    assert len({lease["token"] for lease in running.leases("active")}) == 4
    assert any(lease["state"] == "active" for lease in acknowledged.values())
    for lease_id, lease in acknowledged.items():
        kept = running.lease(lease_id)
        if lease["state"] == "queued" and kept["state"] == "active":
            continue  # it was its turn
        assert (kept["state"], kept["token"]) == (lease["state"], lease["token"]), "an acknowledged lease was lost"
    running.give_everything_back()
    check_events(events(running))


def test_a_waiting_client_learns_of_its_grant_by_a_push(running: DaemonProcess) -> None:
    held = running.request_lease(4, wait_s=60)
    answers: list[dict[str, Any]] = []
    client = threading.Thread(target=lambda: answers.append(running.request_lease(4, wait_s=60)))
    client.start()
    eventually(lambda: len(running.leases("queued")) == 1, 60, running.story)
    running.release(held)
    client.join(60)
    assert [lease["state"] for lease in answers] == ["active"], "one request, which is answered with the grant"


def test_who_waits_is_told_the_gpu_the_pid_the_user_and_the_lease_in_the_way(running: DaemonProcess) -> None:
    held = running.request_lease(3, wait_s=60, label="first")
    foreign = running.request_lease(1, wait_s=60)
    with subprocess.Popen(["sleep", "600"], env=os.environ | foreign["env"]) as process:
        try:
            uuid = foreign["gpus"][0]["uuid"]
            eventually(lambda: running.get(f"/v1/gpus/{uuid}").json["processes"] != [], 60, running.story)
            running.release(foreign)
            waiting = running.request_lease(4)
            path = f"/v1/leases/{waiting['id']}/explain"
            eventually(lambda: f"pid {process.pid}" in running.get(path).json["sentence"], 60, running.story)
            why = running.get(path).json
        finally:
            process.kill()
    assert why["verdict"] == "not_now"
    assert all(word in why["sentence"] for word in (held["id"], held["holder"]["user"], "GPU")), why
    refused = running.call("POST", "/v1/leases", {"count": 5})
    assert refused.problem() == (422, "never_fits")
