"""The scripts of docs/launchers, run as the pages say, with the real launchers on simulated GPUs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, events, eventually
from tests.digits import LIGHT_DIGITS

pytestmark = [pytest.mark.slow, pytest.mark.busy("torch")]

PAGES = Path(__file__).parents[2] / "docs" / "launchers"
LEARNT = "devices [0, 1], weight 3.0, bias 1.0"


def block(page: str, language: str) -> str:
    """The one block of a page in this language."""
    (found,) = re.findall(rf"^```{language}\n(.*?)^```$", (PAGES / page).read_text(), re.MULTILINE | re.DOTALL)
    return str(found)


def run_page(page: str, place: Path, url: str) -> subprocess.CompletedProcess[str]:
    """Do what a page says, in a directory of its own."""
    (place / "train.py").write_text(block(page, "python"))
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("GPULEASE_", "CUDA_"))}
    clean |= {"GPULEASE_URL": url, "PATH": f"{Path(sys.executable).parent}:{clean['PATH']}", "OMP_NUM_THREADS": "1"}
    clean |= LIGHT_DIGITS
    return subprocess.run(
        ["bash", "-ec", block(page, "bash")],
        cwd=place, env=clean, capture_output=True, text=True, timeout=200, check=False,
    )  # fmt: skip


def events_of(running: DaemonProcess, kind: str, after: int) -> list[dict[str, Any]]:
    """The events of a kind after a sequence number."""
    return [event for event in events(running, after=after) if event["kind"] == kind]


def last_seq(running: DaemonProcess) -> int:
    """The sequence number of the newest event."""
    return max((event["seq"] for event in events(running)), default=0)


@pytest.mark.parametrize("page", ["lightning.md", "fabric.md", "torchrun.md", "accelerate.md", "spawn.md"])
def test_a_training_of_two_ranks_takes_one_lease_and_gives_it_back(
    running: DaemonProcess, tmp_path: Path, page: str
) -> None:
    before = last_seq(running)
    result = run_page(page, tmp_path, running.url)
    assert LEARNT in result.stdout, result.stderr[-3000:]
    # After a gloo collective torch may abort while the interpreter ends, with all its work done.
    assert result.returncode == 0 or "SIGABRT" in result.stderr or result.returncode in (-6, 134), result.stderr[-3000:]
    assert [len(event["gpus"]) for event in events_of(running, "lease.granted", before)] == [2]
    eventually(lambda: len(events_of(running, "lease.ended", before)) == 1, 30)
    running.wait_free()


def test_every_page_is_run() -> None:
    run = {"lightning.md", "fabric.md", "torchrun.md", "accelerate.md", "spawn.md"}
    assert {path.name for path in PAGES.glob("*.md")} == run | {"README.md"}
