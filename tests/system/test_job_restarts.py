"""`max_restarts` with a real torchrun: its ranks fail once, are started again under the same lease, and succeed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.daemon import daemon, eventually

FINAL = ("succeeded", "failed", "cancelled", "timed_out", "lost")
RANK = """
import os, sys
from pathlib import Path
place, times = Path(sys.argv[1]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
(place / f"{os.environ['GPULEASE_LEASE_ID']} {os.environ['RANK']} {times}").touch()
sys.exit(5 if times == 0 and os.environ["RANK"] == "1" else 0)
"""


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("max_restarts", "state", "code"), [(1, "succeeded", 0), (0, "failed", 5)])
def test_ranks_that_fail_once_are_started_again_as_often_as_asked(
    tmp_path: Path, max_restarts: int, state: str, code: int
) -> None:
    script, place = tmp_path / "rank.py", tmp_path / "place"
    script.write_text(RANK)
    place.mkdir()
    with daemon(tmp_path, "--simulate", "2") as running:
        body = {
            "command": [str(script), str(place)],
            "gpus": 2,
            "interpreter": sys.executable,
            "max_restarts": max_restarts,
        }
        path = f"/v1/jobs/{running.call('POST', '/v1/jobs', body).json['id']}"
        eventually(lambda: running.call("GET", path).json["state"] in FINAL, 200, running.story)
        job = running.call("GET", path).json
    assert (job["state"], job["exit_code"], job["attempts"]) == (state, code, 1), job
    assert {(path.name.split()[0], path.name.split()[2]) for path in place.iterdir()} == {
        (job["lease_id"], str(times)) for times in range(max_restarts + 1)
    }
