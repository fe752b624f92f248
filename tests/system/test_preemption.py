"""A cancelled training saves what it has, and one that is submitted with `--resume-from` ends where it would have."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import DaemonProcess, eventually
from tests.digits import LIGHT_DIGITS, STOPPED_AFTER

pytestmark = [pytest.mark.slow, pytest.mark.busy("torch")]

EXAMPLES = Path(__file__).parents[2] / "examples"
EPOCHS = 6


def submit(running: DaemonProcess, directory: Path, *options: str, **environment: str) -> str:
    """Submit the training of the examples with a directory for its checkpoints."""
    command = ["ddp_digits.py", "--epochs", str(EPOCHS), "--checkpoint-dir", str(directory), *options]
    fields = {"launcher": "torchrun", "interpreter": sys.executable, "working_directory": str(EXAMPLES)}
    return running.submit(*command, gpus=2, environment=LIGHT_DIGITS | environment, **fields)


def view(running: DaemonProcess, job_id: str) -> dict[str, Any]:
    """What rank 0 printed at its end."""
    lines = [line for line in running.job_log(job_id).splitlines() if '{"rank": 0' in line]
    shown: dict[str, Any] = json.loads(lines[0][lines[0].index("{") :])
    return shown


@pytest.mark.timeout(900)
def test_a_job_cancelled_at_epoch_3_and_resumed_ends_as_an_uninterrupted_one(
    running: DaemonProcess, tmp_path: Path
) -> None:
    import torch  # noqa: PLC0415 - it takes seconds, and each process of tests imports this file

    cut = submit(running, tmp_path / "cut", **{STOPPED_AFTER: "epoch 3 of"})
    eventually(lambda: "epoch 3 of" in running.job_log(cut), 200, lambda: running.job_log(cut))
    running.call("POST", f"/v1/jobs/{cut}/cancel", {"grace_s": 60})
    stopped = running.wait_job(cut, within_s=200)
    assert stopped["state"] == "cancelled"
    assert "stopped after epoch 3 of" in running.job_log(cut, "?rank=0"), "it was killed before it had saved"

    whole = submit(running, tmp_path / "whole")
    resumed = submit(running, tmp_path / "resumed", "--resume-from", str(tmp_path / "cut"))
    assert [running.wait_job(job, within_s=200)["state"] for job in (whole, resumed)] == ["succeeded", "succeeded"]
    assert view(running, resumed)["first_epoch"] == 4
    assert view(running, resumed)["test_accuracy"] == view(running, whole)["test_accuracy"]
    ends = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"] for name in ("whole", "resumed")]
    assert all(torch.equal(weights, ends[1][name]) for name, weights in ends[0].items())
