"""With CI=true a test that was skipped is a test that failed, unless it is marked `gpu`.

A skip is how a missing compiler or package turns a suite green that has checked nothing.
"""

from __future__ import annotations

import os
from collections.abc import Generator

import pytest

NOTHING_SKIPPED = os.environ.get("CI") == "true"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn the skip of a test into its failure."""
    report = yield
    expected_failure = hasattr(report, "wasxfail")
    if NOTHING_SKIPPED and report.skipped and not expected_failure and item.get_closest_marker("gpu") is None:
        report.outcome = "failed"
        report.longrepr = f"skipped, which CI=true forbids: {why(report.longrepr)}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Generator[None, pytest.CollectReport, pytest.CollectReport]:
    """Turn the skip of a whole module into an error; a module cannot be marked before it is read."""
    report = yield
    if NOTHING_SKIPPED and report.skipped and collector.path.parent.name != "gpu":
        report.outcome = "failed"
        report.longrepr = f"module skipped, which CI=true forbids: {why(report.longrepr)}"
    return report


def why(longrepr: object) -> str:
    """The reason that the skip gave."""
    return str(longrepr[-1]) if isinstance(longrepr, tuple) else str(longrepr)
