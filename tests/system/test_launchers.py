"""Every launcher runs an example for real: two ranks on the CPU, under a daemon with simulated GPUs."""

from __future__ import annotations

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess
from tests.digits import LIGHT_DIGITS

pytestmark = pytest.mark.slow

EXAMPLES = Path(__file__).parents[2] / "examples"


def run_job(running: DaemonProcess, *command: str, **fields: Any) -> tuple[dict[str, Any], str]:
    """Run a job on two GPUs; it as it ended, and what its launcher printed."""
    place = {"interpreter": sys.executable, "working_directory": str(EXAMPLES), "environment": LIGHT_DIGITS}
    job = running.submit(*command, gpus=2, **place, **fields)
    return running.wait_job(job, within_s=200), running.job_log(job)


def views(printed: str) -> list[dict[str, Any]]:
    """The JSON lines of all ranks, in order of rank; torchrun puts the rank before a line."""
    found = [json.loads(line[line.index("{") :]) for line in printed.splitlines() if '{"rank"' in line]
    return sorted(found, key=lambda view: int(view["rank"]))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("launcher", "command"),
    [
        ("torchrun", ["ddp_digits.py", "--epochs", "10"]),
        ("accelerate", ["accelerate_digits.py"]),
        ("lightning", ["lightning_digits.py"]),
        ("fabric", ["fabric_digits.py"]),
        ("plain", [sys.executable, "spawn_digits.py"]),
        *([("deepspeed", ["ddp_digits.py", "--epochs", "6"])] if find_spec("deepspeed") else []),
    ],
)
def test_two_ranks_train_under_their_lease(running: DaemonProcess, launcher: str, command: list[str]) -> None:
    job, printed = run_job(running, *command, launcher=launcher)
    assert (job["state"], job["exit_code"]) == ("succeeded", 0), (job, printed)
    ranks = views(printed)
    assert [(view["rank"], view["world_size"], view["lease_id"]) for view in ranks] == [
        (0, 2, job["lease_id"]),
        (1, 2, job["lease_id"]),
    ]
    assert all(view["test_accuracy"] > 0.85 for view in ranks), ranks
    if launcher == "torchrun":
        each_rank_says_where_it_ran(job, ranks)


def each_rank_says_where_it_ran(job: dict[str, Any], ranks: list[dict[str, Any]]) -> None:
    """What `ddp_digits.py` prints at its end, after ten epochs."""
    assert [view["local_rank"] for view in ranks] == [0, 1]
    first, second = ({name: view[name] for name in view if name not in ("rank", "local_rank")} for view in ranks)
    assert first == second
    assert first["test_accuracy"] >= 0.95
    assert first["cuda_visible_devices"] == ",".join(gpu["uuid"] for gpu in job["gpus"])
    assert first["device"] == "cpu"
    assert first["test_images"] == 359, "every held-out image is to be counted, and none twice"


@pytest.mark.parametrize(
    ("launcher", "module"),
    [
        *([] if find_spec("deepspeed") else [("deepspeed", "deepspeed")]),
        ("horovodrun", "horovod"),
        ("bagua", "bagua"),
    ],
)
def test_a_launcher_that_is_not_installed_is_the_reason(running: DaemonProcess, launcher: str, module: str) -> None:
    job, _ = run_job(running, "ddp_digits.py", launcher=launcher)
    assert (job["state"], job["exit_code"]) == ("failed", None)
    assert job["reason"].startswith(f"{launcher} is not installed for {sys.executable}: it has no module {module}.")
