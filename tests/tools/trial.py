"""The trial of a sweep in tests: it holds GPUs for a while, and logs when that begins and ends.

The scripts of tools import it as `trial` (`Sweep.environment` puts it on the path), in Pythons that have no tests. So
it uses the standard library alone. `tests/tools/sweep.py` reads the log.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence


def hold(number: int, devices: Sequence[int] | None = None, seconds: float | None = None) -> str:
    """Hold these CUDA ordinals of this process, or without any all that its mask names; what was held.

    It lasts `TRIAL_S` seconds unless the call says how long. The trial whose number `TRIAL_STAYS` is stays until it is
    killed, however late the test comes to that; where it is tried again, it lasts as long as the others.
    """
    gpus = named(devices)
    if str(number) == os.environ.get("TRIAL_STAYS") and not has_begun(number):
        seconds = 600.0
    log(number, "begun", gpus)
    time.sleep(float(os.environ.get("TRIAL_S", "0.3")) if seconds is None else seconds)
    log(number, "ended", gpus)
    return ",".join(gpus)


def has_begun(number: int) -> bool:
    """True if the log says so."""
    if not os.path.exists(os.environ["TRIAL_LOG"]):
        return False
    with open(os.environ["TRIAL_LOG"]) as lines:
        return any(json.loads(line)["trial"] == int(number) for line in lines)


def named(devices: Sequence[int] | None) -> list[str]:
    """UUIDs or indices of these ordinals, as far as the mask of this process tells."""
    mask = os.environ.get("CUDA_VISIBLE_DEVICES")
    visible = [] if mask is None else [name.strip() for name in mask.split(",") if name.strip()]
    if devices is None:
        return visible
    return [str(device) for device in devices] if mask is None else [visible[device] for device in devices]


def log(number: int, what: str, gpus: list[str]) -> None:
    """Append a line, in one write, so that those of several processes do not mix."""
    entry = {"trial": int(number), "what": what, "gpus": gpus, "pid": os.getpid(), "at_s": time.time()}
    line = json.dumps(entry | {"thread": threading.get_ident()}) + "\n"
    file = os.open(os.environ["TRIAL_LOG"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    try:
        os.write(file, line.encode())
    finally:
        os.close(file)
