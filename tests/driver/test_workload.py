"""Many users on one machine, with every fault of a driver: briefly, and for ten minutes in `make soak`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess
from tests.driver.machine import DriverMachine
from tests.driver.workload import FAST_SETTINGS, Figures, run_workload

pytestmark = [pytest.mark.slow, pytest.mark.busy]
LATE_S = 3.0
"""A GPU may drain this long after the last process of its lease is gone: 2 s, and 1 s more on a busy machine."""
LOADED_S = 12.0
"""The same beside other tests; what is held back by others' open files drains for `RETAINED_S`, or for good."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the users of jobs can pass through."""
    found = Path(tempfile.mkdtemp(prefix="gpulease-workload-"))
    found.chmod(0o711)
    (found / "notes").mkdir()
    try:
        yield found
    finally:
        shutil.rmtree(found)


@pytest.fixture
def running(machine: DriverMachine, place: Path) -> Iterator[DaemonProcess]:
    process = DaemonProcess(place / "d", "--node", "n", environment=machine.environment | FAST_SETTINGS)
    try:
        yield process.start()
    finally:
        process.stop()


def judge(figures: Figures, late_s: float) -> None:
    """What a workload must show."""
    print(figures)
    assert figures.violations == []
    assert figures.failed == []
    assert figures.unclean == []
    assert figures.refused_for_age == []
    assert figures.late_s < late_s, [one for one in figures.delays if one.late_s >= late_s]


def test_a_minute_of_many_users_and_every_fault(running: DaemonProcess, machine: DriverMachine, place: Path) -> None:
    figures = run_workload(
        running, machine, place / "notes", seconds=40.0, leases=30, jobs=4, blocked_s=4.0, strange=False
    )
    judge(figures, LOADED_S)
    assert figures.jobs == 4
    assert figures.leases == 30
    assert any(one.fault == "blocked calls" for one in figures.delays)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_ten_minutes_of_many_users_and_every_fault(running: DaemonProcess, machine: DriverMachine, place: Path) -> None:
    figures = run_workload(running, machine, place / "notes")
    judge(figures, LATE_S)
    assert figures.jobs == 20
    assert figures.leases == 200
    assert any(one.fault == "blocked calls" for one in figures.delays)
