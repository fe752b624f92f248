"""A program that does to a GPU what trainings, monitors and their children do, one requested step at a time.

Steps come as lines on stdin, `STEP WORD...`, and each is answered with a JSON line on stdout; or they are the
arguments, with `,` between two, and then it ends after the last. CUDA is used by ctypes, so most steps need a driver
and nothing else; those that begin with `torch` need a torch with CUDA. `subjects.Subject` drives it.
"""

from __future__ import annotations

import ctypes
import json
import os
import select
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

DEVICE_FILES = os.environ.get("GPULEASE_DEVICE_FILES") or "/dev/nvidia"
WAIT_S = 40
"""How long `find` waits for GPUs, in seconds: those of the previous process may still drain."""
PTX = b"""
.version 7.0
.target sm_75
.address_size 64
.visible .entry strays() {
    .reg .b64 %rd1;
    .reg .b32 %r1;
    mov.u64 %rd1, 64;
    mov.u32 %r1, 1;
    st.global.u32 [%rd1], %r1;
    ret;
}
"""
"""A kernel that writes to an unmapped address."""

held: list[Any] = []
"""Objects that must not be garbage-collected."""


class CudaError(Exception):
    """A CUDA call returned an error."""


def cuda(call: str, *words: Any) -> None:
    """Call the driver API."""
    code = getattr(ctypes.CDLL("libcuda.so.1"), call)(*words)
    if code:
        raise CudaError(f"{call} answers with error {code}")


def init() -> str:
    """Initialize CUDA, and nothing else."""
    cuda("cuInit", 0)
    return "initialised"


def context() -> str:
    """Make the first device's primary context current, as torch does."""
    init()
    device, made = ctypes.c_int(), ctypes.c_void_p()
    cuda("cuDeviceGet", ctypes.byref(device), 0)
    cuda("cuDevicePrimaryCtxRetain", ctypes.byref(made), device)
    held.append(made)
    with suppress(AttributeError):  # not needed to have one, and a stand-in may lack it
        cuda("cuCtxSetCurrent", made)
    return "context"


def memory(size: str) -> int:
    """Allocate device memory in a context; the driver takes it immediately, used or not."""
    context()
    address = ctypes.c_uint64()
    cuda("cuMemAlloc_v2", ctypes.byref(address), ctypes.c_size_t(int(size)))
    return int(size)


def drop() -> str:
    """Release the primary context with its memory, however often it was retained."""
    device = ctypes.c_int()
    cuda("cuDeviceGet", ctypes.byref(device), 0)
    while held:
        held.pop()
        cuda("cuDevicePrimaryCtxRelease_v2", device)
    return "dropped"


def fork() -> int:
    """Fork a child that stays idle, like a DataLoader's worker; its pid."""
    pid = os.fork()
    if pid:
        return pid
    # Only stdin and stdout are closed: such a child keeps the driver's descriptors.
    for number in (0, 1, 2):
        os.dup2(os.open(os.devnull, os.O_RDWR), number)
    answers.close()
    while True:
        time.sleep(3600)


def churn() -> int:
    """Run one process after another that creates a context and ends, until the next step; how many there were.

    `stop` ends it, and is not answered.
    """
    made = 0
    while not select.select([0], [], [], 0)[0]:
        child = os.fork()
        if not child:
            with suppress(BaseException):
                context()
                os._exit(0)
            os._exit(1)
        if os.waitpid(child, 0)[1]:
            raise CudaError("a context could not be made")
        made += 1
        if made == 1:
            answer({"told": "churns"})
    sys.stdin.readline()
    return made


def nvml(depth: str = "handles") -> int:
    """Open NVML and, except with `init`, get a handle of every GPU, as exporters and NCCL do; the number of GPUs."""
    import pynvml  # noqa: PLC0415

    pynvml.nvmlInit()
    count = int(pynvml.nvmlDeviceGetCount())
    if depth == "handles":
        held.extend(pynvml.nvmlDeviceGetHandleByIndex(index) for index in range(count))
    return count


def nvml_shutdown() -> str:
    """Close NVML."""
    import pynvml  # noqa: PLC0415

    pynvml.nvmlShutdown()
    held.clear()
    return "closed"


def files() -> dict[str, list[str]]:
    """NVIDIA's device files that this process has open, and those that it has mapped."""
    opened = set()
    for entry in os.scandir("/proc/self/fd"):
        with suppress(OSError):
            opened.add(os.readlink(entry.path))
    maps = {line.partition("/")[2].strip() for line in Path("/proc/self/maps").read_text().splitlines() if "/" in line}
    return {
        "open": sorted(path for path in opened if path.startswith(DEVICE_FILES)),
        "mapped": sorted(f"/{path}" for path in maps if f"/{path}".startswith(DEVICE_FILES)),
    }


def devices() -> list[str] | None:
    """UUIDs by ordinal that gpulease finds in this process's CUDA; None before cuInit."""
    from gpulease.cuda.libcuda import initialized_devices  # noqa: PLC0415

    return initialized_devices()


def find(count: str = "1", wait_s: float | str = WAIT_S) -> dict[str, Any]:
    """Call `find_usable_cuda_devices`: the ordinals, the reserved UUIDs, and what CUDA then shows there."""
    from gpulease import find_usable_cuda_devices, reserved_leases  # noqa: PLC0415

    begun = time.monotonic()
    ordinals = find_usable_cuda_devices(int(count), wait_s=float(wait_s))
    took_s = time.monotonic() - begun
    leased = [gpu.uuid for lease in reserved_leases() for gpu in lease.gpus]
    with suppress(CudaError, OSError):  # CUDA no longer works in a fork of a process that has used it
        init()
    shown = devices() or []
    return {
        "ordinals": ordinals,
        "leased": leased,
        "shown": [shown[ordinal] for ordinal in ordinals if ordinal < len(shown)],
        "took_s": took_s,
    }


def find_in_fork(*words: str) -> dict[str, Any]:
    """Run `find` in a forked child, as a DataLoader's worker or a launcher's child might."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        try:
            told: Any = find(*words)
        except BaseException as error:
            told = {"error": f"{type(error).__name__}: {error}"}
        os.write(write, json.dumps(told).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found: dict[str, Any] = json.loads(pipe.read() or '{"error": "the child died"}')
    os.waitpid(child, 0)
    if "error" in found:
        raise CudaError(found["error"])
    return found


def lightning() -> dict[str, Any]:
    """Start Fabric on the device that `find` returns; the UUID of the device that it uses."""
    found = find()
    import torch  # noqa: PLC0415

    try:
        from lightning.fabric import Fabric  # noqa: PLC0415
    except ImportError:
        from lightning_fabric import Fabric  # noqa: PLC0415

    fabric = Fabric(accelerator="cuda", devices=found["ordinals"])
    fabric.launch()
    return found | {"shown": [spelled(torch.cuda.get_device_properties(fabric.device).uuid)]}


def torch_count() -> int:
    """`torch.cuda.device_count()` of a torch that has not used CUDA yet."""
    import torch  # noqa: PLC0415

    return int(torch.cuda.device_count())


def torch_init() -> str:
    """`torch.cuda.init()`."""
    import torch  # noqa: PLC0415

    torch.cuda.init()
    return "initialised"


def torch_uuids() -> list[str]:
    """UUIDs by ordinal, according to torch."""
    import torch  # noqa: PLC0415

    return [spelled(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def torch_steps(seconds: str, size: str = "8192") -> dict[str, float]:
    """Multiply square bf16 matrices in a loop; milliseconds per step: median, p99, maximum; and the number of steps."""
    import torch  # noqa: PLC0415

    one = torch.randn(int(size), int(size), dtype=torch.bfloat16, device="cuda")
    other = torch.randn_like(one)
    for _ in range(20):
        one @ other
    torch.cuda.synchronize()
    took: list[float] = []
    until = time.perf_counter() + float(seconds)
    while time.perf_counter() < until:
        begun = time.perf_counter()
        one @ other
        torch.cuda.synchronize()
        took.append((time.perf_counter() - begun) * 1e3)
    took.sort()
    return {
        "median": statistics.median(took),
        "p99": took[int(len(took) * 0.99)],
        "max": took[-1],
        "steps": len(took),
    }


def stray() -> str:
    """Let a kernel write to an unmapped address; CUDA's error. Leaves an Xid 31 in the host's log."""
    context()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    cuda("cuModuleLoadData", ctypes.byref(module), ctypes.c_char_p(PTX))
    cuda("cuModuleGetFunction", ctypes.byref(function), module, ctypes.c_char_p(b"strays"))
    one = [ctypes.c_uint(1)] * 6
    cuda("cuLaunchKernel", function, *one, ctypes.c_uint(0), None, None, None)
    try:
        cuda("cuCtxSynchronize")
    except CudaError as error:
        return str(error)
    return "no error"


def spelled(uuid: object) -> str:
    """A UUID as NVML formats it."""
    return f"GPU-{str(uuid).lower().removeprefix('gpu-')}"


STEPS: dict[str, Callable[..., Any]] = {
    step.__name__: step
    for step in (
        *(init, context, memory, drop, fork, churn, nvml, nvml_shutdown, files, devices, find, find_in_fork, lightning),
        *(torch_count, torch_init, torch_uuids, torch_steps, stray),
    )
}


def answer(what: dict[str, Any]) -> None:
    """Write one answer, as one line."""
    answers.write(json.dumps(what) + "\n")
    answers.flush()


def take(words: Sequence[str]) -> None:
    """Take a step and answer."""
    try:
        told = {"told": STEPS[words[0]](*words[1:])}
    except Exception as error:
        told = {"error": f"{type(error).__name__}: {error}"[:500]}
    answer(told)


def main(arguments: Sequence[str]) -> None:
    """Take the steps of the arguments, else those of stdin until it ends."""
    if arguments:
        for step in " ".join(arguments).split(" , "):
            take(step.split())
        return
    while line := sys.stdin.readline():
        take(line.split())


if __name__ == "__main__":
    # Output of a driver library must not get between the answers.
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    main(sys.argv[1:])
