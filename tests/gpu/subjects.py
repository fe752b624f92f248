"""Drives `subject.py`, and chooses an unused GPU. For the tests here and for `bench.hardware`."""

from __future__ import annotations

import json
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any, Self

import psutil

from gpulease.cuda import libcuda
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.launchers import strip_launcher_variables
from gpulease_protocol.model import ComputeMode, GpuReading
from gpulease_worker.probe import cuda_init_check
from gpulease_worker.probe.gpu_health import FABRIC_NOT_READY
from gpulease_worker.probe.probe_protocol import Reading
from gpulease_worker.probe.process_attribution import DEVICE_FILES
from gpulease_worker.processes import lease_claims
from gpulease_worker.processes.bounded_run import bounded_run

PROGRAM = Path(__file__).with_name("subject.py")
LIBRARY = "libnvidia-ml.so"
MASK = "CUDA_VISIBLE_DEVICES"
STEP_S = 40.0
"""How long a step may take: importing torch from a cold disk takes a while."""
END_S = 2.0
"""How long to wait for a killed process to end; one that hangs in the driver does not end."""
IDLE_BYTES = 1024**3
"""An idle driver keeps less memory than this; more belongs to a process, listed or not."""
TORCH = "import sys, torch; sys.exit(not torch.cuda.is_available() and f'torch {torch.__version__} has no CUDA')"


class SubjectFailed(Exception):
    """A step was refused or did not return in time. The text says which and why."""


class SubjectHangs(SubjectFailed):
    """A step did not return in time."""


class Subject:
    """A process that takes steps on a GPU; killed with its forked children when its block ends.

    Args:
        mask: CUDA_VISIBLE_DEVICES; None: not set.
        lease: The lease that it says it works under; None: none.
        environment: Variables beside those of this process, of which GPULEASE_* and what a launcher sets are left out.
    """

    def __init__(self, *, mask: str | None = None, lease: str | None = None, **environment: str) -> None:
        self._environment = surroundings(mask, lease, **environment)
        self._forked: list[ProcessId] = []
        self._rest = b""

    def __enter__(self) -> Self:
        self.process = subprocess.Popen(
            [sys.executable, "-P", str(PROGRAM)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=self._environment,
            bufsize=0,
        )
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()
        self.end_forked()

    @property
    def pid(self) -> int:
        """Pid of the process."""
        return self.process.pid

    def do(self, step: str, *words: object, within_s: float = STEP_S) -> Any:
        """Take a step and return its answer. Raises SubjectFailed, and SubjectHangs if it takes longer."""
        self.tell(step, *words)
        told = self.answer(step, within_s)
        if step == "fork" and (child := ProcessId.of(int(told))) is not None:
            self._forked.append(child)
        return told

    def tell(self, step: str, *words: object) -> None:
        """Start a step without waiting."""
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended, as its answer will show
            self.process.stdin.write(" ".join(str(word) for word in (step, *words)).encode() + b"\n")

    def answer(self, step: str, within_s: float = STEP_S) -> Any:
        """Its next answer. Raises SubjectFailed."""
        found = understood(step, self._line(step, within_s))
        if "error" in found:
            raise SubjectFailed(f"{step}: {found['error']}")
        return found["told"]

    def kill(self) -> None:
        """Send SIGKILL, as the kernel's out-of-memory killer would; forked children live on."""
        self.process.kill()
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(END_S)
        for stream in (self.process.stdin, self.process.stdout):
            if stream is not None:
                stream.close()

    def end_forked(self) -> None:
        """Send SIGKILL to its forked children."""
        for child in self._forked:
            child.send_signal(signal.SIGKILL)

    def _line(self, step: str, within_s: float) -> bytes:
        assert self.process.stdout is not None
        until_s = time.monotonic() + within_s
        while b"\n" not in self._rest:
            if not select.select([self.process.stdout], [], [], max(0.0, until_s - time.monotonic()))[0]:
                raise SubjectHangs(f"{step} did not come back within {within_s:g} s")
            read = os.read(self.process.stdout.fileno(), 65536)
            if not read:
                raise SubjectFailed(f"{step}: the process has ended")
            self._rest += read
        line, _, self._rest = self._rest.partition(b"\n")
        return line


def once(*steps: str, mask: str | None = None, launcher: Sequence[str] = (), within_s: float, **more: str) -> list[Any]:
    """The answers to steps in a process of their own; the last is `SubjectFailed` if a step failed."""
    command = [sys.executable, *launcher, *([] if launcher else ["-P"]), str(PROGRAM), *" , ".join(steps).split()]
    try:
        ran = subprocess.run(
            command,
            env=surroundings(mask, None, **more),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=within_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise SubjectHangs(f"{', '.join(steps)} did not end within {within_s:g} s") from None
    lines = [line for line in ran.stdout.splitlines() if line.startswith((b'{"told"', b'{"error"'))]
    if len(lines) < len(steps):
        raise SubjectFailed(f"{', '.join(steps)}: it ended with code {ran.returncode}: {ran.stderr.decode()[-300:]}")
    found = [understood(step, line) for step, line in zip(steps, lines, strict=False)]
    for step, one in zip(steps, found, strict=True):
        if "error" in one:
            raise SubjectFailed(f"{step}: {one['error']}")
    return [one["told"] for one in found]


def understood(step: str, line: bytes) -> dict[str, Any]:
    """Check an answer. Raises SubjectFailed if it is an error."""
    try:
        found = json.loads(line)
    except ValueError:
        raise SubjectFailed(f"{step}: {line.decode(errors='replace')[:200]} is no answer") from None
    return dict(found)


def surroundings(mask: str | None, lease: str | None, **more: str) -> dict[str, str]:
    """The environment of a subject."""
    kept = {
        name: value for name, value in strip_launcher_variables(os.environ).items() if not name.startswith("GPULEASE_")
    }
    kept.pop(MASK, None)
    masked = {} if mask is None else {MASK: mask, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    return kept | device_files() | masked | ({} if lease is None else {lease_claims.MARKER: lease}) | more


def device_files() -> dict[str, str]:
    """The variable with the location of device files if they are not in /dev, as in tests."""
    return {DEVICE_FILES: os.environ[DEVICE_FILES]} if os.environ.get(DEVICE_FILES) else {}


@contextmanager
def churners(count: int, mask: str) -> Iterator[list[Subject]]:
    """Processes that each repeatedly start others, which create a context on this mask's GPU and end."""
    with ExitStack() as stack:
        all_of_them = [stack.enter_context(Subject(mask=mask)) for _ in range(count)]
        for one in all_of_them:
            one.tell("churn")
        for one in all_of_them:
            one.answer("churn")
        yield all_of_them


@cache
def starts(uuid: str) -> bool:
    """Whether CUDA starts on a GPU. The first reading does not know that yet, and the fabric's state may say little."""
    try:
        return uuid in cuda_init_check.ask({**os.environ, MASK: uuid})
    except libcuda.CudaError:
        return False


def in_the_way(gpu: GpuReading) -> str | None:
    """Why a GPU is left alone; None for an unused one."""
    if gpu.health != "ok" and not (gpu.health == FABRIC_NOT_READY and starts(gpu.uuid)):
        return f"its health is {gpu.health}"
    if gpu.processes:
        named = [f"{process.command or 'a process'} (pid {process.pid})"[:80] for process in gpu.processes[:4]]
        return f"in use by {', '.join(named)}"
    if gpu.hidden_use or (gpu.memory_used_bytes or 0) > IDLE_BYTES:
        return f"{(gpu.memory_used_bytes or 0) >> 20} MiB are in use by processes that the driver does not list here"
    if gpu.compute_mode is ComputeMode.PROHIBITED:
        return "its compute mode is prohibited"
    return None


def choose(reading: Reading) -> tuple[GpuReading | None, dict[str, str]]:
    """An unused GPU; and, by UUID, why others are left alone."""
    why = {gpu.uuid: reason for gpu in reading.gpus if (reason := in_the_way(gpu)) is not None}
    return next((gpu for gpu in reading.gpus if gpu.uuid not in why), None), why


def torch_problem(within_s: float = 90.0) -> str | None:
    """Why torch cannot use CUDA here, checked in a separate process; None if it can."""
    try:
        asked = bounded_run([sys.executable, "-c", TORCH], within_s)
    except subprocess.TimeoutExpired:
        return f"torch did not say within {within_s:g} s whether it has CUDA"
    if asked.returncode == 0:
        return None
    lines = asked.stderr.strip().splitlines()
    return lines[-1] if lines else f"a process that imports torch ends with code {asked.returncode}"


def processes_with_driver(pid: int, files: Collection[str | None]) -> list[str]:
    """The process and descendants that have the driver's library loaded or one of these files open.

    Each is named by the module of gpulease that it runs.
    """
    found = []
    for process in (psutil.Process(pid), *psutil.Process(pid).children(recursive=True)):
        try:
            maps = Path(f"/proc/{process.pid}/maps").read_text()
            opened = {os.readlink(entry.path) for entry in os.scandir(f"/proc/{process.pid}/fd")}
            words = process.cmdline()
        except (OSError, psutil.Error):
            continue  # it has ended
        if LIBRARY in maps or opened.intersection(files):
            found.append(next((word for word in words if word.startswith("gpulease")), "another"))
    return sorted(found)
