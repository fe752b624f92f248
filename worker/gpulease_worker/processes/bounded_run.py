"""Runs a program that may hang in the driver, where no signal reaches it, without waiting forever for its end."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress

END_S = 1.0
"""How long to wait for the end of a killed process."""


def bounded_run(command: Sequence[str], timeout_s: float) -> subprocess.CompletedProcess[str]:
    """Run a program; its exit code and output. `subprocess.run` would wait forever for one that survives SIGKILL.

    Raises OSError when it cannot be started, and TimeoutExpired when it takes longer than `timeout_s`.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        output, errors = process.communicate(timeout=timeout_s)
    finally:
        if process.poll() is None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return subprocess.CompletedProcess(command, process.returncode, output, errors)
