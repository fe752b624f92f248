"""A job's supervisor, detached from worker and daemon: `python -m gpulease_worker.jobs.supervisor JOB_DIR`.

Only the supervisor launches the job, and at most once: it holds the directory's lock and writes `start.json` before it
launches, and a directory that has a `start.json` is never launched again. It is the child subreaper of everything that
the job leaves behind, so it sees every process end. It writes `exit.json` only when no process of the job is alive:
neither a descendant nor a member of its cgroup. A process of the job's user anywhere else that carries the lease's
marker only claims to be the job's: it is ended too (if it is younger, where the job has a cgroup), but what keeps
coming holds the job's end for CLAIM_S at most.

SIGTERM to it means: stop the job as `stop.json` says, or with the default grace period where there is none, because a
worker with a full disk cannot write one. A record that cannot be written or read does not end the supervision: it is
tried again, and `supervisor.log` says why. It imports only the standard library and small modules, because one
supervisor stays in memory for every job.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from gpulease_protocol.host import process_tree
from gpulease_protocol.host.log_files import open_beneath
from gpulease_protocol.host.process_id import ProcessId, boot_id
from gpulease_worker.jobs import cgroup, gang_part, job_end, job_index_mask, job_records, record_wakeup, spawn
from gpulease_worker.jobs.fence import GRACE_S, Fence
from gpulease_worker.jobs.gang_part import GangPart
from gpulease_worker.jobs.launch_plan import LaunchPlan
from gpulease_worker.jobs.log_size_limit import LogSizeLimiter
from gpulease_worker.jobs.notification_process import start_notification
from gpulease_worker.jobs.pam_session import OPEN_S, LoginLimits, PamSession, SessionRefusedError
from gpulease_worker.jobs.signal_wakeup import SignalWakeup
from gpulease_worker.jobs.unkillable_processes import unkillable_record
from gpulease_worker.jobs.user_accounts import account_of
from gpulease_worker.processes import lease_claims, procfs

TIMEOUT_GRACE_S = 35.0
"""Between SIGTERM and SIGKILL for a job that exceeded its time limit: over torchrun's own 30 s for its ranks."""
LEFTOVER_GRACE_S = 2.0
"""Between SIGTERM and SIGKILL for what a job left behind after it ended by itself."""
UNKILLABLE_AFTER_S = 5.0
"""A process that survives SIGKILL this long is recorded as unkillable. SIGKILL is re-sent until it exits, however long
that takes."""
UNKILLABLE_ROUND_S = 1.0
"""Pause between two rounds of SIGKILL once a process was recorded as unkillable."""
CLAIM_S = 5.0
"""How long processes that only claim to be the job's hold its end, after its last own process has ended."""
SWEEP_ROUND_S = 0.05
"""Pause between two searches for leftovers."""
IDLE_S = 60.0
"""Longest sleep; every signal ends it."""
RECORD_RETRY_S = 0.5
"""Pause before another attempt to write the record of the start."""
DEFAULT_GRACE_S = 35.0
"""Between SIGTERM and SIGKILL where no record says how long; as `JobOrder.grace_s`."""
OUTPUT_BYTES = 65536
"""As much as fits in a pipe: the output of a program that is run briefly is read only once it has ended."""
RANK_POLL_S = (0.1, 0.5)
"""First and longest pause between two searches for the first rank: torchrun takes seconds to start one."""


class Supervisor:
    """Runs one plan in a job's directory, from launch to the last process's end."""

    def __init__(self, directory: Path, plan: LaunchPlan, session: PamSession | None = None) -> None:
        self._directory = directory
        self._plan = plan
        self._session = session
        self._login: LoginLimits | None = None
        """What the user's login has, once the session is open."""
        self._statuses: dict[int, int] = {}
        """Wait statuses of the processes that it has forked and that have ended, by pid."""
        self._forked: set[int] = set()
        self._launcher: spawn.SpawnedProcess | None = None
        self._kill_at_s: float | None = None
        self._timeout_at_s = float("inf")
        self._killing_since_s: float | None = None
        self._unkillable: job_records.UnkillableRecord | None = None
        self._timed_out = False
        self._fence = Fence(directory.parent.parent, plan.fence_s)
        self._stop_requested = self._stopped = self._stop_ordered = False
        self._start_recorded = False
        self._last_error = ""
        self._rank_poll_s = RANK_POLL_S[0]
        self._cgroup: cgroup.Cgroup | None = None
        self._uids = {plan.lease_id: plan.uid}
        self._logs = LogSizeLimiter(directory / job_records.LOGS, plan.settings.log_bytes, plan.uid, self._log_error)
        self._signals = SignalWakeup()
        self._part = None if plan.gang is None else GangPart(plan, plan.gang, directory)

    def run(self) -> None:
        """Launch the job, watch it, end what it left, and record the end."""
        self._catch_signals()
        self._cgroup = cgroup.create(self._plan.cgroup_name, self._plan.settings.cgroup_limits)
        place = None if self._cgroup is None else str(self._cgroup.path)
        this, fence_s = ProcessId.this_process(), self._plan.fence_s
        self._start = job_records.StartRecord(boot_id=boot_id(), supervisor=this, cgroup=place, fence_s=fence_s)
        try:
            job_records.write(self._directory, job_records.START, self._start)
        except OSError as error:
            self._record_never_launched(f"Its start could not be recorded: {error.strerror}.")
            return
        try:
            self._launcher = self._launch()
        except spawn.LaunchError as error:
            self._record_never_launched(str(error))
            return
        except OSError as error:
            self._record_never_launched(f"Its log cannot be written: {error.strerror or error}.")
            return
        launcher, at = self._launcher.process, job_records.now()
        rank_at = None if self._plan.starts_ranks else at
        self._start = replace(self._start, launcher=launcher, started_at=at, rank_at=rank_at)
        self._record_start()
        self._timeout_at_s = time.monotonic() + (float("inf") if self._plan.timeout_s is None else self._plan.timeout_s)
        self._watch()
        if self._status != 0 and self._kill_at_s is None:  # it may have ended from a SIGTERM to all processes
            self._signals.wait(lambda: self._stop_requested, job_end.SIGTERM_TO_ALL_S)
        stopped = self._stopped or self._stop_requested
        self._sweep()
        self._logs.finish()
        facts = self._directory, self._plan, self._status, self._fence, self._part
        self._record(job_end.of_launched(*facts, stopped=stopped, timed_out=self._timed_out))
        if self._cgroup is not None and not self._cgroup.remove():
            self._log_error(f"{self._cgroup.path} is not empty and stays")
        self._notify()

    def _catch_signals(self) -> None:
        """Have SIGTERM and the end of children wake the loop, instead of interrupting it."""
        self._signals.install()
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGUSR1, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        # The worker starts this process with SIGTERM blocked, so that no stop is lost before this line.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})

    def _on_sigterm(self, *_: object) -> None:
        self._stop_requested = True

    @property
    def _status(self) -> int | None:
        """The launcher's wait status; None while it has not ended."""
        return None if self._launcher is None else self._statuses.get(self._launcher.pid)

    def _launch(self) -> spawn.SpawnedProcess:
        """Start the launcher. Raises LaunchError, or OSError where the log cannot be opened."""
        logs, flags = self._directory / job_records.LOGS, os.O_WRONLY | os.O_APPEND | os.O_CREAT
        log = open_beneath(logs, "launcher.log", flags=flags)
        try:
            if self._session is not None:
                self._open_session(self._session)
            self._preflight()
            plan = self._plan
            if plan.indexed_gpus:
                plan = job_index_mask.with_cuda_indices(plan, self._run_briefly)
            if self._part is not None:
                self._prepare_together(self._part, log)
            return self._spawn(plan, log)
        finally:
            os.close(log)

    def _open_session(self, session: PamSession) -> None:
        """Wait until PAM has opened the session. Raises LaunchError if it refuses."""

        def is_open() -> bool:
            self._login = session.opened()
            return self._login is not None

        try:
            timeout_error = f"PAM did not open a session within {OPEN_S} s."
            self._wait(is_open, 2 * OPEN_S, timeout_error, session.fileno())
        except SessionRefusedError as error:
            raise spawn.LaunchError(str(error)) from error

    def _preflight(self) -> None:
        """Have the job's own interpreter check for script and launcher. Raises LaunchError if anything is missing."""
        if (argv := spawn.preflight_argv(self._plan)) is None:
            return
        timeout_error = f"The interpreter {self._plan.argv[0]} did not answer within {spawn.PREFLIGHT_S:g} s."
        code, output = self._run_briefly(replace(self._plan, argv=argv), spawn.PREFLIGHT_S, timeout_error)
        if (error := spawn.preflight_error(self._plan, code, output)) is not None:
            raise spawn.LaunchError(error)

    def _run_briefly(self, plan: LaunchPlan, timeout_s: float, timeout_error: str) -> tuple[int, str]:
        """Exit code and output of a program that is run like the job. Raises LaunchError."""
        reading, writing = os.pipe()
        try:
            try:
                child = self._spawn(plan, writing)
            finally:
                os.close(writing)
            self._wait(lambda: child.pid in self._statuses, timeout_s, timeout_error)
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(child.pid, signal.SIGKILL)  # whatever else runs in its session
            os.set_blocking(reading, False)
            output = ""
            with suppress(BlockingIOError):
                output = os.read(reading, OUTPUT_BYTES).decode(errors="replace").strip()
            return job_end.exit_code(self._statuses[child.pid]), output
        finally:
            os.close(reading)

    def _prepare_together(self, part: GangPart, log: int) -> None:
        """Prepare this node's part of a job on several nodes, and wait until all are prepared. Raises LaunchError."""
        self._spawn(self._plan, log, lambda: None)  # it enters the directory, as the user, and finds the program
        part.open()
        while not part.may_launch():
            self._reap()
            self._fence.require(spawn.LaunchError)
            self._check_before_launch()
            prepared_at = (self._start.prepared_at or job_records.now()) if part.is_prepared else None
            noted = replace(self._start, prepared_at=prepared_at, waits_for=part.problem)
            if noted != self._start or not self._start_recorded:
                self._start = noted
                self._record_start()
            self._signals.sleep(gang_part.POLL_S, *part.descriptors())

    def _spawn(self, plan: LaunchPlan, output: int, call: Callable[[], object] | None = None) -> spawn.SpawnedProcess:
        """Fork a process of the job, and wait until it has executed its program. Raises LaunchError."""
        self._fence.require(spawn.LaunchError)
        child = spawn.spawn(plan, output, self._cgroup, self._login, call)
        self._forked.add(child.pid)
        where = f"the file system of {plan.working_directory} or of {plan.argv[0]!r} does not answer"
        timeout_error = f"It could not be started within {spawn.EXEC_S:g} s: {where}."
        try:
            self._wait(child.has_executed, spawn.EXEC_S, timeout_error, child.error_pipe)
        finally:
            child.close()
        return child

    def _wait(self, condition: Callable[[], bool], timeout_s: float, timeout_error: str, *descriptors: int) -> None:
        """Wait until a condition is true. Raises LaunchError when that takes too long, or the job is stopped meanwhile;
        the process that was waited for is then ended with all others."""
        until_s = time.monotonic() + timeout_s
        while True:
            self._reap()
            self._fence.require(spawn.LaunchError)
            if condition():
                return
            self._check_before_launch()
            if (left_s := until_s - time.monotonic()) <= 0:
                raise spawn.LaunchError(timeout_error)
            self._signals.sleep(min(left_s, self._fence.next_look_s()), *descriptors)

    def _check_before_launch(self) -> None:
        if self._stop_requested:
            raise spawn.StoppedBeforeLaunch("It was stopped before it started.")

    def _record_never_launched(self, reason: str) -> None:
        """Record the end of a job that was never launched."""
        self._sweep()
        self._record(job_end.of_never_launched(reason, self._fence, self._part, stopped=self._stop_requested))
        if self._cgroup is not None:
            self._cgroup.remove()
        self._notify()

    def _notify(self) -> None:
        if self._plan.notify is not None:
            start_notification(self._directory, self._plan, self._login, self._log_error)

    def _record_start(self) -> None:
        """Record that the launcher has started; the job runs whether or not that succeeds."""
        try:
            job_records.write(self._directory, job_records.START, self._start, replaces=True)
            self._start_recorded = True
            record_wakeup.tell(self._directory)
        except OSError as error:
            self._log_error(f"the start could not be recorded: {error}")

    def _watch(self) -> None:
        """Wait until the launcher has ended; stop it on request, or when its time limit is exceeded."""
        while True:
            self._reap()
            if self._status is not None:
                return
            self._look_for_rank()
            self._logs.check()
            if not self._start_recorded:
                self._record_start()
            self._check_stop()
            now = time.monotonic()
            if now >= self._timeout_at_s and self._kill_at_s is None:
                self._timed_out = True
                self._terminate(TIMEOUT_GRACE_S)
            if self._kill_at_s is not None and now >= self._kill_at_s:
                self._kill()
                self._signals.sleep(UNKILLABLE_ROUND_S if self._unkillable else SWEEP_ROUND_S)
                continue
            with_peers_at_s = None if self._part is None else self._part.stop_at_s(now, ordered=self._stop_ordered)
            if self._part is not None and with_peers_at_s is not None and now >= with_peers_at_s:
                self._terminate(self._part.stop())
            ends_s = (self._timeout_at_s, self._kill_at_s, with_peers_at_s)
            waits = [at - now for at in ends_s if at is not None and at > now]
            waits += [self._logs.next_at_s - now, self._fence.next_look_s()]
            if self._start.rank_at is None:
                waits.append(self._rank_poll_s)
            watched = [] if self._part is None else self._part.descriptors()
            self._signals.sleep(min([IDLE_S if self._start_recorded else RECORD_RETRY_S, *waits]), *watched)

    def _look_for_rank(self) -> None:
        """Record when the launcher's first rank has started: a process with a rank in its environment."""
        if self._start.rank_at is not None:
            return
        if any(procfs.has_rank(process.pid) for process in process_tree.descendants(os.getpid())):
            self._start = replace(self._start, rank_at=job_records.now())
            self._start_recorded = False
        self._rank_poll_s = min(self._rank_poll_s * 1.1, RANK_POLL_S[1])

    def _check_stop(self) -> None:
        if self._fence.is_reached():
            self._terminate(GRACE_S)
        try:
            stop = job_records.read(self._directory, job_records.STOP, job_records.StopRecord)
        except ValueError as error:
            self._log_error(str(error))
            stop = None
        self._stop_ordered = stop is not None and not stop.node_left
        if stop is None and self._stop_requested and not self._stopped:
            stop = job_records.StopRecord(grace_s=DEFAULT_GRACE_S)
        if stop is None:
            return
        if not self._stopped:
            self._stopped = True
            self._terminate(stop.grace_s)
        elif self._kill_at_s is not None:  # a second order may shorten the grace, never lengthen it
            self._kill_at_s = min(self._kill_at_s, time.monotonic() + stop.grace_s)

    def _terminate(self, grace_s: float) -> None:
        """SIGTERM to the launcher alone: it ends its ranks in its own order. The time limit bounds the grace."""
        if self._status is None and self._launcher is not None:
            try:
                for number in (signal.SIGTERM, signal.SIGCONT):  # one that is stopped could not save what it has
                    os.kill(self._launcher.pid, number)  # not reaped yet, so its pid was not reused
            except (PermissionError, ProcessLookupError) as error:
                self._log_error(f"the launcher {self._launcher.pid} cannot be sent SIGTERM: {error.strerror}")
        at_s = min(time.monotonic() + grace_s, self._timeout_at_s + TIMEOUT_GRACE_S)
        self._kill_at_s = at_s if self._kill_at_s is None else min(at_s, self._kill_at_s)

    def _sweep(self) -> None:
        """End what the launcher left: SIGTERM, the rest of the grace period, SIGKILL. Returns when nothing is left, or
        what is left has only claimed to be the job's for long enough."""
        if self._kill_at_s is None:
            self._kill_at_s = time.monotonic() + LEFTOVER_GRACE_S
        terminated: set[ProcessId] = set()
        own_ended_s: float | None = None
        while True:
            own, claimed = self._processes()
            now_s = time.monotonic()
            if not own and not claimed:
                self._reap()  # who ended during the search: until they are reaped they count for their user's limit
                return
            own_ended_s = None if own else now_s if own_ended_s is None else own_ended_s
            if own_ended_s is not None and now_s - own_ended_s >= CLAIM_S:
                pids = ", ".join(str(process.pid) for process in sorted(claimed, key=lambda one: one.pid)[:20])
                self._log_error(f"processes of the job's user outside the job name its lease, and are left: {pids}")
                return
            if now_s >= self._kill_at_s or (own_ended_s is not None and now_s - own_ended_s >= LEFTOVER_GRACE_S):
                self._kill()
            else:
                self._check_stop()
                process_tree.signal_all((own | claimed) - terminated, signal.SIGTERM)
                terminated |= own | claimed
            self._logs.check()
            self._signals.sleep(UNKILLABLE_ROUND_S if self._unkillable and own else SWEEP_ROUND_S)

    def _kill(self) -> None:
        """SIGKILL every process of the job: through its cgroup, and one by one, as some may have left that."""
        if self._cgroup is not None:
            self._cgroup.kill()
        own, claimed = self._processes()
        process_tree.signal_all(own | claimed, signal.SIGKILL)
        now_s = time.monotonic()
        if self._killing_since_s is None:
            self._killing_since_s = now_s
        elif own and now_s - self._killing_since_s >= UNKILLABLE_AFTER_S:
            self._record_unkillable(unkillable_record(own))

    def _record_unkillable(self, record: job_records.UnkillableRecord) -> None:
        """Record the processes that survive SIGKILL, for the worker to report."""
        if record == self._unkillable:
            return
        try:
            job_records.write(self._directory, job_records.UNKILLABLE, record)
            self._unkillable = record
            record_wakeup.tell(self._directory)
            self._log_error(record.reason)
        except OSError as error:
            self._log_error(f"the record of unkillable processes could not be written: {error}")

    def _processes(self) -> tuple[set[ProcessId], set[ProcessId]]:
        """Every living process of the job, in whatever session; and those outside that claim to be the job's."""
        this = {process for process in (ProcessId.of(os.getpid()),) if process is not None}
        # Every orphan below it is its child, so without a child it has no descendant.
        own, since_ticks = process_tree.descendants(os.getpid()) - this if self._reap() else set(), 0
        if self._cgroup is not None:
            own |= self._cgroup.members() - this
            since_ticks = self._start.supervisor.start_ticks  # no process of the job is older, or can have left it
        claimed = lease_claims.claimants(self._uids, since_ticks=since_ticks, part=self._plan.part)
        return own, claimed.keys() - own - this

    def _reap(self) -> bool:
        """Reap every child that has ended, the adopted ones too. False if there is no other child."""
        with suppress(ChildProcessError):
            while (ended := os.waitpid(-1, os.WNOHANG))[0] != 0:
                if ended[0] in self._forked:
                    self._statuses[ended[0]] = ended[1]
            return True
        return False

    def _record(self, end: job_records.ExitRecord) -> None:
        """Write the record of the end. Raises OSError."""
        job_end.write(self._directory, end, self._signals.sleep, self._log_error)
        if self._part is not None:
            self._part.close(ended_well=end.exit_code == 0 and end.reason is None)

    def _log_error(self, line: str) -> None:
        """Write a line to supervisor.log, once until there is another. A full disk must not make it an error."""
        if line != self._last_error:
            self._last_error = line
            with suppress(OSError):
                os.write(sys.stderr.fileno(), f"{job_records.now():%Y-%m-%d %H:%M:%S} {line}\n".encode())


def main(arguments: Sequence[str]) -> int:
    """Supervise the job of a directory, unless another supervisor does or did."""
    directory = Path(arguments[0]).absolute()
    plan = job_records.take_order(directory, LaunchPlan)  # the lock is held by this process until it ends
    if plan is None:
        return 0
    os.chdir("/")  # so that it keeps no directory of the worker in use
    session = None
    if plan.settings.pam_service is not None and os.geteuid() == 0:
        session = PamSession(plan.settings.pam_service, (plan.account or account_of(0)).name)
    process_tree.adopt_orphans()
    Supervisor(directory, plan, session).run()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
