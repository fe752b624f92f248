"""Whether CUDA starts on a GPU whose NVLink fabric is not ready, asked of CUDA itself.

On a host with NVSwitches cuInit fails with error 802 until the fabric manager has had the GPU join the fabric, while
NVML answers from the beginning. What NVML says of the fabric is not the last word, however: a GPU that was passed
through to a virtual machine with NVLink off, or is rented alone, may be `not_started` or `in_progress` for ever, and
CUDA starts. And a GPU whose fabric `failed` may compute, though it reaches no other over NVLink.

So the fabric's word makes somebody ask, and CUDA's decides. Until it has answered, and where it cannot be asked, the
fabric's word counts. CUDA is never initialised in the probe: each question is a process of its own, off the reading's
path, for one GPU, and its command line says to every worker that it is none of a user's (`openers.OUR_OWN`). One that
hangs in the driver, and so outlives its end, is the only one for its GPU: that GPU is not asked of until it has ended.

Run as `python -m gpulease_worker.cuda_starts` this is that process.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass

from gpulease import cuda
from gpulease_worker import processes

COMMAND = (sys.executable, "-P", "-m", "gpulease_worker.cuda_starts")
WITHIN_S = 30.0
"""How long CUDA may take. It sets the GPU up, where nothing else has."""
SETTLED = 20
"""How many times less often it is asked once it starts: each question opens the device files of the host's GPUs."""
CHANGED_S = 5.0
"""How soon it is asked again after the fabric's state has changed, at the earliest."""


@dataclass(slots=True)
class Verdict:
    """What is known of one GPU."""

    fabric: str
    """State of its fabric at the last reading."""
    read_at_s: float
    """When that was, on the monotonic clock."""
    starts: bool | None = None
    """CUDA's answer in this state; None where there is none."""
    asked_at_s: float = -float("inf")
    """When CUDA was last asked."""


class CudaStarts:
    """Asks CUDA of the GPUs whose fabric is not ready, one at a time, in a thread.

    Args:
        again_s: Seconds until CUDA is asked again on a GPU on which it did not start.
    """

    def __init__(self, again_s: float) -> None:
        self._again_s = again_s
        self._verdicts: dict[str, Verdict] = {}
        self._asking: threading.Thread | None = None
        self._hung: dict[str, subprocess.Popen[bytes]] = {}
        """By UUID: a process that was killed, and may live on."""

    def of(self, uuid: str, fabric: str | None) -> bool | None:
        """Whether CUDA starts on this GPU; None where nobody knows. Never waits.

        `fabric` is its state now; None where that does not matter, and then nobody asks.
        """
        if fabric is None:
            self._verdicts.pop(uuid, None)
            return None
        now_s = time.monotonic()
        verdict = self._verdicts.setdefault(uuid, Verdict(fabric, now_s))
        if verdict.fabric != fabric:
            asked_at_s = min(verdict.asked_at_s, now_s + CHANGED_S - self._again_s)
            self._verdicts[uuid] = verdict = Verdict(fabric, now_s, asked_at_s=asked_at_s)
        verdict.read_at_s = now_s
        if self._asking is None or not self._asking.is_alive():
            self._ask_next(now_s)
        return verdict.starts

    def _ask_next(self, now_s: float) -> None:
        """Begin to ask of the GPU that has waited longest, if it is time."""
        due = {
            uuid: verdict
            for uuid, verdict in self._verdicts.items()
            if now_s - verdict.asked_at_s >= self._again_s * (SETTLED if verdict.starts else 1)
            and now_s - verdict.read_at_s <= CHANGED_S  # one that is not read any more may be lost
            and (uuid not in self._hung or self._hung[uuid].poll() is not None)
        }
        if due:
            uuid = min(due, key=lambda one: due[one].asked_at_s)
            self._asking = threading.Thread(target=self._ask, args=(uuid, due[uuid]), daemon=True)
            self._asking.start()

    def _ask(self, uuid: str, verdict: Verdict) -> None:
        try:
            starts, why = uuid in ask({**os.environ, "CUDA_VISIBLE_DEVICES": uuid}), "CUDA does not show it"
        except cuda.CudaFailed as failed:
            starts, why = False, str(failed)
            if isinstance(failed, cuda.CudaHangs):
                self._hung[uuid] = failed.process
        if starts is not verdict.starts:
            found = "CUDA starts all the same" if starts else f"CUDA does not start on it: {why}"
            print(f"The NVLink fabric of {uuid} is {verdict.fabric}; {found}.", file=sys.stderr, flush=True)
        verdict.starts, verdict.asked_at_s = starts, time.monotonic()


def ask(environ: Mapping[str, str], within_s: float = WITHIN_S) -> list[str]:
    """As `cuda.ask`, by a process that every worker takes for one of its own, and that ends with this one."""
    return cuda.ask(environ, within_s, COMMAND)


def _main() -> None:
    processes.end_with_parent(signal.SIGKILL)
    for line in cuda.answer():
        print(line, flush=True)
    os._exit(0)  # what CUDA does at an orderly end is of no use here, and may hang


if __name__ == "__main__":
    _main()
