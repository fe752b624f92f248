"""The user that a job runs as.

A worker that runs as root runs each job as the user who submitted it; any other worker runs jobs of its own user and
refuses the rest. Users are identified by user id, the only thing that the kernel tells the daemon; names are this
node's.
"""

from __future__ import annotations

import os
import pwd

from gpulease_protocol.lazy_dataclass import dataclass
from gpulease_protocol.model import Noun

NO_GROUP = 65534
"""The group that owns nothing, as the kernel's overflowgid."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UserAccount(Noun):
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
    """False where the node's user database does not have this user id: the user then has no supplementary groups."""

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables that a login would set."""
        return {"HOME": self.home, "USER": self.name, "LOGNAME": self.name, "SHELL": self.shell}


def account_of(uid: int, gid: int | None = None) -> UserAccount:
    """The user with this id. Where the node does not know the id, the group is `gid`, or where that is None the group
    that owns nothing: a group with the same number would be another user's."""
    try:
        entry = pwd.getpwuid(uid)
    except KeyError:
        return UserAccount(uid=uid, gid=NO_GROUP if gid is None else gid, name=str(uid), listed=False)
    return UserAccount(
        uid=uid, gid=entry.pw_gid, name=entry.pw_name, home=entry.pw_dir, shell=entry.pw_shell or "/bin/sh"
    )


def reason_to_refuse(uid: int | None, own: int) -> str | None:
    """Why a worker that runs as user `own` refuses a job of user `uid`, as a sentence; None when it does not."""
    if uid is None:
        return (
            "The daemon's host has no user of the name under which it was submitted, so there is no user id to run it"
            " as. Create that user there, with the same id as on this node, and then a new token."
        )
    if own in (0, uid):
        return None
    return (
        f"It was submitted by {account_of(uid).name}, and the worker of this node runs as {account_of(own).name}."
        " Only a worker that runs as root runs jobs of other users."
    )


def own_uid() -> int:
    """The effective user id of this process."""
    return os.geteuid()
