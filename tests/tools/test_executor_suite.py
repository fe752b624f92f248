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
def test_the_executor_passes_the_tests_of_cpython(sweep: Sweep) -> None:
    path = f"{Path(__file__).parent}:{UPSTREAM}"
    printed = sweep.run_command([str(TOOLS / "python"), "-m", "unittest", "-v", "executor_suite"], 550, PYTHONPATH=path)
    assert re.search(r"^Ran 33 tests", printed, re.MULTILINE), printed
    assert "skipped" not in printed
