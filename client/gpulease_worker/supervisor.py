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
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpulease.log_files import open_beneath
from gpulease.owner import boot_id
from gpulease_worker import cgroup, entry, failure, index_mask, processes, records, stuck
from gpulease_worker.launch import Plan
from gpulease_worker.log_bound import LogBound

TIMEOUT_GRACE_S = 35.0
"""Between SIGTERM and SIGKILL for a job that ran out of time: over torchrun's own 30 s for its ranks."""
LEFTOVER_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL for what a job left behind after it ended by itself."""
STUCK_AFTER_S = 5.0
"""What has outlived SIGKILL for so long is noted as stuck; it is killed on until it has ended, however long that is."""
STUCK_LOOK_S = 1.0
"""How often that is looked at."""
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
ANSWER_BYTES = 65536
"""As much as fits in a pipe: nobody reads it while a program that is asked still writes."""
RANK_LOOK_S = (0.1, 0.5)
"""First and longest pause between two looks for the first rank: torchrun takes seconds to start one."""


class Supervisor:
    """Runs one plan in a job's directory, from launch to the last process's end."""

    def __init__(self, directory: Path, plan: Plan) -> None:
        self._directory = directory
        self._plan = plan
        self._statuses: dict[int, int] = {}
        """Wait statuses of its own children that have ended, by pid: of those that it has forked."""
        self._forked: set[int] = set()
        self._launcher: entry.Child | None = None
        self._kill_at_s: float | None = None
        self._killing_since_s: float | None = None
        self._stuck: records.Stuck | None = None
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
            self._conclude(f"Its log cannot be written: {error.strerror or error}.")
            return
        launcher, at = self._launcher.identity, records.now()
        self._start = replace(self._start, launcher=launcher, started_at=at, rank_at=at if self._plan.alone else None)
        self._announce()
        timeout_s = self._plan.timeout_s
        self._watch(None if timeout_s is None else time.monotonic() + timeout_s)
        stopped = self._stopped
        self._sweep()
        self._logs.finish()
        self._record(self._end_of(None if self._status is None else exit_code(self._status), stopped))
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

    @property
    def _status(self) -> int | None:
        """The launcher's wait status; None while it has not ended."""
        return None if self._launcher is None else self._statuses.get(self._launcher.pid)

    def _launch(self) -> entry.Child:
        """Start the launcher. Raises CannotStart, or OSError where there is no log to write to."""
        log = open_beneath(self._directory / records.LOGS, "launcher.log", flags=os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            if (question := entry.question(self._plan)) is not None:
                self._ask(question)
            plan = index_mask.put(self._plan, self._answer) if self._plan.numbered else self._plan
            return self._begin(plan, log)
        finally:
            os.close(log)

    def _ask(self, question: tuple[str, ...]) -> None:
        """Ask the job's own interpreter what it lacks. Raises CannotStart where that is anything."""
        late = f"The interpreter {self._plan.argv[0]} did not answer within {entry.ASK_S:g} s."
        code, said = self._answer(replace(self._plan, argv=question), entry.ASK_S, late)
        if (lack := entry.lack(self._plan, code, said)) is not None:
            raise entry.CannotStart(lack)

    def _answer(self, plan: Plan, within_s: float, late: str) -> tuple[int, str]:
        """Exit code and output of a program that is run as the job would be. Raises CannotStart."""
        reading, writing = os.pipe()
        try:
            try:
                asked = self._begin(plan, writing)
            finally:
                os.close(writing)
            self._wait(lambda: asked.pid in self._statuses, within_s, late)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(asked.pid, signal.SIGKILL)  # what it has started, in its session
            os.set_blocking(reading, False)
            said = ""
            with suppress(BlockingIOError):
                said = os.read(reading, ANSWER_BYTES).decode(errors="replace").strip()
            return exit_code(self._statuses[asked.pid]), said
        finally:
            os.close(reading)

    def _begin(self, plan: Plan, output: int) -> entry.Child:
        """Fork a process of the job, and wait until it runs its program. Raises CannotStart."""
        child = entry.fork(plan, output, self._cgroup)
        self._forked.add(child.pid)
        where = f"{plan.working_directory}, or where {plan.argv[0]!r} lies, does not answer"
        late = f"It could not be started within {entry.BEGIN_S:g} s: {where}."
        try:
            self._wait(child.begins, entry.BEGIN_S, late, child.complaints)
        finally:
            child.close()
        return child

    def _wait(self, condition: Callable[[], bool], seconds: float, late: str, *descriptors: int) -> None:
        """Until a condition is true. Raises CannotStart when that takes too long, or the job is stopped meanwhile; what
        was waited for is then ended with everything else."""
        until_s = time.monotonic() + seconds
        while True:
            self._reap()
            if condition():
                return
            if self._told:
                raise entry.Stopped("It was stopped before it started.")
            if (left_s := until_s - time.monotonic()) <= 0:
                raise entry.CannotStart(late)
            self._sleep(left_s, *descriptors)

    def _conclude(self, reason: str) -> None:
        """Record the end of a job that was never launched."""
        self._sweep()
        self._record(records.Exit(exit_code=None, reason=reason, ended_at=records.now()))
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
        """Until the launcher has ended; stop it when it is told to, or out of time."""
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
                self._kill()
                self._sleep(STUCK_LOOK_S if self._stuck else LOOK_S)
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

    def _sweep(self) -> None:
        """End what the launcher left: SIGTERM, the rest of the grace, SIGKILL. Returns when nothing is left."""
        if self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + LEFTOVER_GRACE_S
        told: set[processes.Identity] = set()
        while (left := self._left()) and time.monotonic() < self._kill_at_s:
            self._heed_stop()
            processes.send_all(left - told, signal.SIGTERM)
            told |= left
            self._logs.look()
            self._sleep(LOOK_S)
        while self._left():
            self._kill()
            self._logs.look()
            self._sleep(STUCK_LOOK_S if self._stuck else LOOK_S)

    def _kill(self) -> None:
        """SIGKILL to all of the job: at once where it has a cgroup, and to each that may have left it."""
        if self._cgroup is not None:
            self._cgroup.kill()
        left = self._left()
        processes.send_all(left, signal.SIGKILL)
        now_s = time.monotonic()
        if self._killing_since_s is None:
            self._killing_since_s = now_s
        elif left and now_s - self._killing_since_s >= STUCK_AFTER_S:
            self._note(stuck.note(left))

    def _note(self, noted: records.Stuck) -> None:
        """Record what does not die, for the worker to report."""
        if noted == self._stuck:
            return
        try:
            records.write(self._directory, records.STUCK, noted)
            self._stuck = noted
            self._say(noted.reason)
        except OSError as error:
            self._say(f"what does not die is not on disk: {error}")

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
                if pid in self._forked:
                    self._statuses[pid] = status

    def _sleep(self, seconds: float, *descriptors: int) -> None:
        wake = self._wake.fileno()
        if wake in select.select([wake, *descriptors], [], [], max(0.0, seconds))[0]:
            with suppress(BlockingIOError):
                self._wake.recv(4096)

    def _end_of(self, code: int | None, stopped: bool) -> records.Exit:
        """The record of the end, with the reason where there is one to tell."""
        end = records.Exit(exit_code=code, timed_out=self._timed_out, ended_at=records.now(), reason=None)
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
        end = replace(end, reason=failure.reportable(end.reason))
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
