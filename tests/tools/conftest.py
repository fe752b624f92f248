"""A daemon for each file of tests, as in `tests/system`, and a sweep through it for each test."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.daemon import DaemonProcess
from tests.system.conftest import running, shared_daemon
from tests.tools.sweep import Sweep

__all__ = ["running", "shared_daemon", "sweep"]


@pytest.fixture
def sweep(running: DaemonProcess, tmp_path: Path) -> Sweep:
    """What a test starts, in a directory of its own."""
    return Sweep(running, tmp_path)
