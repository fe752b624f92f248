"""A cancelled training saves what it has, and one that is submitted with `--resume-from` ends where it would have."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.daemon import DaemonProcess, daemon, eventually

EXAMPLES = Path(__file__).parents[2] / "examples"
FINAL = ("succeeded", "failed", "cancelled", "timed_out", "lost")
EPOCHS = 25
"""Enough that a cancellation during the third finds it training."""


@pytest.fixture
def running(tmp_path: Path) -> Iterator[DaemonProcess]:
    with daemon(tmp_path, "--simulate", "4") as started:
        yield started


def submit(running: DaemonProcess, directory: Path, *options: str) -> str:
    command = ["ddp_digits.py", "--epochs", str(EPOCHS), "--checkpoint-dir", str(directory), *options]
    body = {"command": command, "gpus": 2, "interpreter": sys.executable, "working_directory": str(EXAMPLES)}
    answer = running.call("POST", "/v1/jobs", body)
    assert answer.status == 201, answer.content
    return str(answer.json["id"])


def printed(running: DaemonProcess, job_id: str) -> str:
    return running.call("GET", f"/v1/jobs/{job_id}/logs").content.decode()


def ended(running: DaemonProcess, job_id: str) -> dict[str, Any]:
    path = f"/v1/jobs/{job_id}"
    eventually(lambda: running.call("GET", path).json["state"] in FINAL, 100, lambda: printed(running, job_id))
    job: dict[str, Any] = running.call("GET", path).json
    return job


def view(running: DaemonProcess, job_id: str) -> dict[str, Any]:
    """What rank 0 printed at its end."""
    lines = [line for line in printed(running, job_id).splitlines() if '{"rank": 0' in line]
    shown: dict[str, Any] = json.loads(lines[0][lines[0].index("{") :])
    return shown


@pytest.mark.timeout(240)
def test_a_job_cancelled_at_epoch_3_and_resumed_ends_as_an_uninterrupted_one(
    running: DaemonProcess, tmp_path: Path
) -> None:
    cut = submit(running, tmp_path / "cut")
    eventually(lambda: "epoch 3 of" in printed(running, cut), 90, lambda: printed(running, cut))
    running.call("POST", f"/v1/jobs/{cut}/cancel", {"grace_s": 30})
    stopped = ended(running, cut)
    assert stopped["state"] == "cancelled"
    assert "stopped after epoch" in printed(running, cut), "it was killed before it had saved"

    whole = submit(running, tmp_path / "whole")
    resumed = submit(running, tmp_path / "resumed", "--resume-from", str(tmp_path / "cut"))
    assert [ended(running, job)["state"] for job in (whole, resumed)] == ["succeeded", "succeeded"]
    assert 4 <= view(running, resumed)["first_epoch"] <= EPOCHS
    assert view(running, resumed)["test_accuracy"] == view(running, whole)["test_accuracy"]
    ends = [torch.load(tmp_path / name / "checkpoint.pt", weights_only=True)["model"] for name in ("whole", "resumed")]
    assert all(torch.equal(weights, ends[1][name]) for name, weights in ends[0].items())
