"""Runs a program that may hang in the driver, where no signal reaches it: the caller does not wait for its end then."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from contextlib import suppress

END_S = 1.0
"""How long the end of a killed process is waited for."""


def bounded_run(command: Sequence[str], within_s: float) -> subprocess.CompletedProcess[str]:
    """Exit code and output of a program. `subprocess.run` would wait for ever for one that SIGKILL does not end.

    Raises OSError when it cannot be started, and TimeoutExpired when it takes longer than `within_s`.
    """
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    try:
        said, complained = process.communicate(timeout=within_s)
    finally:
        if process.poll() is None:
            process.kill()
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
        for stream in (process.stdout, process.stderr):
            if stream is not None:
                stream.close()
    return subprocess.CompletedProcess(command, process.returncode, said, complained)
