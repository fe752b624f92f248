"""The daemon of a file of system tests. What tests say to it are the methods of `DaemonProcess` (`tests/daemon.py`)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.daemon import DaemonProcess, daemon


@pytest.fixture(scope="module")
def shared_daemon(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    """One daemon for the file, with four simulated GPUs, or with the file's `OPTIONS`; and with its `ENVIRONMENT`."""
    options = getattr(request.module, "OPTIONS", ("--simulate", "4"))
    environment = getattr(request.module, "ENVIRONMENT", {})
    with daemon(tmp_path_factory.mktemp("shared"), *options, **environment) as started:
        yield started


@pytest.fixture
def running(shared_daemon: DaemonProcess) -> DaemonProcess:
    """The file's daemon with all GPUs free. A test may kill it if it starts it again; it gives nothing back itself."""
    if shared_daemon.process is None or shared_daemon.process.poll() is not None:
        shared_daemon.start()
    shared_daemon.give_everything_back()
    return shared_daemon
