"""Real GPUs: the probe reads the same as nvidia-smi, and notices a real process come and go."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from gpulease_protocol.model import ComputeMode, GpuReading
from gpulease_worker.probe import gpu_health
from gpulease_worker.probe.nvml_binding import normalize_bus_id
from gpulease_worker.probe.nvml_reader import NvmlReader
from gpulease_worker.probe.process_attribution import device_file
from gpulease_worker.processes import procfs
from tests.daemon import DaemonProcess, eventually
from tests.gpu.conftest import state
from tests.gpu.subjects import Subject, processes_with_driver
from tests.worker.build import until

MIB = 1024**2
FIELDS = "uuid,pci.bus_id,name,memory.total,memory.used,temperature.gpu,power.draw,compute_mode,driver_version"
TAKEN_BYTES = 2 * 1024**3
MODES = {
    "Default": ComputeMode.DEFAULT,
    "Exclusive_Process": ComputeMode.EXCLUSIVE_PROCESS,
    "Prohibited": ComputeMode.PROHIBITED,
}


def smi() -> list[list[str]]:
    """One row for each GPU, in PCI order."""
    command = ["nvidia-smi", f"--query-gpu={FIELDS}", "--format=csv,noheader,nounits"]
    rows = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout.splitlines()
    return sorted(([word.strip() for word in row.split(",")] for row in rows), key=lambda row: normalize_bus_id(row[1]))


def read(hardware: NvmlReader, uuid: str) -> GpuReading:
    """A GPU in a new reading."""
    return next(gpu for gpu in hardware.read(()).gpus if gpu.uuid == uuid)


def shows(gpu: GpuReading, pid: int) -> bool:
    """True if a reading shows a process: by pid or, where lists are incomplete, that the GPU is in use."""
    return any(process.pid == pid for process in gpu.processes) or (not procfs.sees_the_host() and gpu.hidden_use)


@pytest.mark.skipif(shutil.which("nvidia-smi") is None, reason="there is no nvidia-smi to compare with")
def test_readings_agree_with_nvidia_smi(hardware: NvmlReader) -> None:
    reading = hardware.read(())
    rows = smi()
    assert len(reading.gpus) == len(rows)
    for gpu, row in zip(reading.gpus, rows, strict=True):
        uuid, bus_id, name, total_mib, used_mib, celsius, watts, mode, version = row
        assert (gpu.uuid, gpu.pci_bus_id, gpu.name) == (uuid, normalize_bus_id(bus_id), name)
        assert reading.driver_version == version
        assert gpu.compute_mode == MODES[mode]
        assert gpu.memory_total_bytes == pytest.approx(int(total_mib) * MIB, abs=2 * MIB)
        assert gpu.memory_used_bytes == pytest.approx(int(used_mib) * MIB, abs=64 * MIB)
        assert gpu.temperature_c == pytest.approx(float(celsius), abs=10)
        assert gpu.power_w == pytest.approx(float(watts), abs=100)
        assert gpu.minor_number is not None
        assert Path(f"/dev/nvidia{gpu.minor_number}").exists()
        assert gpu.health in gpu_health.HEALTH_WORDS


def test_a_context_is_seen_by_the_first_reading_and_cuda_without_one_is_not(
    hardware: NvmlReader, gpu: GpuReading
) -> None:
    with Subject(mask=gpu.uuid) as subject:
        subject.do("init")
        assert not shows(read(hardware, gpu.uuid), subject.pid), "cuInit alone does not use a GPU"
        subject.do("context")
        assert shows(read(hardware, gpu.uuid), subject.pid)


def test_a_process_with_memory_is_seen_at_once_and_its_memory_comes_back(hardware: NvmlReader, gpu: GpuReading) -> None:
    before = gpu.memory_used_bytes or 0
    with Subject(mask=gpu.uuid) as subject:
        subject.do("memory", TAKEN_BYTES)
        during = read(hardware, gpu.uuid)
        assert shows(during, subject.pid), "the first reading after it has its memory shows it"
        assert (during.memory_used_bytes or 0) >= before + TAKEN_BYTES
        for listed in during.processes if procfs.sees_the_host() else ():
            assert (listed.pid, listed.user is not None) == (subject.pid, True)
            assert listed.memory_bytes is None or listed.memory_bytes >= TAKEN_BYTES
        subject.kill()
        until(lambda: not shows(read(hardware, gpu.uuid), subject.pid), "it is off the list")
        until(lambda: (read(hardware, gpu.uuid).memory_used_bytes or 0) < before + 64 * MIB, "its memory is back")


def test_a_foreign_process_is_seen_before_the_next_grant(running: DaemonProcess, gpu: GpuReading) -> None:
    asked = {"devices": [gpu.uuid], "queue": False}
    with Subject(mask=gpu.uuid) as subject:
        subject.do("memory", TAKEN_BYTES)
        assert running.call("POST", "/v1/leases?wait_s=10", asked).status == 409
        assert state(running, gpu.uuid) == "foreign"
    eventually(lambda: state(running, gpu.uuid) == "free", 30, running.story)
    assert running.call("POST", "/v1/leases?wait_s=10", asked).status == 201


def test_a_paused_node_has_let_go_of_the_driver_and_takes_it_up_again(running: DaemonProcess, gpu: GpuReading) -> None:
    assert running.process is not None
    pid, files = running.process.pid, {device_file(gpu)}
    assert processes_with_driver(pid, files) == ["gpulease_worker.probe.main"], "no other process may ever have it open"
    assert running.call("POST", "/v1/nodes/n/pause").status == 200
    eventually(lambda: not processes_with_driver(pid, files), 10, running.story)
    assert running.call("POST", "/v1/nodes/n/resume").status == 200
    eventually(lambda: state(running, gpu.uuid) == "free", 60, running.story)
