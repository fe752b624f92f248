"""Every test here is marked `gpu`: the only ones that may be skipped, and that say why.

They are for a machine as it is. They set nothing, need no privilege and no second GPU, and leave alone a GPU that
somebody is on. No test initialises CUDA or NVML in this process for good: `subjects.Subject` does so in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease.model import GpuReading
from gpulease_worker import driver
from gpulease_worker.hardware import Hardware
from gpulease_worker.source import ReadingFailed
from tests.daemon import DaemonProcess, daemon, eventually
from tests.gpu.subjects import choose, device_files, torch_problem

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder, and skip them when NVML shows no GPU."""
    mine = [item for item in items if HERE in item.path.parents]
    why = driver.unavailable() if mine else None
    for item in mine:
        item.add_marker(pytest.mark.gpu)
        if why is not None:
            item.add_marker(pytest.mark.skip(reason=why))


@pytest.fixture(scope="session")
def torch_with_cuda() -> None:
    """Skip where torch has no CUDA that works, as with a CPU build; a process of its own says so."""
    if (why := torch_problem()) is not None:
        pytest.skip(why)


@pytest.fixture
def hardware() -> Iterator[Hardware]:
    """What reads the GPUs, in this process."""
    source = Hardware("n")
    yield source
    source._stop()


@pytest.fixture
def gpu(hardware: Hardware) -> GpuReading:
    """A GPU that nobody is on; skipped, with who is on each, when there is none."""
    try:
        found, why = choose(hardware.read(()))
    except ReadingFailed as failed:
        pytest.skip(str(failed))
    if found is None:
        pytest.skip("; ".join(f"{uuid} is left alone: {reason}" for uuid, reason in why.items()))
    return found


@pytest.fixture
def running(tmp_path: Path, gpu: GpuReading) -> Iterator[DaemonProcess]:
    """A daemon with this machine's GPUs, one of them free."""
    with daemon(tmp_path, "--node", "n", **device_files()) as started:
        eventually(lambda: state(started, gpu.uuid) == "free", 30, started.story)
        yield started


def state(running: DaemonProcess, uuid: str) -> str:
    """A GPU's state."""
    return str(running.call("GET", f"/v1/gpus/{uuid}").json["state"])
