"""The user as whom a job runs.

A worker that is root runs each job as the user who submitted it; any other runs jobs of its own user and refuses the
rest. That user is known by number, because the daemon learns nothing else from the kernel; the names are this node's.
"""

from __future__ import annotations

import os
import pwd
from dataclasses import dataclass

from gpulease.model import Noun

NO_GROUP = 65534
"""The group that owns nothing, as the kernel's overflowgid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Account(Noun):
    """One user of this node."""

    uid: int
    """User id."""
    gid: int
    """Primary group."""
    name: str
    """Login name, or the number where there is none."""
    home: str = "/"
    """Home directory."""
    shell: str = "/bin/sh"
    """Login shell."""
    listed: bool = True
    """False where the node's user database does not know the number: it then has no further groups."""

    @property
    def variables(self) -> dict[str, str]:
        """What a login would set."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}


def account(uid: int, gid: int | None = None) -> Account:
    """The user with this number. `gid` counts where the node does not know him; where it is None he gets the group that
    owns nothing, since a group with his number would be somebody else's."""
    try:
        known = pwd.getpwuid(uid)
    except KeyError:
        return Account(uid=uid, gid=NO_GROUP if gid is None else gid, name=str(uid), listed=False)
    return Account(uid=uid, gid=known.pw_gid, name=known.pw_name, home=known.pw_dir, shell=known.pw_shell or "/bin/sh")


def refusal(uid: int | None, own: int) -> str | None:
    """Why a worker that runs as user `own` does not run a job of user `uid`, as a sentence; None when it does."""
    if uid is None:
        return (
            "The daemon could not tell which user submitted it, so there is nobody to run it as."
            " Submit it through the daemon's Unix socket or 127.0.0.1."
        )
    if own in (0, uid):
        return None
    return (
        f"It was submitted by {account(uid).name}, and the worker of this node runs as {account(own).name}."
        " Only a worker that is root runs jobs of other users."
    )


def own_uid() -> int:
    """The user as whom this process acts."""
    return os.geteuid()
