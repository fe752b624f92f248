"""A real torchrun whose ranks fail: they are started again under the same lease, or the job names the one that died."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.daemon import DaemonProcess

pytestmark = [pytest.mark.slow, pytest.mark.busy("torch")]

RANK = """
import os, sys
from pathlib import Path
place, times = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
(place / f"{os.environ['GPULEASE_LEASE_ID']} {os.environ['RANK']} {times}").touch()
sys.exit(5 if times == 0 and os.environ["RANK"] == "1" else 0)
"""
DIES = """
import os, signal, time
if os.environ["RANK"] == "1":
    os.kill(os.getpid(), signal.SIGKILL)
time.sleep(600)
"""


@pytest.mark.parametrize(("max_restarts", "state", "code"), [(1, "succeeded", 0), (0, "failed", 5)])
def test_ranks_that_fail_once_are_started_again_as_often_as_asked(
    running: DaemonProcess, tmp_path: Path, max_restarts: int, state: str, code: int
) -> None:
    script, place = tmp_path / "rank.py", tmp_path / "place"
    script.write_text(RANK)
    place.mkdir()
    fields = {"gpus": 2, "launcher": "torchrun", "interpreter": sys.executable}
    job = running.wait_job(running.submit(str(script), str(place), max_restarts=max_restarts, **fields), within_s=200)
    assert (job["state"], job["exit_code"], job["attempts"]) == (state, code, 1), job
    assert {(path.name.split()[0], path.name.split()[2]) for path in place.iterdir()} == {
        (job["lease_id"], str(times)) for times in range(max_restarts + 1)
    }


def test_a_rank_that_is_killed_is_named(running: DaemonProcess, tmp_path: Path) -> None:
    script = tmp_path / "rank.py"
    script.write_text(DIES)
    fields = {"gpus": 2, "launcher": "torchrun", "interpreter": sys.executable}
    job = running.wait_job(running.submit(str(script), **fields), within_s=200)
    assert (job["state"], job["exit_code"]) == ("failed", 137), job
    assert job["reason"].startswith("Rank 1 failed first: it was ended by SIGKILL"), job
