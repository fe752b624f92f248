"""Checks whether CUDA initializes on a GPU while its NVLink fabric is not ready.

On a host with NVSwitches cuInit fails with error 802 until the fabric manager has had the GPU join the fabric, while
NVML answers from the beginning. NVML's fabric state is not the last word, however: a GPU that is passed through to a
virtual machine with NVLink off, or rented alone, may stay `not_started` or `in_progress` forever, and CUDA starts. And
a GPU whose fabric `failed` may compute, though it reaches no other over NVLink.

Therefore the fabric's state triggers a check, and CUDA decides. Until CUDA has answered, and where it cannot be asked,
the fabric's state counts. CUDA is never initialized in the probe: each check is a process of its own, for one GPU,
outside the reading. Its command line marks it as gpulease's own for every worker (`opener_classifier.OWN_COMMAND`). A
check that hangs in the driver, and so survives its kill, blocks further checks of its GPU until it has ended.

Run as `python -m gpulease_worker.probe.cuda_init_check`, this is that process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from gpulease.cuda import libcuda
from gpulease_protocol.host import process_tree
from gpulease_protocol.lazy_dataclass import dataclass

COMMAND = (sys.executable, "-P", "-m", "gpulease_worker.probe.cuda_init_check")
TIMEOUT_S = 30.0
"""How long CUDA may take. It initializes the GPU if nothing else has."""
SUCCESS_PAUSE_FACTOR = 20
"""How much longer the pause is once CUDA starts: each check opens the device files of all GPUs."""
STATE_CHANGE_PAUSE_S = 5.0
"""How soon CUDA is checked again after the fabric's state has changed, at the earliest."""


@dataclass(slots=True)
class Verdict:
    """What is known about one GPU."""

    fabric: str
    """State of its fabric in the last reading."""
    read_at_s: float
    """Monotonic time of that reading."""
    starts: bool | None = None
    """CUDA's answer in this state; None if there is none yet."""
    asked_at_s: float = -float("inf")
    """When CUDA was last checked."""


class CudaInitCheck:
    """Checks CUDA on GPUs whose fabric is not ready, one at a time, in a thread.

    Args:
        retry_s: Seconds until CUDA is checked again on a GPU on which it did not start.
    """

    def __init__(self, retry_s: float) -> None:
        self._retry_s = retry_s
        self._verdicts: dict[str, Verdict] = {}
        self._thread: threading.Thread | None = None
        self._hung: dict[str, subprocess.Popen[bytes]] = {}
        """By UUID: a check that was killed and may still run."""

    def starts_on(self, uuid: str, fabric: str | None) -> bool | None:
        """Whether CUDA starts on this GPU; None if unknown. Never waits.

        `fabric`: its current state; None if that does not matter, and then nothing is checked.
        """
        if fabric is None:
            self._verdicts.pop(uuid, None)
            return None
        now_s = time.monotonic()
        verdict = self._verdicts.setdefault(uuid, Verdict(fabric, now_s))
        if verdict.fabric != fabric:
            asked_at_s = min(verdict.asked_at_s, now_s + STATE_CHANGE_PAUSE_S - self._retry_s)
            self._verdicts[uuid] = verdict = Verdict(fabric, now_s, asked_at_s=asked_at_s)
        verdict.read_at_s = now_s
        if self._thread is None or not self._thread.is_alive():
            self._check_next(now_s)
        return verdict.starts

    def _check_next(self, now_s: float) -> None:
        """Start to check the GPU that has waited longest, if one is due."""
        due = {
            uuid: verdict
            for uuid, verdict in self._verdicts.items()
            if now_s - verdict.asked_at_s >= self._retry_s * (SUCCESS_PAUSE_FACTOR if verdict.starts else 1)
            and now_s - verdict.read_at_s <= STATE_CHANGE_PAUSE_S  # one that is no longer read may be lost
            and (uuid not in self._hung or self._hung[uuid].poll() is not None)
        }
        if due:
            uuid = min(due, key=lambda one: due[one].asked_at_s)
            self._thread = threading.Thread(target=self._check, args=(uuid, due[uuid]), daemon=True)
            self._thread.start()

    def _check(self, uuid: str, verdict: Verdict) -> None:
        try:
            starts, why = uuid in ask({**os.environ, "CUDA_VISIBLE_DEVICES": uuid}), "CUDA does not show it"
        except libcuda.CudaError as failed:
            starts, why = False, str(failed)
            if isinstance(failed, libcuda.CudaTimeout):
                self._hung[uuid] = failed.process
        if starts is not verdict.starts:
            outcome = "CUDA starts nevertheless" if starts else f"CUDA does not start: {why}"
            print(f"The NVLink fabric of {uuid} is {verdict.fabric}; {outcome}.", file=sys.stderr, flush=True)
        verdict.starts, verdict.asked_at_s = starts, time.monotonic()


def ask(environ: Mapping[str, str], within_s: float = TIMEOUT_S) -> list[str]:
    """As `libcuda.query_devices`, in a process that every worker takes for its own and that ends with this one."""
    return libcuda.query_devices(environ, within_s, COMMAND)


def _main() -> None:
    process_tree.signal_on_parent_death(signal.SIGKILL)
    for line in libcuda.query_output():
        print(line, flush=True)
    os._exit(0)  # CUDA's cleanup at exit is not needed, and may hang


if __name__ == "__main__":
    _main()
