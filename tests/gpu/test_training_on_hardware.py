"""Real GPUs: the example trains under a lease, over NCCL, and sees exactly the GPUs that were leased."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gpulease_protocol.model import GpuReading
from gpulease_worker.probe.nvml_reader import NvmlReader
from tests.daemon import DaemonProcess, daemon, eventually
from tests.gpu.subjects import in_the_way

EXAMPLES = Path(__file__).parents[2] / "examples"
FINAL = ("succeeded", "failed", "cancelled", "timed_out", "lost")
COUNT = "import torch; print('devices', torch.cuda.device_count())"


@pytest.fixture
def gpus(hardware: NvmlReader, gpu: GpuReading) -> int:
    """How many unused GPUs to use: 2 if there are as many, else 1."""
    return min(2, sum(in_the_way(one) is None for one in hardware.read(()).gpus))


def printed(running: DaemonProcess, command: list[str], **what: Any) -> list[str]:
    """The lines of a job that has succeeded."""
    body = {"command": command, "working_directory": str(EXAMPLES), **what}
    job = running.call("POST", "/v1/jobs", body).json
    path = f"/v1/jobs/{job['id']}"
    eventually(lambda: running.call("GET", path).json["state"] in FINAL, 240, running.story)
    text = running.call("GET", f"{path}/logs").content.decode()
    assert running.call("GET", path).json["state"] == "succeeded", text
    return text.splitlines()


@pytest.mark.usefixtures("torch_with_cuda")
@pytest.mark.timeout(600)
def test_the_example_trains_over_nccl_on_the_gpus_of_its_lease(tmp_path: Path, gpus: int) -> None:
    with daemon(tmp_path, "--node", "n") as running:
        found = printed(running, [sys.executable, "-c", COUNT], gpus=gpus, launcher="plain")
        assert any(line.endswith(f"devices {gpus}") for line in found), found
        lines = printed(running, ["ddp_digits.py"], gpus=gpus, interpreter=sys.executable)
        views = [json.loads(line[line.index("{") :]) for line in lines if '{"rank": ' in line]
        assert sorted(view["device"] for view in views) == [f"cuda:{rank}" for rank in range(gpus)]
        assert {view["world_size"] for view in views} == {gpus}
        assert all(view["test_accuracy"] >= 0.95 for view in views)
