"""A cgroup for each job, where this node allows the worker one.

No process of a job escapes its cgroup (version 2): whatever it does to its parent, session or environment, it stays in,
and `cgroup.kill` (Linux 5.14) ends all of them at once, faster than they can fork. This needs a cgroup2 mount in which
this process may make directories: root mostly has one, and so does a service with `Delegate=yes`. Elsewhere the child
subreaper and the marker suffice.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from gpulease_protocol.host.process_id import ProcessId

MOUNTS = Path("/proc/self/mountinfo")
OWN = Path("/proc/self/cgroup")
SWITCH = "GPULEASE_CGROUPS"
"""Environment variable: with `off`, jobs run without cgroups."""
REMOVE_S = 2.0
"""How long the removal of an empty cgroup may fail, until its last process is reaped."""


@dataclass(frozen=True, slots=True)
class Cgroup:
    """The cgroup of one job."""

    path: Path
    """Its directory."""

    def members(self) -> set[ProcessId]:
        """Every living process in it and in the cgroups below it."""
        found: set[ProcessId] = set()
        for directory in self._tree():
            with suppress(OSError):  # removed in between
                pids = (directory / "cgroup.procs").read_text().split()
                found |= {process for pid in pids if (process := ProcessId.of(int(pid)))}
        return found

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


def create(name: str) -> Cgroup | None:
    """Create a cgroup below this process's own; None where that is not possible."""
    parent = own_directory()
    if parent is None or os.environ.get(SWITCH) == "off":
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
    return Cgroup(path)


def own_directory(mounts: str | None = None, own: str | None = None) -> Path | None:
    """Directory of this process's own cgroup (version 2); None where there is none. See cgroups(7), proc(5)."""
    try:
        mounts = MOUNTS.read_text() if mounts is None else mounts
        own = OWN.read_text() if own is None else own
    except OSError:
        return None
    path = next((line[3:] for line in own.splitlines() if line.startswith("0::")), None)
    if path is None or path.startswith("/.."):
        return None
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.split()[:1] == ["cgroup2"]:
            root, place = fields.split()[3:5]
            if root == "/" or (path + "/").startswith(root + "/"):
                inner = path if root == "/" else path[len(root) :]
                return Path(place.encode().decode("unicode_escape")) / inner.lstrip("/")
    return None
