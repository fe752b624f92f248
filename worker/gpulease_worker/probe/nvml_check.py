"""Checks that this host has a GPU that NVML can read.

The check runs in a child process, `python -m gpulease_worker.probe.nvml_check`, so a hung driver costs the caller only
the deadline.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys

from gpulease_protocol.host import process_tree
from gpulease_worker.probe.probe_protocol import ReadingFailed
from gpulease_worker.processes.bounded_run import bounded_run

DEADLINE_S = 60.0
"""How long the driver may take to open: without persistence mode it initializes every GPU."""


def unavailable_reason(deadline_s: float = DEADLINE_S) -> str | None:
    """Why this host has no GPU that NVML can read, as a sentence; None if it has one. Takes at most `deadline_s`."""
    try:
        answer = bounded_run([sys.executable, "-P", "-m", "gpulease_worker.probe.nvml_check"], deadline_s)
    except subprocess.TimeoutExpired:
        return f"NVML did not answer within {deadline_s:g} s: the driver hangs. See `dmesg` for Xid lines."
    if answer.returncode == 0:
        return None
    return (
        answer.stdout.strip()
        or f"The check for GPUs ended with code {answer.returncode}: {answer.stderr[-300:].strip()}"
    )


def _main() -> int:
    process_tree.signal_on_parent_death(signal.SIGKILL)
    from gpulease_worker.probe.nvml_reader import NvmlReader  # noqa: PLC0415  only this process needs nvidia-ml-py

    try:
        NvmlReader(os.uname().nodename).read(())
    except ReadingFailed as failed:
        print(failed)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
