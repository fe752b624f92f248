"""A cgroup for each job, where this node allows the worker one.

No process of a job escapes its cgroup (version 2): whatever it does to its parent, session or environment, it stays in,
and `cgroup.kill` (Linux 5.14) ends all of them at once, faster than they can fork. This needs a cgroup2 mount in which
this process may make directories: root mostly has one, and so does a service with `Delegate=yes`. Elsewhere the child
subreaper and the marker suffice to end a job.

Limits of a whole job (`pids.max`, `memory.max`) need more: the controllers must be enabled in the cgroup in which the
jobs' are made, and the kernel refuses that, or has no use for it, while processes are in that cgroup itself. So the
worker belongs one level below it, into LEAF, where its supervisors are then, too. systemd puts it there from version
254 on (`DelegateSubgroup=`). Elsewhere the worker moves itself, if it is alone in its cgroup; but not out of the cgroup
of a service, because systemd could not start the worker there again while a job runs. Where a job of another user
has no `pids.max`, RLIMIT_NPROC bounds it as well as it can (`spawn`): it counts all processes of that user.
"""

from __future__ import annotations

import errno
import os
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

from gpulease_protocol.host.process_id import ProcessId
from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_worker.processes.cgroup_directory import own_directory

SWITCH = "GPULEASE_CGROUPS"
"""Environment variable: with `off`, jobs run without cgroups."""
LEAF = "gpulease-worker"
"""The cgroup of worker and supervisors, beside those of the jobs; also in deploy/systemd/gpulease-worker.service."""
REMOVE_S = 2.0
"""How long the removal of an empty cgroup may fail, until its last process is reaped."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The cgroup of one job."""

    path: Path
    """Its directory."""
    limited: bool = False
    """True where it limits the job: then no process of the job may run outside it."""

    def members(self) -> set[ProcessId]:
        """Every living process in it and in the cgroups below it."""
        found: set[ProcessId] = set()
        for directory in self._tree():
            with suppress(OSError):  # removed in between
                pids = (directory / "cgroup.procs").read_text().split()
                found |= {process for pid in pids if (process := ProcessId.of(int(pid)))}
        return found

    def has_limit(self, file: str) -> bool:
        """True where this limit, such as `pids.max`, is set."""
        try:
            return (self.path / file).read_text().strip() != "max"
        except OSError:
            return False

    def enter(self) -> None:
        """Move the calling process into it. Raises OSError."""
        (self.path / "cgroup.procs").write_text("0")

    def kill(self) -> None:
        """SIGKILL every process in it, at once."""
        with suppress(OSError):  # it is gone, or the kernel is too old; single signals follow
            (self.path / "cgroup.kill").write_text("1")

    def remove(self) -> bool:
        """Remove it with the cgroups below it. False if a process is still in it."""
        until_s = time.monotonic() + REMOVE_S
        while self.path.exists():
            for directory in reversed(self._tree()):
                with suppress(OSError):
                    directory.rmdir()
            if not self.path.exists():
                break
            if time.monotonic() > until_s:
                return False
            time.sleep(0.02)
        return True

    def _tree(self) -> list[Path]:
        """Its directory and those of the cgroups below it, parents first."""
        return [Path(place) for place, _, _ in os.walk(self.path)]


def create(name: str, limits: Mapping[str, int] | None = None) -> Cgroup | None:
    """Create the cgroup of a job, with those of the limits that the kernel allows, such as `pids.max`; None where that
    is not possible."""
    parent = directory_of_jobs()
    if parent is None:
        return None
    path = parent / name
    try:
        path.mkdir(mode=0o755, exist_ok=True)
    except OSError:
        return None
    if not (path / "cgroup.kill").exists():
        with suppress(OSError):
            path.rmdir()
        return None
    limited = False
    for file, value in (limits or {}).items() if _has_no_process_of_ours(parent) else ():
        with suppress(OSError):  # `prepare` has said why
            (path / file).write_text(str(value))
            limited = True
    return Cgroup(path, limited)


def prepare(limits: Mapping[str, int]) -> list[str]:
    """Enable the controllers for these limits of jobs. Returns sentences that say which limits have no effect, and why.

    Called once by the worker, before it starts any process.
    """
    parent = directory_of_jobs()
    problems = []
    for file, value in limits.items():
        try:
            if parent is None:
                raise OSError("this worker cannot have cgroups (version 2)")
            _enable(file.partition(".")[0], parent)
        except OSError as error:
            problems.append(f"{file} of {value} is not set for jobs: {error.strerror or error}")
    return problems


def directory_of_jobs() -> Path | None:
    """Directory in which the jobs' cgroups are made: this process's own, or the one above LEAF; None if there is none
    or SWITCH is off."""
    own = None if os.environ.get(SWITCH) == "off" else own_directory()
    return own.parent if own is not None and own.name == LEAF else own


def _enable(controller: str, directory: Path) -> None:
    """Make a controller available in the cgroups below a directory. Raises OSError."""
    if controller not in (directory / "cgroup.controllers").read_text().split():
        raise OSError(f"the controller {controller} is not available in {directory}")
    if not _has_no_process_of_ours(directory):
        _move_to_leaf(directory)
    switch = directory / "cgroup.subtree_control"
    if controller not in switch.read_text().split():
        try:
            switch.write_text(f"+{controller}")
        except OSError as error:
            if error.errno == errno.EBUSY:
                raise OSError(f"there are other processes in {directory}") from error
            raise


def _has_no_process_of_ours(directory: Path) -> bool:
    """Whether the cgroups below a directory may be limited. The root of the hierarchy, which has no type, may also have
    processes."""
    return own_directory() != directory or not (directory / "cgroup.type").exists()


def _move_to_leaf(directory: Path) -> None:
    """Move this process from a directory into LEAF below it, so that the directory has none. Raises OSError."""
    if directory.suffix == ".service":
        raise OSError(f"systemd has started the worker in {directory} itself; from version 254 on it does not")
    if (directory / "cgroup.procs").read_text().split() != [str(os.getpid())]:
        raise OSError(f"there are other processes in {directory}")
    leaf = directory / LEAF
    leaf.mkdir(mode=0o755, exist_ok=True)
    (leaf / "cgroup.procs").write_text("0")
