"""A program that takes too long costs its timeout and no more, even if it cannot be killed."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from gpulease_protocol.host.process_id import ProcessId
from gpulease_worker.processes.bounded_run import bounded_run
from tests.worker.build import until


def test_a_program_is_run_to_its_end() -> None:
    ran = bounded_run([sys.executable, "-c", "import sys; print('out'); sys.exit('err')"], 30)
    assert (ran.returncode, ran.stdout, ran.stderr) == (1, "out\n", "err\n")


def test_a_program_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    killed: list[int] = []
    kill = subprocess.Popen.kill

    def notes(process: subprocess.Popen[str]) -> None:
        killed.append(process.pid)
        kill(process)

    monkeypatch.setattr(subprocess.Popen, "kill", notes)
    with pytest.raises(subprocess.TimeoutExpired):
        bounded_run(["sleep", "60"], 0.2)
    (pid,) = killed
    until(lambda: ProcessId.of(pid) is None, "it has ended")


def test_a_program_that_hangs_in_the_driver_is_not_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    left: list[subprocess.Popen[str]] = []

    def notes(process: subprocess.Popen[str]) -> None:
        """As the kernel does with a signal then, and no more."""
        left.append(process)

    with monkeypatch.context() as kernel:
        kernel.setattr(subprocess.Popen, "kill", notes)
        begun_s = time.monotonic()
        with pytest.raises(subprocess.TimeoutExpired):
            bounded_run(["sleep", "60"], 0.2)
    assert time.monotonic() - begun_s < 30
    assert left[0].poll() is None
    left[0].kill()
    left[0].wait()
