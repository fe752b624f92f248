"""Queries CUDA for its devices, without initializing it in this process and without creating a context.

`initialized_devices` looks at CUDA in this process: which devices it shows, if it is initialized. It never loads
libcuda and never calls cuInit. `query_devices` starts a process that initializes CUDA in a given environment, lists the
devices and exits. That process runs this file as a script, so only the standard library is imported here. To start such
a process as another user, use `query_command` and `parse_output`.

CUDA reads CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER once, in cuInit. Until then its functions return
CUDA_ERROR_NOT_INITIALIZED. They do so too in a forked child of a process that had initialized CUDA: it cannot be used
there at all. Such a child counts as not initialized. CUDA can use no ordinal in it, but the child can still start
programs, which obey the environment. (Sources: the CUDA driver API; for error 3 from cuInit and cuDeviceGetCount in a
child: triton-lang/triton#10443, on H100s.)
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ctypes
    import subprocess

LIBRARY = "libcuda.so.1"
NO_DEVICE, NOT_INITIALIZED = 100, 3
"""CUDA errors that are answers."""
SYSTEM_NOT_READY = 802
ERROR_MEANINGS = {SYSTEM_NOT_READY: "system not ready: the fabric manager is not running, or not done yet"}
"""What some CUDA errors mean."""
QUERY_TIMEOUT_S = 10.0
"""Time limit of `query_devices`. cuInit takes about a second, and longer without persistence mode."""
KILL_TIMEOUT_S = 1.0
"""How long to wait for a killed process to exit: one that hangs in the driver does not."""
MAX_OUTPUT_CHARACTERS = 300
"""How much of a process's output an error quotes."""


class CudaError(Exception):
    """CUDA, or the process that queries it, failed. The message says how; `code` is the CUDA error, if there is one."""

    def __init__(self, message: str) -> None:
        super().__init__(message)
        match = re.search(r"answers with error (\d+)", message)
        self.code = int(match[1]) if match else None


class CudaTimeout(CudaError):
    """CUDA did not answer in time. `process` was killed, but lives on while it hangs in the driver."""

    def __init__(self, message: str, process: subprocess.Popen[bytes]) -> None:
        super().__init__(message)
        self.process = process


class CudaNotInstalled(CudaError):
    """There is no libcuda to load."""


def initialized_devices() -> list[str] | None:
    """UUIDs (`GPU-` and lower-case hex) of the devices that CUDA shows this process, by ordinal; None before cuInit.

    A MIG slice has a UUID of its own. Raises CudaError if libcuda is loaded and its state cannot be determined.
    """
    try:
        for path in _mapped_libraries():
            devices = _list_devices(_open_loaded_library(path))
            if devices is not None:
                return devices
    except AttributeError as error:
        raise CudaError(f"its library lacks a function: {error}") from error
    return None


def query_devices(
    environ: Mapping[str, str], within_s: float = QUERY_TIMEOUT_S, command: Sequence[str] = ()
) -> list[str]:
    """What `initialized_devices` would return in a process that has initialized CUDA in this environment.

    `command`: a program to run instead of this file, which prints the lines of `query_output`. Costs a process and its
    cuInit: about a second on a machine with GPUs. Raises CudaNotInstalled if there is no libcuda, CudaTimeout if it
    takes longer than `within_s`, and CudaError if it fails.
    """
    import subprocess  # noqa: PLC0415 - seldom needed

    if not sys.executable or getattr(sys, "frozen", False) or not Path(__file__).is_file():
        raise CudaError("there is no Python interpreter to ask CUDA with")
    try:
        process = subprocess.Popen(
            command or [sys.executable, "-I", "-S", __file__],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise CudaError(f"no process to ask CUDA could be started: {error}") from error
    try:
        printed, _ = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        raise CudaTimeout(f"it did not answer within {within_s:g} s", process) from None
    finally:
        if process.poll() is None:
            _kill(process)
    return parse_output(printed.decode(errors="replace"), process.returncode)


def query_command(python: str) -> tuple[str, ...]:
    """The command of a process that does the query of `query_devices` with that Python interpreter.

    Run it in the environment in question, and pass its output to `parse_output`. Its user need not be able to read this
    file.
    """
    return (python, "-I", "-S", "-c", Path(__file__).read_text(encoding="utf-8"))


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill it, and wait only briefly: no signal reaches a process that hangs in the driver."""
    process.kill()
    if process.stdout is not None:
        process.stdout.close()
    deadline = time.monotonic() + KILL_TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def parse_output(output: str, code: int) -> list[str]:
    """The UUIDs in the output of a query. Libraries may have printed something too; only marked lines count.

    Raises CudaNotInstalled and CudaError, as `query_devices`.
    """
    failed = re.search(r"^(none|fails) (.+)$", output, re.MULTILINE)
    if failed is not None:
        reason = failed[2][:MAX_OUTPUT_CHARACTERS]
        raise CudaNotInstalled(reason) if failed[1] == "none" else CudaError(reason)
    if not re.search(r"^end$", output, re.MULTILINE):
        raise CudaError(f"the process that asked it ended with code {code}: {output.strip()[-MAX_OUTPUT_CHARACTERS:]}")
    return re.findall(r"^device (GPU-[0-9a-f-]{36})$", output, re.MULTILINE)


def _mapped_libraries() -> list[str]:
    """Paths of every libcuda that this process has loaded: none or one; two in WSL."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            text = maps.read()
    except FileNotFoundError:
        return []  # not Linux, so not the CUDA of the daemon's GPUs
    except OSError as error:
        raise CudaError(f"which libraries this process has loaded cannot be read: {error}") from error
    found = re.findall(r" (/\S.*/libcuda\.so(?:\.[0-9.]+)?)(?: \(deleted\))?$", text, re.MULTILINE)
    return list(dict.fromkeys(found))


def _open_loaded_library(path: str) -> ctypes.CDLL:
    """The library at `path`, which is loaded already; RTLD_NOLOAD makes sure that this does not load it."""
    import ctypes  # noqa: PLC0415 - a process without libcuda need not load it

    for name in (path, LIBRARY, "libcuda.so"):  # by name if an upgrade has removed the file
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
    raise CudaError(f"{path} is loaded, but cannot be asked")


def _list_devices(library: ctypes.CDLL) -> list[str] | None:
    """UUIDs by ordinal; None before cuInit."""
    import ctypes  # noqa: PLC0415

    count = ctypes.c_int(0)
    code = library.cuDeviceGetCount(ctypes.byref(count))
    if code in (NOT_INITIALIZED, NO_DEVICE):
        return None if code == NOT_INITIALIZED else []
    _check(code, "cuDeviceGetCount")
    name, uuid_of = _uuid_function(library)
    uuids = []
    for ordinal in range(count.value):
        device, buffer = ctypes.c_int(-1), (ctypes.c_ubyte * 16)()
        _check(library.cuDeviceGet(ctypes.byref(device), ordinal), "cuDeviceGet")
        _check(uuid_of(buffer, device), name)
        uuids.append(_format_uuid(bytes(buffer)))
    return uuids


def _uuid_function(library: ctypes.CDLL) -> tuple[str, Callable[..., int]]:
    """Name and function. The second version distinguishes a MIG slice from its GPU; drivers before 11.4 lack it."""
    for name in ("cuDeviceGetUuid_v2", "cuDeviceGetUuid"):
        found = getattr(library, name, None)
        if found is not None:
            return name, found
    raise CudaError("this driver is older than CUDA 9.2 and does not report UUIDs")


def _check(code: int, function: str) -> None:
    if code:
        name = f" ({ERROR_MEANINGS[code]})" if code in ERROR_MEANINGS else ""
        raise CudaError(f"{function} answers with error {code}{name}")


def _format_uuid(uuid: bytes) -> str:
    digits = uuid.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def query_output() -> Iterator[str]:
    """The output of a query, line by line. Initializes CUDA, which is all that its process is for."""
    import ctypes  # noqa: PLC0415

    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        yield f"none {error}"
        return
    try:
        code = library.cuInit(0)
        if code != NO_DEVICE:
            _check(code, "cuInit")
            yield from (f"device {uuid}" for uuid in _list_devices(library) or ())
    except (AttributeError, CudaError) as error:
        yield f"fails {error}"
    yield "end"


if __name__ == "__main__":
    for line in query_output():
        print(line, flush=True)
    os._exit(0)  # skip CUDA's cleanup, which may hang
