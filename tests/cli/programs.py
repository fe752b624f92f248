"""What the tests of the command line share."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable

from gpulease_protocol.launchers import strip_launcher_variables

Program = Callable[..., subprocess.CompletedProcess[str]]


def wait_until(condition: Callable[[], object], within_s: float = 60.0, story: Callable[[], str] = str) -> None:
    """Return when the condition holds; fail with the story after `within_s`."""
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, f"the condition did not come true in time; {story()}"
        time.sleep(0.05)


def environ(**more: str) -> dict[str, str]:
    """This process's environment without a lease, a launcher or a daemon's address in it."""
    return {
        name: value for name, value in strip_launcher_variables(os.environ).items() if name != "GPULEASE_URL"
    } | more
