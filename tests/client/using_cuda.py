"""Uses CUDA through ctypes as torch would; imported in processes with the fake libcuda.

`serve` runs each case in a forked process and prints its result, so that one start of Python serves hundreds of cases.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
from pathlib import Path
from typing import Any

from gpulease.cuda.ordinals import visible_gpus
from gpulease_protocol.errors import GpuleaseError
from gpulease_protocol.model import Gpu, GpuState

MASK, ORDER = "CUDA_VISIBLE_DEVICES", "CUDA_DEVICE_ORDER"


def init() -> int:
    """Load and initialize CUDA; returns its error code."""
    return int(ctypes.CDLL("libcuda.so.1").cuInit(0))


def shown() -> list[str]:
    """Initialize CUDA and return the UUIDs of its devices, by ordinal."""
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
    """32 hex digits in NVML's form of a UUID."""
    return "GPU-" + "-".join((digits[:8], digits[8:12], digits[12:16], digits[16:20], digits[20:]))


def loaded() -> dict[str, bool]:
    """Which libraries that gpulease must not load are loaded."""
    maps = Path("/proc/self/maps").read_text()
    return {"torch": "torch" in sys.modules, "libcuda": "libcuda" in maps}


def calls_of(pid: int) -> list[str]:
    """The recorded CUDA calls of one process."""
    path = Path(os.environ["STAND_IN_CALLS"])
    lines = path.read_text().splitlines() if path.exists() else []
    return [line.split()[0] for line in lines if line.split()[1] == str(pid)]


def put(environment: dict[str, str | None]) -> None:
    """Set variables of this process, or unset those that are None."""
    for name, value in environment.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


def look(case: dict[str, Any]) -> dict[str, Any]:
    """Set up a case, then query gpulease and CUDA."""
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
        result["ordinals"] = visible.fix_ordinals(gpu.uuid for gpu in visible.gpus)
        result["devices"] = [gpu and gpu.uuid for gpu in visible.devices]
    except GpuleaseError as error:
        result["refused"] = f"{type(error).__name__}: {error}"
    result["called"] = calls_of(os.getpid())[len(before) :]
    os.environ.pop("STAND_IN_FAILS", None)
    result["shown"] = shown()
    return result


def serve(cases: str) -> None:
    """Print the result of each case of a JSON list."""
    for case in json.loads(cases):
        child = os.fork()
        if not child:
            print(json.dumps(look(case)), flush=True)
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            print(json.dumps({"died": case}), flush=True)
