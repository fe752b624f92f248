"""Steps A, B and F: what this machine is, what `gpulease doctor` says of it, and what the driver says of its health."""

from __future__ import annotations

import glob
import json
import os
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pynvml

from bench.hardware.machine import MIB, Machine, look
from gpulease.cuda import libcuda
from gpulease_protocol.launchers import strip_launcher_variables
from gpulease_worker.probe import driver_check
from gpulease_worker.probe.process_attribution import device_file
from gpulease_worker.processes import procfs
from tests.gpu.subjects import MASK, SubjectFailed, in_the_way

SMI = "pci.bus_id,persistence_mode,compute_mode,mig.mode.current,memory.reserved,memory.used,ecc.mode.current"
SMI_S = 15.0
FABRIC_STATES = ("not supported", "not started", "in progress", "completed")
ASK_S = 30.0


def facts(machine: Machine) -> None:
    """A: what kind of machine this is."""
    report = machine.report
    own = os.stat("/proc/self/ns/pid").st_ino
    report.note("kernel; Python; nvidia-ml-py", f"{os.uname().release}; {sys.version.split()[0]}; {binding()}")
    report.note("driver: kernel module; library", f"{driver_check.module_version()}; {machine.reading.driver_version}")
    report.note("torch", machine.torch or "has CUDA")
    report.note(
        "pid namespace: does the driver's list show the processes of others?",
        f"{own}, {'the host' if procfs.sees_the_host() else 'not the host'}'s: "
        + ("it does" if procfs.sees_the_host() else "it may leave some out; memory and utilization decide"),
    )
    report.judge(
        "do library and kernel module fit?",
        driver_check.version_mismatch(machine.reading.driver_version) or "no word against it",
        "they do",
        holds=driver_check.version_mismatch(machine.reading.driver_version) is None,
        relies="probe/driver_check.py refuses readings otherwise",
    )
    for gpu in machine.reading.gpus:
        report.note(
            f"GPU {gpu.index}",
            f"{gpu.uuid}, {gpu.name}, {gpu.pci_bus_id}, {(gpu.memory_total_bytes or 0) // MIB} MiB, {gpu.health}",
        )
        path = device_file(gpu)
        report.judge(
            f"GPU {gpu.index}: is `/dev/nvidia` + minor number its device file?",
            f"{path}: {'exists' if path and Path(path).exists() else 'does not exist'}",
            "exists",
            holds=path is None or Path(path).exists(),
            relies="attribution.device_file",
        )
    report.note("device files", ", ".join(sorted(glob.glob("/dev/nvidia*"))) or "none in /dev")
    with report.asking("nvidia-smi"):
        report.note(f"nvidia-smi: {SMI}", smi(f"--query-gpu={SMI}", "--format=csv,noheader"))
    idle = machine.gpu
    if idle is not None and idle.memory_used_bytes is not None:
        report.note("memory in use on the unused GPU", f"{idle.memory_used_bytes // MIB} MiB")


def binding() -> str:
    """Version of nvidia-ml-py."""
    try:
        return metadata.version("nvidia-ml-py")
    except metadata.PackageNotFoundError:
        return "unknown"


def smi(*options: str) -> str:
    """What nvidia-smi prints. Raises SubjectFailed."""
    try:
        ran = subprocess.run(
            ["nvidia-smi", *options],
            capture_output=True,
            text=True,
            timeout=SMI_S,
            check=True,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise SubjectFailed(str(error)) from error
    return "; ".join(ran.stdout.strip().splitlines())


def doctor(machine: Machine) -> None:
    """B: what `gpulease doctor` finds wrong, its daemon aside, for none runs."""
    with machine.report.asking("gpulease doctor"):
        command = [sys.executable, "-m", "gpulease_cli", "doctor", "--json", "--data-dir", str(machine.place / "data")]
        environment = strip_launcher_variables(os.environ) | {"GPULEASE_URL": "http://127.0.0.1:9"}
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment, check=False)
        try:
            found = json.loads(ran.stdout)["items"]
        except (ValueError, KeyError, TypeError):
            raise SubjectFailed(f"its answer is {ran.stdout[-200:]!r}, {ran.stderr[-200:]!r}") from None
        for word in ("wrong", "unknown"):
            said = [f"{one['check']}: {one['sentence']}" for one in found if one["health"] == word]
            machine.report.note(f"gpulease doctor, without a daemon: {word}", " ".join(said) or "nothing")


def fabric(machine: Machine) -> None:
    """F: what the driver says of a GPU's health; and whether CUDA starts on each that gpulease would grant."""
    for gpu in machine.reading.gpus:
        with machine.report.asking(f"GPU {gpu.index}: fabric state"), look(gpu) as seen:
            machine.report.note(f"GPU {gpu.index}: fabric state as the driver tells it", fabric_state(seen.handle))
        machine.report.note(
            f"GPU {gpu.index}: recovery action; rows remapped; MIG; throttling",
            f"{gpu.recovery_action}; {gpu.remapped_rows}; {gpu.mig}; {', '.join(gpu.throttle_reasons or ()) or 'none'}",
        )
        if (why := in_the_way(gpu)) is not None:
            machine.report.not_run(f"GPU {gpu.index}: does CUDA start on it?", why)
            continue
        with machine.report.asking(f"GPU {gpu.index}: does CUDA start on it?"):
            starts(machine, gpu.index, gpu.uuid)


def starts(machine: Machine, index: int, uuid: str) -> None:
    """Whether CUDA initialises with the mask of a lease, and shows that GPU."""
    try:
        found, shown = libcuda.query_devices({**os.environ, MASK: uuid, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, ASK_S), ""
    except libcuda.CudaNotInstalled as none:
        raise SubjectFailed(f"there is no libcuda: {none}") from none
    except libcuda.CudaError as failed:
        found, shown = [], f"it does not: {failed}"
    machine.report.judge(
        f"GPU {index}, whose health is ok: does CUDA start on it, and show it under its UUID as the mask?",
        shown or f"it shows {', '.join(found) or 'nothing'}",
        f"it shows {uuid}",
        holds=found == [uuid],
        relies="health.py calls it ok, so it is granted; the masks of leases",
    )


def fabric_state(handle: object) -> str:
    """State and status, in words where they have some."""
    try:
        told = pynvml.c_nvmlGpuFabricInfo_v2_t()
        told.version = pynvml.nvmlGpuFabricInfo_v2
        pynvml.nvmlDeviceGetGpuFabricInfoV(handle, pynvml.byref(told))
    except (pynvml.NVMLError, pynvml.NVMLLibraryMismatchError, AttributeError) as error:
        return f"not told: {error}"
    named = FABRIC_STATES[told.state] if told.state < len(FABRIC_STATES) else f"state {told.state}"
    return f"{named}, status {told.status}, health mask {told.healthMask:#x}"
