"""Forks and executes a job's processes as its user, in its directory, with its limits; and checks what is missing.

Every step that may fail runs as the job's user and in the job's own process: root enters no directory for a user who
may not, and a user's file system that hangs blocks that user's job alone. A job keeps nothing of the worker's
(`inherited_state`, `session_keyring`, `resource_limits`); where a step towards that fails, it does not start.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress

from gpulease_protocol.host import interpreter_check
from gpulease_protocol.host.process_id import ProcessId, stat
from gpulease_protocol.host.process_tree import signal_on_parent_death
from gpulease_worker.jobs import cgroup_fork, inherited_state, resource_limits, session_keyring
from gpulease_worker.jobs.cgroup import Cgroup
from gpulease_worker.jobs.launch_plan import LaunchPlan, missing_path
from gpulease_worker.jobs.pam_session import LoginLimits
from gpulease_worker.jobs.user_accounts import UserAccount

EXEC_S = 60.0
"""How long a process may take until it executes its program: to enter the directory and to find the program."""
PREFLIGHT_S = 30.0
"""How long the job's interpreter may take to check for the launcher; a cold virtual environment on a network file
system takes seconds."""


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
    return interpreter_check.check_arguments(plan.argv[0], plan.script, plan.modules)


def preflight_error(plan: LaunchPlan, code: int, output: str) -> str | None:
    """What is missing, by the check's exit code and output, as a sentence; None when nothing is."""
    python = plan.argv[0]
    if code == 0:
        return None
    if not output:
        return f"The interpreter {python} does not work: it ended with status {code}."
    if missing := interpreter_check.missing_module(output, python, plan.launcher, plan.modules):
        return f"{missing} {interpreter_check.INSTALL}"
    if output.startswith("script "):
        why = output.removeprefix("script ")
        return f"The script {plan.script!r} cannot be read in {plan.working_directory}: {why}."
    return f"The interpreter {python} does not work: {output.splitlines()[-1]}."


def spawn(
    plan: LaunchPlan,
    output: int,
    group: Cgroup | None,
    login: LoginLimits | None = None,
    call: Callable[[], object] | None = None,
) -> SpawnedProcess:
    """Start the program of a plan, with its output going to a descriptor. Raises LaunchError.

    The caller has one thread, so it is safe to run Python between fork and exec. `login` is what the user's login has,
    where PAM was asked. With `call`, that function is run in place of the program, and the process ends with it.
    """
    reading, writing = os.pipe()
    supervisor = os.getpid()
    try:
        into = None if group is None else cgroup_fork.fork_into(group.path)
        pid = os.fork() if into is None else into
    except OSError as error:
        os.close(reading)
        os.close(writing)
        raise LaunchError(f"The program {plan.argv[0]!r} could not be started: {error.strerror}.") from error
    if pid == 0:
        try:
            _detach(supervisor, output, writing)
            steps = _steps(plan, group, login)
            if into is None:
                steps.insert(0, ("It cannot enter its cgroup", lambda: _join_cgroup(group)))
            _enter(steps, writing)
            if call is None:
                _execute(plan, writing)
            else:
                os.close(writing)
                call()
                os._exit(0)
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
    inherited_state.reset_signals()
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


def _enter(steps: Sequence[tuple[str, Callable[[], object]]], error_pipe: int) -> None:
    """In the new process: take each step. On an error, write why to `error_pipe` and raise OSError."""
    for what, step in steps:
        try:
            step()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            os.write(error_pipe, (f"{what}: {why}." if what else str(why)).encode(errors="replace"))
            raise


def _steps(plan: LaunchPlan, group: Cgroup | None, login: LoginLimits | None) -> list[tuple[str, Callable[[], object]]]:
    """What makes a process of the worker one of the job, with what each failure means. What follows `_become` has the
    user's own rights. The limits come last: root could raise them, and Python itself needs memory until then."""
    is_root, account, keyring = os.geteuid() == 0, plan.account, "It cannot be given a session keyring of its own"
    steps: list[tuple[str, Callable[[], object]]] = [
        ("Its umask cannot be set", lambda: _set_umask(plan, is_root)),
        (keyring, session_keyring.join_new),
    ]
    if is_root:
        uid = 0 if account is None else account.uid
        steps.append(("It cannot be given the usual priority", lambda: _reset_service_state(uid, login)))
    if account is not None:
        steps.append((f"It cannot be run as {account.name}", lambda: _become(account)))
        supervisor = os.getppid()
        steps.append(("It cannot be made to end with its supervisor", lambda: _end_with(supervisor)))
        steps.append((keyring, session_keyring.join_new))  # the first is root's
    if not is_root or account is not None:
        steps.append(("The worker's capabilities cannot be given up", inherited_state.drop_capabilities))
    who = account.name if account is not None else "this user"
    steps += [
        ("", lambda: _check_paths(plan)),
        (
            f"The working directory {plan.working_directory} cannot be entered by {who}",
            lambda: os.chdir(plan.working_directory),
        ),
        ("Its resource limits cannot be set", lambda: _limit(plan, group, login, is_root)),
    ]
    if plan.settings.no_new_privs:
        steps.append(("It cannot be kept from gaining privileges", inherited_state.set_no_new_privileges))
    return steps


def _join_cgroup(group: Cgroup | None) -> None:
    """Enter the job's cgroup. Where it limits nothing the marker and the subreaper suffice, so errors are ignored."""
    if group is not None:
        with nullcontext() if group.limited else suppress(OSError):
            group.enter()


def _set_umask(plan: LaunchPlan, is_root: bool) -> None:
    if plan.umask is not None or is_root:
        os.umask(inherited_state.UMASK if plan.umask is None else plan.umask)


def _reset_service_state(uid: int, login: LoginLimits | None) -> None:
    """As root: take back what makes a service's process special."""
    inherited_state.reset_scheduling()
    if login is not None:
        os.setpriority(os.PRIO_PROCESS, 0, login.nice)
    inherited_state.reset_securebits()
    inherited_state.set_login_user(uid)


def _check_paths(plan: LaunchPlan) -> None:
    """Raise OSError with a whole sentence where this user finds no such directory, program or script."""
    missing = missing_path(plan)
    if missing is not None:
        raise OSError(missing)


def _become(account: UserAccount) -> None:
    """Give up root irrevocably: groups first, the user last."""
    if account.listed:
        os.initgroups(account.name, account.gid)
    else:
        os.setgroups([account.gid])
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)


def _limit(plan: LaunchPlan, group: Cgroup | None, login: LoginLimits | None, is_root: bool) -> None:
    """Set the limits as submitted, as far as those of the worker and of the user's login allow."""
    if login is not None:
        resource_limits.lower_to(login.limits)
    most = plan.settings.max_processes
    if most and plan.account is not None and (group is None or not group.has_limit("pids.max")):
        resource_limits.lower_to({resource.RLIMIT_NPROC: (most, most)})
    if is_root and "core" not in plan.limits:
        resource_limits.write_no_core()
    if plan.settings.open_files is not None:
        resource_limits.lower_to({resource.RLIMIT_NOFILE: (plan.settings.open_files, resource.RLIM_INFINITY)})
    resource_limits.set_submitted(plan.limits)
