"""Forks and executes a job's processes as its user, in its directory, with its limits; and checks what is missing.

Every step that may fail runs as the job's user and in the job's own process: root enters no directory for a user who
may not, and a user's file system that hangs blocks that user's job alone.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.host.process_id import ProcessId, stat
from gpulease_protocol.host.process_tree import signal_on_parent_death
from gpulease_worker.jobs.cgroup import Cgroup
from gpulease_worker.jobs.launch_plan import LaunchPlan, missing_path
from gpulease_worker.jobs.user_accounts import UserAccount

EXEC_S = 60.0
"""How long a process may take until it executes its program: to enter the directory and to find the program."""
PREFLIGHT_S = 30.0
"""How long the job's interpreter may take to check for the launcher; a cold virtual environment on a network file
system takes seconds."""
PREFLIGHT = """
import importlib.util, sys
script, *names = sys.argv[1:]
if script:
    try:
        open(script, "rb").close()
    except OSError as error:
        sys.exit(f"script {error.strerror}")
specs = [importlib.util.find_spec(name) for name in names]
if names and not any(spec is not None and spec.origin is not None for spec in specs):
    sys.exit("module")
"""
"""Run by the job's own interpreter. A directory of a module's name without `__init__.py` is no installation."""


class LaunchError(Exception):
    """A job cannot be started here; the message says why, as a sentence."""


class StoppedBeforeLaunch(LaunchError):
    """A job was stopped before it was launched."""


class SpawnedProcess:
    """A process of the job, from the fork on. Until it executes its program a hung file system of the user may block
    it, so the supervisor never waits for it alone."""

    def __init__(self, pid: int, error_pipe: int) -> None:
        self.pid = pid
        # It may end at once; until it is reaped, its start time can be read.
        status = stat(pid)
        self.process = ProcessId(pid, status.start_ticks if status else 0)
        self.error_pipe = error_pipe
        """Becomes readable when it has executed its program, or has failed to."""

    def has_executed(self) -> bool:
        """True once it has executed its program, or has ended. Raises LaunchError with the reason if it failed to."""
        try:
            error = os.read(self.error_pipe, 4096)
        except BlockingIOError:
            return False
        if error:
            raise LaunchError(error.decode(errors="replace"))
        return True

    def close(self) -> None:
        """Close the pipe."""
        os.close(self.error_pipe)


def preflight_argv(plan: LaunchPlan) -> tuple[str, ...] | None:
    """Arguments that make the job's own interpreter check for script and launcher; None if there are neither."""
    if not plan.modules and plan.script is None:
        return None
    return (plan.argv[0], "-c", PREFLIGHT, plan.script or "", *plan.modules)


def preflight_error(plan: LaunchPlan, code: int, output: str) -> str | None:
    """What is missing, by the check's exit code and output, as a sentence; None when nothing is."""
    python = plan.argv[0]
    if code == 0:
        return None
    if not output:
        return f"The interpreter {python} does not work: it ended with status {code}."
    if output == "module":
        return (
            f"{plan.launcher} is not installed for {python}: it has no module {' or '.join(plan.modules)}."
            " Install it there, or name the interpreter that has it."
        )
    if output.startswith("script "):
        why = output.removeprefix("script ")
        return f"The script {plan.script!r} cannot be read in {plan.working_directory}: {why}."
    return f"The interpreter {python} does not work: {output.splitlines()[-1]}."


def spawn(plan: LaunchPlan, output: int, group: Cgroup | None) -> SpawnedProcess:
    """Start the program of a plan, with its output going to a descriptor. Raises LaunchError.

    The caller has one thread, so it is safe to run Python between fork and exec.
    """
    reading, writing = os.pipe()
    supervisor = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        raise LaunchError(f"The program {plan.argv[0]!r} could not be started: {error.strerror}.") from error
    if pid == 0:
        try:
            _detach(supervisor, output, writing)
            _enter(plan, group, writing)
            _execute(plan, writing)
        finally:
            os._exit(255)
    os.close(writing)
    os.set_blocking(reading, False)
    return SpawnedProcess(pid, reading)


def _detach(supervisor: int, output: int, error_pipe: int) -> None:
    """In the new process: keep nothing of the supervisor's but two descriptors, and end with the supervisor.

    It has no marker yet. If the supervisor were killed now, no one would find this process, and it would start the job
    under a lease that has ended.
    """
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    _end_with(supervisor)
    os.setsid()
    for standard in (1, 2):
        os.dup2(output, standard)
    descriptor = os.open(os.devnull, os.O_RDONLY)
    os.dup2(descriptor, 0)
    os.closerange(3, error_pipe)
    os.closerange(error_pipe + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _end_with(supervisor: int) -> None:
    """Have the kernel kill this process with the supervisor. A change of user clears this setting."""
    signal_on_parent_death(signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(255)


def _execute(plan: LaunchPlan, error_pipe: int) -> None:
    """Become the program, found on the job's own PATH."""
    argv = plan.argv
    try:
        os.execvpe(argv[0], argv, plan.environment)  # noqa: S606
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        os.write(error_pipe, f"The program {argv[0]!r} could not be started: {why}.".encode(errors="replace"))


def _enter(plan: LaunchPlan, group: Cgroup | None, error_pipe: int) -> None:
    """In the new process: set cgroup, umask, user, directory and limits. On an error, write why to `error_pipe` and
    raise OSError.

    The limits come last, with the user's own rights: they are as submitted, and root could raise them to anything.
    """
    if group is not None:
        with suppress(OSError):  # the marker and the subreaper suffice
            group.enter()
    steps: list[tuple[str, Callable[[], object]]] = []
    if plan.umask is not None:
        steps.append(("Its umask cannot be set", lambda: os.umask(plan.umask or 0)))
    if (account := plan.account) is not None:
        steps.append(("The worker's privileges over other processes cannot be given up", _drop_privileges_over_others))
        steps.append((f"It cannot be run as {account.name}", lambda: _become(account)))
        supervisor = os.getppid()
        steps.append(("It cannot be made to end with its supervisor", lambda: _end_with(supervisor)))
    who = account.name if account is not None else "this user"
    steps.append(("", lambda: _check_paths(plan)))
    steps.append(
        (
            f"The working directory {plan.working_directory} cannot be entered by {who}",
            lambda: os.chdir(plan.working_directory),
        )
    )
    steps.append(("Its resource limits cannot be set", lambda: _limit(plan)))
    for what, step in steps:
        try:
            step()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            os.write(error_pipe, (f"{what}: {why}." if what else str(why)).encode(errors="replace"))
            raise


def _check_paths(plan: LaunchPlan) -> None:
    """Raise OSError with a whole sentence where this user finds no such directory, program or script."""
    missing = missing_path(plan)
    if missing is not None:
        raise OSError(missing)


def _drop_privileges_over_others() -> None:
    """Give up settings of the service that its jobs must not inherit: protection from the out-of-memory killer, and a
    higher CPU priority."""
    score = Path("/proc/self/oom_score_adj")
    if int(score.read_text()) < 0:
        score.write_text("0")
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _become(account: UserAccount) -> None:
    """Give up root irrevocably: groups first, the user last."""
    if account.listed:
        os.initgroups(account.name, account.gid)
    else:
        os.setgroups([account.gid])
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)


def _limit(plan: LaunchPlan) -> None:
    """Set the limits as submitted, as far as the supervisor's own allow."""
    for name, submitted in plan.limits.items():
        number = getattr(resource, f"RLIMIT_{name.upper()}", None)
        if number is None:
            continue  # a limit that only the submitter's system has
        soft, hard = (resource.RLIM_INFINITY if value < 0 else value for value in submitted)
        try:
            resource.setrlimit(number, (soft, hard))
        except (ValueError, PermissionError):
            own = resource.getrlimit(number)[1]
            resource.setrlimit(number, (_lower(soft, own), _lower(hard, own)))


def _lower(one: int, other: int) -> int:
    """The lower of two limits."""
    limited = [limit for limit in (one, other) if limit != resource.RLIM_INFINITY]
    return min(limited) if limited else resource.RLIM_INFINITY
