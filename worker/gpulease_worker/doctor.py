"""Judges what may be wrong with a host and what to do about it. Pure: `doctor_facts` gathers the facts."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from gpulease.cuda.libcuda import SYSTEM_NOT_READY
from gpulease_protocol.model import ComputeMode, GpuReading
from gpulease_worker import doctor_joined, doctor_service
from gpulease_worker.doctor_findings import Finding, HostFacts, Outcome, fine, unknown, warning, wrong
from gpulease_worker.probe.gpu_health import FABRIC_NOT_READY, ROW_REMAP_PENDING
from gpulease_worker.processes.procfs import INITIAL_PID_NAMESPACE

RELEASED_S = 1767225600.0
"""2026-01-01: a correct clock shows no earlier time."""
CLOCK_TOLERANCE_S = 60.0
HEALTH_REMEDIES = {
    "mig": "Disable MIG to lease the whole GPU (gpulease node pause, nvidia-smi -i INDEX -mig 0).",
    "processes_unknown": "Run the worker with permission to list processes.",
    "reboot_required": "Reboot this host.",
    "row_remap_failed": "Replace the GPU.",
    FABRIC_NOT_READY: "Start nvidia-fabricmanager (systemctl status shows it); nvidia-smi -q (Fabric) shows progress.",
}
RESET_REMEDY = "See nvidia-smi -q -i INDEX; gpulease node pause releases the GPUs for a reset."
"""The remedy for any other health that is not ok."""
RESET_WHEN_IDLE = "Reset it when it is idle (gpulease node pause, nvidia-smi -i INDEX --gpu-reset)."
WARNING_REMEDIES = {
    "drain_p2p": "Use it alone: data exchanged with other GPUs may be lost. See nvidia-smi -q -i INDEX.",
    ROW_REMAP_PENDING: RESET_WHEN_IDLE,
    "retired_pages_pending": RESET_WHEN_IDLE,
    FABRIC_NOT_READY: "Nothing if jobs use 1 GPU each; GPUs may reach each other over PCIe only, or not at all.",
}
"""What to do, by warning."""


def examine(facts: HostFacts) -> tuple[Finding, ...]:
    """One finding per check: what is wrong first, and causes before consequences."""
    return tuple(sorted((check(facts) for check in CHECKS), key=lambda finding: SEVERITY.index(finding.health)))


def verdict(findings: Sequence[Finding]) -> str:
    """How many things are wrong, in words."""
    count = sum(finding.health is Outcome.WRONG for finding in findings)
    return "nothing is wrong" if not count else "1 thing is wrong" if count == 1 else f"{count} things are wrong"


def driver(facts: HostFacts) -> Finding:
    """Is the kernel driver loaded?"""
    if facts.kernel_driver is None and facts.gpus:
        return unknown(
            "driver", "NVML answers although /proc does not show the driver, as under WSL and in some containers."
        )
    if facts.kernel_driver is None and facts.daemon_has_gpus:
        return unknown("driver", "No NVIDIA driver is loaded; the daemon's GPUs are simulated or on other hosts.")
    if facts.kernel_driver is None:
        return wrong(
            "driver", "No NVIDIA driver is loaded.", "Install it, or try without GPUs: gpulease serve --simulate 4."
        )
    return fine("driver", f"NVIDIA driver {facts.kernel_driver} is loaded.")


def library(facts: HostFacts) -> Finding:
    """Does the library match the loaded driver? After an upgrade it may not, until a restart."""
    if facts.library is None:
        sentence = "libnvidia-ml.so.1 was not found."
        if facts.kernel_driver is None or facts.nvml_problem is None:
            return unknown("driver library", sentence)
        return wrong("driver library", sentence, "Install the driver's user-space libraries, or set LD_LIBRARY_PATH.")
    if facts.kernel_driver is None:
        driver_version = "the driver's version is unknown" if facts.gpus else "no driver is loaded"
        return unknown("driver library", f"The library has version {facts.library}; {driver_version}.")
    if facts.library != facts.kernel_driver:
        sentence = f"The library has version {facts.library}, the loaded driver {facts.kernel_driver}: new processes \
cannot use CUDA."
        return wrong("driver library", sentence, "Reboot, or unload and load the NVIDIA kernel modules.")
    return fine("driver library", f"It matches the driver's version, {facts.library}.")


def binding(facts: HostFacts) -> Finding:
    """Is `pynvml` the module of nvidia-ml-py, not the old package of that name?"""
    if facts.binding is None and facts.daemon_has_gpus:
        return unknown("pynvml", "nvidia-ml-py is not installed beside this program; only a worker needs it.")
    if facts.binding is None:
        return wrong("pynvml", "nvidia-ml-py is not installed.", "pip install 'gpulease[worker]'")
    if facts.binding.endswith("__init__.py"):
        sentence = f"An old package shadows nvidia-ml-py: {facts.binding}."
        return wrong("pynvml", sentence, "pip uninstall -y pynvml nvidia-ml-py && pip install nvidia-ml-py")
    return fine("pynvml", f"It is the module of nvidia-ml-py: {facts.binding}.")


def nvml(facts: HostFacts) -> Finding:
    """Does NVML answer?"""
    if facts.nvml_problem is not None and facts.kernel_driver is None:
        return unknown("NVML", "There is no driver to ask.")
    if facts.nvml_problem is not None and facts.binding is None:
        return unknown("NVML", "There is no nvidia-ml-py to ask it with.")
    if facts.nvml_problem is not None:
        return wrong("NVML", facts.nvml_problem, "See the checks above; nvidia-smi should list the GPUs.")
    conditions = {gpu.index: _health_and_warnings(gpu, facts) for gpu in facts.gpus}
    unhealthy = {index: health for index, (health, _) in conditions.items() if health != "ok"}
    warned = {index: warnings for index, (_, warnings) in conditions.items() if warnings}
    if unhealthy:
        remedies = dict.fromkeys(HEALTH_REMEDIES.get(health, RESET_REMEDY) for health in unhealthy.values())
        sentence = ", ".join(f"GPU {index} is {health}" for index, health in unhealthy.items())
        return wrong("NVML", f"{sentence}.", " ".join(remedies))
    if warned:
        remedies = dict.fromkeys(
            WARNING_REMEDIES.get(word, RESET_REMEDY) for warnings in warned.values() for word in warnings
        )
        sentence = ", ".join(f"GPU {index} has {' and '.join(warnings)}" for index, warnings in warned.items())
        return warning("NVML", f"{sentence}; this does not prevent its use.", " ".join(remedies))
    return fine("NVML", f"It answers and shows {_gpus(len(facts.gpus))}.")


def _health_and_warnings(gpu: GpuReading, facts: HostFacts) -> tuple[str, tuple[str, ...]]:
    """Health and warnings of a GPU. CUDA decides about the fabric, and was asked after the reading."""
    if gpu.health == FABRIC_NOT_READY and gpu.uuid in (facts.cuda or ()):
        return "ok", (*gpu.warnings, FABRIC_NOT_READY)
    return gpu.health, gpu.warnings


def cuda(facts: HostFacts) -> Finding:
    """Does CUDA start? NVML answers even if it does not."""
    if not facts.gpus:
        return unknown("CUDA", "Not checked, because no GPU was read.")
    if facts.cuda:
        return fine("CUDA", f"It starts and shows {_gpus(len(facts.cuda))}.")
    if facts.cuda is not None:
        return warning(
            "CUDA", "It starts, but shows no GPU.", "CUDA leaves out GPUs in MIG mode that have no instances."
        )
    if facts.cuda_code == SYSTEM_NOT_READY:
        sentence = "CUDA does not start: error 802, system not ready. The fabric manager is not running or not ready."
        remedy = "systemctl start nvidia-fabricmanager, in the driver's version; for a virtual machine, on its host."
        return wrong("CUDA", sentence, remedy)
    if facts.cuda_absent or facts.cuda_problem is None:
        return unknown("CUDA", f"It cannot be checked: {facts.cuda_problem or 'it was not asked'}.")
    return wrong("CUDA", f"CUDA does not start: {facts.cuda_problem}.", "See the checks above, and dmesg.")


def pid_namespace(facts: HostFacts) -> Finding:
    """Are the processes of the whole host visible? In another PID namespace the driver silently hides those outside."""
    if facts.wsl:
        sentence = "Under WSL2 not every process on a GPU is listed; memory and utilization tell whether it is in use. \
GPULEASE_IDLE_MEMORY_BYTES is the memory that Windows may use."
        return unknown("PID namespace", sentence)
    if facts.pid_namespace is None:
        return unknown("PID namespace", "/proc/self/ns/pid cannot be read.")
    if facts.pid_namespace != INITIAL_PID_NAMESPACE:
        sentence = "It is not the host's. Processes outside it are hidden; only memory and utilization show their use."
        return wrong("PID namespace", sentence, "Run the worker in the host's: docker run --pid=host.")
    return fine("PID namespace", "It is the host's: every process on a GPU is visible.")


def claims(facts: HostFacts) -> Finding:
    """Is each GPU in the ledger of one daemon? Its worker claims it, which others see in the same network namespace."""
    if facts.network_of_host is False:
        sentence = "This is not the host's network: whether another gpulease here leases the same GPUs cannot be seen."
        return warning("claims", sentence, "Run the worker in the host's network: docker run --network=host.")
    indices: dict[str, list[int]] = {}
    for gpu, holder in zip(facts.gpus, facts.claims, strict=False):
        if holder is not None:
            indices.setdefault(holder, []).append(gpu.index)
    if not indices:
        return unknown("claims", "No worker has claimed a GPU that NVML shows here.")
    if len(indices) == 1:
        return fine("claims", f"One worker leases the GPUs of this host: {next(iter(indices))}.")
    sentence = "; ".join(f"GPU {_indices(held)}: {holder}" for holder, held in indices.items())
    return warning("claims", f"Several workers lease the GPUs of this host: {sentence}.", "Stop all but one.")


def persistence(facts: HostFacts) -> Finding:
    """Does the driver stay initialized while no process uses a GPU?"""
    if facts.persistence is None:
        return unknown("persistence mode", "nvidia-smi does not show it.")
    off = _indices([index for index, on in enumerate(facts.persistence) if not on])
    if off:
        sentence = f"Off on GPU {off}: the first use takes seconds whenever no worker or program has the GPU open."
        return warning("persistence mode", sentence, "Run nvidia-persistenced, or nvidia-smi -pm 1.")
    return fine("persistence mode", "On.")


def compute_modes(facts: HostFacts) -> Finding:
    """How many processes may use each GPU?"""
    modes = {mode: [gpu.index for gpu in facts.gpus if gpu.compute_mode is mode] for mode in (*ComputeMode, None)}
    if not facts.gpus:
        return unknown("compute mode", "No GPU was read.")
    closed = _indices(modes[ComputeMode.PROHIBITED])
    if closed:
        sentence = f"PROHIBITED on GPU {closed}: no process may use it, so it is never granted."
        return wrong("compute mode", sentence, f"nvidia-smi -i {closed.replace(' ', '')} -c DEFAULT")
    single = _indices(modes[ComputeMode.EXCLUSIVE_PROCESS])
    if single:
        return fine(
            "compute mode",
            f"EXCLUSIVE_PROCESS on GPU {single}: only one process at a time, so two ranks cannot share it.",
        )
    unread = _indices(modes[None])
    if unread:
        return unknown("compute mode", f"The driver does not report the mode of GPU {unread}.")
    return fine("compute mode", "DEFAULT on every GPU.")


def clock(facts: HostFacts) -> Finding:
    """Is the wall clock plausible? Leases use a monotonic clock, but people and logs use this one."""
    if facts.wall_s < RELEASED_S:
        return wrong(
            "clock", "The wall clock shows a time before this program was released.", "timedatectl set-ntp true"
        )
    if facts.newest_s is not None and facts.newest_s > facts.wall_s + CLOCK_TOLERANCE_S:
        ahead_s = facts.newest_s - facts.wall_s
        sentence = f"The wall clock was set back: {facts.data_dir} was written {ahead_s:.0f} s in the future."
        return wrong("clock", sentence, "timedatectl set-ntp true")
    return fine("clock", "It is plausible; leases do not depend on it.")


CHECKS: Sequence[Callable[[HostFacts], Finding]] = (
    driver,
    library,
    binding,
    nvml,
    cuda,
    pid_namespace,
    claims,
    persistence,
    compute_modes,
    clock,
    doctor_service.disk,
    doctor_service.units,
    doctor_service.socket,
    doctor_service.port,
    doctor_service.certificate,
    doctor_service.daemon,
    doctor_joined.joined,
    doctor_service.workers,
    doctor_service.version,
)
"""Every check, causes before consequences."""
SEVERITY = (Outcome.WRONG, Outcome.WARNING, Outcome.FINE, Outcome.UNKNOWN)


def _indices(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))


def _gpus(gpus: int) -> str:
    return f"{gpus} GPU{'' if gpus == 1 else 's'}"
