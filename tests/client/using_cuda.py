"""What a training does to CUDA, by ctypes as torch would; imported in processes that have the stand-in's library.

Run as a program it reads cases from stdin, one JSON object a line, does each in a forked process of its own, and prints
what came of it. One start of Python then serves hundreds of cases.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

from gpulease.errors import GpuleaseError
from gpulease.model import Gpu, GpuState
from gpulease.ordinals import visible_gpus

MASK, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def init() -> int:
    """Load CUDA and initialise it; its error."""
    return int(ctypes.CDLL("libcuda.so.1").cuInit(0))


def shown() -> list[str]:
    """UUIDs of what CUDA shows this process, by ordinal; initialises it."""
    cuda = ctypes.CDLL("libcuda.so.1")
    count, found = ctypes.c_int(0), []
    cuda.cuInit(0)
    cuda.cuDeviceGetCount(ctypes.byref(count))
    for ordinal in range(count.value):
        device, uuid = ctypes.c_int(-1), (ctypes.c_ubyte * 16)()
        assert cuda.cuDeviceGet(ctypes.byref(device), ordinal) == 0
        assert cuda.cuDeviceGetUuid(uuid, device) == 0
        found.append(spelled(bytes(uuid).hex()))
    return found


def spelled(digits: str) -> str:
    """32 hex digits as NVML spells a UUID."""
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def loaded() -> dict[str, bool]:
    """Which of the things that gpulease must not load into the caller are there."""
    maps = Path("/proc/self/maps").read_text()
    return {"torch": "torch" in sys.modules, "libcuda": "libcuda" in maps}


def calls_of(pid: int) -> list[str]:
    """The calls of CUDA that matter, of one process."""
    path = Path(os.environ["STAND_IN_CALLS"])
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[0] for line in lines if line.split()[1] == str(pid)]


def put(environment: dict[str, str | None]) -> None:
    """Set variables of this process, or take them away."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def look(case: dict[str, Any]) -> dict[str, Any]:
    """Do what a case says, ask gpulease, then CUDA."""
    put(case["environment"])
    if case["initialised"]:
        init()
    put(case["changed"])
    before = calls_of(os.getpid())
    gpus = [Gpu(**gpu, state=GpuState.FREE) for gpu in case["gpus"]]
    result: dict[str, Any] = {}
    try:
        root = case.get("root")
        visible = visible_gpus(gpus, simulated=root is None, root=Path(root or "/"))
        result["ordinals"] = visible.settle(gpu.uuid for gpu in visible.gpus)
        result["devices"] = [gpu and gpu.uuid for gpu in visible.devices]
    except GpuleaseError as error:
        result["refused"] = f"{type(error).__name__}: {error}"
    result["called"] = calls_of(os.getpid())[len(before) :]
    os.environ.pop("STAND_IN_FAILS", None)
    result["shown"] = shown()
    return result


def main() -> None:
    """Serve cases until stdin ends."""
    for line in sys.stdin:
        child = os.fork()
        if not child:
            print(json.dumps(look(json.loads(line))), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(json.dumps({"died": line}), flush=True)


if __name__ == "__main__":
    main()
