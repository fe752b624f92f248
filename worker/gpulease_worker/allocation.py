"""The allocation that a worker runs in, such as a job of Slurm: when it ends, and leaving before that.

A worker with `--leave-s` can *leave*: on SIGTERM, when its allocation is about to end, and when that is gone. It then
tells the daemon (`NodeReport.leaving`), which grants nothing there any more; it ends its jobs, with their grace period;
it reports how they ended; and it says that it has left (`NodeReport.left`), upon which the daemon forgets the node.

| the scheduler says | the worker |
|---|---|
| how long the allocation lasts | tells the daemon, less the time that leaving takes |
| nothing, because it is away | goes by what it said last |
| that the allocation has ended, or it knows no such job, twice | leaves at once: the GPUs may be another's by now |

It is asked once a minute, and at once when the daemon refuses the worker's token: `gpulease fleet` revokes that when
the scheduler no longer has the allocation.

An allocation of processes (`pid:N,...`, as with Ray) ends with the first of them, or after the token was refused for
some seconds.

The second case of an end is that of a job whose `slurmstepd` was killed: Slurm ends such a job without ending any
process of it. The time that is left is asked for and not a date, which would rest on a clock and a time zone.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from gpulease_protocol.slurm_duration import parse_slurm_duration
from gpulease_worker.settings import SLURM, WorkerSettings

GRACE_S, LOST_GRACE_S = 35.0, 3.0
"""What jobs have between SIGTERM and SIGKILL: at most, and where the allocation is gone already."""
REPORT_S = 15.0
"""Part of the time for leaving that is kept for telling the daemon."""
AGAIN_S = 3.0
"""When to look again at an allocation that seems to have ended. Seconds."""
MIN_LEAVE_S = 10.0
"""When its allocation is gone, a worker tries for at least so long to tell the daemon."""
ANSWER_S = 20.0
"""How long the scheduler may take for an answer."""
REFUSED_S, REFUSED_AGAIN_S = 5.0, 10.0
"""A worker whose allocation is one of processes leaves when the daemon has refused it for so long. A refusal that comes
later than the second after the last one is the first again. Seconds."""
RUNS = frozenset({"RUNNING", "RESIZING", "SUSPENDED", "CONFIGURING", "SIGNALING", "STAGE_OUT", "STOPPED"})
"""States in which a job of Slurm has its allocation. One that was put back into the queue has none."""
SLURM_SAYS_GONE = "Invalid job id"

log = logging.getLogger(__name__)


def grace_within(leave_s: float) -> float:
    """What jobs have between SIGTERM and SIGKILL when a node leaves within `leave_s`."""
    return min(GRACE_S, max(leave_s - REPORT_S, leave_s / 2))


class Allocation(Protocol):
    """What a worker runs in."""

    def available_s(self) -> float | None:
        """For how long jobs may still run; None while no end is known."""

    def look_soon(self) -> None:
        """Look at it now: the daemon refuses this worker, as it does once the allocation is known to have ended."""

    async def watch(self) -> None:
        """Look at it until cancelled, or until it is gone and the worker leaves."""


def allocation_of(settings: WorkerSettings, leave: Callable[[float | None], None]) -> Allocation | None:
    """The allocation that the settings name; None where they name none."""
    if settings.allocation_pids:
        return ProcessAllocation(settings.allocation_pids, leave)
    job_id = os.environ.get("SLURM_JOB_ID", "") if settings.allocation == SLURM else ""
    if not job_id:
        return None
    return SlurmAllocation(job_id, settings.allocation_poll_s, settings.leaves_within_s, leave)


class ProcessAllocation:
    """Lasts as long as the processes of an engine that gives this worker its GPUs, and as long as the worker's token.

    `gpulease fleet` revokes the token when the engine no longer has the pilot: a raylet of Ray may live on although its
    GCS has given it up."""

    def __init__(self, pids: tuple[int, ...], leave: Callable[[float | None], None]) -> None:
        self._pids, self._leave = pids, leave
        self._ended = asyncio.Event()
        self._why = "a process has ended that this worker depends on"
        self._refused_s: tuple[float, float] | None = None
        """The first and the last of the refusals that follow each other. On the monotonic clock."""

    def available_s(self) -> float | None:
        """No end is known."""
        return None

    def look_soon(self) -> None:
        """Leave once the daemon has refused this worker for `REFUSED_S`: others have its GPUs by now, or its jobs."""
        now_s = time.monotonic()
        first_s, last_s = self._refused_s or (now_s, now_s)
        self._refused_s = (first_s if now_s - last_s <= REFUSED_AGAIN_S else now_s, now_s)
        if now_s - self._refused_s[0] >= REFUSED_S:
            self._why = "the daemon refuses the token of this worker"
            self._ended.set()

    async def watch(self) -> None:
        """Wait until one of the processes has ended, or the token is refused; the worker leaves then."""
        loop, ended, pidfds = asyncio.get_running_loop(), self._ended, list[int]()
        try:
            for pid in self._pids:
                if (pidfd := await self._open(pid)) is not None:
                    pidfds.append(pidfd)
                    loop.add_reader(pidfd, ended.set)
            await ended.wait()
        finally:
            for pidfd in pidfds:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        log.warning("%s: this node leaves", self._why)
        self._leave(LOST_GRACE_S)

    async def _open(self, pid: int) -> int | None:
        """A pidfd; None once the allocation has ended. While the host gives none, for want of descriptors, it is asked
        for again: no end may be missed."""
        logged = ""
        while not self._ended.is_set():
            try:
                return os.pidfd_open(pid)
            except ProcessLookupError:
                self._ended.set()
            except OSError as error:
                if str(error) != logged:
                    log.error("the end of process %d, on which this worker depends, cannot be noticed: %s", pid, error)
                logged = str(error)
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._ended.wait(), AGAIN_S)
        return None


class SlurmAllocation:
    """Watches one job of Slurm, by asking `squeue` for it.

    Args:
        job_id: Its id, `SLURM_JOB_ID`.
        poll_s: Time between two looks at it.
        leave_s: How long before its end the worker begins to leave.
        leave: Begins that, with the grace period of jobs, or None for as much as there is time for.
    """

    def __init__(self, job_id: str, poll_s: float, leave_s: float, leave: Callable[[float | None], None]) -> None:
        self._command = ("squeue", "--noheader", "--all", f"--jobs={job_id}", "--states=all", "--format=%T|%L")
        self._poll_s, self._leave_s, self._leave = poll_s, leave_s, leave
        self._ends_at_s: float | None = None
        """On the monotonic clock; None while no end is known."""
        self._gone = 0
        """How many times in a row it was said to have ended."""
        self._doubt = asyncio.Event()

    def look_soon(self) -> None:
        """Look at it now: the daemon refuses this worker, as it does once the allocation is known to have ended."""
        self._doubt.set()

    def available_s(self) -> float | None:
        """For how long jobs may still run; None while no end is known."""
        return None if self._ends_at_s is None else max(0.0, self._ends_at_s - self._leave_s - time.monotonic())

    @property
    def has_ended(self) -> bool:
        """True when it was said twice in a row that it has ended."""
        return self._gone >= 2

    async def watch(self) -> None:
        """Look at it until cancelled."""
        while True:
            code, output = await self._ask()
            self.take(code, output, time.monotonic())
            if self.has_ended:
                log.warning("the allocation of this worker has ended: this node leaves")
                self._leave(LOST_GRACE_S)
                return
            left_s = self.available_s()
            if left_s == 0.0:
                log.info("the allocation of this worker ends soon: this node leaves")
                self._leave(None)
            wait_s = min(self._poll_s, AGAIN_S) if self._gone else self._poll_s
            with suppress(TimeoutError):
                await asyncio.wait_for(self._doubt.wait(), min(wait_s, left_s or wait_s))
                await asyncio.sleep(min(AGAIN_S, wait_s))  # at most so often, however many reports are refused
            self._doubt.clear()

    def take(self, code: int | None, output: str, now_s: float) -> None:
        """Take in an answer of the scheduler: the exit code (None: it did not answer), and what it printed."""
        state, _, left = output.strip().partition("|")
        if code == 0 and state in RUNS:
            left_s = parse_slurm_duration(left)
            self._gone, self._ends_at_s = 0, None if left_s is None else now_s + left_s
        elif (code == 0 and re.fullmatch(r"[A-Z_]*", state)) or SLURM_SAYS_GONE in output:
            self._gone += 1
        else:
            log.warning("the scheduler does not say how long this allocation lasts: %s", output.strip()[:200])

    async def _ask(self) -> tuple[int | None, str]:
        try:
            asked = await asyncio.create_subprocess_exec(
                *self._command, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
            )
        except OSError as error:
            return None, f"squeue cannot be run: {error}"
        try:
            output, _ = await asyncio.wait_for(asked.communicate(), ANSWER_S)
        except TimeoutError:
            return None, f"squeue did not answer within {ANSWER_S:g} s"
        finally:
            with suppress(ProcessLookupError):
                asked.kill()
        return asked.returncode, output.decode(errors="replace")
