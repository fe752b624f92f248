"""Tests on real GPUs, all marked `gpu`: the only tests that may be skipped, with a reason.

They run on any machine with a GPU. They set nothing, need no privileges and no second GPU, and leave GPUs in use alone.
No test initializes CUDA or NVML permanently in this process: `subjects.Subject` does so in another.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gpulease_protocol.model import GpuReading
from gpulease_worker import gpu_claims
from gpulease_worker.probe import nvml_check
from gpulease_worker.probe.nvml_reader import NvmlReader
from gpulease_worker.probe.probe_protocol import ReadingFailed
from tests.daemon import DaemonProcess, daemon, eventually
from tests.gpu.subjects import choose, device_files, torch_problem

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the tests of this folder."""
    for item in items:
        if item.path.parent == HERE:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def _gpus() -> None:
    """Skip if NVML shows no GPU."""
    if (why := nvml_check.unavailable_reason()) is not None:
        pytest.skip(why)


@pytest.fixture(scope="session")
def torch_with_cuda() -> None:
    """Skip if torch has no working CUDA, as with a CPU build; a separate process checks that."""
    if (why := torch_problem()) is not None:
        pytest.skip(why)


@pytest.fixture
def hardware() -> Iterator[NvmlReader]:
    """Reads the GPUs, in this process."""
    source = NvmlReader("n")
    yield source
    source._stop()


@pytest.fixture
def gpu(hardware: NvmlReader) -> GpuReading:
    """An unused GPU; skips, with the processes on each GPU, if there is none."""
    try:
        found, why = choose(hardware.read(()))
    except ReadingFailed as failed:
        pytest.skip(str(failed))
    if found is None:
        pytest.skip("; ".join(f"{uuid} is left alone: {reason}" for uuid, reason in why.items()))
    if (holder := gpu_claims.holder_of(found.uuid)) is not None:
        pytest.skip(f"{found.uuid} is in the ledger of a gpulease daemon, whose worker is {holder}")
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
