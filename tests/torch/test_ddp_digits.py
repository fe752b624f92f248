"""The training example as a user runs it: a real kill, and its resumption. Of ranks of a job: tests/system."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.daemon import eventually

EXAMPLE = Path(__file__).parents[2] / "examples" / "ddp_digits.py"
LAUNCHER_VARIABLES = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "GPULEASE_LEASE_ID")
SIMULATED = "GPU-11111111-1111-1111-1111-111111111111,GPU-22222222-2222-2222-2222-222222222222"

pytestmark = [pytest.mark.slow, pytest.mark.busy("torch"), pytest.mark.timeout(240)]


def environment() -> dict[str, str]:
    """What a lease on simulated GPUs sets, where no CUDA answers to it."""
    kept = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return kept | {"CUDA_VISIBLE_DEVICES": SIMULATED, "GPULEASE_LEASE_ID": "a-lease", "OMP_NUM_THREADS": "1"}


def finish(command: list[str]) -> str:
    ran = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=200, check=False)
    assert ran.returncode == 0, ran.stderr[-3000:]
    return ran.stdout


def view(output: str) -> dict[str, Any]:
    """What the one rank says of itself at its end."""
    (line,) = [line for line in output.splitlines() if line.startswith("{")]
    shown: dict[str, Any] = json.loads(line)
    return shown


def test_a_killed_and_resumed_training_ends_like_an_uninterrupted_one(tmp_path: Path) -> None:
    import torch  # noqa: PLC0415 - it takes seconds, and each process of tests imports this file

    whole, cut = tmp_path / "whole", tmp_path / "cut"
    alone = [sys.executable, str(EXAMPLE), "--epochs", "16", "--seed", "3", "--checkpoint-dir"]
    uninterrupted = view(finish([*alone, str(whole)]))
    assert uninterrupted["test_accuracy"] >= 0.95
    assert (uninterrupted["rank"], uninterrupted["world_size"], uninterrupted["test_images"]) == (0, 1, 359)

    kill_after_epoch(2, [*alone, str(cut)], tmp_path)
    reached = torch.load(cut / "checkpoint.pt", weights_only=True)["epoch"]
    assert reached == 2
    resumed = view(finish([*alone, str(cut), "--resume"]))

    assert resumed["first_epoch"] == reached + 1
    assert resumed["test_accuracy"] == uninterrupted["test_accuracy"]
    for name, weights in torch.load(whole / "checkpoint.pt", weights_only=True)["model"].items():
        assert torch.equal(weights, torch.load(cut / "checkpoint.pt", weights_only=True)["model"][name]), name


STOPS = """
import os, signal, sys

class Output:
    def __init__(self, file):
        self.file = file

    def __getattr__(self, name):
        return getattr(self.file, name)

    def write(self, text):
        self.file.write(text)
        if os.environ["STOPS_AFTER"] in text:
            self.file.flush()
            os.kill(os.getpid(), signal.SIGSTOP)

sys.stdout = Output(sys.stdout)
"""
"""The training stops itself after an epoch: a whole one takes no longer than a test may be late."""


def kill_after_epoch(epoch: int, command: list[str], place: Path) -> None:
    """Start the command, and SIGKILL it right after that epoch."""
    log, stops = place / "killed.log", place / "stops"
    stops.mkdir()
    (stops / "sitecustomize.py").write_text(STOPS)
    path = os.pathsep.join([str(stops), *filter(None, [os.environ.get("PYTHONPATH")])])
    variables = environment() | {"PYTHONPATH": path, "STOPS_AFTER": f"epoch {epoch} of"}
    with log.open("wb") as file:
        training = subprocess.Popen(command, env=variables, stdout=file, stderr=subprocess.STDOUT)

    def has_stopped() -> bool:
        assert training.poll() is None, f"ended before epoch {epoch}: {log.read_text()[-3000:]}"
        return Path(f"/proc/{training.pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"

    eventually(has_stopped, 100, log.read_text)
    training.kill()
    assert training.wait(timeout=60) == -signal.SIGKILL


def test_resume_without_a_directory_is_refused() -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE), "--resume"], capture_output=True, text=True, timeout=60, check=False
    )

    assert ran.returncode == 2
    assert "--resume needs --checkpoint-dir" in ran.stderr
