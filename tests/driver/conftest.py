"""The machine of these tests: built once, a fresh one for each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.driver.machine import DriverMachine, build


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of the compiled libraries."""
    directory = tmp_path_factory.mktemp("driver")
    build(directory)
    return directory


@pytest.fixture
def machine(built: Path) -> Iterator[DriverMachine]:
    """Eight GPUs on which nothing runs."""
    found = DriverMachine(built)
    try:
        yield found
    finally:
        found.close()
