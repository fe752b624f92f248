"""Real GPUs: what the probe reads is what nvidia-smi says, and a real process is seen come and go."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from gpulease.model import ComputeMode, GpuReading
from gpulease_worker import health
from gpulease_worker.hardware import Hardware
from gpulease_worker.nvml import spell_bus_id
from tests.daemon import daemon, eventually
from tests.worker.build import python, until

MIB = 1024**2
FIELDS = "uuid,pci.bus_id,name,memory.total,memory.used,temperature.gpu,power.draw,compute_mode,driver_version"
TAKEN_BYTES = 2 * 1024**3
HOLD = (
    f"import torch; held = torch.empty({TAKEN_BYTES}, dtype=torch.uint8, device='cuda:0'); torch.cuda.synchronize(); "
    "print('held', flush=True); input()"
)
MODES = {
    "Default": ComputeMode.DEFAULT,
    "Exclusive_Process": ComputeMode.EXCLUSIVE_PROCESS,
    "Prohibited": ComputeMode.PROHIBITED,
}


@pytest.fixture(scope="module")
def hardware() -> Iterator[Hardware]:
    source = Hardware("n")
    yield source
    source._stop()


def smi() -> list[list[str]]:
    """One row for each GPU, in PCI order."""
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    rows = subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()
    return sorted(([word.strip() for word in row.split(",")] for row in rows), key=lambda row: spell_bus_id(row[1]))


@contextmanager
def holder(uuid: str) -> Iterator[subprocess.Popen[str]]:
    """A real process that holds 2 GiB of a GPU."""
    process = subprocess.Popen(
        ["env", f"CUDA_VISIBLE_DEVICES={uuid}", *python("-c", HOLD)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == "held\n"
        yield process
    finally:
        process.kill()
        process.communicate()


def seen(read: Callable[[], GpuReading], pid: int) -> bool:
    return any(process.pid == pid for process in read().processes)


def test_readings_agree_with_nvidia_smi(hardware: Hardware) -> None:
    reading = hardware.read(())
    rows = smi()
    assert len(reading.gpus) == len(rows)
    for gpu, row in zip(reading.gpus, rows, strict=True):
        uuid, bus_id, name, total_mib, used_mib, celsius, watts, mode, version = row
        assert (gpu.uuid, gpu.pci_bus_id, gpu.name) == (uuid, spell_bus_id(bus_id), name)
        assert reading.driver_version == version
        assert gpu.compute_mode == MODES[mode]
        assert gpu.memory_total_bytes == pytest.approx(int(total_mib) * MIB, abs=2 * MIB)
        assert gpu.memory_used_bytes == pytest.approx(int(used_mib) * MIB, abs=64 * MIB)
        assert gpu.temperature_c == pytest.approx(float(celsius), abs=10)
        assert gpu.power_w == pytest.approx(float(watts), abs=100)
        assert gpu.minor_number is not None
        assert Path(f"/dev/nvidia{gpu.minor_number}").exists()
        assert gpu.health in health.WORDS


def test_a_process_with_memory_is_listed_at_once_and_its_memory_comes_back(hardware: Hardware) -> None:
    def read() -> GpuReading:
        return hardware.read(()).gpus[0]

    before = read()
    assert before.memory_used_bytes is not None
    with holder(before.uuid) as process:
        assert seen(read, process.pid), "the first reading after it has its memory shows it"
        during = read()
        assert during.memory_used_bytes is not None
        assert during.memory_used_bytes >= before.memory_used_bytes + TAKEN_BYTES
        (listed,) = [one for one in during.processes if one.pid == process.pid]
        assert listed.user is not None
        assert listed.memory_bytes is None or listed.memory_bytes >= TAKEN_BYTES
    until(lambda: not seen(read, process.pid), "it is off the list")
    until(lambda: (read().memory_used_bytes or 0) < before.memory_used_bytes + 64 * MIB, "its memory is back")


def test_a_foreign_process_is_seen_before_the_next_grant(tmp_path: Path) -> None:
    with daemon(tmp_path, "--node", "n") as running:

        def state() -> str:
            return str(running.call("GET", "/v1/gpus").json["items"][0]["state"])

        eventually(lambda: state() == "free", 30)
        uuid = running.call("GET", "/v1/gpus").json["items"][0]["uuid"]
        asked = {"devices": [uuid], "queue": False}
        with holder(uuid):
            assert running.call("POST", "/v1/leases?wait_s=10", asked).status == 409
            assert state() == "foreign"
        eventually(lambda: state() == "free", 30)
        assert running.call("POST", "/v1/leases?wait_s=10", asked).status == 201


def test_a_gpu_whose_holder_was_killed_is_free_once_its_memory_is_back(tmp_path: Path) -> None:
    with daemon(tmp_path, "--node", "n") as running:
        first = running.call("POST", "/v1/leases?wait_s=30", {"count": 1}).json
        uuid = first["gpus"][0]["uuid"]
        with holder(uuid) as process:
            running.call("POST", f"/v1/leases/{first['id']}/release", {"token": first["token"]})
            asked = {"devices": [uuid], "queue": False}
            assert running.call("POST", "/v1/leases?wait_s=10", asked).status == 409, "it drains"
            process.kill()
            process.wait()
        waiting = running.call("POST", "/v1/leases?wait_s=60", {"devices": [uuid]})
        assert waiting.status == 201
        gpu = running.call("GET", f"/v1/gpus/{uuid}").json
        assert not gpu["processes"]
        assert gpu["memory_used_bytes"] < TAKEN_BYTES
