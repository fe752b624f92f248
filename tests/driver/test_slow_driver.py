"""Grants and reported states on a slow driver: no request is refused because of a stale reading."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.driver.daemon_view import drains, gpu, release, states, take
from tests.driver.machine import FABRIC_IN_PROGRESS, GPUS, UUIDS, DriverMachine

LISTS = 3 * GPUS
"""Process lists in one reading: compute, graphics and MPS of each GPU."""
pytestmark = pytest.mark.alone


def probes(machine: DriverMachine) -> set[int]:
    """The processes that have NVML open and belong to no lease: with nothing else running, the daemon's probe."""
    return {entry.pid for entry in machine.entries if entry.gpu is None and not entry.lease_id and entry.opened}


@pytest.mark.parametrize("reading_s", [0.4, 0.8])
def test_a_slow_reading_is_as_good_as_a_fast_one(
    running: DaemonProcess, machine: DriverMachine, reading_s: float
) -> None:
    machine.slow_lists(reading_s / LISTS)
    for index in range(0, GPUS, 3):
        held = take(running, index, queue=False)
        release(running, held)
    eventually(lambda: states(running) == ["free"] * GPUS, 20, running.story)


def test_no_request_is_refused_while_one_gpu_drains_on_a_slow_driver(
    running: DaemonProcess, machine: DriverMachine
) -> None:
    machine.slow_lists(0.3 / LISTS)
    first = take(running, 0)
    machine.start("-s", env=first["env"])
    release(running, first)
    eventually(lambda: states(running)[0] == "draining", 10, running.story)
    for _ in range(3):
        for index in range(1, GPUS):
            release(running, take(running, index, queue=False))
        eventually(lambda: states(running)[1:] == ["free"] * (GPUS - 1), 10, running.story)
    assert states(running)[0] == "draining"


def test_eight_jobs_that_start_at_once_cost_no_one_a_grant(running: DaemonProcess, machine: DriverMachine) -> None:
    """Every context takes the driver's lock for 0.2 s; the reading for a grant waits for all of them."""
    machine.state.context_us = 200_000

    def one(index: int) -> None:
        for _ in range(3):
            held = take(running, index, queue=False)
            training = machine.start("-n", env=held["env"])
            training.kill()
            training.wait()
            release(running, held)
            drains(running, machine, held, index, within_s=10)  # one scan of open files per second

    with ThreadPoolExecutor(GPUS) as threads:
        list(threads.map(one, range(GPUS)))
    assert machine.violations() == []


@pytest.mark.parametrize("blocked_s", [4.0, pytest.param(45.0, marks=pytest.mark.soak)])
def test_a_teardown_that_blocks_calls_makes_gpus_unknown_and_kills_no_probe(
    running: DaemonProcess, machine: DriverMachine, blocked_s: float
) -> None:
    (probe,) = probes(machine)
    first = take(running, 1)
    training = machine.start("-n", env=first["env"])
    over_s = time.monotonic() + blocked_s
    machine.block(blocked_s, gpu=1)
    training.kill()
    release(running, first)
    eventually(lambda: "unknown" in states(running), blocked_s, running.story)
    assert running.call("POST", "/v1/leases", {"devices": [UUIDS[3]]}).status in (201, 202), "the daemon answers"
    while time.monotonic() < over_s:
        assert states(running)[1] in ("draining", "unknown"), gpu(running, 1)
        time.sleep(0.2)
    eventually(lambda: states(running)[1] == "free", 10, running.story)
    assert probe in probes(machine)


def test_gpus_whose_fabric_is_not_up_are_granted_when_it_is(running: DaemonProcess, machine: DriverMachine) -> None:
    machine.fabric(FABRIC_IN_PROGRESS)
    eventually(lambda: set(states(running)) == {"unhealthy"}, 10, lambda: str(gpu(running, 0)))
    assert "fabric" in gpu(running, 0)["reason"]
    waiting = running.call("POST", "/v1/leases", {"count": 1}).json
    assert waiting["state"] == "queued"
    machine.fabric(3)

    def granted() -> bool:
        return bool(running.call("GET", f"/v1/leases/{waiting['id']}").json["state"] == "active")

    eventually(granted, 10, lambda: str(gpu(running, 0)))
    held = running.call("GET", f"/v1/leases/{waiting['id']}").json
    machine.start("-n", env=held["env"])
