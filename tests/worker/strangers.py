"""Runs jobs of another user than the worker's, in a data directory that this user can traverse."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from gpulease_protocol.host import log_files
from gpulease_protocol.node_protocol import JobReport
from gpulease_worker.jobs.job_settings import JobSettings
from tests.worker.build import order, python, spec
from tests.worker.play import Worker, play

STRANGER = 54321
"""A user whom no database knows."""
ROOT = os.geteuid() == 0
ANYONE = STRANGER if ROOT else os.getuid()
"""A user that the tests may start a process as: not their own, if they may."""


@contextmanager
def passable() -> Iterator[Path]:
    """A data directory that every user can pass through, as /var/lib/gpulease is for root."""
    directory = Path(tempfile.mkdtemp(prefix="gpulease-users-"))
    directory.chmod(0o711)
    try:
        yield directory
    finally:
        subprocess.run(["rm", "-rf", str(directory)], check=True)  # goes down further than shutil's rmtree


def in_a_process(function: Callable[..., None], *arguments: object) -> str:
    """What a function of a test module prints in a process of its own, which may change what its children inherit."""
    module = function.__module__
    call = f"import json, sys; from {module} import {function.__name__} as f; f(*json.loads(sys.argv[1]))"
    ran = subprocess.run(
        python("-c", call, json.dumps(arguments)),
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def end_of(
    directory: Path,
    *command: str,
    uid: int = STRANGER,
    settings: JobSettings | None = None,
    **members: object,
) -> JobReport:
    """The end of that user's job."""
    found: list[JobReport] = []

    async def story(worker: Worker) -> None:
        found.append(await worker.end_of(order("j", spec(*command, **members), uid=uid, gid=uid)))

    play(directory, story, settings=settings)
    return found[0]


def log_of(report: JobReport) -> str:
    """What the job has printed."""
    assert report.log_directory is not None
    return log_files.tail(Path(report.log_directory), "launcher.log", size_bytes=10_000)


def refused(report: JobReport) -> bool:
    """What a worker that is not root says to another user's job, and all that it does."""
    return report.exit_code is None and "Only a worker that runs as root runs jobs of other" in str(report.reason)


@contextmanager
def running_as(uid: int, *command: str, **environment: str) -> Iterator[subprocess.Popen[str]]:
    """A process of a user, in a session of its own, until the block ends. Its input and output are pipes."""
    user = {"user": uid, "group": uid, "extra_groups": ()} if ROOT else {}
    process = subprocess.Popen(
        command,
        env={"PATH": os.environ["PATH"], **environment},
        cwd="/",
        text=True,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        start_new_session=True,
        **user,  # type: ignore[call-overload]
    )
    try:
        yield process
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
