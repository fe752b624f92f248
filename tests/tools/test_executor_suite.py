"""CPython's own tests of executors, on `GPUExecutor`. `executor_suite.py` has what is left out."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest

from tests.tools.sweep import TOOLS, Sweep

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

UPSTREAM = Path(sys.prefix) / "tools" / "upstream" / "cpython"


@pytest.mark.budget(120)
@pytest.mark.parametrize(
    ("classes", "tests"),
    [
        (("ExecutorTest", "ShutdownTest", "DeadlockTest"), 20),
        # CPython's `wait` and `as_completed`, of futures that the tests above see resolved.
        pytest.param(("WaitTests", "AsCompletedTests"), 13, marks=pytest.mark.soak),
    ],
)
def test_the_executor_passes_the_tests_of_cpython(sweep: Sweep, classes: tuple[str, ...], tests: int) -> None:
    names = [f"executor_suite.{name}" for name in classes]
    path = f"{Path(__file__).parent}:{UPSTREAM}"
    printed = sweep.run_command([str(TOOLS / "python"), "-m", "unittest", "-v", *names], 550, PYTHONPATH=path)
    assert re.search(rf"^Ran {tests} tests", printed, re.MULTILINE), printed
    assert "skipped" not in printed
