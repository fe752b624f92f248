"""What may be wrong with a host, and what to do about it. Pure: `symptoms` gathers the facts, this judges them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from gpulease.model import ComputeMode, GpuReading, Noun
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
}
RESET = "nvidia-smi -q -i INDEX says more; gpulease node pause lets go of the GPUs for a reset."
"""What helps a GPU of any other health that is not ok."""


class Health(StrEnum):
    """What a check found."""

    FINE = "fine"
    WRONG = "wrong"
    UNKNOWN = "unknown"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding(Noun):
    """The result of one check."""

    check: str
    """What was looked at."""
    health: Health
    """`fine`, `wrong`, or `unknown` where it could not be told."""
    sentence: str
    """What was found."""
    remedy: str = ""
    """What to do; empty unless something is wrong."""


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
    sick = [f"GPU {gpu.index} is {gpu.health}" for gpu in facts.gpus if gpu.health != "ok"]
    if sick:
        remedies = dict.fromkeys(WHAT_HELPS.get(gpu.health, RESET) for gpu in facts.gpus if gpu.health != "ok")
        return _wrong("NVML", f"{', '.join(sick)}.", " ".join(remedies))
    return _fine("NVML", f"It answers and shows {len(facts.gpus)} GPU{'' if len(facts.gpus) == 1 else 's'}.")


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
        sentence = f"Off on GPU {off}: every first use sets the GPU up anew, which takes seconds."
        return _wrong("persistence mode", sentence, "nvidia-smi -pm 1, or run nvidia-persistenced.")
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


def _fine(check: str, sentence: str) -> Finding:
    return Finding(check=check, health=Health.FINE, sentence=sentence)


def _unknown(check: str, sentence: str) -> Finding:
    return Finding(check=check, health=Health.UNKNOWN, sentence=sentence)


def _wrong(check: str, sentence: str, remedy: str) -> Finding:
    return Finding(check=check, health=Health.WRONG, sentence=sentence, remedy=remedy)
