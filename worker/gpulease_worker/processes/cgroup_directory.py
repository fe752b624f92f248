"""Finds the directories of cgroups (version 2), and the leases that processes work under by their cgroup.

A cgroup that is named after a lease proves that its processes are the lease's, if root or the worker's own user has
made it: the name may be any, and a user can make directories in a subtree that is delegated to them. What they make
there is their own.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection
from pathlib import Path, PurePosixPath

MOUNTS = Path("/proc/self/mountinfo")
OWN = Path("/proc/self/cgroup")


def own_directory(mounts: str | None = None, own: str | None = None) -> Path | None:
    """Directory of this process's own cgroup; None where there is none. See cgroups(7), proc(5)."""
    try:
        path = path_in(OWN.read_text() if own is None else own)
    except OSError:
        return None
    return None if path is None else directory_of(path, mounts)


def path_in(cgroups: str) -> str | None:
    """The path of the version 2 cgroup in the content of a /proc/PID/cgroup; None if there is none."""
    return next((line[3:] for line in cgroups.splitlines() if line.startswith("0::")), None)


def directory_of(path: str, mounts: str | None = None) -> Path | None:
    """Directory of the cgroup with this path in the hierarchy; None where this process sees none."""
    if path.startswith("/.."):
        return None
    try:
        mounts = MOUNTS.read_text() if mounts is None else mounts
    except OSError:
        return None
    for line in mounts.splitlines():
        fields, _, kind = line.partition(" - ")
        if kind.startswith("cgroup2 "):
            root, place = fields.split()[3:5]
            if root == "/" or (path + "/").startswith(root + "/"):
                inner = path if root == "/" else path[len(root) :]
                return Path(place.encode().decode("unicode_escape")) / inner.lstrip("/")
    return None


def leases_of(pid: int, leases: Collection[str]) -> frozenset[str]:
    """Those of these leases that a cgroup of the process proves."""
    if not leases:
        return frozenset()
    try:
        path = path_in(Path(f"/proc/{pid}/cgroup").read_text(errors="replace"))
    except OSError:
        return frozenset()
    return frozenset() if path is None else leases_in(path, leases)


def leases_in(path: str, leases: Collection[str], mounts: str | None = None) -> frozenset[str]:
    """Those of these leases that are whole words in the name of a directory on this path that no user can make."""
    named = [lease_id for lease_id in leases if lease_id and lease_id in path]
    places = [PurePosixPath(path), *PurePosixPath(path).parents] if named else []
    return frozenset(
        lease_id
        for lease_id in named
        for place in places
        if _has_word(place.name, lease_id) and _is_trusted(directory_of(str(place), mounts))
    )


def _has_word(name: str, word: str) -> bool:
    return re.search(rf"(?<![A-Za-z0-9]){re.escape(word)}(?![A-Za-z0-9])", name) is not None


def _is_trusted(directory: Path | None) -> bool:
    try:
        return directory is not None and directory.stat().st_uid in (0, os.geteuid())
    except OSError:
        return False
