"""A real daemon with four simulated GPUs, and the program `gpulease` pointed at it."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease import Client, GpuleaseError, GpuState
from tests.cli.programs import Program, environ, wait_until
from tests.daemon import PATIENT
from tests.imported_program import ForkedProgram, completed
from tests.imported_script import Scripts


@pytest.fixture(scope="package")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place: Path = tmp_path_factory.mktemp("d")
    arguments = ["serve", "--simulate", "4", "--port", "0", "--data-dir", str(place)]
    daemon = ForkedProgram(arguments, environ(**PATIENT), place / "serve.log")
    address = f"unix://{place / 'gpulease.sock'}"

    def four_gpus() -> bool:
        assert daemon.poll() is None, (place / "serve.log").read_text()
        try:
            with Client(address) as client:
                return len(client.gpus()) == 4
        except GpuleaseError:
            return False

    try:
        wait_until(four_gpus, 60)
        yield address
    finally:
        daemon.send_signal(signal.SIGTERM)
        try:
            daemon.wait(60)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    """A client of the daemon, with all GPUs free."""
    with Client(url) as connected:
        wait_until(lambda: {gpu.state for gpu in connected.gpus()} == {GpuState.FREE})
        yield connected


@pytest.fixture
def gpulease(url: str) -> Program:
    """Runs the program and returns the completed process."""

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return completed(arguments, environ(GPULEASE_URL=url) | more, timeout_s=60)

    return run


@pytest.fixture(scope="package")
def scripts() -> Scripts:
    return Scripts(environ())


@pytest.fixture
def python(url: str, scripts: Scripts) -> Program:
    """Runs a Python program as a user's script and returns the completed process."""
    return lambda program, **more: scripts.run(program, environment=environ(GPULEASE_URL=url) | more)
