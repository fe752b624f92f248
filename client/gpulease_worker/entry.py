"""The last steps from a supervisor to a job: who it runs as, where, and with which limits; and what it lacks.

What can go wrong here goes wrong as the job's user, not as the supervisor's: a directory that only root may enter is
not entered for somebody else, and a file system of his that hangs holds up his own job alone.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from gpulease_worker.accounts import Account
from gpulease_worker.cgroup import Cgroup
from gpulease_worker.launch import Plan, obstacle

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


def launch(plan: Plan, log: int, group: Cgroup | None) -> subprocess.Popen[bytes]:
    """Start a plan's launcher, its output going to a descriptor. Raises CannotStart."""
    return _start(plan, plan.argv, log, group)


def lack(plan: Plan, group: Cgroup | None) -> str | None:
    """What the job's own interpreter lacks for it, as a sentence; None when nothing. Takes at most ASK_S.

    Raises CannotStart when the interpreter cannot be started.
    """
    if not plan.modules and plan.script is None:
        return None
    python = plan.argv[0]
    question = (python, "-c", ASK, plan.script or "", *plan.modules)
    reading, writing = os.pipe()
    try:
        asked = _start(plan, question, writing, group)
        os.close(writing)
        writing = -1
        try:
            code = asked.wait(ASK_S)
        except subprocess.TimeoutExpired:
            return f"The interpreter {python} did not answer within {ASK_S:g} s."
        finally:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(asked.pid, signal.SIGKILL)
            asked.wait()
        os.set_blocking(reading, False)
        with suppress(BlockingIOError):
            return None if code == 0 else _sentence(plan, os.read(reading, 4096).decode(errors="replace").strip())
        return f"The interpreter {python} does not work: it ended with status {code}."
    finally:
        os.close(reading)
        if writing >= 0:
            os.close(writing)


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


def _start(plan: Plan, argv: tuple[str, ...], output: int, group: Cgroup | None) -> subprocess.Popen[bytes]:
    reading, writing = os.pipe()
    try:
        return subprocess.Popen(
            argv,
            env=plan.environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            # The supervisor has one thread, so it is safe to run Python between fork and exec.
            preexec_fn=lambda: _enter(plan, group, writing),  # noqa: PLW1509
        )
    except subprocess.SubprocessError as error:
        os.set_blocking(reading, False)
        with suppress(BlockingIOError):
            raise CannotStart(os.read(reading, 4096).decode(errors="replace")) from None
        raise CannotStart(f"The program {argv[0]!r} could not be started: {error}") from error
    except OSError as error:
        raise CannotStart(f"The program {argv[0]!r} could not be started: {error.strerror}.") from error
    finally:
        os.close(reading)
        os.close(writing)


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
