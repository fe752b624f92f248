"""Runs a step in a process of its own and ends everything that it has started: a hang loses rows, not the command."""

from __future__ import annotations

import json
import os
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from bench.hardware import findings
from bench.hardware.checks import Check
from bench.hardware.findings import Row, Times, Verdict
from bench.hardware.step import SURVEY
from gpulease_protocol import codec
from gpulease_protocol.host import process_tree
from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.model import GpuReading
from gpulease_worker.probe.probe_protocol import Reading
from tests.gpu.subjects import choose

ROOT = Path(__file__).parents[2]
TOKEN = "BENCH_HARDWARE_STEP"  # noqa: S105  a variable name that marks the processes of a step
SURVEY_S = 60.0
"""How long the first reading may take: without persistence mode the driver initializes every GPU."""
END_S = 3.0
"""How long to wait for killed processes; those that hang in the driver do not end."""
LEAST_S = 5.0
"""A step does not start with less time left than this."""


@dataclass(frozen=True)
class Survey:
    """What the command knows before its first step."""

    reading: Reading
    """Every GPU."""
    gpu: GpuReading | None
    """The GPU that the steps use."""
    left_alone: dict[str, str]
    """By UUID: why other GPUs are not used."""
    torch: str | None = None
    """Why torch cannot use CUDA."""


def survey(wanted: str | None) -> Survey:
    """Read which GPUs exist, and choose an unused one; `wanted`: this one or none."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
        path = Path(place) / "reading"
        if not _run([SURVEY, str(path)], "", SURVEY_S, Path(place)).in_time:
            return Survey(Reading(problem=f"NVML did not answer within {SURVEY_S:g} s: the driver hangs."), None, {})
        if not path.exists():
            return Survey(Reading(problem="the process that was to read NVML has ended without a word"), None, {})
        reading = codec.from_json(Reading, json.loads(path.read_text()))
    candidates = tuple(gpu for gpu in reading.gpus if wanted is None or wanted in (gpu.uuid, str(gpu.index)))
    return Survey(reading, choose(Reading(gpus=candidates))[0], choose(reading)[1])


def take(check: Check, seen: Survey, *, quick: bool, left_s: float) -> list[Row | Times]:
    """The findings of a step within its deadline and the rest of the command's time."""
    if left_s < LEAST_S:
        return [_row(check, check.title, "not run: the command has no time left", Verdict.NOT_RUN)]
    deadline_s = min(check.deadline_s, left_s)
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as directory:
        place, results = Path(directory) / "place", Path(directory) / "results"
        place.mkdir()
        told = {
            "reading": codec.to_json(seen.reading),
            "gpu": None if seen.gpu is None else seen.gpu.uuid,
            "torch": seen.torch,
            "quick": quick,
            "place": str(place),
            "results": str(results),
        }
        ran = _run([check.letter], json.dumps(told), deadline_s, Path(directory))
        found, asking = findings.read(results)
    if not ran.in_time:
        found.append(_row(check, asking, f"no answer within the {deadline_s:g} s of the step", Verdict.HUNG))
    elif ran.code != 0:
        found.append(_row(check, asking, f"the step ended with code {ran.code}: {ran.said}", Verdict.BROKE))
    return found


def _row(check: Check, asked: str, found: str, verdict: Verdict) -> Row:
    return Row(step=check.letter, asked=asked, found=found, verdict=verdict)


@dataclass(frozen=True)
class Ran:
    """How a step's process ended."""

    in_time: bool
    code: int | None
    said: str
    """The end of its output."""


def _run(words: Sequence[str], told: str, within_s: float, place: Path) -> Ran:
    token = secrets.token_hex(16)
    output = place / "output"
    with output.open("wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "bench.hardware.step", *words],
            cwd=ROOT,
            env={**os.environ, TOKEN: token},
            stdin=subprocess.PIPE,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
        )
        try:
            process.communicate(told, timeout=within_s)
        except subprocess.TimeoutExpired:
            return Ran(in_time=False, code=None, said="")
        finally:
            end(token)
            with suppress(subprocess.TimeoutExpired):
                process.wait(END_S)
    said = " ".join(output.read_text(errors="replace").split())[-400:]
    return Ran(in_time=True, code=process.returncode, said=said)


def end(token: str) -> None:
    """Send SIGKILL to every process with this token in its environment, until none is left or for a while."""
    mark, until_s = f"{TOKEN}={token}".encode(), time.monotonic() + END_S
    while (left := [one for pid in process_tree.all_pids() if (one := _marked(pid, mark)) is not None]) and (
        time.monotonic() < until_s
    ):
        for one in left:
            one.send_signal(signal.SIGKILL)
        time.sleep(0.02)


def _marked(pid: int, mark: bytes) -> ProcessId | None:
    """The process, if it is alive and was started with the token."""
    identity = ProcessId.of(pid)
    try:
        environment = Path(f"/proc/{pid}/environ").read_bytes() if identity is not None else b""
    except OSError:
        return None
    return identity if mark in environment.split(b"\0") else None
