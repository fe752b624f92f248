"""What may be wrong with a host, and what to do about it. Pure: `symptoms` gathers the facts, this judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpulease.cuda import SYSTEM_NOT_READY
from gpulease.model import ComputeMode, GpuReading, Noun
from gpulease_worker.health import FABRIC, ROW_REMAP_PENDING
from gpulease_worker.processes import INITIAL_PID_NAMESPACE

RELEASED_S = 1767225600.0
"""2026-01-01: no clock that is right shows less."""
DISK_BYTES = 2**30
"""Less free space than this is soon none: the ledger, and the logs of jobs."""
CLOCK_TOLERANCE_S = 60.0
WHAT_HELPS = {
    "mig": "Take MIG away to lease the GPU whole (gpulease node pause, nvidia-smi -i INDEX -mig 0).",
    "processes_unknown": "Run the worker with the right to list processes.",
    "reboot_required": "Reboot this host.",
    "row_remap_failed": "Replace the GPU.",
    FABRIC: "systemctl status nvidia-fabricmanager, and start it; nvidia-smi -q (Fabric) shows how far it is.",
}
RESET = "nvidia-smi -q -i INDEX says more; gpulease node pause lets go of the GPUs for a reset."
"""What helps a GPU of any other health that is not ok."""
AT_LEISURE = "Reset it when nothing runs on it (gpulease node pause, nvidia-smi -i INDEX --gpu-reset)."
WARNED = {
    "drain_p2p": "Use it alone: data exchanged with other GPUs may be lost; nvidia-smi -q -i INDEX says more.",
    ROW_REMAP_PENDING: AT_LEISURE,
    "retired_pages_pending": AT_LEISURE,
    FABRIC: "None where GPUs are used alone, as with NVLink off; several reach each other over PCIe, if at all.",
}
"""By warning: what to do."""


class Health(StrEnum):
    """What a check found."""

    FINE = "fine"
    WARNING = "warning"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Noun):
    """The result of one check."""

    check: str
    """What was looked at."""
    health: Health
    """`fine`, `wrong`, `warning` for what should be known and stops nobody, or `unknown` where it could not be told."""
    sentence: str
    """What was found."""
    remedy: str = ""
    """What to do; empty where there is nothing to be done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What was seen on a host. None is what could not be seen."""

    kernel_driver: str | None = None
    """Version of the loaded kernel driver (`/proc/driver/nvidia/version`)."""
    library: str | None = None
    """Version of `libnvidia-ml.so.1`, by the name of the file it leads to."""
    nvml_problem: str | None = None
    """Why NVML gave no reading; None when it gave one."""
    gpus: tuple[GpuReading, ...] = ()
    """What NVML read."""
    cuda: tuple[str, ...] | None = None
    """UUIDs of the GPUs that CUDA shows; None where it did not start, or was not asked."""
    cuda_problem: str | None = None
    """Why CUDA did not start."""
    cuda_code: int | None = None
    """The error that it gave."""
    cuda_absent: bool = False
    """There is no libcuda."""
    pid_namespace: int | None = None
    """Inode of this process's PID namespace."""
    wsl: bool = False
    """The GPUs are those of Windows, through its /dev/dxg."""
    persistence: tuple[bool, ...] | None = None
    """Whether each GPU is in persistence mode, in PCI order."""
    binding: str | None = None
    """File that `import pynvml` would load; None when there is none."""
    socket: str = ""
    """Where the daemon's Unix socket should be."""
    socket_mode: int | None = None
    """Its permissions; None when it does not exist."""
    socket_opens: bool = False
    """Whether this user may connect to it."""
    wall_s: float = 0.0
    """The wall clock, seconds since 1970."""
    newest_s: float | None = None
    """When anything in the data directory was last written, by the wall clock of that time."""
    daemon_problem: str | None = None
    """Why the daemon cannot be reached or cannot grant; None when it can."""
    daemon_remedy: str = ""
    """What to do about that."""
    daemon_has_readings: bool = False
    """Whether the daemon knows of GPUs: of this host, simulated, or of others."""
    stands_by_for: str | None = None
    """Who is the writer, where the daemon stands by."""
    data_dir: str = ""
    """The daemon's data directory."""
    free_bytes: int | None = None
    """Free space there."""


def examine(facts: Facts) -> tuple[Finding, ...]:
    """One finding for each check, in the order in which they should be read."""
    return tuple(check(facts) for check in CHECKS)


def driver(facts: Facts) -> Finding:
    """Is the kernel driver loaded?"""
    if facts.kernel_driver is None and facts.gpus:
        return _unknown(
            "driver", "NVML answers, though /proc does not show the driver: as under WSL and in some containers."
        )
    if facts.kernel_driver is None and facts.daemon_has_readings:
        return _unknown("driver", "No NVIDIA driver is loaded; the daemon's GPUs are simulated, or on other hosts.")
    if facts.kernel_driver is None:
        return _wrong(
            "driver", "No NVIDIA driver is loaded.", "Install it, or try without GPUs: gpulease serve --simulate 4."
        )
    return _fine("driver", f"NVIDIA driver {facts.kernel_driver} is loaded.")


def library(facts: Facts) -> Finding:
    """Does the library belong to the loaded driver? After an upgrade it may not, until a restart."""
    if facts.library is None:
        what = "libnvidia-ml.so.1 was not found."
        if facts.kernel_driver is None or facts.nvml_problem is None:
            return _unknown("driver library", what)
        return _wrong("driver library", what, "Install the driver's user-space libraries, or give LD_LIBRARY_PATH.")
    if facts.kernel_driver is None:
        beside = "the driver's is not known" if facts.gpus else "no driver is loaded"
        return _unknown("driver library", f"It is of version {facts.library}, and {beside}.")
    if facts.library != facts.kernel_driver:
        sentence = f"The library is of version {facts.library}, the loaded driver {facts.kernel_driver}: new processes \
cannot use CUDA."
        return _wrong("driver library", sentence, "Restart the machine, or unload and load the driver.")
    return _fine("driver library", f"It is of the driver's version, {facts.library}.")


def binding(facts: Facts) -> Finding:
    """Is `pynvml` the module of nvidia-ml-py, and not the old package of that name?"""
    if facts.binding is None:
        return _wrong("pynvml", "nvidia-ml-py is not installed.", "pip install 'gpulease[worker]'")
    if facts.binding.endswith("__init__.py"):
        sentence = f"An old package shadows nvidia-ml-py: {facts.binding}."
        return _wrong("pynvml", sentence, "pip uninstall -y pynvml nvidia-ml-py && pip install nvidia-ml-py")
    return _fine("pynvml", f"It is the module of nvidia-ml-py: {facts.binding}.")


def nvml(facts: Facts) -> Finding:
    """Does NVML answer?"""
    if facts.nvml_problem is not None and facts.kernel_driver is None:
        return _unknown("NVML", "There is no driver that it could ask.")
    if facts.nvml_problem is not None:
        return _wrong("NVML", facts.nvml_problem, "See the checks above; nvidia-smi should list the GPUs.")
    words = {gpu.index: _words(gpu, facts) for gpu in facts.gpus}
    sick = {index: health for index, (health, _) in words.items() if health != "ok"}
    warned = {index: warnings for index, (_, warnings) in words.items() if warnings}
    if sick:
        remedies = dict.fromkeys(WHAT_HELPS.get(health, RESET) for health in sick.values())
        sentence = ", ".join(f"GPU {index} is {health}" for index, health in sick.items())
        return _wrong("NVML", f"{sentence}.", " ".join(remedies))
    if warned:
        remedies = dict.fromkeys(WARNED.get(word, RESET) for warnings in warned.values() for word in warnings)
        sentence = ", ".join(f"GPU {index} has {' and '.join(warnings)}" for index, warnings in warned.items())
        return _warning("NVML", f"{sentence}: no reason not to use it.", " ".join(remedies))
    return _fine("NVML", f"It answers and shows {_counted(len(facts.gpus))}.")


def _words(gpu: GpuReading, facts: Facts) -> tuple[str, tuple[str, ...]]:
    """Health and warnings. The reading was made before CUDA was asked, and that has the last word on the fabric."""
    if gpu.health == FABRIC and gpu.uuid in (facts.cuda or ()):
        return "ok", (*gpu.warnings, FABRIC)
    return gpu.health, gpu.warnings


def cuda(facts: Facts) -> Finding:
    """Does CUDA start? NVML answers also where it does not."""
    if not facts.gpus:
        return _unknown("CUDA", "No GPU was read, so it was not asked.")
    if facts.cuda:
        return _fine("CUDA", f"It starts and shows {_counted(len(facts.cuda))}.")
    if facts.cuda is not None:
        return _warning("CUDA", "It starts, but shows no GPU.", "CUDA leaves out GPUs in MIG mode without instances.")
    if facts.cuda_code == SYSTEM_NOT_READY:
        sentence = "CUDA does not start: error 802, system not ready: the fabric manager is not running, or not done."
        remedy = "systemctl start nvidia-fabricmanager, of the driver's version; in a virtual machine, on its host."
        return _wrong("CUDA", sentence, remedy)
    if facts.cuda_absent or facts.cuda_problem is None:
        return _unknown("CUDA", f"It cannot be asked: {facts.cuda_problem or 'nobody did'}.")
    return _wrong("CUDA", f"CUDA does not start: {facts.cuda_problem}.", "See the checks above, and dmesg.")


def pid_namespace(facts: Facts) -> Finding:
    """Are the processes of the whole host visible? Elsewhere the driver leaves out those of others, silently."""
    if facts.wsl:
        judged = "a GPU is judged by its memory and utilization; GPULEASE_IDLE_MEMORY_BYTES is what Windows may use."
        return _unknown("PID namespace", f"Under WSL2 not every process on a GPU is listed: {judged}")
    if facts.pid_namespace is None:
        return _unknown("PID namespace", "/proc/self/ns/pid cannot be read.")
    if facts.pid_namespace != INITIAL_PID_NAMESPACE:
        sentence = "This is not the host's: processes outside are not seen, and GPUs that they use look free."
        return _wrong("PID namespace", sentence, "Run the worker with the host's: docker run --pid=host.")
    return _fine("PID namespace", "It is the host's: every process on a GPU is seen.")


def persistence(facts: Facts) -> Finding:
    """Does the driver stay set up while nobody uses a GPU?"""
    if facts.persistence is None:
        return _unknown("persistence mode", "nvidia-smi does not tell.")
    off = _indices([index for index, on in enumerate(facts.persistence) if not on])
    if off:
        sentence = f"Off on GPU {off}: while neither a worker nor a program has it open, each first use takes seconds."
        return _warning("persistence mode", sentence, "Run nvidia-persistenced, or nvidia-smi -pm 1.")
    return _fine("persistence mode", "On.")


def compute_modes(facts: Facts) -> Finding:
    """How many processes may use each GPU?"""
    modes = {mode: [gpu.index for gpu in facts.gpus if gpu.compute_mode is mode] for mode in (*ComputeMode, None)}
    if not facts.gpus:
        return _unknown("compute mode", "No GPU was read.")
    closed = _indices(modes[ComputeMode.PROHIBITED])
    if closed:
        sentence = f"PROHIBITED on GPU {closed}: no process may use it, so it is never granted."
        return _wrong("compute mode", sentence, f"nvidia-smi -i {closed.replace(' ', '')} -c DEFAULT")
    single = _indices(modes[ComputeMode.EXCLUSIVE_PROCESS])
    if single:
        return _fine("compute mode", f"EXCLUSIVE_PROCESS on GPU {single}: one process at a time, no two ranks.")
    unread = _indices(modes[None])
    if unread:
        return _unknown("compute mode", f"The driver does not tell that of GPU {unread}.")
    return _fine("compute mode", "DEFAULT on every GPU.")


def socket(facts: Facts) -> Finding:
    """Can this user open the daemon's socket? What each may do then, the daemon decides by who he is."""
    if facts.socket_mode is None:
        return _unknown("socket", f"There is none at {facts.socket}: no daemon runs with this data directory.")
    if not facts.socket_opens:
        sentence = f"{facts.socket} does not let this user in, or nobody listens on it."
        return _wrong("socket", sentence, "Let this user in (gpulease serve --socket-mode), or start the daemon again.")
    return _fine("socket", f"{facts.socket} lets this user in (mode {facts.socket_mode:04o}).")


def clock(facts: Facts) -> Finding:
    """Is the wall clock plausible? Leases are measured on another, but people and logs read this one."""
    if facts.wall_s < RELEASED_S:
        return _wrong("clock", "The wall clock shows a time before this program was made.", "timedatectl set-ntp true")
    if facts.newest_s is not None and facts.newest_s > facts.wall_s + CLOCK_TOLERANCE_S:
        ahead_s = facts.newest_s - facts.wall_s
        sentence = f"The wall clock was set back: {facts.data_dir} was written {ahead_s:.0f} s in the future."
        return _wrong("clock", sentence, "timedatectl set-ntp true")
    return _fine("clock", "It is plausible; leases do not depend on it.")


def daemon(facts: Facts) -> Finding:
    """Does the daemon answer, and can it grant?"""
    if facts.daemon_problem is not None:
        return _wrong("daemon", facts.daemon_problem, facts.daemon_remedy or "Look at the daemon's log.")
    if facts.stands_by_for is not None:
        return _fine("daemon", f"It stands by; the writer is {facts.stands_by_for}.")
    return _fine("daemon", "It answers and can grant.")


def disk(facts: Facts) -> Finding:
    """Is there room for the ledger and for logs?"""
    if facts.free_bytes is None:
        return _unknown("disk", f"{facts.data_dir} does not exist yet.")
    free = f"{facts.free_bytes / 2**30:.1f} GiB are free in {facts.data_dir}."
    if facts.free_bytes < DISK_BYTES:
        return _wrong("disk", free, "Make room: without it nothing can be granted, released or logged.")
    return _fine("disk", free)


CHECKS: Sequence[Callable[[Facts], Finding]] = (
    driver,
    library,
    binding,
    nvml,
    cuda,
    pid_namespace,
    persistence,
    compute_modes,
    socket,
    clock,
    daemon,
    disk,
)
"""Every check, causes before what follows from them."""


def _indices(indices: Sequence[int]) -> str:
    return ", ".join(map(str, indices))


def _counted(gpus: int) -> str:
    return f"{gpus} GPU{'' if gpus == 1 else 's'}"


def _fine(check: str, sentence: str) -> Finding:
    return Finding(check=check, health=Health.FINE, sentence=sentence)


def _unknown(check: str, sentence: str) -> Finding:
    return Finding(check=check, health=Health.UNKNOWN, sentence=sentence)


def _wrong(check: str, sentence: str, remedy: str) -> Finding:
    return Finding(check=check, health=Health.WRONG, sentence=sentence, remedy=remedy)


def _warning(check: str, sentence: str, remedy: str) -> Finding:
    return Finding(check=check, health=Health.WARNING, sentence=sentence, remedy=remedy)
