"""A real daemon with four simulated GPUs, and the program `gpulease` pointed at it."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease import Client, GpuleaseError, GpuState

from .programs import Program, environ, wait_until


@pytest.fixture(scope="session")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    place: Path = tmp_path_factory.mktemp("d")
    arguments = ["serve", "--simulate", "4", "--port", "0", "--data-dir", str(place)]
    with (place / "serve.log").open("w") as log:
        daemon = subprocess.Popen([sys.executable, "-m", "gpulease.cli", *arguments], env=environ(), stderr=log)
    address = f"unix://{place / 'gpulease.sock'}"

    def four_gpus() -> bool:
        assert daemon.poll() is None, (place / "serve.log").read_text()
        try:
            with Client(address) as client:
                return len(client.gpus()) == 4
        except GpuleaseError:
            return False

    try:
        wait_until(four_gpus, 30)
        yield address
    finally:
        daemon.terminate()
        try:
            daemon.wait(20)
        except subprocess.TimeoutExpired:
            daemon.kill()
            daemon.wait()


@pytest.fixture
def client(url: str) -> Iterator[Client]:
    """A client of the daemon, all of whose GPUs are free."""
    with Client(url) as connected:
        wait_until(lambda: {gpu.state for gpu in connected.gpus()} == {GpuState.FREE})
        yield connected


@pytest.fixture
def gpulease(url: str) -> Program:
    """Runs the program and returns what it did."""

    def run(*arguments: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-m", "gpulease.cli", *arguments],
            env=environ(GPULEASE_URL=url) | more,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run


@pytest.fixture
def python(url: str) -> Program:
    """Runs a Python program as a user's script and returns what it did."""

    def run(program: str, **more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", program],
            env=environ(GPULEASE_URL=url) | more,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )

    return run
