"""Chains of jobs while the daemon is killed: each runs once, and after the one before it."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess, eventually

pytestmark = [pytest.mark.slow]

LENGTH = 10


@pytest.mark.budget(60)
def test_a_chain_goes_on_through_kills_of_the_daemon(running: DaemonProcess, tmp_path: Path) -> None:
    """It is killed before the end of a job is reported, and right after that is recorded."""
    record = tmp_path / "record"
    names: list[str] = []
    for number in range(LENGTH):
        after = [{"job": names[-1]}] if names else []
        script = f"echo begin {number} >>{record}; sleep 0.3; echo end {number} >>{record}"
        names.append(running.submit("sh", "-c", script, after=after))
    any_end = running.submit("sh", "-c", f"echo last >>{record}", after=[{"job": names[-1], "when": "ended"}])

    def ended() -> int:
        with suppress(OSError):
            return record.read_text().count("end ")
        return 0

    for number in range(LENGTH):
        eventually(lambda number=number: ended() > number, 120, running.story)
        if number % 3 == 1:
            running.wait_job(names[number])  # its end is recorded, and the next one is about to start
        if number % 3 < 2:
            running.kill()
            running.start()
    assert running.wait_job(any_end, within_s=120)["state"] == "succeeded"
    expected = [word for number in range(LENGTH) for word in (f"begin {number}", f"end {number}")]
    assert record.read_text().split("\n") == [*expected, "last", ""]
    assert {running.job(name)["attempts"] for name in names} == {1}
