"""The stand-in machine and a daemon on it: one of each per module, idle again after each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.driver.daemon_view import RETAINED_S, states
from tests.driver.machine import GPUS, DriverMachine, build
from tests.driver.workload import FAST_SETTINGS


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the compiled libraries."""
    directory = tmp_path_factory.mktemp("driver")
    build(directory)
    return directory


@pytest.fixture(scope="module")
def module_machine(built: Path) -> Iterator[DriverMachine]:
    """The machine of a module."""
    machine = DriverMachine(built)
    try:
        yield machine
    finally:
        machine.close()


@pytest.fixture(scope="module")
def module_daemon(module_machine: DriverMachine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """The daemon of a module."""
    place = tmp_path_factory.mktemp("daemon")
    options = ("--node", "n", "--retained-memory-s", str(RETAINED_S))
    process = DaemonProcess(place / "d", *options, environment=module_machine.environment | FAST_SETTINGS)
    try:
        yield process.start()
    finally:
        process.stop()


@pytest.fixture
def machine(module_machine: DriverMachine) -> Iterator[DriverMachine]:
    """Eight idle GPUs."""
    try:
        yield module_machine
    finally:
        module_machine.quieten()


@pytest.fixture
def running(module_daemon: DaemonProcess, machine: DriverMachine) -> Iterator[DaemonProcess]:
    """A daemon with eight free GPUs."""
    try:
        yield module_daemon
    finally:
        machine.quieten()
        eventually(lambda: released_all(module_daemon), 60, module_daemon.story)
        eventually(lambda: states(module_daemon) == ["free"] * GPUS, 60, module_daemon.story)


def released_all(running: DaemonProcess) -> bool:
    """Release all leases; True if there were none. One that was granted since it was listed has a token that was not
    listed, and is released the next time."""
    held = running.call("GET", "/v1/leases?state=active&state=queued").json["items"]
    for one in held:
        running.call("POST", f"/v1/leases/{one['id']}/release", {"token": one["token"]})
    return not held
