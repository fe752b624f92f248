"""Plans how a job is run: arguments, environment, directory, user. Pure, except that `missing_path` looks at files."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path

from gpulease.cuda import index_mask
from gpulease_protocol.launchers import LAUNCHERS, choose_mask, strip_launcher_variables, strip_reserved_variables
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Job, Launcher, Mask, Noun
from gpulease_protocol.node_protocol import GangPlace, JobOrder
from gpulease_worker.jobs import launcher_argv
from gpulease_worker.jobs.job_settings import JobSettings
from gpulease_worker.jobs.user_accounts import UserAccount

INHERITED = re.compile(r"PATH|LANG|LANGUAGE|LC_\w+|TZ|LD_LIBRARY_PATH|CUDA_HOME|CUDA_PATH|\w+_proxy|\w+_PROXY")
"""Variables of the worker's environment that a job inherits unless it sets them. All others may hold the worker's
secrets, and would make a job depend on how the worker happened to be started."""
INHERITED_BY_SAME_USER = re.compile(r"HOME|USER|LOGNAME|SHELL|TMPDIR|XDG_\w+")
"""Further variables that a job inherits when it runs as the worker's own user."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchPlan(Noun):
    """Everything a supervisor needs to run a job: `order.json`."""

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
    """Stop it after this time; null for no limit."""
    starts_ranks: bool = False
    """True when the launcher starts the ranks; false when the process that is launched is rank 0 itself."""
    launcher: str = Launcher.PLAIN.value
    """Name of the launcher."""
    modules: tuple[str, ...] = ()
    """At least one of these must be importable in the interpreter; none is needed where it is empty."""
    script: str | None = None
    """Script that the interpreter must be able to read; null where the command names none."""
    account: UserAccount | None = None
    """The user it runs as; null for the supervisor's own."""
    umask: int | None = None
    """File mode creation mask, as in `JobSpec`."""
    limits: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Resource limits, as in `JobSpec`."""
    settings: JobSettings = field(default_factory=JobSettings)
    """What the worker's settings say."""
    indexed_gpus: tuple[str, ...] = ()
    """UUIDs of the GPUs that the mask must name by CUDA's indices, which CUDA is asked for just before the launch;
    empty where the mask in `environment` is final."""
    interpreter: str | None = None
    """The submitter's Python, in which CUDA is asked."""
    notify: str | None = None
    """URL or command that is told of the job's end, as in `JobSpec`."""
    job: Job | None = None
    """The job, for that; null where the daemon is of an older version."""
    fence_s: float | None = None
    """End it after so long without an answer of a daemon, as in `JobSpec`."""
    gang: GangPlace | None = None
    """This node's part of a job on several nodes; null for a job on this node alone."""
    gpus: tuple[str, ...] = ()
    """UUIDs of its GPUs here."""
    database_id: str | None = None
    """The daemon's database when it was ordered first, as in `DesiredState`."""

    @property
    def uid(self) -> int:
        """The user id of its processes."""
        return os.getuid() if self.account is None else self.account.uid

    @property
    def part(self) -> int | None:
        """Rank of this node in a job on several; None for a job on one."""
        return None if self.gang is None else self.gang.rank

    @property
    def cgroup_name(self) -> str:
        """Name of its cgroup: two nodes of a job can share a host."""
        return self.lease_id if self.gang is None else f"{self.lease_id}.{self.gang.rank}"

    @property
    def leased_port(self) -> int:
        """The port at which the nodes of the job meet."""
        return int(self.environment["MASTER_PORT"])


def plan_launch(
    order: JobOrder,
    *,
    own: Mapping[str, str],
    url: str,
    python: str,
    work: Path,
    logs: Path,
    account: UserAccount | None = None,
    settings: JobSettings | None = None,
    ca_file: str | None = None,
    interface: str | None = None,
) -> LaunchPlan:
    """How a job is run.

    Args:
        order: The daemon's order. Its command suits its launcher: `JobRequest` has checked that.
        own: Environment of the worker.
        url: The daemon, for scripts that talk to it; the job may name another.
        python: Interpreter for jobs that name none.
        work: Working directory for jobs that name none.
        logs: Directory of its log files, absolute.
        account: The user it runs as, where that is not the worker's own.
        settings: What the worker's settings say; the defaults where None.
        ca_file: Certificates to trust for https to the daemon; the system's where None.
        interface: The network interface through which the nodes of a job on several reach each other; None where that
            is not known.

    Raises:
        ValueError: the lease lacks something that the launcher needs.
    """
    spec = order.spec
    traits = LAUNCHERS[spec.launcher]
    interpreter = interpreter_of(order, python)
    needs_indices = not order.simulated and mask_of(order) is Mask.INDICES
    names_script = spec.launcher is not Launcher.PLAIN and not spec.command[0].startswith("-")
    return LaunchPlan(
        job_id=order.job_id,
        lease_id=order.lease_id,
        gpus=order.gpus,
        argv=launcher_argv.argv(order, interpreter, logs),
        environment=environment(order, own, url, account, ca_file) | gang_variables(order, interface),
        working_directory=spec.working_directory or str(work),
        timeout_s=spec.timeout_s,
        starts_ranks=traits.starts_ranks,
        launcher=spec.launcher.value,
        modules=traits.modules,
        script=spec.command[0] if names_script else None,
        account=account,
        umask=spec.umask,
        limits=spec.limits,
        settings=settings or JobSettings(),
        indexed_gpus=order.gpus if needs_indices else (),
        interpreter=interpreter,
        notify=spec.notify,
        job=order.job,
        fence_s=spec.fence_s,
        gang=order.gang,
    )


def mask_of(order: JobOrder) -> Mask:
    """How a job's mask names its GPUs: as the job says, else as its launcher and command need it."""
    return order.spec.mask or choose_mask(order.spec.launcher, order.spec.command)


def interpreter_of(order: JobOrder, python: str) -> str:
    """The submitter's Python: the one the job names, else that of its virtual environment, else `python`."""
    virtual = order.spec.environment.get("VIRTUAL_ENV")
    return order.spec.interpreter or (f"{virtual}/bin/python" if virtual else python)


def environment(
    order: JobOrder,
    own: Mapping[str, str],
    url: str,
    account: UserAccount | None = None,
    ca_file: str | None = None,
) -> dict[str, str]:
    """A few of the worker's variables, overridden by the job's, overridden by the lease's.

    Variables of the job that bind it to another launch, lease or set of GPUs are left out.
    """
    inherited = {name: value for name, value in strip_launcher_variables(own).items() if INHERITED.fullmatch(name)}
    login = (
        {name: value for name, value in own.items() if INHERITED_BY_SAME_USER.fullmatch(name)}
        if account is None
        else account.variables
    )
    return (
        {"GPULEASE_LEASE_ID": order.lease_id}  # at the beginning, see `lease_claims`
        | inherited
        | login
        | {"GPULEASE_URL": url, "PYTHONUNBUFFERED": "1"}
        | ({} if ca_file is None else {"GPULEASE_CACERT": ca_file})
        | strip_reserved_variables(order.spec.environment)
        | order.env
        | _simulated_mask(order)
        | {"GPULEASE_LEASE_ID": order.lease_id, "GPULEASE_JOB_ID": order.job_id}
    )


def gang_variables(order: JobOrder, interface: str | None) -> dict[str, str]:
    """What a job on several nodes finds in its environment on one of them, beside the lease's variables.

    gloo listens on the address that the host's own name resolves to, which is 127.0.1.1 on many hosts, and NCCL on an
    interface of its own choice, which may be a bridge of containers. So both are given the interface that leads to the
    other nodes, unless the job names one itself: that which has the node's address, or else is on the way to the first
    node. NCCL takes a name as a prefix without "=".
    """
    place = order.gang
    if place is None:
        return {}
    interface = order.env.get("GLOO_SOCKET_IFNAME") or interface
    sockets = {"GLOO_SOCKET_IFNAME": interface, "NCCL_SOCKET_IFNAME": f"={interface}"} if interface else {}
    chosen = {name: order.spec.environment.get(name, value) for name, value in sockets.items()}
    return {"NODE_RANK": str(place.rank)} | chosen


def _simulated_mask(order: JobOrder) -> dict[str, str]:
    """A mask of indices for simulated GPUs, which CUDA does not know: their positions in the daemon's list."""
    if not order.simulated or not order.indices or mask_of(order) is not Mask.INDICES:
        return {}
    return index_mask_variables(order.spec.launcher.value, order.indices)


def index_mask_variables(launcher: str, indices: Sequence[int]) -> dict[str, str]:
    """The variables that make a launcher use the devices with these indices.

    deepspeed counts the devices itself, and without CUDA it counts by LOCAL_SIZE, which it sets again for its
    ranks; with CUDA it ignores that.
    """
    device_count = {"LOCAL_SIZE": str(max(indices) + 1)} if launcher == Launcher.DEEPSPEED.value else {}
    return index_mask.mask_variables(indices) | device_count


def missing_path(plan: LaunchPlan) -> str | None:
    """Which directory, program or script of a job is missing on this node, as a sentence; None if none is.

    Called in a process of the job, as its user (`spawn`): it sees only what that user may see, and if one of the user's
    file systems hangs, the worker does not.
    """
    directory = Path(plan.working_directory)
    if not _is(Path.is_dir, directory, if_hidden=True):  # if this user may not look at it, entering it fails
        return f"The working directory {directory} does not exist on this node."
    search = plan.environment.get("PATH", os.defpath)
    program = plan.argv[0]
    if not _is_program(program, directory, search):
        what = "interpreter" if program == plan.interpreter else "program"
        where = f"in {directory}" if "/" in program else f"on PATH ({search})"
        return f"The {what} {program!r} was not found {where}, or is not executable."
    if plan.script is not None and not _is(Path.is_file, directory / plan.script, if_hidden=True):
        return f"The script {plan.script!r} was not found in {directory}."
    return None


def _is_program(name: str, directory: Path, search: str) -> bool:
    if "/" not in name:
        return shutil.which(name, path=search) is not None
    path = directory / name
    return _is(Path.is_file, path, if_hidden=False) and os.access(path, os.X_OK)


def _is(kind: Callable[[Path], bool], path: Path, *, if_hidden: bool) -> bool:
    """Whether a path is of a kind; `if_hidden` where this user may not look."""
    try:
        return kind(path)
    except OSError:
        return if_hidden
