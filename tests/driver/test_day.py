"""Many people on one machine, with everything that a driver does to them: briefly, and ten minutes in `make soak`."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess
from tests.driver.day import QUICK, Figures, spend
from tests.driver.machine import DriverMachine

pytestmark = pytest.mark.xdist_group("machine")  # it loads the machine: one such at a time
LATE_S = 3.0
"""No GPU drains for longer than its own lease has anything on it, and this: two seconds, one more on a busy machine."""


@pytest.fixture
def place() -> Iterator[Path]:
    """A directory that the users of jobs can pass through."""
    found = Path(tempfile.mkdtemp(prefix="gpulease-day-"))
    found.chmod(0o711)
    (found / "notes").mkdir()
    try:
        yield found
    finally:
        shutil.rmtree(found)


@pytest.fixture
def running(machine: DriverMachine, place: Path) -> Iterator[DaemonProcess]:
    process = DaemonProcess(place / "d", "--node", "n", environment=machine.environment | QUICK)
    try:
        yield process.start()
    finally:
        process.stop()


def judge(found: Figures) -> None:
    """What a day must show."""
    print(found)
    assert found.violations == []
    assert found.failed == []
    assert found.unclean == []
    assert found.refused_for_age == []
    assert found.late_s < LATE_S, [one for one in found.delays if one.late_s >= LATE_S]


def test_a_minute_of_many_people_and_every_trouble(running: DaemonProcess, machine: DriverMachine, place: Path) -> None:
    found = spend(running, machine, place / "notes", seconds=40.0, leases=30, jobs=4, blocked_s=4.0, strange=False)
    judge(found)
    assert found.jobs == 4
    assert found.leases == 30
    assert any(one.trouble == "blocked calls" for one in found.delays)


@pytest.mark.soak
@pytest.mark.timeout(1500)
def test_ten_minutes_of_many_people_and_every_trouble(
    running: DaemonProcess, machine: DriverMachine, place: Path
) -> None:
    found = spend(running, machine, place / "notes")
    judge(found)
    assert found.jobs == 20
    assert found.leases == 200
    assert any(one.trouble == "blocked calls" for one in found.delays)
