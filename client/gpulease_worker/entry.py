"""The last steps from a supervisor to a job: who it runs as, where, and with which limits; and what it lacks.

What can go wrong here goes wrong as the job's user, not as the supervisor's: a directory that only root may enter is
not entered for somebody else, and a file system of his that hangs holds up his own job alone.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpulease.owner import stat
from gpulease_worker.accounts import Account
from gpulease_worker.cgroup import Cgroup
from gpulease_worker.launch import Plan, obstacle
from gpulease_worker.processes import Identity, end_with_parent

BEGIN_S = 60.0
"""How long a process may take to run its program: to enter the job's directory, and to find the program there."""
ASK_S = 30.0
"""How long the job's interpreter may take to say whether it has the launcher; a cold virtual environment on a network
takes seconds."""
ASK = """
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
"""Run by the job's own interpreter. A directory of that name without `__init__.py` is no installation."""


class CannotStart(Exception):
    """A job that cannot be started here; the message says why, as a sentence."""


class Stopped(CannotStart):
    """A job that was stopped before it was launched."""


class Child:
    """A process of the job, from the fork on. Until it runs its program, what the job's user has may hold it up: nobody
    waits for it but with an eye on everything else."""

    def __init__(self, pid: int, complaints: int) -> None:
        self.pid = pid
        # It may end at once; as long as nobody has reaped it, its start time can be read.
        seen = stat(pid)
        self.identity = Identity(pid, seen.start_ticks if seen else 0)
        self.complaints = complaints
        """Becomes readable when it runs its program, or never will."""

    def begins(self) -> bool:
        """True once it runs its program, or has ended. Raises CannotStart where it never will, with the reason."""
        try:
            said = os.read(self.complaints, 4096)
        except BlockingIOError:
            return False
        if said:
            raise CannotStart(said.decode(errors="replace"))
        return True

    def close(self) -> None:
        """Stop listening to it."""
        os.close(self.complaints)


def question(plan: Plan) -> tuple[str, ...] | None:
    """Arguments that have the job's own interpreter say what it lacks; None where there is nothing to ask."""
    if not plan.modules and plan.script is None:
        return None
    return (plan.argv[0], "-c", ASK, plan.script or "", *plan.modules)


def lack(plan: Plan, code: int, said: str) -> str | None:
    """What the interpreter lacks by its answer, as a sentence; None when nothing."""
    if code == 0:
        return None
    if not said:
        return f"The interpreter {plan.argv[0]} does not work: it ended with status {code}."
    return _sentence(plan, said)


def _sentence(plan: Plan, said: str) -> str:
    python = plan.argv[0]
    if said == "module":
        return (
            f"{plan.launcher} is not installed for {python}: it has no module {' or '.join(plan.modules)}."
            " Install it there, or name the interpreter that has it."
        )
    if said.startswith("script "):
        return f"The script {plan.script!r} cannot be read in {plan.working_directory}: {said.removeprefix('script ')}."
    return f"The interpreter {python} does not work: {said.splitlines()[-1] if said else 'it said nothing'}."


def fork(plan: Plan, output: int, group: Cgroup | None) -> Child:
    """Start the program of a plan, its output going to a descriptor. Raises CannotStart.

    The caller has one thread, so it is safe to run Python between fork and exec.
    """
    reading, writing = os.pipe()
    supervisor = os.getpid()
    try:
        pid = os.fork()
    except OSError as error:
        os.close(reading)
        os.close(writing)
        raise CannotStart(f"The program {plan.argv[0]!r} could not be started: {error.strerror}.") from error
    if pid == 0:
        try:
            _alone(supervisor, output, writing)
            _enter(plan, group, writing)
            _run(plan, writing)
        finally:
            os._exit(255)
    os.close(writing)
    os.set_blocking(reading, False)
    return Child(pid, reading)


def _alone(supervisor: int, output: int, complain: int) -> None:
    """In the new process: keep nothing of the supervisor but these two descriptors, and end with it.

    Were it killed now, nobody would know of this process, which has no marker yet: it would begin under a lease that
    has ended.
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
    os.closerange(3, complain)
    os.closerange(complain + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[1])


def _end_with(supervisor: int) -> None:
    """Die when the supervisor does. The kernel forgets it when a process becomes another user."""
    end_with_parent(signal.SIGKILL)
    if os.getppid() != supervisor:
        os._exit(255)


def _run(plan: Plan, complain: int) -> None:
    """Become the program, found on the job's own PATH."""
    argv = plan.argv
    try:
        os.execvpe(argv[0], argv, plan.environment)  # noqa: S606
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        os.write(complain, f"The program {argv[0]!r} could not be started: {why}.".encode(errors="replace"))


def _enter(plan: Plan, group: Cgroup | None, complain: int) -> None:
    """In the new process: cgroup, umask, user, directory, limits. Raises OSError, having said why to `complain`.

    The limits come last, as the user's own doing: the submission says them, and root would raise whatever it says.
    """
    if group is not None:
        with suppress(OSError):  # the marker and the subreaper do without
            group.enter()
    steps: list[tuple[str, Callable[[], object]]] = []
    if plan.umask is not None:
        steps.append(("Its umask cannot be set", lambda: os.umask(plan.umask or 0)))
    if (account := plan.account) is not None:
        steps.append(("The worker's privileges over other processes cannot be given up", _be_ordinary))
        steps.append((f"It cannot be run as {account.name}", lambda: _become(account)))
        supervisor = os.getppid()
        steps.append(("Nothing would end it with its supervisor", lambda: _end_with(supervisor)))
    who = f"{account.name}" if account is not None else "this user"
    steps.append(("", lambda: _look(plan)))
    steps.append((f"The working directory {plan.working_directory} cannot be entered by {who}", lambda: _go(plan)))
    steps.append(("Its resource limits cannot be set", lambda: _limit(plan)))
    for what, step in steps:
        try:
            step()
        except (OSError, ValueError) as error:
            why = getattr(error, "strerror", None) or error
            os.write(complain, (f"{what}: {why}." if what else str(why)).encode(errors="replace"))
            raise


def _look(plan: Plan) -> None:
    """Raise OSError with a sentence of its own where what is to be run is not there for this user."""
    missing = obstacle(plan)
    if missing is not None:
        raise OSError(missing)


def _be_ordinary() -> None:
    """Give up what a service may have been given and its jobs must not inherit: never to be killed when memory runs
    out, and to go before others at the processor."""
    score = Path("/proc/self/oom_score_adj")
    if int(score.read_text()) < 0:
        score.write_text("0")
    if os.getpriority(os.PRIO_PROCESS, 0) < 0:
        os.setpriority(os.PRIO_PROCESS, 0, 0)


def _go(plan: Plan) -> None:
    os.chdir(plan.working_directory)


def _become(account: Account) -> None:
    """Give up root for good: groups first, the user last."""
    if account.listed:
        os.initgroups(account.name, account.gid)
    else:
        os.setgroups([account.gid])
    os.setresgid(account.gid, account.gid, account.gid)
    os.setresuid(account.uid, account.uid, account.uid)


def _limit(plan: Plan) -> None:
    """Set the limits as submitted, as far as the supervisor's own allow."""
    for name, wanted in plan.limits.items():
        number = getattr(resource, f"RLIMIT_{name.upper()}", None)
        if number is None:
            continue  # known where it was submitted, and not here
        soft, hard = (resource.RLIM_INFINITY if value < 0 else value for value in wanted)
        try:
            resource.setrlimit(number, (soft, hard))
        except (ValueError, PermissionError):
            own = resource.getrlimit(number)[1]
            resource.setrlimit(number, (_lower(soft, own), _lower(hard, own)))


def _lower(one: int, other: int) -> int:
    """The lower of two limits."""
    limited = [limit for limit in (one, other) if limit != resource.RLIM_INFINITY]
    return min(limited) if limited else resource.RLIM_INFINITY
