"""Checks that the installed driver library and the loaded kernel module still match.

After the driver's packages are upgraded, the kernel module in memory stays the old one until it is reloaded. A program
that loaded the old library before keeps reading NVML as if nothing had happened, while no new program can use CUDA.
Therefore the versions are compared as files: the module's in /proc, and the library's by the file name that
`libnvidia-ml.so.1` links to.
"""

from __future__ import annotations

import os
import re
from functools import cache
from pathlib import Path

MODULE_VERSION = Path("/proc/driver/nvidia/version")
LIBRARY = "libnvidia-ml.so.1"
WSL_DEVICE = Path("/dev/dxg")
"""If this device exists, the host is WSL2: the driver is that of Windows."""
VERSION = re.compile(r"\b\d+\.\d+(?:\.\d+)?\b")
MISMATCH_REMEDY = "Reboot, or unload and load the NVIDIA kernel modules."


def module_version() -> str | None:
    """Version of the loaded kernel module; None if /proc does not show it.

    The line reads like `NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.86.10  Wed Jul 26 ...`.
    """
    try:
        first = MODULE_VERSION.read_text(errors="replace").splitlines()[0]
    except (OSError, IndexError):
        return None
    match = VERSION.search(first.partition("NVRM version:")[2])
    return match[0] if match else None


@cache
def library_in_use() -> Path | None:
    """The file that this process has loaded as NVML's library, by its name at that time. Call it after loading."""
    try:
        maps = Path("/proc/self/maps").read_text(errors="replace")
    except OSError:
        return None
    match = re.search(r"(/\S*/libnvidia-ml\.so[^\s]*)", maps)
    return Path(match[1]) if match else None


def installed_library(in_use: Path) -> Path:
    """The file that a program started now would load instead of the one in use."""
    return Path(os.path.realpath(in_use.parent / LIBRARY))


def version_mismatch(driver_version: str | None) -> str | None:
    """Why library and kernel module do not match, as a sentence; None if they do or it cannot be told.

    `driver_version`: as NVML reports it in this process.
    """
    module, in_use = module_version(), library_in_use()
    if module is None:
        return None
    library = None if in_use is None else _version_in(installed_library(in_use).name)
    for version in (library, driver_version):
        if version is not None and version != module:
            return (
                f"The NVIDIA driver was changed under the running system: the kernel module is {module}, the library "
                f"{version}, so no new program can use CUDA. {MISMATCH_REMEDY}"
            )
    return None


def library_was_replaced() -> bool:
    """True if the library loaded by this process is no longer the installed one: only a new process helps."""
    in_use = library_in_use()
    return in_use is not None and installed_library(in_use) != in_use


def _version_in(name: str) -> str | None:
    match = VERSION.search(name.partition(".so.")[2])
    return match[0] if match else None
