"""What is run for a job: arguments, environment, directory, user. Pure, but for `obstacle`, which looks at files."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from gpulease import masks
from gpulease.exchange import JobOrder
from gpulease.launchers import asked_for, mask_for, objection, scrubbed
from gpulease.model import Launcher, Mask, Noun
from gpulease_worker import launcher_argv
from gpulease_worker.accounts import Account

CARRIED = re.compile(r"PATH|LANG|LANGUAGE|LC_\w+|TZ|LD_LIBRARY_PATH|CUDA_HOME|CUDA_PATH|\w+_proxy|\w+_PROXY")
"""What of the worker's environment a job gets that does not say otherwise. The rest may hold the worker's secrets, and
would make a job depend on how somebody once started the worker."""
CARRIED_TO_ITSELF = re.compile(r"HOME|USER|LOGNAME|SHELL|TMPDIR|XDG_\w+")
"""What it gets besides when it runs as the worker's own user."""


LOG_BYTES = 256 * 2**20
"""How much of a log file stays on disk where the worker was not told otherwise."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(Noun):
    """Everything that a supervisor needs to know to run a job."""

    job_id: str
    """The job."""
    lease_id: str
    """Its lease: the marker of all its processes."""
    argv: tuple[str, ...]
    """The launcher's argument list."""
    environment: dict[str, str]
    """The launcher's whole environment."""
    working_directory: str
    """Where it runs."""
    timeout_s: float | None = None
    """End it after so long; null for no limit."""
    alone: bool = True
    """True when what is launched is rank 0 itself; false when the launcher starts the ranks."""
    launcher: str = Launcher.PLAIN.value
    """What starts the ranks, by name."""
    modules: tuple[str, ...] = ()
    """One of these must be importable in the interpreter; any will do when empty."""
    script: str | None = None
    """Script that the interpreter must be able to read; null where none is named."""
    account: Account | None = None
    """The user as whom it runs; null for the supervisor's own."""
    umask: int | None = None
    """File mode creation mask; the supervisor's when null."""
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Resource limits, as in `JobSpec`."""
    log_bytes: int = LOG_BYTES
    """How much of each of its log files stays on disk."""
    numbered: tuple[str, ...] = ()
    """UUIDs of the GPUs that the mask must name by CUDA's numbers, which CUDA is asked for just before the launch;
    empty where the mask in `environment` is what the job gets."""
    interpreter: str | None = None
    """The submitter's Python, which asks CUDA."""


def plan(
    order: JobOrder,
    *,
    own: Mapping[str, str],
    url: str,
    python: str,
    work: Path,
    logs: Path,
    account: Account | None = None,
    log_bytes: int = LOG_BYTES,
) -> Plan:
    """How a job is run.

    Args:
        order: What the daemon asks for.
        own: Environment of the worker.
        url: The daemon, for scripts that ask it something; the job may name another.
        python: Interpreter where the job names none.
        work: Where it runs where the job says nothing.
        logs: Directory of its log files, absolute.
        account: The user as whom it runs, where that is not the worker's own.
        log_bytes: How much of each of its log files stays on disk.

    Raises:
        ValueError: the launcher cannot run such a command, or the lease lacks what it needs.
    """
    spec = order.spec
    wrong = objection(spec.launcher, spec.command, spec.max_restarts)
    if wrong is not None:
        raise ValueError(wrong)
    interpreter = interpreter_of(order, python)
    numbered = order.gpus if not order.simulated and mask_of(order) is Mask.INDICES else ()
    named = spec.launcher is not Launcher.PLAIN and not spec.command[0].startswith("-")
    return Plan(
        job_id=order.job_id,
        lease_id=order.lease_id,
        argv=launcher_argv.argv(order, interpreter, logs),
        environment=environment(order, own, url, account),
        working_directory=spec.working_directory or str(work),
        timeout_s=spec.timeout_s,
        alone=spec.launcher in launcher_argv.ALONE,
        launcher=spec.launcher.value,
        modules=launcher_argv.MODULES[spec.launcher],
        script=spec.command[0] if named else None,
        account=account,
        umask=spec.umask,
        limits=spec.limits,
        log_bytes=log_bytes,
        numbered=numbered,
        interpreter=interpreter,
    )


def mask_of(order: JobOrder) -> Mask:
    """How the mask of a job names its GPUs: as it was asked, else as its launcher and command need it."""
    return order.spec.mask or mask_for(order.spec.launcher, order.spec.command)


def interpreter_of(order: JobOrder, python: str) -> str:
    """The submitter's Python: the one he names, else that of his virtual environment, else `python`."""
    virtual = order.spec.environment.get("VIRTUAL_ENV")
    return order.spec.interpreter or (f"{virtual}/bin/python" if virtual else python)


def environment(order: JobOrder, own: Mapping[str, str], url: str, account: Account | None = None) -> dict[str, str]:
    """A little of the worker's environment, then the job's, and the lease's over all.

    Of the job's variables those that bind it to another launch, lease or set of GPUs are left out.
    """
    kept = {name: value for name, value in scrubbed(own).items() if CARRIED.fullmatch(name)}
    login = (
        {name: value for name, value in own.items() if CARRIED_TO_ITSELF.fullmatch(name)}
        if account is None
        else account.variables
    )
    return (
        kept
        | login
        | {"GPULEASE_URL": url, "PYTHONUNBUFFERED": "1"}
        | asked_for(order.spec.environment)
        | order.env
        | _labels(order)
        | {"GPULEASE_LEASE_ID": order.lease_id, "GPULEASE_JOB_ID": order.job_id}
    )


def _labels(order: JobOrder) -> dict[str, str]:
    """A mask of indices for simulated GPUs, of which CUDA knows nothing: their places in the daemon's list."""
    if not order.simulated or not order.indices or mask_of(order) is not Mask.INDICES:
        return {}
    return by_index(order.spec.launcher.value, order.indices)


def by_index(launcher: str, numbers: Sequence[int]) -> dict[str, str]:
    """What has a launcher take these devices, by number.

    deepspeed counts the devices itself, and without CUDA it counts by LOCAL_SIZE, which its ranks get anew; with CUDA
    it does not look at that.
    """
    counted = {"LOCAL_SIZE": str(max(numbers) + 1)} if launcher == Launcher.DEEPSPEED.value else {}
    return masks.variables(numbers) | counted


def obstacle(plan: Plan) -> str | None:
    """Why the job cannot start on this node, as a sentence; None when nothing is seen to be in its way.

    Called as the job's user, in a process of his (`entry`): what he may not see is not seen for him, and where he has
    a file system that hangs, the worker does not.
    """
    directory = Path(plan.working_directory)
    if not _is(Path.is_dir, directory, unseen=True):  # one that may not be looked at is refused when it is entered
        return f"The working directory {directory} does not exist on this node."
    search = plan.environment.get("PATH", os.defpath)
    program = plan.argv[0]
    if not _program(program, directory, search):
        what = "interpreter" if program == plan.interpreter else "program"
        where = f"in {directory}" if "/" in program else f"on PATH ({search})"
        return f"The {what} {program!r} was not found {where}, or may not be executed."
    if plan.script is not None and not _is(Path.is_file, directory / plan.script, unseen=True):
        return f"The script {plan.script!r} was not found in {directory}."
    return None


def _program(name: str, directory: Path, search: str) -> bool:
    if "/" not in name:
        return shutil.which(name, path=search) is not None
    path = directory / name
    return _is(Path.is_file, path, unseen=False) and os.access(path, os.X_OK)


def _is(kind: Callable[[Path], bool], path: Path, *, unseen: bool) -> bool:
    """Whether a path is of a kind; `unseen` where this user may not look."""
    try:
        return kind(path)
    except OSError:
        return unseen
