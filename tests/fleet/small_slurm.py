"""A Slurm of one program, for tests that need none of the real one: `sbatch`, `squeue`, `scancel` and `scontrol`.

Each is this file, under that name. Jobs are directories in `SMALL_SLURM`; a job's script runs at once, in a session of
its own, and `scancel` sends all of its processes SIGTERM, as the real one does.

A file `kill` with `sbatch before` in it has the next call of `sbatch` kill its caller before it does anything; `after`,
when it has done it and before it says so.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

PROGRAMS = ("sbatch", "squeue", "scancel", "scontrol")
TIME_S = 3600


def install(place: Path, proctrack: str = "proctrack/cgroup") -> dict[str, str]:
    """Put the programs into a directory; the variables that find them there."""
    (place / "bin").mkdir(parents=True)
    (place / "jobs").mkdir()
    (place / "config").write_text(
        f"ProctrackType           = {proctrack}\nGresTypes               = gpu\nKillWait = 30 sec\n"
    )
    for name in PROGRAMS:
        program = place / "bin" / name
        program.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E {__file__} {name} "$@"\n')
        program.chmod(0o755)
    return {"SMALL_SLURM": str(place), "PATH": f"{place}/bin:{os.environ['PATH']}"}


def main(program: str, *arguments: str) -> int:
    """One call of one of the programs."""
    place = Path(os.environ["SMALL_SLURM"])
    kill_caller(place, program, "before")
    with suppress(FileNotFoundError):
        if (place / "kill").read_text() == f"{program} after":
            sys.stdout = (place / "unsaid").open("w")
    code = call(place, program, arguments)
    kill_caller(place, program, "after")
    return code


def kill_caller(place: Path, program: str, when: str) -> None:
    """SIGKILL for the caller, where the file `kill` asks for that."""
    with suppress(FileNotFoundError):
        if (place / "kill").read_text() == f"{program} {when}":
            (place / "kill").unlink()
            if (caller := os.getppid()) > 1:
                os.kill(caller, signal.SIGKILL)
            sys.exit(1)


def call(place: Path, program: str, arguments: tuple[str, ...]) -> int:
    """What one of the programs does."""
    match program:
        case "sbatch":
            return sbatch(place, arguments)
        case "squeue":
            return squeue(place, arguments)
        case "scancel":
            return scancel(place, arguments)
        case _:
            print((place / "config").read_text())
            return 0


def sbatch(place: Path, arguments: tuple[str, ...]) -> int:
    """Take a script from stdin and start it, unless there is a file `refuse`."""
    script = sys.stdin.read()
    if (place / "refuse").exists():
        print("sbatch: error: Batch job submission failed: Invalid partition name specified", file=sys.stderr)
        return 1
    if "--test-only" in arguments:
        print(
            "sbatch: Job 1 to start at 2026-11-25T10:00:00 using 16 processors on nodes n1 in partition p",
            file=sys.stderr,
        )
        return 0
    number = len(list((place / "jobs").iterdir())) + 1
    job = place / "jobs" / str(number)
    job.mkdir()
    names = [word.removeprefix("--job-name=") for word in arguments if word.startswith("--job-name=")]
    (job / "name").write_text(names[-1])
    (job / "script").write_text(script)
    (job / "script").chmod(0o700)
    own = {"SLURM_JOB_ID": str(number), "SLURMD_NODENAME": f"n{number}", "SLURM_JOB_GPUS": "0,1"}
    with (job / "output").open("wb") as output:
        started = subprocess.Popen(
            ["/bin/sh", str(job / "script")],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=os.environ | own,
            start_new_session=True,
        )
    (job / "pid").write_text(str(started.pid))
    print(number)
    return 0


def is_alive(pid: int) -> bool:
    """True while a process runs."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def squeue(place: Path, arguments: tuple[str, ...]) -> int:
    """List jobs, as `%i|%j|%T|%L|%N|%r` or as `%T|%L`."""
    asked = [word.removeprefix("--jobs=") for word in arguments if word.startswith("--jobs=")]
    for job in sorted((place / "jobs").iterdir(), key=lambda one: int(one.name)):
        if asked and job.name not in asked:
            continue
        with suppress(OSError, ValueError):
            cancelled = (job / "cancelled").exists()
            alive = is_alive(int((job / "pid").read_text()))
            ended = "CANCELLED" if cancelled else "COMPLETED"
            state = ("COMPLETING" if cancelled else "RUNNING") if alive else ended
            left = max(0, int((job / "pid").stat().st_mtime + TIME_S - time.time()))
            time_left = f"{left // 3600}:{left // 60 % 60:02d}:{left % 60:02d}"
            fields = (
                (state, time_left)
                if asked
                else (job.name, (job / "name").read_text(), state, time_left, f"n{job.name}", "None")
            )
            print("|".join(fields))
    return 0


def scancel(place: Path, arguments: tuple[str, ...]) -> int:
    """End a job; with `--batch` only its script is told."""
    job = place / "jobs" / arguments[-1]
    pid = int((job / "pid").read_text())
    if "--batch" in arguments:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGTERM)
        return 0
    (job / "cancelled").touch()
    needles = {f"SLURM_JOB_ID={job.name}".encode(), f"SMALL_SLURM={place}".encode()}
    for entry in Path("/proc").iterdir():
        with suppress(OSError, ValueError):
            if needles <= set((entry / "environ").read_bytes().split(b"\0")):
                os.kill(int(entry.name), signal.SIGTERM)
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
