"""Every test here is marked `gpu`, and skipped where there is none: the only ones that may be."""

from __future__ import annotations

from pathlib import Path

import pytest

from gpulease_worker import driver

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them when NVML shows no GPU."""
    mine = [item for item in items if HERE in item.path.parents]
    why = driver.unavailable() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))
