"""The driver as it is installed: whether library and kernel module still fit, and whether there is one at all.

After an upgrade of the driver's packages the kernel module in memory is the old one until it is loaded anew. A program
that loaded the old library before reads NVML as ever, while no new program can use CUDA. So the versions are compared
as files: the module's in /proc, and the library's by the name that `libnvidia-ml.so.1` points to.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path

from gpulease_worker import processes
from gpulease_worker.bounded_run import bounded_run
from gpulease_worker.source import ReadingFailed

MODULE_VERSION = Path("/proc/driver/nvidia/version")
LIBRARY = "libnvidia-ml.so.1"
WSL = Path("/dev/dxg")
"""Where there is this device, the driver is that of Windows."""
VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)?\b")
DEADLINE_S = 60.0
"""How long the driver may take to be opened: without persistence mode it sets up each GPU then."""
REMEDY = "Reboot, or unload and load the NVIDIA kernel modules."


def module_version() -> str | None:
    """Version of the kernel module that is loaded; None where /proc does not say.

    The line is `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.86.10  Wed Jul 26 ...`, or the like.
    """
    try:
        first = MODULE_VERSION.read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return None
    found = VERSION.search(first.partition("NVRM version:")[2])
    return found[0] if found else None


@cache
def library_in_use() -> Path | None:
    """The file that this process has loaded as NVML's library, under the name it had then. Ask once it is loaded."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return None
    found = re.search(r"(/\S*/libnvidia-ml\.so[^\s]*)", maps)
    return Path(found[1]) if found else None


def installed_library(in_use: Path) -> Path:
    """The file that a program started now would load in place of the one in use."""
    return Path(os.path.realpath(in_use.parent / LIBRARY))


def misfit(driver_version: str | None) -> str | None:
    """Why library and kernel module do not fit, as a sentence; None when they do or nobody can tell.

    `driver_version` is what NVML says in this process.
    """
    module, in_use = module_version(), library_in_use()
    if module is None:
        return None
    library = None if in_use is None else _version_in(installed_library(in_use).name)
    for version in (library, driver_version):
        if version is not None and version != module:
            return (
                f"The NVIDIA driver was changed under the running system: the kernel module is {module}, the library "
                f"{version}, so no new program can use CUDA. {REMEDY}"
            )
    return None


def outdated() -> bool:
    """True when the library that this process has loaded is no longer the installed one: only a new process helps."""
    in_use = library_in_use()
    return in_use is not None and installed_library(in_use) != in_use


def _version_in(name: str) -> str | None:
    found = VERSION.search(name.partition(".so.")[2])
    return found[0] if found else None


def unavailable(deadline_s: float = DEADLINE_S) -> str | None:
    """Why this host has no GPU that NVML can read, as a sentence; None when it has one.

    Asked in a process of its own, so that a hung driver costs `deadline_s` and nothing else.
    """
    try:
        answer = bounded_run([sys.executable, "-P", "-m", "gpulease_worker.driver"], deadline_s)
    except subprocess.TimeoutExpired:
        return f"NVML did not answer within {deadline_s:g} s: the driver hangs. See `dmesg` for Xid lines."
    if answer.returncode == 0:
        return None
    return (
        answer.stdout.strip()
        or f"The check for GPUs ended with code {answer.returncode}: {answer.stderr[-300:].strip()}"
    )


def available(deadline_s: float = DEADLINE_S) -> bool:
    """True when this host has a GPU that NVML can read. See `unavailable` for why not."""
    return unavailable(deadline_s) is None


def _main() -> int:
    processes.end_with_parent(signal.SIGKILL)
    from gpulease_worker.hardware import Hardware  # noqa: PLC0415  this process alone needs nvidia-ml-py

    try:
        Hardware(os.uname().nodename).read(())
    except ReadingFailed as failed:
        print(failed)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(_main())
