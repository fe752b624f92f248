"""The programs in docs/client.md run as they are written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from ..daemon import DaemonProcess, daemon

pytestmark = pytest.mark.xdist_group("machine")  # it starts processes: one such at a time

ROOT = Path(__file__).parents[2]
PROGRAMS = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "client.md").read_text(), re.DOTALL)


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with daemon(tmp_path_factory.mktemp("document")) as process:
        yield process


@pytest.mark.parametrize("number", range(len(PROGRAMS)))
def test_a_program_runs_as_it_is_written(running: DaemonProcess, tmp_path: Path, number: int) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAMS[number])
    places = os.pathsep.join([str(ROOT / "client"), str(ROOT / "server")])
    environ = os.environ | {"GPULEASE_URL": running.url, "PYTHONPATH": places}
    start = [sys.executable, "-W", "error", str(program)]
    done = subprocess.run(start, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_the_document_has_programs() -> None:
    assert len(PROGRAMS) >= 3
