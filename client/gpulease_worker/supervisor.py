"""A job's supervisor: `python -m gpulease_worker.supervisor JOB_DIR`. One per job, detached from worker and daemon.

It is the only one who launches the job, and it does so at most once: it holds the directory's lock and writes
`start.json` before it launches, and a directory that has a `start.json` is never launched again. It is the parent of
everything that the job leaves behind (child subreaper), so it sees all ends. It writes `exit.json` only when nothing of
the job lives any more: neither a descendant nor a process anywhere with the lease's marker.

SIGTERM to it means: stop the job as `stop.json` says, or with the default grace where there is none, because a worker
with a full disk cannot write one. A record that cannot be written or read does not end the supervision: it is tried
again, and `supervisor.log` says why. It stands on the standard library and small modules of this package alone, because
one of it stays in memory for every job.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpulease.log_files import open_beneath
from gpulease.owner import boot_id, stat
from gpulease_worker import cgroup, entry, failure, processes, records
from gpulease_worker.launch import Plan
from gpulease_worker.log_bound import LogBound

TIMEOUT_GRACE_S = 35.0
"""Between SIGTERM and SIGKILL for a job that ran out of time: over torchrun's own 30 s for its ranks."""
LEFTOVER_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL for what a job left behind after it ended by itself."""
KILL_DEADLINE_S = 20.0
"""How long SIGKILL is repeated; what lives on then is stuck in the kernel."""
LOOK_S = 0.05
"""How often leftovers are looked for while they have their grace."""
IDLE_S = 60.0
"""Longest sleep; every signal ends it."""
RECORD_LOOK_S = 0.5
"""Pause before a record that could not be written is tried again."""
RECORD_DEADLINE_S = 60.0
"""How long the record of the end is tried for; after that the worker, which sees the supervisor end, records one."""
DEFAULT_GRACE_S = 35.0
"""Between SIGTERM and SIGKILL where no record says how long; as `JobOrder.grace_s`."""
RANK_LOOK_S = (0.1, 0.5)
"""First and longest pause between two looks for the first rank: torchrun takes seconds to start one."""
NAMED_PIDS = 20
"""How many of the processes that cannot be killed are named: the record has room for so many."""


class Supervisor:
    """Runs one plan in a job's directory, from launch to the last process's end."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self._directory = directory
        self._plan = plan
        self._status: int | None = None
        self._launcher: subprocess.Popen[bytes] | None = None
        self._kill_at_s: float | None = None
        self._timed_out = False
        self._told = False
        self._stopped = False
        self._announced = False
        self._said = ""
        self._rank_look_s = RANK_LOOK_S[0]
        self._cgroup: cgroup.Cgroup | None = None
        uid = os.geteuid() if plan.account is None else plan.account.uid
        self._logs = LogBound(directory / records.LOGS, plan.log_bytes, uid, self._say)
        self._wake, wake_end = socket.socketpair()
        self._wake.setblocking(False)
        wake_end.setblocking(False)
        self._wake_end = wake_end

    def run(self) -> None:
        """Launch, watch, clean up, and record the end."""
        self._listen()
        self._cgroup = cgroup.make(self._plan.lease_id)
        place = None if self._cgroup is None else str(self._cgroup.path)
        self._start = records.Start(boot_id=boot_id(), supervisor=_self(), cgroup=place)
        try:
            records.write(self._directory, records.START, self._start)
        except OSError as error:
            self._conclude(f"Its start could not be recorded: {error.strerror}.")
            return
        try:
            self._launcher = self._launch()
        except entry.CannotStart as error:
            self._conclude(str(error))
            return
        except OSError as error:
            self._conclude(f"Its log cannot be written: {error.strerror}.")
            return
        # The launcher may have ended already; as long as nobody has reaped it, its start time can still be read.
        seen = stat(self._launcher.pid)
        launcher = processes.Identity(self._launcher.pid, seen.start_ticks if seen else 0)
        at = records.now()
        self._start = replace(self._start, launcher=launcher, started_at=at, rank_at=at if self._plan.alone else None)
        self._announce()
        timeout_s = self._plan.timeout_s
        self._watch(None if timeout_s is None else time.monotonic() + timeout_s)
        stopped = self._stopped
        # Where the launcher itself would not die, everything had its SIGKILL for long enough.
        left = self._left() if self._status is None else self._sweep()
        self._logs.finish()
        self._record(self._end_of(None if self._status is None else exit_code(self._status), stopped, left))
        if self._cgroup is not None and not self._cgroup.remove():
            self._say(f"{self._cgroup.path} is not empty and stays")

    def _listen(self) -> None:
        """Have SIGTERM and the end of children wake the loop instead of interrupting it."""
        signal.set_wakeup_fd(self._wake_end.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._tell)
        # The worker starts this process with SIGTERM blocked, so that none is lost before this line.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _tell(self, *_: object) -> None:
        self._told = True

    def _launch(self) -> subprocess.Popen[bytes]:
        """Start the launcher. Raises CannotStart, or OSError where there is no log to write to."""
        log = open_beneath(self._directory / records.LOGS, "launcher.log", flags=os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            lack = entry.lack(self._plan, self._cgroup)
            if lack is not None:
                raise entry.CannotStart(lack)
            if self._told:
                raise entry.CannotStart("It was stopped before it started.")
            return entry.launch(self._plan, log, self._cgroup)
        finally:
            os.close(log)

    def _conclude(self, reason: str) -> None:
        """Record the end of a job that was never launched."""
        left = self._sweep()
        self._record(records.Exit(exit_code=None, reason=reason, unkillable=_pids(left), ended_at=records.now()))
        if self._cgroup is not None:
            self._cgroup.remove()

    def _announce(self) -> None:
        """Record that the launcher is up; the job runs whether or not that succeeds."""
        try:
            records.write(self._directory, records.START, self._start)
            self._announced = True
        except OSError as error:
            self._say(f"the start is not on disk: {error}")

    def _watch(self, timeout_at_s: float | None) -> None:
        """Until the launcher has ended, or would not die; stop it when it is told to, or out of time."""
        while True:
            self._reap()
            if self._status is not None:
                return
            self._look_for_rank()
            self._logs.look()
            if not self._announced:
                self._announce()
            self._heed_stop()
            now = time.monotonic()
            if timeout_at_s is not None and now >= timeout_at_s and self._kill_at_s is None:
                self._timed_out = True
                self._end(TIMEOUT_GRACE_S)
            if self._kill_at_s is not None and now >= self._kill_at_s:
                if now >= self._kill_at_s + KILL_DEADLINE_S:
                    return
                self._kill()
                self._logs.look()
                self._sleep(LOOK_S)
                continue
            waits = [at - now for at in (timeout_at_s, self._kill_at_s) if at is not None and at > now]
            waits.append(self._logs.next_at_s - now)
            if self._start.rank_at is None:
                waits.append(self._rank_look_s)
            self._sleep(min([IDLE_S if self._announced else RECORD_LOOK_S, *waits]))

    def _look_for_rank(self) -> None:
        """Note the moment at which a launcher has its first rank up: a process that was told its rank."""
        if self._start.rank_at is not None:
            return
        if any(processes.has_rank(process.pid) for process in processes.descendants(os.getpid())):
            self._start = replace(self._start, rank_at=records.now())
            self._announced = False
        self._rank_look_s = min(self._rank_look_s * 1.1, RANK_LOOK_S[1])

    def _heed_stop(self) -> None:
        try:
            stop = records.read(self._directory, records.STOP, records.Stop)
        except ValueError as error:
            self._say(str(error))
            stop = None
        if stop is None and self._told and not self._stopped:
            stop = records.Stop(grace_s=DEFAULT_GRACE_S)
        if stop is None:
            return
        if not self._stopped:
            self._stopped = True
            self._end(stop.grace_s)
        elif self._kill_at_s is not None:  # a second order may shorten the grace, never lengthen it
            self._kill_at_s = min(self._kill_at_s, time.monotonic() + stop.grace_s)

    def _end(self, grace_s: float) -> None:
        """SIGTERM to the launcher alone: what it has started, it ends in its own order."""
        if self._status is None and self._launcher is not None:
            try:
                os.kill(self._launcher.pid, signal.SIGTERM)  # not reaped yet, so the pid is still its own
            except (PermissionError, ProcessLookupError) as error:
                self._say(f"the launcher {self._launcher.pid} cannot be told to end: {error.strerror}")
        at_s = time.monotonic() + grace_s
        self._kill_at_s = at_s if self._kill_at_s is None else min(at_s, self._kill_at_s)

    def _sweep(self) -> set[processes.Identity]:
        """End what the launcher left: SIGTERM, the rest of the grace, SIGKILL. Returns what would not die."""
        if self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + LEFTOVER_GRACE_S
        told: set[processes.Identity] = set()
        while (left := self._left()) and time.monotonic() < self._kill_at_s:
            self._heed_stop()
            processes.send_all(left - told, signal.SIGTERM)
            told |= left
            self._logs.look()
            self._sleep(LOOK_S)
        end = time.monotonic() + KILL_DEADLINE_S
        while (left := self._left()) and time.monotonic() < end:
            self._kill()
            self._logs.look()
            self._sleep(LOOK_S)
        return left

    def _kill(self) -> None:
        """SIGKILL to all of the job: at once where it has a cgroup, and to each that may have left it."""
        if self._cgroup is not None:
            self._cgroup.kill()
        processes.send_all(self._left(), signal.SIGKILL)

    def _left(self) -> set[processes.Identity]:
        """Every living process of the job, wherever it has gone."""
        self._reap()
        found = processes.descendants(os.getpid()) | set(processes.marked({self._plan.lease_id}))
        if self._cgroup is not None:
            found |= self._cgroup.members()
        return {process for process in found if process.pid != os.getpid()}

    def _reap(self) -> None:
        """Take the status of every child that has ended, the adopted ones too."""
        with suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return
                if self._launcher is not None and pid == self._launcher.pid:
                    self._status = status
                    self._launcher.returncode = os.waitstatus_to_exitcode(status)

    def _sleep(self, seconds: float) -> None:
        if select.select([self._wake], [], [], max(0.0, seconds))[0]:
            with suppress(BlockingIOError):
                self._wake.recv(4096)

    def _end_of(self, code: int | None, stopped: bool, left: set[processes.Identity]) -> records.Exit:
        """The record of the end, with the reason where there is one to tell."""
        end = records.Exit(
            exit_code=code, timed_out=self._timed_out, unkillable=_pids(left), ended_at=records.now(), reason=None
        )
        if left:
            stuck = ", ".join(map(str, _pids(left)))
            more = f" and {len(left) - NAMED_PIDS} more" if len(left) > NAMED_PIDS else ""
            return replace(
                end,
                reason=f"Processes of the job could not be killed: {stuck}{more}."
                " They hang in the kernel, or run as a user whom this worker may not signal.",
            )
        if self._timed_out:
            return replace(end, reason=f"It ran longer than its timeout_s of {self._plan.timeout_s:g} s.")
        if stopped:
            return replace(end, reason="It was stopped on request.")
        if code in (0, None):
            return end
        failed = failure.first_failure(self._directory / records.LOGS, code)
        return replace(end, exit_code=failed.code, reason=failed.sentence, traceback=failed.traceback)

    def _record(self, end: records.Exit) -> None:
        """Put the end on disk. Raises OSError when that has failed for RECORD_DEADLINE_S."""
        give_up_s = time.monotonic() + RECORD_DEADLINE_S
        while True:
            try:
                records.write(self._directory, records.EXIT, end)
            except OSError as error:
                self._say(f"the end is not on disk: {error}")
                if time.monotonic() > give_up_s:
                    raise
                self._sleep(RECORD_LOOK_S)
            else:
                return

    def _say(self, line: str) -> None:
        """A line in supervisor.log, once until there is another. A full disk must not make it an error."""
        if line != self._said:
            self._said = line
            with suppress(OSError):
                os.write(sys.stderr.fileno(), f"{records.now():%Y-%m-%d %H:%M:%S} {line}\n".encode())


def exit_code(status: int) -> int:
    """The shell's number for a wait status: the exit code, or 128 + N for signal N."""
    code = os.waitstatus_to_exitcode(status)
    return code if code >= 0 else 128 - code


def _pids(left: set[processes.Identity]) -> tuple[int, ...]:
    """The first of these pids, in order."""
    return tuple(sorted(process.pid for process in left)[:NAMED_PIDS])


def _self() -> processes.Identity:
    identity = processes.Identity.of(os.getpid())
    assert identity is not None
    return identity


def main(arguments: Sequence[str]) -> int:
    """Supervise the job of a directory, unless another does or did."""
    directory = Path(arguments[0]).absolute()
    if records.lock(directory) is None:  # held by this process until it ends
        return 0
    if (directory / records.START).exists() or (directory / records.EXIT).exists():
        return 0
    task = records.read(directory, records.ORDER, records.Task)
    if task is None:
        print(f"{directory} has no {records.ORDER}", file=sys.stderr)
        return 1
    os.chdir("/")  # it keeps no directory of the worker's in use
    processes.adopt_orphans()
    Supervisor(directory, task.plan).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
