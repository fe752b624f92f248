"""The script of a pilot: it ends when it is told to, also while no worker runs."""

from __future__ import annotations

import signal
import subprocess
from pathlib import Path

from gpulease_fleet.worker_script import worker_script

WORKER = "#!/bin/sh\necho started\nexit 3\n"


def test_one_that_is_told_to_end_between_two_workers_starts_none(tmp_path: Path) -> None:
    program = tmp_path / "gpulease"
    program.write_text(WORKER)
    program.chmod(0o755)
    script = worker_script(
        program=str(program),
        url="http://127.0.0.1:9",
        token="t",
        directory=str(tmp_path),
        node="n",
        allocation="none",
        leave_s=1.0,
        options=(),
    )
    with subprocess.Popen(["bash", "-c", script], stdout=subprocess.PIPE, text=True) as pilot:
        assert pilot.stdout is not None
        assert pilot.stdout.readline() == "started\n"
        assert pilot.stdout.readline().startswith("the worker has ended with 3")
        pilot.send_signal(signal.SIGTERM)
        assert pilot.stdout.read() == ""
    assert pilot.returncode == 3
