"""What CUDA itself says of its devices, without initialising it in this process and without a context anywhere.

`devices_shown` looks at the CUDA of this process: which devices it shows, if it is initialised. It never loads libcuda
and never calls cuInit. `ask` starts a process that initialises CUDA with a given environment, lists what CUDA shows it,
and ends; that process is this file run as a script, so nothing but the standard library is imported here. Whoever
starts such a process themselves, as another user, has `question` and `understood`.

CUDA reads CUDA_VISIBLE_DEVICES and CUDA_DEVICE_ORDER once, in cuInit. Until then its functions answer
CUDA_ERROR_NOT_INITIALIZED, and so they do in a forked child of a process that had initialised it: CUDA cannot be used
there any more, in no way. Such a child counts as not initialised. No number that it is given can be used by CUDA in it,
and what it can still do is start programs, which obey the environment. (Source: the CUDA driver API; that a child gets
error 3 from cuInit and cuDeviceGetCount: triton-lang/triton#10443, on H100s.)
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
"""Errors of CUDA that are answers."""
SYSTEM_NOT_READY = 802
NAMES = {SYSTEM_NOT_READY: "system not ready: the fabric manager is not running, or not done yet"}
"""Errors of CUDA that say what to do."""
ASK_S = 10.0
"""How long `ask` waits. cuInit takes about a second, and more where the driver keeps no state (persistence mode)."""
END_S = 1.0
"""How long to wait for the end of a process that was killed: one that hangs in the driver does not end."""
MAX_TEXT = 300
"""How much is repeated of what a process printed."""


class CudaFailed(Exception):
    """CUDA, or the process that was to ask it, did not answer. The text says what happened, `code` is CUDA's error."""

    def __init__(self, text: str) -> None:
        super().__init__(text)
        found = re.search(r"answers with error (\d+)", text)
        self.code = int(found[1]) if found else None


class CudaHangs(CudaFailed):
    """It did not answer in time. `process` was killed; while it hangs in the driver it lives on."""

    def __init__(self, text: str, process: subprocess.Popen[bytes]) -> None:
        super().__init__(text)
        self.process = process


class NoCuda(CudaFailed):
    """There is no libcuda that a program could load."""


def devices_shown() -> list[str] | None:
    """UUIDs (`GPU-` and lower-case hex) of the devices that CUDA shows this process, by ordinal; None before cuInit.

    Of a MIG slice it is the UUID of the slice. Raises CudaFailed when libcuda is loaded and its state cannot be told.
    """
    try:
        for path in _libraries_mapped():
            devices = _listed(_already_loaded(path))
            if devices is not None:
                return devices
    except AttributeError as error:
        raise CudaFailed(f"its library lacks a function: {error}") from error
    return None


def ask(environ: Mapping[str, str], within_s: float = ASK_S, command: Sequence[str] = ()) -> list[str]:
    """What `devices_shown` would be in a process with this environment that has initialised CUDA.

    `command`: another program that prints `answer`; it is that process then.
    Costs a process and its cuInit: about a second on a machine with GPUs. Raises NoCuda when there is no libcuda,
    CudaHangs when it takes longer than `within_s`, and CudaFailed when it fails.
    """
    import subprocess  # noqa: PLC0415 - seldom needed

    if not sys.executable or getattr(sys, "frozen", False) or not Path(__file__).is_file():
        raise CudaFailed("there is no Python interpreter to ask CUDA with")
    try:
        process = subprocess.Popen(
            command or [sys.executable, "-I", "-S", __file__],
            env=dict(environ),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
    except OSError as error:
        raise CudaFailed(f"no process to ask CUDA could be started: {error}") from error
    try:
        printed, _ = process.communicate(timeout=within_s)
    except subprocess.TimeoutExpired:
        raise CudaHangs(f"it did not answer within {within_s:g} s", process) from None
    finally:
        if process.poll() is None:
            _end(process)
    return understood(printed.decode(errors="replace"), process.returncode)


def question(python: str) -> tuple[str, ...]:
    """Arguments of a process that asks as `ask` does, run by that Python, whose user need not be able to read this
    file. Its environment is the one that CUDA is asked about; its answer goes to `understood`."""
    return (python, "-I", "-S", "-c", Path(__file__).read_text(encoding="utf-8"))


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it, without waiting for ever: a process that hangs in the driver is reached by no signal."""
    process.kill()
    if process.stdout is not None:
        process.stdout.close()
    deadline = time.monotonic() + END_S
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def understood(answer: str, code: int) -> list[str]:
    """The UUIDs in what the process of `ask` printed. Libraries may have printed too; only marked lines count.

    Raises NoCuda and CudaFailed, as `ask`.
    """
    failed = re.search(r"^(none|fails) (.+)$", answer, re.MULTILINE)
    if failed is not None:
        why = failed[2][:MAX_TEXT]
        raise NoCuda(why) if failed[1] == "none" else CudaFailed(why)
    if not re.search(r"^end$", answer, re.MULTILINE):
        raise CudaFailed(f"the process that asked it ended with code {code}: {answer.strip()[-MAX_TEXT:]}")
    return re.findall(r"^device (GPU-[0-9a-f-]{36})$", answer, re.MULTILINE)


def _libraries_mapped() -> list[str]:
    """Paths of every libcuda that is loaded in this process: none, almost always one, in WSL two."""
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
            text = maps.read()
    except FileNotFoundError:
        return []  # not Linux, and CUDA elsewhere is not the CUDA of the daemon's GPUs
    except OSError as error:
        raise CudaFailed(f"which libraries this process has loaded cannot be read: {error}") from error
    found = re.findall(r" (/\S.*/libcuda\.so(?:\.[0-9.]+)?)(?: \(deleted\))?$", text, re.MULTILINE)
    return list(dict.fromkeys(found))


def _already_loaded(path: str) -> ctypes.CDLL:
    """The library at `path`, which is loaded. RTLD_NOLOAD: if it were not, this would not load it."""
    import ctypes  # noqa: PLC0415 - a process without libcuda need not load it

    for name in (path, LIBRARY, "libcuda.so"):  # the names find it by its soname when an upgrade has taken its file
        try:
            return ctypes.CDLL(name, mode=os.RTLD_NOLOAD | os.RTLD_NOW)
        except OSError:
            continue
    raise CudaFailed(f"{path} is loaded, but cannot be asked")


def _listed(library: ctypes.CDLL) -> list[str] | None:
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
        uuids.append(_spelled(bytes(buffer)))
    return uuids


def _uuid_function(library: ctypes.CDLL) -> tuple[str, Callable[..., int]]:
    """The second version tells a MIG slice from its GPU; drivers before 11.4 have only the first."""
    for name in ("cuDeviceGetUuid_v2", "cuDeviceGetUuid"):
        found = getattr(library, name, None)
        if found is not None:
            return name, found
    raise CudaFailed("this driver is older than CUDA 9.2 and does not tell UUIDs")


def _check(code: int, call: str) -> None:
    if code:
        name = f" ({NAMES[code]})" if code in NAMES else ""
        raise CudaFailed(f"{call} answers with error {code}{name}")


def _spelled(uuid: bytes) -> str:
    digits = uuid.hex()
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def answer() -> Iterator[str]:
    """What the process of `ask` prints, line by line. It may initialise CUDA, since it is there for nothing else."""
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
            yield from (f"device {uuid}" for uuid in _listed(library) or ())
    except (AttributeError, CudaFailed) as error:
        yield f"fails {error}"
    yield "end"


if __name__ == "__main__":
    for line in answer():
        print(line, flush=True)
    os._exit(0)  # what CUDA does at an orderly end is of no use here, and may hang
